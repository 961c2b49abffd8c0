"""How threads wait, which is decided before torch is loaded."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest

from nybble import cli


@pytest.mark.parametrize(
    ("cores", "given", "expected"),
    [
        (2, {}, "1000"),
        (16, {}, None),
        (2, {"GOMP_SPINCOUNT": "7"}, "7"),
        (2, {"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_waiting_threads_sleep_soon_on_few_cores(monkeypatch, cores, given, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    with patch.dict(os.environ):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            os.environ.pop(name, None)
        os.environ.update(given)
        cli.share_cores()
        assert os.environ.get("GOMP_SPINCOUNT") == expected


def test_the_command_line_loads_no_torch_before_it_decides():
    code = "import sys, nybble.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
