"""Check a recipe without a GPU: print it resolved, every key with its meaning, or list every mistake in it.

    python -m diffusion.check yamls/sd2-base-256.yaml [--gpus N] [--preview PAGE.html] [key=value ...]

Prints the keys that the recipe and the command line state with their meaning, and folds those of its base and the defaults into comments that say
where each comes from. Reads the manifest and index.json of datasets in folders of this machine, and decodes the photos of streams that have some;
then builds the network without its weights and sends one sample through it, unless that was done when its FLOP were counted (counts.json), which
saves the import of PyTorch. Reads no samples of datasets and nothing in object storage; needs no GPU and no network. Without --gpus it warns of what
this machine would refuse.
Exit code 0 if the recipe can be trained, 2 if not.
"""

import dataclasses
import textwrap
from collections import Counter as Tally
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import PositiveInt

from diffusion.common.command_line import Arguments, option, positional
from diffusion.common.environment import has_gpu
from diffusion.common.files import parse_json_object
from diffusion.common.processes import quick_imports
from diffusion.common.storage import StorageError, StorageRefusal
from diffusion.common.text import counted, one_line, print_message, print_page
from diffusion.contracts.errors import DataError, EncoderError, ManifestError
from diffusion.cost.assumptions import draw_all, load_assumptions
from diffusion.cost.encoders import encoder_of, online_fleet, text_warnings
from diffusion.cost.facts import Cluster, Facts
from diffusion.cost.hardware import MEMORY_GB, gpu_without_kernels, memory_gb
from diffusion.cost.prices import RULES, load_prices, price_of_run
from diffusion.cost.throughput import RateError, rate_sources
from diffusion.datasets.sources import StreamSource, batches_per_epoch, is_prepared, read_sources, shares, store_text, too_few, where
from diffusion.families.counting.counts import Counter
from diffusion.families.networks import find_network
from diffusion.recipe import AnyRecipe, AutoencoderRecipe, Recipe, RecipeError, load_any_recipe, to_dict
from diffusion.recipe.keys import Keys, meanings
from diffusion.recipe.load import num_processes
from diffusion.recipe.merging import origins
from diffusion.recipe.reading import COMMAND_LINE, file_layers, override_layers
from diffusion.recipe.rules import PIXELS_PER_LATENT, TEXT_LENGTH, length_in_batches, starts_before_the_end, without_gpu
from diffusion.recipe.schema import Stream, present
from diffusion.recipe.techniques import optimizer_of

COMMENT_COLUMN = 60
GPUS_PER_NODE = 8


def describe(section: Any, values: dict[str, Any], origin_of: Mapping[Keys, str] | None = None, fold: bool = False, path: Keys = ()) -> list[str]:
    """Format a section with its resolved `values`, one line a key: `key: value  # [origin] meaning`.

    Args:
        origin_of: where the value of a key comes from: '' (the recipe's own file, which is not named), another file, or the command line; keys that
            are not in it have their defaults.
        fold: put the keys that the recipe's own file and the command line do not state into comments, without their meaning.
        path: of the section.
    """
    texts, pad = meanings(type(section)), '  ' * len(path)
    lines, wrapped, folded = list[str](), list[str](), dict[str, dict[str, Any]]()
    for key, value in values.items():
        inner, here = getattr(section, key), (*path, key)
        stated = list(dict.fromkeys(origin for at, origin in (origin_of or {}).items() if at[: len(here)] == here[: len(at)]))
        if dataclasses.is_dataclass(inner) and (stated or not fold):
            lines += ['', f'{pad}{key}:'] if not path else [f'{pad}{key}:']
            lines += describe(inner, value, origin_of, fold, here)
        elif fold and not {'', COMMAND_LINE} & {*stated}:
            folded.setdefault(', '.join(stated) or 'default', {})[key] = value
        else:
            tag = f'[{", ".join(origin or "this file" for origin in stated)}] ' if any(stated) else ''
            lines.append(f'{f"{pad}{key}: {_inline(value)}":<{COMMENT_COLUMN}}  # {tag}{texts[key]}')
    for origin, unchanged in folded.items():
        text = f'{origin}: {_inline(unchanged)[1:-1]}'
        wrapped += textwrap.wrap(text, 150, initial_indent=f'{pad}# ', subsequent_indent=f'{pad}#   ', break_long_words=False, break_on_hyphens=False)
    return [*wrapped, *lines]


def _inline(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6, allow_unicode=True).splitlines()[0]


class CheckRequest(Arguments):
    """The recipe to check."""

    recipe: str = positional('RECIPE')
    gpus: PositiveInt | None = option(None, 'processes to check for (default: WORLD_SIZE, or 1, on this machine)', 'N')
    preview: Path | None = option(None, "also write a page of what training sees of the recipe's photos", 'PAGE.html')
    all: bool = option(False, 'print all keys with their meaning, also those of its base and the defaults')
    overrides: list[str] = positional('key=value', default=[])


