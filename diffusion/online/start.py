"""Start of the encoders that a recipe asks for: rank 0 makes them in a namespace of this start of the run, the others find them there by name."""

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from composer.utils import dist

from diffusion.common.collective import on_every_rank, on_first_rank
from diffusion.common.environment import code_identity
from diffusion.common.ray_cluster import ClusterError, ClusterRefusal, connect, disconnect, room_for
from diffusion.common.text import counted, print_message
from diffusion.contracts.errors import DataUnavailable
from diffusion.online.encoder import ImageEncoder, Settings
from diffusion.online.pool import LOOK_SEC, Pool
from diffusion.recipe.schema import RayEncoders, Recipe

KEY = 'data.encoders.ray'


def open_pool(recipe: Recipe, vae_sha256: str, backend: str, shapes: Sequence[tuple[int, int, int, int]]) -> Pool:
    """Connect this rank, and have the encoders made. They start while the caller does other things, until `wait_for`. All ranks must call it.

    Args:
        backend: of torch.compile, where training compiles.
        shapes: (B, 3, H, W) of the training micro-batches.

    Raises:
        ClusterRefusal: Ray is not installed, or no machine of the cluster has what an encoder needs.
        ClusterError: there is no cluster, a rank cannot join it, or it has not room for all encoders.
    """
    assert recipe.data.encoders is not None
    wanted, source, train = recipe.data.encoders.ray, recipe.model.encoders, recipe.train
    names = [f'encoder-{number}' for number in range(wanted.actors)]
    made: list[Any] = []

    def make() -> tuple[str, str]:
        """Rank 0: the encoders end with it. Returns the cluster's address and their namespace."""
        namespace = f'{recipe.name}-{uuid.uuid4().hex[:8]}'
        ray = connect(wanted.address, KEY, namespace)
        refuse_lack([node['Resources'] for node in ray.nodes() if node['Alive']], wanted)
        settings = Settings(
            source.source,
            source.revision,
            vae_sha256,
            code_identity(),
            in_bf16=train.precision != 'fp32' and train.vae_precision == 'bf16',
            backend=backend if train.compile is not None else None,
            benchmark=train.cudnn_benchmark,
            on_gpu=wanted.gpus > 0,
            threads=wanted.cpus,
            dtype=wanted.moments,
            shapes=shapes,
        )
        actor = ray.remote(
            num_cpus=wanted.cpus,
            num_gpus=wanted.gpus,
            resources={wanted.resource: 1} if wanted.resource is not None else None,
            scheduling_strategy='SPREAD',
            max_restarts=-1,
            max_task_retries=0,
            concurrency_groups={'look': 1},
        )(ImageEncoder)
        made.extend(actor.options(name=name).remote(settings) for name in names)
        return ray.get_runtime_context().gcs_address, namespace

    def join() -> list[Any]:
        ray = connect(address, KEY, namespace)
        return [ray.get_actor(name) for name in names]

    try:
        address, namespace = on_first_rank(make)
        actors = on_every_rank(lambda: made or join())
    except Exception:
        disconnect()
        raise
    import ray

    return Pool(ray, dict(zip(names, actors, strict=True)), wanted.patience_sec)


def wait_for(pool: Pool, timeout_sec: float) -> None:
    """Return when all encoders serve, or after its patience with at least one; all ranks must call it. The first says how long it took.

    Raises:
        ClusterRefusal, EncoderError: an encoder is not what the trainer needs.
        DataUnavailable: none serves after `timeout_sec`.
    """
    begun = time.monotonic()

    def wait() -> None:
        while (waited_sec := time.monotonic() - begun) < timeout_sec:
            if pool.num_serving >= (1 if waited_sec > pool.patience_sec else len(pool.members)):
                return
            pool.advance(LOOK_SEC)
        if not pool.num_serving:
            raise DataUnavailable(
                f'{KEY}: no encoder serves after {timeout_sec:g} s (data.timeout_sec): {"; ".join(pool.why_none())}; look at their machines and at '
                '`ray status`, and run the same command again'
            )

    on_every_rank(wait)
    if dist.get_global_rank() == 0:
        missing = ''.join(f'; {why}' for why in pool.why_none())
        print_message(f'encoders: {pool.num_serving} of {len(pool.members)} ready after {time.monotonic() - begun:.0f} s{missing}')


def refuse_lack(machines: Sequence[Mapping[str, float]], wanted: RayEncoders) -> None:
    """Refuse before anything waits for what never comes.

    Args:
        machines: resources of each machine of the cluster.

    Raises:
        ClusterRefusal: not one encoder has room anywhere: the recipe asks for something else than the cluster offers.
        ClusterError: there is room for some; a machine may be missing at the moment.
    """
    each = {'CPU': float(wanted.cpus), 'GPU': wanted.gpus, **({wanted.resource: 1.0} if wanted.resource is not None else {})}
    room = room_for(machines, each)
    if room >= wanted.actors:
        return
    offered = ', '.join(f'{sum(machine.get(name, 0.0) for machine in machines):g} {name}' for name, amount in each.items() if amount)
    message = (
        f'{KEY}: {counted(wanted.actors, "encoder")} of {", ".join(f"{amount:g} {name}" for name, amount in each.items() if amount)} each, and the '
        f'{counted(len(machines), "machine")} of the cluster {"has" if len(machines) == 1 else "have"} {offered}: room for {room}'
    )
    if room == 0:
        raise ClusterRefusal(f'{message}; change {KEY}.cpus, gpus or resource, or add machines that offer it')
    raise ClusterError(f'{message}; set {KEY}.actors={room}, or add machines and run the same command again')
