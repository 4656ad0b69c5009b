"""The optimizations of a training step, one at a time: from the loop of diffusers' own example to what `train.py` does.

Every row builds the model with the function that `train.py` builds it with, and takes back the optimizations that are not its own yet.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from composer.core import Precision
from composer.distributed import parallelize_composer_model
from composer.utils import dist, get_device
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor

from benchmarks.optimizations import ABOVE, Switches, switches_of
from benchmarks.timing import Timing, device, forget_peak_memory, free_memory, on_gpu, peak_memory_bytes, timed
from diffusion.contracts.batch import Batch
from diffusion.cost.hardware import device_name, mfu, peak_flops
from diffusion.families.unet import keep_channels_last
from diffusion.recipe import Recipe, load_recipe
from diffusion.recipe.averaging import Profile
from diffusion.training.builder import build_model
from diffusion.training.ema import EMA
from diffusion.training.gradient_guard import clipping_divisor
from diffusion.training.micro_batch import blank_batch
from diffusion.training.model import TextToImage
from diffusion.training.sharding import gradient_norm, parallelism_config

SMOOTHING = 0.9999
RECIPE = Path(__file__).parents[1] / 'yamls/sd2-base-256.yaml'


def possible(switches: Switches, device: torch.device) -> Switches:
    """Without what is for a GPU alone: the CPU trains in float32 as `train.py` does there, and would compile for minutes."""
    on_gpu = device.type == 'cuda'
    return replace(
        switches,
        bf16_encoders=switches.bf16_encoders and on_gpu,
        resident_bf16=switches.resident_bf16 and on_gpu,
        compile=switches.compile if on_gpu else None,
    )


def recipe_of(
    switches: Switches,
    network: str,
    resolution: int,
    kind: str,
    micro_batch: int,
    encoders: Path,
    device: torch.device,
    **more: Any,
) -> Recipe:
    """The shipped recipe with what a row changes in it, on data of the sort `kind`: latents or images; `more` overrides the rest."""
    precision = 'fp32' if device.type == 'cpu' else 'bf16' if switches.resident_bf16 else 'amp_bf16'
    overrides = {
        'model.network': network,
        'model.encoders.source': encoders,
        'model.encoders.revision': 'null',
        'data.kind': 'synthetic',
        'data.resolution': resolution,
        'batch.global_size': micro_batch,
        'batch.micro_size': micro_batch,
        'train.precision': precision,
        'train.compile': switches.compile or 'null',
        **more,
    }
    recipe = load_recipe(RECIPE, [f'{key}={value}' for key, value in overrides.items()])
    recipe.data.kind = 'images' if kind == 'images' else 'synthetic'
    return recipe


def random_batch(recipe: Recipe, model: TextToImage) -> Batch:
    """A batch of random images or latents; zeros would let a GPU clock higher than data does."""
    batch = blank_batch(int(recipe.batch.micro_size), recipe, model)
    text = model.encoders.text
    for name, tokenizer in zip(text.parts, text.tokenizers.values(), strict=True):
        batch['tokens'][name].random_(0, len(tokenizer))
    batch['sample_key'][:, 1] = torch.arange(len(batch['sample_key']))
    if 'images' in batch:
        batch['images'].random_(0, 256)
    else:
        batch['moments'].normal_()
    return batch


def build_step(
    switches: Switches, recipe: Recipe, device: torch.device, change: Callable[[UNet2DConditionModel], None] | None = None
) -> tuple[TextToImage, Batch, Callable[[], None]]:
    """The model, a random batch, and a function that trains the model on it once.

    Args:
        change: of the network, before it is compiled and its weights are given to the optimizer.
    """
    get_device(None)  # Composer's device switches TF32 on, as in training
    model = build_model(recipe, device)
    if change is not None:
        change(model.network)
    if not switches.sdpa:
        model.network.set_attn_processor(AttnProcessor())
    if not switches.channels_last:
        model.network.to(memory_format=torch.contiguous_format)
        keep_channels_last(model.network, keep=False)
    if not switches.bf16_encoders:
        model.encoders.to(device, torch.float32, vae_in_bf16=False)
    if switches.compile is not None:
        model.compile_step(switches.compile)
    options = recipe.optimizer
    optimizer = torch.optim.AdamW(
        model.network.parameters(),
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        fused=switches.fused_adamw or None,  # None is PyTorch's default: foreach on a GPU, a loop on a CPU
    )
    if switches.resident_bf16:
        divide_as_trainer(model, optimizer, recipe)
    plain = plain_loss(model)
    ema = EMA([Profile.of_half_life(6931)]) if switches.ema else None  # whose smoothing is SMOOTHING
    autocast = recipe.train.precision != 'fp32'
    batch = random_batch(recipe, model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = model.loss(model(batch), batch) if switches.keyed_noise else plain(batch)
        loss.backward()
        if options.clip_norm is not None and switches.fused_adamw:
            optimizer.grad_scale = clipping_divisor(gradient_norm([optimizer]), options.clip_norm)  # type: ignore[attr-defined]
        elif options.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.network.parameters(), options.clip_norm)
        optimizer.step()
        if ema is not None:
            ema.update(model, SMOOTHING)
        if switches.reads_loss:
            loss.item()

    return model, batch, step


def plain_loss(model: TextToImage) -> Callable[[Batch], Tensor]:
    """Return the loss of diffusers' examples/text_to_image/train_text_to_image.py."""
    schedule, encoders = model.objective.settings.schedule, model.encoders
    scheduler = DDPMScheduler(schedule.num_timesteps, schedule.beta_start, schedule.beta_end, schedule.kind)

    def loss(batch: Batch) -> Tensor:
        moments = batch['moments'] if 'moments' in batch else encoders.vae.encode(batch['images'])
        mean = moments[:, : encoders.vae.latent_channels]
        latents = encoders.vae.latents(moments, torch.randn_like(mean, dtype=torch.float32))
        noise = torch.randn_like(latents)
        t = torch.randint(0, schedule.num_timesteps, (len(latents),), device=latents.device)
        noisy = scheduler.add_noise(latents, noise, t)
        prediction = model.family.denoise(model.network, noisy, t, model.conditioning(batch))
        return torch.nn.functional.mse_loss(prediction.float(), noise)

    return loss


