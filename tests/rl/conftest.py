"""One thread, a fixed seed, and no progress bars; the helpers of the models' tests within reach."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Before the runs that a module shares, too: other numbers of threads, other bits of sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _quiet_and_repeatable() -> None:
    torch.manual_seed(0)
    logging.disable_progress_bar()
