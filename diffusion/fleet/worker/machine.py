"""What this machine is: the kind of its GPUs and their memory, as the driver says."""

import platform
import re
import subprocess
from dataclasses import dataclass

NVIDIA_SMI_SEC = 30.0


@dataclass(frozen=True)
class MachineFacts:
    """What a worker says of its machine.

    Attributes:
        gpu: kind, such as `rtx-4090`; `cpu` where there is none.
        gpu_gb: memory of one GPU, in GB (10^9 bytes).
        num_gpus: that one job gets.
    """

    name: str
    gpu: str = 'cpu'
    gpu_gb: float = 0.0
    num_gpus: int = 1
    image: str = ''


def gpu_of_driver() -> tuple[str, float]:
    """Kind and GB of the smallest GPU; `cpu` and 0 without a driver or GPU."""
    query = ['nvidia-smi', '--query-gpu=name,memory.total', '--format=csv,noheader,nounits']
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_SEC).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return 'cpu', 0.0
    found = [(name, float(mib)) for name, _, mib in (line.rpartition(', ') for line in lines) if re.fullmatch(r'[\d.]+', mib.strip())]
    if not found:
        return 'cpu', 0.0
    name, mib = min(found, key=lambda gpu: gpu[1])
    return kind_of(name), round(mib * 2**20 / 1e9, 1)


def kind_of(name: str) -> str:
    """`NVIDIA GeForce RTX 4090` as people and price lists write it: `rtx-4090`."""
    plain = re.sub(r'\b(nvidia|geforce|tesla)\b', '', name.lower())
    return '-'.join(re.findall(r'[a-z0-9.]+', plain)) or 'gpu'


def host_name() -> str:
    """This machine's name, of letters, digits and . _ - alone."""
    return re.sub(r'[^A-Za-z0-9._-]', '-', platform.node())[:64].lstrip('._-') or 'machine'
