"""Loss as a power law of tokens or compute, and intervals over seeds.

loss(x) = floor + scale * x^-exponent. Of two different x the floor is 0: a straight line in the logarithms.
Laws are used between and near their points, where the form hardly matters; they claim nothing far beyond
them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_POINTS_FOR_FLOOR = 3
# Two-sided 95 % quantiles of Student's t by degrees of freedom from 1, and that of the normal distribution.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
T_95_MANY = 1.96


@dataclass(frozen=True)
class Interval:
    """A mean over `n` seeds with its 95 % confidence interval (Student's t); unbounded for one seed."""

    mean: float
    half: float
    n: int

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


def interval(values: Sequence[float]) -> Interval | None:
    """Mean and 95 % interval of values of independent seeds; None of no values."""
    n = len(values)
    if n == 0:
        return None
    half = float("inf")
    if n > 1:
        quantile = T_95[n - 2] if n - 2 < len(T_95) else T_95_MANY
        half = quantile * float(np.std(values, ddof=1)) / n**0.5
    return Interval(float(np.mean(values)), half, n)


def jackknife(seeds: Sequence[int], statistic: Callable[[Sequence[int]], float | None]) -> Interval | None:
    """`statistic` of all seeds, and its 95 % interval from leaving out one seed at a time.

    It covers whatever the statistic draws from the seeds, such as the slope of a fit. None where it has no
    value.
    """
    whole = statistic(seeds)
    if whole is None:
        return None
    n = len(seeds)
    without = [statistic([seed for seed in seeds if seed != left]) for left in seeds] if n > 1 else []
    pseudo = [n * whole - (n - 1) * value for value in without if value is not None]
    spread = interval(pseudo)
    return Interval(whole, spread.half if spread and len(pseudo) == n else float("inf"), n)


@dataclass(frozen=True)
class PowerLaw:
    """loss(x) = floor + scale * x^-exponent."""

    floor: float
    scale: float
    exponent: float

    def loss(self, x: float) -> float:
        """The loss at x."""
        return float(self.floor + self.scale * x**-self.exponent)

    def reach(self, loss: float) -> float | None:
        """The x that has this loss; None where the law never has it."""
        if loss <= self.floor or self.exponent <= 0:
            return None
        return float(((loss - self.floor) / self.scale) ** (-1 / self.exponent))


def fit_power_law(x: Sequence[float], loss: Sequence[float]) -> PowerLaw | None:
    """Least squares; None where fewer than two different x are given, or the loss does not fall with x."""
    xs, ys = np.asarray(x, np.float64), np.asarray(loss, np.float64)
    different = len(np.unique(xs))
    if different < 2:
        return None
    if different >= MIN_POINTS_FOR_FLOOR:
        unit = float(np.exp(np.log(xs).mean()))  # for numbers near 1
        floor, scale, exponent = _best(xs / unit, ys)
        if floor >= 0 and scale > 0:
            return PowerLaw(floor, scale * unit**exponent, exponent)
    slope, intercept = np.polyfit(np.log(xs), np.log(ys), 1)
    return PowerLaw(0.0, float(np.exp(intercept)), float(-slope)) if slope < 0 else None


def _best(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float, float]:
    """(floor, scale, exponent) of the least squared error: for each exponent of a grid a straight line."""
    exponents = np.geomspace(0.02, 4.0, 1000)
    z = x ** -exponents[:, None]  # [exponents, points]
    dz, dy = z - z.mean(1, keepdims=True), y - y.mean()
    scales = (dz * dy).sum(1) / np.square(dz).sum(1)
    best = int(np.square(dz * scales[:, None] - dy).sum(1).argmin())
    return float(y.mean() - scales[best] * z[best].mean()), float(scales[best]), float(exponents[best])


def equivalent_cost(law: PowerLaw, x: float, gap: float) -> float | None:
    """Share of x that a run must add to make up for a loss `gap` above that of the law at x.

    The law has the run's loss at some x' < x already; at the law's slope the run needs x / x' times as much.
    """
    reached = law.reach(law.loss(x) + gap)
    return None if reached is None else x / reached - 1
