"""A comparison as text: a Markdown report and a CSV table."""

import csv
import io
from collections.abc import Sequence

from nybble.analysis.compare import Fit, Result
from nybble.analysis.fit import Interval

COLUMNS = ("loss", "gap_percent", "token_cost", "compute_cost", "accuracy")
"""Intervals of a result, in the order of the table's columns."""

EXPLANATION = (
    "Loss: validation loss at the last step, nats a token. Gap: to the baseline's run of the same seed, "
    "which had the same data in the same order and the same initial weights. More tokens, more compute: "
    "what the recipe needs for the baseline's loss, along the baseline's own curve over run lengths, over "
    "model sizes. Answers: multiple-choice questions on held-out text, chance 25 %. Intervals are 95 % over "
    "seeds (Student's t; of the costs by jackknife, so that they hold the uncertainty of the curve too)."
)
NOTHING = "\u2013"


def markdown(
    results: Sequence[Result],
    baseline: str,
    seeds: Sequence[int],
    about: Sequence[str],
    fits: Sequence[Fit] = (),
) -> str:
    """The report; `about` are lines on what ran, `fits` the laws of the baseline."""
    lines = [f"# Recipes against `{baseline}`", "", *(f"- {line}" for line in about), ""]
    for preset in dict.fromkeys(result.preset for result in results):
        lines += [f"## {preset}", "", *_table([r for r in results if r.preset == preset], baseline), ""]
    remarks = _remarks(results, seeds)
    lines += [*remarks, ""] if remarks else []
    if fits:
        lines += [f"Loss of `{baseline}`, which costs are read from:", "", *map(_law, fits), ""]
    lines += [EXPLANATION, ""]
    return "\n".join(lines)


def _table(results: Sequence[Result], baseline: str) -> list[str]:
    domains = list(dict.fromkeys(name for result in results for name in result.domains))
    head = ["recipe", "seeds", "loss", "gap, %", "more tokens, %", "more compute, %", "answers, %"]
    head += [f"gap on {name}, %" for name in domains]
    rows = [head, ["---"] * len(head)]
    for result in results:
        done = 0 if result.loss is None else result.loss.n
        cells = [f"`{result.recipe}`", str(done)]
        cells += [_cell(getattr(result, name), 4 if name == "loss" else 2, name) for name in COLUMNS]
        cells += [_cell(result.domains.get(name), 2, "gap_percent") for name in domains]
        if result.recipe == baseline:
            cells[3:6] = ["baseline", "", ""]
        elif result.loss is None and result.diverged:
            cells[2:3] = ["diverged"]
        rows.append(cells)
    return [f"| {' | '.join(row)} |" for row in rows]


def _cell(value: Interval | None, digits: int, name: str) -> str:
    if value is None:
        return NOTHING
    sign = "" if name in ("loss", "accuracy") else "+"
    half = f" ± {value.half:.{digits}f}" if value.half < float("inf") else " (one seed)"
    return f"{value.mean:{sign}.{digits}f}{half}"


def _remarks(results: Sequence[Result], seeds: Sequence[int]) -> list[str]:
    lines = []
    for result in results:
        place = f"{result.preset}, `{result.recipe}`"
        lines += [f"- {place}, seed {seed} diverged: {reason}" for seed, reason in result.diverged]
        lost = [seed for seed in result.missing if seed not in dict(result.diverged)]
        if lost:
            left = len(seeds) - len(result.missing)
            rest = f"its intervals are of {left} instead of {len(seeds)} seeds, and wider for it"
            lines.append(
                f"- {place}: no pair of runs for seed {', '.join(map(str, lost))}; "
                + (rest if left else "there is nothing to compare")
            )
    return lines


def _law(fit: Fit) -> str:
    """One line, with x in units of the largest that was run."""
    most = max(fit.points)
    count = f"{len(fit.points)} {'lengths' if fit.along == 'tokens' else 'sizes'}"
    seeds = f"{len(fit.seeds)} seed" + ("s" if len(fit.seeds) > 1 else "")
    place = f"{fit.preset}, " if fit.preset else ""
    if fit.law is None:
        return f"- {place}by {fit.along}, {count}, {seeds}: it does not fall"
    above = fit.law.loss(most) - fit.law.floor
    unit = f"{most:,.0f}" if fit.along == "tokens" else f"{most:.3g}"
    floor = f"{fit.law.floor:.4f} + " if fit.law.floor else ""
    return (
        f"- {place}by {fit.along}, {count}, {seeds}: "
        f"{floor}{above:.4f} * ({fit.along} / {unit})^-{fit.law.exponent:.3f}"
    )


def table_csv(results: Sequence[Result]) -> str:
    """One row a result: means and bounds of every interval, empty where there is none."""
    domains = list(dict.fromkeys(name for result in results for name in result.domains))
    names = [*COLUMNS, *(f"gap_percent/{name}" for name in domains)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    head = [column for name in names for column in (name, f"{name}_low", f"{name}_high")]
    writer.writerow(["preset", "recipe", "seeds", "missing", "diverged", *head])
    for result in results:
        row: list[str | int] = [result.preset, result.recipe, 0 if result.loss is None else result.loss.n]
        row += [" ".join(map(str, result.missing)), " ".join(str(seed) for seed, _ in result.diverged)]
        values = [getattr(result, name) for name in COLUMNS] + [result.domains.get(name) for name in domains]
        for value in values:
            bounded = value is not None and value.half < float("inf")
            row += ["" if value is None else f"{value.mean:.6g}"]
            row += [f"{value.low:.6g}", f"{value.high:.6g}"] if bounded else ["", ""]
        writer.writerow(row)
    return out.getvalue()
