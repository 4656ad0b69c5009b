"""Parts that diffusers' DreamBooth scripts of all flow transformers have in common, to be held against a run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from diffusion.checkpoints.initial import load_weights
from diffusion.contracts.batch import Conditioning
from diffusion.datasets.keyed_random import Draw, normal
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.families.family import Family
from diffusion.families.pipeline import open_model
from diffusion.families.registry import build_network, family_of
from diffusion.recipe import Recipe, RecipeError, load_recipe
from diffusion.recipe.schema import EncoderSource, FlowSettings, Model
from diffusion.training.builder import build_model, build_trainer
from diffusion.training.machine import compile_network
from diffusion.training.model import TextToImage
from tests.conftest import REPOSITORY, run_here

PROMPTS = ('a small red circle at the left on a blue background', 'a cyan square')
CLOSE = {'rtol': 1e-5, 'atol': 1e-5}
FILE = 'pytorch_lora_weights.safetensors'
Velocity = Callable[[Any, Tensor, Tensor, Conditioning], Tensor]
"""(transformer, noisy latents, noise levels (B,), conditioning) -> the script's prediction."""


def open_plain(base: Path) -> Any:
    pipeline = DiffusionPipeline.from_pretrained(base)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def published_model(name: str, base: Path, flow: FlowSettings) -> TextToImage:
    """The network and encoders of `base`, as a run holds them."""
    network, settings = build_network(name), Model(name, flow=flow)
    load_weights(network, str(base), settings, same_objective=True)
    return TextToImage(network, FrozenEncoders.load(EncoderSource(str(base)), family_of(name).find_text), settings, seed=3)


def adapter_recipe(name: str, changes: list[str], folder: Path, *more: str) -> Recipe:
    """The shipped recipe, four large steps long, with synthetic data."""
    adapted = [
        'adapter.rank=4',
        'adapter.alpha=8',
        'data.kind=synthetic',
        'data.aspect_buckets=false',
        'batch.micro_size=8',
        'train.duration=4ba',
        'optimizer.lr=1e-2',
    ]
    streams = ['data.streams.subject=null', 'data.streams.class=null']
    return load_recipe(REPOSITORY / f'yamls/dreambooth-{name}-lora.yaml', [*changes, *adapted, *streams, f'run_folder={folder}', *more])


