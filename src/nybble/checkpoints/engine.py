"""The loop that export and quantize share: read a chunk, quantise it, write it to its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nybble.checkpoints import plan
from nybble.checkpoints import sidecar as kept_codes
from nybble.checkpoints.dialects import Dialect, Written
from nybble.checkpoints.header import DTYPES, NAMES
from nybble.checkpoints.packed import STORED, Packed, encode, stack
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.scratch import Scratch, each_in_threads
from nybble.checkpoints.sidecar import Sidecar
from nybble.checkpoints.source import FLOATS, Bank, Linear, Unit
from nybble.checkpoints.writer import Spec, Writer, write_json
from nybble.errors import CheckpointError

CHUNK_BYTES = 16_000_000
"""Source bytes that one thread has in hand; a single expert may be more."""
EXACT = ("e_score_correction_bias", "mlp.gate.bias")
"""Router biases stay as they are: a rounded one sends tokens to other experts."""

Observer = Callable[[str, Tensor, Packed], None]
"""Called with a module's name, its weight and its codes, from any thread."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to write in a dialect."""

    folder: Folder
    units: list[Unit]
    formats: plan.Formats
    dialect: Dialect
    rest: str
    """"bf16" or "keep"."""
    max_shard_bytes: int
    sidecar: Sidecar | None = None
    fuse: bool = False
    """Let linears that serving runs as one GEMM share an outer scale."""
    progress: str | None = None
    """Title of the progress bar."""
    observe: Observer | None = None


@dataclass
class Result:
    """Counts of what was done."""

    reused: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


def write_model(job: Job, out: Path) -> Result:
    """Write weights and configs of `job` into the folder `out`."""
    result = Result()
    taken = {name for unit in job.units if _owned(job, unit) for name in unit.tensors}
    plain = [name for name in job.folder if name not in taken]
    specs = [spec for unit in job.units if _owned(job, unit) for spec in _specs(job, unit)]
    specs += [Spec(name, _plain_dtype(job, name), job.folder.entry(name).shape) for name in plain]
    total = sum(entry.nbytes for entry in job.folder.tensors.values())
    off = True if job.progress is None else None  # None: not into pipes
    bar = tqdm(total=total, unit="B", unit_scale=True, desc=job.progress, disable=off)
    with bar, Writer(out, specs, job.max_shard_bytes) as writer:
        for done in each_in_threads(list(_tasks(job, plain, writer))):
            result.bytes_read += done.nbytes
            result.reused += done.reused
            bar.update(done.nbytes)
        result.bytes_written = writer.close()
    for name, content in _configs(job).items():
        write_json(out / name, content)
    return result


@dataclass(frozen=True)
class _Done:
    """What one task did."""

    nbytes: int
    reused: int = 0


def _tasks(job: Job, plain: list[str], writer: Writer) -> Iterator[Callable[[Scratch], _Done]]:
    for group in plan.groups(job.units, job.formats, job.fuse):
        unit = group[0]
        if isinstance(unit, Bank):
            nbytes = sum(job.folder.entry(name).nbytes for name in unit.tensors)
            for experts in _chunks(unit.experts, nbytes):
                yield partial(_write_bank, job, unit, experts, writer)
        elif _owned(job, unit):
            yield partial(_write_linears, job, [u for u in group if isinstance(u, Linear)], writer)
    for name in plain:
        entry = job.folder.entry(name)
        if not entry.shape or entry.nbytes <= CHUNK_BYTES:
            yield partial(_write_plain, job, name, None, writer)
        else:
            for rows in _chunks(entry.shape[0], entry.nbytes):
                yield partial(_write_plain, job, name, rows, writer)


def _owned(job: Job, unit: Unit) -> bool:
    """Whether a unit is written by the dialect; banks are even in BF16, as their layout changes."""
    return isinstance(unit, Bank) or unit.module in job.formats


def _specs(job: Job, unit: Unit) -> list[Spec]:
    kind = STORED[job.formats[unit.module]] if unit.module in job.formats else "bf16"
    if isinstance(unit, Bank):
        specs = job.dialect.bank_specs(unit, kind)
        dtype = _plain_dtype(job, unit.tensors[0])
        return [Spec(s.name, dtype, s.shape) if kind == "bf16" else s for s in specs]
    return job.dialect.matrix_specs(unit.module, unit.rows, unit.cols, kind)


def _plain_dtype(job: Job, name: str) -> str:
    dtype = job.folder.entry(name).dtype
    return "BF16" if job.rest == "bf16" and dtype in FLOATS and not name.endswith(EXACT) else dtype


