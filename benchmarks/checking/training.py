"""The Trainer itself, with a small model: host synchronizations, every way to train, checkpoint and resume."""

import shutil
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger

from benchmarks.checking.cases import Case, Setting, Values, require_gpu
from benchmarks.checking.correctness import NETWORK, num_different
from benchmarks.step_rows import RECIPE
from benchmarks.timing import free_memory, on_gpu
from diffusion.checkpoints.manifest import file_of
from diffusion.checkpoints.reading import ema_weights, read_checkpoint, training_weights
from diffusion.common.files import read_json_lines
from diffusion.recipe import Recipe, load_recipe
from diffusion.training import builder as training
from diffusion.training.builder import build_trainer

NUM_BATCHES, LOG_EVERY, SAVE_EVERY = 12, 6, 6


def cases(setting: Setting) -> list[Case]:
    ways = [Case(name, partial(variant, setting, name), setting.sec(30 if 'train.compile' in more else 8)) for name, more in VARIANTS.items()]
    return [Case('host waits', partial(host_waits, setting)), *ways, Case('checkpoint and resume', partial(resume, setting), 20)]


def small_recipe(setting: Setting, name: str, **more: Any) -> Recipe:
    """The shipped recipe with a tiny model on random latents, in a run folder that is empty."""
    run_folder = setting.folder / 'runs' / name.replace(' ', '-')
    shutil.rmtree(run_folder, ignore_errors=True)
    overrides = {
        'model.network': 'tiny', 'model.encoders.source': setting.encoders('tiny'), 'model.encoders.revision': 'null', 'data.kind': 'synthetic',
        'data.resolution': 32, 'data.workers': 1, 'data.synthetic_samples': 16 * NUM_BATCHES, 'batch.global_size': 16, 'batch.micro_size': 8,
        'optimizer.warmup': '2ba', 'ema.start': '2ba', 'train.duration': f'{NUM_BATCHES}ba',
        'train.precision': 'amp_bf16' if on_gpu() else 'fp32',
        'train.compile': 'null', 'train.cpu_threads': 1, 'log.every': LOG_EVERY, 'log.samples.every': 'null', 'checkpoint.every': '1000000ba',
        'run_folder': run_folder, **more,
    }  # fmt: skip
    return load_recipe(RECIPE, [f'{key}={value}' for key, value in overrides.items()])


def losses(recipe: Recipe) -> list[float]:
    """The losses that a run logged."""
    return [row['loss/train/total'] for row in read_json_lines(Path(recipe.run_folder) / training.LOG) if 'loss/train/total' in row]


def train(recipe: Recipe) -> None:
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    free_memory()


class DebugMode(Callback):
    """Lets CUDA warn of every synchronization from `first` to `last`, steps between two records."""

    def __init__(self, first: int, last: int):
        self.first, self.last = first, last

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.first:
            torch.cuda.set_sync_debug_mode('warn')

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.last:  # the step that has just ended is counted already
            torch.cuda.set_sync_debug_mode('default')


def host_waits(setting: Setting) -> Values:
    """Waits that CUDA sees; tests/training/test_trainer.py counts those that an operator asks for."""
    require_gpu()
    trainer = build_trainer(small_recipe(setting, 'host waits'))
    trainer.state.callbacks.append(DebugMode(LOG_EVERY + 1, 2 * LOG_EVERY - 1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        trainer.fit()
    torch.cuda.set_sync_debug_mode('default')
    trainer.close()
    # The mode itself warns too, of being a prototype.
    places = [f'{Path(warning.filename).name}:{warning.lineno}' for warning in caught if 'called a synchronizing' in str(warning.message)]
    return {'places': sorted(set(places))[:12], 'checks': {f'waits in {LOG_EVERY - 2} steps': [len(places), 0]}}


# name: overrides. `eager` is what the others are compared with.
EAGER = 'eager'
VARIANTS: dict[str, dict[str, Any]] = {
    'activations computed twice': {'train.checkpoint_activations': 'true'},
    'one micro-batch a step': {'batch.micro_size': 16},
    'compile blocks': {'train.compile': 'blocks'},
    'compile network': {'train.compile': 'network'},
    'compile network, activations computed twice': {'train.compile': 'network', 'train.checkpoint_activations': 'true'},
    'bf16 (FSDP2), compile blocks': {'train.precision': 'bf16', 'train.compile': 'blocks'},
    'zero2, compile blocks': {'train.sharding': 'zero2', 'train.compile': 'blocks'},
}


@cache
def eager_losses(setting: Setting) -> list[float]:
    recipe = small_recipe(setting, EAGER)
    train(recipe)
    return losses(recipe)


def variant(setting: Setting, name: str) -> Values:
    """Its losses, against those of the same run in eager mode."""
    more = VARIANTS[name]
    if 'train.compile' in more:
        require_gpu(': compiling for a CPU takes longer than this whole check')
    recipe = small_recipe(setting, name, **more)
    train(recipe)
    found, expected = losses(recipe), eager_losses(setting)
    off = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    return {'losses': found, 'checks': {'largest difference of a loss': [off, NETWORK['bf16' if recipe.train.precision != 'fp32' else 'fp32']]}}


def resume(setting: Setting) -> Values:
    """A run that is resumed in the middle, against the same one in one piece.

    What is loaded must be what was saved, to the bit. So must be what follows on a CPU; on a GPU some kernels add in another order each time.
    """
    saving = {'checkpoint.every': f'{SAVE_EVERY}ba', 'checkpoint.keep': 2}
    whole = small_recipe(setting, 'whole', **saving)
    train(whole)
    later = small_recipe(setting, 'resumed', **saving)
    folder, middle = Path(later.checkpoint.folder), file_of(SAVE_EVERY)
    folder.mkdir(parents=True)
    for path in (Path(whole.checkpoint.folder) / middle, (Path(whole.checkpoint.folder) / middle).with_suffix('.json')):
        shutil.copy(path, folder / path.name)
    trainer = build_trainer(later)
    saved = read_checkpoint(folder / middle)
    model: Any = trainer.state.model
    not_loaded = num_different(dict(model.network.named_parameters()), training_weights(saved))
    trainer.fit()
    trainer.close()
    ends = [read_checkpoint(Path(recipe.checkpoint.folder) / file_of(NUM_BATCHES)) for recipe in (whole, later)]
    weights = [training_weights(end) for end in ends]
    checks: Values = {'weights that are not as they were saved': [not_loaded, 0]}
    if on_gpu():
        apart = [((a - b).norm() / a.norm()).item() for a, b in zip(weights[0].values(), weights[1].values(), strict=True)]
        checks |= {'difference in the end': [max(apart), NETWORK['bf16']]}
    else:
        checks |= {'weights that differ in the end': [num_different(*weights), 0]}
        checks |= {'averages that differ in the end': [num_different(*(ema_weights(end) or {} for end in ends)), 0]}
    return {'checks': checks}
