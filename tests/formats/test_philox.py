"""The draws: Philox against its published vectors, the counter against its definition, and independence."""

import pytest
import torch
from naive_formats import draw

import nybble
from nybble.errors import NybbleError
from nybble.formats import Operand, philox, reference

KNOWN = [  # Random123, kat_vectors: philox 4x32 10
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def tensor(key: philox.Key) -> torch.Tensor:
    return key.tensor()


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    out = philox.philox4x32(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert [w.item() for w in out] == words


KEY = nybble.key(0x123456789ABCDEF0, 0xFFFFFFFF, (1 << 24) - 1, 255, 65535)


def test_draws_follow_the_definition():
    shape = (2, 3, 13)
    got = philox.draws(tensor(KEY), shape, KEY.layer, KEY.operand).flatten()
    want = [draw(e, KEY.seed, KEY.step, KEY.micro, KEY.layer, KEY.operand) for e in range(78)]
    assert got.tolist() == want
    assert torch.equal(philox.draws(tensor(KEY), (78,), KEY.layer, KEY.operand), got)


def test_rows_name_elements_beyond_two_to_the_thirty_two():
    rows = torch.tensor([1 << 40, 7, (1 << 32) + 3])
    got = philox.draws(tensor(KEY), (3, 11), KEY.layer, KEY.operand, rows)
    want = [
        [draw(r * 11 + c, KEY.seed, KEY.step, KEY.micro, KEY.layer, KEY.operand) for c in range(11)]
        for r in rows.tolist()
    ]
    assert got.tolist() == want


def test_a_tokens_draws_follow_it_through_a_permutation():
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    whole = philox.draws(tensor(KEY), (40, 21), 3, 4)
    assert torch.equal(philox.draws(tensor(KEY), (40, 21), 3, 4, order), whole[order])
    assert torch.equal(philox.draws(tensor(KEY), (7, 21), 3, 4, torch.arange(20, 27)), whole[20:27])


def test_a_part_draws_as_within_the_whole_from_where_groups_of_eight_begin():
    whole = philox.draws(tensor(KEY), (78,), 3, 4)
    part = philox.part_key(tensor(KEY), 16)
    assert torch.equal(philox.draws(part, (62,), 3, 4), whole[16:])
    with pytest.raises(NybbleError, match=r"begins at element 63 of the whole; .* multiple of 8"):
        philox.part_key(part, 63)


def test_draws_are_uniform():
    d = philox.draws(tensor(KEY), (1 << 18,), 1, 1).double()
    # 4 sigma of the mean of 2^18 uniform values, and of each of their 16 bits
    assert abs(d.mean() - 32767.5) < 4 * 65536 / (12 * 2**18) ** 0.5
    for bit in range(16):
        assert abs(((d.long() >> bit) & 1).double().mean() - 0.5) < 4 * 0.5 / 2**9


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a.double().flatten(), b.double().flatten()]))[0, 1].item()


N = 1 << 15
LIMIT = 4 / N**0.5  # 4 sigma of the correlation of N independent pairs


@pytest.mark.parametrize("change", ["seed", "step", "layer", "operand", "micro"])
@pytest.mark.parametrize("by", [1, 2, 128])
def test_draws_of_different_keys_are_independent(change, by):
    fields = {"seed": 11, "step": 5, "layer": 2, "operand": 3, "micro": 1}
    a = nybble.key(**fields)
    b = nybble.key(**(fields | {change: fields[change] + by}))
    one = philox.draws(tensor(a), (N,), a.layer, a.operand)
    two = philox.draws(tensor(b), (N,), b.layer, b.operand)
    assert abs(correlation(one, two)) < LIMIT
    assert (one == two).double().mean() < 8 / 65536  # chance is 1 in 65536


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 16, 32, 128, 256])
def test_draws_of_neighbours_tiles_and_rows_are_independent(lag):
    d = philox.draws(tensor(KEY), (N + 256,), 1, 0)
    assert abs(correlation(d[:N], d[lag : N + lag])) < LIMIT


def test_layer_and_operand_do_not_run_into_each_other():
    seen = {
        tuple(philox.draws(tensor(KEY), (8,), layer, operand).tolist())
        for layer in (0, 1, 2, 255, 256)
        for operand in (*Operand, 255)
    }
    assert len(seen) == 5 * 7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", -1),
        ("seed", 1 << 63),
        ("step", 1 << 32),
        ("layer", 1 << 24),
        ("operand", 256),
        ("micro", 65536),
        ("micro", -1),
    ],
)
def test_keys_out_of_range_are_refused_by_name(field, value):
    with pytest.raises(NybbleError, match=field):
        nybble.key(**({"seed": 0} | {field: value}))


def test_the_example_that_the_page_of_formats_prints():
    key = nybble.key(1, 2, 3, 4)
    assert philox.draws(tensor(key), (4,), 3, 4).tolist() == [54224, 42669, 28746, 61488]
    q = nybble.quantize(torch.full((32,), 1.1), "mxfp8", rounding="stochastic", key=key)
    assert q.scales.item() == 119
    assert q.codes[:8].tolist() == [0x79, 0x79, 0x79, 0x79, 0x78, 0x79, 0x79, 0x78]


def test_a_part_draws_what_its_elements_draw_in_the_whole():
    x = torch.randn(6, 32, 40)
    arguments = ("mxfp8", -2, "stochastic", "tensor")
    whole = reference.quantize(x, *arguments, torch.tensor([5, 2, 1]), 3, 1)
    part = reference.quantize(x[4:], *arguments, torch.tensor([5, 2, 1, 4 * 32 * 40]), 3, 1)
    assert torch.equal(part[0], whole[0][4:])
    assert torch.equal(part[1], whole[1][4:])
