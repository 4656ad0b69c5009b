"""A training step of the U-Net lowered for CUDA by Inductor on a machine without a GPU: tensors without memory, and no code is generated.

Dynamo and AOTAutograd trace on fake tensors of the CPU, with the arithmetic that CUDA's autocast chooses; their graphs are then propagated on fake
tensors of CUDA and given to Inductor, whose choice of layouts is read from its operations. The layout of a convolution's result is what cuDNN
gives: channels_last if an operand is.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from torch._dynamo import device_interface
from torch._inductor import compile_fx, ir
from torch._inductor import config as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from diffusion.families.counting.tracing import as_on_a_gpu, channels_last
from diffusion.families.sd2 import StableDiffusion2
from diffusion.objectives.objective import weighted_error
from diffusion.recipe.rules import TEXT_LENGTH
from diffusion.training import machine as compilation

BLOCKS = StableDiffusion2.blocks

H200 = SimpleNamespace(
    type='cuda',
    index=0,
    multi_processor_count=132,
    major=9,
    minor=0,
    cc=90,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    name='NVIDIA H200',
    total_memory=150_000_000_000,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 << 20,
    gcnArchName='',
)


@dataclass(frozen=True)
class Convolution:
    """Whether each operand is in channels_last: of the forward pass input, weight and output; of the backward pass gradient, input and weight."""

    backward: bool
    weight: tuple[int, ...]  # (out, in, height, width)
    side: int  # of its first operand
    channels_last: tuple[bool, ...]


@dataclass
class Step:
    """Findings in the forward and backward pass."""

    convolutions: list[Convolution] = field(default_factory=list)
    atomic: int = 0  # operations that add up in memory, in no fixed order


def is_channels_last(value: Any) -> bool:
    """Of Inductor's buffers and views; a tensor of 1 x 1 pixels or of a 1 x 1 kernel is in both layouts."""
    size, stride = ([int(number) for number in numbers] for numbers in (value.get_size(), value.get_stride()))
    return size[2:] == [1, 1] or stride[1] == 1


def convolution(operation: Any) -> Convolution | None:
    """What Inductor's operation is, if it is a convolution."""
    target = str(getattr(operation, 'op_overload', None) or getattr(operation, 'python_kernel_name', None))
    if 'convolution' not in target:
        return None
    operands = list(operation.inputs)[:3]
    backward = 'convolution_backward' in target
    if not backward:
        operands = [*operands[:2], operation]
    weight = operands[2] if backward else operands[1]
    size = tuple(int(number) for number in weight.get_size())
    return Convolution(backward, size, int(operands[0].get_size()[-1]), tuple(is_channels_last(operand) for operand in operands))


@contextmanager
def an_h200() -> Iterator[None]:
    """What Inductor asks of the device, answered without one."""
    interface = device_interface.CudaInterface
    answers = {
        (torch.cuda, 'get_device_properties'): lambda *_, **__: H200,
        (torch.cuda, 'get_device_capability'): lambda *_, **__: (9, 0),
        (torch.cuda, 'current_device'): lambda *_: 0,
        (torch.cuda, 'is_bf16_supported'): lambda *_, **__: True,
        (torch._C, '_select_conv_backend'): lambda *_, **__: torch._C._ConvBackend.Cudnn,
        (torch._C, '_conv_determine_backend_memory_format'): layout_of_cudnn,
        (interface, 'get_device_properties'): staticmethod(lambda device=None: H200),
        (interface, 'get_compute_capability'): staticmethod(lambda device=None: 90),
        (interface, 'is_available'): staticmethod(lambda: True),
        (interface.Worker, 'get_device_properties'): staticmethod(lambda device=None: H200),
        (interface.Worker, 'current_device'): staticmethod(lambda: 0),
        (nn.functional, 'scaled_dot_product_attention'): flash_attention,
        (nn.functional, 'group_norm'): partial(contiguous_group_norm, nn.functional.group_norm),
    }
    with ExitStack() as stack:
        for (owner, name), answer in answers.items():
            stack.enter_context(mock.patch.object(owner, name, answer))
        stack.enter_context(inductor.patch(joint_graph_constant_folding=False, shape_padding=False, force_disable_caches=True, compile_threads=1))
        yield


def layout_of_cudnn(input: Tensor, weight: Tensor, backend: Any = None) -> torch.memory_format:
    formats = (suggest_memory_format(input), suggest_memory_format(weight))
    return torch.channels_last if weight.ndim == 4 and torch.channels_last in formats else torch.contiguous_format


def contiguous_group_norm(group_norm: Callable[..., Tensor], input: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """On any other device than a CPU, `group_norm` itself makes its input contiguous while it is traced."""
    return group_norm(input.contiguous(), *arguments, **named)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, scale: float | None = None, **__: Any) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False, scale=scale)[0]


