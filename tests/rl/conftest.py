"""One thread, a fixed seed, and no progress bars; the helpers of the models' tests within reach."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))


@pytest.fixture(autouse=True)
def _quiet_and_repeatable() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)