def main() -> int:
    args = CheckRequest.parse('diffusion.check', __doc__)
    try:
        num_gpus = args.gpus or num_processes()
        recipe = load_any_recipe(args.recipe, args.overrides, num_gpus, rules=[*RULES, missing_here])
        look = look_at_autoencoder if isinstance(recipe, AutoencoderRecipe) else look_at_network
        errors, about, warnings = look(recipe, num_gpus)  # type: ignore[arg-type]
        if errors:
            raise RecipeError(args.recipe, errors)
        if args.preview is not None:
            about.append(preview(recipe, args.preview))
    except RecipeError as error:
        print_message(f'{error}\nverdict: {args.recipe} cannot be trained; correct {"this" if len(error.errors) == 1 else "these"} and check again')
        return 2
    layers = [*file_layers(Path(args.recipe), []), *override_layers(args.overrides, [])]
    names = {origin: Path(origin).name if len(layers) > 1 else '' for origin, _ in layers} | {str(Path(args.recipe)): '', COMMAND_LINE: COMMAND_LINE}
    origin_of = {path: names[origin] for path, origin in origins(type(recipe), layers).items()}
    batch = recipe.batch
    per_gpu = batch.global_size // num_gpus
    passes = 0 if isinstance(batch.micro_size, str) else per_gpu // batch.micro_size
    split = f'{passes} micro-batch{"" if passes == 1 else "es"} x {batch.micro_size}' if passes else f'{per_gpu} in the largest passes that fit'
    size = f'# {counted(num_gpus, "GPU")} x {split} = {counted(batch.global_size, "sample")} a batch'
    print_page('\n'.join([*describe(recipe, to_dict(recipe), origin_of, fold=not args.all), '', size, *(f'# {text}' for text in about)]))
    refused, slow = without_gpu(recipe) if args.gpus is None and not has_gpu() else ([], [])
    lacking = filter(None, [gpu_without_kernels(recipe.cost.gpu or '')])
    for text in [*warnings, *lacking, *slow, *(f'{error}, or --gpus N to check for other machines' for error in refused)]:
        print_message(f'warning: {text}')
    verdict = 'sound, but this machine cannot train it' if refused else f'sound for {counted(num_gpus, "GPU")}'
    print_page(f'# verdict: {args.recipe} is {verdict}')
    return 0


def preview(recipe: AnyRecipe, page: Path) -> str:
    """Write the page of a recipe's photos; return what it shows.

    Raises:
        RecipeError: the recipe names none, or the page cannot be written.
    """
    with quick_imports():
        from diffusion.finetuning.preview import write_preview
    try:
        shown = write_preview(recipe, page) if isinstance(recipe, Recipe) else ''
    except (OSError, ValueError) as error:
        raise RecipeError(recipe.name, [f'--preview: {page}: cannot be written: {error}; name another file']) from error
    if not shown:
        raise RecipeError(recipe.name, ['--preview: no stream of the recipe has photos; leave it out'])
    return f'preview: {shown}: open {page} in a browser'


def look_at_network(recipe: Recipe, num_gpus: int) -> tuple[list[str], list[str], list[str]]:
    """Errors, things worth saying, and warnings about data, network and encoders of a sound recipe."""
    counter = Counter.from_file()
    built = counter.knows(recipe) and not Path(recipe.model.encoders.source).is_dir()  # of a folder the widths are compared
    if not built:
        with quick_imports():  # of torch, after mistakes in the recipe itself
            import diffusion.families.registry  # noqa: F401
    errors = data_errors(recipe, counter.reads_geometry(recipe.model.network)) + ([] if built else network_errors(recipe))
    if errors:
        return errors, [], []
    try:
        counts = counter.counts(recipe, activations=False)
        of_text = text_warnings(Facts(recipe, counts, None))
    except RecipeError as error:
        return error.errors, [], []
    except EncoderError as error:
        return [f'model.encoders.source: {error}'], [], []
    about, warnings = encoders_of(recipe, num_gpus)
    if of_optimizer := optimizer_of(recipe).summary(counts.trained_parameters, counts.num_in_matrices):
        about.append(f'optimizer: {of_optimizer}')
    return [], about, [*warnings, *of_text]


