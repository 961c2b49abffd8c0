"""A recipe that changes within a run changes at its step, also where a killed run goes on."""

from pathlib import Path
from typing import Any

import torch
from toy import ToyModel, toy_session

from nybble.layers import convert
from nybble.pretrain.loop import train
from nybble.pretrain.metrics import TIMING_FIELDS, read
from nybble.pretrain.session import Session
from nybble.pretrain.stop import StopRequest

RECIPE = {
    "blocks": {"tails": "allow"},
    "rule": [
        {"modules": "**", "fprop": "nvfp4", "dgrad": {"dy": {"format": "mxfp8", "rounding": "stochastic"}}},
        {"modules": "**", "all": "bf16", "after": 0.5},
    ],
}
STEPS = 6


def scheduled(folder: Path, resume: bool = False) -> tuple[Session, list[tuple[int, str]]]:
    """A session of the toy model, and the format of a forward operand at each forward pass, as it goes."""
    model = ToyModel()
    convert(model, RECIPE, steps=STEPS)
    seen: list[tuple[int, str]] = []
    up = model.layers[0].up
    up.register_forward_pre_hook(
        lambda module, _: seen.append((module.step_state.step, module.spec.gemms.fprop.x.format))
    )
    return toy_session(folder, model, resume=resume), seen


def losses(folder: Path) -> list[dict[str, object]]:
    rows = read(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in TIMING_FIELDS} for row in rows]


def test_the_switch_happens_at_its_step_and_after_a_resume(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole, seen = scheduled(tmp_path / "whole")
    train(whole, StopRequest())
    whole.close()
    assert set(seen) == {(step, "nvfp4" if step < 3 else "bf16") for step in range(STEPS)}

    for stop_at in (2, 4):  # checkpoints before and behind the switch
        folder = tmp_path / f"stopped-{stop_at}"
        first, _ = scheduled(folder)
        stop = StopRequest()
        original = first.metrics.write

        def write(
            row: dict[str, Any], at: int = stop_at, stop: StopRequest = stop, write: Any = original
        ) -> None:
            stop.signum = 15 if row["step"] == at else 0
            write(row)

        first.metrics.write = write  # type: ignore[method-assign]
        train(first, stop)
        first.close()
        again, seen = scheduled(folder, resume=True)
        again.restore()
        train(again, StopRequest())
        again.close()
        assert set(seen) == {(step, "nvfp4" if step < 3 else "bf16") for step in range(stop_at, STEPS)}
        assert losses(folder) == losses(tmp_path / "whole")
