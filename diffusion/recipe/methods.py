"""What a recipe may say of training methods: its section `methods` (docs/methods.md). What contradicts them is in rules.py."""

from dataclasses import dataclass

from diffusion.recipe.keys import MISSING, key


@dataclass(unsafe_hash=True)  # what is counted of a network is kept by its methods
class Routing:
    first_block: int = key(MISSING, 'First block that some tokens skip, counted from 0; the paper keeps 2 blocks before it.', low=0)
    last_block: int = key(MISSING, 'Last block that they skip; the paper keeps some after it.', low=0)
    keep: float = key(0.5, 'Share of the tokens (0..1) that do not skip, drawn again for each sample and epoch.', low=1e-3, high=1 - 1e-9)


@dataclass(unsafe_hash=True)
class Alignment:
    source: str = key(
        MISSING,
        'Frozen feature network (DINOv2, also with registers): a local folder with config.json and model.safetensors, or a Hub id.',
        remedy='name a local folder with config.json and model.safetensors, or a Hub id with its revision',
    )
    revision: str | None = key(None, 'Commit of the Hub repository (40 hex digits); required for a Hub id, meaningless for a folder.')
    block: int = key(MISSING, 'Block whose tokens are aligned, counted from 0; the paper takes the eighth of 28.', low=0)
    weight: float = key(0.5, 'Factor of its loss; 0.5 in the paper.', low=1e-6, high=1e3)
    width: int = key(2048, 'Channels inside the projection of the tokens; 2048 in the paper.', low=1, high=65536)


@dataclass(unsafe_hash=True)
class Contrastive:
    weight: float = key(0.05, 'Factor of the other error, which is subtracted; 0.05 in the paper.', low=1e-6, high=1 - 1e-9)


@dataclass(unsafe_hash=True)
class Uncertainty:
    num_cosines: int = key(32, 'Cosines of the time that the weight is made of; more follow a finer structure.', low=1, high=4096)


@dataclass(unsafe_hash=True)
class Methods:
    routing: Routing | None = key(None, 'TREAD (arXiv 2501.04765): a random part of the tokens skips some blocks. Transformers only.')
    alignment: Alignment | None = key(
        None, 'REPA (arXiv 2410.06940): tokens are pulled towards features of a frozen network. Transformers only, needs `data.kind: images`.'
    )
    contrastive: Contrastive | None = key(
        None, 'Contrastive flow matching (arXiv 2506.05350): away from the target of another sample; needs stored latents.'
    )
    uncertainty: Uncertainty | None = key(None, 'Loss weights by the learned uncertainty of each noise level (EDM2, arXiv 2312.02696).')
