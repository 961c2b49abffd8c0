"""What every launch of a kernel says."""

import ast
from pathlib import Path

import nybble

SOURCES = sorted(Path(nybble.__file__).parent.glob("*/cuda/*.py"))


def launches(path):
    """Calls of the form kernel[grid](...)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            grid = node.func.slice
            if isinstance(grid, ast.Tuple) or (isinstance(grid, ast.Name) and grid.id in ("grid", "across")):
                yield node


SHARED = ("gates.options", "tile.options()")
"""What launches take by **, and says it."""


def test_every_launch_says_whether_products_and_sums_may_fuse():
    """Releases of Triton differ in what they do where nothing is said, and warn."""
    found = [(path, call) for path in SOURCES for call in launches(path)]
    assert len(found) > 50
    silent = [
        f"{path.name}:{call.lineno}"
        for path, call in found
        if not any(
            k.arg == "enable_fp_fusion" or (k.arg is None and ast.unparse(k.value) in SHARED)
            for k in call.keywords
        )
    ]
    assert silent == []
