"""Trial of a tokenizer and its chat template: those that are too slow, too large or fail are refused.

The limits of the child are lowered here. `test_hostile_models.py` runs the commands with the shipped limits.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import time
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import datasets
import psutil
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from grpo_recipes.checks import tokenizer as tokenizer_checks
from grpo_recipes.checks.tokenizer import (
    CHARACTERS,
    TokenizerUnavailable,
    check_chat_template,
    end_of_turn,
    load_after_trial,
    load_tokenizer,
    stop_ids,
    trial_prompts,
)
from grpo_recipes.checks.tools import Toolset, toolset_of
from grpo_recipes.data.prompts import token_lengths
from grpo_recipes.process import bounded_child
from grpo_recipes.process.bounded_child import CallStopped, Limits, bounded_call
from grpo_recipes.recipe.recipe import Recipe, RecipeError, parse_recipe
from grpo_recipes.recipe.specs import OfflineSpec
from grpo_rewards.errors import UserError
from tests.support import tiny

ROOT = Path(__file__).parents[3]
SHIPPED = tokenizer_checks.LIMITS
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


def test_the_limits_are_those_that_the_documentation_names() -> None:
    text = " ".join((ROOT / "docs" / "security.md").read_text().split())
    said = (
        f"may compute for {SHIPPED.cpu_seconds} s, last {SHIPPED.wall_seconds} s, and allocate "
        f"{SHIPPED.memory_bytes / 2**30:g} GiB",
        f"the first {tokenizer_checks.FIRST} prompts and the {tokenizer_checks.LONGEST} longest ones, up to "
        f"{CHARACTERS:,} characters of each message",
        f"more than {tokenizer_checks.SECONDS_PER_PROMPT} s per prompt and 1 s per "
        f"{tokenizer_checks.CHARACTERS_PER_SECOND:,} characters",
    )
    assert [words in text for words in said] == [True] * 3


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_of_equally_long_prompts_the_last_ones_are_tried(kind: str) -> None:
    """The choice does not depend on how a machine sorts."""
    texts = [f"{n:03}" for n in range(100)]
    table = datasets.Dataset.from_dict({"prompt": texts}, datasets.Features({"prompt": datasets.Value(kind)}))
    assert trial_prompts(table) == [*texts[: tokenizer_checks.FIRST], *texts[-tokenizer_checks.LONGEST :]]
    assert trial_prompts(table.select(range(3))) == texts[:3]


def test_the_length_of_a_conversation_is_that_of_all_its_messages() -> None:
    def turns(*lengths: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": "x" * length} for length in lengths]

    conversations = [*[turns(1)] * 8, turns(300, 1, 300), *[turns(500)] * 8, turns(99, 99), turns(7)]
    tried = trial_prompts(datasets.Dataset.from_dict({"prompt": conversations}))
    assert tried == [*[turns(1)] * 8, turns(300, 1, 300), *[turns(500)] * 7]


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


def tried(
    monkeypatch: pytest.MonkeyPatch, name: str, prompts: list[Any], tokenizer: Any = None, load: Any = None, **more: Any
) -> list[str]:
    """Return the stages that a trial announces, called in this process."""
    stages: list[str] = []
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    template_kwargs, template = more.get("template_kwargs", {}), more.get("template")
    tokenizer_checks._try(stages.append, name, tokenizer, load, prompts, template_kwargs, template)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false", "threads do not survive a fork"
    return stages


def test_a_trial_announces_each_file_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tokenizer(tmp_path / "model")
    made = AutoTokenizer.from_pretrained(folder)
    file, template = folder / "tokenizer.json", folder / "chat_template.jinja"
    rendering = f"rendering 4 prompts with its chat template ({template})"
    loading, encoding = f"loading its tokenizer ({file})", f"encoding 4 prompts with its tokenizer ({file})"
    assert tried(monkeypatch, str(folder), PROMPTS, made) == [loading, rendering, encoding]
    assert tried(monkeypatch, str(folder), ["text"] * 4, made) == [loading, encoding]
    own = tmp_path / "own.jinja"
    assert tried(monkeypatch, str(folder), PROMPTS, made, template=own)[1].endswith(f"template ({own})")
    template.unlink()
    (folder / "tokenizer_config.json").touch()
    assert tried(monkeypatch, str(folder), PROMPTS, made)[1].endswith(f"({folder / 'tokenizer_config.json'})")
    assert tried(monkeypatch, "org/model", PROMPTS, made) == [
        "loading its tokenizer (org/model)",
        "rendering 4 prompts with its chat template (org/model)",
        "encoding 4 prompts with its tokenizer (org/model)",
    ]
    assert tried(monkeypatch, "org/model", [], made)[-1] == "encoding 0 prompts with its tokenizer (org/model)"


def test_what_the_parent_reports_better_ends_a_trial_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise LookupError("no such model")

    assert tried(monkeypatch, "m", PROMPTS, load=fails) == ["loading its tokenizer (m)"]
    assert tried(monkeypatch, "m", PROMPTS, tiny.byte_tokenizer()) == ["loading its tokenizer (m)"], "no chat template"
    assert tried(monkeypatch, "m", PROMPTS, tiny.chat_tokenizer("")) == ["loading its tokenizer (m)"]


@pytest.mark.parametrize(("cause", "context"), [(True, False), (False, True), (False, False)])
def test_want_of_memory_is_found_behind_the_error_of_a_loader(
    cause: bool, context: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, inner = LookupError("the model can't be loaded"), OSError("unreadable")
    inner.__context__ = MemoryError() if cause or context else None
    outer.__cause__, outer.__context__ = (inner, None) if cause else (None, inner)
    assert tokenizer_checks._is_out_of_memory(outer) == (cause or context)

    def load() -> Any:
        raise outer

    if cause or context:
        with pytest.raises(MemoryError):
            tried(monkeypatch, "m", PROMPTS, load=load)
    else:
        assert len(tried(monkeypatch, "m", PROMPTS, load=load)) == 1
    assert not tokenizer_checks._is_out_of_memory(None)


def test_a_tokenizer_without_a_vocabulary_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty:
        chat_template, all_special_tokens = "x", ("<s>", "</s>")

        def __init__(self, length: int, ids: list[int]) -> None:
            self.length, self.ids = length, ids

        def __len__(self) -> int:
            return self.length

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            assert add_special_tokens, "a prompt of text gets the special tokens"
            return {"input_ids": self.ids if text == "a" else []}

    with pytest.raises(CallStopped, match="gives no token"):
        tried(monkeypatch, "m", ["a", "b"], Empty(2, []))
    assert len(tried(monkeypatch, "m", [], Empty(2, []))) == 2, "no text was tried"
    assert len(tried(monkeypatch, "m", ["a", "b"], Empty(3, []))) == 2, "its tokens are just not of these texts"
    assert len(tried(monkeypatch, "m", ["a", "b"], Empty(2, [5]))) == 2


def test_a_rendered_conversation_is_encoded_without_further_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Tokenizer(type(tiny.chat_tokenizer())):  # type: ignore[misc]
        def __call__(self, text: str, **options: Any) -> Any:
            seen.append((text, options))
            return super().__call__(text, **options)

    made = tiny.chat_tokenizer()
    made.__class__ = Tokenizer
    tried(monkeypatch, "m", [[{"role": "user", "content": "a"}]], made)
    asked = ("<|im_start|>user\na<|im_end|><|im_start|>assistant\n", {"add_special_tokens": False})
    assert seen[1:] == [asked] * 2  # the first is the search for the end of a turn


@pytest.mark.parametrize(("over", "is_refused"), [(-0.001, False), (0.001, True)])
def test_a_slow_function_is_timed_at_its_second_round(
    over: float, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value may take a fixed time, and a time for each of its characters."""
    clock, calls = [0.0], []
    values = ["a" * 1000, "b" * 3000]
    allowed = 2 * tokenizer_checks.SECONDS_PER_PROMPT + 4000 / tokenizer_checks.CHARACTERS_PER_SECOND

    def function(value: str) -> int:
        calls.append(value)
        clock[0] += 100.0 if len(calls) <= 2 else (allowed + over) / 2
        return len(value)

    monkeypatch.setattr(tokenizer_checks.time, "process_time", lambda: clock[0])
    if is_refused:
        with pytest.raises(CallStopped) as stopped:
            tokenizer_checks._results(function, values)
        assert (stopped.value.stage, stopped.value.reason) == ("", f"takes {(allowed + over) / 2:.2g} s for each")
    else:
        assert tokenizer_checks._results(function, values) == [1000, 3000]
    assert calls == values * 2


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (24, "takes more than 3 s"),
        (9, "ends its process (SIGKILL), as for want of memory"),
        (6, "ends its process (SIGABRT), as for want of memory"),
        (7 << 8, "ends its process (code 7), as for want of memory"),
        (0, "ends its process (code 0), as for want of memory"),
    ],
)
def test_the_end_of_a_child_has_a_reason(status: int, reason: str) -> None:
    assert bounded_child._reason_of_end(status, Limits(3.0, 4.0, 1)) == reason


