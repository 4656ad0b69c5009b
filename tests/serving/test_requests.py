"""What visitors may ask for."""

import pytest

from diffusion.contracts.errors import InputError
from diffusion.serving.image_server import DrawingRequest, Limits, read_request

LIMITS = Limits(num_images=8, steps=50)
FINE = {'prompt': 'an owl', 'seed': 3, 'guidance': 4.5, 'steps': 50, 'num_images': 8, 'size': None, 'limits': LIMITS}


def test_values_at_their_limits_pass_and_browsers_numbers_become_whole():
    assert read_request(**FINE) == DrawingRequest('an owl', 3, 4.5, 50, 8)
    assert read_request(**{**FINE, 'prompt': ' x \n', 'seed': 2.0**32 - 8, 'guidance': 1, 'steps': 1.0, 'size': (64, 128)}) == DrawingRequest(
        'x', 2**32 - 8, 1.0, 1, 8, (64, 128)
    )


@pytest.mark.parametrize(
    ('name', 'values', 'said'),
    [
        ('prompt', ['', ' \n', None, 5, ['an owl']], 'The prompt is empty'),
        ('prompt', ['a' * 2001], '2,001 letters; 2,000 are allowed'),
        ('prompt', ['half \ud83d'], 'a character that is none'),
        (
            'seed',
            [-1, 2**32 - 7, None, 1.5, float('nan'), float('inf'), True, '3', [3]],
            'Seed is .*; give a whole number from 0 to 4294967288',
        ),  # that of the last image is 2^32 - 1
        ('guidance', [0.99, 30.1, None, float('nan'), float('inf'), 10**400, False, '4', {}], 'Guidance is .*; give a number from 1 to 30'),
        ('steps', [0, 51, 10**30, None, 1.5, '50'], 'Steps is .*; give a whole number from 1 to 50'),
        ('num_images', [0, 9, -(10**30), None, 2.5, '8'], 'Images is .*; give a whole number from 1 to 8'),
    ],
)
def test_everything_else_is_refused_with_its_limit(name, values, said):
    for value in values:
        with pytest.raises(InputError, match=said) as refused:
            read_request(**{**FINE, name: value})
        assert len(str(refused.value)) < 150
