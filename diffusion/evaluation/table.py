"""An evaluation as text for the terminal."""

from diffusion.common.text import counted, markdown_table
from diffusion.evaluation.results import CEILING_TITLE, FLOOR_TITLE, OF_STATISTICS, Evaluation, Value, with_error


def table_of(found: Evaluation) -> str:
    """A line for each guidance scale, the protocol, and the share of suspicious images."""
    protocol = found['protocol']
    metrics = list(found['scores'][0]['metrics'].items())
    header = ['guidance', *(f'{name} {"↓" if value["lower_is_better"] else "↑"}' for name, value in metrics)]
    rows = list[list[str]]()
    for score in found['scores']:
        values = [score['metrics'][name] for name, _ in metrics]
        rows.append([f'{score["guidance"]:g}', *map(_cell, values)])
        if any('floor' in value for value in values):
            rows.append([f'{score["guidance"]:g}, {FLOOR_TITLE}', *(_reference(value.get('floor')) for value in values)])
    if any('ceiling' in value for _, value in metrics):
        rows.append([CEILING_TITLE, *(_reference(value.get('ceiling')) for _, value in metrics)])
    lines = [
        f'{found["model"]["label"]}: {counted(found["scores"][0]["count"], "image")} at each scale, {counted(protocol["steps"], "step")} of '
        f'{protocol["sampler"]}, {protocol["resolution"]} px, seed {protocol["seed"]}',
        f'against {counted(found["real"]["count"], "real image")} of {found["real"]["where"]}',
        *([f'not among them: {found["real"]["left_out"]}'] if found['real'].get('left_out') else []),
        '',
        markdown_table(header, rows),
        '',
        f'± is one standard deviation; features: {", ".join(protocol["extractors"])}; protocol {found["digest"]}',
        *([OF_STATISTICS] if protocol['real'].get('kind') == 'statistics' else []),
        *_of_neighbours(found),
        f'{found["seconds"]:,.0f} s of drawing, {found["images_per_sec"]:.2f} images/s a process',
    ]
    return '\n'.join(lines)


def _cell(value: Value) -> str:
    return with_error(value['value'], value.get('error'))


def _reference(value: float | None) -> str:
    return '' if value is None else with_error(value, None)


def _of_neighbours(found: Evaluation) -> list[str]:
    neighbours = found['neighbours']
    if neighbours is None or not neighbours['pairs']:
        return []
    line = f'most similar known image: cosine {neighbours["pairs"][0]["cosine"]:.3f} ({neighbours["extractor"]}) of {neighbours["count_known"]:,}'
    if neighbours['threshold'] is not None and neighbours['share_above'] is not None:
        line += f'; {100 * neighbours["share_above"]:.2f} % above {neighbours["threshold"]:.3f}, which 0.1 % of held-out images exceed'
    else:
        line += f'; no threshold: {neighbours["no_threshold"]}'
    return [line]
