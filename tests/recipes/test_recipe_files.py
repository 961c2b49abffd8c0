"""Recipes as files: built-ins load, survive saving, and every mistake names its file, its line and the
choices."""

import re

import pytest

from nybble.errors import RecipeError
from nybble.recipes import OPERANDS, builtin, load_recipe
from nybble.recipes.recipe import FREE, OPTIONS, Recipe

GOOD = '[[rule]]\nmodules = "**"\nall = "mxfp8"\n'


def test_the_six_recipes_are_built_in():
    assert set(builtin()) >= {"bf16", "mxfp8", "inkling", "inkling-4over6", "mxfp4", "fp8"}


@pytest.mark.parametrize("name", builtin())
def test_a_recipe_survives_saving(name, tmp_path):
    recipe = load_recipe(name)
    saved = tmp_path / "saved.toml"
    saved.write_text(recipe.to_toml())
    again = load_recipe(saved)
    assert again == recipe
    assert again.hash() == recipe.hash()


def test_the_hash_tells_recipes_apart_but_not_their_names_nor_what_they_keep():
    hashes = [load_recipe(name).hash() for name in builtin()]
    assert len(set(hashes)) == len(hashes)
    a = load_recipe({"name": "a", "description": "one", "rule": [{"modules": "**", "all": "mxfp8"}]})
    b = load_recipe({"name": "b", "rule": [{"modules": ["**"], "all": {"format": "mxfp8"}}]})
    assert a.hash() == b.hash()
    c = load_recipe(a.to_dict() | {"experts": {"keep": "activations"}, "weights": {"cache": "none"}})
    assert c.hash() == a.hash()
    assert c != a


def test_what_a_rule_says_where_it_matches_nothing_does_not_count_in_the_hash():
    rule = {"modules": "**", "all": "mxfp8"}
    plain, said = (
        load_recipe({"rule": [r], "rl": {"train": {"rule": [r]}}})
        for r in (rule, {**rule, "optional": True, "hint": "take another"})
    )
    assert said.hash() == plain.hash()
    assert said != plain
    assert load_recipe(said.to_dict()) == said


@pytest.mark.parametrize("table", OPTIONS)
def test_every_option_is_saved_and_counts_unless_it_is_said_to_be_free(table, monkeypatch):
    usual = load_recipe({"rule": []})
    for key, choices in OPTIONS[table].items():
        changed = load_recipe({"rule": [], table: {key: choices[1]}})
        assert load_recipe(changed.to_dict()) == changed
        assert changed != usual
        assert (changed.hash() == usual.hash()) is (key in FREE.get(table, ()))
    content = usual._content()
    content.setdefault(table, {})["of-tomorrow"] = "x"
    before = usual.hash()
    monkeypatch.setattr(Recipe, "_content", lambda _: content)
    assert usual.hash() != before


