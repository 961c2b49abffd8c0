"""Plots of runs, drawn from `metrics.jsonl` alone, so that they can be drawn again at any time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

TRAIN, VAL, REFERENCE = "#4c78a8", "#d1495b", "#6b7280"


def plot_loss(
    rows: Sequence[dict[str, Any]],
    path: Path,
    title: str = "",
    unigram_entropy: float | None = None,
) -> None:
    """Draws training and validation loss in nats a token over the steps, and the unigram entropy as a line.

    `rows` are those of `metrics.jsonl`; the picture's kind follows from the suffix of `path`.
    """
    # The object interface, not pyplot: no window system, no global figure, nothing to close.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    steps = [row["step"] for row in rows]
    losses = [row["loss"] for row in rows]
    axes.plot(steps, losses, color=TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(losses), color=TRAIN, linewidth=1.6, label="training (smoothed)")
    held_out = [(row["step"], row["val_loss"]) for row in rows if "val_loss" in row]
    if held_out:
        xs, ys = zip(*held_out, strict=True)
        axes.plot(xs, ys, color=VAL, linewidth=1.6, marker="o", markersize=3.5, label="validation")
        axes.annotate(
            f"{ys[-1]:.3f}",
            (xs[-1], ys[-1]),
            textcoords="offset points",
            xytext=(-4, 8),
            ha="right",
            color=VAL,
        )
    if unigram_entropy is not None:
        axes.axhline(unigram_entropy, color=REFERENCE, linestyle="--", linewidth=1.2, label="unigram entropy")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("loss, nats a token")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
    if rows:
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def smooth(values: Sequence[float], decay: float = 0.9) -> list[float]:
    """Exponential moving average without the bias of its start."""
    out: list[float] = []
    average, weight = 0.0, 0.0
    for value in values:
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        out.append(average / weight)
    return out
