"""Read a recipe from a built-in name, a TOML file or a dict; every error names the file, the line and the
choices."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from nybble.errors import RecipeError
from nybble.recipes.operand import OPERANDS, Operand, operand
from nybble.recipes.recipe import OPTIONS, STAGES, Recipe
from nybble.recipes.rule import KINDS, Layers, Rule
from nybble.recipes.traffic import LEGS, Traffic

_FOLDER = Path(__file__).parent
_RULE_KEYS = ("modules", "kind", "layers", "after", "optional", "hint", "all", "fprop", "dgrad", "wgrad")
_TOP_KEYS = ("name", "description", "allow", *OPTIONS, "rule", "rl")
_LAYER_KEYS = ("first", "last", "first_fraction", "last_fraction")


def builtin() -> list[str]:
    """Names of the recipes that come with Nybble."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_recipe(source: "str | Path | Mapping[str, Any] | Recipe") -> Recipe:
    """The recipe called `source`, in the TOML file `source`, or in the dict `source`.

    Raises RecipeError naming file, line and valid choices for unknown recipes, keys, formats and roundings.
    """
    if isinstance(source, Recipe):
        return source
    if isinstance(source, Mapping):
        return _Reader("the recipe's dict", "").recipe(source, str(source.get("name", "custom")))
    if not isinstance(source, str | Path):
        raise RecipeError(f"a recipe is a name, a TOML file, a dict or a Recipe, not {source!r}")
    path = _FOLDER / f"{source}.toml"
    if str(source) not in builtin():
        path = Path(source)
        if not path.is_file():
            close = difflib.get_close_matches(str(source), builtin(), n=1)
            raise RecipeError(
                f"unknown recipe {str(source)!r}: it is neither a TOML file nor one of {', '.join(builtin())}"
                + (f"; did you mean {close[0]!r}?" if close else "")
            )
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read as a recipe: {error}") from None
    return _Reader(str(path), text).recipe(data, path.stem)


