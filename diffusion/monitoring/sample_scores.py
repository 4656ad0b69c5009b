"""Scores of drawn images during training: KID, CMMD, CLIP score of a few hundred fixed prompts from fixed noise."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from composer.core import State, get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffusion.common.collective import on_first_rank, unwrap_model
from diffusion.common.files import replacing
from diffusion.common.stopwatch import phase
from diffusion.common.text import counted
from diffusion.contracts.batch import Sample
from diffusion.contracts.errors import EncoderError
from diffusion.datasets.loader import stacked
from diffusion.encoders.frozen import FrozenEncoders
from diffusion.evaluation.features.networks import FeatureNetwork, load_extractors
from diffusion.evaluation.job.images import Prompt
from diffusion.evaluation.job.models import chunks_of
from diffusion.evaluation.job.results import DEFAULT_CHUNK, with_error
from diffusion.evaluation.metrics.figures import METRICS, RESAMPLES, Values, find_metric, name_of
from diffusion.monitoring.sample_grid import AtIntervals
from diffusion.recipe import Recipe, RecipeError
from diffusion.recipe.catalog import MIN_IMAGES
from diffusion.recipe.schema import EvalSamples

Averaged = Callable[[State], AbstractContextManager[str]]
PREFIX = 'metrics/eval/'
FOLDER = 'evaluation'  # in the run folder
TOGETHER = 16  # real images that go through a feature network at once


class EvaluationDataset(Protocol):
    """The evaluation data (datasets/mds.py, datasets/synthetic.py)."""

    num_samples: int

    def view(self, sample_id: int, occurrence: int) -> Sample: ...


class HeldOut:
    """`count` evenly spaced samples of the evaluation data. Only the first rank reads them.

    Args:
        dataset: of the evaluation loader.
        encoders: their VAE goes there and back with all real images. What it loses is then in real and drawn images alike, and in no score; and runs
            on images are compared with the same as runs on their latents.
        folder: features of real images are kept here.
    """

    def __init__(self, dataset: EvaluationDataset, count: int, encoders: FrozenEncoders, folder: Path):
        self.dataset, self.encoders, self.folder = dataset, encoders, folder
        self.ids = [i * dataset.num_samples // count for i in range(count)]

    def captions(self) -> list[str]:
        """The first caption of each sample, as the evaluation loss takes it."""
        return [self.dataset.view(i, 0)['captions'][0][0] for i in self.ids]

    def images(self) -> Iterator[Tensor]:
        """(B, 3, H, W) uint8, on the device of the encoders."""
        for start in range(0, len(self.ids), TOGETHER):
            samples = [self.dataset.view(i, 0) for i in self.ids[start : start + TOGETHER]]
            if 'images' in samples[0]:
                images = torch.stack([sample['images'] for sample in samples]).to(self.encoders.vae.device)
                moments = self.encoders.vae.encode(images).half()  # as data_prep.encode stores them
            else:
                moments = stacked([sample['moments'] for sample in samples]).to(self.encoders.vae.device)
            yield self.encoders.vae.decode_middle(moments)

    def features(self, extractor: FeatureNetwork) -> dict[str, Tensor]:
        """Features (N, D) float32 of the real images on the CPU, by name; computed once for a run."""
        path = self.folder / f'real-{extractor.name}-{self._digest(extractor)}.safetensors'
        if path.exists():
            return load_file(path)
        parts = [extractor.images(images) for images in self.images()]
        features = {name: torch.cat([part[name] for part in parts]).float().cpu().clone() for name in extractor.features}
        with replacing(path) as temporary:
            save_file(features, temporary)
        return features

    def _digest(self, extractor: FeatureNetwork) -> str:
        """Digest of all that the features depend on. Synthetic data, which have no identity, are a function of their number."""
        sample = self.dataset.view(self.ids[0], 0)
        shape = *sample['images' if 'images' in sample else 'moments'].shape, self.encoders.vae.sha256
        identities: Any = getattr(self.dataset, 'identities', None)
        return hashlib.sha256(json.dumps([extractor.sha256, identities, self.ids, shape]).encode()).hexdigest()[:16]


class SampleScores(AtIntervals):
    """Draw and score, with EMA weights once there are any.

    Every rank draws its chunks of prompts, sharded or not. An image depends on the weights, its prompt, its id and the chunk that it is in, not on
    the rank that draws it, so the number of GPUs changes no score. In the steps in between nothing runs on the device and no rank waits.

    Args:
        samples: the recipe's `eval.samples` section.
        resolution: side of the images in pixels.
        prompts: `samples.count` prompts with the ids that key their noise.
        held_out: real images; None if no metric compares with them.
        extractors: networks of the metrics, on this rank's device.
        averaged: context in which the model holds the EMA if there is one.
        alive: called after each chunk, so that the watchdog takes it for progress.
    """

    def __init__(
        self,
        samples: EvalSamples,
        resolution: int,
        prompts: Sequence[Prompt],
        held_out: HeldOut | None,
        extractors: Sequence[FeatureNetwork],
        averaged: Averaged,
        alive: Callable[[], None],
    ):
        assert samples.every is not None
        super().__init__(samples.every)
        self.samples, self.resolution, self.prompts, self.held_out, self.extractors = samples, resolution, prompts, held_out, extractors
        self.averaged, self.alive = averaged, alive
        self.chunks = chunks_of(prompts, DEFAULT_CHUNK)
        self.metrics = {name: find_metric(name) for name in samples.metrics}
        self.best: dict[str, Any] = {}  # of `samples.stop.metric`: its name, its best value, after which batch, and how many scores ago

    def draw(self, state: State, logger: Logger) -> None:
        """Draw all images, log what the metrics say of them, and end the run if the recipe's score no longer improves; all ranks take part."""
        batch, stop = state.timestamp.batch.value, self.samples.stop.metric
        with phase('evaluation'):
            drawn = self._drawn_features(state)
            figures = on_first_rank(partial(self._figures, drawn))
        logged = {
            PREFIX + name.replace('@', '/') + ('' if which == 'value' else f'_{which}'): values[which]  # MLflow takes no `@`
            for name, (values, _) in figures.items()
            for which in ('value', 'error', 'unbiased')
            if which in values
        }
        if dist.get_global_rank() == 0:
            logger.log_metrics(logged, step=batch)
            texts = (f'{name} {with_error(values["value"], values.get("error"))}' for name, (values, _) in figures.items())
            print(f'scores after batch {batch:,}: {", ".join(texts)}', file=sys.stderr, flush=True)
        if stop is not None:
            value, lower_is_better = figures[stop][0]['value'], figures[stop][1]
            if self.best.get('metric') != stop or (value < self.best['value'] if lower_is_better else value > self.best['value']):
                self.best = {'metric': stop, 'value': value, 'batch': batch, 'since': 0}
            else:
                self.best['since'] += 1
            self._end_if_stuck(state)

    def _end_if_stuck(self, state: State) -> None:
        if self.stopped:
            state.stop_training()
            if dist.get_global_rank() == 0:
                print(f'early stop after batch {state.timestamp.batch.value:,}: {self.stopped}', file=sys.stderr, flush=True)

    @property
    def stopped(self) -> str:
        """Why the run ends before its duration; '' if it does not."""
        best, stop = self.best, self.samples.stop
        if stop.metric is None or best.get('metric') != stop.metric or best['since'] < stop.patience:
            return ''
        since = f'in {counted(best["since"], "score")}, eval.samples.stop.patience={stop.patience}'
        return f'{stop.metric} has not improved on {best["value"]:.4g}, of batch {best["batch"]:,}, {since}'

    def after_load(self, state: State, logger: Logger) -> None:
        """End again what has ended early, unless the recipe is more patient by now."""
        self._end_if_stuck(state)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.best)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = dict(state)

    def _drawn_features(self, state: State) -> dict[str, dict[str, Tensor]]:
        """(N, D) float32 features of the drawn images on the CPU, by network and name, in the order of the prompts."""
        model = unwrap_model(state)
        was_training = model.training
        model.eval()
        rank, ranks = dist.get_global_rank(), dist.get_world_size()
        parts: dict[str, dict[str, list[Tensor]]] = {one.name: {name: [] for name in one.features} for one in self.extractors}
        with self.averaged(state):
            for first in range(0, len(self.chunks), ranks):
                # A rank that is left over draws the last chunk again: where the model is sharded, each forward pass needs all ranks.
                chunk = self.chunks[min(first + rank, len(self.chunks) - 1)]
                texts, ids = [prompt.text for prompt in chunk], [prompt.id for prompt in chunk]
                with get_precision_context(state.precision):  # (B, 3, H, W) uint8 on the device
                    images = model.generate(texts, self.resolution, self.samples.guidance, self.samples.steps, self.samples.seed, ids)
                for extractor in self.extractors:
                    for name, features in extractor.images(images).items():
                        parts[extractor.name][name].append(features)
                self.alive()
        model.train(was_training)
        return {network: {name: self._gathered(rounds) for name, rounds in features.items()} for network, features in parts.items()}

    def _gathered(self, rounds: Sequence[Tensor]) -> Tensor:
        """(N, D) from this rank's (B, D) of each round, in which the ranks had chunks that follow one another."""
        own = torch.stack([part.float() for part in rounds]).contiguous()  # (rounds, B, D)
        everyone = torch.stack(list(dist.all_gather(own)), dim=1)  # (rounds, ranks, B, D)
        return everyone.flatten(0, 2)[: len(self.prompts)].cpu()

    def _figures(self, drawn: Mapping[str, Mapping[str, Tensor]]) -> dict[str, tuple[Values, bool]]:
        """Scores by name, and whether lower ones are better. A Frechet distance has no error: its resamples would take minutes."""
        figures = dict[str, tuple[Values, bool]]()
        for name, metric in self.metrics.items():
            real = self._real[metric.extractor][metric.feature] if metric.needs_real else None
            texts = self._texts[metric.extractor] if metric.needs_captions else None
            resamples = 0 if metric.score is METRICS['fid'].score else RESAMPLES
            for figure, values in metric(real, drawn[metric.extractor][metric.feature], texts, self.samples.seed, resamples).items():
                figures[name_of(name, metric, figure)] = values, metric.figures[figure].lower_is_better
        return figures

    @cached_property
    def _real(self) -> dict[str, dict[str, Tensor]]:
        """Features of real images by network and name, on the first rank; the other ranks wait for that where they meet it next."""
        needed = {metric.extractor for metric in self.metrics.values() if metric.needs_real}
        return {one.name: self.held_out.features(one) for one in self.extractors if self.held_out is not None and one.name in needed}

    @cached_property
    def _texts(self) -> dict[str, Tensor]:
        """Embeddings of the captions by network, on the first rank."""
        captions = [prompt.text for prompt in self.prompts]
        needed = {metric.extractor for metric in self.metrics.values() if metric.needs_captions}
        return {one.name: one.texts(captions).cpu() for one in self.extractors if one.name in needed}


