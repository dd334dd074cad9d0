"""Pictures of reports, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from catenary_lab.scenarios.report import Bars, Figure, Lines
from catenary_services.errors import Unavailable

_COLOURS = ("#1f5fa8", "#7fb2e5", "#d9822b", "#8a8a8a", "#3a8f5c", "#a83250", "#c9b458", "#5e4b8b")
_PANEL_INCHES = (4.6, 3.2)


def draw(figure: Figure, folder: Path) -> Path:
    """Draws a figure and returns its file.

    Raises:
        Unavailable: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise Unavailable(f"plots need matplotlib: {error}") from error
    width, height = _PANEL_INCHES
    columns = min(len(figure.panels), 2)
    rows = -(-len(figure.panels) // columns)
    canvas, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False
    )
    flat = [each for row in axes for each in row]
    for panel, axis in zip(figure.panels, flat, strict=False):
        _bars(axis, panel) if isinstance(panel, Bars) else _lines(axis, panel)
        axis.set_title(panel.title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(axis="y", linewidth=0.4, alpha=0.6)
        axis.set_axisbelow(True)
    for axis in flat[len(figure.panels) :]:
        axis.set_visible(False)
    for panel, axis in zip(figure.panels, flat, strict=False):
        # One legend is enough for panels with the same curves.
        if panel is figure.panels[0] or list(panel.series) != list(figure.panels[0].series):
            axis.legend(fontsize=7)
    canvas.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{figure.name}.png"
    # Without the version in it, the same numbers make the same file.
    canvas.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(canvas)
    return path


def _bars(axis: Any, panel: Bars) -> None:
    width = 0.8 / max(1, len(panel.series))
    for number, (label, values) in enumerate(panel.series.items()):
        offset = (number - (len(panel.series) - 1) / 2) * width
        places = [index + offset for index, value in enumerate(values) if value is not None]
        heights = [value for value in values if value is not None]
        axis.bar(places, heights, width, label=label, color=_COLOURS[number % len(_COLOURS)])
    if panel.log_y:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
    axis.set_xticks(range(len(panel.groups)), panel.groups, fontsize=7)
    axis.set_ylabel(panel.y_label, fontsize=8)


def _lines(axis: Any, panel: Lines) -> None:
    for number, (label, points) in enumerate(panel.series.items()):
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=label,
            marker="o",
            markersize=3,
            linewidth=1.4,
            color=_COLOURS[number % len(_COLOURS)],
        )
    if panel.log_x:
        axis.set_xscale("log")
    if panel.log_y:
        axis.set_yscale("log")
    axis.set_xlabel(panel.x_label, fontsize=8)
    axis.set_ylabel(panel.y_label, fontsize=8)
