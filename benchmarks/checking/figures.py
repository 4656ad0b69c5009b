"""The figures of a GPU check's page."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from diffusion.common.pages.figures import new_figure, page_style
from diffusion.common.pages.palette import LIGHT

WIDTH, BAR_HEIGHT, MARGIN = 8.4, 0.27, 0.7  # inches


def rates_figure(rates: Mapping[str, float]) -> Figure:
    """Images per second, a bar each."""
    with page_style():
        figure = new_figure(WIDTH, MARGIN + BAR_HEIGHT * len(rates))
        axes = figure.add_subplot()
        bars = axes.barh(list(rates), list(rates.values()), height=0.7, color=LIGHT['series1'])
        axes.bar_label(bars, fmt='{:,.3g}', padding=3, color=LIGHT['ink'])
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set_xlabel('images/s')
    return figure


def classes_figure(classes_ms: Mapping[str, float], roof_ms: Mapping[str, float]) -> Figure:
    """Milliseconds by class of kernels; a mark where the ceilings are."""
    names = [*classes_ms, *(name for name in roof_ms if name not in classes_ms)]
    with page_style():
        figure = new_figure(WIDTH, MARGIN + 0.3 + BAR_HEIGHT * len(names))
        axes = figure.add_subplot()
        axes.barh(names, [classes_ms.get(name, 0.0) for name in names], height=0.7, color=LIGHT['series1'], label='measured')
        if roof_ms:
            places = [place for place, name in enumerate(names) if name in roof_ms]
            axes.plot([roof_ms[names[place]] for place in places], places, '|', color=LIGHT['series2'], ms=12, mew=2.5, label='at the ceilings')
            axes.legend(loc='lower right')
        axes.invert_yaxis()
        axes.set_xlabel('ms a step')
    return figure
