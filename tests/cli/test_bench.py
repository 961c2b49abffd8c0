"""`nybble bench` on a CPU: every kernel has a time, a share and a ratio, and nonsense is refused."""

import json

import pytest
import torch

from nybble.cli import main


def test_every_kernel_of_the_device_is_on_the_ladder(tmp_path, capsys, monkeypatch):
    from nybble.analysis import clock, ladder

    class Steady(clock.Timed):
        def once(self) -> float:
            return 2.0

    def ceiling(work: float) -> clock.Ceiling:
        return clock.Ceiling(
            timed=Steady(launch=lambda: None, calls=1, device=torch.device("cpu")), work=work
        )

    def peer() -> None:
        pass

    def ready(call: clock.Call, device: torch.device) -> clock.Timed:
        seen.append(call)
        steady = call is peer or len(seen) == 1  # the first is the copy in BF16
        return (Steady if steady else clock.Timed)(launch=call, calls=1, device=device)

    seen: list[clock.Call] = []
    monkeypatch.setattr(clock, "timed", ready)
    monkeypatch.setattr(clock, "copy", lambda _: ceiling(2e6))  # 1e9 a second
    monkeypatch.setattr(clock, "matrix", lambda _: ceiling(2e7))
    monkeypatch.setattr(ladder, "torchao_calls", lambda _: {"nvfp4_quantize": peer})
    file = tmp_path / "ladder.json"
    status = main(
        ["bench", "--device", "cpu", "--rows", "64", "--cols", "64", "--experts", "2", "--json", str(file)]
    )
    assert status == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    quantise = rows["nvfp4 quantize, outer row"]
    assert quantise["bytes"] == 64 * 64 * (2 + 0.5 + 1 / 16)
    assert quantise["share"] == pytest.approx(quantise["bytes"] / (quantise["ms"] / 1e3) / 1e9)
    assert rows["bf16 copy"]["ms"] == 2.0
    assert quantise["to_bf16"] == pytest.approx(quantise["ms"] / 2.0)
    assert quantise["to_torchao"] == pytest.approx(quantise["ms"] / 2.0)
    assert rows["mxfp8 quantize"]["to_torchao"] is None
    product = rows["FP32 products of 2 experts, 32 x 16 x 16"]
    assert product["operations"] == 2 * 64 * 16 * 16
    assert product["share"] == pytest.approx(product["operations"] / (product["ms"] / 1e3) / 1e10)
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)
    assert all(row["ms"] > 0 for row in rows.values())


@pytest.mark.parametrize(
    ("bytes", "operations", "words"),
    [
        (3e9, 0.0, "1.50 TB/s"),
        (3e6, 0.0, "1.50 GB/s"),
        (0.0, 3e9, "1.50 TFLOP/s"),
        (0.0, 3e6, "1.50 GFLOP/s"),
    ],
)
def test_rates_are_told_in_their_units(bytes, operations, words):
    from nybble.analysis.ladder import Measured, Rung

    rung = Rung(name="a kernel", call=lambda: None, bytes=bytes, operations=operations)
    assert words in Measured(rung=rung, ms=2.0, share=0.5).line()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rows", "100"], "rows is 100"),
        (["--cols", "-64"], "cols is -64"),
        (["--experts", "0"], "experts is 0"),
        (["--json", "/nowhere/at/all.json"], "json is /nowhere/at/all.json"),
        (["--json", "/"], "json is /"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_timed(flags, words, capsys):
    assert main(["bench", "--device", "cpu", *flags]) == 1
    assert words in capsys.readouterr().err
