"""The Ray engine, as the driver sees it: what the cluster can give, machines that are checked before any work, and a crew that does it."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

from data_prep.engines.capacity import Capacity, CrewSize, describe
from data_prep.engines.engine import Engine, Item, PartWork, Resources, Result, StreamedWork
from data_prep.engines.local import progress_bar
from data_prep.engines.nodes import check_for, check_nodes
from data_prep.engines.options import ClusterOptions
from diffusion.common.ray_cluster import ClusterRefusal, connect, disconnect
from diffusion.common.text import counted

WHAT = '--engine ray'


class ClusterEngine(Engine):
    """Actors of a Ray cluster: the one at an address, or one of this host alone, which ends with this process."""

    def __init__(self, options: ClusterOptions):
        self.options = options
        self._connected_here = False

    def map(self, work: PartWork[Item, Result], items: Sequence[Item]) -> Iterator[Result]:
        """As `Engine.map`.

        Raises:
            ClusterRefusal: the cluster does not have what a worker needs, or a machine of it has other code or other folders.
            ClusterError: there is no cluster, or no worker began in time.
            IncompleteError: a part met the death of its worker again and again, and was set aside; all others are done.
        """
        if not items:
            return
        self._connected_here |= not _is_connected()
        ray = connect(self.options.address, WHAT)
        from data_prep.engines.crew import Crew  # imports Ray

        nodes = [node for node in ray.nodes() if node['Alive']]
        capacity = Capacity.of(nodes)
        size = self._size(work, capacity)
        with check_for(work, items[0]) as check:
            check_nodes(ray, [node for node in nodes if _can_work(node, size)], check)
            with (
                progress_bar(unit=work.unit, desc=work.label) as progress,
                closing(Crew(work, size, check, self.options, progress)) as crew,
            ):
                yield from crew.do(items)

    def close(self) -> None:
        if self._connected_here:
            disconnect()

    def _size(self, work: PartWork[Any, Any], capacity: Capacity) -> CrewSize:
        """Raises ClusterRefusal if the cluster cannot have as many workers as were asked for, or not a single one."""
        gpus, wanted = self.options.gpus, self.options.actors
        if gpus is None:
            gpus = 1 if work.uses_gpu and capacity.total('GPU') else 0
        each = Resources(self.options.cpus, gpus, self.options.resource)
        decoders = self.options.decoders if isinstance(work, StreamedWork) else 0
        fit = capacity.num_workers(each, decoders)
        if fit < (wanted or 1) and not self.options.wait_min:
            more = f', and {counted(decoders, "decoder")} with 1 CPU each' if decoders else ''
            raise ClusterRefusal(
                f'{WHAT}: {counted(wanted or 1, "worker")} with {describe(each)} each{more} would not fit: the cluster has '
                f'{capacity.describe(each)}; {capacity.why_not(wanted or 1, each, decoders)}; ask for less (--ray-actors, --ray-cpus, --ray-gpus, '
                '--ray-resource, --ray-decoders), or let --ray-wait-min say how long to wait for machines to come'
            )
        num_workers = wanted or fit
        return CrewSize(min(num_workers, decoders) if decoders else num_workers, each, decoders)  # one without a decoder would have nothing to do


def _can_work(node: dict[str, Any], size: CrewSize) -> bool:
    """Whether a worker or a decoder may come to a machine; one without CPUs, such as a head that only manages, is nobody's."""
    has = node['Resources']
    return bool(Capacity([has]).num_workers(size.each) or (size.decoders and has.get('CPU', 0) >= 1))


def _is_connected() -> bool:
    ray: Any = sys.modules.get('ray')
    return ray is not None and ray.is_initialized()