def batch_of(model: TextToImage, count: int, script_sigmas: Callable[[Tensor], Tensor], noise_shape: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Latents of rectangles, captions and times of a script that takes the middle of the posterior, so here that is all of it; and what it is given."""
    generator = torch.Generator().manual_seed(count)
    key = torch.stack([torch.zeros(count), torch.arange(count), torch.zeros(count)], dim=1).long()
    images = torch.randint(0, 256, (count, 3, 32, 48), dtype=torch.uint8, generator=generator)
    prompts = [PROMPTS[i % 2] for i in range(count)]
    sigmas = script_sigmas(torch.rand(count, generator=generator))
    mean = model.encoders.vae.encode(images).chunk(2, dim=1)[0]
    moments = torch.cat([mean, torch.full_like(mean, -30)], dim=1)
    batch = {'moments': moments, 'tokens': model.encoders.text.tokenize(prompts), 'sample_key': key, 'timesteps': sigmas}
    return batch, (images, normal(model.seed, key, Draw.NOISE, noise_shape), sigmas, prompts)


def compare_step(model: TextToImage, batch: Any, transformer: Any, script_loss: Callable[[], Tensor]) -> Any:
    """Hold the loss of a batch and all gradients against the script's, which go into diffusers' own transformer; return the model's outputs."""
    outputs = model(batch)
    loss = model.loss(outputs, batch)
    loss.backward()
    transformer.train().zero_grad()
    expected = script_loss()
    expected.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    theirs = dict(transformer.named_parameters())
    assert theirs.keys() == {name for name, _ in model.network.named_parameters()}
    for name, weight in model.network.named_parameters():
        torch.testing.assert_close(weight.grad, theirs[name].grad, **CLOSE)
    assert sum(bool(weight.grad.any()) for weight in theirs.values()) > 0.9 * len(theirs)  # or the test tests nothing
    return outputs


def compare_compiled(model: TextToImage, batch: Any, family: Family, monkeypatch: Any, mode: Any = 'blocks', checkpointed: bool = True) -> None:
    """Hold all gradients of compiled blocks or of a compiled network against those of eager ones."""
    monkeypatch.setattr('diffusion.training.machine.BACKEND', 'aot_eager')
    gradients = []
    for step in range(2):
        model.zero_grad()
        if step and checkpointed:
            family.checkpoint_activations(model.network)
        if step:
            compile_network(model.network, mode, family.blocks)
        model.loss(model(batch), batch).backward()
        gradients.append([weight.grad.clone() for weight in model.network.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def compare_refusal_of_bf16(network: str, changes: list[str]) -> None:
    recipe = load_recipe(REPOSITORY / 'yamls/shapes-flow.yaml', changes)
    recipe.train.precision = 'bf16'
    with pytest.raises(RecipeError, match=f'train.precision: bf16 would round the times that {network} is given'):
        build_model(recipe, torch.device('cpu'))


def compare_adapter_steps(recipe: Recipe, family: Family, transformer: Any, latents_of: Callable[[Tensor], Tensor], velocity: Velocity) -> None:
    """Hold the trainer against peft, AdamW and the script's loss, from the same adapter at the start.

    Args:
        transformer: diffusers' own, of the base.
        latents_of: what the script makes of a draw from the VAE's posterior.
    """
    trainer = build_trainer(recipe)
    model, seen = trainer.state.model, []
    before = {name: weight.clone() for name, weight in get_peft_model_state_dict(model.network).items()}
    predict = model._predict

    def recorded(batch, t, seed):
        lr = trainer.state.optimizers[0].param_groups[0]['lr']
        seen.append((batch['moments'], batch['sample_key'], t, model.encoders.text.encode(batch['tokens']), lr))
        return predict(batch, t, seed)

    model._predict = recorded
    trainer.fit()
    trainer.close()
    transformer = transformer.train().requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=list(family.adapter_targets[recipe.adapter.targets])))
    weights = {name.replace('.default', ''): weight for name, weight in transformer.named_parameters() if weight.requires_grad}
    assert weights.keys() == before.keys()
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(before[name])
    settings = recipe.optimizer
    optimizer = torch.optim.AdamW(weights.values(), betas=tuple(settings.betas), eps=settings.eps, weight_decay=settings.weight_decay)
    for moments, key, t, conditioning, lr in seen:
        mean, log_variance = moments.float().chunk(2, dim=1)
        latents = latents_of(mean + (0.5 * log_variance).exp() * normal(recipe.seed, key, Draw.POSTERIOR, mean.shape[1:]))
        noise, sigma = normal(recipe.seed, key, Draw.NOISE, latents.shape[1:]), t.view(-1, 1, 1, 1)
        optimizer.zero_grad()
        predicted = velocity(transformer, (1 - sigma) * latents + sigma * noise, t, conditioning)
        (predicted - (noise - latents)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), settings.clip_norm)
        optimizer.param_groups[0]['lr'] = lr
        optimizer.step()
    assert len(seen) == 4
    after = get_peft_model_state_dict(model.network)
    assert max(float((after[name] - weight).abs().max()) for name, weight in before.items()) > 0.01
    for name, weight in weights.items():
        torch.testing.assert_close(after[name], weight.detach(), **CLOSE)


def compare_images_of_adapter(
    recipe: Recipe, family: Family, base: Path, folder: Path, parts: set[str], noise: Tensor, prompts: Sequence[str] = PROMPTS, **options: Any
) -> None:
    """Train and export; then the plain base with the adapter has to draw what the merged export draws, and so does what is left of that without its
    pipeline.

    Args:
        recipe: of a run in `folder`/run.
        parts: the networks that have adapters.
        options: of a call of the pipeline, guidance among them.
    """
    trainer = build_trainer(recipe)
    trainer.fit()
    trainer.close()
    out, kind = folder / 'out', family.pipeline_class
    run_here('diffusion.export', folder / 'run', out, '--weights', 'training', '--merged')
    assert [path.name for path in (out / 'lora').iterdir()] == [FILE]  # which ComfyUI reads, too
    assert {name.partition('.')[0] for name in load_file(out / 'lora' / FILE)} == parts

    def drawn(pipeline):
        pipeline.set_progress_bar_config(disable=True)
        return pipeline(prompt=list(prompts), latents=noise.clone(), num_inference_steps=4, output_type='latent', **options).images

    with_adapter = kind.from_pretrained(base)
    if family.loads_adapters:
        with_adapter.load_lora_weights(out / 'lora', weight_name=FILE)
    else:  # peft does
        config = LoraConfig(r=4, lora_alpha=8, target_modules=list(family.adapter_targets[recipe.adapter.targets]))
        weights = {name.removeprefix('transformer.'): weight for name, weight in load_file(out / 'lora' / FILE).items()}
        assert set_peft_model_state_dict(inject_adapter_in_model(config, with_adapter.transformer), weights).unexpected_keys == []
    merged = drawn(kind.from_pretrained(out))
    torch.testing.assert_close(drawn(with_adapter), merged, rtol=0, atol=1e-4)
    assert (merged - drawn(kind.from_pretrained(base))).abs().max() > 0.01
    (out / 'model_index.json').unlink()  # what is left is the adapter
    torch.testing.assert_close(drawn(open_model(out)[0]), merged, rtol=0, atol=1e-4)
