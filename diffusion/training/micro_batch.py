"""`batch.micro_size: auto`: the largest micro-batch that a GPU has room for, found by trying before training begins.

Tried on the bare model, before it is sharded or compiled, so that no rank waits for another and nothing is compiled in vain. What training
will hold next to weights and gradients is held as ballast. Compiled steps need less memory than eager ones: the answer errs on the small side.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from composer.utils import dist

from diffusion.contracts.batch import GEOMETRY, Batch
from diffusion.cost.facts import MEMORY_SHARE, divisors, state_bytes
from diffusion.recipe import AnyRecipe, Recipe, RecipeError
from diffusion.recipe.techniques import optimizer_of
from diffusion.training.model import TextToImage

OUT_OF_MEMORY = ('out of memory', 'ALLOC_FAILED', "can't allocate memory")  # the last: PyTorch on a CPU
BEYOND_INDICES = 'CUDNN_STATUS_NOT_SUPPORTED'  # what cuDNN says to sizes beyond its indices, and to other things


class NoRoom(RecipeError):
    """Not even one sample fits: a setting is wrong, and memory is what ran out."""


def micro_size(recipe: AnyRecipe, model: Any, blank: Callable[[int], Batch]) -> int:
    """Size in the recipe, or the largest divisor of a GPU's share of the batch that fits, the same on all ranks.

    Args:
        model: a ComposerModel with `device` and `autocast`.
        blank: a batch of so many samples, of the shapes that training has, on the model's device.

    Raises:
        RecipeError: `auto` without a GPU.
        NoRoom: not even one sample fits.
    """
    if recipe.batch.micro_size != 'auto':
        return int(recipe.batch.micro_size)
    device = model.device
    if device.type != 'cuda':
        raise RecipeError(recipe.name, ['batch.micro_size: auto tries how much fits on a GPU, and this machine has none; set a number'])
    sizes = divisors(recipe.batch.global_size // dist.get_world_size())
    torch.cuda.set_per_process_memory_fraction(MEMORY_SHARE, device)
    try:
        ballast = torch.empty(ballast_bytes(recipe, model), dtype=torch.uint8, device=device)
        found = largest_fitting(sizes, lambda size: _fits(blank, size, recipe, model))
        del ballast
    except torch.cuda.OutOfMemoryError:
        found = 0
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # the log's peak is that of training
    smallest = torch.tensor([found], device=device)
    dist.all_reduce(smallest, reduce_operation='MIN')
    if smallest.item() == 0:
        raise NoRoom(
            recipe.name,
            ['batch.micro_size: not even one sample fits on this GPU; set train.checkpoint_activations=true or train.sharding=zero2'],
        )
    return int(smallest.item())


def largest_fitting(sizes: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The largest of ascending `sizes` that fits, or 0; what is smaller than one that fits fits too."""
    num_fitting = bisect_left(sizes, True, key=lambda size: not fits(size))
    return sizes[num_fitting - 1] if num_fitting else 0


def ballast_bytes(recipe: AnyRecipe, model: Any) -> int:
    """Bytes that training holds on each GPU next to fp32 weights and gradients: the optimizer's state, the average, DDP's buckets."""
    matrices = model.family.matrices(model) if optimizer_of(recipe).trains_matrices else ()
    held = state_bytes(
        recipe,
        sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        sum(weight.numel() for weight in matrices if weight.requires_grad),
        dist.get_world_size(),
        dist.get_local_world_size(),
    )
    return held['optimizer state'] + held['EMA'] + held["DDP's buckets"]


def out_of_memory(error: BaseException) -> bool:
    """Whether there was no room, on the GPU or the host; libraries that want memory for themselves raise errors of their own."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError | NoRoom):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)


def _fits(blank: Callable[[int], Batch], size: int, recipe: AnyRecipe, model: Any) -> bool:
    autocast, model.autocast = model.autocast, True  # its weights are not bf16 yet
    with torch.autocast('cuda', torch.bfloat16, enabled=recipe.train.precision != 'fp32'):
        try:
            batch = blank(size)
            model.loss(model(batch), batch).backward()
            return True
        except RuntimeError as error:
            if out_of_memory(error) or BEYOND_INDICES in str(error):  # whichever it is, so large a batch cannot be computed
                return False
            raise
        finally:
            model.autocast = autocast
            model.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()


def blank_batch(size: int, recipe: Recipe, model: TextToImage, text_stored: bool = False) -> Batch:
    """A batch of the shapes that training has, on the model's device."""
    device, encoders, resolution = model.device, model.encoders, recipe.data.resolution
    side = resolution // encoders.vae.downsampling
    batch: Batch = {
        'tokens': {name: part.to(device) for name, part in encoders.text.tokenize([''] * size).items()},
        'sample_key': torch.zeros(size, 3, dtype=torch.int64, device=device),
    }
    if recipe.data.kind == 'images' and recipe.data.encoders is None:
        batch['images'] = torch.zeros(size, 3, resolution, resolution, dtype=torch.uint8, device=device)
    else:
        batch['moments'] = torch.zeros(size, 2 * encoders.vae.latent_channels, side, side, dtype=torch.float16, device=device)
    if text_stored:
        batch['text_embeddings'] = torch.zeros(size, encoders.text.length, encoders.text.width, dtype=torch.float16, device=device)
        if encoders.text.pooled_width is not None:
            batch['pooled_embeddings'] = torch.zeros(size, encoders.text.pooled_width, dtype=torch.float16, device=device)
    if model.family.reads_geometry:
        batch['geometry'] = torch.zeros(size, GEOMETRY, dtype=torch.int32, device=device)
    for method in model.methods.values():
        batch |= method.from_global_batch(dict(batch).__getitem__, slice(None))  # type: ignore[typeddict-item, arg-type]
    if recipe.model.timesteps == 'sobol':
        batch['timesteps'] = model.objective.times(torch.zeros(size, dtype=torch.int64, device=device))
    return batch