def test_inkling_says_what_the_design_says():
    experts = {
        role: dict(rule.operands)[role] for role in OPERANDS for rule in load_recipe("inkling").rules[1:2]
    }
    assert experts["fprop.x"].text() == "nvfp4:row"
    assert experts["fprop.w"].text() == "nvfp4:matrix"
    assert experts["dgrad.dy"].text() == "mxfp8"
    assert experts["dgrad.w"].text() == "mxfp8~<"
    assert experts["wgrad.dy"].text() == "mxfp8"
    assert experts["wgrad.x"].text() == "mxfp8~<"
    assert load_recipe("inkling").masters == "fp32"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (GOOD + "[mastres]\ndtype = 'fp32'\n", 4, ["'mastres'", "did you mean 'masters'", "experts"]),
        ("[masters]\ndtype = 'fp16'\n", 2, ["masters.dtype 'fp16'", "fp32 or bf16"]),
        ("[experts]\nkepe = 'recompute'\n", 2, ["'kepe'", "did you mean 'keep'"]),
        (GOOD + "\n" + GOOD.replace("mxfp8", "mxfp9"), 7, ["'mxfp9'", "mxfp8", "nvfp4"]),
        ("[[rule]]\nmodules = '**'\nformat = 'nvfp4'\n", 3, ["'format'", "all, fprop, dgrad, wgrad"]),
        ("[[rule]]\nall = 'nvfp4'\n", 1, ["needs modules"]),
        ("[[rule]]\nmodules = '**'\n", 1, ["must set a format"]),
        ("[[rule]]\nmodules = '**'\nkind = 'expert'\nall = 'bf16'\n", 3, ["'expert'", "linear or experts"]),
        (
            "[[rule]]\nmodules = '**'\nall = 'bf16'\nlayers = { last_fraction = 1.5 }\n",
            4,
            ["last_fraction", "1.5"],
        ),
        (
            "[[rule]]\nmodules = '**'\nall = 'bf16'\nlayers = { lats = 1 }\n",
            4,
            ["first, last, first_fraction"],
        ),
        ("[[rule]]\nmodules = '**'\nfprop = { y = 'bf16' }\n", 3, ["'y'", "x, w"]),
        (
            "[[rule]]\nmodules = '**'\ndgrad.dy = { format = 'mxfp8', rounding = 'up' }\n",
            3,
            ["'up'", "stochastic"],
        ),
        (
            "[[rule]]\nmodules = '**'\n[rule.fprop]\nx = { format = 'nvfp4', outer = 'matrix' }\n",
            3,
            ["row or tensor"],
        ),
        (
            "[[rule]]\nmodules = '**'\nfprop = { x = { format = 'mxfp8', source = 'forward' } }\n",
            3,
            ["dgrad.w"],
        ),
        ("[[rule]]\nmodules = '**'\nfprop = { x = 'nvfp4-16x16' }\n", 3, ["mix tokens"]),
        (
            "[[rule]]\nmodules = '**'\nwgrad = { x = { format = 'bf16', rounding = 'stochastic' } }\n",
            3,
            ["nearest"],
        ),
        (
            "[[rule]]\nmodules = '**'\nwgrad = { x = { fromat = 'bf16' } }\n",
            3,
            ["'fromat'", "format, rounding"],
        ),
    ],
)
def test_a_mistake_names_its_line_and_the_choices(text, line, words, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:{line}: ")
    for word in words:
        assert word in message
    assert "\n" not in message


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(RecipeError, match=re.escape("did you mean 'inkling'")) as caught:
        load_recipe("inklin")
    assert "mxfp4" in str(caught.value)


def test_a_file_that_is_not_toml_says_so(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("[[rule]\nmodules = ")
    with pytest.raises(RecipeError, match="cannot be read as a recipe"):
        load_recipe(path)


def test_a_dict_names_the_rule_instead_of_a_line():
    with pytest.raises(RecipeError, match="rule 2"):
        load_recipe({"rule": [{"modules": "**", "all": "bf16"}, {"modules": "**", "all": "nope"}]})


def test_shorthands_set_the_operands_of_a_gemm_or_all():
    rule = load_recipe(
        {"rule": [{"modules": "**", "all": "mxfp8", "fprop": "nvfp4", "wgrad": {"dy": "bf16"}}]}
    ).rules[0]
    assert [operand.text() for _, operand in rule.operands] == [
        "nvfp4:row", "nvfp4:matrix", "mxfp8", "mxfp8", "bf16", "mxfp8",
    ]  # fmt: skip


def test_stages_of_reinforcement_learning_add_rules_of_their_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[rule]]\nmodules = "**"\nall = "mxfp8"\n\n'
        '[[rl.sample.rule]]\nmodules = "**"\nfprop = "nvfp4"\n\n'
        '[[rl.train.rule]]\nmodules = "**.experts"\ndgrad = "bf16"\n'
    )
    recipe = load_recipe(path)
    assert load_recipe(recipe.to_dict()) == recipe
    assert [len(recipe.stage(name).rules) for name in ("sample", "train")] == [2, 2]
    assert recipe.stage("sample").rules[1].where == f"{path}:5"
    plain = load_recipe("inkling")
    assert plain.stage("sample") == plain.stage("train") == plain, "one forward pass unless a recipe says so"
    assert recipe.hash() != load_recipe({**recipe.to_dict(), "rl": {}}).hash()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[[rl.sampler.rule]]\nmodules = '**'\nall = 'bf16'",
            "unknown key 'sampler' of .rl.; did you mean 'sample'",
        ),
        ("[rl]\nsample = 3", "stages are written as"),
        ("[rl.sample]\nrules = 3", "unknown key 'rules'"),
        ("[[rl.train.rule]]\nmodules = '**'\nall = 'bf15'", ":3: .*bf15"),
    ],
)
def test_mistakes_in_stages_are_named(text, message, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)
