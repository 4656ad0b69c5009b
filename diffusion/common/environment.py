"""What a run or a measurement was made with: the commit and the versions of packages. No torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

PACKAGES = ('torch', 'mosaicml', 'mosaicml-streaming', 'diffusers', 'transformers')


def commit() -> str | None:
    """The commit of this checkout, `-dirty` if files differ from it; None outside a git checkout."""
    folder = Path(__file__).parent
    try:
        found = subprocess.run(['git', 'describe', '--always', '--dirty', '--abbrev=12'], cwd=folder, capture_output=True, text=True, check=True)  # noqa: S607
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
