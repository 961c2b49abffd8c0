"""Imported once by the server that test ranks are forked from, so that none of them pays for the imports."""

import sys

# transformers imports torchao where it is installed, and torchao complains of binaries that do not fit.
sys.modules["torchao"] = None  # type: ignore[assignment]

import torch  # noqa: E402

import nybble.pretrain.start  # noqa: E402, F401

torch.set_num_threads(1)