def look_at_autoencoder(recipe: AutoencoderRecipe, num_gpus: int) -> tuple[list[str], list[str], list[str]]:
    """The same of an autoencoder's data, networks and weights of the perceptual distance."""
    with quick_imports():
        from diffusion.autoencoding.planning import counts
        from diffusion.evaluation.features.lpips import find_perceptual
    errors, settings = data_errors(recipe), recipe.autoencoder
    try:
        counted_here = counts(recipe, activations=False)
    except Exception as error:  # whatever a configuration may set off in diffusers
        what = f'cannot be built as its configuration says: {type(error).__name__}: {one_line(error, 300)}'
        return [*errors, f'autoencoder.network: {settings.network} {what}; see diffusion/autoencoding/networks/{settings.network}.json'], [], []
    if settings.perceptual is not None:
        folder = settings.perceptual.weights
        try:
            find_perceptual(settings.perceptual.network, None if folder is None else Path(folder))
        except EncoderError as error:
            errors.append(f'autoencoder.perceptual.weights: {error}')
    trained = f'{counted_here.num_parameters:,} parameters of the autoencoder, {counted_here.flop / 1e9:,.1f} GFLOP a crop and step with all losses'
    return errors, [trained], []


def encoders_of(recipe: Recipe, num_gpus: int) -> tuple[list[str], list[str]]:
    """Return what there is to say of the recipe's encoders on other machines (`data.encoders`), and what to warn of; nothing without them.

    The images/s of training are predicted as diffusion.plan does without options: published for the GPU, or by an assumed MFU.
    """
    if recipe.data.encoders is None:
        return [], []
    gpu, num = recipe.cost.gpu, recipe.data.encoders.ray.actors
    unknown = f'encoders: {num:,}; how many keep up is not predicted:'
    if gpu not in MEMORY_GB:
        return [f'{unknown} cost.gpu names no GPU of diffusion/cost/hardware.py'], []
    facts = Facts(recipe, Counter.from_file().counts(recipe, activations=False), None)
    assumed, prices = draw_all(load_assumptions()), load_prices()
    try:
        (source,) = rate_sources(None, None, [facts], [Cluster(gpu, memory_gb(gpu), num_gpus, GPUS_PER_NODE)])
    except RateError as error:
        return [f'{unknown} {one_line(error, 300)}'], []
    encoder = encoder_of(facts, assumed, prices, price_of_run(recipe.cost, prices), gpu)
    fleet = online_fleet(facts, source.rate(num_gpus).images_per_sec, encoder, assumed)
    return ([], []) if fleet is None else ([f'encoders: {fleet}'], fleet.warnings(recipe.name))


def _streams(recipe: AnyRecipe) -> dict[str, dict[str, Stream]]:
    """Return the streams that training reads, by section of the recipe."""
    sections = {'data.streams': recipe.data.streams} if recipe.data.kind != 'synthetic' else {}
    sections |= {'eval.streams': recipe.eval.streams} if sections and recipe.eval.every else {}
    return {section: present(streams) for section, streams in sections.items()}


def missing_here(recipe: AnyRecipe, _: int = 1) -> list[str]:
    """Rule: the folders that training would read exist on this machine."""
    errors = []
    for section, streams in _streams(recipe).items():
        for name, stream in streams.items():
            if stream.local is not None and stream.remote is None and ':/' not in stream.local and not Path(stream.local).is_dir():
                errors.append(
                    f'{section}.{name}.local: there is no folder {stream.local} on this machine, and no remote to fetch it from; '
                    f'{section}.{name}=null leaves the stream out'
                )
            if stream.photos is not None and not Path(stream.photos.folder).is_dir():
                errors.append(
                    f'{section}.{name}.photos.folder: there is no folder {stream.photos.folder} on this machine; name the one with the images'
                )
            if stream.remote is not None and ':/' not in stream.remote and not Path(stream.remote).is_dir():
                errors.append(f'{section}.{name}.remote: there is no folder {stream.remote}; a bucket is s3://bucket/folder')
    start = recipe.load_path
    if start is not None and ':/' not in start and '@' not in start and not Path(start).exists():
        errors.append(f'load_path: there is no {start} on this machine; name a run folder, a .pt file, an exported folder or a URL')
    return errors


def data_errors(recipe: AnyRecipe, geometry: bool = False) -> list[str]:
    """List what training would refuse in the data on this machine; the digest of the VAE, which takes torch, is not compared with the latents'.

    Args:
        geometry: the network's family reads size and crop of an image.
    """
    errors = []
    for section, streams in _streams(recipe).items():
        found: dict[str, StreamSource] = {}
        sizes: dict[str, Mapping[str, int]] = {}
        for name, stream in streams.items():
            try:
                if is_prepared(stream):
                    sizes[name] = _sizes_once_prepared(recipe, f'{section}.{name}', name, stream)
                elif '://' not in where(stream):
                    sources = read_sources(recipe, section, {name: stream}, geometry=geometry)
                    sizes[name] = {bucket: source.manifest.num_samples for bucket, source in sources.items()}
                    found |= sources
            except ManifestError as error:
                errors += str(error).splitlines()
            except (DataError, StorageError, StorageRefusal) as error:
                errors.append(str(error).replace('\n', '\n    '))
        if len(sizes) < len(streams):
            continue  # the datasets can only be judged together
        try:
            store_text(found)
            if section == 'data.streams':
                errors += starts_before_the_end(recipe, length_in_batches(recipe, batches_per_epoch(recipe, sizes, streams)))
            elif recipe.data.aspect_buckets:
                shares(sizes, streams, batch_size=1, training=False)
        except ManifestError as error:
            errors.append(str(error))
    if recipe.data.kind == 'synthetic':
        per_epoch = recipe.data.synthetic_samples // recipe.batch.global_size
        errors += (
            starts_before_the_end(recipe, length_in_batches(recipe, per_epoch)) if per_epoch else [too_few(recipe, recipe.data.synthetic_samples)]
        )
    return errors


