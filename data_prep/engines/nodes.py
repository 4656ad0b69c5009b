"""What each machine of a cluster has to have in common with the driver: the code, and the folders that are not in object storage."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.engines.engine import PartWork
from diffusion.common.environment import code_identity
from diffusion.common.ray_cluster import ClusterRefusal
from diffusion.common.storage import Folder, LocalFolder, scratch_for

REMEDY = 'use object storage (s3://, gs://, oci://), or a disk that all machines mount at the same place'
PATIENCE_SEC = 120  # for all machines to answer, which start a process for it


@dataclass(frozen=True)
class NodeCheck:
    """Compares the machine that it arrives at with the driver's.

    Attributes:
        identity: `code_identity` of the driver.
        folder: the driver's working folder, below which relative paths are.
        source: a local file of SOURCE.
        token: a local file in DEST, and what the driver wrote there.
    """

    identity: dict[str, str | None]
    folder: str
    source: str | None
    token: tuple[str, str] | None

    def enter(self) -> str | None:
        """Go to the driver's working folder, and say what is not the same here; None if nothing."""
        with suppress(OSError):  # if there is no such folder, only relative paths miss it, and they say so below
            os.chdir(self.folder)
        here = code_identity()
        different = [f'{name} is {here.get(name)}, the driver has {value}' for name, value in self.identity.items() if here.get(name) != value]
        if different:
            return f'{"; ".join(different)}: install the same versions on all machines, or they would write unequal parts of one dataset'
        if self.source is not None and not Path(self.source).exists():
            return f'{Path(self.source).absolute()} of SOURCE is not there: {REMEDY}'
        if self.token is not None:
            path, content = self.token
            try:
                same = Path(path).read_text() == content
            except OSError:
                same = False
            if not same:
                return f'DEST {Path(path).absolute().parents[1]} is another folder there than here: {REMEDY}'
        return None


@contextmanager
def check_for(work: PartWork[Any, Any], item: Any) -> Iterator[NodeCheck]:
    """The check of the machines that do this work; the token is in DEST until the end of the block."""
    source = f'{work.reads.url}/{work.file(item)}' if isinstance(work.reads, LocalFolder) else None
    with _token(work.writes) as token:
        yield NodeCheck(code_identity(), os.getcwd(), source, token)


@contextmanager
def _token(dest: Folder) -> Iterator[tuple[str, str] | None]:
    if not isinstance(dest, LocalFolder):
        yield None
        return
    with scratch_for(dest) as scratch:
        path, content = scratch / 'token', secrets.token_hex(8)
        path.write_text(content)
        yield str(path), content


def check_nodes(ray: Any, nodes: list[dict[str, Any]], check: NodeCheck) -> None:
    """Ask every one of these machines.

    Raises:
        ClusterRefusal: on one of them something is not the same; the message has its address.
    """
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    asked = {
        ray.remote(num_cpus=0, max_retries=1)(NodeCheck.enter).options(scheduling_strategy=strategy(node['NodeID'], soft=False)).remote(check): node
        for node in nodes
    }
    answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE_SEC)
    for ref in answered:
        where = f'machine {asked[ref]["NodeManagerAddress"]} of the Ray cluster'
        try:
            problem = ray.get(ref)
        except ray.exceptions.RayError as error:
            raise ClusterRefusal(
                f'{where} cannot run this code: {_last_line(error)}; install this project there, the same version as here'
            ) from error
        if problem is not None:
            raise ClusterRefusal(f'{where}: {problem}')
    if silent:
        where = ', '.join(asked[ref]['NodeManagerAddress'] for ref in silent)
        raise ClusterRefusal(f'machines {where} of the Ray cluster did not answer within {PATIENCE_SEC} s; see `ray status`')


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]
