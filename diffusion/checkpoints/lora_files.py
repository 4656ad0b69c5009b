"""An adapter as files that others read: diffusers' and kohya's (AUTOMATIC1111, ComfyUI, InvokeAI)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_kohya
from safetensors.torch import save_file

from diffusion.families.adapters import peft_weights
from diffusion.families.family import Family
from diffusion.families.pipeline import LORA

KOHYA = 'kohya.safetensors'


def write_lora(folder: Path, family: Family, parts: Mapping[str, Any], alpha: float) -> None:
    """Write both files. Equal adapters make equal files, to the byte.

    Args:
        parts: the adapted networks by the names of their folders in the diffusers layout.
    """
    weights = {name: peft_weights(module) for name, module in parts.items()}
    metadata = _collate_lora_metadata(dict(parts))  # without it readers take alpha = rank
    for part in metadata.values():
        part['target_modules'] = sorted(part['target_modules'])  # a set, whose order changes from process to process
    layers = {f'{name}_lora_layers': convert_state_dict_to_diffusers(own) for name, own in weights.items()}
    family.pipeline_class.save_lora_weights(folder, weight_name=LORA.name, **layers, **metadata)  # type: ignore[attr-defined]
    _order_metadata(folder / LORA.name)
    # From peft's names of all parts: of the file above diffusers' conversion leaves the U-Net behind.
    kohya = convert_state_dict_to_kohya({f'{part}.{name}': tensor for part, own in weights.items() for name, tensor in own.items()})
    if 'text_encoder_2' not in family.pipeline_parts:
        kohya = {name.replace('lora_te1_', 'lora_te_'): tensor for name, tensor in kohya.items()}  # only of two encoders has the first a number
    alphas = {name: torch.tensor(alpha) for name in kohya if name.endswith('.alpha')}  # the conversion writes the rank
    save_file({name: tensor.contiguous() for name, tensor in {**kohya, **alphas}.items()}, folder / KOHYA, metadata={'format': 'pt'})


def _order_metadata(path: Path) -> None:
    """Sort the metadata of a safetensors file, which are written in another order each time. It holds the header's length, the header, tensors."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], 'little')
    header = json.loads(content[8:end])
    header['__metadata__'] = dict(sorted(header['__metadata__'].items()))
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, 'little') + text + content[end:])
