"""The README.md of an exported model, with the front matter that the Hugging Face Hub reads, and its upload."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData, get_token, hf_hub_download
from huggingface_hub.utils import validate_repo_id
from typing_extensions import TypedDict

from diffusion.checkpoints.initial import base_of
from diffusion.checkpoints.manifest import read_manifest
from diffusion.common.files import read_json
from diffusion.common.storage import StorageError
from diffusion.common.text import counted, first_line, markdown_table
from diffusion.contracts.errors import CheckpointError, ManifestError
from diffusion.contracts.manifest import Manifest
from diffusion.datasets.sources import located
from diffusion.encoders.pretrained import hub_problem
from diffusion.families.counting.counts import Counter
from diffusion.families.family import Family
from diffusion.families.pipeline import KOHYA, LORA
from diffusion.families.registry import family_of
from diffusion.objectives import build_objective
from diffusion.recipe import Recipe
from diffusion.recipe.keys import hub_source
from diffusion.recipe.schema import Stream
from diffusion.recipe.techniques import techniques

UNKNOWN = 'not recorded'
FROM_NOTHING = 'The network was trained from random weights.'


def model_card(
    recipe: Recipe, checkpoint: Path, state: Mapping[str, Any], facts: Mapping[str, Any], license: str | None = None, merged: bool = False
) -> str:
    """README.md of an exported model: what was trained, on which data, with how much arithmetic and money, and how to use it.

    Args:
        checkpoint: the file that was exported; its manifest and run folder are looked at if they are there.
        state: of that checkpoint (`read_checkpoint`).
        facts: what export.json says.
        license: an identifier of the Hub, such as openrail++; None leaves the field out and says that it is open.
        merged: the folder of an adapter holds a whole pipeline too.
    """
    adapter, started_from = recipe.adapter, recipe.load_path if recipe.adapter is None else base_of(recipe)
    hub, family = hub_source(started_from), family_of(recipe.model.network)
    tags = [*family.tags, *(['lora'] if adapter is not None else [])]
    data = ModelCardData(library_name='diffusers', pipeline_tag='text-to-image', tags=tags, license=license, base_model=hub[0] if hub else None)
    training = markdown_table(('what:', 'value:'), list(_training(recipe, checkpoint, state, facts)))
    encoders = recipe.model.encoders
    revision = f' at commit {encoders.revision}' if encoders.revision else ''
    licensed = f'These weights: {license}.' if license else 'These weights: not stated; choose one before you publish them (`--license ID`).'
    return f"""---
{data.to_yaml()}
---

# {recipe.name}

{_what(recipe, merged)} `recipe.yaml` is the
complete recipe of the run, `export.json` says which weights these are.

## Use

{_use(recipe, family, facts, merged)}

## Training

{training}

## Data

{_data(recipe)}

## Licence

- {licensed}
- VAE, text encoder and tokenizer are those of {encoders.source}{revision}, under their own licence.
- {f'The training started from {started_from}, under its own licence{_licence_of(hub)}.' if started_from else FROM_NOTHING}
- The licences of the training images and captions are not recorded here.
"""


def _what(recipe: Recipe, merged: bool) -> str:
    name, adapter = recipe.model.network, recipe.adapter
    if adapter is None:
        return f'A text-to-image model in the diffusers format: the network `{name}`, trained at {recipe.data.resolution} px.'
    family = family_of(name)
    if not family.loads_adapters:
        readers = '`python -m diffusion.generate`; diffusers loads no adapters of this network'
    elif family.older_adapters:
        readers = f'diffusers, `{LORA.parent / KOHYA}` for AUTOMATIC1111, ComfyUI and other programs'
    else:
        readers = 'diffusers, ComfyUI and other programs'
    also = '; this folder holds the whole model too, with the adapter in its weights' if merged else ''
    return (
        f'A LoRA adapter (rank {adapter.rank}, alpha {adapter.alpha:g}) of the network `{name}` of {base_of(recipe)}{also}. '
        f'`{LORA}` is for {readers}. It was trained at {recipe.data.resolution} px.'
    )


def _use(recipe: Recipe, family: Family, facts: Mapping[str, Any], merged: bool) -> str:
    """A few lines of Python, or a command where diffusers cannot do it."""
    name, base, lines = family.pipeline_class.__name__, facts.get('base'), []
    options = family.call_options(facts['guidance'], resolution=facts['resolution']) | {'num_inference_steps': facts['steps']}
    if base is None or merged:
        lines.append(f'pipeline = {name}.from_pretrained("PATH_OR_ID_OF_THIS_MODEL")')
    elif not family.loads_adapters:
        return '```sh\npython -m diffusion.generate PATH_OF_THIS_MODEL images --prompt "a prompt"\n```'
    else:
        revision = f', revision="{base["revision"]}"' if base['revision'] else ''
        lines.append(f'pipeline = {name}.from_pretrained("{base["source"]}"{revision})')
        lines.append(f'pipeline.load_lora_weights("PATH_OR_ID_OF_THIS_MODEL/{LORA.parent}", weight_name="{LORA.name}")  # offline it must be named')
    written = ', '.join(f'{name}={value:g}' if isinstance(value, float) else f'{name}={value!r}' for name, value in options.items())
    image = f'image = pipeline("a prompt", {written}).images[0]'
    return '\n'.join(['```python', f'from diffusers import {name}', '', *lines, image, '```'])


def _licence_of(hub: tuple[str, str] | None) -> str:
    """Licence that the model's card on the Hub states, if it can be had."""
    if hub is None:
        return ''
    hub_problem()
    try:
        licence = ModelCard.load(hf_hub_download(hub[0], 'README.md', revision=hub[1])).data.license
    except (OSError, ValueError):  # no network, no such file, or no front matter
        licence = None
    return f' ({licence})' if licence else ' (not recorded here: the Hub did not answer)'


