"""A recipe to a Composer Trainer: each function builds one part; `build_trainer` puts them together."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from composer.callbacks import LRMonitor
from composer.core import Algorithm, Callback, Evaluator
from composer.devices import Device
from composer.loggers import LoggerDestination
from composer.optim import ConstantWithWarmupScheduler, CosineAnnealingWithWarmupScheduler
from composer.utils import dist, get_device, get_file, reproducibility
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from diffusion import stopwatch
from diffusion.algorithms.ema import EMA
from diffusion.algorithms.gradient_guard import GradientGuard
from diffusion.algorithms.sobol_timesteps import SobolTimesteps
from diffusion.callbacks.bad_samples import BadSamplesLog
from diffusion.callbacks.console import ConsoleLine
from diffusion.callbacks.goodput import Goodput
from diffusion.callbacks.jsonl_log import JsonlLog
from diffusion.callbacks.run_record import RunRecord
from diffusion.callbacks.sample_grid import SampleGrid
from diffusion.callbacks.stall_watchdog import FIRST_STEP_SEC, StallWatchdog
from diffusion.callbacks.throughput import Throughput
from diffusion.callbacks.wandb_log import WandBLog
from diffusion.checkpoints.manifest import OURS
from diffusion.checkpoints.reading import find_checkpoint, load_strictly, read_checkpoint, training_weights
from diffusion.checkpoints.resume import find_newest, refuse_other_data
from diffusion.checkpoints.saver import CheckpointSaver
from diffusion.collective import of_first_rank_of_node
from diffusion.cost.prices import price_of_run
from diffusion.datasets.loader import BAD_SAMPLES, dataset_identities, eval_loader, train_loader
from diffusion.errors import CheckpointError
from diffusion.faults import peers, preemption, rollback
from diffusion.faults.ending import end_now
from diffusion.faults.rollback import RollBack
from diffusion.faults.run_lock import RunLock
from diffusion.memory import num_shards
from diffusion.micro_batch import micro_size
from diffusion.models.attention import AttentionError, kernel_in_use, use_attention
from diffusion.models.encoders import FrozenEncoders
from diffusion.models.stable_diffusion import StableDiffusion
from diffusion.models.unet import build_unet
from diffusion.recipe import Recipe, RecipeError, parse_duration, refuse_changes, to_yaml
from diffusion.recipe.rules import starts_before_the_end
from diffusion.sharding import parallelism_config, prepare_for_fsdp, uses_fsdp
from diffusion.stopwatch import EVENTS, Stopwatch
from diffusion.trainer import Trainer

LOG = 'log.jsonl'
STAGING = 'checkpoints'  # in the run folder, for those that go to object storage
SCHEDULERS = {'constant': ConstantWithWarmupScheduler, 'cosine': CosineAnnealingWithWarmupScheduler}


def build_trainer(recipe: Recipe) -> Trainer:
    """Everything that `recipe` names, resumed from its latest checkpoint if there is one.

    Raises:
        RecipeError, ManifestError, EncoderError, CheckpointError: the recipe does not fit this machine, the data, the encoders
            or `load_path`.
    """
    device = get_device(None)
    _check_device(recipe, device)
    timeout_sec = dist_timeout_sec(recipe)
    dist.initialize_dist(device, timeout=timeout_sec)  # before any StreamingDataset, which would start and end its own group
    peers.watch(end_now)
    run_folder = Path(recipe.run_folder)
    lock = RunLock(run_folder)
    found = find_newest(recipe.checkpoint.folder, run_folder / STAGING)
    if found is not None and (run_folder / 'recipe.yaml').exists():  # RunRecord looks into the checkpoint too, after its weights are loaded
        refuse_changes(recipe, (run_folder / 'recipe.yaml').read_text())
    watch = stopwatch.start(run_folder / EVENTS if dist.get_global_rank() == 0 else None, dist.get_world_size())
    where = torch.device('cuda', dist.get_local_rank()) if device.name == 'gpu' else torch.device('cpu')
    model = build_model(recipe, where, resumes=found is not None)
    micro_batch = micro_size(recipe, model)
    if recipe.train.compile is not None:
        model.compile_step(recipe.train.compile)
    loader, validation = train_loader(recipe, model.encoders), eval_loader(recipe, model.encoders, micro_batch)
    identities = dataset_identities(loader)
    if found is not None:
        refuse_other_data(found.manifest, identities)
    guard = GradientGuard(recipe.optimizer.clip_norm, recipe.log.every, recipe.faults)
    stall_watchdog = StallWatchdog(recipe.faults.stall_sec, run_folder / 'stalls')  # the last one: what the others take counts
    return Trainer(
        log_every=recipe.log.every,
        left_out=rollback.read(recipe.checkpoint.folder),
        model=model,
        train_dataloader=loader,
        max_duration=f'{total_batches(recipe, len(loader))}ba',
        eval_dataloader=Evaluator(label='eval', dataloader=validation) if validation is not None else None,
        eval_interval=recipe.eval.every or 0,
        eval_subset_num_batches=-1 if recipe.eval.batches is None else recipe.eval.batches,
        optimizers=torch.optim.AdamW(
            model.unet.parameters(),
            lr=recipe.optimizer.lr,
            betas=recipe.optimizer.betas,
            eps=recipe.optimizer.eps,
            weight_decay=recipe.optimizer.weight_decay,
            fused=True,
        ),
        schedulers=SCHEDULERS[recipe.optimizer.decay](t_warmup=recipe.optimizer.warmup),
        algorithms=[guard, *build_algorithms(recipe)],
        callbacks=[lock, *build_callbacks(recipe, run_folder, watch), build_saver(recipe, run_folder, guard, identities), stall_watchdog],
        loggers=build_loggers(recipe, run_folder),
        device=device,
        device_train_microbatch_size=micro_batch,
        precision='fp32' if recipe.train.precision == 'fp32' else 'amp_bf16',
        parallelism_config=parallelism_config(recipe.train.sharding, recipe.train.precision, dist.get_world_size(), dist.get_local_world_size()),
        seed=recipe.seed,
        run_name=recipe.name,
        load_path=str(found.path) if found is not None else None,  # all of its state
        dist_timeout=timeout_sec,
        progress_bar=sys.stderr.isatty(),  # elsewhere ConsoleLine
    )


def dist_timeout_sec(recipe: Recipe) -> float:
    """How long a rank waits for another: longer than it takes that other's watchdog or loader to say what is wrong."""
    return 2.0 * max(FIRST_STEP_SEC, recipe.faults.stall_sec, recipe.data.timeout_sec)


