"""The rows of the ladder of a training step: which optimizations each adds. What they do is in step_rows.py."""

from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True)
class Optimization:
    """A row: what it adds to another row, by default to the one above."""

    name: str
    adds: dict[str, Any] = field(default_factory=dict)
    to: str | None = None
    needs: str = ''


OPTIMIZATIONS = (
    Optimization('plain loop'),
    Optimization('+ SDPA', {'sdpa': True}),
    Optimization('+ channels_last', {'channels_last': True}),
    Optimization('+ fused AdamW', {'fused_adamw': True}),
    Optimization('+ loss stays on the device', {'reads_loss': False}),
    Optimization('+ keyed noise, our objective', {'keyed_noise': True}),
    Optimization('+ encoders in bf16', {'bf16_encoders': True}, needs='a GPU'),
    Optimization('+ compile blocks', {'compile': 'blocks'}, needs='a GPU or --compile'),
    Optimization('+ resident bf16 (FSDP2)', {'resident_bf16': True}, needs='a GPU'),
    Optimization('+ compile network', {'compile': 'network'}, to='+ encoders in bf16', needs='a GPU or --compile'),
    Optimization('+ EMA each step = train.py', {'ema': True}),
)


def ladder() -> dict[str, Switches]:
    """Each row's switches by its name, in order."""
    rows: dict[str, Switches] = {}
    above = Switches()
    for optimization in OPTIMIZATIONS:
        above = replace(rows[optimization.to] if optimization.to else above, **optimization.adds)
        rows[optimization.name] = above
    return rows
