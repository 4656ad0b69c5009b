"""The page in a real browser, served by a real process: what a visitor types, presses and sees."""

import os
import re
import signal
import subprocess
import sys
import time
from io import BytesIO

import pytest
from PIL import Image

from tests.conftest import REPOSITORY, run_here
from tests.pages import commands, words_of
from tests.serving.browser import CHROMIUM, Browser, wait_for

pytest.importorskip('gradio', reason="needs Gradio: uv pip install -e '.[serve]'")
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason='needs a Chromium'), pytest.mark.timeout(180)]
PROMPT = 'a large red circle at the left'
(_, ONE_MODEL), (TWO_MODELS,), (GENERATE,) = commands('docs/serve.md')
# Imported by every Python process with this folder on its path: writes down whom it calls.
WATCHED = """
import os, sys
def hook(event, arguments):
    if event in ('socket.connect', 'socket.sendto', 'socket.getaddrinfo', 'socket.gethostbyname'):
        with open(os.environ['CALLS'], 'a') as file:
            print(event, arguments[1] if event in ('socket.connect', 'socket.sendto') else arguments[0], file=file)
sys.addaudithook(hook)
"""


class Served:
    """A process of a command of docs/serve.md, from a cold start."""

    def __init__(self, folder, line, *models):
        (folder / 'hook').mkdir()
        (folder / 'hook/sitecustomize.py').write_text(WATCHED)
        (folder / 'tmp').mkdir()
        self.calls, self.log, self.temporary = folder / 'calls', folder / 'log', folder / 'tmp'
        environment = {
            **os.environ, 'PYTHONPATH': f'{folder}/hook:{REPOSITORY}', 'CALLS': str(self.calls), 'TMPDIR': str(self.temporary), 'PYTHONUNBUFFERED': '1'
        }  # fmt: skip
        environment.pop('HF_HUB_OFFLINE')
        command = [sys.executable, *with_models(line, *models), '--max-steps', '1000', '--port', '0']
        with self.log.open('w') as log:
            self.process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.url = wait_for(self._listens, 120, 'the server')

    def _listens(self):
        assert self.process.poll() is None, self.log.read_text()
        found = re.search(r'^open (http://\S+) in a browser; Ctrl-C ends$', self.log.read_text(), re.MULTILINE)
        return found and found[1]

    def end(self, number):
        self.process.send_signal(number)
        return self.process.wait(30)


def with_models(line, *models):
    """The words of a page's command after `python`, with other models."""
    left = iter(map(str, models))
    return [next(left) if word.startswith('models/') else word for word in words_of(line)[1:]]


@pytest.fixture(scope='module')
def served(base, base_xl, tmp_path_factory):
    server = Served(tmp_path_factory.mktemp('served'), TWO_MODELS, base, base_xl)
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp('browser')) as browser:
        yield browser


@pytest.fixture
def page(browser, served):
    open_page(browser, served)
    return browser


def open_page(browser, served):
    browser.look(served.url)
    browser.until("!!document.querySelector('#draw')")
    time.sleep(1)  # its handlers come a moment after its fields


def ask(page, prompt=PROMPT, **numbers):
    page.fill('#prompt textarea', prompt)
    for name, value in numbers.items():
        page.fill(f'#{name} input[type=number]', str(value))
    page.click('#draw')


def status(page):
    return page.script("document.querySelector('#status .status').innerText")


def drawing_is_over(page):
    page.until("!document.querySelector('#draw').disabled && document.querySelector('#stop').disabled")


def shown(page, gallery):
    """The files of the images in a gallery."""
    sources = f"Array.from(document.querySelectorAll('#gallery{gallery} .grid-container img'))"
    page.until(f'{sources}.every(i => i.complete && i.naturalWidth > 0)')
    return [page.fetched(address) for address in page.script(f'{sources}.map(i => i.src)')]


