"""The kernels that Inductor writes of a function for an H200, compiled by Triton on a machine without a GPU."""

import ast
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._dynamo import device_interface
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from tests.families.lowering import an_h200, lowered_graph

HOPPER = GPUTarget('cuda', 90, 32)
IMPORTS = """import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


def compile_kernels(function: Callable[..., Any], inputs: Sequence[Tensor], folder: Path) -> int:
    """Compile each kernel of the function to machine code; returns how many there are.

    Raises:
        triton.compiler.errors.CompilationError: one of them is no valid program.
    """
    kernels = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", code_of(function, inputs), re.DOTALL)
    for name, source in kernels:
        signature = ast.literal_eval(re.search(r"'signature': (\{[^}]*\})", source)[1])
        path = folder / f'{name}.py'  # Triton reads the source of its functions from a file
        path.write_text(IMPORTS + source[source.index('@triton.jit') :])
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        block_sizes = {argument: 256 for argument, kind in signature.items() if kind == 'constexpr'}
        triton.compile(ASTSource(getattr(module, name), signature, constexprs=block_sizes), target=HOPPER)
    return len(kernels)


def code_of(function: Callable[..., Any], inputs: Sequence[Tensor]) -> str:
    """Return Inductor's program."""
    graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode='fake')(*inputs)
    device = SimpleNamespace(get_current_target=lambda: HOPPER, get_device_interface=lambda: torch.cuda, get_current_device=lambda: 0)
    triton_is_there = mock.patch.object(device_interface.CudaInterface, 'raise_if_triton_unavailable', staticmethod(lambda *_: None))
    has_triton.cache_clear()  # PyTorch remembers the answer that it got without this GPU, and would remember this one
    try:
        with an_h200(), triton_is_there, mock.patch.object(driver, '_active', device), lowered_graph(graph, is_inference=True) as (lowering, _):
            return lowering.codegen()[0].value
    finally:
        has_triton.cache_clear()
