"""Which matrix of a folder is written in which format: from the recipe that trained it, from imported codes,
or uniform.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from nybble import formats
from nybble.checkpoints.dialects import Dialect
from nybble.checkpoints.packed import STORED
from nybble.checkpoints.source import Bank, Linear, Unit, canonical, count_layers, layer_of
from nybble.errors import CheckpointError
from nybble.recipes import GemmTable, Recipe
from nybble.recipes.resolve import PROTECTED
from nybble.recipes.rule import Layers, match

EMBEDDINGS = ("**.{embed_tokens,embed,wte,embeddings}", "**.{unembed,wrap}")
FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Linears that serving programs run as one GEMM and that must share an outer scale there."""

Formats = Mapping[str, str]
"""Format of the trainer by module as in the file; modules that are not in it are BF16."""


def from_recipe(recipe: Recipe, units: list[Unit], linears: bool) -> dict[str, str]:
    """What the recipe's forward pass used for each weight.

    Raises:
        CheckpointError: a weight was rounded stochastically, or all experts shared one outer scale: neither
            can be
            written bit for bit.
    """
    total = count_layers([unit.module for unit in units])
    chosen: dict[str, str] = {}
    for unit in units:
        name, kind = canonical(unit.module), "experts" if isinstance(unit, Bank) else "linear"
        if kind == "linear" and (not linears or protected(unit, recipe.allow)):
            continue
        layer = layer_of(unit.module)
        gemms = GemmTable()
        for rule in recipe.rules:
            if rule.matches(name, kind, None if layer is None else (layer, total)):
                gemms = gemms.override(dict(rule.operands))
        weight = gemms.fprop.w
        if weight.format in ("bf16", "fp32"):
            continue
        if weight.rounding != "nearest":
            raise CheckpointError(
                f"{name}: the recipe {recipe.name} rounds this weight stochastically in the forward pass, so "
                'there is no one set of codes to export; set its rounding to "nearest"'
            )
        if kind == "experts" and formats.get(weight.format).two_level and weight.outer != "matrix":
            raise CheckpointError(
                f"{name}: the recipe {recipe.name} has one outer scale over all experts; serving needs "
                'outer = "matrix"'
            )
        chosen[unit.module] = weight.format
    return chosen


def uniform(units: list[Unit], format: str, scope: str, last_mxfp8: Fraction) -> dict[str, str]:
    """One format for all experts, or for all linears too, with MXFP8 in the last fraction of the layers."""
    total = count_layers([unit.module for unit in units])
    last = Layers(edge="last", fraction=last_mxfp8)
    banks = any(isinstance(unit, Bank) for unit in units)
    chosen = {}
    for unit in units:
        if isinstance(unit, Linear) and (
            protected(unit) or scope == "experts" or (scope == "auto" and banks)
        ):
            continue
        layer = layer_of(unit.module)
        late = layer is not None and last.fraction and last.covers(layer, total)
        chosen[unit.module] = "mxfp8" if late else format
    return chosen


def protected(unit: Unit, allow: tuple[str, ...] = ()) -> bool:
    """Heads, routers and embeddings, which stay in high precision."""
    name = canonical(unit.module)
    globs = () if any(match(glob, name) for glob in allow) else (*PROTECTED, *EMBEDDINGS)
    return any(match(glob, name) for glob in globs)


def groups(units: list[Unit], chosen: Formats, fuse: bool) -> list[list[Unit]]:
    """Units in order; with `fuse`, linears that will run as one GEMM together, so that they share an outer
    scale.
    """
    grouped: list[list[Unit]] = []
    open_groups: dict[tuple[str, int], list[Unit]] = {}
    for unit in units:
        parent, _, leaf = unit.module.rpartition(".")
        index = next((i for i, names in enumerate(FUSED) if leaf in names), None)
        if not fuse or index is None or isinstance(unit, Bank) or unit.module not in chosen:
            grouped.append([unit])
            continue
        if (parent, index) not in open_groups:
            open_groups[parent, index] = []
            grouped.append(open_groups[parent, index])
        open_groups[parent, index].append(unit)
    return grouped


def check(units: list[Unit], chosen: Formats, dialect: Dialect) -> None:
    """Raises CheckpointError naming the first matrix that the dialect cannot hold."""
    for unit in units:
        if unit.module not in chosen:
            continue
        format = chosen[unit.module]
        if STORED.get(format) not in dialect.kinds:
            raise CheckpointError(
                f"{unit.module}: the {dialect.name} dialect cannot hold {format}; it holds "
                f"{', '.join(dialect.kinds)}"
            )
        block = formats.get(STORED[format]).block_cols
        assert block is not None
        for cols in (unit.hidden, unit.width) if isinstance(unit, Bank) else (unit.cols,):
            if cols % block:
                raise CheckpointError(
                    f"{unit.module}: {cols} input features are no multiple of {block}, the block of "
                    f"{format}; "
                    "no serving program reads a part of a block, so train with another width or keep this "
                    "layer in bf16"
                )
