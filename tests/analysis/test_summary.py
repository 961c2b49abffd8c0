"""Files of summaries that are not ours: one sentence with the line, before anything is computed from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from nybble.analysis.summary import RunSummary, read_lines
from nybble.errors import ConfigError

RUN = RunSummary(
    preset="tiny", recipe="bf16", seed=0, tokens=9, curve=((9, 4.0),), domains={"a": 4.0}, val_loss=4.0
)


def test_a_summary_survives_its_line(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text(RUN.to_json() + "\n")
    assert read_lines(file) == [RUN]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": "0"},
        {"seed": [1]},
        {"tokens": 9.5},
        {"share": None},
        {"val_loss": "4"},
        {"curve": [["a", 4.0]]},
        {"curve": [[9]]},
        {"domains": [4.0]},
        {"domains": {"a": None}},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_value_that_no_summary_has_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "runs.jsonl"
    file.write_text(RUN.to_json() + "\n" + json.dumps(json.loads(RUN.to_json()) | change) + "\n")
    with pytest.raises(ConfigError, match="line 2 is no summary of a run"):
        read_lines(file)


def test_a_picture_is_no_file_of_summaries(tmp_path: Path) -> None:
    file = tmp_path / "runs.png"
    file.write_bytes(b"\x89PNG\r\n\x1a\n\x00")
    with pytest.raises(ConfigError, match="line 1 is no summary of a run"):
        read_lines(file)
