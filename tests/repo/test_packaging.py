"""Installation with `pip install`, without a checkout."""

import ast
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import tiny

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, **options: Any) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def test_the_workflow_runs_what_ci_runs() -> None:
    """Each `make` of `.ci/run` is a job of its own."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    steps = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {"lint", "docs", "test", "test-slow", "quickstart"} <= set(steps)
    assert jobs["make"]["strategy"]["matrix"]["target"] == steps


def test_the_release_builds_what_make_dist_builds() -> None:
    """The archives that the workflow uploads are those of `make dist`, which also checks them."""
    build = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]["build"]["steps"]
    assert "make dist" in [step.get("run") for step in build]
    (uploaded,) = [step["with"]["path"].split() for step in build if "upload-artifact" in step.get("uses", "")]
    assert uploaded == ["dist/*.whl", "dist/*.tar.gz"]


# Modules whose distribution has another name.
DISTRIBUTIONS = {"re2": "google-re2", "yaml": "pyyaml"}
# Imported by a reward only where the trainer has imported it before.
IMPORTED_BY_THE_TRAINER = {("reward_model.py", "accelerate")}


def imported_distributions(file: Path, package: str) -> set[str]:
    """Return the names of the distributions that a file imports, without the standard library and its own package."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.partition(".")[0])
    modules -= {package, *sys.stdlib_module_names}
    needed = [module for module in modules if (file.name, module) not in IMPORTED_BY_THE_TRAINER]
    return {canonicalize_name(DISTRIBUTIONS.get(module, module)) for module in needed}


def distributions(requirements: Iterable[str]) -> set[str]:
    """Return the names of the required distributions. An extra of another project stands for what it requires."""
    names: set[str] = set()
    for requirement in map(Requirement, requirements):
        names.add(canonicalize_name(requirement.name))
        for extra in requirement.extras:
            for further in map(Requirement, requires(requirement.name) or []):
                if further.marker and not further.marker.evaluate() and further.marker.evaluate({"extra": extra}):
                    names.add(canonicalize_name(further.name))
    return names


@pytest.mark.slow
@pytest.mark.parametrize("package", ["grpo_recipes", "rewards/grpo_rewards"])
def test_a_package_declares_what_it_imports(package: str) -> None:
    """Each file's imports are installed by the package itself, or together with one of its extras."""
    project = tomllib.loads(((ROOT / package).parent / "pyproject.toml").read_text())["project"]
    always = distributions(project["dependencies"])
    optional = project["optional-dependencies"]
    extras = [always | distributions(optional[extra]) for extra in optional.keys() - {"dev"}]
    undeclared: dict[str, set[str]] = {}
    for file in (ROOT / package).rglob("*.py"):
        needed = imported_distributions(file, Path(package).name)
        missing = min((needed - installed for installed in [always, *extras]), key=len)
        if missing:
            undeclared[str(file.relative_to(ROOT))] = missing
    assert undeclared == {}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the wheels of both packages, by package."""
    folder = tmp_path_factory.mktemp("wheels")
    command = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT / "rewards", ROOT]
    run(sys.executable, *command)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def metadata(wheel: Path) -> str:
    (name,) = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("METADATA")]
    return zipfile.ZipFile(wheel).read(name).decode()


@pytest.mark.slow
def test_type_checkers_read_both_packages(wheels: dict[str, Path]) -> None:
    for package, wheel in wheels.items():
        assert f"{package}/py.typed" in zipfile.ZipFile(wheel).namelist()


@pytest.mark.slow
def test_the_rewards_ask_for_no_torch(wheels: dict[str, Path]) -> None:
    asked = re.findall(r"^Requires-Dist: ([\w.-]+)(?!.*extra ==)", metadata(wheels["grpo_rewards"]), re.MULTILINE)
    assert asked
    assert not {"torch", "transformers"} & set(asked)


@pytest.mark.nightly
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
def test_recipes_travel_in_the_wheel(wheels: dict[str, Path], tmp_path: Path) -> None:
    wheel = wheels["grpo_recipes"]
    names = zipfile.ZipFile(wheel).namelist()
    for kind in ("recipes", "accelerate_configs"):
        shipped = {f"grpo_recipes/{kind}/{path.relative_to(ROOT / kind)}" for path in (ROOT / kind).rglob("*.yaml")}
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


@pytest.mark.slow
def test_what_a_package_index_shows_has_no_link_that_leads_nowhere(wheels: dict[str, Path]) -> None:
    for package, wheel in wheels.items():
        shown = metadata(wheel)
        links = re.findall(r"\]\(([^)\s]+)\)", shown)
        assert links, package
        assert all(link.startswith("https://") for link in links), package
        for link in links:
            if "/grpo-recipes/grpo-recipes/" in link:
                path = re.sub(r".*/(?:blob/)?main/|#.*", "", link)
                assert (ROOT / path).exists(), link


@pytest.mark.nightly
def test_both_wheels_work_in_an_empty_folder(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Outside any checkout: plan with a shipped layout, train, evaluate, report."""
    environment, here = tmp_path / "env", tmp_path / "here"
    venv.create(environment, with_pip=True)
    here.mkdir()
    # The packages' dependencies are those of this environment; a path in a .pth file brings no editable install along.
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n"
    )
    run(environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *wheels.values())
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["PATH"] = os.pathsep.join([str(environment / "bin"), variables["PATH"]])

    def type_(*command: object) -> str:
        return run(*command, cwd=here, env=variables)

    where = type_(
        "python", "-c", "import grpo_recipes, grpo_rewards; print(grpo_recipes.__file__, grpo_rewards.__file__)"
    )
    assert all(path.startswith(str(environment)) for path in where.split())
    tiny.policy(eos_token_id=257, pad_token_id=257, max_position_embeddings=512).save_pretrained(here / "model")
    tiny.chat_tokenizer().save_pretrained(here / "model")
    small = [
        "--model_name_or_path",
        "model",
        "--max_completion_length",
        "8",
        "--dataset.size",
        "64",
        "--max_steps",
        "2",
    ]
    assert "rank 1" in type_("grpo-recipes", "plan", "quickstart", "--accelerate_config", "ddp_cpu", *small)
    assert "2 optimizer steps" in type_("grpo-recipes", "train", "quickstart", *small, "--output_dir", "runs/x")
    said = type_("grpo-recipes", "evaluate", "runs/x", "--limit", "8", "--max_new_tokens", "4")
    assert "8 problems" in said
    assert "report.html" in type_("grpo-recipes", "report", "runs/x")
    assert "gsm8k_correctness" in type_("grpo-rewards", "list")


@pytest.mark.nightly
def test_vllm_installs_with_the_versions_of_the_tests(tmp_path: Path) -> None:
    """The command of docs/vllm.md: what it would install is resolved, and nothing installed."""
    dry = ("--dry-run", "--ignore-installed", "--quiet", "--report", tmp_path / "report.json")
    run(sys.executable, "-m", "pip", "install", *dry, "-c", ROOT / "constraints.txt", f"{ROOT}[vllm]", ROOT / "rewards")
    report = json.loads((tmp_path / "report.json").read_text())
    chosen = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in report["install"]}
    assert chosen["vllm"] == "0.30.0"
    assert chosen["trl"] == "1.16.0"
