"""The checks of `nybble validate`, each a known fault of some exporter or loader."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nybble import formats
from nybble.checkpoints.dialects import Reader, Stored
from nybble.checkpoints.header import DTYPES, section
from nybble.checkpoints.safetensors_io import Folder
from nybble.checkpoints.source import FLOATS
from nybble.errors import CheckpointError

Problem = tuple[str, str, str]
"""(check, tensor or module, sentence)."""

EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
ROW_PARALLEL = ("down_proj", "o_proj", "w2", "wo_ud", "out_proj", "dense")
"""Leaves that tensor parallelism splits along K; others are split along N."""
FUSED = (("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj"))
PLAUSIBLE = 1000.0
"""No weight of a sane model decodes beyond this; the reciprocal of a scale moves the largest one far beyond
it.
"""


def structure(folder: Folder, stored: list[Stored]) -> Iterator[Problem]:
    """missing, dtype, shape, block: what a loader needs before it reads a byte."""
    for item in stored:
        for name in item.tensors:
            if name not in folder:
                yield (
                    "missing",
                    name,
                    f"{item.module} is {item.kind} and needs it; loaders read garbage in its place",
                )
            elif folder.entry(name).dtype != item.expected.get(name, folder.entry(name).dtype):
                yield "dtype", name, f"is {folder.entry(name).dtype}, must be {item.expected[name]}"
        block = formats.get("fp8-128x128" if item.kind == "fp8" else item.kind).block_cols
        shape = item.shape(folder)
        if block is None or item.scales not in folder or item.kind == "fp8":
            continue
        if shape[-1] % block:
            yield "block", item.codes, f"K = {shape[-1]} is not a multiple of the block of {block}"
        want = (*shape[:-1], -(-shape[-1] // block))
        if folder.entry(item.scales).shape != want:
            yield "shape", item.scales, f"is {list(folder.entry(item.scales).shape)}, must be {list(want)}"
    yield from _experts(folder, stored)


def _experts(folder: Folder, stored: list[Stored]) -> Iterator[Problem]:
    """Every expert of a layer is there with the same parts, never-routed ones too."""
    config = folder.config
    text = section(config, "text_config") or config
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    count = next((text[name] for name in names if type(text.get(name)) is int), None)
    banks: dict[str, dict[int, set[str]]] = {}
    for name in folder:
        if match := EXPERT.match(name):
            banks.setdefault(match[1], {}).setdefault(int(match[2]), set()).add(name[match.end(2) + 1 :])
    for bank, experts in banks.items():
        full = set().union(*experts.values())
        total = count if count is not None else max(experts) + 1
        absent = [e for e in range(min(total, 1 << 20)) if e not in experts]
        if absent:
            yield "missing", bank, f"experts {absent[:8]} of {total} are not there"
        for expert, parts in experts.items():
            for part in sorted(full - parts):
                yield "missing", f"{bank}.{expert}.{part}", "other experts of this layer have it"
    for item in stored:
        shape = item.shape(folder)
        if len(shape) == 3 and count is not None and shape[0] != count:
            yield "missing", item.codes, f"holds {shape[0]} experts, the config says {count}"


def values(folder: Folder, stored: list[Stored], step: Callable[[int], None]) -> Iterator[Problem]:
    """nan-scale, reciprocal: scales read one tensor at a time."""
    for item in stored:
        if item.scales in folder and item.kind != "fp8":
            yield from _block_scales(folder, item)
        for name in (item.outer, item.denominator, item.input):
            if name is None or name not in folder or DTYPES[folder.entry(name).dtype] != torch.float32:
                continue
            scale = folder.read(name)
            if not bool((torch.isfinite(scale) & (scale > 0)).all()):
                yield (
                    "nan-scale",
                    name,
                    f"holds {scale.flatten()[:4].tolist()}; outer scales are finite and positive",
                )
        yield from _reciprocal(folder, item)
        step(folder.entry(item.codes).nbytes)


def _block_scales(folder: Folder, item: Stored) -> Iterator[Problem]:
    entry = folder.entry(item.scales)
    if DTYPES[entry.dtype].itemsize != 1:
        return
    scales = folder.read(item.scales).view(torch.uint8)
    if item.kind == "nvfp4":
        nan, negative = (scales & 0x7F) == 0x7F, (scales & 0x80) != 0
        if bool((negative & ~nan).any()):
            yield "nan-scale", item.scales, f"{int((negative & ~nan).sum())} block scales are negative"
    else:
        nan = scales == 255
    if bool(nan.any()):
        yield "nan-scale", item.scales, f"{int(nan.sum())} of {scales.numel()} block scales are NaN"


def _reciprocal(folder: Folder, item: Stored) -> Iterator[Problem]:
    if item.outer is None or any(name not in folder for name in (item.outer, item.scales)):
        return
    if folder.entry(item.scales).dtype != "F8_E4M3" or folder.entry(item.outer).dtype != "F32":
        return
    outer = folder.read(item.outer).flatten().double()
    scales = folder.read(item.scales).float()
    largest = formats.get(item.kind).element_max * float(scales.nan_to_num(0).amax() if scales.numel() else 0)
    multiplier = outer if item.convention == "multiplier" else 1 / outer
    if item.convention == "amax":
        if item.denominator is None or item.denominator not in folder:
            return
        multiplier = outer / folder.read(item.denominator).flatten().double()
    multiplier = multiplier[torch.isfinite(multiplier) & (multiplier > 0)]
    if not multiplier.numel() or not largest:
        return
    top = float(multiplier.max())
    if largest * top > PLAUSIBLE and largest / top < PLAUSIBLE:
        yield (
            "reciprocal",
            item.outer,
            f"weights would reach {largest * top:.3g}, and {largest / top:.3g} with its reciprocal: "
            f"the number to {'divide by' if item.convention == 'divisor' else 'multiply with'} belongs here",
        )


def fused_scales(folder: Folder, stored: list[Stored]) -> Iterator[Problem]:
    """gate-up-scale: matrices that run as one GEMM share their outer scale."""
    by_module = {item.module: item for item in stored if item.outer is not None and item.outer in folder}
    for module, item in by_module.items():
        parent, _, leaf = module.rpartition(".")
        for names in FUSED:
            if leaf != names[0]:
                continue
            for other in names[1:]:
                sibling = by_module.get(f"{parent}.{other}")
                if sibling is None or sibling.outer is None or item.outer is None:
                    continue
                a, b = folder.read(item.outer).flatten(), folder.read(sibling.outer).flatten()
                if not torch.equal(a, b):
                    yield (
                        "gate-up-scale",
                        f"{parent}.{leaf}",
                        f"{item.outer} is {a[:1].tolist()} and {sibling.outer} {b[:1].tolist()}; "
                        "servers use one of them for both",
                    )


def tensor_parallel(folder: Folder, stored: list[Stored], tp: int) -> Iterator[Problem]:
    """tp-split: no rank's share of K ends inside a block, and N divides."""
    for item in stored:
        block = formats.get("fp8-128x128" if item.kind == "fp8" else item.kind).block_cols or 1
        *_, rows, cols = item.shape(folder)
        leaf = item.module.rpartition(".")[2]
        if leaf in ROW_PARALLEL and cols % (block * tp):
            yield "tp-split", item.codes, f"K = {cols} over {tp} ranks cuts a block of {block}"
        elif leaf not in ROW_PARALLEL and rows % (tp * (2 if leaf == "w13" else 1)):
            yield "tp-split", item.codes, f"N = {rows} does not divide over {tp} ranks"


