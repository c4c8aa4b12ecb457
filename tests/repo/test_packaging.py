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


def test_the_workflows_run_what_the_scripts_run() -> None:
    """Each make target of `.ci/run`, of `.ci/nightly` and of a release is a job."""
    folder = ROOT / ".github" / "workflows"
    jobs = {path.stem: yaml.safe_load(path.read_text())["jobs"] for path in folder.glob("*.yml")}
    steps = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {"lint", "docs", "test", "test-slow", "quickstart"} <= set(steps)
    assert jobs["ci"]["make"]["strategy"]["matrix"]["target"] == steps
    (each_night,) = re.findall(r"^  targets=\((.+)\)$", (ROOT / ".ci" / "nightly").read_text(), re.MULTILINE)
    assert jobs["nightly"]["make"]["strategy"]["matrix"]["target"] == each_night.split()
    page = (ROOT / "benchmarks" / "results" / "nightly.md").read_text()
    assert re.findall(r"^\| ([\w-]+) \|", page, re.MULTILINE) == ["target", *each_night.split()]
    build = jobs["release"]["build"]["steps"]
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


@pytest.mark.slow
def test_what_a_wheel_holds(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Types, recipes that are found without a checkout, links that lead somewhere, and no need of torch for rewards."""
    for package, wheel in wheels.items():
        archive = zipfile.ZipFile(wheel)
        archive.extractall(tmp_path)
        assert (tmp_path / package / "py.typed").is_file()
        (name,) = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = archive.read(name).decode()
        links = re.findall(r"\]\(([^)\s]+)\)", metadata)
        assert links
        assert [link for link in links if not link.startswith("https://")] == []
        ours = [re.sub(r".*/(?:blob/)?main/|#.*", "", link) for link in links if "/grpo-recipes/grpo-recipes/" in link]
        assert [path for path in ours if not (ROOT / path).exists()] == []
        if package == "grpo_rewards":
            required = re.findall(r"^Requires-Dist: ([\w.-]+)(?!.*extra ==)", metadata, re.MULTILINE)
            assert required
            assert not {"torch", "transformers"} & set(required)
    for kind in ("recipes", "accelerate_configs"):
        shipped = [path.relative_to(ROOT) for path in (ROOT / kind).rglob("*.yaml")]
        assert shipped
        assert [path for path in shipped if not (tmp_path / "grpo_recipes" / path).is_file()] == []
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from grpo_recipes.recipe.recipe import find_file; "
    found = run(sys.executable, "-P", "-c", f"{code} print(find_file('recipes', 'quickstart'))")
    assert found.strip() == str(tmp_path / "grpo_recipes" / "recipes" / "quickstart.yaml")


@pytest.mark.nightly
def test_both_wheels_work_in_an_empty_folder(wheels: dict[str, Path], tmp_path: Path) -> None:
    """Outside any checkout: plan with a shipped layout, train, evaluate, report."""
    environment, here = tmp_path / "env", tmp_path / "here"
    venv.create(environment, with_pip=True)
    here.mkdir()
    # The packages' dependencies are those of this environment; a path in a .pth file brings no editable install along.
    (site,) = (environment / "lib").glob("python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    run(environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", *wheels.values())
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["PATH"] = os.pathsep.join([str(environment / "bin"), variables["PATH"]])

    def type_(*command: object) -> str:
        return run(*command, cwd=here, env=variables)

    code = "import grpo_recipes, grpo_rewards; print(grpo_recipes.__file__, grpo_rewards.__file__)"
    assert all(path.startswith(str(environment)) for path in type_("python", "-c", code).split())
    tiny.save_tool_policy(here / "model", tiny.CHATML)
    settings = "--model_name_or_path model --max_completion_length 8 --dataset.size 64 --max_steps 2"
    small = settings.split()
    assert "on 2 processes" in type_("grpo-recipes", "plan", "quickstart", "--accelerate_config", "ddp_cpu", *small)
    assert "2 optimizer steps" in type_("grpo-recipes", "train", "quickstart", *small, "--output_dir", "runs/x")
    assert "8 problems" in type_("grpo-recipes", "evaluate", "runs/x", "--limit", "8", "--max_new_tokens", "4")
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
