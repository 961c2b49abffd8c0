"""`nybble.convert`: precision from the recipe and, with a mesh, experts shared out among ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from nybble import formats
from nybble.errors import RecipeError
from nybble.formats.philox import GROUP
from nybble.layers import Experts, Report
from nybble.layers import convert as convert_layers
from nybble.layers.convert import unfit
from nybble.layers.experts import up_name
from nybble.layers.operand import shape_of
from nybble.parallel.exchange import Exchange
from nybble.parallel.mesh import Mesh, expert_mesh, part
from nybble.parallel.wire import Monitor, Wire
from nybble.recipes import LEGS, Recipe, Row, Traffic, load_recipe, resolve
from nybble.recipes.traffic import FORMATS


def convert(
    model: nn.Module,
    recipe: str | Path | Mapping[str, Any] | Recipe,
    seed: int = 0,
    steps: int | None = None,
    *,
    mesh: Mesh | DeviceMesh | None = None,
    monitor: Monitor | None = None,
    legs: str | None = None,
) -> Report:
    """Give each linear layer and each module of fused experts in `model` the precision that `recipe` says.

    Modules are swapped in place and parameters keep their names; see `nybble.layers.convert`. With a `mesh`,
    the experts of each module are shared out among the ranks of its dimension "expert" (or of its only one):
    their parameters become DTensors, sharded over experts, and tokens travel in the recipe's `[traffic]`
    formats. All ranks call it with the same weights; make the optimiser and apply FSDP
    (`nybble.parallel.shard`) afterwards.

    Args:
        model, recipe, seed, steps: as for `nybble.layers.convert`.
        mesh: from `make_mesh`, or a DeviceMesh of your own; every rank of it has tokens of its own.
        monitor: what the exchanges report to; a new one if None.
        legs: format of all four legs, in place of the recipe's `[traffic]`.
    Raises:
        RecipeError: as `nybble.layers.convert`, and where experts cannot be shared out. The model is then
        unchanged.
    """
    chosen = load_recipe(recipe)
    if legs is not None:
        if legs not in FORMATS:
            raise RecipeError(f"legs is {legs!r}; the formats of a leg are {', '.join(FORMATS)}")
        chosen = replace(chosen, traffic=Traffic(**dict.fromkeys(LEGS, legs)))
    if mesh is None:
        return convert_layers(model, chosen, seed, steps)
    ranks = expert_mesh(mesh)
    if ranks.size() > 1:
        _check(model, chosen, steps, ranks.size())
    report = convert_layers(model, chosen, seed, steps)
    report.state.part = part(mesh)
    if ranks.size() > 1:
        modules, monitor = dict(model.named_modules()), monitor or Monitor()
        for row in report.resolved.rows:
            if row.kind == "experts":
                _share_out(modules[row.name], row, ranks, chosen.traffic, monitor)
    return report


def _check(model: nn.Module, recipe: Recipe, steps: int | None, ranks: int) -> None:
    """RecipeError unless the experts of `model` can be shared out among `ranks`."""
    for row in resolve(recipe, model, steps).rows:
        if row.kind != "experts":
            continue
        if row.experts % ranks:
            raise RecipeError(
                f"{row.name} has {row.experts} experts, which {ranks} ranks cannot share out equally; "
                "choose a number of ranks that divides them"
            )
        fault = "is protected" if row.protected else unfit(row, model.get_submodule(row.name))
        if fault:
            raise RecipeError(f"{row.name} {fault}, so ranks cannot share its experts out")
        for role, axis in (("fprop.w", -1), ("dgrad.w", -2)):
            operand = row.gemms.get(role)
            odd = [nk for nk in row.shapes if math.prod(shape_of(nk, operand, axis)) % GROUP]
            if odd and operand.rounding != "nearest":
                raise RecipeError(
                    f"{row.name}: {role} is rounded at random, for which ranks can share out experts whose "
                    f"matrices have a multiple of {GROUP} weights, not {odd[0][0]}x{odd[0][1]}"
                )
            if formats.get(operand.format).two_level and operand.outer == "tensor":
                raise RecipeError(
                    f"{row.name}: {role} has one outer scale for the experts of all ranks; "
                    "set outer = 'matrix'"
                )


def _share_out(module: nn.Module, row: Row, ranks: DeviceMesh, traffic: Traffic, monitor: Monitor) -> None:
    assert isinstance(module, Experts)
    for name in (up_name(module), "down_proj"):
        whole = getattr(module, name)
        sharded = distribute_tensor(whole.detach(), ranks, [Shard(0)], src_data_rank=None)
        setattr(module, name, nn.Parameter(sharded, requires_grad=whole.requires_grad))
    each = row.experts // ranks.size()
    module.first_expert = each * ranks.get_local_rank()
    module.exchange = Exchange(
        wire=Wire(ranks.get_group(), monitor, row.name),
        traffic=traffic,
        experts_each=each,
    )
    module.specs = module.exchange.specs(*module.specs)