def _chunks(count: int, nbytes: int) -> Iterator[range]:
    step = max(1, count * CHUNK_BYTES // max(nbytes, 1))
    for start in range(0, count, step):
        yield range(start, min(start + step, count))


def _write_bank(job: Job, bank: Bank, experts: range, writer: Writer, scratch: Scratch) -> _Done:
    format, reused = job.formats.get(bank.module), 0
    as_stored = format is None or job.sidecar is not None
    first, down = bank.read(job.folder, experts, None if as_stored else scratch)
    values = len(experts) * (bank.rows + bank.width) * bank.hidden
    nbytes = values * DTYPES[job.folder.entry(bank.tensors[0]).dtype].itemsize
    if format is None:
        dtype = torch.bfloat16 if job.rest == "bf16" else first.dtype
        pieces = job.dialect.bank_tensors(bank, experts.start, first.to(dtype), down.to(dtype))
    else:
        into = _encode(first, format, bank.module, scratch)
        out = _encode(down, format, bank.module, scratch)
        if job.sidecar is not None:
            into, out, reused = _restore(job.sidecar, bank, experts, (first, down), (into, out))
        if job.observe is not None:
            job.observe(bank.module, first, into)
            job.observe(bank.module, down, out)
        pieces = job.dialect.bank_tensors(bank, experts.start, into, out)
    writer.put_all(pieces)
    return _Done(nbytes, reused)


def _restore(
    sidecar: Sidecar,
    bank: Bank,
    experts: range,
    weights: tuple[Tensor, Tensor],
    fresh: tuple[Packed, Packed],
) -> tuple[Packed, Packed, int]:
    """Kept codes in place of fresh ones for every expert whose weights did not change."""
    kept = [sidecar.expert(bank, expert, fresh[0].kind) for expert in experts]
    into = [kept_codes.reuse(k and k[0], weights[0], fresh[0], i) for i, k in enumerate(kept)]
    out = [kept_codes.reuse(k and k[1], weights[1], fresh[1], i) for i, k in enumerate(kept)]
    reused = 0
    for k, a, b in zip(kept, into, out, strict=True):
        reused += 0 if k is None else (a is k[0]) * len(bank.inputs) + (b is k[1])
    return stack(into), stack(out), reused


def _encode(weight: Tensor, format: str, module: str, scratch: Scratch) -> Packed:
    try:
        return encode(scratch.float32(weight), format)
    except CheckpointError as error:
        raise CheckpointError(f"{module}: {error}") from None


def _write_linears(job: Job, group: list[Linear], writer: Writer, scratch: Scratch) -> _Done:
    weights = [job.folder.read(linear.tensors[0]) for linear in group]
    format, start, reused = job.formats[group[0].module], 0, 0
    whole = _encode(torch.cat(weights), format, group[0].module, scratch)
    for linear, weight in zip(group, weights, strict=True):
        packed = whole.rows(slice(start, start + linear.rows))
        start += linear.rows
        if job.sidecar is not None:
            fresh = packed
            packed = kept_codes.reuse(job.sidecar.load(linear.module, STORED[format]), weight, fresh)
            reused += packed is not fresh
        if job.observe is not None:
            job.observe(linear.module, weight, packed)
        writer.put_all(job.dialect.matrix_tensors(linear.module, packed))
    return _Done(sum(weight.nbytes for weight in weights), reused)


def _write_plain(job: Job, name: str, rows: range | None, writer: Writer, scratch: Scratch) -> _Done:  # noqa: ARG001
    tensor = job.folder.read(name, None if rows is None else slice(rows.start, rows.stop))
    nbytes = tensor.nbytes
    if NAMES[tensor.dtype] != writer.specs[name].dtype:
        tensor = tensor.to(torch.bfloat16)
    writer.put(name, tensor, 0 if rows is None else rows.start)
    return _Done(nbytes)


def _configs(job: Job) -> dict[str, dict[str, Any]]:
    written, plain = [], []
    for unit in job.units:
        kind = job.formats.get(unit.module)
        modules = job.dialect.bank_modules(unit) if isinstance(unit, Bank) else [unit.module]
        if kind is not None:
            written += [Written(module=module, kind=STORED[kind]) for module in modules]
        else:
            plain += modules
    config = {key: value for key, value in job.folder.config.items() if key != "quantization_config"}
    if job.rest == "bf16":
        config["dtype"] = "bfloat16"
        config.pop("torch_dtype", None)
    return job.dialect.configs(config, written, plain)
