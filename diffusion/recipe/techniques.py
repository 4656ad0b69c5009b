"""Training techniques that a recipe switches on by a section of its own, and what each answers about itself: methods and optimizers.

`techniques(recipe)` lists those that are on. Rules ask them what they contradict; plan, check and memory how many bytes and FLOP they take; the model
card names them. No torch: what computes with tensors is diffusion/methods/NAME.py for `methods.NAME`, and diffusion/training/optimizers.py.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from diffusion.recipe.keys import MISSING, Duration, hints_of, key, neither_folder_nor_hub_id, options, pins

LEARNING_RATE = 'learning rate'  # in the log `lr-AdamW/group0`, after the class of the optimizer: the rate of its first group


def plain_name(metric: str) -> str:
    """Return the name of a metric whatever the optimizer: LEARNING_RATE for the rate of its first group."""
    return LEARNING_RATE if metric.startswith('lr-') and metric.endswith('/group0') else metric


class Technique:
    """A section that is null where the technique is off.

    Attributes:
        conflicts: rows of conflicts.py: settings that it cannot be combined with, and the error.
    """

    conflicts: ClassVar[Mapping[str, str]] = {}

    def contradictions(self, recipe: Any) -> list[str]:
        """List what else it contradicts in the recipe, where something is computed: value, limit and remedy."""
        return []


class MethodSettings(Technique):
    """A training method, which diffusion/methods/NAME.py attaches to a network."""

    def blocks(self) -> dict[str, int]:
        """Return the transformer blocks between which it works on tokens, by key; empty if it leaves the inside of the network alone."""
        return {}

    def changes_flop(self) -> str:
        """Name what the FLOP of a training pass depend on, which are counted with the method attached; empty if it adds and saves none."""
        return ''


class OptimizerSettings(Technique):
    """Attributes:
    trains_matrices: it treats matrices inside the network's blocks (`Family.matrices`) by themselves, so that they have to be counted.
    """

    trains_matrices: ClassVar[bool] = False

    def state_bytes(self, num_parameters: int, num_in_matrices: int) -> int:
        """Return the bytes that it keeps from step to step, on a GPU and in checkpoints.

        Args:
            num_in_matrices: of the parameters, those of such matrices; 0 unless it `trains_matrices`.
        """
        raise NotImplementedError

    def summary(self, num_parameters: int, num_in_matrices: int) -> str:
        """Say which parameters it trains and how; empty if it trains all alike."""
        return ''


def techniques(recipe: Any) -> dict[str, Any]:
    """Return the settings of all techniques that are on, by key: `optimizer.muon`, `methods.routing`."""
    sections = {name: getattr(recipe, name, None) for name in ('optimizer', 'methods')}  # recipes of autoencoders have no methods
    return {f'{name}.{technique}': settings for name, section in sections.items() for technique, settings in switched_on(section).items()}


def switched_on(section: Any) -> dict[str, Any]:
    """Return the settings of the techniques that are on in a section, by name, in the order of the schema."""
    if section is None:
        return {}
    settings = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {name: one for name, one in settings.items() if isinstance(one, Technique)}


def optimizer_of(recipe: Any) -> OptimizerSettings:
    """Return what answers for the recipe's optimizer."""
    return next((one for one in techniques(recipe).values() if isinstance(one, OptimizerSettings)), AdamWSettings())


class AdamWSettings(OptimizerSettings):
    """The optimizer where no other is on."""

    def state_bytes(self, num_parameters: int, num_in_matrices: int) -> int:
        return 8 * num_parameters


@dataclasses.dataclass
class MuonSettings(OptimizerSettings):
    trains_matrices: ClassVar[bool] = True
    conflicts: ClassVar[Mapping[str, str]] = {
        'adapter, optimizer.muon': (
            "optimizer.muon: would orthogonalize an adapter's two factors, not the change that they make together; set optimizer.muon=null"
        ),
        'autoencoder, optimizer.muon': (
            'optimizer.muon: is for the matrices of transformer blocks, and an autoencoder is made of convolutions; set optimizer.muon=null'
        ),
    }

    momentum: float = key(0.95, "Share of Muon's momentum that a batch keeps, with Nesterov's look ahead.", low=0, high=1 - 1e-9)
    steps: int = key(5, 'Newton-Schulz steps that orthogonalize a matrix; 5 bring singular values to 0.68 .. 1.2.', low=1, high=20)

    def state_bytes(self, num_parameters: int, num_in_matrices: int) -> int:
        return 8 * num_parameters - 4 * num_in_matrices

    def summary(self, num_parameters: int, num_in_matrices: int) -> str:
        share = num_in_matrices / num_parameters
        return f'Muon trains {share:.1%} of {num_parameters:,} parameters, with one state each; AdamW the rest, with two'


@dataclasses.dataclass
class Optimizer:
    lr: float = key(1e-4, 'Peak learning rate, of the last batch of `warmup`.', low=0, high=1)
    weight_decay: float = key(0.01, 'Decoupled weight decay.', low=0, high=1)
    betas: tuple[float, float] = key((0.9, 0.999), "AdamW's momentum coefficients.", low=0, high=1 - 1e-9)
    eps: float = key(1e-8, "AdamW's denominator term.", low=1e-20, high=1)
    muon: MuonSettings | None = key(None)
    """Muon for the matrices of the network's blocks, at the same `lr` and `weight_decay` (arXiv 2502.16982), AdamW for the rest; null: AdamW for
    all."""
    clip_norm: float | None = key(1.0, 'Largest global gradient norm; null does not clip.', low=1e-12, high=1e12)
    warmup: Duration = key('10000ba', units=('ba',))
    """Batches of linear warm-up: the first has the rate lr / warmup, the last has `lr`; 0ba begins with `lr`."""
    decay: Literal['constant', 'cosine', 'cooldown'] = key('constant')
    """After the warm-up: stay at `lr`; follow a cosine to 0 at the end of the run; or stay, and fall to 0 in the last fifth (arXiv 2405.18392)."""


