"""A planted cost is found again, with an interval that tells how sure that is."""

import math

import numpy as np
import pytest

from nybble.analysis.compare import compare, fits
from nybble.analysis.compare_plot import plot_comparison
from nybble.analysis.compare_report import markdown
from nybble.analysis.fit import PowerLaw, equivalent_cost, fit_power_law, interval, jackknife
from nybble.analysis.summary import RunSummary

LAW = PowerLaw(2.0, 50.0, 0.3)
TOKENS = 1_000_000


def runs(cost, seeds, noise=2e-4, presets=("tiny",), seed=0, spread=0.02):
    """Runs of a baseline of three lengths, and of a recipe that needs `cost` more tokens than it."""
    draw = np.random.default_rng(seed)
    found = []
    for scale, preset in enumerate(presets):
        tokens = TOKENS * 4**scale
        for s in seeds:
            offset = draw.normal() * spread  # what a seed does to all runs alike is far above the gap
            for recipe, share in (("bf16", 0.5), ("bf16", 0.75), ("bf16", 1.0), ("four", 1.0)):
                seen = tokens * share
                loss = LAW.loss(seen / (1 + cost if recipe == "four" else 1)) + offset + draw.normal() * noise
                known = {"preset": preset, "recipe": recipe, "seed": s, "tokens": int(seen), "share": share}
                found.append(RunSummary(**known, flops_per_token=6e6, val_loss=loss))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_token_cost_of_5_per_cent_is_recovered_with_its_interval(seed):
    base, four = compare(runs(0.05, range(6), seed=seed), "bf16", range(6))
    assert base.token_cost is None
    cost = four.token_cost
    assert cost.low < 5 < cost.high
    assert 0.05 < cost.half < 1.5
    gap = 100 * (LAW.loss(TOKENS / 1.05) / LAW.loss(TOKENS) - 1)
    assert four.gap_percent.low < gap < four.gap_percent.high


def test_intervals_cover_as_often_as_they_say():
    """Of 200 comparisons of three seeds about 95 % must hold the truth."""
    held = 0
    for seed in range(200):
        cost = compare(runs(0.05, range(3), seed=seed), "bf16", range(3))[1].token_cost
        held += cost.low < 5 < cost.high
    assert 180 <= held < 200


def test_without_noise_the_costs_are_exact():
    exact = runs(0.05, range(2), noise=0, presets=("a", "b", "c"), spread=0)
    four = [result for result in compare(exact, "bf16", range(2)) if result.recipe == "four"]
    assert [r.token_cost.mean for r in four] == pytest.approx([5, 5, 5], abs=0.05)
    assert [r.compute_cost.mean for r in four] == pytest.approx([5, 5, 5], abs=0.05)
    assert max(r.token_cost.half for r in four) < 1e-6
    laws = fits(exact, "bf16")
    assert [(fit.along, fit.preset, len(fit.points), len(fit.seeds)) for fit in laws] == [
        *(("tokens", preset, 3, 2) for preset in "abc"),
        ("compute", "", 3, 2),
    ]
    for fit in laws:
        assert (fit.law.floor, fit.law.exponent) == pytest.approx((2.0, 0.3), rel=0.02)
    report = markdown([], "bf16", range(2), [], laws)
    assert "- a, by tokens, 3 lengths, 2 seeds: 2.0" in report
    assert "* (tokens / 1,000,000)^-0.3" in report
    assert "- by compute, 3 sizes, 2 seeds: 2.0" in report


def test_on_a_ladder_tokens_grow_with_size():
    """Loss falls with compute alone: at equal tokens by sizes too, on a ladder by what it says."""
    found = []
    for size, preset in enumerate("abc"):
        for recipe, share in (("bf16", 0.5), ("bf16", 1.0), ("bf16", 2.0), ("four", 1.0)):
            compute = TOKENS * share * 6e6 * 4**size
            cost = 1.05 if recipe == "four" else 1.0
            loss = LAW.loss(compute / 6e6 / cost) + (5.0 if (preset, share) == ("c", 2.0) else 0.0)
            known = {"preset": preset, "recipe": recipe, "seed": 0, "tokens": int(TOKENS * share)}
            found.append(RunSummary(**known, share=share, flops_per_token=6e6 * 4**size, val_loss=loss))
    ladder = {"a": 0.5, "b": 1.0, "c": 1.0}
    (law,) = [fit for fit in fits(found, "bf16", ladder) if fit.along == "compute"]
    assert list(law.points) == [TOKENS * 6e6 * times for times in (0.5, 4, 16)]
    results = compare(found, "bf16", range(1), rungs=ladder)
    costs = [result.compute_cost.mean for result in results if result.recipe == "four"]
    assert costs == pytest.approx([5, 5, 5], abs=0.1)
    # What lies beyond the recipes' own length has no part in costs in tokens.
    assert [len(fit.points) for fit in fits(found, "bf16") if fit.along == "tokens"] == [2, 2, 2]


