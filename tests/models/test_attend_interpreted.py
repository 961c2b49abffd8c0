"""The attention kernels without a GPU: Triton's interpreter runs them on small shapes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nybble.models.documents import find_documents


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_interpreted_attention_kernels_equal_the_formula() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("interpreted_attend.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_documents_reach_from_their_first_to_their_last_token() -> None:
    found = find_documents(torch.tensor([[4, 4, 7, 7, 7], [-1, 3, 3, -1, 5]]))
    assert found.first.tolist() == [[0, 0, 2, 2, 2], [0, 1, 1, 0, 4]]
    assert found.last.tolist() == [[1, 1, 4, 4, 4], [3, 2, 2, 3, 4]]
