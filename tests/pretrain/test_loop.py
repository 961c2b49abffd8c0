"""The loop on a toy model: resume bit for bit, accumulation, validation, the guard, stopping."""

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toy import ToyModel, held_out, toy_session

from nybble import checkpoints, together
from nybble.errors import CheckpointError, ConfigError, NonFiniteError
from nybble.pretrain.config import BatchConfig, OptimiserConfig, ScheduleConfig
from nybble.pretrain.loop import train, train_step, validate
from nybble.pretrain.metrics import TIMING_FIELDS
from nybble.pretrain.stop import StopRequest


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMING_FIELDS} for row in rows]


def run(folder: Path, **kwargs: Any) -> list[dict[str, Any]]:
    session = toy_session(folder, **kwargs)
    if kwargs.get("resume"):
        session.restore()
    try:
        return untimed(train(session, StopRequest()))
    finally:
        session.close()


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_a_run_stopped_anywhere_and_resumed_writes_the_rows_of_one_never_stopped(
    tmp_path: Path, optimiser: Any
) -> None:
    settings = {"optimiser": OptimiserConfig(lr=0.01, optimiser=optimiser)}
    whole = run(tmp_path / "whole", **settings)
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 5, 6]
    assert whole[-1]["loss"] < whole[0]["loss"]
    for steps_done in (1, 3, 5):  # checkpoints exist at 2 and 4: the rest is lost, as after a kill
        folder = tmp_path / f"killed-{steps_done}"
        session = toy_session(folder, **settings)
        for step in range(steps_done):
            row = train_step(session, step)
            session.step = step + 1
            session.metrics.write(row | {"extra": "of the killed run"})
            if session.step % 2 == 0:
                session.save()
        session.close()
        resumed = run(folder, resume=True, **settings)
        last_saved = steps_done // 2 * 2
        assert [row["step"] for row in resumed] == [1, 2, 3, 4, 5, 6]
        assert resumed[last_saved:] == whole[last_saved:]
        assert [row["loss"] for row in resumed] == [row["loss"] for row in whole]


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    assert run(tmp_path / "a") == run(tmp_path / "b")


def test_accumulated_batches_give_the_gradient_of_their_mean(tmp_path: Path) -> None:
    """Two micro-batches of two sequences are one batch of four."""
    split = toy_session(tmp_path / "split", ToyModel(noise=0.0))
    joined = toy_session(tmp_path / "joined", ToyModel(noise=0.0), batch=BatchConfig(batch=4, sequence=4))
    parts = [split.next_batch(), split.next_batch()]
    split._train_data.load_state_dict({"position": 0})
    both = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    joined.next_batch = lambda: both  # type: ignore[method-assign]
    row, expected = train_step(split, 0), train_step(joined, 0)
    assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
    for s in (split, joined):
        s.close()


def test_validation_is_due_at_its_steps_and_at_the_last(tmp_path: Path) -> None:
    rows = run(tmp_path, schedule=ScheduleConfig(steps=5))
    assert [row["step"] for row in rows if "val_loss" in row] == [3, 5]


def test_checkpoints_are_kept_as_asked(tmp_path: Path) -> None:
    run(tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]


def poison(module: nn.Module, when: int) -> None:
    """Makes the module's output infinite from its call number `when` on."""
    calls = 0

    def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return output * float("inf") if calls > when else output

    module.register_forward_hook(hook)


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * float("nan")


def test_an_infinity_in_the_forward_pass_names_layer_and_step_and_changes_nothing(tmp_path: Path) -> None:
    model = ToyModel()
    session = toy_session(tmp_path, model)
    poison(model.layers[1].up, when=4)  # two micro-batches a step: the third step
    train_step(session, 0)
    train_step(session, 1)
    before = {k: v.clone() for k, v in session._model_tensors().items()}
    moments = {k: v.clone() for k, v in session.optimiser.state().items()}
    with pytest.raises(
        NonFiniteError, match=r"step 3: .*first seen in the output of layers\.1\.up; the step was not applied"
    ):
        train_step(session, 2)
    for name, value in session._model_tensors().items():
        assert torch.equal(value, before[name]), name
    for name, value in session.optimiser.state().items():
        assert torch.equal(value, moments[name]), name
    session.close()


