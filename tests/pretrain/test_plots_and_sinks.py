"""The picture of a run, TensorBoard's events, and what is said when an extra is not installed."""

import sys
from pathlib import Path

import pytest
from toy import toy_session

from nybble.analysis.plots import plot_loss, smooth
from nybble.errors import ConfigError
from nybble.pretrain.config import LogConfig
from nybble.pretrain.loop import train
from nybble.pretrain.sinks import check_sinks, open_sinks, scalars
from nybble.pretrain.stop import StopRequest


def test_the_picture_is_drawn_for_any_number_of_rows(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 5.0 - step / 10} for step in range(1, 6)]
    rows[-1]["val_loss"] = 4.6
    for count in (0, 1, 5):
        path = tmp_path / "plots" / f"{count}.png"
        plot_loss(rows[:count], path, title="tiny", unigram_entropy=6.5)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_smoothing_has_no_bias_at_its_start() -> None:
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smooth([]) == []


def test_scalars_leave_out_what_makes_no_curve() -> None:
    assert scalars({"step": 1, "loss": 2.0, "tokens_per_expert": [[1]]}) == {"loss": 2.0}


def test_tensorboard_gets_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    session = toy_session(tmp_path)
    session.sinks += open_sinks(LogConfig(tensorboard=True), tmp_path, {}, 0)
    rows = train(session, StopRequest())
    session.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [row["step"] for row in rows]
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])


@pytest.mark.parametrize(
    ("module", "config"),
    [("tensorboard", LogConfig(tensorboard=True)), ("wandb", LogConfig(wandb="project"))],
)
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str, config: LogConfig) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"--{module} needs the extra: pip install 'nybble\[{module}\]'"):
        check_sinks(config)


def test_no_sink_is_open_by_default(tmp_path: Path) -> None:
    assert open_sinks(LogConfig(), tmp_path, {}, 0) == []
