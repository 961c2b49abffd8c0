"""The claim on memory, measured by the benchmark's own code on a small layer."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "activation_memory.py"


def test_an_inkling_layer_keeps_a_fraction_of_what_bf16_keeps():
    spec = importlib.util.spec_from_file_location("activation_memory", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    kept = benchmark.measure(tokens=512, hidden=192, width=192, experts=8, top_k=2)
    assert kept["bf16"] < kept["plain"]  # the baseline is not a straw man
    assert kept["inkling"] <= benchmark.LIMIT * kept["bf16"]
