"""A run of a variant of the loss weights and of the decay, judged as the demo is."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from streaming import LocalDataset
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from benchmarks.measured import print_table, record
from data_prep.shapes import draw
from diffusion.common.json_lines import read_lines
from diffusion.demo.__main__ import JUDGE_SEED, judged_scenes, prepare
from diffusion.demo.judge import judge
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.families.registry import build_network as build_unet
from diffusion.objectives.predictions import Velocity
from diffusion.recipe import load_recipe
from diffusion.recipe.averaging import kept
from diffusion.recipe.schema import Diffusion, Encoders, Model, Schedule
from diffusion.training.ema import EMA
from diffusion.training.lr_schedule import lr_factor
from diffusion.training.model import TextToImage

RECIPE = Path(__file__).parents[2] / 'yamls/shapes.yaml'
RESOLUTION = 32  # the demo's: at 16 px its autoencoder does not keep the colours that the judge looks at
LEGIBLE = 0.95  # of the reconstructed scenes must show the judge the right colours, or its verdict on drawn ones says nothing
BATCH_SIZE = {'shapes': 64, 'mlp': 128}
DROPOUT = 0.1  # of captions
GAMMA, FLOOR = 5.0, 0.1


@dataclass(frozen=True)
class Variant:
    weight: str
    """none; min-snr: as recipes have it; paper: min(SNR, gamma) / (SNR + 1), and not below FLOOR."""
    decay: str
    """As in recipes."""

    def __str__(self) -> str:
        return f'{WEIGHTS[self.weight]}, {self.decay}'


WEIGHTS = {'none': 'no weights', 'paper': f'min(SNR, {GAMMA:g})/(SNR+1), at least {FLOOR:g}', 'min-snr': f'min(SNR+1, {GAMMA:g})/(SNR+1)'}
VARIANTS = [*(Variant(weight, 'constant') for weight in WEIGHTS), Variant('none', 'cosine'), Variant('none', 'cooldown')]


def papers_weight(snr: Tensor, gamma: float) -> Tensor:
    """arXiv 2303.09556, with a floor, because it is 0 at zero SNR."""
    return (snr.clamp(max=gamma) / (snr + 1)).clamp(min=FLOOR)


class Perceptron(nn.Module):
    """Latents, noise level and all words to v, called as a U-Net is."""

    def __init__(self, latents: tuple[int, int, int], words: tuple[int, int], width: int = 256):
        super().__init__()
        self.config = SimpleNamespace(cross_attention_dim=words[1])
        self.levels = nn.Embedding(1000, 64)
        self.levels.weight.data = torch.cat(
            [f(torch.arange(1000)[:, None] / 1000 * 2.0 ** torch.arange(32)[None] / 100) for f in (torch.sin, torch.cos)], 1
        )
        self.levels.requires_grad_(False)
        num_latents, num_words = int(np.prod(latents)), int(np.prod(words))
        self.first = nn.Linear(num_latents + num_words + 64, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(2))
        self.last = nn.Sequential(nn.LayerNorm(width), nn.SiLU(), nn.Linear(width, num_latents))

    def forward(self, noisy: Tensor, t: Tensor, text: Tensor) -> Any:
        hidden = self.first(torch.cat([noisy.flatten(1), text.flatten(1), self.levels(t).expand(len(noisy), -1)], dim=1))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return SimpleNamespace(sample=self.last(hidden).view_as(noisy))


def measure(job: tuple[Variant, int, str, int, int, Path]) -> dict[str, Any]:
    """Train a variant from a seed and judge it; in a process of its own."""
    variant, seed, network, batches, num_images, demo = job
    torch.set_num_threads(1)
    if variant.weight == 'paper':
        Velocity.min_snr_weight = staticmethod(papers_weight)  # type: ignore[method-assign]
    recipe = load_recipe(RECIPE, [f'model.encoders.source={demo / "encoders"}'])
    encoders = FrozenEncoders.load(Encoders(str(demo / 'encoders')))
    moments, text, empty = data(demo, encoders)
    gamma = None if variant.weight == 'none' else GAMMA
    settings = Model('shapes' if network == 'mlp' else network, diffusion=Diffusion('v_prediction', Schedule(zero_terminal_snr=True), gamma))
    torch.manual_seed(seed)
    unet: Any = Perceptron((moments.shape[1] // 2, *moments.shape[2:]), (text.shape[1], text.shape[2])) if network == 'mlp' else build_unet(network)
    model = TextToImage(unet, encoders, settings, seed)
    options = recipe.optimizer
    optimizer = torch.optim.AdamW(unet.parameters(), options.lr, options.betas, options.eps, options.weight_decay, fused=True)
    scheduler = LambdaLR(optimizer, lambda batch: lr_factor(batch, batches // 12, batches, variant.decay))
    ema = EMA(batches)
    generator, size = torch.Generator().manual_seed(seed), BATCH_SIZE[network]
    for batch in range(batches):
        ids = torch.randint(len(moments), (size,), generator=generator)
        dropped = torch.rand(size, 1, 1, generator=generator) < DROPOUT
        key = torch.stack([torch.full_like(ids, batch), ids, torch.arange(size)], dim=1)
        inputs: Any = {'moments': moments[ids], 'text_embeddings': torch.where(dropped, empty, text[ids]), 'sample_key': key}
        optimizer.zero_grad(set_to_none=True)
        model.loss(model(inputs), inputs).backward()
        nn.utils.clip_grad_norm_(unet.parameters(), options.clip_norm or float('inf'))
        optimizer.step()
        scheduler.step()
        ema.update(model, kept(batches, batch, batch + 1))
    ema.swap(model)
    scenes, samples = judged_scenes(num_images), recipe.log.samples
    images = model.generate([scene.caption for scene in scenes], RESOLUTION, samples.guidance, samples.steps, JUDGE_SEED)
    verdict = judge([Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images], scenes)
    row = {'benchmark': 'objectives', 'network': network, 'weight': variant.weight, 'decay': variant.decay, 'seed': seed}
    row |= {'batches': batches, 'batch_size': size, 'images': num_images}
    return row | {'foreground': verdict.foreground, 'background': verdict.background}


def data(demo: Path, encoders: FrozenEncoders) -> tuple[Tensor, Tensor, Tensor]:
    """Moments (N, 8, h, w), text embeddings (N, L, width), and the empty caption's (1, L, width)."""
    dataset = LocalDataset(local=str(demo / 'latents'))
    rows = [dataset[i] for i in range(len(dataset))]
    with torch.no_grad():
        captions = {caption: i for i, caption in enumerate(sorted({row['caption'] for row in rows}))}
        text = torch.cat([encoders.encode_text(encoders.tokenize(part)).text for part in parts(['', *captions], 256)])
    order = torch.tensor([captions[row['caption']] + 1 for row in rows])
    return torch.from_numpy(np.stack([row['moments'] for row in rows])), text[order], text[:1]


