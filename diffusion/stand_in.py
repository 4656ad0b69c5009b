"""Randomly initialised encoders in the diffusers layout, where the real ones cannot be had.

    python -m diffusion.stand_in FOLDER [--like sd2-base]

For tests (`tiny`, and `tiny-xl` with two text encoders) and for measuring speed on a machine without the Hub (`sd2-base`,
`sdxl-base`: the real sizes). Their tokenizers know letters and no words: captions longer than 16 letters (the tiny ones) or
77 are cut. Images made with untrained ones mean nothing; the folder's README says so.
"""

from __future__ import annotations

from pathlib import Path

from diffusion.common.arguments import CommandParser
from diffusion.common.imports import quick_imports
from diffusion.encoders.sizes import KINDS


def main() -> None:
    parser = CommandParser('diffusion.stand_in', __doc__)
    parser.add_argument('folder', type=Path, metavar='FOLDER')
    parser.add_argument('--like', choices=sorted(KINDS), default='sd2-base', help='sizes to imitate (default %(default)s)')
    args = parser.parse_args()
    with quick_imports():  # of torch, so after the arguments are read
        from diffusion.encoders.random_encoders import write_stand_in

    write_stand_in(args.folder, args.like)
    print(f'randomly initialised encoders in the sizes of {args.like}: {args.folder}')


if __name__ == '__main__':
    main()
