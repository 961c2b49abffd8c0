"""What a recipe says about one layer: the format of each operand of its three GEMMs.

y[T,N] = x[T,K] @ W[N,K].T has three GEMMs and six operands:
    fprop  x along K,  w along K
    dgrad  dy along N, w along N        dx[T,K] = dy[T,N] @ W[N,K]
    wgrad  dy along T, x along T        dW[N,K] = dy[T,N].T @ x[T,K]
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nybble.errors import RecipeError
from nybble.formats import table as formats

ROUNDINGS = ("nearest", "stochastic")
SOURCES = ("original", "forward")
OPERANDS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
# One scale a token keeps a token's numbers independent of its batch; a weight is one matrix; along T a scale
# a token would vary inside the sum over tokens, so the operands of wgrad have one scale a matrix (an expert's
# own tokens).
OUTERS = {
    "fprop.x": ("row", "tensor"),
    "fprop.w": ("matrix", "tensor"),
    "dgrad.dy": ("row", "tensor"),
    "dgrad.w": ("matrix", "tensor"),
    "wgrad.dy": ("matrix", "tensor"),
    "wgrad.x": ("matrix", "tensor"),
}
FROM_FORWARD = ("dgrad.w", "wgrad.x")


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of one GEMM."""

    format: str = "bf16"
    """A name of `nybble.formats`."""
    rounding: str = "nearest"
    """"nearest" or "stochastic"."""
    outer: str = "tensor"
    """Granularity of the outer scale of two-level formats: "row" (a token), "matrix" (an expert) or
    "tensor"."""
    source: str = "original"
    """"original", or "forward": re-rounded from the value that the forward pass used."""

    @property
    def quantised(self) -> bool:
        """False for bf16 and fp32, which pass values through."""
        return not formats.get(self.format).passthrough

    @property
    def block(self) -> int | None:
        """Elements of a block along the quantised axis, None where there is no fixed block."""
        return formats.get(self.format).block_cols

    def text(self) -> str:
        """A cell of the printed table: format, `:row` outer scale, `~` stochastic, `<` from the forward
        value."""
        outer = f":{self.outer}" if formats.get(self.format).two_level and self.outer != "tensor" else ""
        return (
            self.format
            + outer
            + ("~" if self.rounding == "stochastic" else "")
            + ("<" if self.source == "forward" else "")
        )


def operand(role: str, value: str | Mapping[str, Any]) -> Operand:
    """The operand called `role` ("fprop.x") from a format name or a table of keys; RecipeError if it makes no
    sense."""
    entry: dict[str, Any] = {"format": value} if isinstance(value, str) else dict(value)
    unknown = set(entry) - {"format", "rounding", "outer", "source"}
    if unknown:
        raise RecipeError(
            f"unknown key {sorted(unknown)[0]!r} of {role}; the keys are format, rounding, outer, source"
        )
    name = entry.get("format", "bf16")
    if name not in formats.names():
        raise RecipeError(f"unknown format {name!r} of {role}; choose one of {', '.join(formats.names())}")
    row = formats.get(name)
    rounding = _choice(role, "rounding", entry.get("rounding", "nearest"), ROUNDINGS)
    source = _choice(role, "source", entry.get("source", "original"), SOURCES)
    outer = _choice(role, "outer", entry.get("outer", OUTERS[role][0]), OUTERS[role])
    if source == "forward" and role not in FROM_FORWARD:
        raise RecipeError(
            f"{role} cannot have source 'forward': only {' and '.join(FROM_FORWARD)} were forward tensors"
        )
    if rounding == "stochastic" and row.passthrough:
        raise RecipeError(f"{role} is {name}, which is passed through, so its rounding must be 'nearest'")
    if row.square and not role.endswith(".w"):
        raise RecipeError(
            f"{role} cannot be {name}: its square blocks would mix tokens; use them for weights only"
        )
    return Operand(format=name, rounding=rounding, outer=outer if row.two_level else "tensor", source=source)


def _choice(role: str, key: str, value: Any, valid: tuple[str, ...]) -> str:
    if value not in valid:
        raise RecipeError(f"unknown {key} {value!r} of {role}; choose {' or '.join(valid)}")
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Fprop:
    """Operands of y = x @ W.T, both along K."""

    x: Operand = field(default_factory=Operand)
    w: Operand = field(default_factory=Operand)


@dataclass(frozen=True, kw_only=True)
class Dgrad:
    """Operands of dx = dy @ W, both along N."""

    dy: Operand = field(default_factory=Operand)
    w: Operand = field(default_factory=Operand)


@dataclass(frozen=True, kw_only=True)
class Wgrad:
    """Operands of dW = dy.T @ x, both along T."""

    dy: Operand = field(default_factory=Operand)
    x: Operand = field(default_factory=Operand)


@dataclass(frozen=True, kw_only=True)
class GemmTable:
    """The six operands of a layer. BF16 throughout unless a rule says otherwise."""

    fprop: Fprop = field(default_factory=Fprop)
    dgrad: Dgrad = field(default_factory=Dgrad)
    wgrad: Wgrad = field(default_factory=Wgrad)

    def get(self, role: str) -> Operand:
        """The operand called "fprop.x", "dgrad.dy" ..."""
        gemm, name = role.split(".")
        value: Operand = getattr(getattr(self, gemm), name)
        return value

    def override(self, operands: Mapping[str, Operand]) -> "GemmTable":
        """A table in which the named operands are replaced."""
        parts: dict[str, dict[str, Operand]] = {}
        for role, value in operands.items():
            gemm, name = role.split(".")
            parts.setdefault(gemm, {})[name] = value
        return replace(self, **{gemm: replace(getattr(self, gemm), **v) for gemm, v in parts.items()})

    @property
    def quantised(self) -> bool:
        """True when any operand leaves BF16 or FP32."""
        return any(self.get(role).quantised for role in OPERANDS)

    def texts(self) -> tuple[str, ...]:
        """The six cells of the printed table, in the order of OPERANDS."""
        return tuple(self.get(role).text() for role in OPERANDS)
