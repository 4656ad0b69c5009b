"""An MDS dataset of images to one with new captions: the whole of a recaptioning, of which passes.py does the work on a device."""

from dataclasses import asdict
from pathlib import Path

from data_prep.converting.conversion import CAPTIONS
from data_prep.engines.engine import Engine
from data_prep.engines.local import IN_THIS_PROCESS, LocalEngine
from data_prep.mds.dataset import Dataset
from data_prep.mds.job import ALONE, Share, Tally
from data_prep.mds.parts import Columns
from data_prep.recaptioning.captioner import Captioner, Generation
from data_prep.recaptioning.passes import Choice, Recaptioning, RecaptionWork, TextLimit
from data_prep.sources.folder import open_source
from data_prep.sources.image_mds import find_images
from diffusion.common.storage import open_folder
from diffusion.contracts.manifest import Manifest
from diffusion.cost.hardware import own_device
from diffusion.datasets.shards import shards_by_name
from diffusion.families.registry import family_of
from diffusion.recipe.schema import EncoderSource

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
    limit = None if encoders is None else _limit(*encoders)
    one_caption = choice.replaces and generation.num_captions == 1
    columns = {stream: _columns(manifest, one_caption) for stream, manifest in streams.items()}
    generated = {**asdict(generation), 'prompt': captioner.prompt}  # with what a chat adds to it
    dataset = Dataset(
        dest=open_folder(dest),
        parts=list(shards),
        identify=lambda name: shards[name].fingerprint,
        columns=columns,
        settings={
            'command': 'recaption',
            'model_sha256': captioner.network.sha256,
            'model_settings_sha256': captioner.settings_sha256,
            **generated,
            'share': choice.share,
            'refused': list(choice.refused),
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
                'share': choice.share,
                'refused': list(choice.refused),
            },
        },
        described_by_stream={stream: {'bucket': manifest.bucket} for stream, manifest in streams.items()},
    )
    work = RecaptionWork(Recaptioning(folder, dataset.job, columns, choice, shard_bytes), captioner, limit, batch_size)
    with dataset.job.begun():
        return dataset.complete(lambda names: engine.map(work, [shards[name] for name in names]), share)


def _columns(manifest: Manifest, one_caption: bool) -> Columns:
    """Those of the source's stream, with a column of several captions unless there is one caption alone."""
    columns = {name: (column['encoding'], column['meaning']) for name, column in manifest.columns.items() if name != 'captions'}
    return columns if one_caption else {**columns, 'captions': CAPTIONS}


def _limit(location: EncoderSource, network: str) -> TextLimit:
    text = family_of(network).find_text(location.source, location.revision)
    return TextLimit(text.length, tuple(text.tokenizers.values()))