def test_the_images_are_those_of_generate_and_nothing_comes_from_elsewhere(page, served, base, base_xl, tmp_path):
    ask(page, images=3, seed=11, guidance=2.5, steps=4)
    page.until("document.querySelectorAll('#gallery1 .grid-container img').length == 3")
    drawing_is_over(page)
    assert re.fullmatch(rf'{base.name}: 3 images in [\d.]+ s \([\d.]+ s an image\)\.\s+{base_xl.name}: 3 images in .*', status(page).strip())
    options = [*('--prompt', PROMPT) * 3, '--seed', 11, '--guidance', 2.5, '--steps', 4]
    for gallery, model in enumerate((base, base_xl)):
        run_here('diffusion.generate', model, tmp_path / model.name, *options)
        ours = shown(page, gallery)
        assert ours == [path.read_bytes() for path in sorted((tmp_path / model.name).glob('0*.png'))]
        assert Image.open(BytesIO(ours[1])).info == {
            'prompt': PROMPT,
            'seed': '12',
            'guidance': '2.5',
            'steps': '4',
            'precision': 'fp32',
            'model': model.name,
        }
    assert len(page.requested) > 20
    assert [url for url in page.requested if not url.startswith((served.url + '/', 'data:', 'blob:'))] == []
    assert page.complaints == []
    calls = served.calls.read_text() if served.calls.exists() else ''
    assert [line for line in calls.splitlines() if '127.0.0.1' not in line and 'localhost' not in line] == []


def test_the_command_of_serve_md_draws_an_image_of_the_page_again(page, base, tmp_path):
    _, _, *words = with_models(GENERATE, base)
    words[1] = tmp_path / 'images'
    values = dict(zip(words[2::2], words[3::2], strict=True))
    ask(page, values['--prompt'], images=1, **{name: values[f'--{name}'] for name in ('seed', 'guidance', 'steps')})
    page.until("document.querySelectorAll('#gallery1 .grid-container img').length == 1")
    drawing_is_over(page)
    run_here('diffusion.generate', *words)
    assert shown(page, 0) == [path.read_bytes() for path in (tmp_path / 'images').glob('0*.png')]


def test_a_new_seed_is_shown_and_used(page):
    page.click('#new-seed input')
    ask(page, images=1, steps=1)
    page.until("document.querySelectorAll('#gallery1 .grid-container img').length == 1")
    drawing_is_over(page)
    seed = page.script("document.querySelector('#seed input').value")
    assert seed != '0'
    assert Image.open(BytesIO(shown(page, 0)[0])).info['seed'] == seed


def test_what_is_wrong_is_said_on_the_page(page):
    ask(page, prompt=' ')
    page.until("!!document.querySelector('#status [role=alert]')")
    drawing_is_over(page)
    assert status(page).strip() == 'The prompt is empty: say what to draw.'
    ask(page, prompt='red ' * 100, images=1, steps=1)
    page.until("document.querySelectorAll('#gallery1 .grid-container img').length == 1")
    assert page.script("document.querySelector('#status [role=alert]')") is None
    drawing_is_over(page)
    assert status(page).count('was not read: it is too long for the text encoder.') == 2


def test_a_drawing_is_stopped_and_the_next_one_begins(page):
    ask(page, images=16, steps=900)
    page.until("!document.querySelector('#stop').disabled && /steps/.test(document.querySelector('#status').innerText)")
    page.click('#stop')
    drawing_is_over(page)
    assert status(page).strip() == 'Stopped.'
    ask(page, images=1, steps=1)
    page.until("document.querySelectorAll('#gallery1 .grid-container img').length == 1")


def test_a_visitor_who_leaves_stops_the_drawing(page, served):
    ask(page, images=16, steps=900)
    page.until("!document.querySelector('#stop').disabled && /steps/.test(document.querySelector('#status').innerText)")
    page.look('about:blank')
    open_page(page, served)
    ask(page, images=1, steps=1)
    page.until("document.querySelectorAll('#gallery1 .grid-container img').length == 1")


@pytest.mark.parametrize(('number', 'code'), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_the_server_also_while_it_draws(number, code, browser, base, tmp_path):
    server = Served(tmp_path, ONE_MODEL, base)
    try:
        open_page(browser, server)
        ask(browser, images=16, steps=900)
        browser.until("/steps/.test(document.querySelector('#status').innerText)")
        assert server.end(number) == code
    finally:
        server.process.kill()
    assert 'Traceback' not in server.log.read_text()
    assert [path.name for path in server.temporary.iterdir() if path.name.startswith('diffusion-serve')] == []
