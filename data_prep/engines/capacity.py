"""How many workers a cluster can have, by what its machines have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.engines.engine import Resources
from diffusion.common.ray_cluster import room_for
from diffusion.common.text import counted


@dataclass(frozen=True)
class CrewSize:
    """How many workers, what each of them takes, and how many tasks read for all of them together (0: each reads for itself)."""

    num_workers: int
    each: Resources
    decoders: int = 0

    @property
    def parts_at_a_time(self) -> int:
        return self.decoders or self.num_workers


@dataclass(frozen=True)
class Capacity:
    """Resources by machine: `CPU`, `GPU`, and those that the cluster's owner has named."""

    nodes: Sequence[Mapping[str, float]]

    @classmethod
    def of(cls, nodes: Sequence[Mapping[str, Any]]) -> Capacity:
        """Of the living ones among `ray.nodes()`."""
        return cls([node['Resources'] for node in nodes if node['Alive']])

    def total(self, name: str) -> float:
        return sum(node.get(name, 0) for node in self.nodes)

    def num_workers(self, each: Resources, decoders: int = 0) -> int:
        """As many workers as fit, each on one machine, with a CPU left for each decoder."""
        fit = room_for(self.nodes, needs(each))
        while fit and sum(math.floor(node.get('CPU', 0)) for node in self.nodes) - fit * each.cpus < decoders:
            fit -= 1
        return fit

    def why_not(self, num_workers: int, each: Resources, decoders: int = 0) -> str:
        """What the machines lack for so many workers and decoders, in words."""
        need = needs(each)
        room = room_for(self.nodes, need)
        if room >= num_workers:
            left = self.total('CPU') - num_workers * each.cpus
            return f'{counted(num_workers, "worker")} would leave {left:g} CPUs for {counted(decoders, "decoder")}'
        short = [name for name, amount in need.items() if room_for(self.nodes, {name: amount}) < num_workers]
        why = f'too little {" and ".join(short)}' if short else 'not enough of all of it on the same machines'
        return f'room for {counted(room, "worker")}: {why}'

    def describe(self, each: Resources) -> str:
        """What the machines have of what a worker needs: `2 machines with CPU 4, GPU 1 in all`."""
        have = ', '.join(f'{name} {self.total(name):g}' for name in needs(each))
        return f'{counted(len(self.nodes), "machine")} with {have} in all'


def needs(each: Resources) -> dict[str, float]:
    """By the names that Ray has for them."""
    custom = {each.custom: 1.0} if each.custom else {}
    return {'CPU': each.cpus, **({'GPU': each.gpus} if each.gpus else {}), **custom}


def describe(each: Resources) -> str:
    """`CPU 1, GPU 0.5`."""
    return ', '.join(f'{name} {amount:g}' for name, amount in needs(each).items())
