"""A recipe to a Composer Trainer: each function builds one part; `build_trainer` puts them together."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from composer.core import Algorithm, Callback, DataSpec, Evaluator
from composer.devices import Device
from composer.models import ComposerModel
from composer.utils import dist, get_device, reproducibility
from torch.utils.data import DataLoader

from diffusion.checkpoints.initial import load_base, load_weights
from diffusion.checkpoints.owner import Owner, take_over
from diffusion.checkpoints.reading import read_checkpoint, recipe_yaml
from diffusion.checkpoints.resume import FoundCheckpoint, find_newest, refuse_other_data, refuse_other_encoders
from diffusion.checkpoints.saver import CheckpointSaver
from diffusion.checkpoints.uploading import END_SEC
from diffusion.common import stopwatch
from diffusion.common.collective import on_first_rank
from diffusion.common.stopwatch import EVENTS, Stopwatch
from diffusion.contracts.errors import EncoderError
from diffusion.cost.prices import price_of_run
from diffusion.datasets.loader import BAD_SAMPLES, dataset_identities, eval_loader, stores_text, train_loader
from diffusion.datasets.watched import WatchedLoader
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.frozen_part import weights_sha256
from diffusion.families.adapters import add_adapters, store_frozen_in_bf16
from diffusion.families.networks import find_network
from diffusion.families.pipeline import DrawingSettings
from diffusion.families.registry import build_network, family_for, kernels_in_use
from diffusion.faults import peers, preemption, rollback
from diffusion.faults.guards import FIRST_STEP_SEC, RunLock, StallWatchdog
from diffusion.faults.process import end_now
from diffusion.faults.rollback import RollBack
from diffusion.monitoring import loggers as other_loggers
from diffusion.monitoring.console import ConsoleLine
from diffusion.monitoring.records import DrawingRecord, JsonlLog, RunRecord
from diffusion.monitoring.sample_grid import SampleGrid
from diffusion.monitoring.sample_scores import SampleScores, build_sample_scores
from diffusion.monitoring.throughput import BadSamplesLog, EncodersLog, Goodput, LearningRate, Throughput
from diffusion.online.pool import EncodedAhead, Pool
from diffusion.online.start import open_pool, wait_for
from diffusion.recipe import AnyRecipe, Recipe, RecipeError, refuse_changes, to_yaml
from diffusion.recipe.averaging import profiles
from diffusion.recipe.rules import length_in_batches, starts_before_the_end
from diffusion.training.ema import EMA, averaged_weights
from diffusion.training.gradient_guard import GradientGuard
from diffusion.training.machine import BACKEND, fit_machine, refuse_if_uncompiled
from diffusion.training.micro_batch import blank_batch, micro_size
from diffusion.training.model import TextToImage, global_batch_algorithms
from diffusion.training.optimizers import build_optimizer, build_scheduler, parameter_groups
from diffusion.training.sharding import parallelism_config, uses_fsdp
from diffusion.training.trainer import Trainer

LOG = 'log.jsonl'
STAGING = 'checkpoints'  # in the run folder, for those that go to object storage


def build_trainer(recipe: Recipe) -> Trainer:
    """Everything that `recipe` names, resumed from its latest checkpoint if there is one.

    Raises:
        RecipeError, ManifestError, EncoderError, CheckpointError: the recipe does not fit this machine, the data, the encoders
            or `load_path`.
    """
    start = begin(recipe, partial(kernels_in_use, recipe))
    model = build_model(recipe, start.device, resumes=start.found is not None)
    digests = frozen_digests(model)
    if start.found is not None:
        refuse_other_encoders(start.found.manifest, digests)
    loader = train_loader(recipe, model.encoders, model.family.reads_geometry)
    text_stored = stores_text(loader)
    micro_batch = micro_size(recipe, model, lambda size: blank_batch(size, recipe, model, text_stored))
    validation = eval_loader(recipe, model.encoders, micro_batch, model.family.reads_geometry)
    model.encoders.read(images=False, text=not all(stores_text(each) for each in (loader, validation) if each is not None))
    pool = _encode_ahead(recipe, digests['vae'], micro_batch, loader, validation)
    if recipe.train.compile is not None:
        model.compile_step(recipe.train.compile)  # last: the loaders may encode one caption, which is not worth compiling for
    callbacks: list[Callback] = [] if pool is None else [EncodersLog(pool, recipe.log.every)]
    if recipe.log.samples.every is not None:
        callbacks.append(SampleGrid(recipe.log.samples, recipe.data.resolution, start.run_folder / 'samples', averaged_weights))
    if recipe.eval.samples.every is not None:
        evaluated: Any = None if validation is None else validation.dataset
        callbacks.append(build_sample_scores(recipe, model, evaluated, start.run_folder, averaged_weights, start.stall_watchdog.alive))
    groups, algorithms = parameter_groups(recipe, model), global_batch_algorithms(recipe, model)
    trainer = assemble(recipe, start, model, groups, loader, validation, micro_batch, algorithms, callbacks, digests)
    if pool is not None:
        wait_for(pool, recipe.data.timeout_sec)
    return trainer


@dataclass(frozen=True)
class Start:
    """A process that has its part of a run: the folder's lock, the checkpoint that it resumes from, and its place among the ranks.

    Attributes:
        found: the checkpoint; None where the run begins.
        device: of this rank.
        attention: kernels that compute the network's attention here.
    """

    run_folder: Path
    lock: RunLock
    owner: Owner
    found: FoundCheckpoint | None
    watch: Stopwatch
    stall_watchdog: StallWatchdog
    device: torch.device
    composers_device: Device
    timeout_sec: float
    attention: str


def begin(recipe: AnyRecipe, kernels: Callable[[], str]) -> Start:
    """Join the other ranks and take the run folder, in the order in which mistakes are cheapest to find.

    Args:
        kernels: names of those that compute the network's attention here; raises AttentionError.

    Raises:
        RecipeError: the recipe does not fit this machine, or the run was begun with another one.
        CheckpointError, RunHeld: the run folder cannot be used.
    """
    attention = fit_machine(recipe, kernels)
    device = get_device(None)
    # A rank waits for another longer than it takes that other's watchdog or loader to say what is wrong.
    timeout_sec = 2.0 * max(FIRST_STEP_SEC, recipe.faults.stall_sec, recipe.data.timeout_sec)
    dist.initialize_dist(device, timeout=timeout_sec)  # before any StreamingDataset, which would start and end its own group
    peers.watch(end_now)
    run_folder = Path(recipe.run_folder)
    lock = RunLock(run_folder)
    owner = on_first_rank(partial(take_over, recipe.checkpoint.folder, recipe.run_folder))
    found = find_newest(recipe.checkpoint.folder, run_folder / STAGING)
    if found is not None:  # the copy in the run folder is for people, and may be torn
        refuse_changes(recipe, recipe_yaml(read_checkpoint(found.path)))
    watch = stopwatch.start(run_folder / EVENTS if dist.get_global_rank() == 0 else None, dist.get_world_size())
    stall_watchdog = StallWatchdog(recipe.faults.stall_sec, run_folder / 'stalls', END_SEC)
    where = torch.device('cuda', dist.get_local_rank()) if device.name == 'gpu' else torch.device('cpu')
    return Start(run_folder, lock, owner, found, watch, stall_watchdog, where, device, timeout_sec, attention)


def assemble(
    recipe: AnyRecipe,
    start: Start,
    model: ComposerModel,
    groups: list[dict[str, Any]],
    loader: WatchedLoader,
    validation: WatchedLoader | None,
    micro_batch: int,
    algorithms: Sequence[Algorithm],
    callbacks: Sequence[Callback],
    digests: Mapping[str, str],
) -> Trainer:
    """The Trainer of any kind of recipe: optimizer, schedule, guard, average, checkpoints, logs and what watches over them.

    Args:
        groups: what the optimizer trains.
        micro_batch: samples that a rank takes at once.
        algorithms, callbacks: in addition to those of every run.
        digests: SHA-256 of the weights of frozen networks by name.

    Raises:
        RecipeError: the average or the warm-up would outlast the run.
        DataError: the run was begun with other data.
    """
    identities = dataset_identities(loader)
    if start.found is not None:
        refuse_other_data(start.found.manifest, identities)
    batches = length_in_batches(recipe, len(loader))
    if errors := starts_before_the_end(recipe, batches):
        raise RecipeError(recipe.name, errors)
    optimizer = build_optimizer(recipe, groups)
    guard = GradientGuard(recipe.optimizer.clip_norm, recipe.log.every, recipe.faults)
    ema, averages = recipe.ema, profiles(recipe.ema)
    checkpoint, price = recipe.checkpoint, price_of_run(recipe.cost)
    return Trainer(
        log_every=recipe.log.every,
        left_out=rollback.read(checkpoint.folder),
        model=model,
        train_dataloader=_counted(loader),
        max_duration=f'{batches}ba',
        eval_dataloader=Evaluator(label='eval', dataloader=_counted(validation)) if validation is not None else None,
        eval_interval=recipe.eval.every or 0,
        eval_subset_num_batches=-1 if recipe.eval.batches is None else recipe.eval.batches,
        optimizers=optimizer,
        # Composer's own schedulers give the first three batches the rate 0 (measured): they ask for the number of the batch before it is counted.
        schedulers=build_scheduler(optimizer, recipe.optimizer, batches),
        step_schedulers_every_batch=True,
        algorithms=[guard, *([EMA(averages, ema.start.batches, ema.interval.batches, ema.offload)] if averages else []), *algorithms],
        callbacks=[
            start.lock,
            RunRecord(recipe, start.run_folder, price, digests, start.attention),
            DrawingRecord(),
            LearningRate(),
            Throughput(price, recipe.log.every, start.watch),
            Goodput(recipe, start.watch),
            BadSamplesLog(start.run_folder / BAD_SAMPLES, recipe.log.every),
            *callbacks,
            CheckpointSaver(
                checkpoint.folder,
                start.run_folder / STAGING,
                to_yaml(recipe),
                checkpoint.every,
                checkpoint.keep,
                checkpoint.keep_every,
                checkpoint.allowed_misses,
                data=identities,
                encoders=digests,
                before_save=[guard.before_save],
                owner=start.owner,
            ),
            start.stall_watchdog,  # the last one: what the others take counts
        ],
        loggers=[
            JsonlLog(start.run_folder / LOG, recipe.log.every),
            ConsoleLine(recipe.log.every),
            *(other_loggers.build(name, recipe, start.run_folder) for name in recipe.log.to),
        ],
        device=start.composers_device,
        device_train_microbatch_size=micro_batch,
        precision='fp32' if recipe.train.precision == 'fp32' else 'amp_bf16',
        parallelism_config=parallelism_config(recipe.train.sharding, recipe.train.precision, dist.get_world_size(), dist.get_local_world_size()),
        seed=recipe.seed,
        run_name=recipe.name,
        load_path=str(start.found.path) if start.found is not None else None,  # all of its state
        dist_timeout=start.timeout_sec,
        progress_bar=False,  # ConsoleLine says more
    )


def _counted(loader: DataLoader) -> DataSpec:
    """Composer cannot count the samples of a batch that holds a dictionary, as the tokens are."""
    return DataSpec(loader, get_num_samples_in_batch=lambda batch: len(batch['sample_key']))


def _encode_ahead(recipe: Recipe, vae_sha256: str, micro_batch: int, loader: WatchedLoader, validation: WatchedLoader | None) -> Pool | None:
    """Have the images of both loaders encoded by other machines, where `data.encoders` says so."""
    if recipe.data.encoders is None:
        return None
    shapes = [(micro_batch, 3, height, width) for width, height in sorted(set(loader.dataset.sizes_px))]  # type: ignore[attr-defined]
    pool = open_pool(recipe, vae_sha256, BACKEND, shapes)
    for each, training in ((loader, True), (validation, False)):
        if each is not None:
            each.through = EncodedAhead(
                pool,
                micro_batch,
                recipe.data.encoders.ray.ahead,
                training,
                recipe.data.timeout_sec,
                torch.cuda.is_available(),
                each.dataset.refuse,  # type: ignore[attr-defined]
            )
    return pool


def build_model(recipe: Recipe, device: torch.device, resumes: bool = False) -> TextToImage:
    """The model on `device`, its network from `seed`, or from `load_path` unless a checkpoint of this run will replace it anyway (`resumes`)."""
    mixed = recipe.train.precision != 'fp32'
    text_dtype = torch.bfloat16 if mixed else torch.float32
    sharded = uses_fsdp(recipe.train.sharding, recipe.train.precision)
    family = family_for(recipe)
    draws_grids = recipe.log.samples.every is not None and (sharded or dist.get_global_rank() == 0)
    draws = draws_grids or recipe.eval.samples.every is not None
    try:
        encoders = FrozenEncoders.find(recipe.model.encoders, family.find_text)
        encoders.to(device, text_dtype, mixed and recipe.train.vae_precision == 'bf16')
        encoders.read(images=draws or (recipe.data.kind == 'images' and recipe.data.encoders is None), text=draws)
    except EncoderError as error:
        raise EncoderError(f'model.encoders.source: {error}') from error
    if encoders.vae.kind not in family.pipeline_parts['vae']:
        (kind,) = family.pipeline_parts['vae']
        raise EncoderError(f'model.encoders.source: vae is an {encoders.vae.kind.__name__}, and {recipe.model.network} takes an {kind.__name__}')
    if encoders.vae.shift_factor and not family.adds_shift:
        raise EncoderError(
            f'model.encoders.source: vae/config.json has the shift_factor {encoders.vae.shift_factor:g}, which {family.pipeline_class.__name__} does '
            'not add back: what is exported would draw other colours than training saw. Take a VAE without a shift, such as an export of '
            'autoencoder.network=f8c4, or a network whose pipeline adds it (prx)'
        )
    unit = encoders.vae.downsampling * family.patch(find_network(recipe.model.network).config)
    if recipe.data.resolution % unit:
        nearest = f'{recipe.data.resolution // unit * unit} or {(recipe.data.resolution // unit + 1) * unit}'
        raise RecipeError(
            recipe.name, [f'data.resolution: {recipe.data.resolution} is not a multiple of {unit}, the pixels of a patch; nearest: {nearest}']
        )
    reproducibility.seed_all(recipe.seed)
    network: Any = build_network(recipe.model.network)
    base_sha256, settings = None, DrawingSettings()
    if recipe.adapter is not None:
        settings = load_base(network, recipe)  # also when resuming: checkpoints hold the adapter alone
        base_sha256 = weights_sha256(network) if dist.get_local_rank() == 0 else ''  # of several processes of a machine the first alone computes it
        add_adapters(recipe.adapter, family, network, encoders.text, recipe.seed)
        if mixed:
            store_frozen_in_bf16(network)
    elif recipe.load_path is not None and not resumes:
        settings = replace(load_weights(network, recipe.load_path, recipe.model), scheduler=None)  # all of it is trained, by its own objective
    model = TextToImage(network, encoders, recipe.model, recipe.seed, recipe.eval.timesteps, autocast=recipe.train.precision == 'amp_bf16')
    model.adapter, model.base_sha256 = recipe.adapter, base_sha256
    model.zeros_for_empty, model.scheduler = settings.zeros_for_empty, settings.scheduler
    model.attach(recipe.methods)
    for method in model.methods.values():
        method.to_device(device, dtype=text_dtype)
    if sharded:
        # Its weights stay contiguous, it shards no others; activations are channels_last all the same, because the input is.
        units = family.units(network)
        network.fsdp_wrap_fn = lambda module: module in units  # what Composer lets FSDP2 gather and reduce together, one while another computes
    else:
        family.prepare(network)
    if recipe.train.checkpoint_activations:
        family.checkpoint_activations(network)
    return model.to(device)


def frozen_digests(model: TextToImage) -> dict[str, str]:
    """SHA-256 of the frozen weights by name: encoders, what methods hold, the network that an adapter belongs to. All ranks must call it.

    Raises:
        EncoderError: on all ranks: a machine has others than the first.
    """
    others_of_run = {} if model.base_sha256 is None else {model.family.component: model.base_sha256}
    for method in model.methods.values():
        others_of_run |= method.digests
    own = model.encoders.digests | others_of_run if dist.get_local_rank() == 0 else None  # the other ranks of a machine read the same files
    first, *others = dist.all_gather_object(own)
    assert first is not None
    different = [rank for rank, theirs in enumerate(others, start=1) if theirs not in (None, first)]
    if different:
        raise EncoderError(
            f'model.encoders: the weights on rank {different[0]} are not those on rank 0 ({len(different)} of {len(others) + 1} ranks differ); give '
            'all machines the same folder, or name the revision of a Hub id'
        )
    return first


def fit(trainer: Trainer, recipe: AnyRecipe, afterwards: Callable[[], object] = lambda: None) -> None:
    """Train to the end, if the run is not there yet, and close; or do what `recipe.faults` says.

    Args:
        afterwards: called on all ranks once the run has ended, while they still hold its folder.

    Raises:
        Preempted: this process was asked to stop; everything is saved.
        NonFinite, StorageOutage, Superseded, DataError, DataUnavailable: see there.
        RecipeError: the step cannot be compiled on this machine.
    """
    try:
        with preemption.at_step_boundaries():
            if finished(trainer):
                _saver(trainer).finish()  # an upload may be missing
            else:
                trainer.fit()
            afterwards()
            trainer.close()
    except preemption.Preempted:
        trainer.close()
        raise
    except RollBack as fault:
        on_first_rank(_saver(trainer).confirm)
        rollback.add(recipe.checkpoint.folder, fault.left_out)
        print(f'{fault}. Going back to batch {fault.left_out.after_batch:,} and leaving out the data since', file=sys.stderr)
        trainer.engine.close()
        dist.barrier()  # or the others would meet in the store of a first rank that still uploads
        rollback.start_over()
    except Exception as error:
        if recipe.train.compile is not None:
            refuse_if_uncompiled(error, recipe.train.compile, Path(recipe.run_folder))
        raise


def _saver(trainer: Trainer) -> CheckpointSaver:
    return next(callback for callback in trainer.state.callbacks if isinstance(callback, CheckpointSaver))


def outcome(trainer: Trainer, recipe: Recipe) -> str:
    """Return `trained to 850000ba`, or why the run ended before that."""
    reason = next((one.stopped for one in trainer.state.callbacks if isinstance(one, SampleScores)), '')
    if not reason:
        return f'trained to {recipe.train.duration}'
    return f'trained until its score no longer improved, to batch {trainer.state.timestamp.batch.value:,} ({reason}; raise it to train on)'


def finished(trainer: Trainer) -> bool:
    """True if the checkpoint that the trainer resumed from is the last one of the run (Composer's fit would raise)."""
    duration = trainer.state.max_duration
    return duration is not None and trainer.state.timestamp.get(duration.unit) >= duration
