"""Apply a recipe's rules to the modules of a model."""

import difflib
import re
from collections.abc import Iterator

import torch
from torch import nn

from nybble.errors import RecipeError
from nybble.formats import table as formats
from nybble.recipes.operand import OPERANDS, GemmTable
from nybble.recipes.recipe import Recipe
from nybble.recipes.rule import Rule, match
from nybble.recipes.table import Row, Table

PROTECTED = (
    "**.{lm_head,embed_out,score}",
    "**.{gate,router,shared_expert_gate}",
    "**.{gate,router}.**",
)
"""Linear layers that stay in high precision unless the recipe's `allow` names them: heads and routers. A
wrong bit there moves a token to another expert or a probability by a factor, and they cost next to
nothing."""

_LAYER = re.compile(r"(?:^|.*?\.)(?:layers|h|blocks)\.(\d+)(?=\.|$)")


def kind_of(module: nn.Module) -> str | None:
    """ "experts" for fused experts [E, N, K], "linear" for a linear layer, None for anything else."""
    down = getattr(module, "down_proj", None)
    up = getattr(module, "gate_up_proj", getattr(module, "up_proj", None))
    if isinstance(down, nn.Parameter) and isinstance(up, nn.Parameter) and down.dim() == up.dim() == 3:
        return "experts"
    return "linear" if isinstance(module, nn.Linear) else None


def resolve(recipe: Recipe, model: nn.Module, steps: int | None = None) -> Table:
    """The precision of each module of `model`, over a run of `steps` if the recipe changes within it.

    Raises RecipeError when a rule matches nothing, or when a feature axis (K of fprop, N of dgrad) is not a
    whole number of blocks of the format that it gets.
    """
    named = [(name, module) for name, module in model.named_modules() if kind_of(module)]
    layers = _layers(model)
    protected = {name for name, module in named if _protected(recipe, model, name, module)}
    hit: set[Rule] = set()
    phases = []
    for start in recipe.starts(steps):
        rows = []
        for name, module in named:
            gemms, where = GemmTable(), []
            kind = kind_of(module) or ""
            for rule in recipe.rules:
                if name in protected or not rule.matches(name, kind, layers.get(name)):
                    continue
                hit.add(rule)
                if rule.start(steps) <= start:
                    gemms = gemms.override(dict(rule.operands))
                    where.append(rule.where)
            rows.append(_row(name, module, kind, gemms, name in protected, tuple(where)))
        phases.append((start, tuple(rows)))
    for rule in recipe.rules:
        if rule not in hit and not rule.optional:
            raise RecipeError(_nothing(rule, named, protected, layers))
    for row in (row for _, rows in phases for row in rows):
        if fault := row.gemms.fault(row.kind):
            raise RecipeError(f"{row.name}: {fault} ({row.rules[-1] if row.rules else recipe.source})")
        _check_blocks(recipe, row)
    inside = {name for name, _ in named}
    return Table(recipe=recipe, rows=phases[0][1], later=tuple(phases[1:]), kept=tuple(_kept(model, inside)))


def _layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(index, total) of the decoder layer of each module that is in one; stacks are counted apart."""
    found: dict[str, tuple[str, int]] = {}
    totals: dict[str, int] = {}
    for name, _ in model.named_modules():
        if hit := _LAYER.match(name):
            stack, index = name[: hit.start(1)], int(hit[1])
            found[name] = (stack, index)
            totals[stack] = max(totals.get(stack, 0), index + 1)
    return {name: (index, totals[stack]) for name, (stack, index) in found.items()}


def _protected(recipe: Recipe, model: nn.Module, name: str, module: nn.Module) -> bool:
    if any(match(glob, name) for glob in recipe.allow):
        return False
    if any(match(glob, name) for glob in PROTECTED):
        return True
    weight = getattr(module, "weight", None)
    # A head may have any name; a weight shared with an embedding is an embedding.
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    tied = any(weight is other.weight for other in model.modules() if isinstance(other, nn.Embedding))
    return module is head or (weight is not None and tied)


def _row(
    name: str, module: nn.Module, kind: str, gemms: GemmTable, protected: bool, rules: tuple[str, ...]
) -> Row:
    weights = (getattr(module, key, None) for key in ("weight", "gate_up_proj", "up_proj", "down_proj"))
    shapes = [tuple(w.shape) for w in weights if isinstance(w, torch.Tensor)]
    transposed = getattr(module, "is_transposed", False)
    return Row(
        name=name,
        kind=kind,
        shapes=tuple((s[-1], s[-2]) if transposed else (s[-2], s[-1]) for s in shapes),
        experts=shapes[0][0] if kind == "experts" else 1,
        gemms=gemms,
        protected=protected,
        rules=rules,
    )


def _check_blocks(recipe: Recipe, row: Row) -> None:
    if row.protected or recipe.tails == "allow":
        return
    for n, k in row.shapes:
        for role in OPERANDS[:4]:
            operand = row.gemms.get(role)
            along, size = ("K", k) if role.startswith("fprop") else ("N", n)
            across, other = ("N", n) if along == "K" else ("K", k)
            spec = formats.get(operand.format)
            rows = spec.block_rows if role.endswith(".w") else 1  # square blocks of a weight span both axes
            for axis, length, block in ((along, size, spec.block_cols), (across, other, rows)):
                if block and length % block:
                    where = row.rules[-1] if row.rules else recipe.source
                    raise RecipeError(
                        f"{row.name}: its {axis} = {length} is not a multiple of {block}, the block of "
                        f"{operand.format} in {role} ({where}); make it a multiple of {block}, give this "
                        'module another format in a later rule, or set tails = "allow" under [blocks]'
                    )


def _nothing(
    rule: Rule,
    named: list[tuple[str, nn.Module]],
    protected: set[str],
    layers: dict[str, tuple[int, int]],
) -> str:
    globs = ", ".join(repr(glob) for glob in rule.modules)
    what = f"{rule.where}: the rule modules = {globs}"
    what += f", kind = {rule.kind!r}" if rule.kind else ""
    what += f", layers = {{ {rule.layers.text()} }}" if rule.layers else ""
    what += " matches no module of this model"
    by_name = [name for name, _ in named if any(match(glob, name) for glob in rule.modules)]
    shut = [name for name in by_name if name in protected]
    kinds = sorted({kind_of(module) or "" for name, module in named if name in by_name})
    if [name for name, _ in named] == [""]:
        return what + ", which is itself a layer and has no name; put it into a torch.nn.Sequential"
    if rule.hint:
        what += f": {rule.hint}"
    elif shut and len(shut) == len(by_name):
        what += f": {shut[0]} is protected; name it in allow = [{shut[0]!r}] to quantise it all the same"
    elif by_name and rule.kind and rule.kind not in kinds:
        what += f": {by_name[0]} is of kind {kinds[0]!r}"
    elif by_name and rule.layers:
        counts = sorted({total for name in by_name if name in layers for total in [layers[name][1]]})
        what += f": {by_name[0]} is not in those layers" + (f" of {counts[0]}" if counts else "")
    else:
        names = sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name, _ in named})
        close = difflib.get_close_matches(rule.modules[0], names, n=3, cutoff=0.3) or names[:3]
        what += f"; near misses: {', '.join(close)}" if close else "; it has no linear layers and no experts"
    return what if rule.hint else what + ". Correct the glob, or set optional = true"


def _kept(model: nn.Module, inside: set[str]) -> Iterator[str]:
    for name, module in model.named_modules():
        if name and name not in inside and next(module.parameters(recurse=False), None) is not None:
            yield name
