"""Rules on models: which module gets what, and that what must stay in high precision does."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from nybble import recipes
from nybble.errors import RecipeError
from nybble.recipes import Layers, load_recipe, resolve
from nybble.recipes.rule import match


class Experts(nn.Module):
    def __init__(self, e=4, h=64, i=32):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(e, 2 * i, h))
        self.down_proj = nn.Parameter(torch.zeros(e, h, i))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(64, 64)
        self.gate_proj = nn.Linear(64, 64)
        self.gate = nn.Linear(64, 4)
        self.norm = nn.LayerNorm(64)
        self.experts = Experts()


class Model(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 64)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.lm_head = nn.Linear(64, 16)


def table(rules, layers=6, **top):
    return resolve(load_recipe({"rule": rules, **top}), Model(layers))


def quantised(resolved):
    return [row.name for row in resolved.rows if row.gemms.quantised and not row.protected]


@pytest.mark.parametrize(
    ("glob", "name", "fits"),
    [
        ("**", "a.b.c", True),
        ("**.gate", "layers.0.mlp.gate", True),
        ("**.gate", "layers.0.mlp.gate_proj", False),
        ("**.gate", "gate", True),
        ("mlp.gate", "mlpxgate", False),
        ("gate", "mlp.gate", False),
        ("layers.*.q", "layers.3.q", True),
        ("layers.*.q", "layers.3.4.q", False),
        ("layers.**.q", "layers.3.4.q", True),
        ("layers.**.q", "layers.q", True),
        ("**.{q,k}_proj", "a.k_proj", True),
        ("**.{q,k}_proj", "a.v_proj", False),
        ("**.q*", "a.q_proj", True),
        ("**.q*", "a.q.linear", False),
        ("a+b", "aab", False),
    ],
)
def test_globs_are_anchored_to_whole_names(glob, name, fits):
    assert match(glob, name) is fits


def test_the_last_match_wins_operand_by_operand():
    resolved = table(
        [
            {"modules": "**", "all": "mxfp8"},
            {"modules": "**.q_proj", "fprop": "nvfp4"},
            {"modules": "layers.2.q_proj", "fprop": {"x": "bf16"}},
        ]
    )
    assert resolved.row("layers.0.q_proj").gemms.texts()[:3] == ("nvfp4:row", "nvfp4:matrix", "mxfp8")
    assert resolved.row("layers.2.q_proj").gemms.texts()[:3] == ("bf16", "nvfp4:matrix", "mxfp8")
    assert resolved.row("layers.0.experts").gemms.texts() == ("mxfp8",) * 6


def test_what_no_rule_names_is_bf16():
    resolved = table([{"modules": "**", "kind": "experts", "all": "mxfp8"}])
    assert resolved.row("layers.0.q_proj").gemms.texts() == ("bf16",) * 6


def test_router_head_embeddings_and_norms_stay_in_high_precision():
    """The widest rule of all must not reach them: a wrong bit in a router moves tokens between experts."""
    resolved = table([{"modules": "**", "all": "mxfp4"}])
    assert {row.name for row in resolved.rows if row.protected} == {
        "lm_head",
        *(f"layers.{i}.gate" for i in range(6)),
    }
    assert all("lm_head" not in name and not name.endswith(".gate") for name in quantised(resolved))
    assert "embed_tokens" in resolved.kept
    assert "layers.0.norm" in resolved.kept
    assert not {"embed_tokens", "layers.0.norm"} & {row.name for row in resolved.rows}


def test_allow_opens_a_protected_module_and_nothing_else():
    resolved = table([{"modules": "lm_head", "all": {"format": "nvfp4"}}], allow=["lm_head"])
    assert quantised(resolved) == ["lm_head"]
    assert resolved.row("layers.0.gate").protected


def test_a_rule_for_a_protected_module_alone_says_how_to_allow_it():
    with pytest.raises(RecipeError, match=r"lm_head is protected; name it in allow"):
        table([{"modules": "lm_head", "all": "mxfp8"}])


def test_a_head_of_any_name_is_found_by_its_tie_to_the_embedding():
    model = Model(1)
    model.unembedding = nn.Linear(64, 16, bias=False)
    model.unembedding.weight = model.embed_tokens.weight
    resolved = resolve(load_recipe({"rule": [{"modules": "**", "all": "mxfp8"}]}), model)
    assert resolved.row("unembedding").protected


@pytest.mark.parametrize(
    ("layers", "total", "covered"),
    [
        ({"first": 2}, 6, [0, 1]),
        ({"last": 1}, 6, [5]),
        ({"last_fraction": "1/6"}, 6, [5]),
        ({"last_fraction": "1/6"}, 4, [3]),
        ({"last_fraction": "1/6"}, 12, [10, 11]),
        ({"last_fraction": 0.1667}, 12, [10, 11]),
        ({"first_fraction": 0.5}, 4, [0, 1]),
        ({"first": 9}, 2, [0, 1]),
    ],
)
def test_layers_are_counted_over_the_stack(layers, total, covered):
    resolved = table([{"modules": "**", "kind": "experts", "layers": layers, "all": "mxfp8"}], total)
    assert quantised(resolved) == [f"layers.{i}.experts" for i in covered]


@pytest.mark.parametrize(("total", "size"), [(48, 8), (24, 4)])
def test_the_last_sixth_is_that_of_the_published_checkpoints(total, size):
    span = next(rule.layers for rule in load_recipe("inkling").rules if rule.layers)
    assert isinstance(span, Layers)
    assert span.size(total) == size


def test_a_rule_that_matches_nothing_stops_with_its_line_and_near_misses(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[rule]]\nmodules = "**"\nall = "bf16"\n\n[[rule]]\nmodules = "**.qproj"\nall = "mxfp8"\n'
    )
    with pytest.raises(RecipeError, match=r"matches no module") as caught:
        resolve(load_recipe(path), Model())
    assert str(caught.value).startswith(f"{path}:5: ")
    assert "'**.qproj'" in str(caught.value)
    assert "layers.*.q_proj" in str(caught.value)


def test_a_bare_layer_is_told_to_be_put_into_a_model():
    with pytest.raises(RecipeError, match=r"has no name; put it into a torch.nn.Sequential$"):
        resolve(load_recipe("mxfp8"), nn.Linear(32, 32))


def test_an_optional_rule_may_match_nothing():
    assert quantised(table([{"modules": "**.nothing", "all": "mxfp8", "optional": True}])) == []


def test_the_wrong_kind_is_explained():
    with pytest.raises(RecipeError, match=r"layers\.0\.q_proj is of kind 'linear'"):
        table([{"modules": "**.q_proj", "kind": "experts", "all": "mxfp8"}])


def test_inkling_on_a_dense_model_says_what_to_use():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    with pytest.raises(RecipeError, match=r"inkling\.toml:\d+: .*routed experts.*mxfp8"):
        resolve(load_recipe("inkling"), Dense())


@pytest.mark.parametrize(
    ("shape", "rule", "words"),
    [
        ((40, 64), {"fprop": "nvfp4"}, ["K = 40", "multiple of 16", "nvfp4", "fprop.x", "tails"]),
        ((64, 40), {"dgrad": "mxfp8"}, ["N = 40", "multiple of 32", "mxfp8", "dgrad.dy"]),
        ((64, 40), {"fprop": {"w": "nvfp4-16x16"}}, ["N = 40", "multiple of 16", "fprop.w"]),
    ],
)
def test_an_axis_that_no_block_divides_names_module_size_block_and_fix(shape, rule, words):
    model = nn.Sequential(nn.Linear(*shape))
    with pytest.raises(RecipeError) as caught:
        resolve(load_recipe({"rule": [{"modules": "**", **rule}]}), model)
    assert str(caught.value).startswith("0: ")
    for word in words:
        assert word in str(caught.value)
    resolve(load_recipe({"rule": [{"modules": "**", **rule}], "blocks": {"tails": "allow"}}), model)


def test_the_table_puts_equal_layers_on_one_line():
    text = table(
        [{"modules": "**", "all": "mxfp8"}, {"modules": "**", "layers": {"last": 1}, "all": "bf16"}]
    ).text()
    lines = [line for line in text.splitlines() if "q_proj" in line]
    assert [line.split()[0] for line in lines] == ["layers.{0-4}.q_proj", "layers.5.q_proj"]
    assert "4 x (64x64, 64x32)" in text
    assert "kept in high precision: embed_tokens" in text


def test_the_recipe_in_the_documentation_does_what_its_comments_say(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
    path = tmp_path / "mine.toml"
    path.write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    resolved = resolve(load_recipe(path), Model())
    rows = [resolved.row(f"layers.{i}.experts").gemms.texts() for i in range(6)]
    assert rows[0] == rows[1] == ("bf16",) * 6
    assert rows[2] == rows[4] == ("nvfp4:row", "nvfp4:matrix", "mxfp8", "mxfp8~<", "mxfp8", "mxfp8~<")
    assert rows[5] == ("mxfp8", "mxfp8", *rows[4][2:])
    assert resolved.row("layers.5.q_proj").gemms.texts() == rows[4]


SCHEDULED = [
    {"modules": "**", "all": "mxfp8"},
    {"modules": "**.q_proj", "fprop": "bf16", "after": 0.82},
    {"modules": "**.experts", "fprop": "nvfp4", "after": 40},
]


def test_rules_come_into_force_after_a_step_or_a_share_of_the_steps():
    recipe = load_recipe({"rule": SCHEDULED})
    assert recipe.starts(100) == (0, 40, 82)
    resolved = resolve(recipe, Model(2), steps=100)
    fprop = {
        start: {row.name: row.gemms.fprop.x.format for row in rows}
        for start, rows in ((0, resolved.rows), *resolved.later)
    }
    assert [fprop[start]["layers.0.q_proj"] for start in (0, 40, 82)] == ["mxfp8", "mxfp8", "bf16"]
    assert [fprop[start]["layers.0.experts"] for start in (0, 40, 82)] == ["mxfp8", "nvfp4", "nvfp4"]
    text = resolved.text()
    assert text.index("from step 40 on") < text.index("nvfp4:row") < text.index("from step 82 on")
    assert "layers.{0-1}.q_proj" in text[text.index("from step 82 on") :]


def test_the_recipe_in_force_at_a_step_has_no_schedule_and_survives_saving():
    recipe = load_recipe({"rule": SCHEDULED})
    assert load_recipe(recipe.to_dict()) == recipe
    assert [len(recipe.at(step, 100).rules) for step in (0, 39, 40, 81, 82)] == [1, 1, 2, 2, 3]
    assert recipe.at(99, 100).starts(None) == (0,)
    assert recipe.at(99, 100).hash() != recipe.hash()


def test_a_share_of_unknown_steps_says_what_to_do():
    with pytest.raises(RecipeError, match=r"after 0\.82 of the steps, so say how many"):
        table(SCHEDULED)


@pytest.mark.parametrize("after", [0, -3, 1.0, "one half", True])
def test_a_wrong_moment_names_the_choices(after):
    with pytest.raises(RecipeError, match="a step, a whole number of at least 1, or a share"):
        load_recipe({"rule": [{"modules": "**", "all": "bf16", "after": after}]})


NVIDIA = (Path(recipes.__file__).parent / "nvidia.toml").read_text(encoding="utf-8")
FULL = (
    "nvfp4",
    "nvfp4-16x16:matrix",
    "nvfp4~",
    "nvfp4-16x16:matrix<",
    "nvfp4:matrix~+h16",
    "nvfp4:matrix+h16",
)


def nvidia_cells(text, tmp_path, layer=3):
    file = tmp_path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return resolve(load_recipe(file), Model(6), steps=100).row(f"layers.{layer}.q_proj").gemms.texts()


def test_nvidia_says_what_its_paper_says(tmp_path):
    assert nvidia_cells(NVIDIA, tmp_path) == FULL
    assert nvidia_cells(NVIDIA, tmp_path, layer=0) == ("bf16",) * 6
    assert nvidia_cells(NVIDIA, tmp_path, layer=5) == ("bf16",) * 6


@pytest.mark.parametrize(
    ("part", "without", "changed"),
    [
        (", hadamard = 16", "", {4: "nvfp4:matrix~", 5: "nvfp4:matrix"}),
        (', rounding = "stochastic"', "", {2: "nvfp4", 4: "nvfp4:matrix+h16"}),
        ('w = "nvfp4-16x16"', 'w = "nvfp4"', {1: "nvfp4:matrix"}),
        (', source = "forward"', "", {3: "nvfp4-16x16:matrix"}),
        ('outer = "tensor"', 'outer = "row"', {0: "nvfp4:row", 2: "nvfp4:row~"}),
    ],
)
def test_each_part_of_nvidia_is_switched_off_by_a_line(part, without, changed, tmp_path):
    assert part in NVIDIA
    cells = nvidia_cells(NVIDIA.replace(part, without), tmp_path)
    assert cells == tuple(changed.get(i, cell) for i, cell in enumerate(FULL))


def test_the_late_switch_of_nvidia_is_there_to_be_switched_on(tmp_path):
    head, _, tail = NVIDIA.partition("On:\n")
    file = tmp_path / "late.toml"
    file.write_text(head.rpartition("\n# The paper ends")[0] + re.sub(r"(?m)^# ", "", tail), encoding="utf-8")
    resolved = resolve(load_recipe(file), Model(6), steps=100)
    ((start, rows),) = resolved.later
    assert start == 82
    late = {row.name: row.gemms.texts() for row in rows}["layers.3.q_proj"]
    assert late == ("bf16", "bf16", *FULL[2:])


FOLDED = {"dy": {"format": "fp8-row", "source": "dgrad"}, "x": "fp8-row"}


@pytest.mark.parametrize(
    ("dgrad", "wgrad", "words"),
    [
        ("mxfp8", FOLDED, ["must be fp8-row", "dgrad.dy is mxfp8"]),
        ("fp8-row", {**FOLDED, "x": "mxfp8"}, ["wgrad.x is mxfp8"]),
        (
            {"dy": {"format": "fp8-row", "hadamard": 16}, "w": {"format": "fp8-row", "hadamard": 16}},
            FOLDED,
            ["without a Hadamard transform", "dgrad.dy is fp8-row+h16"],
        ),
        ({"dy": {"format": "fp8-row", "rounding": "stochastic"}, "w": "fp8-row"}, FOLDED, ["the rounding"]),
    ],
)
def test_wgrad_takes_codes_of_dgrad_only_where_both_are_made_for_it(dgrad, wgrad, words):
    recipe = load_recipe({"rule": [{"modules": "**", "dgrad": dgrad, "wgrad": wgrad}]})
    with pytest.raises(RecipeError) as caught:
        resolve(recipe, Model(1))
    assert all(word in str(caught.value) for word in words)


def test_only_dy_of_wgrad_is_an_operand_of_dgrad_too():
    with pytest.raises(RecipeError, match=re.escape("only wgrad.dy is an operand of it too")):
        load_recipe({"rule": [{"modules": "**", "wgrad": {"x": {"format": "fp8-row", "source": "dgrad"}}}]})
