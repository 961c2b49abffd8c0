from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN or the largest integer, so that a byte that a kernel forgets shows."""
    before, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors; `test_cpu_threads.py` sets its own
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
    torch.set_num_threads(threads)
