"""A comparison as one picture: for each size loss curves with bands, and gaps with intervals; of several
sizes together losses by compute, and costs in tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nybble.analysis.compare import Fit, Result
from nybble.analysis.fit import Interval
from nybble.analysis.summary import RunSummary

Curve = tuple[tuple[int, float], ...]
"""(tokens, loss) of one run."""

COLOURS = ("#1f2937", "#4c78a8", "#d1495b", "#2a9d8f", "#e9a03b", "#7b5ea7", "#8c8c8c", "#5b8c5a", "#b56576")


def plot_comparison(
    runs: Sequence[RunSummary], results: Sequence[Result], baseline: str, fits: Sequence[Fit], path: Path
) -> None:
    """Draws a row for each size, and one for all of several; the picture's kind follows from `path`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    presets = list(dict.fromkeys(result.preset for result in results))
    recipes = list(dict.fromkeys(result.recipe for result in results))
    colour = {recipe: COLOURS[i % len(COLOURS)] for i, recipe in enumerate(recipes)}
    by_compute = [fit for fit in fits if fit.along == "compute"]
    rows = len(presets) + len(by_compute)
    figure = Figure(figsize=(9.0, 3.4 * rows), dpi=200, layout="constrained")
    grid = figure.subplots(rows, 2, squeeze=False, width_ratios=(1.35, 1))
    for (left, right), preset in zip(grid, presets, strict=False):
        for recipe in recipes:
            mine = [r for r in runs if (r.preset, r.recipe, r.share) == (preset, recipe, 1)]
            _draw_curves(left, [r.curve for r in mine], recipe, colour[recipe])
        _frame(left, f"{preset}: validation loss", "tokens", "loss, nats a token")
        left.xaxis.set_major_formatter(EngFormatter(sep=" "))
        if left.lines:
            left.legend(frameon=False, fontsize=8)
        others = [r for r in results if r.preset == preset and r.recipe != baseline]
        _draw_gaps(right, others, colour)
        _frame(right, f"{preset}: gap to {baseline}, 95 % over seeds", "gap at the last step, %", "")
    for fit, (left, right) in zip(by_compute, grid[len(presets) :], strict=True):
        _draw_sizes(left, runs, fit, colour)
        title = f"all sizes: loss by compute; rings and line: {baseline}"
        _frame(left, title, "floating-point operations of a run", "loss, nats a token")
        _draw_costs(right, [r for r in results if r.recipe != baseline], presets, colour)
        _frame(right, f"more tokens for the loss of {baseline}, 95 %", "more tokens, %", "")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_curves(axes: Any, curves: Sequence[Curve], recipe: str, colour: str) -> None:
    """The mean over seeds, and the range of the seeds as a band; a diverged run ends where it ended."""
    by_tokens: dict[int, list[float]] = {}
    for curve in curves:
        for tokens, loss in curve:
            by_tokens.setdefault(tokens, []).append(loss)
    if not by_tokens:
        return
    x = sorted(by_tokens)
    at = [by_tokens[tokens] for tokens in x]
    mean = [sum(losses) / len(losses) for losses in at]
    axes.plot(x, mean, color=colour, linewidth=1.4, label=recipe)
    axes.fill_between(x, [min(v) for v in at], [max(v) for v in at], color=colour, alpha=0.15, linewidth=0)


def _draw_sizes(axes: Any, runs: Sequence[RunSummary], fit: Fit, colour: dict[str, str]) -> None:
    """The mean final loss of each recipe at each size over the seeds of the baseline's law; that law, and
    rings at its points.
    """
    for recipe, shade in colour.items():
        losses: dict[float, list[float]] = {}
        for run in runs:
            counts = (run.recipe, run.share) == (recipe, 1) and run.seed in fit.seeds
            if counts and run.val_loss is not None:
                losses.setdefault(run.flops, []).append(run.val_loss)
        x = sorted(losses)
        y = [sum(losses[at]) / len(losses[at]) for at in x]
        axes.plot(x, y, color=shade, marker="o", markersize=3.5, linewidth=0, label=recipe)
    if fit.law is not None:
        low, high = min(fit.points), max(fit.points)
        x = [low * (high / low) ** (step / 60) for step in range(61)]
        axes.plot(x, [fit.law.loss(at) for at in x], color="#6b7280", linewidth=1)
    points = {"marker": "o", "markersize": 7, "linewidth": 0, "fillstyle": "none"}
    axes.plot(list(fit.points), list(fit.points.values()), color="#6b7280", **points)
    axes.set_xscale("log")
    axes.tick_params(which="minor", labelbottom=False)


def _draw_costs(axes: Any, results: Sequence[Result], presets: Sequence[str], colour: dict[str, str]) -> None:
    """The cost in tokens of each recipe, its sizes one above the other, the largest at the bottom."""
    recipes = list(dict.fromkeys(result.recipe for result in results))
    for result in results:
        if result.token_cost is None:
            continue
        shift = 0.5 * ((presets.index(result.preset) + 0.5) / len(presets) - 0.5)
        place = recipes.index(result.recipe) + shift
        _draw_interval(axes, result.token_cost, place, colour[result.recipe])
    _name_places(axes, recipes)


def _draw_gaps(axes: Any, results: Sequence[Result], colour: dict[str, str]) -> None:
    for place, result in enumerate(results):
        gap = result.gap_percent
        if gap is None:
            axes.text(0, place, "diverged" if result.diverged else "no runs", va="center", fontsize=8)
            continue
        _draw_interval(axes, gap, place, colour[result.recipe])
    _name_places(axes, [result.recipe for result in results])


def _draw_interval(axes: Any, found: Interval, place: float, colour: str) -> None:
    half = found.half if found.half < float("inf") else 0.0
    style: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.4}
    axes.errorbar(found.mean, place, xerr=half, color=colour, **style)


def _name_places(axes: Any, recipes: Sequence[str]) -> None:
    axes.axvline(0, color="#6b7280", linewidth=1)
    axes.set_yticks(range(len(recipes)), recipes, fontsize=8)
    axes.set_ylim(len(recipes) - 0.5, -0.5)


def _frame(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=9)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
