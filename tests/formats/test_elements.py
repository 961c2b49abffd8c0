"""Element and scale codes, tried wherever that is all of it: every code, every midpoint, every neighbour."""

import pytest
import torch
from naive_formats import E2M1, E4M3, element

from nybble.formats import e2m1, e4m3, e8m0

E2M1_VALUES = torch.tensor([float(v) for v in E2M1])
E4M3_VALUES = torch.tensor([float(v) for v in E4M3])


def around(v: torch.Tensor) -> torch.Tensor:
    """Every value with its two FP32 neighbours, cut to the range of v."""
    inf = torch.tensor(float("inf"))
    out = torch.cat([v, torch.nextafter(v, inf), torch.nextafter(v, -inf)])
    return out[(out >= 0) & (out <= v.max())]


@pytest.mark.parametrize(("module", "values"), [(e2m1, E2M1_VALUES), (e4m3, E4M3_VALUES)])
def test_every_code_decodes_to_its_value_and_encodes_back(module, values):
    codes = torch.arange(len(values), dtype=torch.uint8)
    sign = 8 if module is e2m1 else 0x80
    assert torch.equal(module.decode(codes), values)
    assert torch.equal(module.decode(codes | sign), -values)
    assert torch.equal(module.encode(values), codes)
    assert torch.equal(module.encode(-values), codes | sign)  # -0 too


def test_e4m3_has_two_nans_and_no_infinity():
    values = e4m3.decode(torch.arange(256, dtype=torch.uint8))
    assert torch.isnan(values).nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert not torch.isinf(values).any()
    assert values[0x7E] == 448
    assert values[0x01] == 2.0**-9


@pytest.mark.parametrize(("module", "values"), [(e2m1, E2M1_VALUES), (e4m3, E4M3_VALUES)])
def test_midpoints_go_to_even_and_their_neighbours_to_the_nearer_side(module, values):
    middle = (values[:-1] + values[1:]) / 2
    inf = torch.tensor(float("inf"))
    low = torch.arange(len(middle))
    even = low + low % 2
    for sign_value, sign in ((1, 0), (-1, 8 if module is e2m1 else 0x80)):
        assert torch.equal(module.encode(sign_value * middle).long(), even | sign)
        assert torch.equal(module.encode(sign_value * torch.nextafter(middle, -inf)).long(), low | sign)
        assert torch.equal(module.encode(sign_value * torch.nextafter(middle, inf)).long(), (low + 1) | sign)


def test_e2m1_ties_as_printed():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, -0.25])
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0]
    assert e2m1.decode(e2m1.encode(x)).tolist() == want
    assert e2m1.encode(x)[-1] == 8


@pytest.mark.parametrize("module", [e2m1, e4m3])
@pytest.mark.parametrize("draw", [0, 1, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF])
def test_stochastic_encoding_is_its_definition_in_exact_fractions(module, draw):
    values, grid, sign = (E2M1_VALUES, E2M1, 8) if module is e2m1 else (E4M3_VALUES, E4M3, 0x80)
    generator = torch.Generator().manual_seed(draw)
    inside = values[:-1] + torch.rand(4, len(values) - 1, generator=generator) * values.diff()
    x = torch.cat([around(values), around((values[:-1] + values[1:]) / 2), inside.flatten()])
    x = torch.cat([x, torch.tensor([1e-45, 1e-40, 1e-30, 2.0**-27, 2.0**-26]), -x])
    got = module.encode(x, torch.full(x.shape, draw))
    assert got.tolist() == [element(v, grid, sign, draw) for v in x.numpy()]


@pytest.mark.parametrize("module", [e2m1, e4m3])
def test_stochastic_rounding_over_all_draws_is_exactly_unbiased(module):
    """For a fraction that is a multiple of 2^-16, exactly that share of the 65536 draws rounds up."""
    values = E2M1_VALUES if module is e2m1 else E4M3_VALUES
    draws = torch.arange(65536)
    for i in range(0, len(values) - 1, 1 if module is e2m1 else 9):
        low, high = values[i].double(), values[i + 1].double()
        for share in (1, 4321, 65535):
            v = (low + (high - low) * share / 65536).float()
            codes = module.encode(v.expand(65536), draws).long()
            assert (codes.min(), codes.max()) == (i, i + 1)
            assert (codes == i + 1).sum() == share


@pytest.mark.parametrize("module", [e2m1, e4m3])
def test_representable_values_never_move(module):
    values = E2M1_VALUES if module is e2m1 else E4M3_VALUES
    for draw in (0, 65535):
        for v in (values, -values):
            assert torch.equal(module.decode(module.encode(v, torch.full(v.shape, draw))), v)


