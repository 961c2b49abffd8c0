"""The metrics file after a kill: no finished line is lost, and what a resume will write again is dropped."""

from pathlib import Path

import pytest

from nybble.errors import CheckpointError
from nybble.pretrain.metrics import MetricsFile, duration, read, step_line


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    file.write({"step": 1, "loss": 0.1 + 0.2})
    assert read(tmp_path / "m.jsonl")[0]["loss"] == 0.1 + 0.2  # before close: a kill must not lose it
    file.close()


@pytest.mark.parametrize("tail", ['{"step": 4, "loss": 1.0}\n', '{"step": 3, "lo', '{"step": 2}'])
def test_resume_drops_later_steps_and_a_line_cut_short(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "m.jsonl"
    whole = '{"step": 1, "loss": 1.5}\n'
    path.write_text(whole + tail)
    file = MetricsFile(path, keep_steps=2)
    assert path.read_text() == whole
    file.write({"step": 2})
    file.close()
    assert [row["step"] for row in read(path)] == [1, 2]


@pytest.mark.parametrize("line", ["garbage", "[]", "{}", "\0\0\0"])
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    for act in (read, lambda path: MetricsFile(path, keep_steps=2)):
        with pytest.raises(CheckpointError, match=r"m\.jsonl, line 2 is no row of metrics; delete that line"):
            act(path)


def test_not_a_number_is_never_written(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.write({"step": 1, "loss": float("nan")})
    file.close()


def test_the_line_of_a_step() -> None:
    row = {"step": 7, "loss": 1.23456, "lr": 0.003, "grad_norm": 1.0, "load_violation": 0.5}
    row |= {"tokens_per_s": 12345.6, "memory_gib": 1.25}
    line = step_line(row, 100, eta_s=3725)
    assert line == (
        "step   7/100  loss 1.2346              lr 3.00e-03  grad 1.00  load +0.50  "
        "12.3k tok/s  1.2 GiB  eta 1:02:05"
    )
    assert "val 9.0000" in step_line(row | {"val_loss": 9.0}, 100, 0)


def test_duration() -> None:
    assert duration(59.6) == "0:01:00"
