"""docs/upstream: each patch applies to the installed TRL and has the effect of its page, which stock TRL has not.

A case runs in a process of its own, on a copy of TRL with or without the patch; it prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.quantized import needs_bitsandbytes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "upstream"
PATCHES = sorted(path.stem for path in FOLDER.glob("*.patch"))

HEAD = """
import json, sys
from pathlib import Path
import pandas as pd, torch, trl
from datasets import Dataset
from tests.support import tiny
from tests.support.short_runs import arguments, trainer
HERE = Path.cwd()
assert str(HERE) in trl.__file__
"""

CASES = {
    "evaluation-completions": """
        held_out = Dataset.from_dict({"prompt": [f"{i} held out" for i in range(12)]})
        more = {"log_completions": True, "eval_strategy": "steps", "eval_steps": 1, "beta": 0.0}
        more["per_device_eval_batch_size"] = 4
        trainer(trl.GRPOTrainer, tiny.policy(), arguments(HERE / "run", **more), eval_dataset=held_out).train()
        found = {}
        for file in (HERE / "run" / "completions").glob("*.parquet"):
            prompts = pd.read_parquet(file)["prompt"]
            found[file.name] = [len(prompts), int(prompts.str.contains("held out").sum())]
        print(json.dumps(found))
    """,
    "resume-order": """
        seen = []
        def reward(prompts, completions, **columns):
            seen.append(prompts[0])
            return [float(len(completion)) for completion in completions]
        few = Dataset.from_dict({"prompt": [f"{i} + {i} =" for i in range(5)]})
        def train(folder, steps, **resume):
            seen.clear()
            more = {"save_strategy": "steps", "save_steps": 7, "max_steps": steps, "beta": 0.0}
            args = arguments(HERE / folder, **more)
            trained = trl.GRPOTrainer(tiny.policy(), reward, args, few, None, tiny.byte_tokenizer())
            trained.train(**resume)
            return list(seen)
        whole = train("whole", 12)
        train("cut", 7)
        rest = train("cut", 12, resume_from_checkpoint=True)
        print(json.dumps({"whole": whole, "rest": rest}))
    """,
    "padding-per-micro-batch": """
        from trl.trainer import grpo_trainer
        prompts = Dataset.from_dict({"prompt": ["1 +" + " 1" * (i % 4) for i in range(32)]})
        def train(folder):
            policy, computed = tiny.policy(), []
            more = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_steps": 2, "beta": 0.0}
            more["max_completion_length"] = 48
            args = arguments(HERE / folder, **more)
            count = lambda module, given, named: computed.append(named["input_ids"].numel())
            made = trainer(trl.GRPOTrainer, policy, args, rows=prompts)
            made.model.register_forward_pre_hook(count, with_kwargs=True)
            made.train()
            return torch.cat([one.detach().flatten() for one in made.model.parameters()]), sum(computed)
        cut, tokens = train("cut")
        if hasattr(grpo_trainer, "trim_padding"):
            grpo_trainer.trim_padding = dict
        whole, all_tokens = train("whole")
        start = torch.cat([one.detach().flatten() for one in tiny.policy().parameters()])
        gap, moved = (float((cut - other).abs().max()) for other in (whole, start))
        print(json.dumps({"tokens": tokens, "all": all_tokens, "gap": gap, "moved": moved}))
    """,
}


def copy_of_trl(folder: Path, patch: str | None) -> None:
    """Copy the installed TRL into `folder` and apply a patch."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    if patch is not None:
        command = ["git", "apply", "-p1", str(FOLDER / f"{patch}.patch")]
        subprocess.run(
            command, cwd=folder, check=True, capture_output=True, env={**os.environ, "GIT_CEILING_DIRECTORIES": "/"}
        )


def outcome(folder: Path, patch: str | None, case: str) -> Any:
    copy_of_trl(folder, patch)
    program = HEAD + textwrap.dedent(CASES[case])
    path = os.pathsep.join(map(str, (folder, ROOT, ROOT / "rewards")))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_has_a_page_and_applies(patch: str, tmp_path: Path) -> None:
    assert (FOLDER / f"{patch}.md").is_file()
    copied = tmp_path / "trl" / "trainer"
    for name in re.findall(r"^\+\+\+ b/(\S+)", (FOLDER / f"{patch}.patch").read_text(), re.MULTILINE):
        spec = find_spec("trl")
        assert spec is not None
        assert spec.origin is not None
        copied = tmp_path / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(spec.origin).parent.parent / name, copied)
    command = ["git", "apply", "-p1", "--check", str(FOLDER / f"{patch}.patch")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("patched", [True, False])
def test_evaluation_completions(tmp_path: Path, patched: bool) -> None:
    found = outcome(tmp_path, "evaluation-completions" if patched else None, "evaluation-completions")
    if patched:
        assert found == {"completions_00001.parquet": [4, 0], "eval_completions_00001.parquet": [48, 48]}
    else:
        assert found == {"completions_00001.parquet": [4, 4]}, "four held-out rows, and no training row"


@pytest.mark.nightly
@pytest.mark.parametrize("patched", [True, False])
def test_resume_order(tmp_path: Path, patched: bool) -> None:
    found = outcome(tmp_path, "resume-order" if patched else None, "resume-order")
    assert len(found["whole"]) == 12
    assert (found["rest"] == found["whole"][7:]) == patched
    if patched:
        assert sorted(found["whole"][:5]) == sorted(found["whole"][5:10])
        assert found["whole"][:5] != found["whole"][5:10], "each epoch has an order of its own"


@pytest.mark.nightly
@pytest.mark.parametrize("patched", [True, False])
def test_padding_per_micro_batch(tmp_path: Path, patched: bool) -> None:
    found = outcome(tmp_path, "padding-per-micro-batch" if patched else None, "padding-per-micro-batch")
    assert (found["tokens"] < found["all"]) == patched
    assert found["moved"] > 1e-2
    assert found["gap"] < 1e-3 * found["moved"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("report", "shows"),
    [
        ("trl-lora-server-weights", r"True 0\.\d*[1-9]"),
        ("trl-continuous-batching-cast", r"torch\.float32\n(.*\n)*torch\.bfloat16"),
        (
            "transformers-caches-behind-a-prefix",
            r"bamba (0\.[1-9]|[1-9])\S*\njamba (0\.[1-9]|[1-9])\S*\nqwen2 (0\.[1-9]|[1-9])",
        ),
        ("transformers-time-step-limit", r"0\.001 0\.0[1-9]\d*\n1e-09 \d\.\d*e-0[5-9]"),
        pytest.param("bitsandbytes-cpu-repacking", r"MatMul4BitBackward.*\n(?!.*MatMul4Bit)", marks=needs_bitsandbytes),
    ],
)
def test_a_reproduction_shows_what_its_report_says(report: str, shows: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (FOLDER / f"{report}.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(shows, done.stdout), done.stdout


def test_every_report_is_listed() -> None:
    listed = set(re.findall(r"\(([\w-]+\.md)\)", (FOLDER / "README.md").read_text()))
    assert listed == {path.name for path in FOLDER.glob("*.md")} - {"README.md"}
