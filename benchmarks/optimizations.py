"""The rows of the ladder of a training step: which optimizations each adds. What they do is in step_rows.py."""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Switches:
    """Switches of a step; the defaults are the plain loop."""

    sdpa: bool = False
    """`scaled_dot_product_attention`, not matrices of attention weights in memory."""
    channels_last: bool = False
    fused_adamw: bool = False
    reads_loss: bool = True
    """The host waits for the loss in every step, as a progress bar makes it."""
    keyed_noise: bool = False
    """Our objective: noise by sample key, text cast once; or else `torch.randn` and `DDPMScheduler`."""
    bf16_encoders: bool = False
    compile: str | None = None
    """As the recipe's `train.compile`; the noising and the encoders are compiled too."""
    resident_bf16: bool = False
    """The recipe's `train.precision: bf16`: FSDP2 keeps bf16 weights; or else fp32 weights under autocast."""
    ema: bool = False


# The rows of the ladder: what each adds to the one above, or to another.
OPTIMIZATIONS: dict[str, dict[str, Any]] = {
    'plain loop': {},
    '+ SDPA': {'sdpa': True},
    '+ channels_last': {'channels_last': True},
    '+ fused AdamW': {'fused_adamw': True},
    '+ loss stays on the device': {'reads_loss': False},
    '+ keyed noise, our objective': {'keyed_noise': True},
    '+ encoders in bf16': {'bf16_encoders': True},
    '+ compile blocks': {'compile': 'blocks'},
    '+ resident bf16 (FSDP2)': {'resident_bf16': True},
    '+ compile network': {'compile': 'network'},
    '+ EMA each step = train.py': {'ema': True},
}
ABOVE = dict(zip([*OPTIMIZATIONS][1:], OPTIMIZATIONS, strict=False)) | {'+ compile network': '+ encoders in bf16'}


def switches_of(name: str) -> Switches:
    """Return the switches of a row."""
    return replace(switches_of(ABOVE[name]) if name in ABOVE else Switches(), **OPTIMIZATIONS[name])
