"""Files that are replaced whole, and JSON that somebody else has written."""

import os

import pytest

from diffusion.common.files import parse_json, parse_json_object, replacing


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    """Or a loss of power leaves the name with nothing behind it."""
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, 'fsync', lambda descriptor: (done.append(os.readlink(f'/proc/self/fd/{descriptor}')), sync(descriptor)))
    monkeypatch.setattr(os, 'replace', lambda source, target: (done.append('replaced'), replace(source, target)))
    with replacing(tmp_path / 'recipe.yaml') as temporary:
        temporary.write_text('name: a')
    assert done == [str(temporary), 'replaced', str(tmp_path)]
    assert [path.name for path in tmp_path.iterdir()] == ['recipe.yaml']


@pytest.mark.parametrize('text', ['', '{', '[' * 100_000, '{"a":' * 100_000, '1' * 5_000, b'\xff', 'NaN1'], ids=range(7))
def test_there_is_one_error_for_all_that_is_no_json(text):
    with pytest.raises(ValueError, match='.'):
        parse_json(text)


def test_an_object_is_wanted():
    assert parse_json_object('{"a": [1]}') == {'a': [1]}
    for text in ('[]', '1', 'null', '"a"'):
        with pytest.raises(ValueError, match='a JSON object is wanted, this is a'):
            parse_json_object(text)
