"""Check a recipe without a GPU: print it resolved, every key with its meaning, or list every mistake in it.

    python -m diffusion.check yamls/sd2-base-256.yaml [--gpus N] [key=value ...]

Exit code 0 if it can be trained, 2 if not. Does not import torch and touches no data.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import yaml

from diffusion.recipe import load_or_exit
from diffusion.recipe.load import EXIT_BAD_RECIPE
from diffusion.recipe.schema import field_docs

COMMENT_COLUMN = 60


def describe(section: Any, indent: int = 0) -> list[str]:
    """The lines of a section: `key: value  # what it means`."""
    docs = field_docs(type(section))
    lines = []
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        pad = '  ' * indent
        if dataclasses.is_dataclass(value):
            lines += ['', f'{pad}{item.name}:'] if indent == 0 else [f'{pad}{item.name}:']
            lines += describe(value, indent + 1)
            continue
        text = yaml.safe_dump(_plain(value), default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True)
        entry = f'{pad}{item.name}: {text.splitlines()[0]}'
        lines.append(f'{entry:<{COMMENT_COLUMN}}  # {docs[item.name]}')
    return lines


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(value)
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def main() -> None:
    arguments = sys.argv[1:]
    num_gpus = int(os.environ.get('WORLD_SIZE', '1'))
    if '--gpus' in arguments:
        at = arguments.index('--gpus')
        text = arguments[at + 1] if at + 1 < len(arguments) else ''
        if not text.isdigit() or int(text) < 1:
            print(f"--gpus: '{text}' is not a number of GPUs", file=sys.stderr)
            raise SystemExit(EXIT_BAD_RECIPE)
        num_gpus = int(text)
        del arguments[at : at + 2]
    recipe = load_or_exit(arguments, usage=__doc__ or '', num_gpus=num_gpus)
    print('\n'.join(describe(recipe)))
    accumulation = recipe.batch.global_size // num_gpus // recipe.batch.micro_size
    print(f'\n# {num_gpus} GPUs x {accumulation} micro-batches x {recipe.batch.micro_size} = {recipe.batch.global_size} samples a batch')


if __name__ == '__main__':
    main()
