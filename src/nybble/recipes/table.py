"""The resolved table of a model: one row for each module with GEMMs, and its text as printed and saved."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from nybble.recipes.operand import OPERANDS, GemmTable
from nybble.recipes.recipe import Recipe

_LEGEND = (
    "format:outer scale   ~ stochastic rounding   ~~ MS-EDEN   < re-rounded from the value of the forward "
    "pass   = the codes of dgrad\n-mean the mean over tokens is subtracted   +h16 behind a Hadamard "
    "transform of 16   +h128~ with drawn signs"
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One module with GEMMs. Its index in the table is the layer id of its random draws."""

    name: str
    kind: str
    """"linear" or "experts"."""
    shapes: tuple[tuple[int, int], ...]
    """(N, K) of each weight: one for a linear, two for experts."""
    experts: int = 1
    """E; 1 for a linear."""
    gemms: GemmTable
    protected: bool = False
    """Left as it is: head, router. Not converted, whatever the rules say."""
    rules: tuple[str, ...] = ()
    """File and line of the rules that matched, in order."""

    def shape_text(self) -> str:
        """`8 x (1024x256, 256x512)`: E x (N x K)."""
        text = ", ".join(f"{n}x{k}" for n, k in self.shapes)
        return f"{self.experts} x ({text})" if self.kind == "experts" else text

    def cells(self) -> tuple[str, ...]:
        """Kind, shape and the six operands."""
        formats = ("kept",) * len(OPERANDS) if self.protected else self.gemms.texts()
        return (self.kind, self.shape_text(), *formats)


@dataclass(frozen=True, kw_only=True)
class Table:
    """What a recipe means for one model."""

    recipe: Recipe
    rows: tuple[Row, ...]
    """At the first step."""
    later: tuple[tuple[int, tuple[Row, ...]], ...] = ()
    """(step, rows) of each change within the run; the modules are the same, in the same order."""
    kept: tuple[str, ...] = ()
    """Names of other modules with parameters: embeddings, routers, norms, convolutions. Never quantised."""

    def row(self, name: str) -> Row:
        """The row of module `name`; KeyError if it has none."""
        return {row.name: row for row in self.rows}[name]

    def text(self) -> str:
        """The table as text, equal rows of different layers on one line; of later ones what changes."""
        sections = [_lines(self.rows)]
        before = self.rows
        for _, rows in self.later:
            changed = [row for row, old in zip(rows, before, strict=True) if row.gemms != old.gemms]
            sections.append(_lines(changed))
            before = rows
        lines = [line for section in sections for line in section]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        out = [f"recipe {self.recipe.name} ({self.recipe.hash()}), masters {self.recipe.masters}"]
        for section, start in zip(sections, (0, *(start for start, _ in self.later)), strict=True):
            if start:
                out.append(f"from step {start} on" + ("" if section[1:] else ": no change"))
            out += [
                "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
                for line in section[bool(start) :]
            ]
        if self.kept:
            last = dict.fromkeys(name.rsplit(".", 1)[-1] for name in self.kept)
            out.append("kept in high precision: " + ", ".join(last))
        if self.recipe.traffic.changed():
            out.append(f"traffic between ranks that share experts: {self.recipe.traffic.text()}")
        out.append(_LEGEND)
        return "\n".join(out) + "\n"


def _lines(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        groups.setdefault((_template(row.name), *row.cells()), []).append(row.name)
    head = ("module", "kind", "shape", *OPERANDS)
    return [head, *((_collapse(names), *key[1:]) for key, names in groups.items())]


def _template(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _collapse(names: list[str]) -> str:
    """`layers.{0-3,5}.mlp` for names that differ in their first number only, else each on its own."""
    if len(names) == 1:
        return names[0]
    parts = [re.fullmatch(r"(.*?\.)(\d+)((?:\..*)?)", name) for name in names]
    heads = {(part[1], part[3]) for part in parts if part}
    if None in parts or len(heads) != 1:
        return ", ".join(names)
    head, tail = next(iter(heads))
    return f"{head}{{{_ranges(sorted(int(part[2]) for part in parts if part))}}}{tail}"


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
