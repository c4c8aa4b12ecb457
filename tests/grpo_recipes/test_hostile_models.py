"""A stranger's model folder in every command that reads one: one sentence, within the seconds and the memory of the
docs.

The commands run in processes of their own under the shipped limits, so that a hang or a large allocation ends the test
and not the suite. `checks/test_tokenizer.py` and `checks/test_model_sizes.py` hold each case in this process.
"""

from __future__ import annotations

import json
import os
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
    """A tiny model with one hostile part."""
    tiny.policy().save_pretrained(folder)
    tiny.chat_tokenizer(tiny.CHATML + TEMPLATES.get(kind, "")).save_pretrained(folder)
    change(folder, **SIZES.get(kind, {}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, **TOKENIZERS.get(kind, {})}))
    return folder


def adapter_of(base: Path, folder: Path) -> Path:
    """An adapter whose base is `base`, though it was made for a model that is fine."""
    fine = hostile_model(folder.with_name("fine"), "")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(fine), LoraConfig(target_modules=["q_proj"], r=2))
    model.save_pretrained(folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    return folder


def command(verb: str, folder: Path, model: Path) -> list[str]:
    """The command line of a verb on a model, with what else it needs in `folder`."""
    rows = folder / "rows.jsonl"
    question = (
        "a" * 17 + "! "
    ) * 300  # what TOKENIZERS backtracks on, and stays below its library's own limit for each word
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
            return [
                *cli_module,
                "merge",
                str(adapter_of(model, folder / "adapter")),
                "--output",
                str(folder / "merged"),
            ]
        case _:
            return [*cli_module, verb, str(recipe)]


def measured(line: list[str]) -> tuple[int, str, float, int]:
    """The exit code of a command, what it printed, its seconds, and the most memory that it and its children had."""
    environment = {**os.environ, "PYTHONPATH": f"{launching.ROOT}{os.pathsep}{launching.ROOT / 'rewards'}"}
    started = time.monotonic()
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    most = 0
    try:
        while process.poll() is None:
            assert time.monotonic() - started < SECONDS, "it takes too long"
            most = max(most, sum(memory_of(process.pid)))
            time.sleep(0.05)
    finally:
        launching.kill_tree(process.pid)
    return process.returncode, process.communicate()[0], time.monotonic() - started, most


def memory_of(pid: int) -> Iterator[int]:
    """The bytes that a process and each of its children hold, a page that several share counted in parts (PSS)."""
    try:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            yield process.memory_full_info().pss
    except (psutil.Error, OSError):
        return


CASES = [
    *((verb, kind) for verb in ("plan", "train", "evaluate") for kind in (*TEMPLATES, *SIZES, *TOKENIZERS)),
    *(("merge", kind) for kind in SIZES),
]
QUICK = {("plan", "large")}


@pytest.mark.parametrize(
    ("verb", "kind"),
    [pytest.param(*case, id=" ".join(case), marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_hostile_model_gets_one_sentence_in_time(verb: str, kind: str, tmp_path: Path) -> None:
    model = hostile_model(tmp_path / "model", kind)
    code, said, seconds, most = measured(command(verb, tmp_path, model))
    assert code == 2, said
    assert "Traceback" not in said
    last = said.rstrip().splitlines()[-1]
    assert last.startswith("error: "), said
    assert str(model) in last
    for key in SIZES.get(kind, {}):
        assert key in last or kind == "held by no weights"
    assert seconds < SECONDS
    assert most < BYTES


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*TEMPLATES, *TOKENIZERS])
def test_merging_renders_and_encodes_nothing(kind: str, tmp_path: Path) -> None:
    code, said, _, most = measured(command("merge", tmp_path, hostile_model(tmp_path / "model", kind)))
    assert code == 0, said
    assert most < BYTES


@pytest.mark.slow
def test_two_ranks_end_with_one_sentence(tmp_path: Path) -> None:
    model = hostile_model(tmp_path / "model", "loops")
    command("train", tmp_path, model)
    process = launching.start("ddp_cpu", tmp_path / "mine.yaml")
    said = launching.finish(process, timeout=90)
    assert process.returncode != 0
    assert said.count("error: ") == 1, said
    assert "rendering" in said


@pytest.mark.parametrize("verb", ["plan", "merge"])
def test_ctrl_c_is_one_sentence(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    line = command(verb, tmp_path, hostile_model(tmp_path / "model", ""))
    monkeypatch.setattr("grpo_recipes.process.bounded_child.readable", interrupted)
    before = set(psutil.Process().children())  # those of other tests in this process
    assert cli.main(line[3:]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "stopped by Ctrl-C"
    assert set(psutil.Process().children()) <= before


@pytest.mark.slow
def test_ctrl_c_at_the_terminal_ends_the_child(tmp_path: Path) -> None:
    line = command("plan", tmp_path, hostile_model(tmp_path / "model", "loops"))
    process = subprocess.Popen(line, cwd=launching.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    launching.wait_for(lambda: psutil.Process(process.pid).children(), process, poll=0.05)
    (child, *_) = psutil.Process(process.pid).children()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the child too
    said = process.communicate(timeout=20)[1]
    assert process.returncode == 130
    assert said.rstrip().splitlines()[-1] == "stopped by Ctrl-C"
    assert not child.is_running()
