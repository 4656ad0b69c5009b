"""The ComposerModel: a thin wrapper that calls a family, its encoders and its objective in order; and what it needs of the global batch."""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.utils import dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from diffusion.contracts.batch import Batch, Conditioning
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.keyed_random import Draw, by_id, normal, random_bits
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.families.adapters import trained_weights
from diffusion.families.networks import find_network
from diffusion.families.registry import attach_methods, family_of, training_flops
from diffusion.methods.method import TrainingMethod
from diffusion.objectives import build_objective
from diffusion.objectives.objective import Objective, Outputs, guided, sample_with, split, spread_points, weighted_error
from diffusion.recipe import Recipe
from diffusion.recipe.schema import Adapter, Model
from diffusion.recipe.techniques import Methods
from diffusion.training.machine import BACKEND, compile_network, compiled, eager

GENERATE_BATCH = 16  # images drawn together, which bounds the memory of a sample grid
EVAL_SEED_OFFSET = 1  # evaluation noise must not be training noise of the same sample


class TextToImage(ComposerModel):
    """Trains the network; the encoders stay outside the registered modules and thus out of checkpoints and wrappers, but for text encoders with
    adapters. Of what is frozen nothing is saved.

    Args:
        network: the module to train.
        encoders: frozen VAE and text encoders.
        model: the recipe's `model` section, which names the network's family and the objective.
        seed: keys all noise and times, together with each sample's key.
        eval_timesteps: number of evenly spaced times that evaluation uses.
        autocast: follow the surrounding precision; False where the network's weights are bf16 already.

    Raises:
        EncoderError: the network reads text of another width than the encoders write.
    """

    network: Any
    objective: Any

    def __init__(self, network: Any, encoders: FrozenEncoders, model: Model, seed: int, eval_timesteps: int = 10, autocast: bool = True):
        super().__init__()
        named = find_network(model.network)
        self.network, self.named, self.family, self.objective = network, named, family_of(model.network), build_objective(model)
        for what, width, theirs in (
            ('text', self.family.text_width(named.config), encoders.text.width),
            ('pooled text', self.family.pooled_width(named.config), encoders.text.pooled_width),
        ):
            if width not in (None, theirs):
                raise EncoderError(
                    f"the network '{named.name}' expects {what} of width {width}, the text encoder gives {theirs}; use encoders made for this network"
                )
        self._encoders = [encoders]  # in a list, so that nn.Module does not register its modules
        adapted = {name: part.module for name, part in encoders.text.parts.items() if part.adapted}
        if adapted:
            self.text_encoders = nn.ModuleDict(adapted)
        self.adapter: Adapter | None = None
        self.base_sha256: str | None = None  # of the frozen network that the adapter belongs to
        self.zeros_for_empty, self.scheduler = False, None  # how the published model that it began from draws (DrawingSettings)
        if not all(weight.requires_grad for weight in self.parameters()):
            leave_out_frozen(self)
        self.seed, self.timesteps, self.eval_timesteps, self.autocast = seed, model.timesteps, eval_timesteps, autocast
        self._noised = self.noised
        self.trained_by, self.methods = Methods(), dict[str, TrainingMethod]()

    def attach(self, methods: Methods) -> None:
        """Train with these methods of a recipe.

        Raises:
            RecipeError: one does not fit the network, or a feature network cannot be read.
        """
        self.trained_by = methods
        self.methods = attach_methods(methods, self.family, self.named.config, self.network, self.objective.end, self._target, self.seed)
        for name, method in self.methods.items():
            if any(True for _ in method.parameters()):  # only what has weights is there for checkpoints and sharding
                self.add_module(name, method)

    @property
    def encoders(self) -> FrozenEncoders:
        return self._encoders[0]

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def forward(self, batch: Batch) -> Outputs:
        """The network's prediction at a random time of each sample."""
        for method in self.methods.values():
            method.begin(batch)
        return self._predict(batch, self._times(batch), self.seed)

    def _times(self, batch: Batch) -> Tensor:
        """(B,): those that the batch brings, or a draw for each sample. Only the whole global batch can be spread evenly."""
        if 'timesteps' in batch or self.timesteps == 'sobol':  # whose absence must not pass for a uniform draw
            return batch['timesteps']
        return self.objective.times(random_bits(self.seed, batch['sample_key'], Draw.TIMESTEP, 1)[:, 0])

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Mean over the samples of error x weight of the sample's stream.

        Not divided by the sum of the weights: a sample then counts the same whatever else is in its batch, its micro-batch and on its GPU, and a
        stream of weight w and share s of the samples has the part w x s of the gradient, as prior preservation has it.
        """
        error = weighted_error(outputs.prediction, outputs.target, outputs.weight, outputs.loss_map)
        for method in self.methods.values():
            error = method(error, outputs, batch)
        return (error * batch['loss_weight'] if 'loss_weight' in batch else error).mean()

    def eval_forward(self, batch: Batch, outputs: Outputs | None = None) -> Outputs:
        """At a fixed time with fixed noise for each sample id, so that equal weights give equal losses to the bit."""
        if outputs is not None:
            return outputs
        sample_id = batch['sample_key'][:, 1]
        key = by_id(sample_id)  # the same in every epoch
        t = self.objective.evenly_spaced(self.eval_timesteps).to(sample_id.device)[sample_id % self.eval_timesteps]
        with eager():
            return self._predict({**batch, 'sample_key': key}, t, self.seed + EVAL_SEED_OFFSET)

    def compile_step(self, mode: str) -> None:
        """Compile what a training step runs: the network as `mode` says, the noising, and the encoders."""
        compile_network(self.network, mode, self.family.blocks)
        self._noised = compiled(self.noised)
        self.encoders.compile(BACKEND)

    def _predict(self, batch: Batch, t: Tensor, seed: int) -> Outputs:
        moments = batch['moments'] if 'moments' in batch else self.encoders.vae.encode(batch['images'])
        with torch.autocast(moments.device.type, enabled=False):  # the objective's arithmetic is float32
            noisy, target = self._noised(moments, batch['sample_key'], t, seed)
            weight = self.objective.weight(t)
        return Outputs(self.denoise(noisy, t, self.conditioning(batch)), target, weight, t, batch.get('loss_map'))

    def conditioning(self, batch: Batch) -> Conditioning:
        """Text and geometry of the batch's images, for the network."""
        stored, tokens = batch.get('text_embeddings'), batch['tokens']
        if stored is None:
            conditioning = self.encoders.text.encode(tokens)
        else:
            conditioning = self.encoders.text.stored(stored, batch.get('pooled_embeddings'), tokens)
        if self.zeros_for_empty:
            empty = [(tokens[name] == ids.to(tokens[name].device)).all(dim=1) for name, ids in self.encoders.text.tokenize(['']).items()]
            conditioning = _zeroed(conditioning, torch.stack(empty).all(dim=0))
        return conditioning._replace(geometry=batch['geometry']) if self.family.reads_geometry else conditioning

    def noised(self, moments: Tensor, key: Tensor, t: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Noisy latents and the target of the prediction, both (B, C, h, w) float32, of the VAE's moments (B, 2C, h, w).

        Args:
            key: (B, 3) int64 sample keys, on which all noise depends.
            t: (B,) times.
        """
        shape = (moments.shape[1] // 2, *moments.shape[2:])
        latents = self.encoders.vae.latents(moments, normal(seed, key, Draw.POSTERIOR, shape))
        noisy, target = self.objective.noised(latents, self.objective.noise(seed, key, shape), t)
        return self.family.laid_out(noisy), self.family.laid_out(target)

    def _target(self, moments: Tensor, key: Tensor, t: Tensor) -> Tensor:
        with torch.autocast(moments.device.type, enabled=False):
            return self._noised(moments, key, t, self.seed)[1]

    def denoise(self, noisy: Tensor, t: Tensor, conditioning: Conditioning) -> Tensor:
        """The network's output (B, C, h, w)."""
        device = noisy.device.type
        with nullcontext() if self.autocast else torch.autocast(device, enabled=False):
            # Text in the dtype of the arithmetic: every attention would convert it again.
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else noisy.dtype
            return self.family.denoise(self.network, noisy, t, conditioning._replace(text=conditioning.text.to(dtype)))

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        """The training loss is logged without one."""
        return {} if is_train else losses_by_time(self.objective.end, self.eval_timesteps)

    def update_metric(self, batch: Any, outputs: Outputs, metric: Metric) -> None:
        metric.update(batch['sample_key'][:, 1], weighted_error(outputs.prediction, outputs.target, loss_map=outputs.loss_map), outputs.t)

    def flops_per_batch(self, batch: Batch) -> int:
        """Counted FLOP of the network's forward and backward pass over the batch, and of what methods add; the encoders are left out."""
        if 'moments' in batch:
            height, width = batch['moments'].shape[-2:]
        else:
            height, width = (side // self.encoders.vae.downsampling for side in batch['images'].shape[-2:])
        per_sample = training_flops(self.named.name, (height, width), self.encoders.text.length, self.adapter, self.trained_by)
        return len(batch['sample_key']) * per_sample

    @torch.no_grad()
    def generate(self, prompts: list[str], resolution: int, guidance: float, steps: int, seed: int, ids: Sequence[int] | None = None) -> Tensor:
        """(B, 3, H, W) uint8 images. Noise depends on the seed and a prompt's id alone, on any device; without `ids` that is its position."""
        side = resolution // self.encoders.vae.downsampling
        ids = list(range(len(prompts)) if ids is None else ids)
        noise = normal(seed, by_id(torch.tensor(ids)), Draw.NOISE, (self.encoders.vae.latent_channels, side, side)).to(self.device)
        noise = self.family.laid_out(noise)
        images = []
        with eager():
            tokens = [self.encoders.text.tokenize(captions) for captions in (prompts, [''] * len(prompts))]
            given, empty = (self._of_whole_images(self.encoders.text.encode(each), resolution) for each in tokens)
            if self.zeros_for_empty:
                empty = _zeroed(empty, torch.ones(len(empty.text), dtype=torch.bool, device=empty.text.device))
            for number, (part, prompted, unprompted) in enumerate(
                zip(noise.split(GENERATE_BATCH), split(given, GENERATE_BATCH), split(empty, GENERATE_BATCH), strict=True)
            ):
                denoise = guided(self.denoise, prompted, unprompted, guidance)
                if self.scheduler is None:
                    latents = self.family.sample(self.objective, denoise, part, steps)
                else:
                    own = [torch.Generator().manual_seed(seed + i) for i in ids[number * GENERATE_BATCH :][: len(part)]]
                    latents = sample_with(self.scheduler, denoise, part, steps, own)
                images.append(self.encoders.vae.decode(latents))
        return torch.cat(images)

    def _of_whole_images(self, conditioning: Conditioning, resolution: int) -> Conditioning:
        """Original and target size of a drawn image are the resolution, and nothing of it is cropped."""
        if not self.family.reads_geometry:
            return conditioning
        whole = torch.tensor([resolution, resolution, 0, 0, resolution, resolution], dtype=torch.int32, device=self.device)
        return conditioning._replace(geometry=whole.expand(len(conditioning.text), -1))


def _zeroed(conditioning: Conditioning, empty: Tensor) -> Conditioning:
    """The conditioning with zeros in place of the captions that are marked (B,), as diffusers' force_zeros_for_empty_prompt has them."""
    text = conditioning.text.masked_fill(empty[:, None, None], 0)
    return conditioning._replace(text=text, pooled=None if conditioning.pooled is None else conditioning.pooled.masked_fill(empty[:, None], 0))


def leave_out_frozen(model: nn.Module) -> None:
    """Let the state of a model hold what is trained alone: to save and, strictly, to load."""

    def keep_trained(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
        trained = {f'{prefix}{name}' for name in trained_weights(module)}
        for name in [name for name in state if name.startswith(prefix) and name not in trained]:
            del state[name]

    def expect_trained(module: nn.Module, keys: Any) -> None:
        trained = tuple(trained_weights(module))
        keys.missing_keys[:] = [name for name in keys.missing_keys if name.endswith(trained)]  # wrappers put their names in front

    model.register_state_dict_post_hook(keep_trained)
    model.register_load_state_dict_post_hook(expect_trained)


class GlobalBatchAlgorithm(Algorithm):
    """Adds entries to a batch that only the processes together can make, before it is split into micro-batches.

    Each is made of the whole global batch, gathered on the device, so that the number of GPUs and the micro-batch change nothing. Saves nothing: what
    it needs is the number of the batch, which a resume restores. Checkpoints have the names of the subclasses.
    """

    def match(self, event: Event, state: State) -> bool:
        return event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        def everyones(name: str) -> Tensor:
            # The loader's batch is still on the CPU, where NCCL cannot gather. Composer moves the rest micro-batch by micro-batch.
            return torch.cat(list(dist.all_gather(state.device.tensor_to_device(state.batch[name]))))

        size = len(state.batch['sample_key'])
        begin = dist.get_global_rank() * size
        state.batch = {**state.batch, **self.added(everyones, slice(begin, begin + size), state.timestamp.batch.value)}

    @abstractmethod
    def added(self, everyones: Callable[[str], Tensor], mine: slice, batch_index: int) -> dict[str, Tensor]:
        """This rank's part of what is added; `everyones`, `mine`: see TrainingMethod.from_global_batch."""


class SpreadTimes(GlobalBatchAlgorithm):
    """Adds `timesteps` from a Sobol sequence. The keys are ranked on the device, where nothing waits for them: 24 bytes a sample.

    Args:
        seed: of the run.
        objective: what makes times of points.
    """

    def __init__(self, seed: int, objective: Objective):
        self.seed, self.objective = seed, objective

    def added(self, everyones: Callable[[str], Tensor], mine: slice, batch_index: int) -> dict[str, Tensor]:
        return {'timesteps': self.objective.times(spread_points(self.seed, everyones('sample_key'), batch_index))[mine]}


class GiveOthers(GlobalBatchAlgorithm):
    """Adds what methods make of the samples of all ranks."""

    def __init__(self, methods: Sequence[TrainingMethod]):
        self.methods = methods

    def added(self, everyones: Callable[[str], Tensor], mine: slice, batch_index: int) -> dict[str, Tensor]:
        return {name: tensor for method in self.methods for name, tensor in method.from_global_batch(everyones, mine).items()}


def global_batch_algorithms(recipe: Recipe, model: Any) -> list[Algorithm]:
    """Algorithms that the recipe's timesteps and methods need."""
    algorithms: list[Algorithm] = [SpreadTimes(recipe.seed, model.objective)] if recipe.model.timesteps == 'sobol' else []
    asking = [method for method in model.methods.values() if type(method).from_global_batch is not TrainingMethod.from_global_batch]
    return [*algorithms, GiveOthers(asking)] if asking else algorithms


class LossAtTimes(Metric):
    """Mean unweighted error of the samples whose time lies in [low, high).

    Each sample counts once, in the order of ids, in float64: Streaming repeats some samples to fill the last batches, which must
    not make the result depend on the batch size or the number of GPUs.
    """

    ids: list[Tensor]
    errors: list[Tensor]
    times: list[Tensor]

    def __init__(self, low: float, high: float):
        super().__init__()
        self.low, self.high = low, high
        for state in ('ids', 'errors', 'times'):
            self.add_state(state, [], dist_reduce_fx='cat')

    def update(self, sample_id: Tensor, error: Tensor, t: Tensor) -> None:
        """`sample_id` (B,) int64, `error` (B,) float32, `t` (B,) times."""
        self.ids.append(sample_id)
        self.errors.append(error.double())
        self.times.append(t)

    def compute(self) -> Tensor:
        """NaN for a bin that no sample fell into."""
        ids, errors, t = (dim_zero_cat(state) for state in (self.ids, self.errors, self.times))
        order = ids.argsort(stable=True)
        first = torch.ones_like(order, dtype=torch.bool)
        first[1:] = ids[order].diff() != 0
        inside = (t[order] >= self.low) & (t[order] < self.high) & first
        return errors[order][inside].mean().float()


def losses_by_time(end: float, count: int) -> dict[str, Metric]:
    """`loss`, and `loss_tLOW-HIGH` for each of `count` equal parts of the times in [0, end): of 1000 timesteps and of thousandths alike."""
    scale = 1 if end > 1 else 1000
    edges = [i * end / count for i in range(count + 1)]
    bins = {f'loss_t{int(low * scale):03d}-{int(high * scale) - 1:03d}': LossAtTimes(low, high) for low, high in itertools.pairwise(edges)}
    return {'loss': LossAtTimes(0, end), **bins}