def _training(recipe: Recipe, checkpoint: Path, state: Mapping[str, Any], facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model, counts, samples = recipe.model, Counter.from_file().counts(recipe, activations=False), int(facts['samples_seen'])
    manifest, environment = read_manifest(checkpoint), _environment(recipe, checkpoint)
    yield 'network', f'{model.network}, {counts.num_parameters:,} parameters'
    post_hoc, width = facts['post_hoc'], ''
    if post_hoc is not None:
        width = f' of sigma_rel {post_hoc["sigma_rel"]:g}, post hoc from {counted(len(post_hoc["from_checkpoints"]), "checkpoint")}'
    yield 'weights', f'{"EMA" if facts["weights"] == "ema" else "as trained (no EMA)"}{width}, {facts["checkpoint"]}'
    if recipe.adapter is not None:
        yield 'adapter of', base_of(recipe)
        yield 'trained parameters', f'{counts.trained_parameters:,}'
    else:
        yield 'started from', recipe.load_path or 'random weights'
    yield 'objective', build_objective(model).describe()
    of_loss = model.diffusion is not None and model.diffusion.min_snr_gamma is not None
    if methods := [*techniques(recipe), *(['model.diffusion.min_snr_gamma'] if of_loss else [])]:
        yield 'methods', ', '.join(methods)
    yield 'samples seen', f'{samples:,} = {facts["batches"]:,} batches of {recipe.batch.global_size:,}'
    yield 'learning rate', f'{recipe.optimizer.lr:g}, {recipe.optimizer.decay}, warm-up {recipe.optimizer.warmup}'
    yield 'precision', recipe.train.precision
    yield 'FLOP', f'{float(counts.flop) * samples:.2e} of the network, forward and backward (1 MAC = 2 FLOP, counted)'
    gpu_hours = state.get('callbacks', {}).get('Throughput', {}).get('gpu_hours')  # of all processes of the run until this checkpoint
    device = f'{environment.get("num_gpus", UNKNOWN)} x {environment["device"]}' if 'device' in environment else UNKNOWN
    yield 'hardware', device
    yield 'GPU-hours', UNKNOWN if gpu_hours is None else f'{gpu_hours:,.3g} (of machines, if there is no GPU)'
    price = environment.get('price')
    if gpu_hours is None or not price:
        yield 'dollars', UNKNOWN
    else:
        yield 'dollars', f'${gpu_hours * price["dollars"]:,.2f} at ${price["dollars"]:g} per GPU-hour ({price["name"]})'
    if manifest is not None:
        yield 'trained with', ', '.join([f'commit {manifest.commit or UNKNOWN}', *(f'{name} {number}' for name, number in manifest.packages.items())])


def _data(recipe: Recipe) -> str:
    if recipe.data.kind == 'synthetic':
        return 'Random latents and captions: this model has seen no images.'
    rows = [(name, *_counts(stream)) for name, stream in sorted(located(recipe, 'data').items())]
    table = markdown_table(('dataset:', 'samples', 'rows left out of it, by reason:'), rows)
    return f'{recipe.data.kind.capitalize()}, {recipe.data.caption_dropout:.0%} of the captions dropped at random.\n\n{table}'


def _counts(stream: Stream) -> tuple[str, str]:
    for where in filter(None, (stream.local, stream.remote)):
        with suppress(ManifestError, StorageError):
            manifest = Manifest.read(where)
            reasons = ', '.join(f'{reason} {count:,}' for reason, count in sorted(manifest.dropped.items()) if count)
            left_out = f'{manifest.attempted - manifest.num_samples:,} of {manifest.attempted:,}'
            return f'{manifest.num_samples:,}', f'{left_out}: {reasons}' if reasons else left_out
    return UNKNOWN, f'{UNKNOWN}: its manifest could not be read when this was written'


class _Price(TypedDict):
    dollars: float
    name: str


class _Environment(TypedDict, total=False):
    num_gpus: int
    device: str
    price: _Price | None


def _environment(recipe: Recipe, checkpoint: Path) -> _Environment:
    """environment.json of the run, from the run folder that the checkpoint lies in or that the recipe names; empty if none can be read."""
    for folder in (checkpoint.parent.parent, Path(recipe.run_folder)):
        with suppress(ValueError):
            return read_json(folder / 'environment.json', _Environment)
    return {}


def check_upload(name: str) -> None:
    """Whether an upload could begin, before minutes are spent on the export.

    Raises:
        CheckpointError: `name` is not OWNER/NAME, or nobody is logged in.
    """
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise CheckpointError(f'--push-to-hub: {error}') from None
    if name.count('/') != 1:
        raise CheckpointError(f'--push-to-hub: {name} is not of the form OWNER/NAME')
    if get_token() is None:
        raise CheckpointError('--push-to-hub: nobody is logged in to the Hub; log in with: hf auth login')


def push_to_hub(folder: Path, name: str) -> str:
    """Upload an exported folder as one commit and return its URL. A repository that does not exist yet is created private.

    The login is huggingface_hub's own (`hf auth login`, or HF_TOKEN).

    Raises:
        CheckpointError: the Hub refuses or cannot be reached; the folder stays where it is.
    """
    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=folder, commit_message='Upload an exported model').commit_url)
    except (OSError, ValueError) as error:  # HTTP errors and a Hub out of reach among them
        raise CheckpointError(
            f'--push-to-hub: {name}: {first_line(error)}; the export is complete in {folder}, run the same command again to upload it'
        ) from error
