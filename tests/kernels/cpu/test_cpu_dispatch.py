"""Which implementation runs, how the reference is forced, and how kernels are cached."""

import errno
import os
import subprocess
import sys
from typing import Any

import numba.core.caching
import numpy as np
import pytest
import torch
from cpu_cases import OPS, hard

import nybble.kernels
from nybble.errors import NybbleError
from nybble.kernels.cpu import front, jit, tiles


def test_fast_kernels_run_unless_the_reference_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    x = hard(4, 32)
    called = []
    fast = front.quantize
    monkeypatch.setattr(front, "quantize", lambda *a, **k: called.append(1) or fast(*a, **k))
    OPS.quantize(x, "mxfp8")
    assert called == [1]
    with nybble.kernels.reference_only(), nybble.kernels.reference_only():
        OPS.quantize(x, "mxfp8")
    assert called == [1]
    OPS.quantize(x, "mxfp8")
    assert called == [1, 1]


def test_can_run_gives_a_reason() -> None:
    assert nybble.kernels.can_run("cpu", "nvfp4") is None
    assert nybble.kernels.can_run(torch.device("cpu"), "mxfp8") is None
    assert "cast" in (nybble.kernels.can_run("cpu", "bf16") or "")
    assert "no kernels for meta" in (nybble.kernels.can_run("meta", "mxfp8") or "")
    with nybble.kernels.reference_only():
        assert "reference_only" in (nybble.kernels.can_run("cpu", "nvfp4") or "")
    with pytest.raises(NybbleError, match="unknown format"):
        nybble.kernels.can_run("cpu", "nvfp5")


def test_bad_arguments_are_refused_as_by_the_reference() -> None:
    x = hard(4, 32)
    for arguments, message in (
        ((x, "nvfp5"), "unknown format"),
        ((x.to(torch.int32), "nvfp4"), "int32"),
        ((x, "nvfp4", -3), "axis"),
        ((x, "mxfp8", -1, "stochastic"), "key"),
        ((x, "nvfp4-16x16", -1, "nearest", "row"), "row"),
    ):
        with pytest.raises(NybbleError, match=message):
            OPS.quantize(*arguments)


def test_importing_kernels_does_not_import_numba() -> None:
    code = "import sys, nybble.kernels; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert not done.stderr


def test_cache_follows_all_sources() -> None:
    """A kernel's stamp covers the helpers that it links, so that none runs with a helper of yesterday."""
    assert tiles.quantize_tiles.function._cache._cache_file._source_stamp == jit.source_digest()


def test_a_full_disk_keeps_no_kernel_from_running(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(numba.core.caching.IndexDataCacheFile, "save", full)

    def mark(first: int, last: int, out: Any) -> None:
        for i in range(first, last):
            out[i] -= i

    out = np.ones(3)
    jit.kernel(mark)(0, 3, out)
    assert out.tolist() == [1.0, 0.0, -1.0]
    assert "compiled kernels cannot be kept in /" in caplog.text
    assert "No space left on device" in caplog.text


def test_kernels_compile_where_nothing_can_be_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])

    def mark(first: int, last: int, out: Any) -> None:
        for i in range(first, last):
            out[i] += i

    out = np.ones(5)
    jit.kernel(mark)(1, 4, out)
    assert out.tolist() == [1.0, 2.0, 3.0, 4.0, 1.0]
