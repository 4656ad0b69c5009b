"""Counts the places where the host asks for a number that lies on the device: on a GPU each waits until all work before it is done."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class HostSyncs(TorchDispatchMode):
    """Within the context `count` grows with each `item()`, `float(tensor)`, `if tensor`: what arrives as `aten._local_scalar_dense`.

    Counted the same without a GPU. Not counted: copies to the host as a whole, and the loader's own processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
