"""Trial of a tokenizer and its chat template: those that are too slow, too large or fail are refused.

The limits of the child are lowered here. `test_hostile_models.py` runs the commands with the shipped limits.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest
from transformers import AutoTokenizer

from grpo_recipes.checks import tokenizer as tokenizer_checks
from grpo_recipes.checks.tokenizer import CHARACTERS, load_after_trial, trial_prompts
from grpo_recipes.process import bounded_child
from grpo_recipes.process.bounded_child import CallStopped, Limits, bounded_call
from grpo_rewards.errors import UserError
from tests.support import tiny

LIMITS = Limits(cpu_seconds=1, wall_seconds=20, memory_bytes=1 << 28)
PROMPTS = [[{"role": "user", "content": "a" * 17 + "! " * 3}]] * 4

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LARGE = "{{ 'a' * 3000000000 }}"
RECURSION = "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}"
SLOW = "{% for a in range(99999) %}{% endfor %}" * 50


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_checks, "LIMITS", LIMITS)


def save_tokenizer(folder: Path, template: str = tiny.CHATML, **changes: Any) -> Path:
    """Save a tokenizer of bytes with a chat template, with changes in its tokenizer.json, and return its folder."""
    tiny.chat_tokenizer(template).save_pretrained(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, **changes}))
    return folder


def try_folder(folder: Path, prompts: list[Any] = PROMPTS) -> Any:
    return load_after_trial(str(folder), lambda: AutoTokenizer.from_pretrained(folder), prompts)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        pytest.param(LOOPS, "takes more than 1 s", marks=pytest.mark.slow),
        (LARGE, "needs more than 0.25 GiB of memory"),
        (RECURSION, "fails (RecursionError: "),
        pytest.param(SLOW, "takes", marks=pytest.mark.slow),
        ("{{ raise_exception('no users here') }}", "fails (TemplateError: no users here)"),
        ("{{ 1 / 0 }}", "fails (ZeroDivisionError: "),
    ],
    ids=["loops", "large", "recursion", "slow", "refuses", "divides"],
)
def test_a_chat_template_is_tried_within_limits(tmp_path: Path, template: str, message: str) -> None:
    folder = save_tokenizer(tmp_path / "model", tiny.CHATML + template)
    with pytest.raises(UserError) as refused:
        try_folder(folder)
    error = str(refused.value)
    assert error.startswith(
        f"{folder}: rendering 4 prompts with its chat template ({folder / 'chat_template.jinja'}) {message}"
    )
    assert error.endswith(": correct the file, or name another model")


def test_a_template_that_is_large_only_after_an_answer_is_refused(tmp_path: Path) -> None:
    """No prompt ends with an answer, but the search for the end of a turn renders one."""
    large = "{% if messages[-1]['role'] == 'assistant' %}" + LARGE + "{% endif %}"
    with pytest.raises(UserError, match=r"chat_template.jinja\) needs more than 0.25 GiB of memory"):
        try_folder(save_tokenizer(tmp_path / "model", tiny.CHATML + large))


def test_a_tokenizer_that_takes_too_much_memory_to_load_is_refused(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model")

    def load() -> Any:
        try:
            return bytes(1 << 29)
        except Exception as error:
            raise LookupError("in the message of the loader") from error

    with pytest.raises(UserError, match=r"loading its tokenizer \(.*\) needs more than 0.25 GiB of memory"):
        load_after_trial(str(folder), load, PROMPTS)


def split_by(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


MULTIPLY = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        pytest.param(
            {"pre_tokenizer": split_by("(a+)+$")},
            ("a" * 17 + "! ") * 3000,
            "takes more than 1 s",
            marks=pytest.mark.slow,
        ),
        ({"pre_tokenizer": split_by("(a+)+$")}, "a" * 40 + "!", "fails (PanicException: "),
        ({"normalizer": {"type": "Sequence", "normalizers": [MULTIPLY] * 8}}, "a" * 40, "ends its process (SIGABRT)"),
    ],
    ids=["backtracks", "gives up", "multiplies"],
)
@pytest.mark.parametrize("is_text", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_tokenizer_is_tried_within_limits(
    tmp_path: Path, changes: dict[str, Any], text: str, message: str, is_text: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = save_tokenizer(tmp_path / "model", **changes)
    prompt: Any = text if is_text else [{"role": "user", "content": text}]
    with pytest.raises(UserError) as refused:
        try_folder(folder, [prompt] * 2)
    assert f"encoding 2 prompts with its tokenizer ({folder / 'tokenizer.json'}) {message}" in str(refused.value)
    assert "panicked" not in capfd.readouterr().err


def test_a_tokenizer_that_cannot_be_loaded_keeps_the_message_of_its_loader(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model", model=5)

    def load() -> Any:
        try:
            return AutoTokenizer.from_pretrained(folder)
        except Exception as error:
            raise LookupError("in the message of the loader") from error

    with pytest.raises(LookupError, match="in the message of the loader"):
        load_after_trial(str(folder), load, PROMPTS)


@pytest.mark.slow
def test_loading_has_the_same_limits(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model")

    def load() -> Any:
        while True:
            pass

    with pytest.raises(UserError, match=r"loading its tokenizer \(.*tokenizer.json\) takes more than 1 s"):
        load_after_trial(str(folder), load, PROMPTS)


def test_a_tokenizer_that_passes_is_returned(tmp_path: Path) -> None:
    tokenizer = try_folder(save_tokenizer(tmp_path / "model"))
    assert tokenizer.apply_chat_template(PROMPTS[0], tokenize=False).startswith("<|im_start|>user\naaa")
    bare = tiny.byte_tokenizer()
    bare.save_pretrained(tmp_path / "bare")
    assert try_folder(tmp_path / "bare").chat_template is None  # `check_chat_template` reports it


def test_a_tokenizer_without_its_own_file_is_loaded_once_in_this_process() -> None:
    loaded = []

    def load() -> Any:
        loaded.append(os.getpid())
        return tiny.chat_tokenizer()

    load_after_trial("organisation/model", load, PROMPTS)
    assert loaded == [os.getpid()]
    with pytest.raises(UserError, match="organisation/model: rendering 4 prompts"):
        load_after_trial("organisation/model", lambda: tiny.chat_tokenizer(RECURSION), PROMPTS)


def test_a_tokenizer_is_loaded_without_prompts_on_a_fine_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(tokenizer_checks.time, "process_time", lambda: next(ticks))
    assert try_folder(save_tokenizer(tmp_path), []).encode("a")


def test_the_first_and_the_longest_prompts_are_tried() -> None:
    texts = ["x" * (n % 7) + str(n) for n in range(100)]
    texts[60], texts[70] = "y" * 500, "z" * (CHARACTERS + 5)
    tried = trial_prompts(datasets.Dataset.from_dict({"prompt": texts, "answer": [None] * 100}))
    assert tried[: tokenizer_checks.FIRST] == texts[: tokenizer_checks.FIRST]
    assert "y" * 500 in tried
    assert "z" * CHARACTERS in tried
    assert len(tried) <= tokenizer_checks.FIRST + tokenizer_checks.LONGEST
    conversations = [[{"role": "user", "content": text}] for text in texts]
    as_messages = trial_prompts(datasets.Dataset.from_dict({"prompt": conversations}).select(range(5, 100)))
    assert {"role": "user", "content": "y" * 500} in [turns[0] for turns in as_messages]
    assert as_messages[0][0]["content"] == texts[5]


def test_ctrl_c_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo_recipes.process.bounded_child._answer", interrupted)
    before = psutil.Process().children()
    with pytest.raises(KeyboardInterrupt):
        bounded_call(lambda announce: time.sleep(60), LIMITS)
    assert psutil.Process().children() == before


def test_a_child_that_waits_is_stopped_by_the_clock() -> None:
    with pytest.raises(CallStopped, match="waiting takes more than 0.2 s"):
        bounded_call(lambda announce: (announce("waiting"), time.sleep(60)), replace(LIMITS, wall_seconds=0.2))


def test_an_answer_that_is_cut_off_is_none() -> None:
    receiving, sending = Pipe(duplex=False)
    os.write(sending.fileno(), (100).to_bytes(4, "big") + b"of 100 bytes")
    sending.close()
    assert bounded_child._answer(receiving, time.monotonic() + 9) == ("", "ended", None)


def test_a_long_value_is_returned_and_the_child_is_gone() -> None:
    before = psutil.Process().children()
    assert bounded_call(lambda announce: ["x" * 300_000, os.getpid()], LIMITS)[0] == "x" * 300_000
    assert bounded_call(lambda announce: os.getpid(), LIMITS) != os.getpid()
    assert psutil.Process().children() == before
