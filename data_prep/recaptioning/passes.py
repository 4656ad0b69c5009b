"""Shards of images to shards of the same images with new captions: batches are prepared ahead, captioned, and written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from data_prep.engines.batches import BatchWork, ShardMessages
from data_prep.mds.job import Job
from data_prep.mds.parts import Columns, PartEnd, PartsWriting
from data_prep.recaptioning.captioner import Caption, Captioner, Preparation
from diffusion.common.storage import Folder
from diffusion.common.text import first_line
from diffusion.contracts.errors import DataError, EncoderError
from diffusion.datasets.captions import captions_of
from diffusion.datasets.decode import ImageError, open_image
from diffusion.datasets.shards import Shard, read_shard

EMPTY, REFUSED = 'empty', 'has a refused word'
NOT_PREPARED = "not an image that the model's processor takes"


@dataclass(frozen=True)
class Choice:
    """Which new captions are used, and how often.

    Attributes:
        share: of the draws in training that take a new caption, 0 to 1; 1: the old captions are left out.
        refused: words and phrases; a caption that has one is not used.
    """

    share: float = 0.5
    refused: tuple[str, ...] = ()

    @property
    def replaces(self) -> bool:
        return self.share == 1

    def fault(self, caption: str) -> str:
        """Why a caption is not used; '' if it is."""
        if not caption:
            return EMPTY
        words = '|'.join(map(re.escape, self.refused))
        return REFUSED if words and re.search(rf'(?<!\w)(?:{words})(?!\w)', caption, re.IGNORECASE) else ''

    def mixed(self, old: Sequence[tuple[str, float]], new: Sequence[str]) -> list[tuple[str, float]]:
        """Captions with weights that add up to 1: the old ones first, in their relation; the new ones share theirs equally. Equal texts are one."""
        weights = dict[str, float]()
        weighted = [(caption, weight * (1 - self.share)) for caption, weight in old if not self.replaces]
        for caption, weight in [*weighted, *((caption, self.share / len(new)) for caption in new)]:
            weights[caption] = weights.get(caption, 0.0) + weight
        return list(weights.items())


@dataclass(frozen=True)
class Recaptioning:
    """From where to where, and what each stream holds."""

    source: Folder
    job: Job
    columns: Mapping[str, Columns]
    choice: Choice
    shard_bytes: int


@dataclass(frozen=True)
class PreparedImages:
    """A batch of one part, as the model reads it, and the rows it is of."""

    part: Shard
    inputs: dict[str, Tensor]
    rows: list[dict[str, Any]]

    def pin_memory(self) -> PreparedImages:
        """For the DataLoader, which knows only tensors by itself."""
        return replace(self, inputs={name: tensor.pin_memory() for name, tensor in self.inputs.items()})


CaptionMessage = PreparedImages | PartEnd | Exception


class ImagesOfShards(ShardMessages):
    """Messages about all rows of some shards."""

    def __init__(self, recaptioning: Recaptioning, preparation: Preparation, shards: Sequence[Shard], batch_size: int):
        super().__init__(recaptioning.job, shards)
        self.source, self.preparation, self.batch_size = recaptioning.source, preparation, batch_size

    def of_shard(self, shard: Shard, scratch: Path) -> Iterator[PreparedImages | PartEnd]:
        failures: list[tuple[str, str, str]] = []
        waiting: list[tuple[Image.Image, dict[str, Any]]] = []
        for row in read_shard(self.source, shard, scratch):
            try:
                waiting.append((open_image(row['image']), row))
            except ImageError as error:
                failures.append((row['key'], row.get('url', ''), str(error)))
            if len(waiting) == self.batch_size:
                yield from self._prepared(shard, waiting, failures)
                waiting = []
        yield from self._prepared(shard, waiting, failures)
        yield PartEnd(shard, failures)

    def _prepared(
        self, shard: Shard, waiting: list[tuple[Image.Image, dict[str, Any]]], failures: list[tuple[str, str, str]]
    ) -> Iterator[PreparedImages]:
        """The batch, if it has any images; those that the processor refuses by themselves become failures: some refuse very narrow ones."""
        if not waiting:
            return
        try:
            yield PreparedImages(shard, self.preparation([image for image, _ in waiting]), [row for _, row in waiting])
        except Exception as error:  # each processor has its own
            bad = [i for i, (image, _) in enumerate(waiting) if not self._takes(image)]
            if not bad:
                reason = first_line(error, with_type=True)
                raise DataError(
                    f"{shard.path}: the model's processor takes each image, but not {len(waiting)} together: {reason}; --batch-size 1"
                ) from error
            failures += [(waiting[i][1]['key'], waiting[i][1].get('url', ''), NOT_PREPARED) for i in bad]
            yield from self._prepared(shard, [one for i, one in enumerate(waiting) if i not in bad], failures)

    def _takes(self, image: Image.Image) -> bool:
        try:
            self.preparation([image])
        except Exception:
            return False
        return True


@dataclass(frozen=True)
class TextLimit:
    """How much of a caption training will read.

    Attributes:
        length: tokens.
        tokenizers: all of which have to stay below it.
    """

    length: int
    tokenizers: tuple[Any, ...]

    def exceeded(self, caption: str) -> bool:
        """Whether training would cut it off."""
        return any(len(tokenizer(caption, truncation=True, max_length=self.length + 1).input_ids) > self.length for tokenizer in self.tokenizers)


class CaptionWriting(PartsWriting):
    """Writes the parts of a recaptioning.

    Args:
        max_tokens: of the model's captions, for the counts.
        limit: by which captions are measured; None: they are not.
    """

    def __init__(self, recaptioning: Recaptioning, max_tokens: int, limit: TextLimit | None):
        super().__init__(recaptioning.job, recaptioning.columns, recaptioning.shard_bytes)
        self.choice, self.max_tokens, self.limit = recaptioning.choice, max_tokens, limit

    def write(self, batch: PreparedImages, captions: list[list[Caption]]) -> None:
        """Write a captioned batch."""
        writer, choice = self.writer(batch.part), self.choice
        for row, written in zip(batch.rows, captions, strict=True):
            usable = [caption for caption in written if not choice.fault(caption.text)]
            faults = dict.fromkeys(fault for caption in written if (fault := choice.fault(caption.text)))
            if not usable and choice.replaces:
                writer.drop(row['key'], row.get('url', ''), f'no new caption: {next(iter(faults))}')
                continue
            notes = [f'a new caption left out: {fault}' if usable else f'no new caption: {fault}' for fault in faults]
            if any(caption.cut for caption in usable):
                notes.append(f'new caption cut off at {self.max_tokens} tokens')
            if self.limit is not None and any(self.limit.exceeded(caption.text) for caption in usable):
                notes.append(f'new caption longer than the {self.limit.length} tokens that training reads')
            writer.tally.notes.update(notes)
            mixed = choice.mixed(captions_of(row), [caption.text for caption in usable]) if usable else captions_of(row)
            values = {**row, 'caption': mixed[0][0], 'captions': mixed}
            sample = {column: values[column] for column in self.columns[batch.part.stream]}
            writer.keep(sample, batch.part.stream, int(min(row['width'], row['height'])))


@dataclass(frozen=True)
class RecaptionWork(BatchWork[CaptionMessage]):
    """Captions shards of images; each becomes a part."""

    label = 'recaption'

    recaptioning: Recaptioning
    captioner: Captioner
    limit: TextLimit | None
    batch_size: int

    @property
    def reads(self) -> Folder:
        return self.recaptioning.source

    @property
    def writes(self) -> Folder:
        return self.recaptioning.job.dest

    @property
    def device(self) -> torch.device:
        return self.captioner.network.device

    def read(self, shards: Sequence[Shard]) -> ImagesOfShards:
        return ImagesOfShards(self.recaptioning, self.captioner.preparation, shards, self.batch_size)

    def writing(self) -> CaptionWriting:
        return CaptionWriting(self.recaptioning, self.captioner.generation.max_tokens, self.limit)

    def step(self, writing: CaptionWriting, batch: PreparedImages) -> None:
        writing.submit(writing.write, batch, self.captioner.captions(batch.inputs, [row['key'] for row in batch.rows]))

    def load(self, device: torch.device) -> None:
        """The model is read from its location, and has to be the one that the dataset was begun with."""
        self.captioner.load(device)
        begun_with = self.recaptioning.job.settings['model_sha256']
        if self.captioner.network.sha256 != begun_with:
            raise EncoderError(
                f'{self.captioner.location.source}: has SHA-256 {self.captioner.network.sha256}, the dataset was begun with {begun_with}'
            )
