"""Randomly initialised encoders in the diffusers layout, where the real ones cannot be had.

    python -m diffusion.stand_in FOLDER [--like sd2-base]

For tests and the demo (`tiny`, whose tokenizer knows a small vocabulary) and for measuring speed on a machine without the
Hub (`sd2-base`: the real sizes). Images made with untrained ones mean nothing; the folder's README says so.
"""

from __future__ import annotations

from pathlib import Path

from diffusion.common.arguments import CommandParser
from diffusion.encoders.sizes import KINDS


def main() -> None:
    parser = CommandParser('diffusion.stand_in', __doc__)
    parser.add_argument('folder', type=Path, metavar='FOLDER')
    parser.add_argument('--like', choices=sorted(KINDS), default='sd2-base', help='sizes to imitate (default %(default)s)')
    args = parser.parse_args()
    from diffusion.encoders.random_encoders import write_stand_in  # imports torch, so after the arguments are read

    write_stand_in(args.folder, args.like)
    print(f'randomly initialised encoders in the sizes of {args.like}: {args.folder}')


if __name__ == '__main__':
    main()
