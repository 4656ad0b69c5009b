from argparse import ArgumentTypeError

import pytest

from diffusion.common.arguments import LARGEST_SEED, MAX_SIDE_PX, image_side, image_size, seed_number


@pytest.mark.parametrize(
    ('kind', 'text', 'said'),
    [
        (seed_number, '9' * 20, 'not a whole number of at most 4,294,967,295'),
        (seed_number, str(LARGEST_SEED + 1), 'not a whole number'),
        (seed_number, '-1', 'not a whole number'),
        (image_size, '100000x100000', 'more than 4,096, the longest side that is drawn'),
        (image_size, '64x0', 'not a size of multiples of 16'),
        (image_side, '1000000000', 'more than 4,096'),
    ],
)
def test_what_no_generator_and_no_memory_takes_is_refused(kind, text, said):
    with pytest.raises(ArgumentTypeError, match=said):
        kind(text)


def test_the_largest_is_taken():
    assert seed_number(str(LARGEST_SEED)) == LARGEST_SEED
    assert image_size(f'{MAX_SIDE_PX}x16') == (MAX_SIDE_PX, 16)
