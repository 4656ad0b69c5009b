"""The command: what it refuses, before anything large is imported."""

import runpy
import socket
import sys

import pytest

from tests.conftest import REPOSITORY, run_here, run_python

SERVE = 'diffusion.serve'
WITHOUT_GRADIO = """
import runpy, sys
sys.modules['gradio'] = None
sys.argv = ['diffusion.serve', sys.argv[1]]
try:
    runpy.run_module('diffusion.serve', run_name='__main__')
finally:
    assert not {'torch', 'diffusers', 'transformers'} & set(sys.modules)
"""


def test_without_the_extra_it_says_how_to_install_it(base):
    said = run_python('-c', WITHOUT_GRADIO, base, code=2).stderr
    assert said == "the page needs Gradio, which is not installed: uv pip install -e '.[serve]'\n"


@pytest.mark.parametrize('page', ['README.md', 'docs/comparison.md', 'docs/serve.md'])
def test_it_is_named_with_its_extra_where_one_looks_for_it(page):
    text = (REPOSITORY / page).read_text()
    assert 'diffusion.serve' in text or '(serve.md)' in text
    assert "uv pip install -e '.[serve]'" in text


def test_a_folder_without_a_model_and_a_third_model_are_refused(base, tmp_path):
    assert f'{tmp_path}: no model_index.json' in run_here(SERVE, base, tmp_path, code=2).stderr
    assert '3 models; give one, or two' in run_here(SERVE, base, base, base, code=2).stderr


def test_a_taken_port_is_refused_before_models_are_loaded(base, monkeypatch):
    pytest.importorskip('gradio')
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = taken.getsockname()[1]
        said = run_here(SERVE, base, '--port', port, code=2).stderr
    assert said == f'127.0.0.1:{port} cannot be listened at: Address already in use; name another --port, or 0 for a free one\n'


@pytest.mark.parametrize(('host', 'warned'), [('127.0.0.1', False), ('0.0.0.0', True)])
def test_a_server_that_others_reach_warns(host, warned, base, monkeypatch, capsys):
    pytest.importorskip('gradio')
    from diffusion.serving import server

    served = []
    monkeypatch.setattr(server, 'serve', lambda *arguments: served.append(arguments))
    monkeypatch.setattr(sys, 'argv', [SERVE, str(base), '--host', host, '--port', '0', '--max-steps', '7'])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(SERVE, run_name='__main__')
    assert ended.value.code == 0
    assert ('no password' in capsys.readouterr().err) == warned
    assert served[0][4] == 7