def build_model(recipe: Recipe, device: torch.device, resumes: bool = False) -> StableDiffusion:
    """The model on `device`, its U-Net from `seed`, or from `load_path` unless a checkpoint of this run will replace it anyway (`resumes`)."""
    mixed = recipe.train.precision != 'fp32'
    text_dtype = torch.bfloat16 if mixed else torch.float32
    encoders = FrozenEncoders.load(recipe.model.encoders).to(device, text_dtype, mixed and recipe.train.vae_precision == 'bf16')
    reproducibility.seed_all(recipe.seed)
    unet = build_unet(recipe.model.unet)
    if recipe.load_path is not None and not resumes:
        load_weights(unet, recipe.load_path)
    model = StableDiffusion(unet, encoders, recipe.model, recipe.seed, recipe.eval.timesteps, autocast=recipe.train.precision == 'amp_bf16')
    if uses_fsdp(recipe.train.sharding, recipe.train.precision):
        # Its weights stay contiguous, it shards no others; activations are channels_last all the same, because the input is.
        prepare_for_fsdp(unet, device, num_shards(recipe.train.sharding, dist.get_world_size(), dist.get_local_world_size()))
    else:
        unet.to(memory_format=torch.channels_last)
    if recipe.train.checkpoint_activations:
        unet.enable_gradient_checkpointing()
    return model.to(device)


def load_weights(unet: nn.Module, path: str) -> None:
    """Start from a checkpoint (the weights as trained, not the EMA) or an exported diffusers folder (whatever was exported).

    Args:
        path: a run folder, a `.pt` file, an exported folder, or the URL of a `.pt` file in object storage.

    Raises:
        CheckpointError: it cannot be fetched or read, or holds another network.
    """
    with _local_copy(path) as local:
        exported = local / 'unet' / 'diffusion_pytorch_model.safetensors'
        try:
            weights = load_file(exported) if exported.exists() else training_weights(read_checkpoint(find_checkpoint(local)))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f'load_path: {exported} is damaged: {error}') from error
        load_strictly(unet, weights, f'load_path: {path}')


@contextmanager
def _local_copy(path: str) -> Iterator[Path]:
    """The path itself, or a download that the processes of a node share; checked against the manifest beside it if there is one."""
    if '://' not in path:
        yield Path(path)
        return
    local = of_first_rank_of_node(partial(_fetched, path))
    try:
        yield local
    finally:
        dist.barrier()
        if dist.get_local_rank() == 0:
            shutil.rmtree(local.parent, ignore_errors=True)


