"""The attention kernels without a GPU: Triton's interpreter runs them on small shapes; and who they serve."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inkling2_cases import random_model

from nybble.errors import NybbleError
from nybble.models.documents import find_documents
from nybble.models.inkling2.fused import attend_fused
from nybble.models.invariant import batch_invariant

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@needs_triton
def test_interpreted_attention_kernels_equal_the_formula() -> None:
    script = Path(__file__).with_name("interpreted_attend.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script.parents[1] / "watched.py"), str(script)],
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


@needs_triton
def test_what_the_kernels_do_not_serve_is_named() -> None:
    from nybble.models.cuda.attend import reason

    device, bf16 = torch.device("cpu"), torch.bfloat16
    assert reason(device, bf16, (32, 64), 16) is None
    assert "heads of 48" in str(reason(device, bf16, (48, 64), 16))
    assert "128 weights" in str(reason(device, bf16, (64,), 128))
    assert "float32" in str(reason(device, torch.float32, (64,), 16))
    assert random_model().why_not_fused(device) == "cpu devices have no attention kernel"


def test_the_batch_invariant_mode_refuses_fused_attention() -> None:
    x = torch.zeros(1, 3, 2, 32)
    with batch_invariant(), pytest.raises(NybbleError, match=r"model\.flex = False"):
        attend_fused(x, x, x, x[..., :4], torch.zeros(4, 9), x[..., 0], window=None, scale=1.0)
