"""Which module imports which: arrows run down the wings only, and never in a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"grpo_recipes": ROOT / "grpo_recipes", "grpo_rewards": ROOT / "rewards" / "grpo_rewards"}

# From top to bottom; what stands in one line may not import its neighbours.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("quickstart",),
    ("cli",),
    ("train", "launch"),
    ("training", "results"),
    ("decoding",),
    ("recipe",),
    ("runs",),
)
MAY_IMPORT_TORCH = {"grpo_rewards.reward_model", "grpo_rewards.internlm2"}


def modules() -> dict[str, Path]:
    """Every module of both packages by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def imports(path: Path, *, at_type_checking: bool = False) -> Iterator[str]:
    """The dotted names that a file imports, inside functions too; what only type checkers see is left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not at_type_checking
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{name.name}" for name in node.names)


def graph() -> dict[str, set[str]]:
    """For each module of ours, the modules of ours that it imports."""
    known = modules()

    def module_of(name: str) -> str | None:
        return name if name in known else name.rpartition(".")[0] if name.rpartition(".")[0] in known else None

    return {
        module: {target for name in imports(path) if (target := module_of(name)) and target != module}
        for module, path in known.items()
    }


def level(module: str) -> int | None:
    """How far down a module of grpo_recipes stands; None for the package itself, which only names what is in it."""
    _, _, rest = module.partition(".")
    wing = rest.partition(".")[0]
    return next((depth for depth, wings in enumerate(LEVELS) if wing in wings), None)


def test_arrows_run_down_only() -> None:
    upward = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target in targets
        if module.startswith("grpo_recipes.")
        and target.startswith("grpo_recipes.")
        and wing(module) != wing(target)
        and (level(target) or 0) <= (level(module) or 0)
    ]
    assert not upward


def wing(module: str) -> str:
    return ".".join(module.split(".")[:2])


def test_every_module_stands_in_a_wing() -> None:
    assert {wing(module).partition(".")[2] for module in modules() if module.startswith("grpo_recipes.")} == {
        name for names in LEVELS for name in names
    }


def test_no_imports_in_a_circle() -> None:
    TopologicalSorter(graph()).prepare()


def test_the_rewards_import_nothing_of_the_recipes() -> None:
    assert not [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target in targets
        if module.startswith("grpo_rewards") and target.startswith("grpo_recipes")
    ]


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_rewards_need_no_model_library(library: str) -> None:
    users = {
        module
        for module, path in modules().items()
        if module.startswith("grpo_rewards") and any(name.partition(".")[0] == library for name in imports(path))
    }
    assert users <= MAY_IMPORT_TORCH


def test_one_file_subclasses_trls_trainer() -> None:
    found = [
        module
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any("GRPOTrainer" in ast.unparse(base) for base in node.bases)
    ]
    assert found == ["grpo_recipes.training.trainer"]
