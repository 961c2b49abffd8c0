"""`nybble bench` on a CPU: every kernel has a time, a share and a ratio, and nonsense is refused."""

import json

import pytest
import torch

from nybble.cli import main


def test_every_kernel_of_the_device_is_on_the_ladder(tmp_path, capsys, monkeypatch):
    from nybble.analysis import clock

    class Steady(clock.Timed):
        def once(self) -> float:
            return 2.0

    device = torch.device("cpu")
    steady = clock.Ceiling(timed=Steady(launch=lambda: None, calls=1, device=device), work=2e6)  # 1e9 / s
    monkeypatch.setattr(clock, "copy", lambda _: steady)
    monkeypatch.setattr(clock, "matrix", lambda _: steady)
    file = tmp_path / "ladder.json"
    status = main(
        ["bench", "--device", "cpu", "--rows", "64", "--cols", "64", "--experts", "2", "--json", str(file)]
    )
    assert status == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    copy, quantise = rows["bf16 copy"], rows["nvfp4 quantize, outer row"]
    assert quantise["bytes"] == 64 * 64 * (2 + 0.5 + 1 / 16)
    assert quantise["share"] == pytest.approx(quantise["bytes"] / (quantise["ms"] / 1e3) / 1e9)
    assert quantise["to_bf16"] == pytest.approx(quantise["ms"] / copy["ms"])
    product = rows["FP32 products of 2 experts, 32 x 16 x 16"]
    assert product["operations"] == 2 * 64 * 16 * 16
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)
    assert all(row["ms"] > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rows", "100"], "rows is 100"),
        (["--cols", "-64"], "cols is -64"),
        (["--experts", "0"], "experts is 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(flags, words, capsys):
    assert main(["bench", "--device", "cpu", *flags]) == 1
    assert words in capsys.readouterr().err
