"""The tables in docs/results are what the summaries beside them give."""

import csv
from pathlib import Path

import pytest

from nybble.analysis.compare import compare
from nybble.analysis.compare_report import table_csv
from nybble.analysis.summary import read_lines
from nybble.models import presets
from nybble.recipes import load_recipe, resolve

FOLDER = Path(__file__).parents[2] / "docs" / "results"


LADDER = {"tiny": 0.5, "mini": 1.0, "small": 2.0}


@pytest.mark.parametrize(
    ("name", "source", "baseline", "seeds", "rungs"),
    [
        ("h200", "h200", "bf16", 5, LADDER),
        ("h200-variants", "h200", "bf16", 5, {}),
        ("h200-hybrid", "h200-hybrid", "fp8", 3, {}),
    ],
    ids=["moe", "variants", "hybrid"],
)
def test_a_published_table_follows_from_its_runs(
    name: str, source: str, baseline: str, seeds: int, rungs: dict[str, float]
) -> None:
    published = list(csv.DictReader((FOLDER / f"{name}-table.csv").read_text().splitlines()))
    planned = [(row["preset"], row["recipe"]) for row in published]
    presets_of = {preset for preset, _ in planned}
    runs = [run for run in read_lines(FOLDER / f"{source}-runs.jsonl") if run.preset in presets_of]
    results = compare(runs, baseline, range(seeds), planned, rungs)
    again = list(csv.DictReader(table_csv(results).splitlines()))
    assert [row.keys() for row in again] == [row.keys() for row in published]
    for ours, theirs in zip(again, published, strict=True):
        for column, value in theirs.items():
            if column in ("preset", "recipe", "missing", "diverged") or not value:
                assert ours[column] == value
            else:
                assert float(ours[column]) == pytest.approx(float(value), rel=1e-4, abs=1e-6), column


@pytest.mark.parametrize("path", sorted((FOLDER / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_a_recipe_that_was_measured_still_fits_its_model(path: Path) -> None:
    recipe = load_recipe(str(path))
    assert recipe.name == path.stem
    resolve(recipe, presets.get("tiny").meta_model(), 400)
