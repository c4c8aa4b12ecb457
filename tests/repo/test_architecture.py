"""The graph of imports inside the project: imports go down only, and never in a circle.

Imports inside functions and under `TYPE_CHECKING` count like all others.
"""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"grpo_recipes": ROOT / "grpo_recipes", "grpo_rewards": ROOT / "rewards" / "grpo_rewards"}

# From top to bottom. A folder (or a file of the top level) imports from lower lines only, never from its own line.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("quickstart",),
    ("cli", "train"),
    ("run",),
    ("reports",),
    ("plan",),
    ("evaluation", "training"),
    ("generation",),
    ("checks",),
    ("tools",),
    ("data",),
    ("recipe",),
    ("runs",),
    ("process",),
)
RUN_IMPORTS = 20
"""Largest number of our modules that a file of `grpo_recipes/run` imports, in functions too."""

REWARDS_WITH_TORCH = {"grpo_rewards.attention", "grpo_rewards.internlm2", "grpo_rewards.reward_model"}


@cache
def modules() -> dict[str, Path]:
    """Map the dotted name of every module of both packages to its file."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


@cache
def imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def graph() -> dict[str, set[str]]:
    """Map each of our modules to those of our modules that it imports.

    The package `grpo_recipes` itself is left out: its `__init__` only names what users import, on first use.
    """
    known = {module: path for module, path in modules().items() if module != "grpo_recipes"}
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        edges[module] = set()
        for name in imports(path):
            target = name if name in known else name.rpartition(".")[0]
            if target in known and target != module:
                edges[module].add(target)
    return edges


def level(folder: str) -> int:
    """Return the line of `LEVELS` that a folder stands in, or fail."""
    for depth, folders in enumerate(LEVELS):
        if folder in folders:
            return depth
    raise AssertionError(f"{folder} has no level")


def folder_of(module: str) -> str | None:
    """Return the folder of `grpo_recipes` that a module belongs to, or None for a module of another package."""
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "grpo_recipes" and rest else None


@pytest.mark.slow
def test_imports_go_down_only_and_never_in_a_circle() -> None:
    edges, upward = graph(), []
    for module, targets in edges.items():
        for target in targets:
            source, sink = folder_of(module), folder_of(target)
            if source and sink and source != sink and level(sink) <= level(source):
                upward.append(f"{module} imports {target}")
    assert upward == []
    TopologicalSorter(edges).prepare()


def test_the_rewards_need_neither_the_recipes_nor_a_model_library() -> None:
    users = {
        (module, library)
        for module, path in modules().items()
        if module.startswith("grpo_rewards")
        for library in {name.partition(".")[0] for name in imports(path)}
    }
    assert not [module for module, library in users if library == "grpo_recipes"]
    assert {module for module, library in users if library in ("torch", "transformers")} <= REWARDS_WITH_TORCH


def test_a_file_of_the_entry_point_imports_few_of_our_modules() -> None:
    counts = {module: len(targets) for module, targets in graph().items() if module.startswith("grpo_recipes.run.")}
    assert {module: count for module, count in counts.items() if count > RUN_IMPORTS} == {}


def test_plan_asks_training_in_one_place() -> None:
    places: list[str | None] = []
    for module, path in modules().items():
        if folder_of(module) == "plan":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, (ast.Import, ast.ImportFrom)) and "grpo_recipes.training" in ast.unparse(node):
                    places.append(getattr(node, "module", None))
    assert places == ["grpo_recipes.training.layout_facts"]


@pytest.mark.slow
def test_one_file_subclasses_trls_trainer() -> None:
    found = []
    for module, path in modules().items():
        source = path.read_text(encoding="utf-8")
        if "GRPOTrainer" not in source:
            continue
        tree = ast.parse(source)
        for block in tree.body:
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
                block.body = []  # a class that only mypy sees narrows annotations, and overrides nothing
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any("GRPOTrainer" in ast.unparse(base) for base in node.bases):
                found.append(module)
    assert found == ["grpo_recipes.training.trainer"]