def _fetched(path: str) -> Path:
    """A copy in a temporary folder of its own, its manifest beside it."""
    local = Path(tempfile.mkdtemp(prefix='load-')) / path.rpartition('/')[2]
    try:
        get_file(path, str(local), overwrite=True)
        if OURS.fullmatch(local.name):
            with suppress(FileNotFoundError):
                get_file(f'{path.removesuffix(".pt")}.json', str(local.with_suffix('.json')), overwrite=True)
    except Exception as error:  # each object store raises its own
        shutil.rmtree(local.parent, ignore_errors=True)
        raise CheckpointError(f'load_path: {path} cannot be fetched: {type(error).__name__}: {error}') from error
    return local


def total_batches(recipe: Recipe, batches_per_epoch: int) -> int:
    """Length of the run in batches.

    Raises:
        RecipeError: the EMA or the warm-up would outlast it.
    """
    duration = parse_duration(recipe.train.duration)
    total = duration.value * (batches_per_epoch if duration.unit == 'ep' else 1)
    errors = starts_before_the_end(recipe, total)
    if errors:
        raise RecipeError(recipe.name, errors)
    return total


def build_algorithms(recipe: Recipe) -> list[Algorithm]:
    algorithms: list[Algorithm] = []
    if recipe.ema.half_life is not None:
        algorithms.append(EMA(recipe.ema.half_life, recipe.ema.start, recipe.ema.interval, recipe.ema.offload))
    if recipe.model.timesteps == 'sobol':
        algorithms.append(SobolTimesteps(recipe.seed, recipe.model.schedule.num_timesteps))
    return algorithms


def build_callbacks(recipe: Recipe, run_folder: Path, watch: Stopwatch) -> list[Callback]:
    price = price_of_run(recipe.cost)
    callbacks: list[Callback] = [
        RunRecord(recipe, run_folder, price),
        LRMonitor(),
        Throughput(price, recipe.log.every, watch),
        Goodput(recipe, watch),
        BadSamplesLog(run_folder / BAD_SAMPLES, recipe.log.every),
    ]
    if recipe.log.samples.every is not None:
        callbacks.append(SampleGrid(recipe.log.samples, recipe.data.resolution, run_folder / 'samples'))
    return callbacks


def build_saver(recipe: Recipe, run_folder: Path, guard: GradientGuard, identities: dict[str, str]) -> CheckpointSaver:
    wanted = recipe.checkpoint
    return CheckpointSaver(
        wanted.folder,
        run_folder / STAGING,
        to_yaml(recipe),
        wanted.every,
        wanted.keep,
        wanted.keep_every,
        wanted.allowed_misses,
        data=identities,
        before_save=[guard.before_save],
    )


def build_loggers(recipe: Recipe, run_folder: Path) -> list[LoggerDestination]:
    loggers: list[LoggerDestination] = [JsonlLog(run_folder / LOG, recipe.log.every)]
    if not sys.stderr.isatty():
        loggers.append(ConsoleLine(recipe.log.every))
    if recipe.log.wandb is not None:
        loggers.append(WandBLog(recipe, run_folder))
    return loggers


def fit(trainer: Trainer, recipe: Recipe) -> None:
    """Train to the end, if the run is not there yet, and close; or do what `recipe.faults` says.

    Raises:
        Preempted: this process was asked to stop; everything is saved.
        NonFinite, StorageOutage, DataError, DataUnavailable: see there.
    """
    try:
        with preemption.at_step_boundaries():
            if finished(trainer):
                next(callback for callback in trainer.state.callbacks if isinstance(callback, CheckpointSaver)).finish()  # an upload may be missing
            else:
                trainer.fit()
            trainer.close()
    except preemption.Preempted:
        trainer.close()
        raise
    except RollBack as fault:
        rollback.add(recipe.checkpoint.folder, fault.left_out)
        print(f'{fault}. Going back to batch {fault.left_out.after_batch:,} and leaving out the data since', file=sys.stderr)
        trainer.engine.close()
        dist.barrier()  # or the others would meet in the store of a first rank that still uploads
        rollback.start_over()


def finished(trainer: Trainer) -> bool:
    """True if the checkpoint that the trainer resumed from is the last one of the run (Composer's fit would raise)."""
    duration = trainer.state.max_duration
    return duration is not None and trainer.state.timestamp.get(duration.unit) >= duration


def _check_device(recipe: Recipe, device: Device) -> None:
    """Whether this machine can do what the recipe says; switches on the attention kernel."""
    train, errors = recipe.train, []
    if device.name == 'cpu' and train.precision != 'fp32':
        errors.append(f'train.precision: {train.precision} needs a GPU, and this machine has none; try train.precision=fp32')
    use_attention(train.attention)
    try:
        kernel_in_use(train.precision)
    except AttentionError as error:
        errors.append(f'train.attention: {train.attention} {error}; set train.attention=auto')
    if errors:
        raise RecipeError(recipe.name, errors)
