"""`nybble inspect`: the resolved table of a recipe on a preset; no weights are made."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from nybble.commands.flags import parse_flags


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """Show the precision of every operand of every GEMM of a model under a recipe, without training."""

    preset: tyro.conf.Positional[str] = "tiny"
    """Model, such as tiny or small."""
    recipe: str = "inkling"
    """Name of a built-in recipe, or a TOML file."""


def main(arguments: list[str]) -> int:
    """Runs the verb; returns its exit status."""
    config = parse_flags(InspectConfig, arguments, "inspect")
    from nybble.models import presets
    from nybble.recipes import load_recipe, resolve

    preset = presets.get(config.preset)
    recipe = load_recipe(config.recipe)
    model = preset.meta_model()
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{preset.name}: {preset.description}; {parameters / 1e6:.1f} M parameters")
    print(resolve(recipe, model, preset.steps).text(), end="")
    return 0
