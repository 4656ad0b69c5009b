"""Check a recipe without a GPU: print it resolved, every key with its meaning, or list every mistake in it.

    python -m diffusion.check yamls/sd2-base-256.yaml [--gpus N] [key=value ...]

Exit code 0 if it can be trained, 2 if not. Does not import torch and touches no data.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

import yaml

from diffusion.arguments import positive_int
from diffusion.recipe import load_or_exit, to_dict
from diffusion.recipe.schema import field_docs

COMMENT_COLUMN = 60


def describe(section: Any, values: dict[str, Any], indent: int = 0) -> list[str]:
    """The lines of a section whose resolved `values` are given: `key: value  # what it means`."""
    docs = field_docs(type(section))
    pad = '  ' * indent
    lines = []
    for key, value in values.items():
        inner = getattr(section, key)
        if dataclasses.is_dataclass(inner):
            lines += ['', f'{pad}{key}:'] if indent == 0 else [f'{pad}{key}:']
            lines += describe(inner, value, indent + 1)
            continue
        text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
        entry = f'{pad}{key}: {text.splitlines()[0]}'
        lines.append(f'{entry:<{COMMENT_COLUMN}}  # {docs[key]}')
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog='python -m diffusion.check', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('recipe', metavar='RECIPE')
    parser.add_argument('--gpus', type=positive_int, metavar='N', help='processes to check for (default: WORLD_SIZE, or 1)')
    parser.add_argument('overrides', nargs='*', metavar='key=value')
    args = parser.parse_intermixed_args()
    recipe = load_or_exit([args.recipe, *args.overrides], usage=__doc__ or '', num_gpus=args.gpus)
    print('\n'.join(describe(recipe, to_dict(recipe))))
    batch, num_gpus = recipe.batch, args.gpus or int(os.environ.get('WORLD_SIZE', '1'))
    per_gpu = batch.global_size // num_gpus
    split = 'one pass or more' if isinstance(batch.micro_size, str) else f'{per_gpu // batch.micro_size} micro-batches x {batch.micro_size}'
    print(f'\n# {num_gpus} GPUs x {split} = {batch.global_size} samples a batch')


if __name__ == '__main__':
    main()
