"""LoRA adapters by peft: which layers of a family's networks gain one, how it begins, and what of a network is adapter and what is frozen.

A frozen linear layer W computes W x + (alpha / rank) B A x; A (rank, in) begins normal, B (out, rank) at zero, so that a new adapter changes nothing.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from diffusion.common.files import read_regular
from diffusion.common.text import first_line
from diffusion.contracts.batch import Conditioning
from diffusion.contracts.errors import CheckpointError, EncoderError
from diffusion.encoders.text import TextEncoders
from diffusion.families.family import Family
from diffusion.recipe import RecipeError
from diffusion.recipe.merging import merge
from diffusion.recipe.reading import text_layers
from diffusion.recipe.schema import Adapter

TEXT_TARGETS = ('q_proj', 'k_proj', 'v_proj', 'out_proj')  # of CLIP's attention
ADAPTED_TEXT = (CLIPTextModel, CLIPTextModelWithProjection)  # no T5: diffusers loads no adapters of it
NUM_NAMED = 3  # weights that a message names
MAX_RECIPE_BYTES = 2**20


def add_adapters(adapter: Adapter, family: Family, network: nn.Module, text: TextEncoders, seed: int) -> None:
    """Freeze the network, give it adapters and, if the recipe says so, its text encoders too. Equal seeds give equal adapters, on any device.

    Raises:
        RecipeError: the rank is above what a layer has.
    """
    add_adapter(network, adapter, family.adapter_targets[adapter.targets], seed)
    if adapter.text_encoders:
        for number, part in enumerate([part for part in text.parts.values() if isinstance(part.module, ADAPTED_TEXT)], start=1):
            part.adapt(partial(add_adapter, adapter=adapter, targets=TEXT_TARGETS, seed=seed + number))
        _freeze_unread(text)


def add_adapter(module: Any, adapter: Adapter, targets: Iterable[str], seed: int) -> None:
    """Freeze a network of diffusers or transformers and give the layers with these endings of their names an adapter, in float32.

    Raises:
        RecipeError: the rank is above what a layer has.
    """
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds, which a run without adapters need not wait
    from peft.tuners.lora import LoraLayer

    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, init_lora_weights='gaussian', target_modules=list(targets))  # type: ignore[arg-type]
    module.requires_grad_(False)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, module)  # the `add_adapter` of diffusers and transformers ends here, but PRX's network has none
    layers: dict[str, Any] = {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}
    sides: dict[str, int] = {name: min(layer.in_features, layer.out_features) for name, layer in layers.items()}
    name = min(sides, key=sides.__getitem__)
    if adapter.rank > sides[name]:
        error = f'adapter.rank: {adapter.rank} is above {sides[name]}, the smaller side of {name} in {type(module).__name__}; set at most that'
        raise RecipeError('adapter', [error])
    for weight in module.parameters():
        if weight.requires_grad:
            weight.data = weight.data.float()  # peft takes the dtype of the layer, and bf16 would round small steps away


def let_gradients_reach(conditioning: Conditioning, adapter: Adapter) -> None:
    """Make an example of encoded text what it is in training: something that text encoders with adapters get gradients from."""
    for tensor in (conditioning.text, conditioning.pooled):
        if tensor is not None:
            tensor.requires_grad_(adapter.text_encoders)


def store_frozen_in_bf16(module: nn.Module) -> None:
    """Nothing of it is updated, and arithmetic in bf16 would round it anyway: half of the memory, and no copy in each step."""
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and not weight.requires_grad:
                part._parameters[name] = nn.Parameter(weight.detach().bfloat16(), requires_grad=False)


def _freeze_unread(text: TextEncoders) -> None:
    """Freeze adapters of layers whose output nobody reads, such as SDXL's last of CLIP ViT-L: they would never have a gradient."""
    weights = [weight for part in text.parts.values() for weight in part.module.parameters() if weight.requires_grad]
    with torch.enable_grad():
        encoded = text.encode(text.tokenize(['']))
        read = [tensor.float().sum() for tensor in (encoded.text, encoded.pooled) if tensor is not None]
        gradients = torch.autograd.grad(torch.stack(read).sum(), weights, allow_unused=True)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.requires_grad_(gradient is not None)


def adapted_parts(family: Family, network: nn.Module, text: TextEncoders) -> dict[str, nn.Module]:
    """The networks that have adapters, by the names of their folders in the diffusers layout."""
    return {family.component: network} | {name: part.module for name, part in text.parts.items() if part.adapted}