class _Reader:
    """Turns TOML data into a Recipe. tomllib keeps no line numbers, so they are found again in the text."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.lines = text.splitlines()
        self.starts: list[int] = []
        """Lines of the headers of the rules being read."""

    def where(self, rule: int | None = None, key: str = "", under: str = "") -> str:
        """File and line of `key` in rule number `rule`, or of a key or table at the top."""
        if not self.lines:
            return self.file if rule is None else f"{self.file}, rule {rule + 1}"
        if rule is None:
            names = [name for name in (under, key) if name]
            for name in reversed(names):
                for n, line in enumerate(self.lines):
                    if re.match(rf"\s*(\[+\s*)?\"?{re.escape(name)}\"?\s*[\].=]", line):
                        return f"{self.file}:{n + 1}"
            return self.file
        if rule >= len(self.starts):
            return f"{self.file}, rule {rule + 1}"
        start = self.starts[rule]
        later = (n for n in range(start + 1, len(self.lines)) if re.match(r"\s*\[\[", self.lines[n]))
        end = next(later, len(self.lines))
        for n in range(start, end):
            if key and re.match(rf"\s*(\[\s*rule\.)?\"?{re.escape(key)}\"?\s*[\].=]", self.lines[n]):
                return f"{self.file}:{n + 1}"
        return f"{self.file}:{start + 1}"

    def recipe(self, data: Mapping[str, Any], name: str) -> Recipe:
        self._keys(data, _TOP_KEYS, "a recipe")
        options: dict[str, str] = {}
        for table, keys in OPTIONS.items():
            given = data.get(table, {})
            if not isinstance(given, Mapping):
                raise RecipeError(f"{self.where(None, table)}: [{table}] must be a table")
            self._keys(given, tuple(keys), f"[{table}]", under=table)
            for key, choices in keys.items():
                value = given.get(key, choices[0])
                if value not in choices:
                    raise RecipeError(
                        f"{self.where(None, key, table)}: unknown {table}.{key} {value!r}; "
                        f"choose {' or '.join(choices)}"
                    )
                options[f"{table}.{key}"] = value
        return Recipe(
            name=str(data.get("name", name)),
            description=str(data.get("description", "")),
            rules=self._rules(data, "rule"),
            allow=self._globs(data.get("allow", []), self.where(None, "allow"), "allow"),
            masters=options["masters.dtype"],
            keep=options["experts.keep"],
            cache=options["weights.cache"],
            tails=options["blocks.tails"],
            traffic=Traffic(**{leg: options[f"traffic.{leg}"] for leg in LEGS}),
            stages=self._stages(data.get("rl", {})),
            source=self.file,
        )

    def _stages(self, data: Any) -> tuple[tuple[str, tuple[Rule, ...]], ...]:
        """Rules of the stages of reinforcement learning, [[rl.sample.rule]] and [[rl.train.rule]]."""
        where = self.where(None, "rl")
        if not isinstance(data, Mapping) or not all(isinstance(stage, Mapping) for stage in data.values()):
            raise RecipeError(
                f"{where}: stages are written as [[rl.sample.rule]] and [[rl.train.rule]] tables"
            )
        self._keys(data, STAGES, "[rl]", under="rl")
        for name, stage in data.items():
            self._keys(stage, ("rule",), f"[rl.{name}]", under="rl")
        return tuple((name, self._rules(data[name], f"rl.{name}.rule")) for name in STAGES if name in data)

    def _rules(self, data: Mapping[str, Any], header: str) -> tuple[Rule, ...]:
        """The rules in `data`, whose tables are written [[header]]."""
        rules = data.get("rule", [])
        if not isinstance(rules, list) or not all(isinstance(rule, Mapping) for rule in rules):
            raise RecipeError(f"{self.where(None, 'rule')}: rules are written as [[{header}]] tables")
        pattern = rf"\s*\[\[\s*{re.escape(header)}\s*\]\]"
        self.starts = [n for n, line in enumerate(self.lines) if re.match(pattern, line)]
        return tuple(self._rule(n, rule) for n, rule in enumerate(rules))

    def _keys(
        self,
        data: Mapping[str, Any],
        valid: tuple[str, ...],
        what: str,
        rule: int | None = None,
        under: str = "",
    ) -> None:
        for key in data:
            if key not in valid:
                close = difflib.get_close_matches(str(key), valid, n=1)
                where = self.where(rule, str(key) if rule is None or not under else under, under)
                raise RecipeError(
                    f"{where}: unknown key {key!r} of {what}; "
                    + (f"did you mean {close[0]!r}? " if close else "")
                    + f"The keys are {', '.join(valid)}"
                )

    def _globs(self, value: Any, where: str, key: str) -> tuple[str, ...]:
        globs = [value] if isinstance(value, str) else value
        if not isinstance(globs, list) or not all(isinstance(g, str) and g for g in globs):
            raise RecipeError(f"{where}: {key} must be a glob over module names or a list of them")
        return tuple(globs)

    def _rule(self, n: int, data: Mapping[str, Any]) -> Rule:
        self._keys(data, _RULE_KEYS, "a rule", n)
        if not data.get("modules"):
            raise RecipeError(
                f"{self.where(n)}: a rule needs modules, a glob over module names or a list of them"
            )
        kind = data.get("kind")
        if kind is not None and kind not in KINDS:
            raise RecipeError(
                f"{self.where(n, 'kind')}: unknown kind {kind!r}; choose {' or '.join(KINDS)}, or "
                "leave it out for both"
            )
        if not isinstance(data.get("optional", False), bool):
            raise RecipeError(f"{self.where(n, 'optional')}: optional must be true or false")
        operands = self._operands(n, data)
        if not operands:
            raise RecipeError(f"{self.where(n)}: a rule must set a format: all, fprop, dgrad or wgrad")
        return Rule(
            modules=self._globs(data["modules"], self.where(n, "modules"), "modules"),
            operands=tuple((role, operands[role]) for role in OPERANDS if role in operands),
            kind=kind,
            layers=self._layers(n, data["layers"]) if "layers" in data else None,
            after=self._after(n, data["after"]) if "after" in data else None,
            optional=data.get("optional", False),
            hint=str(data.get("hint", "")),
            where=self.where(n),
        )

    def _operands(self, n: int, data: Mapping[str, Any]) -> dict[str, Operand]:
        out: dict[str, Operand] = {}
        for key in ("all", "fprop", "dgrad", "wgrad"):
            if key not in data:
                continue
            roles = [role for role in OPERANDS if key in ("all", role.split(".")[0])]
            value = data[key]
            entries: Mapping[str, Any] = {role.split(".")[1]: value for role in roles}
            if key != "all" and isinstance(value, Mapping) and "format" not in value:
                entries = value
                self._keys(entries, tuple(role.split(".")[1] for role in roles), key, n, under=key)
            for role in roles:
                name = role.split(".")[1]
                if name in entries:
                    if not isinstance(entries[name], str | Mapping):
                        raise RecipeError(
                            f"{self.where(n, key)}: {role} must be a format name or a table such as "
                            '{ format = "mxfp8", rounding = "stochastic" }'
                        )
                    try:
                        out[role] = operand(role, entries[name])
                    except RecipeError as error:
                        raise RecipeError(f"{self.where(n, key)}: {error}") from None
        return out

    def _after(self, n: int, value: Any) -> int | Fraction:
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        try:
            fraction = Fraction(str(value)) if isinstance(value, float | str) else Fraction(0)
        except (ValueError, ZeroDivisionError):
            fraction = Fraction(0)
        if not 0 < fraction < 1:
            raise RecipeError(
                f"{self.where(n, 'after')}: after must be a step, a whole number of at least 1, or a share "
                f"of all steps between 0 and 1, such as 0.82, not {value!r}"
            )
        return fraction

    def _layers(self, n: int, data: Any) -> Layers:
        where = self.where(n, "layers")
        if not isinstance(data, Mapping) or len(data) != 1 or next(iter(data)) not in _LAYER_KEYS:
            raise RecipeError(
                f"{where}: layers must be a table with one of the keys {', '.join(_LAYER_KEYS)}"
            )
        key, value = next(iter(data.items()))
        edge = key.removesuffix("_fraction")
        if key == edge:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RecipeError(
                    f"{where}: layers.{key} must be a whole number of at least 1, not {value!r}"
                )
            return Layers(edge=edge, count=value)
        try:
            fraction = Fraction(str(value))
        except (ValueError, ZeroDivisionError):
            fraction = Fraction(0)
        if not 0 < fraction <= 1:
            raise RecipeError(
                f"{where}: layers.{key} must be a share above 0 and at most 1, such as 0.25 or '1/6', "
                f"not {value!r}"
            )
        return Layers(edge=edge, fraction=fraction)
