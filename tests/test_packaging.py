"""What `pip install` gives someone who has no checkout."""

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_rewards_install_without_torch(tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", ROOT / "rewards")
    installed = run(python, "-m", "pip", "list", "--format=freeze").lower()
    assert "torch" not in installed
    assert "transformers" not in installed
    says = run(
        python,
        "-c",
        "import sys, grpo_rewards; print('sympy' in sys.modules); print(grpo_rewards.gsm8k_correctness.__name__)",
    )
    assert says.split() == ["False", "gsm8k_correctness"]


@pytest.mark.slow
def test_recipes_travel_in_the_wheel(tmp_path: Path) -> None:
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for kind in ("recipes", "accelerate_configs"):
        shipped = {f"grpo_recipes/{kind}/{path.name}" for path in (ROOT / kind).glob("*.yaml")}
        assert shipped
        assert shipped <= set(names)
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    code = "from grpo_recipes.recipe.recipe import find_file; print(find_file('recipes', 'quickstart'))"
    found = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(unpacked)!r}); {code}"],
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(unpacked / "grpo_recipes" / "recipes" / "quickstart.yaml"), found.stderr


@pytest.mark.nightly
def test_vllm_installs_with_the_versions_of_the_tests(tmp_path: Path) -> None:
    """The command of docs/vllm.md: what it would install is resolved, and nothing installed."""
    dry = ("--dry-run", "--ignore-installed", "--quiet", "--report", tmp_path / "report.json")
    run(sys.executable, "-m", "pip", "install", *dry, "-c", ROOT / "constraints.txt", f"{ROOT}[vllm]", ROOT / "rewards")
    report = json.loads((tmp_path / "report.json").read_text())
    chosen = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in report["install"]}
    assert chosen["vllm"] == "0.30.0"
    assert chosen["trl"] == "1.16.0"