def declared(
    folder: Folder, stored: list[Stored], dialect: Reader, hf_quant: dict[str, Any]
) -> Iterator[Problem]:
    """ignore-list, config: what the configs say is quantised is what the tensors say."""
    quantization = section(folder.config, "quantization_config")
    modules = {item.module for item in stored}
    plain = {
        name.removesuffix(".weight")
        for name, entry in folder.tensors.items()
        if name.endswith(".weight") and len(entry.shape) == 2 and entry.dtype in FLOATS
    } - modules
    if dialect.name == "compressed-tensors":
        yield from _declared_ct(quantization, modules, plain)
    elif dialect.name == "modelopt":
        if not quantization and not hf_quant:
            yield "config", "config.json", "has no quantization_config, and there is no hf_quant_config.json"
        inner = section(hf_quant, "quantization")
        for key in ("group_size", "kv_cache_quant_algo", "exclude_modules"):
            if hf_quant and key not in inner:
                yield "config", "hf_quant_config.json", f"has no {key}, which vLLM requires"
        if quantization and inner and quantization.get("quant_algo") != inner.get("quant_algo"):
            yield "config", "hf_quant_config.json", "names another quant_algo than config.json"
        excluded = quantization.get("ignore", inner.get("exclude_modules"))
        layers = section(quantization, "quantized_layers") or section(inner, "quantized_layers")
        yield from _lists(modules, plain, _names(excluded), fnmatch.fnmatchcase)
        for module in sorted(modules - set(layers)) if layers else ():
            yield "ignore-list", module, "is quantised, and quantized_layers does not name it"
        for module in sorted(set(layers) - modules):
            yield "ignore-list", module, "is in quantized_layers, and its tensors are not quantised"


def _declared_ct(quantization: dict[str, Any], modules: set[str], plain: set[str]) -> Iterator[Problem]:
    if not quantization:
        yield "config", "config.json", "has no quantization_config"
        return
    groups = section(quantization, "config_groups")
    targets = [t for name in groups for t in _names(section(groups, name).get("targets"))]
    try:
        patterns = {entry: re.compile(entry[3:]) for entry in targets if entry.startswith("re:")}
        for entry in _names(quantization.get("ignore")):
            if entry.startswith("re:"):
                patterns[entry] = re.compile(entry[3:])
    except (re.error, RecursionError) as error:
        yield "config", "config.json", f"holds a pattern that does not compile: {error}"
        return

    def hit(name: str, entry: str) -> bool:
        return patterns[entry].match(name) is not None if entry in patterns else name == entry

    if "Linear" in targets:
        yield from _lists(modules, plain, _names(quantization.get("ignore")), hit)
        return
    for module in sorted(modules):
        if not any(hit(module, target) for target in targets):
            yield "ignore-list", module, "is quantised, and no config group targets it"
    for module in sorted(plain):
        ignored = any(hit(module, entry) for entry in _names(quantization.get("ignore")))
        if not ignored and any(hit(module, target) for target in targets):
            yield "ignore-list", module, "is in high precision, and a config group targets it"


def _lists(
    modules: set[str], plain: set[str], ignore: list[str], hit: Callable[[str, str], bool]
) -> Iterator[Problem]:
    for module in sorted(modules):
        if any(hit(module, entry) for entry in ignore):
            yield "ignore-list", module, "is quantised, and the ignore list names it"
    for module in sorted(plain):
        embedding = module.rpartition(".")[2] in ("embed_tokens", "embeddings", "embed", "wte")
        if not embedding and not any(hit(module, entry) for entry in ignore):
            yield "ignore-list", module, "is in high precision, and the ignore list does not name it"


def _names(value: Any) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def guard(problems: Iterator[Problem]) -> Iterator[Problem]:
    """Turn an error that a check runs into, such as a file that ends early, into a problem and go on."""
    try:
        yield from problems
    except CheckpointError as error:
        yield "header", "", str(error)