def on_cuda(graph: GraphModule) -> tuple[list[Any], FakeTensorMode]:
    """The same graph on CUDA, with the strides that its operations give there; its inputs, and their mode."""
    values = [node.meta['val'] for node in graph.graph.nodes if node.op == 'placeholder']
    mode = next(value.fake_mode for value in values if isinstance(value, Tensor))
    for node in graph.graph.nodes:
        if 'device' in node.kwargs:
            node.kwargs = {**node.kwargs, 'device': torch.device('cuda', 0)}
    with mode:
        inputs = [
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device='cuda') if isinstance(value, Tensor) else value
            for value in values
        ]
    with torch.no_grad():
        FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*inputs)
    return inputs, mode


@contextmanager
def lowered_graph(graph: GraphModule, **kind: bool) -> Iterator[tuple[GraphLowering, FakeTensorMode]]:
    """Lower a graph for CUDA; within the context Inductor's operations can be read and its code written."""
    inputs, mode = on_cuda(graph)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        compile_fx._recursive_post_grad_passes(graph, is_inference=kind['is_inference'])
        lowering = GraphLowering(graph, example_inputs=inputs, shape_env=None, **kind)
        with V.set_graph_handler(lowering), torch.no_grad():
            lowering.run(*inputs)
            yield lowering, mode


def lowered(step: Step) -> Callable[..., Any]:
    """Stands in for Inductor's compiler of one graph: adds what is in it to `step`, and returns a function that gives empty results."""

    def compile_graph(graph: GraphModule, example_inputs: Any, **options: Any) -> Callable[[list[Any]], list[Any]]:
        backward = options.get('is_backward', False)
        returned = [node.meta['val'] if isinstance(node, torch.fx.Node) else node for node in graph.graph.output_node().args[0]]
        compile_fx.record_original_output_strides(graph)
        compile_fx.view_to_reshape(graph)
        with lowered_graph(graph, is_inference=False, is_backward=backward) as (lowering, mode):
            step.convolutions.extend(each for each in map(convolution, lowering.operations) if each is not None)
            step.atomic += sum(isinstance(getattr(each, 'data', None), ir.Scatter) for each in lowering.operations)
            strides = [
                [int(stride) for stride in output.get_layout().stride] if isinstance(output, ir.IRNode) and output.has_tensor_output() else None
                for output in lowering.graph_outputs
            ]
        context = torch._guards.TracingContext.try_get()
        if not backward and context is not None and context.output_strides is not None:
            context.output_strides.extend(tuple(stride) if stride is not None else None for stride in strides)

        def run(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            with mode:
                return [
                    torch.empty_strided(value.size(), stride or value.stride(), dtype=value.dtype, device='cpu')
                    if isinstance(value, Tensor)
                    else value
                    for value, stride in zip(returned, strides, strict=True)
                ]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    return compile_graph


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def lower(build: Callable[[], UNet2DConditionModel], side: int, batch_size: int, mode: str, precision: str, weights_channels_last: bool) -> Step:
    """A U-Net's forward and backward pass over latents of `side`, as Inductor lowers `train.compile: mode`.

    `weights_channels_last`: as `ddp` with amp_bf16 holds the weights; FSDP2 holds them contiguous.
    """
    step = Step()
    torch._dynamo.reset()
    mode_of_tensors = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def backend(graph: GraphModule, inputs: Any) -> Any:
        torch._guards.TracingContext.get().fake_mode = mode_of_tensors  # Dynamo has made another, for inputs that are not fake
        return compile_fx.compile_fx(graph, inputs, inner_compile=lowered(step))

    dtype = torch.bfloat16 if precision == 'bf16' else torch.float32
    with mode_of_tensors, an_h200(), mock.patch.object(compilation, 'BACKEND', backend):
        with default_dtype(dtype):  # of fake tensors PyTorch changes none afterwards
            unet = build()
        if weights_channels_last:
            channels_last(unet)
        compilation.compile_network(unet, mode, BLOCKS)
        noisy = torch.empty(batch_size, unet.config.in_channels, side, side, dtype=dtype).contiguous(memory_format=torch.channels_last)
        text = torch.empty(batch_size, TEXT_LENGTH, unet.config.cross_attention_dim, dtype=torch.bfloat16)
        with as_on_a_gpu('amp_bf16') if precision == 'amp_bf16' else nullcontext():
            prediction = unet(noisy, torch.zeros(batch_size, dtype=torch.int64), text).sample
            loss = weighted_error(prediction, torch.empty_like(prediction, dtype=torch.float32)).mean()
        loss.backward()
    torch._dynamo.reset()
    return step