def test_two_and_a_quarter_becomes_two_three_times_in_four():
    codes = e2m1.encode(torch.full((65536,), 2.25), torch.arange(65536))
    assert (e2m1.decode(codes) == 2).sum() == 65536 * 3 // 4
    assert (e2m1.decode(codes) == 3).sum() == 65536 // 4


def test_three_point_two_errs_by_a_fifth():
    assert abs(e2m1.decode(e2m1.encode(torch.tensor([3.2]))) - 3.2).item() == pytest.approx(0.2, abs=1e-6)


def test_packing_puts_element_zero_low_and_pads_an_odd_tail_with_zero():
    codes = e2m1.encode(torch.tensor([0.5, 6.0, -1.5]))
    assert e2m1.pack(codes).tolist() == [0x71, 0x0B]
    assert torch.equal(e2m1.unpack(e2m1.pack(codes), 3), codes)
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(e2m1.pack(e2m1.unpack(every[:, None], 2)).flatten(), every)


def test_every_e8m0_byte_decodes_multiplies_and_encodes_back():
    byte = torch.arange(256, dtype=torch.uint8)
    scale = e8m0.decode(byte)
    assert torch.isnan(scale[255])
    assert scale[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert e8m0.multiplier(byte[:255]).tolist() == [2.0 ** (127 - b) for b in range(255)]
    assert torch.equal(e8m0.round_up(scale), byte)
    beyond = e8m0.round_up(torch.nextafter(scale[:255], torch.tensor(float("inf"))))
    assert torch.equal(beyond.long(), torch.arange(1, 256))
    floor = e8m0.encode_floor(scale[:255], 448.0)
    assert floor.tolist() == [max(b - 8, 0) for b in range(255)]


def test_rounding_up_to_e8m0_on_the_printed_bit_patterns():
    bits = {
        0: 0,
        1: 0,
        0x400000: 0,
        0x400001: 1,
        0x800000: 1,
        0x1F800001: 64,
        0x3F800000: 127,
        0x3F800001: 128,
    }
    bits |= {0x7F000000: 254, 0x7F000001: 255, 0x7F800000: 255, 0x7FC00000: 255}
    x = torch.tensor(list(bits), dtype=torch.int32).view(torch.float32)
    assert e8m0.round_up(x).tolist() == list(bits.values())


def test_the_up_rule_by_product_agrees_with_division_around_448():
    x = (torch.tensor(448.0).view(torch.int32) + torch.arange(-60, 61, dtype=torch.int32)).view(torch.float32)
    assert torch.equal(e8m0.encode_up(x, 448.0), e8m0.round_up(torch.div(x, torch.full_like(x, 448.0))))


def test_sixteen_codes_times_all_e4m3_scales_are_exact_products():
    from nybble.formats import ops

    scales = torch.arange(256, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 1)
    got = ops.dequantize(
        e2m1.pack(codes), scales[:, None], torch.tensor(2688.0), "nvfp4", -1, [256, 16], torch.float32
    )
    exact = e2m1.decode(codes).double() * e4m3.decode(scales).double()[:, None]
    assert torch.equal(got.double().nan_to_num(1e9), exact.nan_to_num(1e9))
    assert torch.equal(torch.isnan(got).all(1).nonzero().flatten(), torch.tensor([0x7F, 0xFF]))
    assert torch.equal(torch.signbit(got[:255]), torch.signbit(exact[:255]))
    bf16 = ops.dequantize(
        e2m1.pack(codes),
        scales[:, None],
        torch.tensor(3.0),
        "nvfp4",
        -1,
        [256, 16],
        torch.bfloat16,
        "tensor",
        False,
    )
    assert torch.equal(bf16.double().nan_to_num(1e9), exact.nan_to_num(1e9))  # bfloat16 holds every product


def test_all_e4m3_codes_times_all_e8m0_scales_are_exact_products():
    from nybble.formats import ops

    scales = torch.arange(256, dtype=torch.uint8)
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    empty = torch.empty(0)
    got = ops.dequantize(
        codes, scales[:, None].expand(256, 8).contiguous(), empty, "mxfp8", -1, [256, 256], torch.float32
    )
    exact = e4m3.decode(codes).double() * e8m0.decode(scales).double()[:, None]
    exact = exact.float()  # only the overflow to infinity rounds: 448 * 2^127 has no FP32 value
    assert torch.equal(got.nan_to_num(7e9, 8e9, -8e9), exact.nan_to_num(7e9, 8e9, -8e9))
    assert torch.isnan(got[255]).all()
    assert got[0, 1] == 2.0**-136
