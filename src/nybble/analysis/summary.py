"""What a comparison knows of one run: read from its folder once, kept as one line of JSON.

The line is enough for reports, and for a comparison elsewhere to count the run as done.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nybble.errors import ConfigError

CHOICES = "choices.json"
DIVERGED = "diverged.json"
NUMBER = int | float


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run of one recipe."""

    preset: str
    recipe: str
    seed: int
    tokens: int
    """Tokens of the whole run."""
    share: float = 1.0
    """Its length as a share of the comparison's: shorter runs of the baseline give its curve."""
    flops_per_token: float = 0.0
    """Six times the weights that a token meets."""
    curve: tuple[tuple[int, float], ...] = ()
    """(tokens seen, validation loss in nats a token)."""
    domains: dict[str, float] | None = None
    """Last validation loss of each domain of the data, where it has several."""
    val_loss: float | None = None
    """At the last step; None for a run that diverged."""
    accuracy: float | None = None
    """Share of multiple-choice questions answered."""
    tokens_per_s: float | None = None
    """Median over the steps."""
    diverged: str = ""
    """Step and place where a NaN or an infinity came up first."""
    settings: str = ""
    """Digest of all that runs of one comparison share."""
    recipe_hash: str = ""
    data: str = ""
    """Digest of the dataset."""
    made_on: str = ""
    """Device and versions."""

    @property
    def key(self) -> tuple[str, str, int, float]:
        """Which run of a comparison it is."""
        return self.preset, self.recipe, self.seed, self.share

    @property
    def flops(self) -> float:
        """Of the whole run."""
        return self.tokens * self.flops_per_token

    def text(self) -> str:
        """What it came to, for a line."""
        if self.diverged:
            return f"diverged: {self.diverged}"
        answers = "" if self.accuracy is None else f", {100 * self.accuracy:.0f} % of the questions"
        return f"{self.val_loss:.4f} nats a token{answers}"

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def read_lines(path: Path) -> list[RunSummary]:
    """The summaries in a file of `RunSummary.to_json` lines. Raises ConfigError for a line that is none."""
    found = []
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                fields = json.loads(line)
                fields["curve"] = tuple((tokens, loss) for tokens, loss in fields["curve"])
                found.append(RunSummary(**fields))
                _check_kinds(fields)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(
                    f"{path}, line {number} is no summary of a run ({error}); name a runs.jsonl of "
                    "nybble compare"
                ) from None
    return found


def _check_kinds(fields: dict[str, Any]) -> None:
    """Raises TypeError or AttributeError for a value that no summary has."""
    kinds = {
        **dict.fromkeys(("preset", "recipe"), str),
        **dict.fromkeys(("seed", "tokens"), int),
        **dict.fromkeys(("share", "flops_per_token"), NUMBER),
        **dict.fromkeys(("val_loss", "accuracy", "tokens_per_s"), NUMBER | None),
    }
    values = [(name, fields[name], kind) for name, kind in kinds.items() if name in fields]
    values += [("curve", value, NUMBER) for point in fields["curve"] for value in point]
    values += [("domains", value, NUMBER) for value in (fields.get("domains") or {}).values()]
    for name, value, kind in values:
        if not isinstance(value, kind):
            raise TypeError(f"{name} has {value!r}")


def read_summary(folder: Path, rows: list[dict[str, Any]], steps: int, **known: Any) -> RunSummary | None:
    """The summary of the run in `folder` with metrics `rows`; None if it neither ended nor diverged."""
    validated = [row for row in rows if "val_loss" in row]
    speeds = sorted(row["tokens_per_s"] for row in rows[1:])
    environment = folder / "env.json"
    if environment.is_file():
        facts = json.loads(environment.read_text(encoding="utf-8"))
        revision = facts["git_revision"]
        known["made_on"] = f"{facts['numerics']}; torch {facts['versions']['torch']}" + (
            f"; revision {revision}" if revision else ""
        )
    seen: dict[str, Any] = {
        "curve": tuple((row["tokens"], row["val_loss"]) for row in validated),
        "tokens_per_s": speeds[len(speeds) // 2] if speeds else None,
    }
    if (folder / DIVERGED).is_file():
        fault = json.loads((folder / DIVERGED).read_text(encoding="utf-8"))
        return RunSummary(**known, **seen, diverged=fault["reason"])
    if not rows or rows[-1]["step"] != steps:
        return None
    last = rows[-1]
    domains = {k.partition("/")[2]: v for k, v in last.items() if k.startswith("val_loss/")}
    answers = folder / CHOICES
    accuracy = json.loads(answers.read_text(encoding="utf-8"))["accuracy"] if answers.is_file() else None
    return RunSummary(**known, **seen, val_loss=last["val_loss"], domains=domains or None, accuracy=accuracy)
