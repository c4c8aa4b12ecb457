"""Evaluation of recipes with tools and environments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes import cli


@pytest.mark.parametrize("verb", ["evaluate", "chat"])
def test_a_run_with_tools_is_refused_before_its_model_loads(
    verb: str, tiny_model: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"recipe": {"tools": ["my_tools.calculator"]}, "config": {}}))
    for name in ("config.json", "model.safetensors"):
        (run / name).symlink_to(tiny_model / name)
    assert cli.main([verb, str(run)]) == 2
    assert f"`tools`: {verb} can't run the tools of a recipe yet" in capsys.readouterr().err
