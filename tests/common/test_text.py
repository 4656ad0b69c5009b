"""Phrases of messages."""

import pytest

from diffusion.common.text import did_you_mean, first_line, one_line


@pytest.mark.parametrize(
    ('name', 'by_prefix', 'phrase'),
    [
        ('h20', False, "; did you mean 'h200'?"),
        ('a100', False, "; did you mean 'a100-80gb'?"),
        ('a100', True, "; did you mean 'a100-40gb' or 'a100-80gb'?"),
        ('tpu', True, '.'),
    ],
)
def test_similar_names_are_suggested(name, by_prefix, phrase):
    assert did_you_mean(name, ['a100-40gb', 'a100-80gb', 'h200'], by_prefix=by_prefix) == phrase


def test_errors_on_one_line():
    error = OSError('no such\n  file\nframe #0: C++')
    assert (one_line(error), one_line(error, 7)) == ('no such file frame #0: C++', 'no such')
    assert (first_line(error), first_line(error, with_type=True)) == ('no such', 'OSError: no such')
    assert one_line(KeyError()) == first_line(KeyError()) == first_line(KeyError(), with_type=True) == 'KeyError'
