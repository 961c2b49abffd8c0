"""These tests are about the reference; those of the kernels compare the kernels with it."""

from collections.abc import Iterator

import pytest
import torch

from nybble.kernels import reference_only


@pytest.fixture(autouse=True, scope="module")
def reference_on_one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    with reference_only():
        yield
    torch.set_num_threads(before)
