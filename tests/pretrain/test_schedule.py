"""The rate of each step, and that it depends on the step alone."""

import pytest

from nybble.pretrain.config import ScheduleConfig
from nybble.pretrain.schedule import lr_factor


def factors(**settings: float) -> list[float]:
    config = ScheduleConfig(**settings)  # type: ignore[arg-type]
    return [lr_factor(step, config) for step in range(config.steps)]


def test_warm_up_stable_decay() -> None:
    assert factors(steps=10, warmup=4, decay=0.4, final_lr=0.2) == pytest.approx(
        [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    )


def test_without_warm_up_and_decay_the_rate_is_constant() -> None:
    assert factors(steps=5, warmup=0, decay=0.0) == [1.0] * 5


def test_overlapping_phases_take_the_smaller_rate() -> None:
    values = factors(steps=6, warmup=100, decay=1.0, final_lr=0.0)
    assert max(values) < 0.06
    assert values[-1] == 0.0


def test_one_step() -> None:
    assert factors(steps=1, warmup=0, decay=1.0, final_lr=0.1) == pytest.approx([0.1])
