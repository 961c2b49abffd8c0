"""The table of formats: one frozen row a format, and the only place that holds a maximum or a block size.

A format is an element (what one code means), a block (which elements share a scale), a scale (how that scale
is stored) and, for two-level formats, an outer scale in FP32 that brings the block scales into the range of
theirs.

====================== ======= ======== ===== ============ ========= ==============
name                   element block    scale outer        rule      bits a value
====================== ======= ======== ===== ============ ========= ==============
nvfp4                  E2M1    1 x 16   E4M3  2688 / amax  nearest   4.5
nvfp4-16x16            E2M1    16 x 16  E4M3  2688 / amax  nearest   4.03125
nvfp4-4over6           E2M1    1 x 16   E4M3  1536 / amax  4 over 6  4.5
nvfp4-16x16-4over6     E2M1    16 x 16  E4M3  1536 / amax  4 over 6  4.03125
nvfp4-pow2             E2M1    1 x 16   E4M3  2^k          nearest   4.5
nvfp4-4over6-pow2      E2M1    1 x 16   E4M3  2^k          4 over 6  4.5
mxfp4                  E2M1    1 x 32   E8M0  --           up        4.25
mxfp4-floor            E2M1    1 x 32   E8M0  --           floor     4.25
mxfp8                  E4M3    1 x 32   E8M0  --           up        8.25
mxfp8-floor            E4M3    1 x 32   E8M0  --           floor     8.25
fp8-1x128              E4M3    1 x 128  FP32  --           448/amax  8.25
fp8-128x128            E4M3    128 x128 FP32  --           448/amax  8.002
fp8-row                E4M3    1 x L    FP32  --           448/amax  8 + 32 / L
bf16, fp32             as is   --       --    --           --        16, 32
====================== ======= ======== ===== ============ ========= ==============

Sources: OCP Microscaling Formats v1.0 (E2M1, E4M3, E8M0, floor rule); Pretraining LLMs with NVFP4, arXiv
2509.25149; Four Over Six, arXiv 2512.02010; Recipes for pre-training LLMs with MXFP8, arXiv 2506.08027 (the
up rule).
"""

from dataclasses import dataclass

from nybble.errors import NybbleError

E2M1_MAX = 6.0
E4M3_MAX = 448.0
# Four Over Six leaves room for a block scale 1.5 times larger: 256 * 1.5 = 384 still fits E4M3.
FOUR_OVER_SIX_SCALE_MAX = 256.0


@dataclass(frozen=True, kw_only=True)
class Format:
    """One row of the table. A block is `block_rows` x `block_cols`, its columns along the quantised axis."""

    name: str
    """The name that recipes, the command line and checkpoints use."""
    element: str
    """"e2m1", "e4m3", "bf16" or "fp32"."""
    element_max: float
    """Largest magnitude of an element; infinity for the pass-through formats."""
    block_rows: int = 1
    """Rows of a block, over the axis that is not quantised: 1, or 16 / 128 for square blocks."""
    block_cols: int | None = None
    """Elements of a block along the quantised axis; None is the whole row."""
    scale: str | None = None
    """How a block's scale is stored: "e4m3", "e8m0", "fp32", or None where there is none."""
    outer_max: float | None = None
    """Two-level formats: S_enc = outer_max / amax. None for formats of one level."""
    outer_pow2: bool = False
    """S_enc is that rounded down to a power of two: most values are then exact in the grids of MX formats."""
    scale_rule: str | None = None
    """How an E8M0 scale is rounded: "up" or "floor"."""
    four_over_six: bool = False
    """Each block chooses between a scale that maps its maximum to 6 and one that maps it to 4."""
    bits_per_value: float
    """Storage of a full block, outer scale not counted."""
    description: str

    @property
    def packed(self) -> bool:
        """Two codes a byte."""
        return self.element == "e2m1"

    @property
    def passthrough(self) -> bool:
        """No blocks and no scales: the codes are the values themselves."""
        return self.scale is None

    @property
    def square(self) -> bool:
        """Blocks span more than one row, so that they are the same along either axis."""
        return self.block_rows > 1

    @property
    def two_level(self) -> bool:
        """Has an outer FP32 scale over its block scales."""
        return self.outer_max is not None


