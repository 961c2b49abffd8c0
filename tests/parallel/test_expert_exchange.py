"""A layer of experts on two ranks computes what it computes on one; legs carry the bytes that they should."""

import layer_cases
import pytest
import ranks

from nybble.recipes import LEGS, load_recipe

PLAIN = dict.fromkeys(LEGS, "fp32")
CASES = {
    "fp32": (PLAIN, "spread", None),
    "bf16": ({}, "spread", None),
    "mxfp8": (dict.fromkeys(LEGS, "mxfp8"), "spread", None),
    "nvfp4": (dict.fromkeys(LEGS, "nvfp4"), "spread", None),
    "nvfp4 dispatch": (PLAIN | {"dispatch": "nvfp4"}, "spread", None),
    "hopper": ({}, "spread", {**load_recipe("hopper").to_dict()["rule"][0], "hint": ""}),
    "all to the first rank": (PLAIN, "first", None),
    "all to one expert": (PLAIN, "one", None),
}


@pytest.fixture(scope="module")
def found():
    """Case -> what each of two ranks found."""
    results = ranks.run(2, layer_cases.all_cases, CASES)
    return {case: [result[case] for result in results] for case in CASES}


@pytest.mark.parametrize(
    "case", ["fp32", "bf16", "nvfp4 dispatch", "hopper", "all to the first rank", "all to one expert"]
)
def test_operands_of_all_products_are_those_of_one_process(found, case):
    """Stochastic rounding included. BF16 legs lose nothing of BF16 activations; the codes of NVFP4 x are
    taken as they arrive."""
    for rank in found[case]:
        assert rank["operands"] == [True] * 7
        assert rank["gate_up_proj"] == rank["down_proj"] == rank["dweights"] == 0.0


def test_results_differ_by_the_order_of_additions_alone(found):
    for rank in found["fp32"]:
        assert rank["y"] < 1e-6
        assert rank["dx"] < 1e-6


def test_compressed_legs_change_results_but_not_much(found):
    """Elements are about 1; MXFP8 errs by up to 1/16 of an element, NVFP4 by more."""
    for rank in found["mxfp8"]:
        assert 0 < rank["y"] < 1.0
        assert 0 < rank["dx"] < 2.0
    assert all(rank["dx"] > 0 for rank in found["nvfp4"])


def test_bytes_of_the_legs(found):
    for plain, small, four in zip(found["bf16"], found["mxfp8"], found["nvfp4"], strict=True):
        for leg in LEGS:
            rows = plain["bytes"][leg] / (2 * layer_cases.H)
            assert small["bytes"][leg] == rows * (layer_cases.H + layer_cases.H // 32)
            assert small["bytes"][leg] <= 0.52 * plain["bytes"][leg]
            # A row of 64 four-bit values: 32 + 4 bytes, the outer amax of 4, up to a multiple of 8.
            assert four["bytes"][leg] == rows * 40


def test_a_rank_without_tokens_and_one_without_work(found):
    first = found["all to the first rank"]
    assert [rank["rows"] for rank in first] == [layer_cases.T, 0]  # rank 1 has no tokens and gets none
    one = found["all to one expert"]
    assert [rank["rows"] for rank in one] == [0, layer_cases.T]  # the only expert is on rank 1
    assert one[0]["bytes"]["combine"] == 0


def test_a_token_goes_once_to_each_rank(found):
    sent = sum(rank["rows"] for rank in found["fp32"])
    assert layer_cases.T < sent < layer_cases.K * layer_cases.T


def test_other_work_is_done_while_tokens_travel(found):
    for rank in found["mxfp8"]:
        assert rank["order"][:4] == ["sizes", "work", "routing", "dispatch"]
        assert rank["order"].count("work") == 1
