"""A recipe: an ordered list of rules and the few options that belong to no single layer."""

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import tomli_w

from nybble.formats import table as formats
from nybble.recipes.operand import Operand
from nybble.recipes.rule import Rule
from nybble.recipes.traffic import FORMATS, LEGS, Traffic

OPTIONS: dict[str, dict[str, tuple[str, ...]]] = {
    "masters": {"dtype": ("fp32", "bf16")},
    "experts": {"keep": ("recompute", "activations")},
    "weights": {"cache": ("auto", "values", "codes", "none")},
    "blocks": {"tails": ("error", "allow")},
    "traffic": dict.fromkeys(LEGS, FORMATS),
}
"""Tables of single options; the first choice is the default."""

FREE = {"experts": ("keep",), "weights": ("cache",), "blocks": ("tails",)}
"""Options that leave every bit alone: they trade memory for time, or say which models are refused."""

FREE_OF_RULES = ("optional", "hint")
"""Keys of rules that say no more than which models are refused, and how."""

STAGES = ("sample", "train")
"""Stages of reinforcement learning that may have rules of their own, as [[rl.sample.rule]]."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Which operand of which GEMM of which module is in which format."""

    name: str
    description: str = ""
    rules: tuple[Rule, ...] = ()
    """Last match wins, operand by operand; what no rule names is BF16."""
    allow: tuple[str, ...] = ()
    """Globs of protected modules (head, router) that rules may quantise all the same."""
    masters: str = "fp32"
    """dtype of the parameters that the optimiser updates."""
    keep: str = "recompute"
    """What experts keep of their activations: "recompute" keeps codes only, "activations" the gate and up
    outputs too."""
    cache: str = "auto"
    """What is kept of quantised weights over micro-batches: operand values, codes, nothing, or by size
    ("auto")."""
    tails: str = "error"
    """Whether a feature axis may end in a block that is not full."""
    traffic: Traffic = field(default_factory=Traffic)
    """Formats of what travels between ranks that share experts."""
    stages: tuple[tuple[str, tuple[Rule, ...]], ...] = ()
    """(stage, rules that follow the others in it), of the stages that have any."""
    source: str = field(default="", compare=False)
    """Where it was read from, for messages; not part of its identity."""

    def starts(self, steps: int | None) -> tuple[int, ...]:
        """The optimiser steps from which another set of rules is in force, 0 first, in a run of `steps`."""
        return tuple(sorted({0, *(rule.start(steps) for rule in self.rules)}))

    def at(self, step: int, steps: int | None) -> "Recipe":
        """The recipe that is in force at `step`, itself without a schedule."""
        if all(rule.after is None for rule in self.rules):
            return self
        kept = (replace(rule, after=None) for rule in self.rules if rule.start(steps) <= step)
        return replace(self, rules=tuple(kept))

    def stage(self, name: str) -> "Recipe":
        """The recipe of the stage "sample" or "train": its rules come after the others, and so win."""
        return replace(self, rules=self.rules + dict(self.stages).get(name, ()), stages=())

    def to_dict(self) -> dict[str, Any]:
        """The recipe as TOML data; `load_recipe(recipe.to_dict())` gives an equal one."""
        out: dict[str, Any] = {"name": self.name, "description": self.description, **self._content()}
        return {key: value for key, value in out.items() if value not in ("", [])}

    def to_toml(self) -> str:
        """The recipe as TOML text, to be saved beside a run."""
        return tomli_w.dumps(self.to_dict())

    def hash(self) -> str:
        """12 hex digits that are equal when the numbers are: names do not count, nor does what is FREE."""
        content = self._content()
        for table, names in FREE.items():
            content[table] = {key: value for key, value in content[table].items() if key not in names}
        for rule in (rule for part in (content, *content.get("rl", {}).values()) for rule in part["rule"]):
            for key in FREE_OF_RULES:
                rule.pop(key, None)
        content = {key: value for key, value in content.items() if value != {}}
        return hashlib.sha256(tomli_w.dumps(content).encode()).hexdigest()[:12]

    def _content(self) -> dict[str, Any]:
        changed = self.traffic.changed()
        stages = {name: {"rule": [_rule(rule) for rule in rules]} for name, rules in self.stages}
        return {
            **({"traffic": changed} if changed else {}),
            "allow": list(self.allow),
            "masters": {"dtype": self.masters},
            "experts": {"keep": self.keep},
            "weights": {"cache": self.cache},
            "blocks": {"tails": self.tails},
            "rule": [_rule(rule) for rule in self.rules],
            **({"rl": stages} if stages else {}),
        }


def _rule(rule: Rule) -> dict[str, Any]:
    out: dict[str, Any] = {"modules": list(rule.modules)}
    if rule.kind:
        out["kind"] = rule.kind
    if rule.layers:
        key = rule.layers.edge + ("" if rule.layers.fraction is None else "_fraction")
        out["layers"] = {
            key: rule.layers.count if rule.layers.fraction is None else str(rule.layers.fraction)
        }
    if rule.after is not None:
        out["after"] = rule.after if isinstance(rule.after, int) else str(rule.after)
    if rule.optional:
        out["optional"] = True
    if rule.hint:
        out["hint"] = rule.hint
    for role, value in rule.operands:
        gemm, name = role.split(".")
        out.setdefault(gemm, {})[name] = _operand(value)
    return out


def _operand(value: Operand) -> dict[str, Any]:
    out: dict[str, Any] = {"format": value.format, "rounding": value.rounding, "source": value.source}
    if formats.get(value.format).two_level:
        out["outer"] = value.outer
    if value.hadamard:
        out |= {"hadamard": value.hadamard, "signs": value.signs}
    if value.subtract_mean:
        out["subtract_mean"] = True
    return out
