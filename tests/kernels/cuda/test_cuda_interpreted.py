"""The GPU kernels without a GPU: Triton's interpreter runs them on small hostile inputs, bit for bit."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

WATCHED = Path(__file__).parents[2] / "watched.py"
"""Runs a script with an eye on the addresses that kernels touch."""

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.parametrize(
    "group",
    [
        *("nvfp4 rows", "other rows", "every format", "columns", "codes"),
        *("eden", "messages", "experts", "hadamard"),
    ],
)
def test_interpreted_kernels_equal_the_reference(group):
    run("interpreted.py", group)


def test_interpreted_batch_invariant_kernels():
    run("interpreted_invariant.py")


def test_interpreted_rows_times_codes():
    run("interpreted_coded_rows.py")


def test_addresses_outside_of_a_launchs_tensors_are_found():
    run("interpreted_bounds.py")


def run(name: str, *arguments: str) -> None:
    script = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WATCHED), str(script), *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
