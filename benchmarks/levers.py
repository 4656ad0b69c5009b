"""The rows of the ablation of a training step: which levers each adds. What they do is in ablation.py."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Switches:
    """What a step does; the defaults are the plain loop."""

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
class Lever:
    """A row: what it adds to another row, by default to the one above."""

    name: str
    adds: dict[str, Any] = field(default_factory=dict)
    to: str | None = None
    needs: str = ''


LEVERS = (
    Lever('plain loop'),
    Lever('+ SDPA', {'sdpa': True}),
    Lever('+ channels_last', {'channels_last': True}),
    Lever('+ fused AdamW', {'fused_adamw': True}),
    Lever('+ loss stays on the device', {'reads_loss': False}),
    Lever('+ keyed noise, our objective', {'keyed_noise': True}),
    Lever('+ encoders in bf16', {'bf16_encoders': True}, needs='a GPU'),
    Lever('+ compile blocks', {'compile': 'blocks'}, needs='a GPU or --compile'),
    Lever('+ resident bf16 (FSDP2)', {'resident_bf16': True}, needs='a GPU'),
    Lever('+ compile network', {'compile': 'network'}, to='+ encoders in bf16', needs='a GPU or --compile'),
    Lever('+ EMA each step = train.py', {'ema': True}),
)


def ladder() -> dict[str, Switches]:
    """Each row's switches by its name, in order."""
    rows: dict[str, Switches] = {}
    above = Switches()
    for lever in LEVERS:
        above = replace(rows[lever.to] if lever.to else above, **lever.adds)
        rows[lever.name] = above
    return rows