@pytest.mark.parametrize(
    ("function", "stage", "reason"),
    [
        (lambda announce: [][1], "", "fails (IndexError: list index out of range)"),
        (lambda announce: (announce("a"), announce("b"), bytes(1 << 40)), "b", "needs more than 0.25 GiB of memory"),
        (
            lambda announce: bounded_child.signal.raise_signal(15),
            "",
            "ends its process (SIGTERM), as for want of memory",
        ),
        (lambda announce: os._exit(3), "", "ends its process (code 3), as for want of memory"),
    ],
)
def test_a_child_that_fails_gives_its_stage_and_a_reason(function: Any, stage: str, reason: str) -> None:
    with pytest.raises(CallStopped) as stopped:
        bounded_call(function, LIMITS)
    assert (stopped.value.stage, stopped.value.reason) == (stage, reason)
    assert str(stopped.value) == f"{stage} {reason}".strip()


def test_a_child_is_silent_and_leaves_ctrl_c_to_its_parent(capfd: pytest.CaptureFixture[str]) -> None:
    def look(announce: Any) -> Any:
        os.write(1, b"from the child")
        os.system("echo from its shell; echo and errors >&2")
        signal, core = bounded_child.signal, resource.getrlimit(resource.RLIMIT_CORE)
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
        signal.raise_signal(signal.SIGINT)
        return [[int(handler) for handler in handlers], list(core), os.read(0, 1).decode()]

    assert bounded_call(look, LIMITS) == [[1, 0, 0], [0, 0], ""]
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_a_system_without_a_process_left_is_a_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(bounded_child.os, "fork", fork)
    with pytest.raises(UserError, match=r"no process can be started \(Resource temporarily unavailable\): end some"):
        bounded_call(lambda announce: 1, LIMITS)
    assert len(os.listdir("/proc/self/fd")) == before


