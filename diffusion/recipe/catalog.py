"""Loggers (`log.to`) and metrics (`eval.samples.metrics`) that a recipe may name, and what each needs of it.

A new logger is an entry in LOGGERS; monitoring/loggers.py builds them. Metrics repeat what diffusion/evaluation can say of itself without torch.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diffusion.common.text import did_you_mean
from diffusion.contracts.compositions import CATEGORIES
from diffusion.recipe.autoencoder import AnyRecipe
from diffusion.recipe.keys import to_dict
from diffusion.recipe.schema import Recipe

MIN_IMAGES = 16  # drawn for one score, in a run or by diffusion.evaluate; below, no distance between distributions means anything


@dataclass(frozen=True)
class LoggerSpec:
    """One of Composer's loggers."""

    composer_class: str  # its name in composer.loggers
    package: str  # what it imports
    extra: str | None  # of setup.py, which installs that; None: it comes with the rest
    has_projects: bool  # it needs `log.project`
    # Arguments of its constructor, from the recipe, its run folder, and an id that stays the same however often the run resumes.
    arguments: Callable[[AnyRecipe, Path, str], dict[str, Any]]


def _wandb(recipe: AnyRecipe, run_folder: Path, run_id: str) -> dict[str, Any]:
    # A remote's URL may hold a token, a changed file anything; environment.json has the commit.
    # quiet: no table of last values at the end, which the report has.
    settings = {'disable_git': True, 'disable_code': True, 'quiet': True}
    init = {'config': to_dict(recipe), 'dir': str(run_folder), 'resume': 'allow', 'settings': settings, 'id': run_id}
    init['group'] = os.environ.get('WANDB_RUN_GROUP', recipe.name)  # with the grids of diffusion.watch, which are a run of their own
    return {'project': recipe.log.project, 'name': recipe.name, 'init_kwargs': init}


def _tensorboard(recipe: AnyRecipe, run_folder: Path, _: str) -> dict[str, Any]:
    return {'log_dir': str(run_folder / 'tensorboard'), 'flush_interval': recipe.log.every}


def _mlflow(recipe: AnyRecipe, run_folder: Path, _: str) -> dict[str, Any]:
    tracking_uri = os.environ.get('MLFLOW_TRACKING_URI') or str(run_folder.resolve() / 'mlruns')
    return {
        'experiment_name': recipe.log.project, 'run_name': recipe.name, 'tracking_uri': tracking_uri, 'resume': True, 'log_system_metrics': False
    }  # fmt: skip


def _comet(recipe: AnyRecipe, _: Path, __: str) -> dict[str, Any]:
    return {'project_name': recipe.log.project, 'name': recipe.name, 'exp_kwargs': {'log_env_details': False, 'log_git_metadata': False}}


LOGGERS = {
    'wandb': LoggerSpec('WandBLogger', 'wandb', None, True, _wandb),
    'tensorboard': LoggerSpec('TensorboardLogger', 'tensorboard', 'tensorboard', False, _tensorboard),
    'mlflow': LoggerSpec('MLFlowLogger', 'mlflow', 'mlflow', True, _mlflow),
    'comet': LoggerSpec('CometMLLogger', 'comet_ml', 'comet', True, _comet),
}


def loggers_are_there(recipe: AnyRecipe, _: int) -> list[str]:
    errors = []
    for name in dict.fromkeys(recipe.log.to):
        if name not in LOGGERS:
            errors.append(f"log.to: no logger '{name}'{did_you_mean(name, LOGGERS)} There are {', '.join(LOGGERS)}")
        elif find_spec(LOGGERS[name].package) is None:
            what = f"-e '.[{LOGGERS[name].extra}]'" if LOGGERS[name].extra else LOGGERS[name].package
            errors.append(f'log.to: {name} needs the package {LOGGERS[name].package}: uv pip install {what}')
        elif LOGGERS[name].has_projects and recipe.log.project is None:
            errors.append(f'log.project: {name} needs one; set log.project=NAME')
    if len(set(recipe.log.to)) < len(recipe.log.to):
        errors.append(f'log.to: {", ".join(recipe.log.to)} names a logger twice')
    if recipe.log.project is not None and not any(name in LOGGERS and LOGGERS[name].has_projects for name in recipe.log.to):
        errors.append(f'log.project: {recipe.log.project} has no effect without a logger that has projects; set log.to=[wandb] or log.project=null')
    return errors


