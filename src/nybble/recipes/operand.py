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

ROUNDINGS = ("nearest", "stochastic", "eden")
SOURCES = ("original", "forward", "dgrad")
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
FROM_DGRAD = "wgrad.dy"
FOLDS = "fp8-row"
"""The format of dgrad.dy, wgrad.dy and wgrad.x where wgrad takes dgrad's codes: the scale of each row of dy,
which is one of the summed axis of wgrad, goes into x before it is rounded."""
HADAMARD_SIZES = (16, 32, 64, 128)
SIGNS = ("fixed", "drawn")
EDEN_FORMATS = ("nvfp4", "nvfp4-pow2")
CENTRED = ("fprop.x", "wgrad.x")
KEYS = ("format", "rounding", "outer", "source", "hadamard", "signs", "subtract_mean")


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of one GEMM."""

    format: str = "bf16"
    """A name of `nybble.formats`."""
    rounding: str = "nearest"
    """"nearest", "stochastic" or "eden" (MS-EDEN: elements to nearest, scales stochastic)."""
    outer: str = "tensor"
    """Granularity of the outer scale of two-level formats: "row" (a token), "matrix" (an expert) or
    "tensor"."""
    source: str = "original"
    """"original"; "forward": re-rounded from the value that the forward pass used; "dgrad": the codes that
    dgrad multiplies."""
    hadamard: int = 0
    """Size of the Hadamard transform along the summed axis before quantising; 0 for none."""
    signs: str = "fixed"
    """Of the Hadamard transform: "fixed", or "drawn" for each step and layer."""
    subtract_mean: bool = False
    """Quantise what is left after the mean over tokens; the mean's part of the product stays in FP32."""

    @property
    def quantised(self) -> bool:
        """False for bf16 and fp32, which pass values through."""
        return not formats.get(self.format).passthrough

    @property
    def block(self) -> int | None:
        """Elements of a block along the quantised axis, None where there is no fixed block."""
        return formats.get(self.format).block_cols

    def text(self) -> str:
        """A cell of the printed table; the table's legend explains the signs."""
        outer = f":{self.outer}" if formats.get(self.format).two_level and self.outer != "tensor" else ""
        return (
            self.format
            + outer
            + {"nearest": "", "stochastic": "~", "eden": "~~"}[self.rounding]
            + {"original": "", "forward": "<", "dgrad": "="}[self.source]
            + ("-mean" if self.subtract_mean else "")
            + (f"+h{self.hadamard}" if self.hadamard else "")
            + ("~" if self.hadamard and self.signs == "drawn" else "")
        )


def operand(role: str, value: str | Mapping[str, Any]) -> Operand:
    """The operand called `role` ("fprop.x") from a format name or a table of keys; RecipeError if it makes no
    sense."""
    entry: dict[str, Any] = {"format": value} if isinstance(value, str) else dict(value)
    unknown = set(entry) - set(KEYS)
    if unknown:
        raise RecipeError(f"unknown key {sorted(unknown)[0]!r} of {role}; the keys are {', '.join(KEYS)}")
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
    if source == "dgrad" and role != FROM_DGRAD:
        raise RecipeError(f"{role} cannot have source 'dgrad': only {FROM_DGRAD} is an operand of it too")
    if rounding != "nearest" and row.passthrough:
        raise RecipeError(f"{role} is {name}, which is passed through, so its rounding must be 'nearest'")
    if row.square and not role.endswith(".w"):
        raise RecipeError(
            f"{role} cannot be {name}: its square blocks would mix tokens; use them for weights only"
        )
    made = Operand(
        format=name,
        rounding=rounding,
        outer=outer if row.two_level else "tensor",
        source=source,
        hadamard=_hadamard(role, entry.get("hadamard", 0)),
        signs=_choice(role, "signs", entry.get("signs", SIGNS[0]), SIGNS),
        subtract_mean=_flag(role, "subtract_mean", entry.get("subtract_mean", False)),
    )
    _check(role, made)
    return made


def _check(role: str, made: Operand) -> None:
    """RecipeError for extensions that do not go together."""
    if made.signs == "drawn" and not made.hadamard:
        raise RecipeError(f"{role} has signs but no Hadamard transform; add hadamard = 16")
    if made.hadamard and formats.get(made.format).square:
        raise RecipeError(
            f"{role} cannot have a Hadamard transform: {made.format} blocks lie along both axes"
        )
    if made.subtract_mean and role not in CENTRED:
        raise RecipeError(f"{role} cannot have its mean subtracted; only {' and '.join(CENTRED)} can")
    if made.rounding == "eden":
        if made.format not in EDEN_FORMATS:
            raise RecipeError(f"{role} is {made.format}, but eden rounds to {' or '.join(EDEN_FORMATS)} only")
        if (made.hadamard, made.signs) != (128, "drawn"):
            raise RecipeError(
                f"{role} is rounded by eden, which is unbiased only behind a Hadamard transform of 128 with "
                'drawn signs; add hadamard = 128, signs = "drawn"'
            )


def _hadamard(role: str, value: Any) -> int:
    if isinstance(value, bool) or value not in (0, *HADAMARD_SIZES):
        raise RecipeError(
            f"unknown hadamard {value!r} of {role}; choose {', '.join(map(str, HADAMARD_SIZES))} or 0"
        )
    if value and role.startswith("fprop"):
        raise RecipeError(f"{role} cannot have a Hadamard transform; only operands of dgrad and wgrad can")
    return int(value)


def _flag(role: str, key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RecipeError(f"{key} of {role} must be true or false, not {value!r}")
    return value


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

    def fault(self, kind: str) -> str:
        """What two operands of a module of `kind` contradict each other in; empty when all is well."""
        for a, b in (("dgrad.dy", "dgrad.w"), ("wgrad.dy", "wgrad.x")):
            one, other = self.get(a), self.get(b)
            if (one.hadamard, one.signs) != (other.hadamard, other.signs):
                return f"{a} and {b} are one product, so give both the same hadamard and signs"
        if self.folds and (fault := self._fold_fault()):
            return fault
        if self.fprop.x.subtract_mean != self.wgrad.x.subtract_mean:
            return "fprop.x and wgrad.x are one tensor, so give both the same subtract_mean"
        if kind == "experts" and self.fprop.x.subtract_mean:
            return "subtract_mean is for linear layers; leave it out for experts"
        return ""

    @property
    def folds(self) -> bool:
        """Whether wgrad takes dgrad's codes of dy, and x times the scales of their rows."""
        return self.wgrad.dy.source == "dgrad"

    def _fold_fault(self) -> str:
        roles = ("dgrad.dy", "wgrad.dy", "wgrad.x")
        for role in roles:
            if self.get(role).format != FOLDS or self.get(role).hadamard:
                return (
                    f"wgrad.dy has source 'dgrad', for which {', '.join(roles)} must be {FOLDS} without a "
                    f"Hadamard transform, and {role} is {self.get(role).text()}; change it or leave the "
                    "source out"
                )
        if self.dgrad.dy.rounding != self.wgrad.dy.rounding:
            return "wgrad.dy has source 'dgrad', so give it the rounding of dgrad.dy"
        if self.wgrad.x.subtract_mean:
            return "wgrad.dy has source 'dgrad', which does not go together with subtract_mean"
        return ""

    def texts(self) -> tuple[str, ...]:
        """The six cells of the printed table, in the order of OPERANDS."""
        return tuple(self.get(role).text() for role in OPERANDS)
