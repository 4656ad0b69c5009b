"""Scores of drawn images during training: KID, CMMD, CLIP score of a few hundred fixed prompts from fixed noise."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composer.core import Callback, State, get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from diffusion.common.collective import on_first_rank
from diffusion.common.stopwatch import phase
from diffusion.common.text import counted
from diffusion.contracts.errors import EncoderError
from diffusion.evaluation.features.extractors import Extractor, TextExtractor, load_extractors
from diffusion.evaluation.job.images import Prompt
from diffusion.evaluation.job.models import chunks_of
from diffusion.evaluation.job.results import DEFAULT_CHUNK
from diffusion.evaluation.metrics.figures import find_metric, name_of
from diffusion.faults import preemption
from diffusion.monitoring.held_out import EvaluationDataset, HeldOut, repeated
from diffusion.recipe import Recipe, RecipeError
from diffusion.recipe.catalog import MIN_IMAGES
from diffusion.recipe.schema import EvalSamples

Averaged = Callable[[State], AbstractContextManager[str]]
PREFIX = 'metrics/eval/'
FOLDER = 'evaluation'  # in the run folder


class HeldOutFeatures(NamedTuple):
    """What drawn images are compared with, on the first rank: features by network and name, and embeddings of captions by network."""

    real: dict[str, dict[str, Tensor]]
    texts: dict[str, Tensor]


class SampleScores(Callback):
    """Draw and score before the first step, at intervals and at the end, with EMA weights once there are any.

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
        extractors: Sequence[Extractor],
        averaged: Averaged,
        alive: Callable[[], None],
    ):
        assert samples.every is not None
        self.samples, self.resolution, self.prompts, self.held_out, self.extractors = samples, resolution, prompts, held_out, extractors
        self.averaged, self.alive = averaged, alive
        self.every_batches = samples.every.batches
        self.chunks = chunks_of(prompts, DEFAULT_CHUNK)
        self.metrics = {name: find_metric(name) for name in samples.metrics}
        self._known: HeldOutFeatures | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 0:
            self.score(state, logger)

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.every_batches == 0 and not preemption.agreed():
            self.score(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % self.every_batches != 0:
            self.score(state, logger)

    def score(self, state: State, logger: Logger) -> None:
        """Draw all images and log what the metrics say of them; all ranks take part."""
        with phase('evaluation'):
            drawn = self._drawn_features(state)
            if dist.get_global_rank() == 0:
                logger.log_metrics(self._figures(drawn), step=state.timestamp.batch.value)

    def _drawn_features(self, state: State) -> dict[str, dict[str, Tensor]]:
        """(N, D) float32 features of the drawn images on the CPU, by network and name, in the order of the prompts."""
        model: Any = getattr(state.model, 'module', state.model)
        was_training = model.training
        model.eval()
        rank, ranks = dist.get_global_rank(), dist.get_world_size()
        parts: dict[str, dict[str, list[Tensor]]] = {one.name: {name: [] for name in one.features} for one in self.extractors}
        with self.averaged(state):
            for first in range(0, len(self.chunks), ranks):
                # A rank that is left over draws the last chunk again: where the model is sharded, each forward pass needs all ranks.
                chunk = self.chunks[min(first + rank, len(self.chunks) - 1)]
                with get_precision_context(state.precision):
                    images = self._images(model, chunk)
                for extractor in self.extractors:
                    for name, features in extractor.images(images).items():
                        parts[extractor.name][name].append(features)
                self.alive()
        model.train(was_training)
        return {network: {name: self._gathered(rounds) for name, rounds in features.items()} for network, features in parts.items()}

    def _images(self, model: Any, chunk: Sequence[Prompt]) -> Tensor:
        """(B, 3, H, W) uint8 on the device."""
        texts, ids = [prompt.text for prompt in chunk], [prompt.id for prompt in chunk]
        return model.generate(texts, self.resolution, self.samples.guidance, self.samples.steps, self.samples.seed, ids)

    def _gathered(self, rounds: Sequence[Tensor]) -> Tensor:
        """(N, D) from this rank's (B, D) of each round, in which the ranks had chunks that follow one another."""
        own = torch.stack([part.float() for part in rounds]).contiguous()  # (rounds, B, D)
        everyone = torch.stack(list(dist.all_gather(own)), dim=1)  # (rounds, ranks, B, D)
        return everyone.flatten(0, 2)[: len(self.prompts)].cpu()

    def _figures(self, drawn: Mapping[str, Mapping[str, Tensor]]) -> dict[str, float]:
        """By name in the log."""
        known = self._compared_with()
        figures = dict[str, float]()
        for name, metric in self.metrics.items():
            real = known.real[metric.extractor][metric.feature] if metric.needs_real else None
            texts = known.texts[metric.extractor] if metric.needs_captions else None
            for figure, values in metric(real, drawn[metric.extractor][metric.feature], texts, self.samples.seed, resamples=0).items():
                logged = PREFIX + name_of(name, metric, figure).replace('@', '/')  # which MLflow does not take
                figures |= {logged + (f'_{which}' if which != 'value' else ''): values[which] for which in ('value', 'unbiased') if which in values}
        return figures

    def _compared_with(self) -> HeldOutFeatures:
        """Read once; the other ranks wait for that where they meet the first one next."""
        if self._known is None:
            captions = [prompt.text for prompt in self.prompts]
            with_texts = {metric.extractor for metric in self.metrics.values() if metric.needs_captions}
            with_real = {metric.extractor for metric in self.metrics.values() if metric.needs_real}
            self._known = HeldOutFeatures(
                {one.name: self.held_out.features(one) for one in self.extractors if self.held_out is not None and one.name in with_real},
                {one.name: one.texts(captions).cpu() for one in self.extractors if one.name in with_texts and isinstance(one, TextExtractor)},
            )
        return self._known


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
