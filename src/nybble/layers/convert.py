"""Swap the modules of a model for quantised ones, in place, without renaming a parameter."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from nybble.errors import NybbleError, RecipeError
from nybble.layers.experts import DOWN, Experts, experts_class
from nybble.layers.linear import Linear, linear_class
from nybble.layers.step import StepState
from nybble.layers.weight_cache import WeightCache
from nybble.layers.weights import Spec
from nybble.recipes import GemmTable, Recipe, Row, Table, load_recipe, resolve


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """What `convert` did."""

    recipe: Recipe
    resolved: Table
    state: StepState
    """Shared by the converted layers; `set_step` moves it."""

    def __repr__(self) -> str:
        count = sum(row.gemms.quantised and not row.protected for row in self.resolved.rows)
        return f"Report(recipe {self.recipe.name}, {count} modules quantised; table() shows all)"

    def table(self) -> str:
        """The resolved precision table as text."""
        return self.resolved.text()


def convert(
    model: nn.Module,
    recipe: "str | Path | Mapping[str, Any] | Recipe",
    seed: int = 0,
    steps: int | None = None,
) -> Report:
    """Give each linear layer and each module of fused experts in `model` the precision that `recipe` says.

    Modules are swapped in place; parameters stay the same objects under the same names, so that state dicts,
    optimisers and tied weights work unchanged. A second call replaces the precision of the first.

    Args:
        model: any module; `nn.Linear` and fused experts (`gate_up_proj` [E, 2I, H] or `up_proj` [E, I, H],
            and `down_proj` [E, H, I]) are found inside it.
        recipe: a built-in name, a TOML file, a dict or a Recipe.
        seed: of the draws of stochastic rounding; `set_step` may change it.
        steps: of the run, which a recipe that changes after a fraction of them must know; `set_step` then
            makes the change.
    Raises:
        RecipeError: when a rule matches nothing, a feature axis is not a whole number of blocks, or a module
            cannot be computed as the recipe asks. The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise NybbleError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    chosen = load_recipe(recipe)
    table = resolve(chosen, model, steps)
    modules = dict(model.named_modules())
    faults = {row.name: unfit(row, modules[row.name]) for row in table.rows}
    for row in (row for rows in (table.rows, *(rows for _, rows in table.later)) for row in rows):
        if faults[row.name] and not row.protected and row.gemms.quantised:
            raise RecipeError(
                f"{row.name} ({type(modules[row.name]).__name__}) {faults[row.name]}, which Nybble's experts "
                "do not compute; leave it in bf16 by a later rule"
            )
    state = StepState(seed)
    for layer, row in enumerate(table.rows):
        if not row.protected and not faults[row.name]:
            phases = [(0, row.gemms), *((start, rows[layer].gemms) for start, rows in table.later)]
            _swap(modules[row.name], row, layer, chosen, state, tuple(phases))
    for parameter in model.parameters():
        state.keys(parameter.device)
    return Report(recipe=chosen, resolved=table, state=state)


def unfit(row: Row, module: nn.Module) -> str:
    """Why `module` cannot be computed by Nybble's layers; empty when it can."""
    if row.kind != "experts":
        return ""
    for flag, fault in (
        ("is_transposed", "stores its weights as [E, in, out]"),
        ("has_bias", "has biases"),
        ("has_post_expert_norm", "has a norm behind its experts"),
    ):
        if getattr(module, flag, False):
            return fault
    return "" if hasattr(module, "act_fn") else "has no act_fn"


def _swap(
    module: nn.Module,
    row: Row,
    layer: int,
    recipe: Recipe,
    state: StepState,
    phases: tuple[tuple[int, GemmTable], ...],
) -> None:
    # A layer of one precision has no phases to enter.
    scheduled = any(gemms != row.gemms for _, gemms in phases)
    attributes: dict[str, Any] = {"step_state": state, "phases": phases if scheduled else ()}
    if row.kind == "linear":
        module.__class__ = linear_class(_original(type(module)))
        attributes |= {"spec": Spec(row.gemms, layer, 0), "weight_cache": WeightCache(recipe.cache)}
    else:
        module.__class__ = experts_class(_original(type(module)))
        attributes |= {
            "specs": (Spec(row.gemms, layer, 0), Spec(row.gemms, layer, DOWN)),
            "weight_caches": (WeightCache(recipe.cache), WeightCache(recipe.cache)),
            "keep": recipe.keep,
        }
    for name, value in attributes.items():
        setattr(module, name, value)


def _original(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a module had before it was ever converted."""
    if cls is Linear:
        return nn.Linear
    return cls.__bases__[1] if issubclass(cls, (Linear, Experts)) else cls
