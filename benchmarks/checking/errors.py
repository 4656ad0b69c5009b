"""Errors against a more precise result, and their limits."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.checking.cases import Values

# Of the norm of the difference. A kernel rounds its inputs' products and its result a few times, and errors of single numbers average out, so a few
# units in the last place are ample; float32 sums of many thousands of terms lose more than one.
KERNEL = {torch.bfloat16: 5 * 2.0**-8, torch.float32: 2e-5}
# Gradients of a whole network: roundings of all layers add up, and TF32 (10 bits) multiplies float32 on a GPU.
NETWORK = {'fp32': 1e-4, 'tf32': 5e-3, 'bf16': 6e-2}


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over that of the reference, in float64 on the reference's device."""
    exact = reference.detach().double()
    return ((value.detach().to(exact) - exact).norm() / exact.norm()).item()


def kernel_checks(names: Sequence[str], values: Sequence[Tensor], references: Sequence[Tensor]) -> Values:
    """`checks` of a row: each value against its reference, by the limit of its own dtype."""
    triples = zip(names, values, references, strict=True)
    return {'checks': {name: [relative_error(value, reference), KERNEL[value.dtype]] for name, value, reference in triples}}


def num_different(values: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> int:
    """Tensors that are not equal to the bit, or that only one of the two has."""
    common = values.keys() & others.keys()
    return len(values.keys() ^ others.keys()) + sum(not torch.equal(values[name].cpu(), others[name].cpu()) for name in common)
