"""A recipe to a Composer Trainer: each function builds one part; `build_trainer` puts them together."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import LRMonitor
from composer.core import Algorithm, Callback, Evaluator
from composer.loggers import LoggerDestination
from composer.optim import ConstantWithWarmupScheduler, CosineAnnealingWithWarmupScheduler
from composer.utils import dist, get_device, get_file, reproducibility
from safetensors.torch import load_file
from torch import Tensor

from diffusion.algorithms.ema import EMA
from diffusion.callbacks.console import ConsoleLine
from diffusion.callbacks.jsonl_log import JsonlLog
from diffusion.callbacks.run_record import RunRecord
from diffusion.callbacks.sample_grid import SampleGrid
from diffusion.callbacks.throughput import Throughput
from diffusion.callbacks.wandb_log import WandBLog
from diffusion.checkpoint_file import find_checkpoint, read_checkpoint, training_weights
from diffusion.datasets.loader import eval_loader, train_loader
from diffusion.models.encoders import FrozenEncoders
from diffusion.models.stable_diffusion import StableDiffusion
from diffusion.models.unet import build_unet
from diffusion.recipe import Recipe, RecipeError, to_yaml

DIST_TIMEOUT_SEC = 1800  # the first compilation and slow file systems take longer than Composer's 300


def build_trainer(recipe: Recipe) -> Trainer:
    """Everything that `recipe` names, resumed from its latest checkpoint if there is one.

    Raises:
        RecipeError, ManifestError, EncoderError, CheckpointError: the recipe does not fit this machine, the data, the encoders
            or `load_path`.
    """
    device = get_device(None)
    _check_device(recipe, device.name)
    dist.initialize_dist(device, timeout=DIST_TIMEOUT_SEC)  # before any StreamingDataset, which would start and end its own group
    model = build_model(recipe, torch.device('cuda', dist.get_local_rank()) if device.name == 'gpu' else torch.device('cpu'))
    validation = eval_loader(recipe, model.encoders)
    run_folder = Path(recipe.run_folder)
    return Trainer(
        model=model,
        train_dataloader=train_loader(recipe, model.encoders),
        max_duration=recipe.train.duration,
        eval_dataloader=Evaluator(label='eval', dataloader=validation) if validation is not None else None,
        eval_interval=recipe.eval.every or 0,
        eval_subset_num_batches=recipe.eval.batches or -1,
        optimizers=torch.optim.AdamW(
            model.unet.parameters(),
            lr=recipe.optimizer.lr,
            betas=recipe.optimizer.betas,
            eps=recipe.optimizer.eps,
            weight_decay=recipe.optimizer.weight_decay,
            fused=True,
        ),
        schedulers=build_scheduler(recipe),
        algorithms=build_algorithms(recipe),
        callbacks=build_callbacks(recipe, run_folder),
        loggers=build_loggers(recipe, run_folder),
        device=device,
        device_train_microbatch_size=recipe.batch.micro_size,
        precision=recipe.train.precision,
        seed=recipe.seed,
        run_name=recipe.name,
        save_folder=recipe.checkpoint.folder,
        save_filename='ba{batch}-rank{rank}.pt',
        save_interval=recipe.checkpoint.every,
        save_num_checkpoints_to_keep=recipe.checkpoint.keep,
        save_overwrite=True,  # what a killed process left behind must not stop the next one
        autoresume=True,
        dist_timeout=DIST_TIMEOUT_SEC,
        progress_bar=sys.stderr.isatty(),  # elsewhere ConsoleLine
    )


def build_model(recipe: Recipe, device: torch.device) -> StableDiffusion:
    """The model on `device`, its U-Net from `seed`, or from `load_path`."""
    mixed = recipe.train.precision == 'amp_bf16'
    encoders = FrozenEncoders.load(recipe.model.encoders).to(device, torch.bfloat16 if mixed else torch.float32)
    reproducibility.seed_all(recipe.seed)
    unet = build_unet(recipe.model.unet)
    if recipe.load_path is not None:
        unet.load_state_dict(load_weights(recipe.load_path), strict=True)
    model = StableDiffusion(unet, encoders, recipe.model, recipe.seed, recipe.eval.timesteps)
    model.unet.to(device=device, memory_format=torch.channels_last)
    if recipe.train.compile:
        model.unet.compile(dynamic=False)  # in place: the names of the weights stay
    return model.to(device)


def load_weights(path: str) -> dict[str, Tensor]:
    """U-Net weights of a checkpoint (the trained ones, not the EMA) or of an exported diffusers folder, local or in object storage."""
    exported = Path(path) / 'unet' / 'diffusion_pytorch_model.safetensors'
    if exported.exists():
        return load_file(exported)
    if '://' not in path:
        return training_weights(read_checkpoint(find_checkpoint(Path(path))))
    with tempfile.TemporaryDirectory() as folder:
        local = Path(folder) / 'checkpoint.pt'
        get_file(path, str(local))
        return {name: tensor.clone() for name, tensor in training_weights(read_checkpoint(local)).items()}


def build_scheduler(recipe: Recipe) -> Any:
    warmup = recipe.optimizer.warmup
    schedules = {'constant': ConstantWithWarmupScheduler, 'cosine': CosineAnnealingWithWarmupScheduler}
    return schedules[recipe.optimizer.decay](t_warmup=warmup)


def build_algorithms(recipe: Recipe) -> list[Algorithm]:
    algorithms: list[Algorithm] = []
    if recipe.optimizer.clip_norm is not None:
        algorithms.append(GradientClipping(clipping_type='norm', clipping_threshold=recipe.optimizer.clip_norm))
    if recipe.ema.half_life is not None:
        algorithms.append(EMA(recipe.ema.half_life, recipe.ema.start, recipe.ema.interval))
    return algorithms


def build_callbacks(recipe: Recipe, run_folder: Path) -> list[Callback]:
    callbacks: list[Callback] = [RunRecord(to_yaml(recipe), run_folder), LRMonitor(), Throughput(recipe.cost, recipe.log.every)]
    if recipe.log.samples.every is not None:
        callbacks.append(SampleGrid(recipe.log.samples, recipe.data.resolution, run_folder / 'samples'))
    return callbacks


def build_loggers(recipe: Recipe, run_folder: Path) -> list[LoggerDestination]:
    loggers: list[LoggerDestination] = [JsonlLog(run_folder / 'log.jsonl', recipe.log.every)]
    if not sys.stderr.isatty():
        loggers.append(ConsoleLine(recipe.log.every))
    if recipe.log.wandb is not None:
        loggers.append(WandBLog(recipe, run_folder))
    return loggers


def finished(trainer: Trainer) -> bool:
    """True if the checkpoint that the trainer resumed from is the last one of the run (Composer's fit would raise)."""
    duration = trainer.state.max_duration
    return duration is not None and trainer.state.timestamp.get(duration.unit) >= duration


def _check_device(recipe: Recipe, device_name: str) -> None:
    if device_name == 'cpu' and recipe.train.precision != 'fp32':
        raise RecipeError(
            recipe.name, [f'train.precision: {recipe.train.precision} needs a GPU, and this machine has none; try train.precision=fp32']
        )
