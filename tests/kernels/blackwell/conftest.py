"""The native path on a CPU: torch's two functions are emulated, and the device's reason is taken away."""

from collections.abc import Iterator

import blackwell_emulation
import pytest
import torch
import torch.nn.functional as F

from nybble.kernels.blackwell import choice


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> blackwell_emulation.Fake:
    """A CPU that passes for a Blackwell GPU."""
    it = blackwell_emulation.Fake()
    monkeypatch.setattr(F, "scaled_mm", it.scaled_mm)
    monkeypatch.setattr(F, "scaled_grouped_mm", it.scaled_grouped_mm)
    monkeypatch.setattr(choice, "_device_reason", lambda *_: None)
    return it
