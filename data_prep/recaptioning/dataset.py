"""An MDS dataset of images to one with new captions: batches are prepared ahead, captioned, and written."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from data_prep.converting.conversion import CAPTIONS
from data_prep.engines.batches import BatchWork, ImageBatch, PartEnd
from data_prep.engines.engine import IN_THIS_PROCESS, Engine, LocalEngine
from data_prep.mds.dataset import Columns, Dataset, PartWriter
from data_prep.mds.job import ALONE, Share, Tally
from data_prep.recaptioning.captioner import Caption, Captioner, Generation
from data_prep.sources.folder import open_source
from data_prep.sources.mds import find_images
from diffusion.common.storage import open_folder
from diffusion.common.text import first_line
from diffusion.contracts.errors import DataError, EncoderError
from diffusion.contracts.manifest import Manifest
from diffusion.cost.hardware import own_device
from diffusion.datasets.decode import ImageError, open_image
from diffusion.datasets.shards import Shard, captions_of, read_shard, shards_by_name
from diffusion.families.registry import family_of
from diffusion.recipe.schema import EncoderSource

EMPTY, REFUSED = 'empty', 'has a refused word'
NOT_PREPARED = "not an image that the model's processor takes"


@dataclass(frozen=True)
class Choice:
    """Which new captions are used, and how often."""

    share: float = 0.5  # of the draws in training that take a new caption, 0 to 1; 1: the old captions are left out
    refused: tuple[str, ...] = ()  # words and phrases; a caption that has one is not used

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
class TextLimit:
    """How much of a caption training will read: `length` tokens, of each of the tokenizers."""

    length: int
    tokenizers: tuple[Any, ...]

    def exceeded(self, caption: str) -> bool:
        """Whether training would cut it off."""
        return any(len(tokenizer(caption, truncation=True, max_length=self.length + 1).input_ids) > self.length for tokenizer in self.tokenizers)


@dataclass(frozen=True)
class RecaptionWork(BatchWork):
    """Captions shards of images; each becomes a part."""

    label = 'recaption'

    captioner: Captioner
    choice: Choice
    limit: TextLimit | None
    """Length by which captions are measured."""

    @property
    def device(self) -> torch.device:
        return self.captioner.network.device

    def load(self, device: torch.device) -> None:
        """The model is read from its location, and has to be the one that the dataset was begun with."""
        self.captioner.load(device)
        found, begun_with = self.captioner.network.sha256, self.job.settings['model_sha256']
        if found != begun_with:
            raise EncoderError(f'{self.captioner.location.source}: has SHA-256 {found}, the dataset was begun with {begun_with}')

    def batches(self, shard: Shard, scratch: Path) -> Iterator[ImageBatch | PartEnd]:
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
    ) -> Iterator[ImageBatch]:
        """The batch, if it has any images; those that the processor refuses by themselves become failures: some refuse very narrow ones."""
        if not waiting:
            return
        try:
            yield ImageBatch(shard, shard.stream, self.captioner.prepare([image for image, _ in waiting]), [row for _, row in waiting])
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
            self.captioner.prepare([image])
        except Exception:
            return False
        return True

    def compute(self, batch: ImageBatch) -> tuple[list[list[Caption]]]:
        return (self.captioner.captions(batch.inputs, [row['key'] for row in batch.rows]),)

    def write(self, writer: PartWriter, batch: ImageBatch, *computed: Any) -> None:
        choice = self.choice
        for row, written in zip(batch.rows, computed[0], strict=True):
            usable = [caption for caption in written if not choice.fault(caption.text)]
            faults = dict.fromkeys(fault for caption in written if (fault := choice.fault(caption.text)))
            if not usable and choice.replaces:
                writer.drop(row['key'], row.get('url', ''), f'no new caption: {next(iter(faults))}')
                continue
            notes = [f'a new caption left out: {fault}' if usable else f'no new caption: {fault}' for fault in faults]
            if any(caption.cut for caption in usable):
                notes.append(f'new caption cut off at {self.captioner.generation.max_tokens} tokens')
            if self.limit is not None and any(self.limit.exceeded(caption.text) for caption in usable):
                notes.append(f'new caption longer than the {self.limit.length} tokens that training reads')
            writer.tally.notes.update(notes)
            mixed = choice.mixed(captions_of(row), [caption.text for caption in usable]) if usable else captions_of(row)
            values = {**row, 'caption': mixed[0][0], 'captions': mixed}
            sample = {column: values[column] for column in self.columns[batch.part.stream]}
            writer.keep(sample, batch.part.stream, int(min(row['width'], row['height'])))


AS_IT_COMES, HALF = Generation(), Choice()


def recaption(
    source: str | Path,
    dest: str | Path,
    location: EncoderSource,
    generation: Generation = AS_IT_COMES,
    choice: Choice = HALF,
    encoders: tuple[EncoderSource, str] | None = None,
    batch_size: int = 32,
    engine: Engine = IN_THIS_PROCESS,
    shard_bytes: int = 64 << 20,
    share: Share = ALONE,
) -> Tally:
    """Write the dataset again with captions by a model; returns what became of the samples.

    Args:
        location: of the vision-language model.
        encoders: location and `model.network` of the training to come; captions that are longer than its text encoders read are counted.
        batch_size: images a pass.
        engine: who does the work. The local one captions on this process's device; its processes read, decode and prepare.
        shard_bytes: size at which a shard is closed.
        share: which of several devices or hosts this is.

    Raises:
        DataError, ManifestError, EncoderError: SOURCE, DEST or the model cannot be used.
        IncompleteError, StorageError: something outside failed; the same call resumes.
    """
    made_from, folder = find_images(source, 'recaption'), open_source(source)
    captioner = Captioner.find(location, generation)
    if isinstance(engine, LocalEngine) and not share.merge_only:
        captioner.load(own_device())
    streams = {stream: Manifest.read(f'{source}/{stream}') for stream in made_from.streams} or {'': made_from}
    shards = shards_by_name(folder, made_from)
    limit = None
    if encoders is not None:
        location_of_text, network = encoders
        text = family_of(network).find_text(location_of_text.source, location_of_text.revision)
        limit = TextLimit(text.length, tuple(text.tokenizers.values()))
    one_caption = choice.replaces and generation.num_captions == 1
    columns = {stream: _columns(manifest, one_caption) for stream, manifest in streams.items()}
    generated = {**asdict(generation), 'prompt': captioner.prompt}  # with what a chat adds to it
    chosen = {'share': choice.share, 'refused': list(choice.refused)}
    dataset = Dataset(
        dest=open_folder(dest),
        parts=shards,
        identify=lambda shard: shard.fingerprint,
        columns=columns,
        settings={
            'command': 'recaption',
            'model_sha256': captioner.network.sha256,
            'model_settings_sha256': captioner.settings_sha256,
            **generated,
            **chosen,
            'text_limit': None if limit is None or encoders is None else [encoders[1], limit.length],
            'batch_size': batch_size,  # the last bits of what tokens are chosen by depend on it
            'shard_bytes': shard_bytes,
        },
        described={
            'kind': 'images',
            'source': {'path': str(source), 'format': 'image MDS', 'fingerprint_of_source': made_from.source.get('fingerprint')},
            'captioner': {
                'source': location.source,
                'revision': location.revision,
                'model_type': captioner.model_type,
                'model_sha256': captioner.network.sha256,
                'settings_sha256': captioner.settings_sha256,
                **generated,
                **chosen,
            },
        },
        described_by_stream={stream: {'bucket': manifest.bucket} for stream, manifest in streams.items()},
    )
    work = RecaptionWork(folder, dataset.job, columns, shard_bytes, batch_size, captioner, choice, limit)
    with dataset.job.begun():
        return dataset.complete(partial(engine.map, work), share)


def _columns(manifest: Manifest, one_caption: bool) -> Columns:
    """Columns of the source's stream, with a column of several captions unless there is one caption alone."""
    columns = {name: (column['encoding'], column['meaning']) for name, column in manifest.columns.items() if name != 'captions'}
    return columns if one_caption else {**columns, 'captions': CAPTIONS}
