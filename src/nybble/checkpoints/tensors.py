"""Named tensors to and from a folder, through torch.distributed.checkpoint with its safetensors storage.

The default storage of torch.distributed.checkpoint keeps its index in a pickle; the safetensors one keeps
it in the header of each file, so that a folder from a stranger is data and nothing else.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from nybble.errors import CheckpointError

FILE_BYTES = 1 << 30
"""Aim for the size of one file: it is serialised in memory before it is written."""


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes the tensors (any device, any strides) as safetensors files of about 1 GiB.

    Raises the OSError of the storage, such as that of a full disk.
    """
    files: dict[str, int] = {}
    index, filled = 1, 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > FILE_BYTES:
            index, filled = index + 1, 0
        files[name] = index
        filled += tensor.nbytes
    folder.mkdir(parents=True, exist_ok=True)
    writer = dcp.HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True)
    packed = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with _one_process():
        try:
            dcp.save(packed, storage_writer=writer)
        except CheckpointException as error:
            raise _cause(error) from None


def tensor_shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name -> (shape, dtype) of every tensor in the folder, from the headers alone."""
    with _readable(folder):
        metadata = dcp.HuggingFaceStorageReader(str(folder)).read_metadata()
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills `tensors` in place. Raises CheckpointError if a name is missing or a shape or dtype differs."""
    stored = tensor_shapes(folder)
    for name, tensor in tensors.items():
        if name not in stored:
            raise CheckpointError(f"{folder} holds no tensor {name}")
        size, dtype = stored[name]
        if size != tensor.shape or dtype != tensor.dtype:
            raise CheckpointError(
                f"{folder}: {name} is {dtype} {list(size)} in the checkpoint, "
                f"but {tensor.dtype} {list(tensor.shape)} here"
            )
    with _one_process(), _readable(folder), torch.no_grad():
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


@contextmanager
def _one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        # One process is what is meant here, so torch's remark that it assumes one is no news.
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        yield


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turns what safetensors and torch raise on a damaged file into a CheckpointError."""
    from safetensors import SafetensorError

    try:
        yield
    except CheckpointError:
        raise
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be read: {_cause(error)}") from None
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from None


def _cause(error: CheckpointException) -> BaseException:
    """The exception that one rank raised; torch wraps it together with its traceback as text."""
    return next(iter(error.failures.values()))[0]