@dataclass(frozen=True)
class MetricRequirements:
    """Inputs that a metric compares."""

    network: str  # whose features it takes, unless the recipe names another one; none of EMBEDS_CAPTIONS: it takes no other
    captions: bool = False  # it compares images with their captions, and needs a network that embeds both
    real: bool = True  # it compares drawn with real images
    figures: tuple[str, ...] = ()  # that it gives, if these are several


METRICS = {
    'fid': MetricRequirements('inception'),
    'fid_clean': MetricRequirements('inception'),
    'kid': MetricRequirements('inception'),
    'kid_clean': MetricRequirements('inception'),
    'fd_dinov2': MetricRequirements('dinov2-vitl14'),
    'mmd_dinov2': MetricRequirements('dinov2-vitl14'),
    'cmmd': MetricRequirements('clip-vit-l14-336'),
    'clip': MetricRequirements('clip-vit-l14', captions=True, real=False),
    'pickscore': MetricRequirements('pickscore', captions=True, real=False),
    'hpsv2': MetricRequirements('hpsv2', captions=True, real=False),
    'precision_recall': MetricRequirements('inception', figures=('precision', 'recall')),
    'shapes': MetricRequirements(
        'shapes-look',
        captions=True,
        real=False,
        figures=('right_colour', 'right_background', 'right_shape', 'right_size', 'right_place', 'right_everything'),
    ),
    'composition': MetricRequirements(
        'compositions-look', captions=True, real=False, figures=('composition', *(f'composition_{category}' for category in CATEGORIES))
    ),
}
EMBEDS_CAPTIONS = {
    'inception': False,
    'clip-vit-l14': True,
    'clip-vit-l14-336': True,
    'clip-vit-b16': True,
    'clip-vit-b32': True,
    'openclip-vit-h14': True,
    'dino-vits16': False,
    'dinov2-vitl14': False,
    'random-conv': False,
}
"""The feature networks that METRIC@NETWORK may name: whether each embeds captions, too."""


def samples_can_be_scored(recipe: Recipe, _: int) -> list[str]:
    samples = recipe.eval.samples
    if samples.every is None:
        return []
    errors = []
    if len(set(samples.metrics)) < len(samples.metrics):
        errors.append(f'eval.samples.metrics: {", ".join(samples.metrics)} names a metric twice')
    compares_real, measured = False, list[str]()
    for name in dict.fromkeys(samples.metrics):
        metric, network = name.partition('@')[::2]
        needs = METRICS.get(metric)
        if needs is None:
            errors.append(f"eval.samples.metrics: no metric '{metric}'{did_you_mean(metric, METRICS)} There are {', '.join(METRICS)}")
            continue
        compares_real |= needs.real
        measured += [figure + name.removeprefix(metric) for figure in needs.figures or (metric,)]
        if '@' in name and network not in EMBEDS_CAPTIONS:
            known = EMBEDS_CAPTIONS
            errors.append(f"eval.samples.metrics: {name}: no feature network '{network}'{did_you_mean(network, known)} There are {', '.join(known)}")
        elif network and needs.network not in EMBEDS_CAPTIONS:
            errors.append(f'eval.samples.metrics: {name}: {metric} takes no other network; leave out @{network}')
        elif network and needs.captions and not EMBEDS_CAPTIONS[network]:
            able = ', '.join(name for name, embeds in EMBEDS_CAPTIONS.items() if embeds)
            errors.append(f'eval.samples.metrics: {name}: {network} embeds no captions; those that do: {able}')
    wanted = samples.stop.metric
    if wanted is not None and measured and wanted not in measured:
        errors.append(f"eval.samples.stop.metric: '{wanted}' is not measured{did_you_mean(wanted, measured)} There are {', '.join(measured)}")
    if recipe.eval.every is None and (compares_real or not samples.prompts):
        what = 'real images' if samples.prompts else 'captions' + (' and real images' if compares_real else '')
        errors.append(f'eval.samples.every: {samples.every} takes {what} from the evaluation data; name them in eval.streams and set eval.every')
    if samples.count < MIN_IMAGES:
        errors.append(f'eval.samples.count: {samples.count} images are too few for a score; set it to {MIN_IMAGES} or more')
    if len(samples.prompts) > samples.count:
        errors.append(
            f'eval.samples.count: {samples.count} images leave out some of {len(samples.prompts)} prompts; set it to {len(samples.prompts)}'
        )
    return errors
