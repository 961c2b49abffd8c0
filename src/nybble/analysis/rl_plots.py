"""Plots of reinforcement learning, drawn from `metrics.jsonl` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nybble.analysis.plots import REFERENCE, TRAIN, VAL, smooth

COLOURS = (TRAIN, VAL, "#5b8c5a", "#8e6c8a", "#c9a227", REFERENCE)
Rows = Sequence[Mapping[str, Any]]


def plot_rl(rows: Rows, path: Path, title: str = "") -> None:
    """Four panels over the steps of a run: reward, mismatch of sampler and trainer, entropy, length."""
    figure, axes = _figure(2, 2)
    reward, mismatch, entropy, length = axes
    _curve(reward, rows, "reward", TRAIN, "sampled, temperature of training")
    held_out = [(0, row["eval_reward_before"]) for row in rows if "eval_reward_before" in row]
    held_out += [(row["step"], row["eval_reward"]) for row in rows if "eval_reward" in row]
    if held_out:
        xs, ys = zip(*held_out, strict=True)
        reward.plot(xs, ys, color=VAL, marker="o", markersize=3.5, label="held out, greedy")
        reward.annotate(
            f"{ys[-1]:.3f}", (xs[-1], ys[-1]), textcoords="offset points", xytext=(-4, -14), ha="right"
        )
    reward.set(title="reward", ylim=(-0.02, 1.02))
    reward.legend(frameon=False, fontsize=8)
    for key, colour, label in (
        ("mismatch_k3", TRAIN, "k3, nats"),
        ("mismatch_experts", VAL, "share of tokens with other experts"),
        ("mismatch_ratio_mean", REFERENCE, "mean exp|d ln p| - 1"),
    ):
        values = [(row["step"], row[key] - (key == "mismatch_ratio_mean")) for row in rows if key in row]
        if values:
            mismatch.plot(*zip(*values, strict=True), color=colour, label=label)
    if mismatch.lines:
        mismatch.set_yscale("symlog", linthresh=1e-8)
        mismatch.set_ylim(bottom=0)
        mismatch.legend(frameon=False, fontsize=8)
    mismatch.set(title="mismatch of sampler and trainer")
    _curve(entropy, rows, "entropy", TRAIN, "")
    entropy.set(title="entropy, nats a token", ylim=(0, None))
    _curve(length, rows, "length", TRAIN, "")
    length.set(title="new tokens a completion", ylim=(0, None))
    _save(figure, path, title)


def plot_runs(runs: Mapping[str, Sequence[Rows]], path: Path, title: str = "") -> None:
    """Reward and k3 of several runs a label (their seeds), thin, with the mean of each label, thick."""
    figure, (reward, mismatch) = _figure(1, 2)
    for (label, seeds), colour in zip(runs.items(), COLOURS, strict=False):
        for axes, key in ((reward, "reward"), (mismatch, "mismatch_k3")):
            curves = [[row.get(key, 0.0) for row in rows] for rows in seeds]
            steps = [row["step"] for row in seeds[0]]
            for curve in curves:
                axes.plot(steps, smooth(curve, 0.7), color=colour, alpha=0.3, linewidth=0.8)
            mean = [sum(values) / len(values) for values in zip(*curves, strict=True)]
            axes.plot(steps, smooth(mean, 0.7), color=colour, linewidth=1.8, label=label)
    reward.set(title=f"reward, smoothed; {len(next(iter(runs.values())))} seeds", ylim=(-0.02, 1.02))
    reward.legend(frameon=False, fontsize=8)
    mismatch.set(title="k3 of sampler and trainer, nats")
    mismatch.set_yscale("symlog", linthresh=1e-8)
    mismatch.set_ylim(bottom=0)
    _save(figure, path, title)


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * columns, 3.2 * rows), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns).flatten()
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.2)
        each.set_xlabel("step")
        each.title.set_fontsize(10)
    return figure, axes


def _curve(axes: Any, rows: Rows, key: str, colour: str, label: str) -> None:
    found = [(row["step"], row[key]) for row in rows if key in row]
    if found:
        xs, ys = zip(*found, strict=True)
        axes.plot(xs, ys, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(xs, smooth(ys, 0.7), color=colour, linewidth=1.6, label=label)


def _save(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
