"""Harmful model folders in every command that reads one: one error line, within the documented time and memory.

Each command runs in a process of its own with the shipped limits, so that a hang or a large allocation ends the test
and not the suite. `checks/test_tokenizer.py` and `checks/test_model_sizes.py` test the cases in this process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from grpo_recipes import cli
from tests.grpo_recipes.checks.test_model_sizes import change
from tests.grpo_recipes.checks.test_tokenizer import LARGE, LOOPS, MULTIPLY, RECURSION, split_by
from tests.support import launching, tiny

SECONDS, BYTES = 30, 2 << 30
"""Largest CPU time and memory of a command. Other tests may run beside it, so its wall time says less."""

HANGS = 120
"""Seconds after which a command counts as one that hangs."""

TEMPLATES = {"loops": LOOPS, "large": LARGE, "recursion": RECURSION}
SIZES: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 10**7},
    "text": {"vocab_size": "x"},
    "negative": {"hidden_size": -4},
    "held by no weights": {"head_dim": 8000, "num_attention_heads": 4000},
}
TOKENIZERS: dict[str, dict[str, Any]] = {
    "backtracks": {"pre_tokenizer": split_by("(a+)+$")},
    "multiplies": {"normalizer": {"type": "Sequence", "normalizers": [MULTIPLY] * 8}},
}


def hostile_model(folder: Path, kind: str) -> Path:
    """Save a tiny model with one harmful part, and return its folder."""
    tiny.policy().save_pretrained(folder)
    tiny.chat_tokenizer(tiny.CHATML + TEMPLATES.get(kind, "")).save_pretrained(folder)
    change(folder, **SIZES.get(kind, {}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **TOKENIZERS.get(kind, {})}))
    return folder


def adapter_of(base: Path, folder: Path) -> Path:
    """Save an adapter with the base `base`, made for a harmless model, and return its folder."""
    fine = hostile_model(folder.with_name("fine"), "")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(fine), LoraConfig(target_modules=["q_proj"], r=2))
    model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return folder


def command(verb: str, folder: Path, model: Path) -> list[str]:
    """Return the command line of a command on a model. Its other files are written into `folder`."""
    rows = folder / "rows.jsonl"
    # The pattern of TOKENIZERS backtracks on it, and each word stays below the library's own limit.
    question = ("a" * 17 + "! ") * 300
    rows.write_text(
        "".join(json.dumps({"question": f"{n} {question}", "answer": f"#### {n}"}) + "\n" for n in range(20))
    )
    dataset = {"name": "gsm8k", "path": str(rows)}
    recipe = launching.write_recipe(folder / "mine.yaml", model, None, folder / "run", dataset=dataset)
    cli_module = [sys.executable, "-m", "grpo_recipes.cli"]
    match verb:
        case "train":
            return [sys.executable, "-m", "grpo_recipes.train", "--config", str(recipe)]
        case "evaluate":
            return [*cli_module, "evaluate", str(model), "--dataset", "gsm8k", "--path", str(rows), "--limit", "4"]
        case "merge":
            adapter = adapter_of(model, folder / "adapter")
            return [*cli_module, "merge", str(adapter), "--output", str(folder / "merged")]
        case "export":
            return [*cli_module, "export", str(model), "--to", str(folder / "exported")]
        case "chat":
            return [*cli_module, "chat", str(model), "--prompt", question]
        case _:
            return [*cli_module, verb, str(recipe)]


def measured(line: list[str]) -> tuple[int, str, float, int]:
    """Return a command's exit code, its output, its seconds of CPU time, and the largest memory of its process tree."""
    environment = {**os.environ, "PYTHONPATH": f"{launching.ROOT}{os.pathsep}{launching.ROOT / 'rewards'}"}
    started, used_before = time.monotonic(), cpu_time_of_children()
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    most = 0
    try:
        while process.poll() is None:
            assert time.monotonic() - started < HANGS, "it takes too long"
            most = max(most, sum(memory_of(process.pid)))
            time.sleep(0.05)
    finally:
        launching.kill_tree(process.pid)
    printed = process.communicate()[0]
    return process.returncode, printed, cpu_time_of_children() - used_before, most


def cpu_time_of_children() -> float:
    """Return the seconds of CPU time of this process's children that have ended, and of their children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def memory_of(pid: int) -> Iterator[int]:
    """Yield the bytes of a process and of each of its children. Shared pages are divided among them (PSS)."""
    try:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            yield process.memory_full_info().pss
    except (psutil.Error, OSError):
        return


CASES = [
    *((verb, kind) for verb in ("plan", "train", "evaluate", "chat") for kind in (*TEMPLATES, *SIZES, *TOKENIZERS)),
    *((verb, kind) for verb in ("merge", "export") for kind in SIZES),
]


@pytest.mark.slow  # `checks/test_tokenizer.py` and `checks/test_model_sizes.py` have quick ones
@pytest.mark.parametrize(("verb", "kind"), [pytest.param(*case, id=" ".join(case)) for case in CASES])
def test_a_harmful_model_ends_in_one_error_line_in_time(verb: str, kind: str, tmp_path: Path) -> None:
    model = hostile_model(tmp_path / "model", kind)
    code, printed, seconds, most = measured(command(verb, tmp_path, model))
    assert code == 2, printed
    assert "Traceback" not in printed
    last = printed.rstrip().splitlines()[-1]
    assert last.startswith("error: "), printed
    assert str(model) in last
    for key in SIZES.get(kind, {}):
        assert key in last or kind == "held by no weights"
    assert seconds < SECONDS
    assert most < BYTES


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TEMPLATES, *TOKENIZERS])
def test_a_merge_renders_and_encodes_nothing(kind: str, tmp_path: Path) -> None:
    code, printed, _, most = measured(command("merge", tmp_path, hostile_model(tmp_path / "model", kind)))
    assert code == 0, printed
    assert most < BYTES


@pytest.mark.slow
def test_two_ranks_end_with_one_error_line(tmp_path: Path) -> None:
    model = hostile_model(tmp_path / "model", "loops")
    command("train", tmp_path, model)
    process = launching.start("ddp_cpu", tmp_path / "mine.yaml")
    printed = launching.finish(process, timeout=90)
    assert process.returncode != 0
    assert printed.count("error: ") == 1, printed
    assert "rendering" in printed


@pytest.mark.parametrize("verb", ["plan", "merge"])
def test_ctrl_c_ends_a_command_with_one_line(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    line = command(verb, tmp_path, hostile_model(tmp_path / "model", ""))
    monkeypatch.setattr("grpo_recipes.process.bounded_child._answer", interrupted)
    before = set(psutil.Process().children())  # children of other tests in this process
    assert cli.main(line[3:]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped by Ctrl-C"
    assert set(psutil.Process().children()) <= before


@pytest.mark.slow
def test_ctrl_c_at_the_terminal_ends_the_child(tmp_path: Path) -> None:
    line = command("plan", tmp_path, hostile_model(tmp_path / "model", "loops"))
    process = subprocess.Popen(line, cwd=launching.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    launching.wait_for(lambda: psutil.Process(process.pid).children(), process, poll=0.05)
    (child, *_) = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, also to the child
    printed = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert printed.rstrip().splitlines()[-1] == "stopped by Ctrl-C"
    assert not child.is_running()