def test_the_picture_has_a_row_for_each_size_and_one_for_all_of_several(tmp_path):
    heights = []
    for presets in (("a",), ("a", "b", "c")):
        found = runs(0.05, range(2), presets=presets)
        path = tmp_path / f"{len(presets)}.png"
        plot_comparison(found, compare(found, "bf16", range(2)), "bf16", fits(found, "bf16"), path)
        heights.append(int.from_bytes(path.read_bytes()[20:24], "big"))
    assert heights[1] == 4 * heights[0]


def test_a_recipe_that_is_better_costs_less_than_nothing():
    assert compare(runs(-0.03, range(4)), "bf16", range(4))[1].token_cost.high < 0


def test_a_missing_seed_widens_the_interval_and_is_named():
    whole = runs(0.05, range(3))
    less = [run for run in whole if (run.recipe, run.seed) != ("four", 2)]
    four = compare(less, "bf16", range(3))[1]
    assert four.missing == (2,)
    assert four.gap_percent.n == 2
    wider = [
        compare(
            [r for r in runs(0.05, range(3), seed=s) if (r.recipe, r.seed) != ("four", 2)], "bf16", range(3)
        )
        for s in range(9)
    ]
    full = [compare(runs(0.05, range(3), seed=s), "bf16", range(3)) for s in range(9)]
    halves = [np.median([r[1].gap_percent.half for r in results]) for results in (wider, full)]
    assert halves[0] > 1.5 * halves[1]
    alone = compare([run for run in less if run.seed != 1], "bf16", range(3))[1]
    assert alone.missing == (1, 2)
    assert math.isinf(alone.gap_percent.half)
    assert math.isinf(alone.token_cost.half)


def test_a_diverged_run_is_a_result_and_leaves_the_others_alone():
    whole = runs(0.05, range(3))
    fallen = RunSummary(preset="tiny", recipe="four", seed=1, tokens=TOKENS, diverged="step 7: layers.3.mlp")
    kept = [run for run in whole if (run.recipe, run.seed) != ("four", 1)]
    four = compare([*kept, fallen], "bf16", range(3))[1]
    assert four.diverged == ((1, "step 7: layers.3.mlp"),)
    assert four.loss.n == 2
    nothing = compare([run for run in whole if run.recipe == "bf16"] + [fallen], "bf16", range(3))[1]
    assert nothing.loss is None
    assert nothing.token_cost is None


def test_a_recipe_without_any_run_is_in_the_table_too():
    planned = [("tiny", "bf16"), ("tiny", "four"), ("tiny", "five")]
    five = compare(runs(0.05, range(3)), "bf16", range(3), planned)[2]
    assert (five.recipe, five.missing, five.gap_percent, five.token_cost) == ("five", (0, 1, 2), None, None)
    text = markdown([five], "bf16", range(3), [])
    assert "| `five` | 0 | \u2013 |" in text
    assert "no pair of runs for seed 0, 1, 2" in text


def test_one_size_has_no_cost_over_sizes_and_one_length_none_in_tokens():
    only = [run for run in runs(0.05, range(2)) if run.share == 1]
    four = compare(only, "bf16", range(2))[1]
    assert four.compute_cost is None
    assert four.token_cost is None


def test_power_laws_are_found_again_and_inverted():
    x = np.geomspace(1e5, 1e7, 6)
    law = fit_power_law(x, [LAW.loss(v) for v in x])
    assert (law.floor, law.exponent) == pytest.approx((2.0, 0.3), rel=0.02)
    assert law.reach(law.loss(3e6)) == pytest.approx(3e6, rel=1e-9)
    assert law.reach(1.9) is None
    assert equivalent_cost(law, 1e6, 0.0) == pytest.approx(0, abs=1e-9)
    assert fit_power_law([1e5, 1e6], [3.0, 3.1]) is None
    assert fit_power_law([1e5, 1e5], [3.0, 3.1]) is None


def test_the_interval_is_students():
    found = interval([1.0, 2.0, 3.0])
    assert found.half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert jackknife([0, 1, 2], lambda some: sum(s + 1 for s in some) / len(some)) == pytest.approx(found)
    assert interval([]) is None