LARGE_RESULT = "{% if messages[-1].role == 'tool' %}" + LARGE + "{% endif %}"
NO_RESULTS = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no results') }}{% endif %}"


@pytest.mark.parametrize(("template", "words"), [(LARGE_RESULT, "needs more than 0.25 GiB"), (NO_RESULTS, "")])
@pytest.mark.parametrize("has_tools", [True, False])
def test_a_template_is_tried_on_the_result_of_a_tool_if_there_are_tools(
    template: str, words: str, has_tools: bool, tmp_path: Path
) -> None:
    """No prompt of a dataset ends with a result. Another check reports what the template raises on one."""
    folder = save_tokenizer(tmp_path / "model", tiny.CHATML + template)

    def load() -> Any:
        return AutoTokenizer.from_pretrained(folder)

    kwargs = {"tools": [{"name": "a tool"}]} if has_tools else {}
    if words and has_tools:
        with pytest.raises(UserError, match=words):
            load_after_trial(str(folder), load, PROMPTS, kwargs)
    else:
        load_after_trial(str(folder), load, PROMPTS, kwargs)


# Tokenizer of a recipe


def save_model(folder: Path, template: str | None = tiny.CHATML, **changes: Any) -> Path:
    """Save a tokenizer and the configuration of a policy, with changes in the tokenizer_config.json."""
    tiny.chat_tokenizer(template).save_pretrained(folder)
    LlamaConfig(**{**tiny._SIZES, "eos_token_id": 257}).save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))
    return folder