def parts(items: Sequence[str], size: int) -> Iterable[list[str]]:
    return (list(items[start : start + size]) for start in range(0, len(items), size))


def check_instrument(demo: Path, num_images: int) -> None:
    """Let the judge look at the scenes themselves, through the autoencoder: what it cannot see there it cannot judge in samples.

    Raises:
        SystemExit: too few are right.
    """
    encoders, scenes = FrozenEncoders.load(Encoders(str(demo / 'encoders'))), judged_scenes(num_images)
    drawn = np.stack([np.asarray(draw(scene, RESOLUTION, random.Random(number))) for number, scene in enumerate(scenes)])
    moments = encoders.encode_images(torch.from_numpy(drawn).permute(0, 3, 1, 2))
    images = encoders.decode(moments.chunk(2, dim=1)[0] * encoders.scaling_factor)
    verdict = judge([Image.fromarray(image.permute(1, 2, 0).numpy()) for image in images], scenes)
    print(f'the scenes through the autoencoder: foreground right {verdict.foreground:.1%}, background {verdict.background:.1%}', file=sys.stderr)
    if min(verdict.foreground, verdict.background) < LEGIBLE:
        raise SystemExit(f'{demo}/encoders: less than {LEGIBLE:.0%} are right; train its autoencoder longer (remove {demo} to make it again)')


def table(rows: Iterable[dict[str, Any]]) -> list[list[Any]]:
    """A line a variant: number of seeds, and mean, standard deviation and range of the share of images with the right colour."""
    lines: list[list[Any]] = []
    for variant in VARIANTS:
        found = [row for row in rows if (row['weight'], row['decay']) == (variant.weight, variant.decay)]
        if found:
            lines.append([str(variant), len(found), *(text for key in ('foreground', 'background') for text in summary([row[key] for row in found]))])
    return lines


def summary(shares: Sequence[float]) -> tuple[str, str]:
    """Mean and standard deviation, and range, in %."""
    spread = f' ± {100 * statistics.stdev(shares):.1f}' if len(shares) > 1 else ''
    return f'{100 * statistics.mean(shares):.1f}{spread}', f'{100 * min(shares):.1f} .. {100 * max(shares):.1f}'


def run(args: argparse.Namespace) -> None:
    """Measure, print a table and record its rows."""
    prepare(args.demo, RESOLUTION)
    check_instrument(args.demo, args.images)
    setting = {'network': args.network, 'batches': args.batches, 'images': args.images}
    found = read_lines(args.out) if args.out is not None and args.out.exists() else ()
    done = [row for row in found if all(row.get(key) == value for key, value in setting.items()) and row['seed'] < args.seeds]
    finished = {(row['weight'], row['decay'], row['seed']) for row in done}
    jobs = [
        (variant, seed, args.network, args.batches, args.images, args.demo.resolve())
        for seed in range(args.seeds)
        for variant in VARIANTS
        if (variant.weight, variant.decay, seed) not in finished
    ]
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['benchmarks.measuring.objectives'])
    with context.Pool(args.processes, maxtasksperchild=1) as pool:
        for row in tqdm(pool.imap_unordered(measure, jobs, chunksize=1), total=len(jobs), unit='run', file=sys.stderr):
            done.append(row)
            record(args.out, [row])
    shares = ('foreground %', 'range', 'background %', 'range')
    print_table(['', 'seeds', *shares], table(done))
