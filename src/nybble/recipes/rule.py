"""One rule of a recipe: which modules, in which layers, get which operands."""

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

from nybble.errors import RecipeError
from nybble.recipes.operand import Operand

KINDS = ("linear", "experts")


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Which decoder layers a rule covers, counted over the stack that the module belongs to."""

    edge: str
    """"first" or "last"."""
    count: int | None = None
    """A number of layers; or None when a fraction is given."""
    fraction: Fraction | None = None
    """A share of the layers, rounded up so that it is never empty."""

    def size(self, total: int) -> int:
        """How many of `total` layers are covered."""
        if self.count is not None:
            return min(self.count, total)
        assert self.fraction is not None
        # A decimal such as 0.1667 stands for 1/6: it must not spill over into one layer more.
        return min(total, math.ceil(total * self.fraction - Fraction(1, 100)))

    def covers(self, index: int, total: int) -> bool:
        """True when layer `index` of `total` is covered."""
        return index < self.size(total) if self.edge == "first" else index >= total - self.size(total)

    def text(self) -> str:
        """As it is written in a recipe: `last_fraction = 1/6`."""
        return (
            f"{self.edge} = {self.count}"
            if self.fraction is None
            else f"{self.edge}_fraction = {self.fraction}"
        )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Last match wins, operand by operand: a rule replaces the operands that it names and leaves the
    others."""

    modules: tuple[str, ...]
    """Anchored globs over whole module names: `*` is within one name part, `**` any number of parts."""
    operands: tuple[tuple[str, Operand], ...]
    """(role, operand) pairs, such as ("fprop.x", Operand(...))."""
    kind: str | None = None
    """"linear", "experts", or None for both."""
    layers: Layers | None = None
    """None is all layers, and modules outside the stack of layers."""
    after: int | Fraction | None = None
    """In force from this optimiser step on, or from this fraction of all steps on; None is from the start."""
    optional: bool = False
    """A rule that matches nothing is an error unless it is optional."""
    hint: str = ""
    """What to do when it matches nothing; ends the error message."""
    where: str = field(default="", compare=False)
    """File and line, for messages."""

    def start(self, steps: int | None) -> int:
        """The optimiser step, from 0, from which it is in force in a run of `steps`.

        Raises RecipeError where that hangs on a number of steps that is not known.
        """
        if not isinstance(self.after, Fraction):
            return self.after or 0
        if steps is None:
            raise RecipeError(
                f"{self.where}: this rule is in force after {float(self.after):g} of the steps, so say how "
                "many there are: convert(model, recipe, steps=...)"
            )
        return math.floor(self.after * steps)

    def matches(self, name: str, kind: str, layer: tuple[int, int] | None) -> bool:
        """True for module `name` of `kind` that is layer `layer` = (index, total), None outside the stack."""
        if self.kind not in (None, kind) or not any(match(glob, name) for glob in self.modules):
            return False
        return self.layers is None or (layer is not None and self.layers.covers(*layer))


def match(glob: str, name: str) -> bool:
    """True when the whole dotted `name` fits `glob`; `{a,b}` lists alternatives within a part."""
    return _compile(glob).fullmatch("." + name) is not None


@cache
def _compile(glob: str) -> re.Pattern[str]:
    # Each part carries its own leading dot (`match` prepends one), so that `**` may stand for no part at all.
    return re.compile(
        "".join(r"(?:\.[^.]+)*" if part == "**" else r"\." + _part(part) for part in glob.split("."))
    )


def _part(part: str) -> str:
    out = ""
    for token in re.findall(r"\*|\{[^{}]*\}|[^*{}]+|[{}]", part):
        if token == "*":
            out += r"[^.]*"
        elif len(token) > 1 and token[0] == "{" and token[-1] == "}":
            out += "(?:" + "|".join(re.escape(choice) for choice in token[1:-1].split(",")) + ")"
        else:
            out += re.escape(token)
    return out