def recipe_of(model: str | Path, **keys: Any) -> Recipe:
    given = {"model_name_or_path": str(model), "dataset": "arithmetic", "rewards": ["math_correctness"], **keys}
    return parse_recipe(
        [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items()]
    )


ROWS = datasets.Dataset.from_dict({"prompt": PROMPTS})


def test_prompts_are_padded_and_cut_on_the_left_whatever_the_model_says(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", padding_side="right", truncation_side="right")
    assert AutoTokenizer.from_pretrained(model).padding_side == "right"
    for rows in (None, ROWS):
        loaded = load_tokenizer(recipe_of(model), rows)
        assert (loaded.padding_side, loaded.truncation_side) == ("left", "left")


@pytest.mark.parametrize("local_only", [True, False])
def test_the_tokenizer_of_the_named_revision_is_loaded(local_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def from_pretrained(name: str, **options: Any) -> Any:
        seen.append((name, *(options[key] for key in ("revision", "local_files_only", "trust_remote_code"))))
        return tiny.chat_tokenizer()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr(
        tokenizer_checks,
        "check_model_sizes",
        lambda name, revision, local_only: seen.append((name, revision, local_only)),
    )
    for keys, revision in (({}, "main"), ({"model_revision": "v2", "trust_remote_code": True}, "v2")):
        seen.clear()
        load_tokenizer(recipe_of("org/model", **keys), local_only=local_only)
        assert seen == [("org/model", revision, local_only), ("org/model", revision, local_only, bool(keys))]


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError("two\nlines"), "two lines"), (KeyError(), "KeyError"), (OSError(""), "OSError")]
)
def test_a_tokenizer_that_can_not_be_loaded_is_named_with_a_reason(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_pretrained(name: str, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(TokenizerUnavailable) as refused:
        load_tokenizer(recipe_of("org/model"), local_only=True)
    assert str(refused.value).endswith(f"`model_name_or_path` org/model: no tokenizer could be loaded: {reason}")


def test_a_folder_that_is_missing_is_said_before_anything_is_loaded() -> None:
    with pytest.raises(TokenizerUnavailable, match=r"`model_name_or_path` \./nowhere: there is no such folder \(relat"):
        load_tokenizer(recipe_of("./nowhere"))


def test_impossible_sizes_are_refused_with_the_tokenizer(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**7}))
    with pytest.raises(RecipeError, match="`num_hidden_layers` is 10000000"):
        load_tokenizer(recipe_of(model))


def test_the_trial_renders_prompts_with_the_arguments_and_the_tools_of_the_recipe(tmp_path: Path) -> None:
    template = (
        tiny.CHATML + "{% if strict %}{{ 1 / 0 }}{% endif %}{% if tools %}{{ 'a' - tools[0].function.name }}{% endif %}"
    )
    model = save_model(tmp_path / "m", template)
    load_tokenizer(recipe_of(model), ROWS)
    with pytest.raises(RecipeError, match=r"rendering 4 prompts .* fails \(ZeroDivisionError"):
        load_tokenizer(recipe_of(model, chat_template_kwargs={"strict": True}), ROWS)
    load_tokenizer(recipe_of(model), ROWS, toolset=Toolset())
    tools = toolset_of(["grpo_recipes.tools.examples.calculator"], None)
    with pytest.raises(RecipeError, match=r"rendering 4 prompts .* fails \(TypeError"):
        load_tokenizer(recipe_of(model), ROWS, toolset=tools)


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [({"pad_token": None}, False), ({"eos_token": None}, False), ({"pad_token": None, "eos_token": None}, True)],
)
def test_a_token_for_padding_is_needed(changes: dict[str, None], is_refused: bool, tmp_path: Path) -> None:
    recipe = recipe_of(save_model(tmp_path / "m", **changes))
    if not is_refused:
        load_tokenizer(recipe)
        return
    with pytest.raises(RecipeError, match="its tokenizer has neither a `pad_token` nor an `eos_token`: set one in its"):
        load_tokenizer(recipe)


# End of a turn