def trained_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trained weights of a network, by name."""
    return {name: weight for name, weight in module.named_parameters() if weight.requires_grad}


def load_adapters(parts: Mapping[str, nn.Module], weights: Mapping[str, Mapping[str, Tensor]], source: str) -> None:
    """Load the trained weights of all `parts`, no more and no fewer.

    Raises:
        CheckpointError: `source` holds another adapter.
    """
    expected = {f'{part}: {name}': weight for part, module in parts.items() for name, weight in trained_weights(module).items()}
    found = {f'{part}: {name}': weight for part, named in weights.items() for name, weight in named.items()}
    if odd := _copy_strictly(expected, found):
        raise CheckpointError(f"{source}: holds another adapter than the recipe's: {odd}")


@torch.no_grad()
def _copy_strictly(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Copy all of `found` into the tensors of the same names, or nothing; return what does not fit, empty if everything does."""
    reasons = {
        'missing': expected.keys() - found.keys(),
        'unexpected': found.keys() - expected.keys(),
        'of another shape': [name for name in expected.keys() & found.keys() if found[name].shape != expected[name].shape],
        'not finite': [name for name in expected.keys() & found.keys() if not found[name].isfinite().all()],
    }
    odd = [f'{len(names)} weights {reason}, such as {", ".join(sorted(names)[:NUM_NAMED])}' for reason, names in reasons.items() if names]
    if not odd:
        for name, weight in expected.items():
            weight.copy_(found[name])
    return '; '.join(odd)


def adapter_of(folder: Path) -> Adapter:
    """The settings of an exported adapter, from the recipe in its folder.

    Raises:
        EncoderError: there is no recipe of an adapter, or it is damaged.
    """
    path, errors = folder / 'recipe.yaml', list[str]()
    try:
        layers = text_layers(read_regular(path, MAX_RECIPE_BYTES).decode(), str(path), errors)
    except (OSError, ValueError) as error:
        raise EncoderError(f'{path}: which the adapter needs, cannot be read: {first_line(error)}; export the run again') from error
    section = layers[0][1].get('adapter') if layers else None
    settings: Adapter = merge(Adapter, [(str(path), section if isinstance(section, dict) else {})], errors)
    if errors or not isinstance(section, dict):
        raise EncoderError(f'{"; ".join(errors) or f"{path}: describes no adapter"}; restore the file, or export the run again')
    return settings


def exported_weights(family: Family, parts: Mapping[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    """The adapters of `parts` under the names of diffusers' file; the tensors are those that the networks hold."""
    from diffusers.utils import convert_state_dict_to_diffusers

    named = {part: peft_weights(module) for part, module in parts.items()}
    return {part: convert_state_dict_to_diffusers(own) for part, own in named.items()} if family.older_adapters else named


def peft_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return its adapter under peft's names, CLIP's with the `text_model.` of published files, which transformers 5 leaves out of some classes."""
    from peft import get_peft_model_state_dict

    first = 'text_model.' if isinstance(module, CLIPTextModel) and not hasattr(module, 'text_model') else ''
    return {first + name: weight for name, weight in get_peft_model_state_dict(module, save_embedding_layers=False).items()}


def load_exported(components: Mapping[str, Any], adapter: Adapter, family: Family, file: Path) -> None:
    """Give the networks of a pipeline the adapter in a file of diffusers' format: exactly the weights that its settings imply.

    Raises:
        EncoderError: the file is damaged or holds other weights.
    """
    parts = {family.component: family.adapter_targets[adapter.targets]}
    if adapter.text_encoders:
        parts |= {name: TEXT_TARGETS for name, part in components.items() if isinstance(part, ADAPTED_TEXT)}
    try:
        for name, endings in parts.items():
            add_adapter(components[name], adapter, endings, seed=0)
        found = load_file(file)
    except (RecipeError, SafetensorError, OSError) as error:
        raise EncoderError(f'{file}: cannot be loaded: {first_line(error)}; export the run again') from error
    exported = exported_weights(family, {name: components[name] for name in parts})
    if odd := _copy_strictly({f'{part}.{name}': weight for part, own in exported.items() for name, weight in own.items()}, found):
        settings = f'rank {adapter.rank}, {adapter.targets}{", text encoders" if adapter.text_encoders else ""}'
        raise EncoderError(f'{file}: is not the adapter that recipe.yaml describes ({settings}): {odd}; copy the file or export the run again')


@torch.no_grad()
def merge_adapter(module: Any) -> None:
    """Add the adapter to the layers that it adapts, W + (alpha / rank) B A, and remove it."""
    from diffusers.utils import recurse_remove_peft_layers
    from peft.tuners.lora import LoraLayer

    for layer in module.modules():
        if isinstance(layer, LoraLayer):
            layer.merge()  # type: ignore[attr-defined]
    recurse_remove_peft_layers(module)
    del module.peft_config
