"""Weight operands: quantised once an optimiser step, not once a micro-batch; `weight_cache.py` keeps them."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nybble import formats
from nybble.formats import Operand as Role
from nybble.formats.philox import part_key
from nybble.kernels import fused
from nybble.layers.casting import cast, cast_both, decode, encode, recast
from nybble.layers.operand import FP8, NATIVE, Codes, Draw, Values, one_read, shape_of
from nybble.layers.weight_cache import WeightCache
from nybble.recipes import OPERANDS, GemmTable


class Spec(NamedTuple):
    """How one weight is quantised, and what names its draws."""

    gemms: GemmTable
    layer: int
    role: int
    """Added to the operand number: modules with two weights use it to draw apart."""

    @property
    def shares_dy(self) -> bool:
        """dgrad and wgrad take the same values of dy: those of BF16 have no axis and no draws."""
        dgrad, wgrad = self.gemms.dgrad, self.gemms.wgrad
        formats_of = {operand.format for operand in (dgrad.dy, dgrad.w, wgrad.dy, wgrad.x)}
        plain = all(formats.get(name).passthrough for name in formats_of)
        return (
            plain
            and dgrad.dy.format == wgrad.dy.format
            and not (dgrad.dy.hadamard or wgrad.dy.hadamard)
            and ("fp32" not in formats_of or len(formats_of) == 1)
        )

    @property
    def rounds_to_bf16(self) -> bool:
        """All that the layer does to its operands."""
        operands = [self.gemms.get(role) for role in OPERANDS]
        return not self.gemms.fprop.x.subtract_mean and all(
            operand.format == "bf16" and not operand.hadamard for operand in operands
        )

    def draw(self, role: Role, key: Tensor) -> Draw:
        return Draw(key, self.layer, self.role + int(role))


class Weight(NamedTuple):
    """A weight with what is needed to make its operands."""

    spec: Spec
    cache: WeightCache | None
    """None where nothing is kept."""
    tag: tuple[object, ...] | None
    """What the weight was at the forward pass; None when the cache was filled by `refresh`."""
    before: int = 0
    """Matrices of the whole weight before this part of it, by whose elements its draws are shifted."""
    codes: Codes | None = None
    """The operand of fprop where the weight itself is not here, and no more than a shape."""

    def fprop(self, weight: Tensor, key: Tensor, dtype: torch.dtype) -> Values:
        """Operand of y = x @ W.T, along K."""
        return self._operand("fprop", weight, key, dtype)

    def dgrad(self, weight: Tensor, key: Tensor, dtype: torch.dtype) -> Values:
        """Operand of dx = dy @ W, along N; from the value that fprop used when the recipe says "forward"."""
        return self._operand("dgrad", weight, key, dtype)

    def fprop_codes(self, weight: Tensor, key: Tensor) -> Codes | None:
        """Codes of the operand of fprop, where those of NVFP4 in blocks along K are what is kept of it."""
        fprop = self.spec.gemms.fprop.w
        fmt = formats.get(fprop.format)
        plain = fmt.packed and fmt.scale == "e4m3" and fmt.block_rows == 1 and not fprop.hadamard
        if self.cache is None or not plain or self.cache.form(weight, torch.bfloat16) != "codes":
            return None
        hit = self.cache.kept.get("fprop") if self.tag is None else self.cache.get("fprop", self.tag)
        if hit is None and self.tag is not None:
            hit = self.cache.kept["fprop"] = self._codes("fprop", weight, key)
        return hit if isinstance(hit, Codes) else None

    def _operand(self, name: str, weight: Tensor, key: Tensor, dtype: torch.dtype) -> Values:
        if self._same() and name == "dgrad":
            values, amax = self._operand("fprop", weight, key, dtype)
            return Values(values.turned() if dtype == NATIVE else values, amax)
        if self.cache is None:
            return self._compute(name, weight, key, dtype)
        slot = f"{name} {dtype}" if dtype in (NATIVE, FP8) else name
        hit = self.cache.kept.get(slot) if self.tag is None else self.cache.get(slot, self.tag)
        if isinstance(hit, Codes):
            return self._decode(name, hit, weight, dtype)
        if hit is not None:
            return hit
        if self.tag is None:
            return self._compute(name, weight, key, dtype)
        if self.cache.form(weight, dtype) == "codes":
            codes = self._codes(name, weight, key)
            self.cache.kept[slot] = codes
            return self._decode(name, codes, weight, dtype)
        values = self._compute_sharing(name, weight, key, dtype, self.cache.kept)
        self.cache.kept[slot] = values
        return values

    def _compute_sharing(
        self, name: str, weight: Tensor, key: Tensor, dtype: torch.dtype, kept: dict[str, Codes | Values]
    ) -> Values:
        """`_compute`, which on a GPU hands on to dgrad what saves it reads of the weight: its operand, where
        both come from one read, or the codes of fprop."""
        gemms = self.spec.gemms
        if weight.device.type != "cuda":
            return self._compute(name, weight, key, dtype)
        original = gemms.dgrad.w.source == "original"
        trained = name == "fprop" and weight.requires_grad and self.codes is None
        alike = dtype == torch.bfloat16 and gemms.dgrad.dy.format != "fp32"  # both products take BF16
        if trained and alike and original and one_read(gemms.fprop.w, gemms.dgrad.w):
            values, kept["dgrad"] = cast_both(weight.detach(), gemms.fprop.w, dtype)
            return values
        if original or not (gemms.fprop.w.quantised and gemms.dgrad.w.quantised):
            return self._compute(name, weight, key, dtype)
        if name == "fprop":
            return self._compute_with_codes(weight, key, dtype, kept)
        handed = kept.pop("forward codes", None)
        if not isinstance(handed, Codes):
            return self._compute(name, weight, key, dtype)
        draw = self._draw(Role.DGRAD_W, weight, key)
        return recast(handed, gemms.fprop.w, -1, weight.shape, gemms.dgrad.w, -2, dtype, draw)

    def _compute_with_codes(
        self, weight: Tensor, key: Tensor, dtype: torch.dtype, kept: dict[str, Codes | Values]
    ) -> Values:
        """Values for fprop, whose codes are handed on to dgrad."""
        spec = self.spec.gemms.fprop.w
        if self.codes is not None or spec.hadamard or dtype != torch.bfloat16:
            codes = self._codes("fprop", weight, key)
            kept["forward codes"] = codes
            return self._decode("fprop", codes, weight, dtype)
        draw = self._draw(Role.FPROP_W, weight, key)
        drawn = None if spec.rounding == "nearest" else draw.key
        *codes, values = fused.codes_and_values(
            weight.detach(), spec.format, spec.rounding, spec.outer, drawn, draw.layer, draw.operand
        )
        kept["forward codes"] = handed = Codes(*codes)
        return Values(values, handed.amax)

    def _compute(self, name: str, weight: Tensor, key: Tensor, dtype: torch.dtype) -> Values:
        weight = weight.detach()
        gemms = self.spec.gemms
        if name == "fprop":
            if self.codes is not None:
                return self._decode(name, self.codes, weight, dtype)
            return cast(weight, gemms.fprop.w, -1, dtype, self._draw(Role.FPROP_W, weight, key))
        draw = self._draw(Role.DGRAD_W, weight, key)
        if gemms.dgrad.w.source == "original":
            return cast(weight, gemms.dgrad.w, -2, dtype, draw)
        forward = self.forward_codes(weight, key)
        return recast(forward, gemms.fprop.w, -1, weight.shape, gemms.dgrad.w, -2, dtype, draw)

    def _codes(self, name: str, weight: Tensor, key: Tensor) -> Codes:
        weight = weight.detach()
        gemms = self.spec.gemms
        if name == "fprop":
            return self.forward_codes(weight, key)
        draw = self._draw(Role.DGRAD_W, weight, key)
        if gemms.dgrad.w.source == "original":
            return encode(weight, gemms.dgrad.w, -2, draw)
        forward = self.forward_codes(weight, key)
        full = decode(forward, gemms.fprop.w, -1, weight.shape, torch.float32, apply_outer=True)
        return encode(full, gemms.dgrad.w, -2, draw)

    def forward_codes(self, weight: Tensor, key: Tensor) -> Codes:
        """Codes of the operand of fprop."""
        if self.codes is not None:
            return self.codes
        return encode(weight.detach(), self.spec.gemms.fprop.w, -1, self._draw(Role.FPROP_W, weight, key))

    def _decode(self, name: str, codes: Codes, weight: Tensor, dtype: torch.dtype) -> Values:
        gemms = self.spec.gemms
        if name == "fprop":
            return Values(decode(codes, gemms.fprop.w, -1, weight.shape, dtype), codes.amax)
        shape = shape_of(weight.shape, gemms.dgrad.w, -2)
        return Values(decode(codes, gemms.dgrad.w, -2, shape, dtype), codes.amax)

    def _draw(self, role: Role, weight: Tensor, key: Tensor) -> Draw:
        if self.before:
            forward = role == Role.FPROP_W
            operand = self.spec.gemms.fprop.w if forward else self.spec.gemms.dgrad.w
            if operand.rounding != "nearest":
                matrix = shape_of(weight.shape, operand, -1 if forward else -2)[-2:]
                key = part_key(key, self.before * math.prod(matrix))
        return self.spec.draw(role, key)

    def _same(self) -> bool:
        """Both passes use the same values: BF16 has no axis, and square blocks are the same along either."""
        w, d = self.spec.gemms.fprop.w, self.spec.gemms.dgrad.w
        fmt = formats.get(w.format)
        return (
            w.format == d.format
            and not d.hadamard
            and (fmt.passthrough or (fmt.square and d.source == "forward"))
        )
