"""What recipes cost against a baseline: gaps between runs of the same seed, in loss, tokens and compute."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nybble.analysis.fit import Interval, PowerLaw, equivalent_cost, fit_power_law, interval, jackknife
from nybble.analysis.summary import RunSummary

Points = dict[int, dict[float, float]]
"""Final loss by tokens or compute, by seed."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One recipe at one size; every gap is paired by seed with the baseline."""

    preset: str
    recipe: str
    loss: Interval | None
    """Validation loss at the end, nats a token."""
    gap_percent: Interval | None
    """(loss - baseline) / baseline, in per cent."""
    token_cost: Interval | None
    """More tokens in per cent for the baseline's loss; None without the baseline's curve over lengths."""
    compute_cost: Interval | None
    """The same in compute, along the baseline's sizes; None with one size."""
    accuracy: Interval | None
    """Multiple-choice accuracy, in per cent."""
    domains: dict[str, Interval]
    """Loss gap in per cent by domain of the data, where it has several."""
    missing: tuple[int, ...]
    """Seeds without a result of both this recipe and the baseline."""
    diverged: tuple[tuple[int, str], ...]
    """(seed, where and when)."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The baseline's loss along its run lengths at one size, or along its sizes."""

    along: str
    """"tokens" or "compute"."""
    preset: str
    """The size; "" for all of them."""
    points: dict[float, float]
    """Mean final loss over the seeds by tokens or floating-point operations of a run."""
    seeds: tuple[int, ...]
    law: PowerLaw | None
    """None where the loss does not fall."""


Rungs = Mapping[str, float]
"""At which length each size is compared in compute, as a share; 1 where a size is not named."""
EQUAL: Rungs = {}
"""All sizes at the length of the recipes' runs, and so with equal tokens."""


def fits(runs: Sequence[RunSummary], baseline: str, rungs: Rungs = EQUAL) -> list[Fit]:
    """The laws from which costs are read: in tokens for each size of several lengths, and in compute."""
    found = [
        ("tokens", preset, token_points(runs, preset, baseline))
        for preset in dict.fromkeys(run.preset for run in runs)
    ]
    found.append(("compute", "", compute_points(runs, baseline, rungs)))
    return [
        Fit(
            along=along,
            preset=preset,
            points=mean_points(list(points.values())),
            seeds=tuple(points),
            law=mean_law(list(points.values())),
        )
        for along, preset, points in found
        if points and len(next(iter(points.values()))) > 1
    ]


def compare(
    runs: Sequence[RunSummary],
    baseline: str,
    seeds: Iterable[int],
    planned: Iterable[tuple[str, str]] | None = None,
    rungs: Rungs = EQUAL,
) -> list[Result]:
    """A result for each (preset, recipe) of `planned`, also where no run is done; None takes the runs'."""
    wanted = tuple(seeds)
    whole = {(run.preset, run.recipe, run.seed): run for run in runs if run.share == 1}
    pairs = dict.fromkeys(((p, r) for p, r, _ in whole) if planned is None else planned)
    return [_result(preset, recipe, whole, list(runs), baseline, wanted, rungs) for preset, recipe in pairs]


def _result(
    preset: str,
    recipe: str,
    whole: dict[tuple[str, str, int], RunSummary],
    runs: list[RunSummary],
    baseline: str,
    seeds: tuple[int, ...],
    rungs: Rungs,
) -> Result:
    ours = {seed: whole[preset, recipe, seed] for seed in seeds if (preset, recipe, seed) in whole}
    base = {seed: whole[preset, baseline, seed] for seed in seeds if (preset, baseline, seed) in whole}
    ended = {seed: run.val_loss for seed, run in ours.items() if run.val_loss is not None}
    gaps: dict[int, float] = {}
    relative: list[float] = []
    by_domain: dict[str, list[float]] = {}
    for seed, loss in ended.items():
        other = base[seed].val_loss if seed in base else None
        if other is None:
            continue
        gaps[seed] = loss - other
        relative.append(100 * gaps[seed] / other)
        for name, value in (ours[seed].domains or {}).items():
            theirs = (base[seed].domains or {}).get(name)
            if theirs is not None:
                by_domain.setdefault(name, []).append(100 * (value - theirs) / theirs)

    def cost(points: Points, at: Callable[[RunSummary], float]) -> Interval | None:
        """More x in per cent for the mean gap, along the mean of the baseline's points of the same seeds."""
        known = [seed for seed in gaps if seed in points]
        if not known:
            return None
        x = at(ours[known[0]])

        def of(some: Sequence[int]) -> float | None:
            law = mean_law([points[seed] for seed in some])
            gap = sum(gaps[seed] for seed in some) / len(some)
            share = None if law is None else equivalent_cost(law, x, gap)
            return None if share is None else 100 * share

        return jackknife(known, of)

    answered = [100 * run.accuracy for run in ours.values() if run.accuracy is not None]
    is_base = recipe == baseline
    return Result(
        preset=preset,
        recipe=recipe,
        loss=interval(list(ended.values())),
        gap_percent=None if is_base else interval(relative),
        token_cost=None if is_base else cost(token_points(runs, preset, baseline), lambda run: run.tokens),
        compute_cost=None if is_base else cost(compute_points(runs, baseline, rungs), lambda run: run.flops),
        accuracy=interval(answered),
        domains={} if is_base else {n: found for n, v in by_domain.items() if (found := interval(v))},
        missing=tuple(seed for seed in seeds if seed not in gaps),
        diverged=tuple((seed, run.diverged) for seed, run in ours.items() if run.diverged),
    )


def token_points(runs: Sequence[RunSummary], preset: str, baseline: str) -> Points:
    """The baseline's final losses against tokens, of its runs at one size up to the recipes' length."""
    chosen = [run for run in runs if (run.preset, run.recipe) == (preset, baseline) and run.share <= 1]
    return _complete([(run.seed, run.tokens, run.val_loss) for run in chosen])


def compute_points(runs: Sequence[RunSummary], baseline: str, rungs: Rungs = EQUAL) -> Points:
    """The baseline's final losses against compute, of its runs at all sizes, one length each."""
    chosen = [run for run in runs if run.recipe == baseline and run.share == rungs.get(run.preset, 1)]
    return _complete([(run.seed, run.flops, run.val_loss) for run in chosen])


def _complete(found: Sequence[tuple[int, float, float | None]]) -> Points:
    """By seed, the points of the seeds that have one at every x: others would bend the mean curve."""
    every = {x for _, x, _ in found}
    points: Points = {}
    for seed, x, loss in found:
        if loss is not None:
            points.setdefault(seed, {})[x] = loss
    return {seed: curve for seed, curve in points.items() if set(curve) == every}


def mean_points(curves: Sequence[dict[float, float]]) -> dict[float, float]:
    """The mean over seeds of their losses at each x, in the order of x."""
    return {x: sum(curve[x] for curve in curves) / len(curves) for x in sorted(curves[0])}


def mean_law(curves: Sequence[dict[float, float]]) -> PowerLaw | None:
    """The law of the mean over seeds of their losses at each x."""
    points = mean_points(curves)
    return fit_power_law(list(points), list(points.values()))