def build_sample_scores(
    recipe: Recipe, model: Any, dataset: EvaluationDataset | None, run_folder: Path, averaged: Averaged, alive: Callable[[], None]
) -> SampleScores:
    """The callback of a recipe that has `eval.samples.every`. All ranks must call it.

    Args:
        model: the TextToImage.
        dataset: of the evaluation loader; None: the recipe has none.

    Raises:
        RecipeError: there are fewer evaluation samples than images to draw.
        DataError: a metric is not for these captions.
        EncoderError: weights of a feature network are missing.
    """
    samples = recipe.eval.samples
    metrics = [find_metric(name) for name in samples.metrics]
    names = list(dict.fromkeys(metric.extractor for metric in metrics))
    weights = None if samples.weights is None else Path(samples.weights)
    try:
        extractors = load_extractors(names, weights, model.device)
    except EncoderError as error:
        raise EncoderError(f'eval.samples.weights: {error}') from error
    if dataset is not None and dataset.num_samples < samples.count and not samples.prompts:
        held = counted(dataset.num_samples, 'sample')
        remedy = f'set it to {dataset.num_samples}, or ' if dataset.num_samples >= MIN_IMAGES else ''
        wanted = f'eval.samples.count: {samples.count} images are to be drawn, and the evaluation data hold {held}; {remedy}name eval.samples.prompts'
        raise RecipeError(recipe.name, [wanted])
    held_out = None
    if dataset is not None:
        held_out = HeldOut(dataset, min(samples.count, dataset.num_samples), model.encoders, run_folder / FOLDER)
    if samples.prompts:
        prompts = [Prompt(i, text) for i, text in enumerate(repeated(samples.prompts, samples.count))]
    else:
        assert held_out is not None  # rules.py
        prompts = [Prompt(*pair) for pair in zip(held_out.ids, on_first_rank(held_out.captions), strict=True)]
    for metric in metrics:
        if metric.check_captions is not None:
            metric.check_captions([prompt.text for prompt in prompts])
    return SampleScores(samples, recipe.data.resolution, prompts, held_out, extractors, averaged, alive)


def repeated(prompts: Sequence[str], count: int) -> list[str]:
    """`count` prompts, which are each there as often as the others or once more."""
    return [prompts[i % len(prompts)] for i in range(count)]