def divide_as_trainer(model: TextToImage, optimizer: torch.optim.Optimizer, recipe: Recipe) -> None:
    """Hand the weights to FSDP2 as Composer's Trainer does for the recipe."""
    dist.initialize_dist(get_device(None))
    config = parallelism_config(recipe.train.sharding, recipe.train.precision, dist.get_world_size(), dist.get_local_world_size())
    assert config is not None
    parallelize_composer_model(model, optimizer, config['fsdp'], Precision.AMP_BF16)


@dataclass
class StepRow:
    """A row with what is built for it and what was measured of it; `status` says why there is nothing.

    `change` is applied to the network before it is compiled.
    """

    name: str
    switches: Switches
    status: str = 'measured'
    step: Callable[[], None] | None = None
    flop_per_image: int = 0
    precision: str = ''
    timing: Timing | None = None
    memory: dict[str, int] = field(default_factory=dict)
    change: Callable[[UNet2DConditionModel], None] | None = None

    def build(self, setting: dict[str, Any], encoders: Path) -> None:
        recipe = recipe_of(self.switches, encoders=encoders, device=device(), **setting)
        model, batch, self.step = build_step(self.switches, recipe, device(), self.change)
        self.flop_per_image = model.flops_per_batch(batch) // setting['micro_batch']
        self.precision = recipe.train.precision

    def measure(self, setting: dict[str, Any], encoders: Path, steps: int, warmup: int) -> None:
        """Time `steps` after `warmup`, with nothing else on the device, so that its memory is the row's own."""
        forget_peak_memory()
        try:
            self.build(setting, encoders)
            assert self.step is not None
            self.timing = timed(self.step, steps, warmup)
            self.memory = {'peak_allocated_bytes': peak_memory_bytes(), 'peak_reserved_bytes': torch.cuda.max_memory_reserved()}
        except torch.cuda.OutOfMemoryError:
            self.status = 'out of memory'
        finally:
            self.step = None
            free_memory()

    def line(self, setting: dict[str, Any]) -> dict[str, Any]:
        """One line of JSONL; a row without a measurement has no numbers."""
        line = {'benchmark': 'step', 'row': self.name, **setting, 'num_gpus': int(on_gpu()), 'status': self.status}
        if self.timing is None:
            return line
        images_per_sec = setting['micro_batch'] / self.timing.median_sec
        return {
            **line,
            'switches': asdict(self.switches),
            'precision': self.precision,
            'accumulation': 1,
            'images_per_sec': images_per_sec,
            'images_per_sec_per_gpu': images_per_sec,  # there is one
            'mfu': mfu(images_per_sec, self.flop_per_image, peak_flops(device_name())),
            'flop_per_image': self.flop_per_image,
            **asdict(self.timing),
            **self.memory,
        }


def step_row(name: str, change: Callable[[UNet2DConditionModel], None] | None = None) -> StepRow:
    """The row to measure; it is skipped if its optimization does nothing on this machine, and those after it go without."""
    switches, *above = (possible(switches_of(one), device()) for one in (name, ABOVE.get(name)) if one)
    return StepRow(name, switches, 'skipped: needs a GPU' if [switches] == above else 'measured', change=change)
