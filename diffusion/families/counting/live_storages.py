"""Counts the bytes of tensors that are alive, exactly and without a GPU: on fake tensors, which have shapes and no memory."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Within the context `live_bytes` are those of all storages made in it that something still refers to; views count once.

    What a kernel allocates for itself (cuDNN's workspaces) and what an allocator rounds up or leaves unused in between is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        if address not in self._known:
            self._known[address] = weakref.ref(storage, lambda _: self._forget(address, size))
            self.live_bytes += size

    def _forget(self, address: int, size: int) -> None:
        self._known.pop(address, None)
        self.live_bytes -= size
