"""`nybble recipes`: the built-in recipes, or the rules of one."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from nybble.commands.flags import parse_flags


@dataclass(frozen=True, kw_only=True)
class RecipesConfig:
    """List the built-in recipes, or print the rules of one as TOML."""

    recipe: tyro.conf.Positional[str] = ""
    """Name of a built-in recipe, or a TOML file; left out, all names are listed."""


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    config = parse_flags(RecipesConfig, arguments, "recipes")
    from nybble.recipes import builtin, load_recipe

    if config.recipe:
        print(load_recipe(config.recipe).to_toml(), end="")
        return 0
    found = [load_recipe(name) for name in builtin()]
    width = max(len(recipe.name) for recipe in found)
    for recipe in found:
        print(f"{recipe.name:<{width}}  {recipe.description}")
    return 0
