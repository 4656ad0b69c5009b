"""The evaluations of a run's checkpoints, which `diffusion.evaluate` wrote into its folder `evaluations/`."""

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from diffusion.evaluation.job.results import RESULT_NAME
from diffusion.evaluation.pages.comparing import Group, format_point, groups, read_models
from diffusion.evaluation.pages.figures import over_batches

EVALUATIONS = 'evaluations'


@dataclass(frozen=True)
class Evaluated:
    """Checkpoints that one protocol scored.

    Attributes:
        protocol: its digest, and what it is in short.
        head: of the table.
        rows: by batches and guidance.
        figures: each metric over the batches.
    """

    protocol: str
    head: list[str]
    rows: list[list[str]]
    figures: list[tuple[Markup, str]]


def evaluated(run: Path) -> list[Evaluated]:
    """Read RUN/evaluations/*/evaluation.json; one entry a protocol, none without evaluations.

    Raises:
        InputError: a result is damaged.
    """
    folders = sorted(path.parent for path in (run / EVALUATIONS).glob(f'*/{RESULT_NAME}'))
    return [_evaluated(group) for group in groups(read_models(folders))] if folders else []


def _evaluated(group: Group) -> Evaluated:
    rows = []
    for model in sorted(group.models, key=lambda model: model.result['model']['batches'] or 0):
        batches = model.result['model']['batches']
        for score in sorted(model.result['scores'], key=lambda score: score['guidance']):
            points = (model.curves.get(measure, {}).get(score['guidance']) for measure in group.measures)
            numbers = [format_point(point) if point is not None else '' for point in points]
            rows.append([model.folder.name, 'not known' if batches is None else f'{batches:,}', f'{score["guidance"]:g}', *numbers])
    protocol = group.protocol
    about = f'{protocol["samples"]:,} images of {protocol["resolution"]} px in {protocol["steps"]} steps, protocol {group.models[0].result["digest"]}'
    head = ['evaluation', 'batch', 'guidance', *(f'{measure.title} {measure.arrow}' for measure in group.measures)]
    return Evaluated(about, head, rows, over_batches(group))