PLAIN_USERS = "{% for m in messages %}{{ m.content }}{{ END if m.role == 'assistant' else '<|im_start|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("end", "found"),
    [("'<|im_end|>'", 257), ("' <|im_end|>'", 257), ("'<|im_end|>x'", 257), ("'.'", None), ("''", None)],
)
def test_the_end_of_a_turn_is_the_first_token_after_an_answer(end: str, found: int | None) -> None:
    tokenizer = tiny.chat_tokenizer(PLAIN_USERS.replace("END", end))
    assert end_of_turn(tokenizer, {}) == found
    begins = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)])
    tokenizer.backend_tokenizer.post_processor = begins
    assert tokenizer("a")["input_ids"][0] == 256
    assert end_of_turn(tokenizer, {}) == found, "a token that begins every text ends no turn"


def test_the_end_of_a_turn_depends_on_the_arguments_of_the_template(tmp_path: Path) -> None:
    template = PLAIN_USERS.replace("END", "('<|im_start|>' if strange else '<|im_end|>')")
    model = save_model(tmp_path / "m", template)
    check_chat_template(recipe_of(model), load_tokenizer(recipe_of(model)), PROMPTS[0])
    strange = {"chat_template_kwargs": {"strange": True}}
    with pytest.raises(RecipeError, match=r"ends a turn with `<\|im_start\|>`, and generation stops only at `<\|im_en"):
        check_chat_template(recipe_of(model, **strange), load_tokenizer(recipe_of(model)), PROMPTS[0])
    stops = recipe_of(model, **strange, generation_kwargs={"stop": ["."]})
    check_chat_template(stops, load_tokenizer(stops), PROMPTS[0])


def test_a_template_that_ends_turns_with_text_is_not_refused(tmp_path: Path) -> None:
    recipe = recipe_of(save_model(tmp_path / "m", PLAIN_USERS.replace("END", "'.'")))
    check_chat_template(recipe, load_tokenizer(recipe), PROMPTS[0])


class FirstIsSpecial:
    """Tokenizer whose end of a turn is the token 0."""

    chat_template, eos_token_id, all_special_ids = "a template", None, (0,)

    def apply_chat_template(self, turns: list[Any], **options: Any) -> str:
        return "grpo-recipes<end>"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [0]}

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def convert_ids_to_tokens(self, number: int) -> str:
        return f"<{number}>"


@pytest.mark.parametrize(("eos", "stops"), [(5, "`<5>`"), ([5, 7], "`<5>` and `<7>`"), (None, "nothing"), (0, None)])
def test_a_token_0_may_end_a_turn(eos: Any, stops: str | None, tmp_path: Path) -> None:
    GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path)
    tokenizer: Any = FirstIsSpecial()
    assert end_of_turn(tokenizer, {}) == 0
    if stops is None:
        check_chat_template(recipe_of(tmp_path), tokenizer, PROMPTS[0])
        tokenizer.eos_token_id = 0
        assert stop_ids(recipe_of(tmp_path), tokenizer) == [0]
        return
    with pytest.raises(RecipeError, match=rf"ends a turn with `<0>`, and generation stops only at {stops}, so that"):
        check_chat_template(recipe_of(tmp_path), tokenizer, PROMPTS[0])
    tokenizer.eos_token_id = 0
    assert (stop_ids(recipe_of(tmp_path), tokenizer) or [])[0] == 0
    check_chat_template(recipe_of(tmp_path), tokenizer, PROMPTS[0])


@pytest.mark.parametrize("template", [None, ""])
def test_a_conversation_needs_a_chat_template(template: str | None, tmp_path: Path) -> None:
    recipe = recipe_of(save_model(tmp_path / "m", template))
    tokenizer = load_tokenizer(recipe, ROWS)
    tokenizer.chat_template = template
    check_chat_template(recipe, tokenizer, "a text")
    with pytest.raises(
        RecipeError, match="the tokenizer of .*/m has no chat template: set `dataset.prompt_format: tex"
    ):
        check_chat_template(recipe, tokenizer, PROMPTS[0])
    with pytest.raises(UserError, match="`dataset.prompt_format`: the tokenizer has no chat template"):
        token_lengths(ROWS, tokenizer, {})


