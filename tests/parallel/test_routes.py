"""Which rows go where, against a loop that says the same; sizes and choices of meshes."""

import pytest
import torch
from torch import nn

from nybble.errors import RecipeError
from nybble.parallel import convert
from nybble.parallel.convert import _check
from nybble.parallel.routes import routes, wanted
from nybble.recipes import LEGS, load_recipe


@pytest.mark.parametrize(
    ("tokens", "k", "ranks", "each"), [(7, 2, 2, 2), (5, 3, 4, 1), (1, 1, 2, 4), (0, 2, 2, 2)]
)
def test_routes_are_those_of_a_loop(tokens, k, ranks, each):
    torch.manual_seed(tokens)
    index = torch.rand(tokens, ranks * each).argsort(1)[:, :k]
    want = wanted(index, ranks, each)
    way = routes(index, want, each, want.counts.tolist(), [0] * ranks)
    rows = [
        (r, t) for r in range(ranks) for t in range(tokens) if any(e // each == r for e in index[t].tolist())
    ]
    assert way.token.tolist() == [t for _, t in rows]
    assert way.sent == [sum(r == rank for r, _ in rows) for rank in range(ranks)]
    for s, (r, t) in enumerate(rows):
        here = [e - r * each if e // each == r else each for e in index[t].tolist()]
        assert way.experts[s].tolist() == here
        assert way.first[s] == next(i for i, e in enumerate(here) if e < each)
    for t in range(tokens):
        mine = [s for s, (_, token) in enumerate(rows) if token == t]
        assert [p for p in way.places[t].tolist() if p >= 0] == mine


def test_experts_that_are_nowhere_go_nowhere():
    index = torch.tensor([[0, 9], [9, 9]])
    want = wanted(index, 2, 2)
    assert want.counts.tolist() == [1, 0]
    assert routes(index, want, 2, [1, 0], [0, 0]).experts.tolist() == [[0, 2]]


def test_what_ranks_cannot_share_out_is_refused_with_its_name():
    from layer_cases import E, Model, recipe

    with pytest.raises(
        RecipeError, match=rf"experts has {E} experts, which 3 ranks cannot share out equally"
    ):
        _check(Model(), load_recipe(recipe({})), None, 3)
    wide = {"modules": "**", "fprop": {"x": "nvfp4", "w": {"format": "nvfp4", "outer": "tensor"}}}
    with pytest.raises(RecipeError, match="one outer scale for the experts of all ranks"):
        _check(Model(), load_recipe(recipe({}, wide)), None, 2)


def test_experts_whose_draws_would_begin_within_a_group_of_eight_are_refused():
    from layer_cases import Model, recipe

    model = Model()
    model.experts.down_proj = nn.Parameter(torch.randn(4, 7, 33))
    tails = {"blocks": {"tails": "allow"}}
    with pytest.raises(RecipeError, match=r"dgrad\.w .* a multiple of 8 weights, not 7x33"):
        _check(model, load_recipe(recipe({}) | tails), None, 2)
    nearest = recipe({}, {"modules": "**", "all": "mxfp8"}) | tails
    _check(model, load_recipe(nearest), None, 2)


def test_without_a_mesh_it_is_the_plain_conversion():
    from layer_cases import Model, recipe

    model = Model()
    report = convert(model, recipe({"combine": "mxfp8"}))
    assert model.experts.exchange is None
    assert report.state.part == 0
    assert "combine mxfp8" in report.table()
    every = convert(Model(), recipe({"combine": "mxfp8"}), legs="nvfp4").table()
    assert all(f"{leg} nvfp4" in every for leg in LEGS)
    with pytest.raises(RecipeError, match="legs is 'fp4'; the formats of a leg are bf16, fp32"):
        convert(Model(), recipe({}), legs="fp4")
