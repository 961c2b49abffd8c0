"""Recipes: which operand of which GEMM of which layer is in which format. Built-ins are the TOML files in
this folder."""

from nybble.recipes.load import builtin, load_recipe
from nybble.recipes.operand import OPERANDS, GemmTable, Operand
from nybble.recipes.recipe import Recipe
from nybble.recipes.resolve import kind_of, resolve
from nybble.recipes.rule import Layers, Rule
from nybble.recipes.table import Row, Table
from nybble.recipes.traffic import LEGS, Traffic

__all__ = [
    "LEGS",
    "OPERANDS",
    "GemmTable",
    "Layers",
    "Operand",
    "Recipe",
    "Row",
    "Rule",
    "Table",
    "Traffic",
    "builtin",
    "kind_of",
    "load_recipe",
    "resolve",
]