@pytest.mark.parametrize("is_folder", [True, False])
@pytest.mark.parametrize("answers", [True, False])
def test_the_hub_is_asked_for_stop_ids_only_if_it_answers_and_there_is_no_folder(
    is_folder: bool, answers: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[tuple[str, str, bool]] = []

    def from_pretrained(name: str, revision: str, local_files_only: bool) -> Any:
        seen.append((name, revision, local_files_only))
        return GenerationConfig(eos_token_id=9)

    monkeypatch.setattr(GenerationConfig, "from_pretrained", from_pretrained)
    monkeypatch.setattr(tokenizer_checks, "adapter_config", lambda name, revision: None)
    monkeypatch.setattr(tokenizer_checks, "hub_answers", lambda: answers)
    name = str(tmp_path) if is_folder else "org/model"
    assert stop_ids(recipe_of(name, model_revision="v2"), tiny.chat_tokenizer()) == [257, 9]
    assert seen == [(name, "v2", is_folder or not answers)]


@pytest.mark.parametrize("revision", ["v3", None])
def test_an_adapter_stops_where_its_base_does(
    revision: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    base, seen = tmp_path / "base", []
    GenerationConfig(eos_token_id=9).save_pretrained(base)
    original = GenerationConfig.from_pretrained

    def from_pretrained(name: str, **options: Any) -> Any:
        seen.append(options["revision"])
        return original(name, **options)

    monkeypatch.setattr(GenerationConfig, "from_pretrained", from_pretrained)
    content = {"peft_type": "LORA", "base_model_name_or_path": str(base), "revision": revision}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    assert stop_ids(recipe_of(tmp_path, model_revision="v2"), tiny.chat_tokenizer()) == [257, 9]
    assert seen == [revision or "main"]


def test_without_a_generation_configuration_the_stop_ids_are_those_of_the_model(tmp_path: Path) -> None:
    recipe, tokenizer = recipe_of(tmp_path), tiny.chat_tokenizer()
    assert stop_ids(recipe, tokenizer) is None, "there is no configuration at all"
    LlamaConfig(**{**tiny._SIZES, "eos_token_id": [3, 4]}).save_pretrained(tmp_path)
    assert stop_ids(recipe, tokenizer) == [257, 3, 4]
    (tmp_path / "generation_config.json").write_text("{")
    assert stop_ids(recipe, tokenizer) == [257, 3, 4]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**7}))
    assert stop_ids(recipe, tokenizer) is None, "nothing is built of an impossible size"


def test_recorded_responses_and_an_unknown_configuration_need_no_stop(tmp_path: Path) -> None:
    tokenizer: Any = FirstIsSpecial()
    check_chat_template(recipe_of(tmp_path), tokenizer, PROMPTS[0])  # no file says where generation stops
    GenerationConfig(eos_token_id=5).save_pretrained(tmp_path)
    mine = recipe_of(tmp_path)
    with pytest.raises(RecipeError, match="ends a turn with `<0>`"):
        check_chat_template(mine, tokenizer, PROMPTS[0])
    check_chat_template(replace(mine, offline=OfflineSpec("group")), tokenizer, PROMPTS[0])


@pytest.mark.parametrize("error", [OSError("no file"), ValueError("no valid value")])
@pytest.mark.parametrize("trusts", [True, False])
def test_the_configuration_of_a_model_on_the_hub_is_that_of_its_revision(
    error: Exception, trusts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def generation(name: str, **options: Any) -> Any:
        raise error

    def config(name: str, **options: Any) -> Any:
        seen.append((name, *options.values()))
        return LlamaConfig(eos_token_id=9)

    monkeypatch.setattr(GenerationConfig, "from_pretrained", generation)
    monkeypatch.setattr(tokenizer_checks.AutoConfig, "from_pretrained", config)
    monkeypatch.setattr(tokenizer_checks, "adapter_config", lambda name, revision: None)
    monkeypatch.setattr(tokenizer_checks, "hub_answers", lambda: True)
    monkeypatch.setattr(
        tokenizer_checks,
        "check_model_sizes",
        lambda name, revision, local_only: seen.append((name, revision, local_only)),
    )
    mine = recipe_of("org/model", model_revision="v2", trust_remote_code=trusts)
    assert stop_ids(mine, tiny.chat_tokenizer()) == [257, 9]
    assert seen == [("org/model", "v2", False), ("org/model", trusts, "v2", False)]