def test_a_compiled_model_is_searched_too(tmp_path: Path) -> None:
    model = ToyModel()
    session = toy_session(tmp_path, model)
    model.compile(backend="eager")
    train_step(session, 0)
    with torch.no_grad():
        model.layers[1].down.weight.fill_(3e38)
    with pytest.raises(NonFiniteError, match=r"step 2: .*first seen in the output of layers\.1\.down"):
        train_step(session, 1)
    session.close()


def test_a_nan_born_in_the_backward_pass_is_named(tmp_path: Path) -> None:
    model = ToyModel()
    session = toy_session(tmp_path, model)
    model.layers[0].down.register_forward_hook(lambda _m, _i, out: BadGradient.apply(out))
    with pytest.raises(NonFiniteError, match=r"step 1: .*in the gradient of the weight layers\.0\.down"):
        train_step(session, 0)
    session.close()


def test_a_bad_weight_is_named(tmp_path: Path) -> None:
    model = ToyModel()
    session = toy_session(tmp_path, model)
    with torch.no_grad():
        model.head.bias[3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"step 1: the weight head\.bias holds a NaN"):
        train_step(session, 0)
    session.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_and_stops(tmp_path: Path, number: int) -> None:
    session = toy_session(tmp_path / "run")
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        train(session, stop)
    session.close()
    assert stop.signum == number
    assert checkpoints.latest(tmp_path / "run" / "checkpoints").name == "step_00000001"  # type: ignore[union-attr]
    assert run(tmp_path / "run", resume=True) == run(tmp_path / "whole")


def test_a_signal_is_not_lost_while_ranks_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the loop has looked at the signal, and not yet written down what all ranks have."""
    seen: list[int] = []

    def largest(value: int, _device: object = None) -> int:
        seen.append(value)
        if len(seen) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return value

    monkeypatch.setattr(together, "largest", largest)
    session = toy_session(tmp_path / "run")
    with StopRequest() as stop:
        train(session, stop)
    session.close()
    assert seen == [0, signal.SIGTERM]
    assert (stop.agreed, session.step) == (signal.SIGTERM, 2)


def test_a_full_disk_ends_the_run_with_the_old_checkpoint_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    session = toy_session(tmp_path / "run")
    session.metrics.write(train_step(session, 0))
    session.step = 1
    session.save()
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem._write_files_from_queue", full)
        with pytest.raises(
            CheckpointError, match=r"the disk is full, so step 2 could not be saved .* is intact"
        ):
            train(session, StopRequest())
    session.close()
    resumed = run(tmp_path / "run", resume=True)
    assert [row["loss"] for row in resumed[1:]] == [row["loss"] for row in run(tmp_path / "whole")[1:]]


def test_resume_refuses_another_identity_and_fewer_steps(tmp_path: Path) -> None:
    run(tmp_path)
    other = toy_session(tmp_path, resume=True, identity={"model": "other"})
    with pytest.raises(CheckpointError, match='model is "toy" there and "other" here'):
        other.restore()
    other.close()
    shorter = toy_session(tmp_path, resume=True, schedule=ScheduleConfig(steps=3))
    with pytest.raises(CheckpointError, match="at step 6, beyond the 3 steps asked for"):
        shorter.restore()
    shorter.close()


def test_a_run_folder_is_not_clobbered_and_has_one_writer(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run; go on with --resume"):
        toy_session(tmp_path)
    with pytest.raises(ConfigError, match="holds no run to resume"):
        toy_session(tmp_path / "new", resume=True)
    session = toy_session(tmp_path, resume=True)
    with pytest.raises(ConfigError, match="another process is writing"):
        toy_session(tmp_path, resume=True)
    session.close()


def test_validation_reports_each_domain_and_all_together(tmp_path: Path) -> None:
    session = toy_session(tmp_path)
    alone = validate(session, 0)
    assert set(alone) == {"val_loss"}
    session._held_out_data = {"a": held_out, "b": lambda: list(held_out())[:1]}
    found = validate(session, 0)
    assert set(found) == {"val_loss", "val_loss/a", "val_loss/b"}
    assert found["val_loss/a"] == alone["val_loss"]
    assert found["val_loss"] == pytest.approx((2 * found["val_loss/a"] + found["val_loss/b"]) / 3)