@dataclasses.dataclass(unsafe_hash=True)  # what is counted of a network is kept by its methods
class Routing(MethodSettings):
    first_block: int = key(MISSING, 'First block that some tokens skip, counted from 0; the paper keeps 2 blocks before it.', low=0)
    last_block: int = key(MISSING, 'Last block that they skip; the paper keeps some after it.', low=0)
    keep: float = key(0.5, 'Share of the tokens (0..1) that do not skip, drawn again for each sample and epoch.', low=1e-3, high=1 - 1e-9)

    def blocks(self) -> dict[str, int]:
        return {'first_block': self.first_block, 'last_block': self.last_block}

    def changes_flop(self) -> str:
        return f'routing {self.first_block} to {self.last_block} {self.keep:g}'

    def contradictions(self, recipe: Any) -> list[str]:
        if self.first_block <= self.last_block:
            return []
        return [f'methods.routing.last_block: {self.last_block} is before first_block, {self.first_block}; set it to that or a later one']


@dataclasses.dataclass(unsafe_hash=True)
class Alignment(MethodSettings):
    conflicts: ClassVar[Mapping[str, str]] = {
        'methods.alignment, data.kind!=images': (
            'methods.alignment: looks at the images, and data.kind is {data.kind}; set data.kind=images (or methods.alignment=null)'
        ),
        'methods.alignment, data.kind=images, data.encoders': (
            'methods.alignment: looks at the images, and data.encoders takes them away; set data.encoders=null (or methods.alignment=null)'
        ),
    }

    source: str = key(MISSING, remedy='name a local folder with config.json and model.safetensors, or a Hub id with its revision')
    """Frozen feature network (DINOv2, also with registers): a local folder with config.json and model.safetensors, or a Hub id."""
    revision: str | None = key(None, 'Commit of the Hub repository (40 hex digits); required for a Hub id, meaningless for a folder.')
    block: int = key(MISSING, 'Block whose tokens are aligned, counted from 0; the paper takes the eighth of 28.', low=0)
    weight: float = key(0.5, 'Factor of its loss; 0.5 in the paper.', low=1e-6, high=1e3)
    width: int = key(2048, 'Channels inside the projection of the tokens; 2048 in the paper.', low=1, high=65536)

    def blocks(self) -> dict[str, int]:
        return {'block': self.block}

    def changes_flop(self) -> str:
        return f'alignment {self.source} {self.revision} {self.block} {self.width}'

    def contradictions(self, recipe: Any) -> list[str]:
        routing, errors = recipe.methods.routing, []
        if wrong := neither_folder_nor_hub_id(self.source):
            errors.append(f'methods.alignment.source: {wrong}; name a folder with config.json and model.safetensors, or a Hub id')
        elif not Path(self.source).is_dir() and not pins(self.revision):
            errors.append(f"methods.alignment.revision: '{self.revision}' does not pin {self.source}; set the 40 hex digits of a commit")
        if routing is not None and routing.first_block <= self.block < routing.last_block:
            errors.append(
                f'methods.alignment.block: tokens are missing after block {self.block}, where methods.routing lets them skip blocks '
                f'{routing.first_block} to {routing.last_block}; take a block outside'
            )
        return errors


@dataclasses.dataclass(unsafe_hash=True)
class Contrastive(MethodSettings):
    conflicts: ClassVar[Mapping[str, str]] = {
        'methods.contrastive, data.kind=images, !data.encoders': (
            'methods.contrastive: takes latents of other samples of the batch, which each GPU encodes later with data.kind images; set '
            'data.kind=latents, or methods.contrastive=null'
        ),
        'methods.contrastive, batch.global_size=1': (
            'methods.contrastive: needs another sample in the batch, and batch.global_size is 1; set it to 2 or more'
        ),
    }

    weight: float = key(0.05, 'Factor of the other error, which is subtracted; 0.05 in the paper.', low=1e-6, high=1 - 1e-9)


@dataclasses.dataclass(unsafe_hash=True)
class Uncertainty(MethodSettings):
    conflicts: ClassVar[Mapping[str, str]] = {
        'methods.uncertainty, train.precision=bf16': 'methods.uncertainty: bf16 would round the loss; set train.precision=amp_bf16'
    }

    num_cosines: int = key(32, 'Cosines of the time that the weight is made of; more follow a finer structure.', low=1, high=4096)


@dataclasses.dataclass(unsafe_hash=True)
class Methods:
    """Methods in the order in which they are attached, and in which they change the loss: behind the last block of routing all tokens are there."""

    routing: Routing | None = key(None, 'TREAD (arXiv 2501.04765): a random part of the tokens skips some blocks. Transformers only.')
    uncertainty: Uncertainty | None = key(None, 'Loss weights by the learned uncertainty of each noise level (EDM2, arXiv 2312.02696).')
    contrastive: Contrastive | None = key(None)
    """Contrastive flow matching (arXiv 2506.05350): away from the target of another sample; needs stored latents."""
    alignment: Alignment | None = key(None)
    """REPA (arXiv 2410.06940): tokens are pulled towards features of a frozen network. Transformers only, needs `data.kind: images`."""


def known_techniques() -> list[type[Technique]]:
    """Return the sections of all techniques that a recipe may switch on."""
    kinds = [kind for section in (Optimizer, Methods) for hint in hints_of(section).values() for kind in options(hint)]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Technique)]
