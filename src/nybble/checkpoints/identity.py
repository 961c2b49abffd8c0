"""What a checkpoint belongs to: model, recipe and data. Resuming with another is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nybble.errors import CheckpointError
from nybble.recipes import load_recipe


def digest(value: Any) -> str:
    """SHA-256 of a JSON-like value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def check_identity(saved: dict[str, Any], now: dict[str, Any], where: Path) -> None:
    """Raises CheckpointError naming each entry (dotted) in which this run differs from the saved one."""
    differences = list(_differences(saved, now, ""))
    if differences:
        shown = "; ".join(differences[:4]) + ("; ..." if len(differences) > 4 else "")
        raise CheckpointError(
            f"{where} belongs to another run: {shown}; go on with what it was begun with, the version of "
            f"Nybble included{_recipe_of(saved, now, where)}, or begin a run of its own in another --out"
        )


def _recipe_of(saved: dict[str, Any], now: dict[str, Any], checkpoint: Path) -> str:
    """Where the recipe of the saved run is to be found, if it is another one."""
    kept = checkpoint.parent.parent / "recipe.toml"
    if saved.get("recipe") == now.get("recipe") or not kept.is_file():
        return ""
    return f" (its recipe, {load_recipe(kept).name}, with --recipe {kept})"


def _differences(saved: Any, now: Any, name: str) -> list[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        found: list[str] = []
        for key in sorted(saved.keys() | now.keys()):
            found += _differences(saved.get(key), now.get(key), f"{name}.{key}" if name else key)
        return found
    if saved == now:
        return []
    return [f"{name} is {_short(saved)} there and {_short(now)} here"]


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."
