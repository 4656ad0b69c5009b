"""The captions of an MDS row: one in the column `caption`, or several with weights in `captions`."""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any


def captions_of(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(caption, weight) of a row; the weights add up to 1."""
    if 'captions' in row:
        return [(caption, weight) for caption, weight in row['captions']]
    return [(row['caption'], 1.0)]


def pick(captions: Sequence[tuple[str, float]], uniform: float) -> str:
    """The caption that a draw from (0, 1] falls on."""
    for (caption, _), reached in zip(captions, accumulate(weight for _, weight in captions), strict=True):
        if uniform <= reached:
            return caption
    return captions[-1][0]  # the weights add up to a little less than 1


def words_of(folder: Path) -> list[str]:
    """The words of the captions of an MDS on this machine, sorted; lower case, because CLIP's tokenizers know no other."""
    from streaming import LocalDataset  # imports torch

    dataset = LocalDataset(local=str(folder))
    return sorted({word for i in range(len(dataset)) for word in words_in(dataset[i]['caption'])})


def words_in(caption: str) -> set[str]:
    """Runs of the letters a to z, in lower case."""
    return set(re.findall(r'[a-z]+', caption.lower()))
