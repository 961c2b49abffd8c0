"""F.scaled_mm and F.scaled_grouped_mm as the hardware reads their arguments: byte by byte, by the formula.

It shares no code with the package: scales are fetched one at a time from the flat bytes, and everything that
torch's own checks would refuse is refused here.
"""

from functools import cache

import torch
import torch.nn.functional as F

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SWIZZLE = F.SwizzleType.SWIZZLE_32_4_4


def up(x: int, to: int) -> int:
    return -(-x // to) * to


def offset(r: int, c: int, cols: int) -> int:
    return ((r // 128) * -(-cols // 4) + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


@cache
def offsets(rows: int, cols: int) -> torch.Tensor:
    every = [offset(r, c, cols) for r in range(rows) for c in range(cols)]
    return torch.tensor(every, dtype=torch.int64).view(rows, cols)


def e4m3(byte: torch.Tensor) -> torch.Tensor:
    b = byte.to(torch.int64)
    exponent, mantissa = (b >> 3) & 15, (b & 7).double()
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7).double()
    v = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    v = torch.where((b & 127) == 127, torch.nan, v)
    return torch.where(b >> 7 == 1, -v, v)


def e8m0(byte: torch.Tensor) -> torch.Tensor:
    v = 2.0 ** (byte.double() - 127)
    return torch.where(byte == 255, torch.nan, v)


def raw(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def values(codes: torch.Tensor, flat_scales: torch.Tensor) -> torch.Tensor:
    """float64 [R, K] of codes [R, bytes] and the swizzled scales of exactly this matrix."""
    if codes.dtype == torch.float4_e2m1fn_x2:
        assert flat_scales.dtype == torch.float8_e4m3fn
        block, bits = 16, raw(codes).long()
        v = E2M1.double()[torch.stack([bits & 15, bits >> 4], -1).flatten(-2)]
        scale = e4m3
    else:
        assert codes.dtype == torch.float8_e4m3fn
        assert flat_scales.dtype == torch.float8_e8m0fnu
        block, v, scale = 32, e4m3(raw(codes)), e8m0
    rows, k = v.shape
    s = raw(flat_scales).reshape(-1)[offsets(rows, k // block)]
    return v * scale(s).repeat_interleave(block, -1)


class Fake:
    """Stands in for the two functions; `calls` lists them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.exact = False
        """Grouped products in FP32, which the hardware cannot: to compare what is computed from them."""

    def scaled_mm(
        self, a, b, scale_a, recipe_a, scale_b, recipe_b, *, swizzle_a, swizzle_b, output_dtype, bias=None
    ):
        self.calls.append("scaled_mm")
        assert bias is None
        assert swizzle_a == swizzle_b == SWIZZLE
        fp4 = a.dtype == torch.float4_e2m1fn_x2
        assert recipe_a == recipe_b == (F.ScalingType.BlockWise1x16 if fp4 else F.ScalingType.BlockWise1x32)
        assert output_dtype in (torch.float32, torch.bfloat16, torch.float16)
        self._matrix(a)
        assert b.stride(0) == 1
        assert b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert a.shape[1] == b.shape[0]
        cols = -(-a.shape[1] * 2 // 16) if fp4 else -(-a.shape[1] // 32)
        for scale, rows in ((scale_a, a.shape[0]), (scale_b, b.shape[1])):
            assert scale.is_contiguous()
            assert scale.numel() == up(rows, 128) * up(cols, 4)
        return (values(a, scale_a) @ values(b.t(), scale_b).t()).to(output_dtype)

    def scaled_grouped_mm(
        self, a, b, scale_a, recipe_a, scale_b, recipe_b, *, swizzle_a, swizzle_b, offs, output_dtype
    ):
        self.calls.append("scaled_grouped_mm")
        assert output_dtype == torch.bfloat16
        output_dtype = torch.float32 if self.exact else output_dtype
        assert offs.dtype == torch.int32
        assert offs.dim() == 1
        fp4 = a.dtype == torch.float4_e2m1fn_x2
        if fp4:
            assert recipe_a == recipe_b == [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
            assert swizzle_a == swizzle_b == [SWIZZLE, F.SwizzleType.NO_SWIZZLE]
            for outer in (scale_a[1], scale_b[1]):
                assert outer.dtype == torch.float32
                assert outer.tolist() == [1.0] * offs.shape[0]
            scale_a, scale_b = scale_a[0], scale_b[0]
        else:
            assert recipe_a == recipe_b == F.ScalingType.BlockWise1x32
            assert swizzle_a == swizzle_b == SWIZZLE
        self._matrix(a)
        assert b.stride(-2) == 1
        assert b.shape[-2] % 16 == b.shape[-1] % 16 == 0
        assert b.transpose(-2, -1).is_contiguous()
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert scale_a.dim() == 2
        assert scale_b.dim() == 2
        assert scale_a.shape[0] >= a.shape[0]
        ends, starts = offs.tolist(), [0, *offs.tolist()[:-1]]
        if b.dim() == 3:
            return self._rows(
                a, b, raw(scale_a).view(-1).view(scale_a.dtype), scale_b, starts, ends, output_dtype
            )
        assert scale_b.shape[0] >= b.shape[1]
        return self._columns(a, b, scale_a, scale_b, starts, ends, output_dtype)

    def _rows(self, a, b, scale_a, scale_b, starts, ends, dtype):
        e, _, n = b.shape
        assert e == len(ends)
        per_byte, block = (2, 16) if a.dtype == torch.float4_e2m1fn_x2 else (1, 32)
        cols = up(a.shape[1] * per_byte // block, 4)
        assert scale_b.shape == (e, up(n, 128) * cols)
        out = torch.full((a.shape[0], n), torch.nan, dtype=dtype)
        at = 0
        for g, (start, end) in enumerate(zip(starts, ends, strict=True)):
            left = values(a[start:end], scale_a[at:])
            out[start:end] = (left @ values(b[g].t(), scale_b[g]).t()).to(dtype)
            at += up(end - start, 128) * cols
        return out

    def _columns(self, a, b, scale_a, scale_b, starts, ends, dtype):
        per_byte, block = (2, 16) if a.dtype == torch.float4_e2m1fn_x2 else (1, 32)
        m, n = a.shape[0], b.shape[1]
        out = torch.full((len(ends), m, n), torch.nan, dtype=dtype)
        at_a = at_b = 0
        for g, (start, end) in enumerate(zip(starts, ends, strict=True)):
            assert (end - start) % 32 == 0
            assert end <= a.shape[1] * per_byte
            cols = up((end - start) // block, 4)
            if end > start:
                piece = slice(start // per_byte, end // per_byte)
                left = values(a[:, piece], scale_a.view(-1)[at_a:])
                right = values(b.t()[:, piece], scale_b.view(-1)[at_b:])
                out[g] = (left @ right.t()).to(dtype)
            at_a, at_b = at_a + up(m, 128) * cols, at_b + up(n, 128) * cols
        return out

    @staticmethod
    def _matrix(a) -> None:
        assert a.is_contiguous()
        assert a.shape[-1] % 16 == 0
        assert a.data_ptr() % 16 == 0
