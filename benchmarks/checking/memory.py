"""Does a step hold what was predicted, and does `batch.micro_size: auto` find what should fit?"""

import copy
from functools import partial

import torch

from benchmarks.checking.cases import Case, Setting, Values, require_gpu
from benchmarks.checking.steps import described, values_of
from benchmarks.checking.training import small_recipe
from benchmarks.step_rows import recipe_of, step_row
from benchmarks.timing import device, on_gpu
from diffusion.cost.facts import Cluster, Facts
from diffusion.families.counting.counts import Counter
from diffusion.families.registry import family_of
from diffusion.recipe import Recipe
from diffusion.training.builder import build_trainer

EAGER = '+ encoders in bf16'  # the last row of the ablation before compilation: what activations are counted for


def cases(setting: Setting) -> list[Case]:
    eager = [
        Case(f'{px} px{", activations computed twice" if twice else ""}', partial(peak, setting, px, twice), setting.sec(20))
        for px in setting.micro_batch for twice in (False, True)
    ]  # fmt: skip
    return [*eager, Case('batch.micro_size: auto', partial(automatic, setting), setting.sec(60))]


def facts_of(recipe: Recipe) -> Facts:
    """Its encoders are the stand-ins of its U-Net, whose counts are kept by that name."""
    recipe = copy.deepcopy(recipe)
    recipe.model.encoders.source = '.'
    return Facts(recipe, Counter.from_file().counts(recipe), None)


def one_gpu() -> Cluster:
    """This one; a CPU stands for one with room enough."""
    total_bytes = torch.cuda.get_device_properties(0).total_memory if on_gpu() else 10**12
    return Cluster(gpu='this', gpu_gb=total_bytes / 1e9, num_gpus=1, gpus_per_node=1)


def peak(setting: Setting, resolution: int, twice: bool) -> Values:
    """The highest memory of a step, against diffusion.plan's for the same recipe; without a GPU only predicted."""
    described_as = described(setting, resolution)
    row = step_row(EAGER, family_of(setting.network).checkpoint_activations if twice else None)
    overrides: Values = {**described_as, 'ema.half_life': 'null', 'train.checkpoint_activations': str(twice).lower()}
    recipe = recipe_of(row.switches, encoders=setting.encoders(), device=device(), **overrides)
    expected = facts_of(recipe).memory(one_gpu())
    parts = {'predicted_bytes': expected.total, 'predicted_parts_bytes': expected.parts}
    if not on_gpu():
        return {**described_as, **parts}  # the resident set of a process on a CPU is mostly PyTorch itself
    values = values_of(row, setting, described_as, steps=2, warmup=2)
    # A single micro-batch has no gradients yet when its activations are the most; the prediction is of several.
    least = expected.total - expected.parts['gradients']
    return {**values, **parts, 'predicted': {'peak_allocated_bytes': [least, expected.total]}}


def automatic(setting: Setting) -> Values:
    """Three steps of the Trainer with the micro-batch that it finds, in the global batch of the recipe."""
    require_gpu(': there is nothing to try how much fits on')
    global_size = 64 if setting.tiny else 2048
    overrides = {
        'model.network': setting.network, 'model.encoders.source': setting.encoders(), 'data.resolution': setting.first_px, 'log.every': 1,
        'data.synthetic_samples': 3 * global_size, 'batch.global_size': global_size, 'batch.micro_size': 'auto', 'train.duration': '3ba',
        'optimizer.warmup': '1ba', 'ema.start': '1ba',
    }  # fmt: skip
    recipe = small_recipe(setting, 'auto', **overrides)
    expected = facts_of(recipe).memory(one_gpu()).micro_size
    trainer = build_trainer(recipe)
    found = int(trainer.state.device_train_microbatch_size or 0)
    trainer.fit()
    trainer.close()
    return {'micro_batch': found, 'peak_allocated_bytes': torch.cuda.max_memory_allocated(), 'predicted': {'micro_batch': [expected, expected]}}