def _nvfp4(name: str, rows: int, four_over_six: bool, description: str, outer_pow2: bool = False) -> Format:
    scale_max = FOUR_OVER_SIX_SCALE_MAX if four_over_six else E4M3_MAX
    return Format(
        name=name,
        element="e2m1",
        element_max=E2M1_MAX,
        block_rows=rows,
        block_cols=16,
        scale="e4m3",
        outer_max=E2M1_MAX * scale_max,
        outer_pow2=outer_pow2,
        four_over_six=four_over_six,
        bits_per_value=4 + 8 / (rows * 16),
        description=description,
    )


def _mx(name: str, element: str, rule: str, description: str) -> Format:
    return Format(
        name=name,
        element=element,
        element_max=E2M1_MAX if element == "e2m1" else E4M3_MAX,
        block_cols=32,
        scale="e8m0",
        scale_rule=rule,
        bits_per_value=(4 if element == "e2m1" else 8) + 8 / 32,
        description=description,
    )


def _fp8(name: str, rows: int, cols: int | None, description: str) -> Format:
    return Format(
        name=name,
        element="e4m3",
        element_max=E4M3_MAX,
        block_rows=rows,
        block_cols=cols,
        scale="fp32",
        bits_per_value=8 + (32 / (rows * cols) if cols else 0),
        description=description,
    )


def _plain(name: str, bits: int, description: str) -> Format:
    return Format(
        name=name, element=name, element_max=float("inf"), bits_per_value=bits, description=description
    )


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _nvfp4("nvfp4", 1, False, "NVFP4: 16 E2M1 values share an E4M3 scale, under an outer FP32 scale"),
        _nvfp4("nvfp4-16x16", 16, False, "NVFP4 with one scale a 16x16 tile, the same along both axes"),
        _nvfp4("nvfp4-4over6", 1, True, "NVFP4, each block scaled to 6 or to 4, whichever errs less"),
        _nvfp4("nvfp4-16x16-4over6", 16, True, "NVFP4 with 16x16 tiles and Four Over Six"),
        _nvfp4("nvfp4-pow2", 1, False, "NVFP4 under a power of two as outer scale", outer_pow2=True),
        _nvfp4(
            "nvfp4-4over6-pow2",
            1,
            True,
            "NVFP4, 4 over 6, under a power of two as outer scale",
            outer_pow2=True,
        ),
        _mx("mxfp4", "e2m1", "up", "MXFP4: 32 E2M1 values share a power of two, rounded up"),
        _mx("mxfp4-floor", "e2m1", "floor", "MXFP4 with the OCP floor rule"),
        _mx("mxfp8", "e4m3", "up", "MXFP8: 32 E4M3 values share a power of two, rounded up"),
        _mx("mxfp8-floor", "e4m3", "floor", "MXFP8 with the OCP floor rule (saturates)"),
        _fp8("fp8-1x128", 1, 128, "FP8: 128 E4M3 values share an FP32 scale"),
        _fp8("fp8-128x128", 128, 128, "FP8 with one FP32 scale a 128x128 tile"),
        _fp8("fp8-row", 1, None, "FP8 with one FP32 scale a row"),
        _plain("bf16", 16, "BF16, passed through"),
        _plain("fp32", 32, "FP32, passed through"),
    )
}


def get(name: str) -> Format:
    """The row called `name`; NybbleError if there is none."""
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise NybbleError(f"unknown format {name!r}; choose one of {', '.join(FORMATS)}") from None


def names() -> list[str]:
    """All format names, in the order of the table."""
    return list(FORMATS)