def _sizes_once_prepared(recipe: AnyRecipe, key: str, name: str, stream: Stream) -> Mapping[str, int]:
    """Count what a run will make of photos or draw, by aspect bucket.

    Raises:
        DataError: some photos cannot be used.
    """
    if stream.photos is None:
        assert stream.drawn is not None
        return {name: stream.drawn.num_images}
    assert isinstance(recipe, Recipe)  # an autoencoder has no photos, by its rules
    from diffusion.finetuning.photos import read_photos  # decoders, which no other recipe needs

    return Tally(f'{name}/{photo.bucket}' if photo.bucket else name for photo in read_photos(stream.photos, recipe.data, f'{key}.photos'))


def network_errors(recipe: Recipe) -> list[str]:
    """Return errors of the network: it is built on the meta device, which takes no memory, and sent one sample forward and back."""
    import torch

    from diffusion.families.adapters import add_adapter
    from diffusion.families.registry import family_for

    named, side = find_network(recipe.model.network), recipe.data.resolution // PIXELS_PER_LATENT
    try:
        family = family_for(recipe)
    except RecipeError as error:
        return error.errors
    try:
        with torch.device('meta'):
            network = family.build(named.config)
            if recipe.adapter is not None:
                add_adapter(network, recipe.adapter, family.adapter_targets[recipe.adapter.targets], recipe.seed)
            noisy, t, conditioning = family.example(named.config, 1, (side, side), TEXT_LENGTH)
            predicted = family.denoise(network, noisy, t, conditioning)
            predicted.sum().backward()
    except RecipeError as error:
        return error.errors
    except Exception as error:  # whatever a configuration may set off in diffusers
        return [
            f'model.network: {named.name} cannot be trained as its configuration says: {type(error).__name__}: {one_line(error, 300)}; '
            f'a network of {named.family} takes latents, times and one encoded caption; see diffusion/families/networks/{named.name}.json'
        ]
    if predicted.shape != noisy.shape:
        shapes = f'{tuple(predicted.shape)} of {tuple(noisy.shape)} latents'
        return [f'model.network: {named.name} makes {shapes}; set out_channels and in_channels to the same']
    return _unlike_encoders(recipe, family, family.text_width(named.config), family.latent_channels(named.config))


def _unlike_encoders(recipe: Recipe, family: Any, text_width: int, latent_channels: int) -> list[str]:
    """If the encoders lie in a folder, whether the network takes what they make."""
    from diffusion.encoders.frozen import vae_class

    folder, errors = Path(recipe.model.encoders.source), []
    if not folder.is_dir():
        return []
    more = sorted(path.parent.name for path in folder.glob('text_encoder_*/config.json'))
    for parts, key, ours in ((['text_encoder', *more], 'hidden_size', text_width), (['vae'], 'latent_channels', latent_channels)):
        found = list[int]()
        for path in (folder / part / 'config.json' for part in parts):
            try:
                config = parse_json_object(path.read_bytes())
                if key == 'latent_channels':
                    found.append(vae_class(config).channels_of(config))
                else:
                    found.append(config.get(key, config.get('d_model', 0)))  # as T5 calls its width
            except FileNotFoundError:
                errors.append(f'model.encoders.source: {path} is missing; a folder in the diffusers layout has vae, text_encoder and tokenizer')
            except EncoderError as error:
                errors.append(f'model.encoders.source: {folder}: {error}')
            except (ValueError, TypeError) as error:
                errors.append(f'model.encoders.source: {path} cannot be read: {error}; restore it from where the encoders came from')
        theirs = sum(found)
        if key == 'hidden_size' and found:
            try:
                _, _, theirs = family.text.joined(found, found)  # lengths do not matter here
            except EncoderError as error:  # too many or too few of them
                errors.append(str(error))
                continue
        if theirs and theirs != ours:
            where = ' and '.join(f'{folder / part}/config.json' for part in parts)
            errors.append(f'model.network: {recipe.model.network} reads {key} {ours}, and {where} says {theirs}; they must be the same')
    return errors


if __name__ == '__main__':
    raise SystemExit(main())
