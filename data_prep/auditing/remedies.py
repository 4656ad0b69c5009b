"""Remedies for a dataset in which something is wrong; they follow from what `Dataset` does when its command is run again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from data_prep.auditing.bookkeeping import COUNTS, LOST
from data_prep.auditing.samples import DAMAGED, Problem
from data_prep.mds.job import JOB_NAME
from data_prep.mds.parts import PARTS
from data_prep.mds.shards import Shard
from diffusion.common.files import parse_json_object
from diffusion.common.storage import Folder


def remedies(problems: Sequence[Problem], shards: Sequence[Shard], folder: Folder, files: Mapping[str, Any], kind: str) -> list[str]:
    """A line for each kind of thing to do, and the files to delete for it."""
    return list(_remedies(problems, shards, folder, files, kind))


def _remedies(problems: Sequence[Problem], shards: Sequence[Shard], folder: Folder, files: Mapping[str, Any], kind: str) -> Iterator[str]:
    kinds = {problem.what for problem in problems}
    whole = f'copy {folder.url} again from where it came, or make it again from its source in a new DEST'
    command = _command(folder, files)
    if kinds & {LOST, DAMAGED, COUNTS} and command is None:
        yield f'{whole}: it has no {JOB_NAME}, so no command can repair it in place.'
    elif kinds & {LOST, DAMAGED, COUNTS}:
        markers = _markers([problem.where for problem in problems if problem.what == DAMAGED], shards)
        if markers:
            yield (
                f'delete the markers of the damaged parts: {" ".join(f"{folder.url}/{name}" for name in markers)} '
                '(a damaged shard of the right size is not noticed otherwise)'
            )
        what = ['write what is lost or has no marker again'] * bool(kinds & {LOST, DAMAGED})
        what += ['merge manifest.json, index.json and failures.parquet again'] * (COUNTS in kinds)
        yield f'run the same data_prep.{command} with the same DEST again: it will {" and ".join(what)}, and leave all other parts as they are'
    if kinds - {LOST, DAMAGED, COUNTS}:
        yield (
            'the samples named lie in shards that are just as they were written, so the same source would give the same again: '
            f'fix or filter the source and run data_prep.{"encode" if kind == "latents" else "convert"} on it with a new DEST'
        )


def _command(folder: Folder, files: Mapping[str, Any]) -> str | None:
    """`convert` or `encode`, where the dataset still has what these need to resume."""
    if JOB_NAME in files:
        with suppress(ValueError, KeyError):
            return parse_json_object(folder.read(JOB_NAME))['command']
    return None


def _markers(paths: Sequence[str], shards: Sequence[Shard]) -> list[str]:
    """The markers of the parts that these shards belong to."""
    basenames = {shard.path: shard.basename for shard in shards}
    return sorted({f'{PARTS}/{PurePosixPath(basenames[path]).parent}.json' for path in paths})
