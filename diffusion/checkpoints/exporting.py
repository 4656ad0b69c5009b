"""A checkpoint as a folder in the diffusers layout, or an adapter as files that others read.

These are diffusers' and kohya's (AUTOMATIC1111, ComfyUI, InvokeAI).
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders import SD3LoraLoaderMixin
from diffusers.training_utils import _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_kohya
from safetensors.torch import save_file
from torch import nn

from diffusion.checkpoints.initial import base_of, load_base
from diffusion.checkpoints.manifest import read_manifest
from diffusion.checkpoints.model_card import model_card
from diffusion.checkpoints.post_hoc import reconstruct
from diffusion.checkpoints.reading import (
    batches_trained,
    find_checkpoint,
    load_strictly,
    read_checkpoint,
    recipe_yaml,
    weights_by_part,
    zeros_for_empty,
)
from diffusion.checkpoints.resume import refuse_other_encoders
from diffusion.common.files import replacing_folder
from diffusion.contracts.errors import CheckpointError
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.encoders.frozen_part import weights_sha256
from diffusion.encoders.pretrained import save_tokenizer
from diffusion.families.adapters import adapted_parts, add_adapters, exported_weights, load_adapters, merge_adapter, peft_weights
from diffusion.families.family import Family
from diffusion.families.pipeline import KOHYA, LORA, ZEROS, DrawingSettings
from diffusion.families.registry import build_network, family_for
from diffusion.objectives import build_objective
from diffusion.recipe import Recipe, recipe_from_yaml
from diffusion.recipe.averaging import coverage
from diffusion.recipe.keys import hub_source


def export(
    checkpoint: Path,
    out: Path,
    weights: str = 'ema',
    overrides: Sequence[str] = (),
    license: str | None = None,
    merged: bool = False,
    sigma_rel: float | None = None,
) -> dict[str, object]:
    """Write the folder; returns what `export.json` says.

    Args:
        merged: of an adapter, also the whole pipeline with the adapter added to its weights.
        sigma_rel: width of the average, of a run that kept others (post_hoc.py).

    Raises:
        CheckpointError, EncoderError, RecipeError: with the remedy.
    """
    if out.exists() and not (out / 'export.json').exists():
        raise CheckpointError(f'{out}: exists and is not an export of this project; name a new folder')
    file = find_checkpoint(checkpoint)
    state = read_checkpoint(file)
    recipe = recipe_from_yaml(recipe_yaml(state), str(file), overrides)
    if merged and recipe.adapter is None:
        raise CheckpointError(f'--merged: {file} holds a whole network, not an adapter; leave the option out')
    if sigma_rel is not None and weights != 'ema':
        raise CheckpointError(f'--sigma-rel: {sigma_rel:g} is the width of an average, and --weights training takes none; leave one of them out')
    batches = batches_trained(state)
    family = family_for(recipe)
    chosen = weights_by_part(state, family.component, average=weights == 'ema')
    if chosen is None:
        of_recipe = f'sigma_rel={recipe.ema.sigma_rel}' if recipe.ema.sigma_rel else f'half_life={recipe.ema.half_life}'
        raise CheckpointError(
            f'{file}: holds no EMA after {batches} batches (ema.{of_recipe}, ema.start={recipe.ema.start}); '
            'take the weights as trained with --weights training'
        )
    averaged_as, post_hoc = recipe.ema, None
    if sigma_rel is not None:
        chosen, post_hoc = reconstruct(file, recipe, family.component, sigma_rel)
        averaged_as = dataclasses.replace(recipe.ema, sigma_rel=[sigma_rel])
    network, settings = build_network(recipe.model.network), DrawingSettings(zeros_for_empty(state))
    covered = coverage(averaged_as, batches) if weights == 'ema' else None
    facts: dict[str, object] = {
        'weights': weights,
        'checkpoint': file.name,
        'batches': batches,
        'samples_seen': batches * recipe.batch.global_size,
        'resolution': recipe.data.resolution,
        'average': None if covered is None else dataclasses.asdict(covered),
        'post_hoc': post_hoc,
        'guidance': recipe.log.samples.guidance,
        'steps': recipe.log.samples.steps,
    }
    if recipe.adapter is None:
        load_strictly(network, chosen[family.component], str(file))
        encoders, parts = FrozenEncoders.load(recipe.model.encoders, family.find_text), {}
        facts['encoders'] = encoders.digests
        manifest = read_manifest(file)
        if manifest is not None:
            refuse_other_encoders(manifest, encoders.digests)
    else:
        encoders, facts['base'], settings = _base(network, recipe, file)
        add_adapters(recipe.adapter, family, network, encoders.text, recipe.seed)
        parts = adapted_parts(family, network, encoders.text)
        load_adapters(parts, chosen, str(file))
    with replacing_folder(out) as temporary:
        if recipe.adapter is not None:
            write_lora(temporary / LORA.parent, family, parts, recipe.adapter.alpha)
        for module in parts.values() if merged else ():
            merge_adapter(module)
        if merged or recipe.adapter is None:
            pipeline = family.pipeline(network, encoders, family.scheduler(build_objective(recipe.model)), recipe.data.resolution)
            settings.apply(pipeline).save_pretrained(temporary, safe_serialization=True)
            for name, tokenizer in encoders.text.tokenizers.items():
                save_tokenizer(tokenizer, temporary / name)
        (temporary / 'recipe.yaml').write_text(recipe_yaml(state))
        (temporary / 'export.json').write_text(json.dumps(facts, indent=1) + '\n')
        (temporary / 'README.md').write_text(model_card(recipe, file, state, facts, license, merged))
    return facts


def _base(network: nn.Module, recipe: Recipe, file: Path) -> tuple[FrozenEncoders, dict[str, object], DrawingSettings]:
    """Load what the adapter in `file` was trained on into `network`; returns its encoders, what export.json says of it, and how it draws.

    Raises:
        CheckpointError: it is not the one, or nothing says which one it was.
    """
    manifest = read_manifest(file)
    if manifest is None:
        raise CheckpointError(
            f'{file}: {file.with_suffix(".json").name} is not next to it, which says what network its adapter belongs to; copy both'
        )
    path, family = base_of(recipe), family_for(recipe)
    settings = load_base(network, recipe)
    encoders = FrozenEncoders.load(recipe.model.encoders, family.find_text)
    digests = encoders.digests | {family.component: weights_sha256(network)}
    refuse_other_encoders(manifest, digests)
    source, revision = hub_source(path) or (path, None)
    scheduler = json.loads((settings.scheduler or family.scheduler(build_objective(recipe.model))).to_json_string())
    facts = {'network': recipe.model.network, 'source': source, 'revision': revision, 'sha256': digests, 'scheduler': scheduler}
    return encoders, {**facts, ZEROS: settings.zeros_for_empty}, settings


def write_lora(folder: Path, family: Family, parts: Mapping[str, Any], alpha: float) -> None:
    """Write the file of diffusers and, where they read another, that of other programs. Equal adapters make equal files, to the byte.

    Args:
        parts: the adapted networks by the names of their folders in the diffusers layout.
    """
    metadata = _collate_lora_metadata(dict(parts))  # without it readers take alpha = rank
    for part in metadata.values():
        part['target_modules'] = sorted(part['target_modules'])  # a set, whose order changes from process to process
    layers = {f'{name}_lora_layers': own for name, own in exported_weights(family, parts).items()}
    writer: Any = family.pipeline_class if family.loads_adapters else SD3LoraLoaderMixin  # whose file fits any transformer
    writer.save_lora_weights(folder, weight_name=LORA.name, **layers, **metadata)
    _order_metadata(folder / LORA.name)
    if not family.older_adapters:
        return
    # From peft's names of all parts: of the file above diffusers' conversion leaves the U-Net behind.
    weights = {f'{part}.{name}': tensor for part, module in parts.items() for name, tensor in peft_weights(module).items()}
    kohya = convert_state_dict_to_kohya(weights)
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
