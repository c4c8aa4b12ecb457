"""`grpo-recipes chat`: prompts as in training, answers as they are generated, and what Ctrl-C leaves behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_recipes import cli
from grpo_recipes.data.load import load
from grpo_recipes.evaluation import chat
from grpo_recipes.evaluation.chat import Chat, Prompting, converse
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.tools.bounded import Result
from grpo_rewards.errors import UserError
from grpo_rewards.terminal import visible_lines
from tests.support.tiny import CHATML, byte_tokenizer, chat_tokenizer, policy

QUESTION = "Ann has 3 pens and buys 4 more. How many pens does Ann have now?"
SYSTEM = (
    "Solve the math problem step-by-step, providing reasoning in <think> tags and the final answer in <answer> tags."
)
HOSTILE = "\x1b[2J\x1b]0;owned\x07\u202e ok\n"


def greedy(folder: Path, prompt: str, count: int) -> str:
    """Return the greedy completion of a rendered prompt, by one forward pass over all tokens per token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    start = ids.shape[1]
    with torch.no_grad():
        while ids.shape[1] < start + count:
            token = model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], 1)
            if token.item() == tokenizer.eos_token_id:
                break
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True)


def test_one_prompt_is_answered_as_the_recipe_prompts(tiny_model: Path, capsys: Any) -> None:
    options = ["--recipe", "quickstart", "--temperature", "0", "--max_new_tokens", "12"]
    assert cli.main(["chat", str(tiny_model), *options, "--prompt", QUESTION]) == 0
    prompt = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    expected = greedy(tiny_model, prompt, 12)
    assert expected.strip()
    captured = capsys.readouterr()
    assert captured.out == visible_lines(expected) + "\n"
    assert "(cut at 12 tokens" in captured.err


def test_filters_of_the_training_apply_and_published_settings_do_not(
    tiny_model: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_model, run)
    published = json.loads((run / "generation_config.json").read_text())
    (run / "generation_config.json").write_text(json.dumps({**published, "suppress_tokens": [*range(3, 400)]}))
    config = {"temperature": 0.7, "top_k": 1, "max_completion_length": 12}
    dataset = {"name": "arithmetic", "system_prompt": "none"}
    (run / "run.json").write_text(json.dumps({"recipe": {"dataset": dataset}, "config": config}))
    assert cli.main(["chat", str(run), "--prompt", QUESTION]) == 0
    expected = greedy(tiny_model, f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n", 12)
    assert capsys.readouterr().out == visible_lines(expected) + "\n"


def test_the_run_decides_prompt_temperature_and_length(tiny_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_model, run)
    dataset = {"name": "gsm8k", "path": "rows.jsonl", "system_prompt": "none", "prompt_template": "Q: {{ question }}"}
    config: dict[str, Any] = {"temperature": 0.5, "top_k": -1, "top_p": 0.9, "max_completion_length": 7}
    config["chat_template_kwargs"] = {"enable_thinking": False}
    (run / "run.json").write_text(json.dumps({"recipe": {"dataset": dataset}, "config": config}))
    (run / "checkpoint-3").mkdir()
    for folder in (run, run / "checkpoint-3"):
        talk = begun(chat.Request(model=str(folder)))
        assert (talk.settings.temperature, talk.settings.max_new_tokens) == (0.5, 7)
        assert talk.sampling == {"temperature": 0.5, "top_k": 0, "top_p": 0.9, "repetition_penalty": 1.0}
        assert talk.prompting.template_kwargs == {"enable_thinking": False}
        assert talk.prompting.prompt([talk.prompting.message("2 + 2?")]) == [{"role": "user", "content": "Q: 2 + 2?"}]


def begun(request: chat.Request) -> Chat:
    """Return the conversation of a request, without a model."""
    recipe = chat.recipe_of(request.model, request.recipe)
    sampling = chat.training_sampling(recipe)
    settings = chat._settings(request, recipe, sampling["temperature"])
    return Chat(Transformers(policy(), byte_tokenizer()), chat._prompting(request, recipe), settings, sampling)


def test_a_seed_repeats_the_answers(tiny_model: Path, capsys: Any) -> None:
    answers = []
    for seed in ("0", "0", "1"):
        assert cli.main(["chat", str(tiny_model), "--prompt", "1", "--seed", seed, "--max_new_tokens", "8"]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


def test_control_characters_of_an_answer_are_escaped(talk: Scripted, capsys: Any) -> None:
    talk.script = [HOSTILE]
    assert talk.chat.answer("hello") == HOSTILE
    assert capsys.readouterr().out == r"\x1b[2J\x1b]0;owned\x07\u202e ok" + "\n\n"


class Scripted:
    """A conversation whose model streams scripted answers. A None in the script is Ctrl-C after the text before it.

    Attributes:
        prompts: Rendered prompts, one for each answer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prompting: Prompting) -> None:
        tokenizer = chat_tokenizer()
        model = policy(eos_token_id=257, pad_token_id=257)
        self.script: list[str | None] = []
        self.prompts: list[str] = []
        self.chat = Chat(
            Transformers(model, tokenizer), prompting, Settings(max_new_tokens=100, strict=None), {"top_p": 1.0}
        )

        def generate(input_ids: torch.Tensor, streamer: Any, **options: Any) -> torch.Tensor:
            self.prompts.append(tokenizer.decode(input_ids[0]))
            streamer.put(input_ids)
            text = self.script.pop(0)
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
            for token in tokens:
                streamer.put(torch.tensor([token]))
            if self.script and self.script[0] is None:
                del self.script[0]
                raise KeyboardInterrupt
            streamer.put(torch.tensor([257]))
            streamer.end()
            return torch.cat([input_ids, torch.tensor([[*tokens, 257]])], 1)

        monkeypatch.setattr(model, "generate", generate)


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(monkeypatch, Prompting(system="Be brief.", is_text=False))


def asked(*lines: str | type[BaseException]) -> Callable[[], str]:
    """Return a function that returns one line after another, raises the exceptions among them, and then EOFError."""
    left: Iterator[Any] = iter([*lines, EOFError])

    def ask() -> str:
        line = next(left)
        if isinstance(line, str):
            return line
        raise line

    return ask


def turns(*contents: str) -> str:
    """Return the rendered prompt of a conversation, by the template of `chat_tokenizer`."""
    roles = ["system", *["user", "assistant"] * len(contents)]
    messages = [f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in zip(roles, contents, strict=False)]
    return "".join(messages) + "<|im_start|>assistant\n"


def test_a_conversation_continues_until_an_empty_line(talk: Scripted, capsys: Any) -> None:
    talk.script = ["one", "two", "three"]
    converse(talk.chat, asked("a", "b", "", "c"))
    assert talk.prompts == [
        turns("Be brief.", "a"),
        turns("Be brief.", "a", "one", "b"),
        turns("Be brief.", "c"),
    ]
    captured = capsys.readouterr()
    assert captured.out == "one\ntwo\nthree\n"
    assert "a new conversation" in captured.err


def test_each_line_is_one_prompt_for_a_model_of_plain_text(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    talk = Scripted(monkeypatch, Prompting(system="Be brief.", is_text=True))
    talk.script = ["one", "two"]
    converse(talk.chat, asked("a", "b"))
    assert talk.prompts == ["Be brief.\na", "Be brief.\nb"]
    capsys.readouterr()
    converse(talk.chat, asked(""))
    assert capsys.readouterr().err == "", "no line continues another"


def test_ctrl_c_stops_an_answer_and_keeps_what_was_printed(talk: Scripted, capsys: Any) -> None:
    talk.script = ["half of", None, "two"]
    converse(talk.chat, asked("a", "b"))
    assert talk.prompts[1] == turns("Be brief.", "a", "half of", "b")
    captured = capsys.readouterr()
    assert captured.out == "half of\ntwo\n"
    assert captured.err.count("Ctrl-C again") == 1


def test_ctrl_c_twice_leaves(talk: Scripted) -> None:
    talk.script = ["half", None, "never"]
    converse(talk.chat, asked("a", KeyboardInterrupt, "b"))
    assert talk.script == ["never"]
    talk.script = ["said"]
    converse(talk.chat, asked(KeyboardInterrupt, "a", KeyboardInterrupt, KeyboardInterrupt, "b"))
    assert talk.script == [], "a line between two interruptions"
    assert len(talk.prompts) == 2


def test_a_refused_message_is_not_in_the_conversation(talk: Scripted, capsys: Any) -> None:
    talk.script = ["one", "two"]
    converse(talk.chat, asked("a", "x" * 200, "b\ud800", "c"))
    assert talk.prompts[1] == turns("Be brief.", "a", "one", "c")
    said = capsys.readouterr().err
    assert "the model's context has 128: begin a new conversation with an empty line" in said
    assert "the message is not UTF-8" in said


@pytest.mark.parametrize(("temperature", "draws"), [(0.0, False), (0.5, True)])
def test_the_filters_of_sampling_are_left_out_of_greedy_decoding(
    temperature: float, draws: bool, talk: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    generate = talk.chat.model.generate
    monkeypatch.setattr(talk.chat.model, "generate", lambda **options: seen.append(options) or generate(**options))
    talk.chat.settings = replace(talk.chat.settings, temperature=temperature)
    talk.chat.sampling = {"top_p": 0.25, "temperature": 9.0}
    talk.script = ["one"]
    talk.chat.answer("x")
    assert (seen[0].get("top_p") == 0.25) == draws
    if draws:
        assert seen[0]["temperature"] == 0.5


def test_an_answer_fits_into_the_context(talk: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    generate = talk.chat.model.generate

    def spy(**options: Any) -> torch.Tensor:
        seen.append(options["max_new_tokens"] + options["input_ids"].shape[1])
        return generate(**options)

    monkeypatch.setattr(talk.chat.model, "generate", spy)
    talk.script = ["one"]
    talk.chat.answer("x" * 50)
    assert seen == [128]


def test_an_answer_ends_at_a_stop_string_of_the_recipe(capsys: Any) -> None:
    """A random model of bytes draws each of these letters often."""
    settings = Settings(temperature=1.0, max_new_tokens=100, strict=None, stop=("e", "a", "1", "W", "b"))
    talk = Chat(Transformers(policy(), byte_tokenizer()), Prompting(is_text=True), settings, {"top_p": 1.0})
    torch.manual_seed(0)
    answers = [talk.answer("1 + 1 =") for _ in range(5)]
    assert any(answer.endswith(settings.stop) and talk.cut_at is None for answer in answers)
    assert not any(stop in answer[:-1] for answer in answers for stop in settings.stop)


def test_the_form_of_prompts_without_a_key_is_that_of_the_rows(tmp_path: Path, tiny_model: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1 + 1 ="}) + "\n")
    run = tmp_path / "run"
    shutil.copytree(tiny_model, run)
    (run / "run.json").write_text(json.dumps({"recipe": {"dataset": {"path": str(rows)}}}))
    request = chat.Request(model=str(run))
    assert chat._prompting(request, chat.recipe_of(str(run))).is_text is True
    rows.unlink()
    (run / "run.json").write_text(json.dumps({"recipe": {"dataset": {"path": str(tmp_path / "gone.jsonl")}}}))
    with pytest.raises(UserError, match="give --prompt_format conversational or text"):
        chat._prompting(request, chat.recipe_of(str(run)))


@pytest.mark.parametrize("config", [{"temperature": "x"}, {"top_p": 2}, {"temperature": float("nan")}])
def test_a_damaged_record_is_refused(config: dict[str, Any], tmp_path: Path, tiny_model: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_model, run)
    (run / "run.json").write_text(json.dumps({"recipe": {"dataset": {"name": "gsm8k"}}, "config": config}))
    assert cli.main(["chat", str(run), "--prompt", "1"]) == 2
    assert f"`{next(iter(config))}` is" in capsys.readouterr().err


WORDINGS: list[dict[str, Any]] = [
    {"name": "classification", "labels": ["good", "bad"], "prompt_format": "text"},
    {"name": "classification", "labels": ["good", "bad"], "prompt_template": "Judge: {{ text }}"},
    {"name": "gsm8k", "system_prompt": "Be brief."},
    {"name": "extraction"},
    {"prompt_template": "Q: {{ text }}\nA:", "prompt_format": "text", "system_prompt": "Be brief."},
]


@pytest.mark.parametrize("keys", WORDINGS)
def test_a_message_is_worded_as_the_rows_of_training(keys: dict[str, Any], tmp_path: Path) -> None:
    text = " A fine film. \n"
    row = {"text": text, "question": text, "label": "good", "object": '{"a": 1}', "answer": "1"}
    names = {"gsm8k": ("question", "answer"), "extraction": ("text", "object")}.get(keys.get("name", ""))
    (tmp_path / "rows.jsonl").write_text(json.dumps({name: row[name] for name in names or ("text", "label")}) + "\n")
    dataset = {**keys, "path": str(tmp_path / "rows.jsonl")}
    expected = load(DatasetSpec.parse(dataset))[0]["prompt"]
    prompting = chat._prompting(chat.Request(model="m"), {"dataset": dataset})
    assert prompting.prompt([prompting.message(text)]) == expected


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"prompt_template": "{{ text }} {{ hint }}", "prompt_format": "text"}, "columns hint, text, and"),
        ({"name": "multiple_choice"}, "columns question, choices, and"),
        ({"prompt_template": "{{ text }}", "prompt_format": "text"}, None),
        ({"name": "classification", "labels": ["a", "b"]}, None),
    ],
)
def test_columns_that_a_message_lacks_are_named(
    keys: dict[str, Any], words: str | None, tiny_model: Path, tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_model, run)
    (run / "run.json").write_text(json.dumps({"recipe": {"dataset": {**keys, "path": "rows.jsonl"}}}))
    assert cli.main(["chat", str(run), "--prompt", "1", "--max_new_tokens", "1"]) == 0
    said = capsys.readouterr().err
    assert said.count("the recipe's prompts are made from the columns") == (words is not None)
    assert (words or "") in said


def test_a_closed_standard_input_ends_the_conversation(talk: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    converse(talk.chat, chat._line)
    assert talk.prompts == []


@pytest.mark.parametrize("ends", [EOFError, KeyboardInterrupt])
def test_what_follows_a_terminals_prompt_is_on_a_line_of_its_own(
    ends: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def ask(prompt: str) -> str:
        assert prompt == "> "
        raise ends

    monkeypatch.setattr("builtins.input", ask)
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    with pytest.raises(ends):
        chat._line()
    assert capsys.readouterr().err == "\n"


def test_a_checkpoint_that_is_the_working_folder_has_its_runs_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"recipe": {}, "config": {"temperature": 0.25}}))
    monkeypatch.chdir(tmp_path / "checkpoint-2")
    assert chat.recipe_of(".")["temperature"] == 0.25


def test_the_first_lines_tell_how_lines_are_read_and_answers_sampled(talk: Scripted, capsys: Any) -> None:
    chat._introduce("runs/a", talk.chat)
    assert capsys.readouterr() == (
        "",
        "runs/a: each line continues the conversation, and an empty line begins a new one\n"
        "system prompt: Be brief.; temperature 0, at most 100 tokens; Ctrl-C stops an answer, Ctrl-D leaves\n",
    )
    for system, shown in ((None, "none"), ("x\n" * 99, "x " * 38 + "x...")):
        talk.chat.prompting = Prompting(system=system, is_text=True)
        chat._introduce("runs/a", talk.chat)
        first, second = capsys.readouterr().err.splitlines()
        assert first == "runs/a: each line is a plain-text prompt, as in training, and the model sees no earlier line"
        assert second.startswith(f"system prompt: {shown}; temperature 0, ")


@pytest.mark.parametrize(("prompt", "asks"), [("hello", False), (None, True), ("", False)])
def test_a_prompt_is_answered_once_and_lines_are_otherwise(
    prompt: str | None, asks: bool, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, capsys: Any
) -> None:
    answered, conversed = [], []
    monkeypatch.setattr(Chat, "answer", lambda self, text: answered.append(text))
    monkeypatch.setattr(chat, "converse", lambda talk, ask: conversed.append(ask))
    request = chat.Request(model=str(tiny_model), recipe="quickstart", prompt=prompt)
    if prompt == "":
        with pytest.raises(UserError, match="^--prompt is empty: write a message$"):
            chat.chat(request)
        return
    chat.chat(request)
    assert (answered, conversed) == (([], [chat._line]) if asks else ([prompt], []))
    assert ("Ctrl-D leaves" in capsys.readouterr().err) == asks


@pytest.mark.parametrize(
    ("options", "recipe", "expected"),
    [
        ({}, {}, (0.7, 512, 0)),
        ({}, {"max_completion_length": 9}, (0.7, 9, 0)),
        ({"temperature": 0.0, "max_new_tokens": 5, "seed": 3}, {"max_completion_length": 9}, (0.0, 5, 3)),
    ],
)
def test_options_replace_the_recipes_sampling(
    options: dict[str, Any], recipe: dict[str, Any], expected: tuple[float, int, int]
) -> None:
    settings = chat._settings(chat.Request(model="m", **options), recipe, 0.7)
    assert (settings.temperature, settings.max_new_tokens, settings.seed) == expected
    assert settings.strict is None
    stop = {"generation_kwargs": {"stop": ["x"]}}
    assert list(chat._settings(chat.Request(model="m"), stop, 1.0).stop) == ["x"]


def test_options_replace_the_system_prompt_and_the_form_of_prompts() -> None:
    recipe = {"dataset": {"name": "gsm8k", "system_prompt": "Be brief.", "prompt_format": "text"}}
    request = chat.Request(model="m")
    assert (chat._prompting(request, recipe).system, chat._prompting(request, recipe).is_text) == ("Be brief.", True)
    changed = chat.Request(model="m", system_prompt="Be long.", prompt_format="conversational")
    found = chat._prompting(changed, recipe)
    assert (found.system, found.is_text) == ("Be long.", False)
    assert chat._prompting(request, {}).is_text is None, "the tokenizer decides"
    assert chat._prompting(request, {}).template_kwargs == {}
    for name in ("max_new_tokens", "temperature"):
        with pytest.raises(UserError, match=f"--{name} is "):
            chat._settings(chat.Request(model="m", **{name: -1 if name == "temperature" else 0}), {}, 1.0)
    with pytest.raises(UserError, match="^--prompt is empty: write a message$"):
        chat._check_text(" \n", "--prompt")


def test_the_tokenizer_decides_the_form_of_prompts_that_no_recipe_has() -> None:
    with_template, without = chat_tokenizer(), byte_tokenizer()
    without.chat_template = None
    empty = chat_tokenizer("")
    found = [chat._with_format(Prompting(), one, "m").is_text for one in (with_template, without, empty)]
    assert found == [False, True, True]
    assert chat._with_format(Prompting(is_text=True), without, "m").is_text is True
    assert chat._with_format(Prompting(is_text=False), with_template, "m").is_text is False
    with pytest.raises(UserError, match="m: its tokenizer has no chat template: give --prompt_format text"):
        chat._with_format(Prompting(is_text=False), without, "m")


def test_a_model_without_a_known_context_answers_up_to_the_limit(
    talk: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [talk.chat._room(length) for length in (1, 28, 29, 127)] == [100, 100, 99, 1]
    with pytest.raises(UserError, match="the prompt has 128 tokens, and the model's context has 128: write a shorter"):
        talk.chat._room(128)
    config = SimpleNamespace(get_text_config=SimpleNamespace)
    monkeypatch.setattr(talk.chat, "model", SimpleNamespace(config=config))
    assert talk.chat._room(5_000) == 100


def test_an_answer_that_is_cut_is_noted_with_its_length(talk: Scripted, capsys: Any) -> None:
    chat._note_cut(talk.chat)
    assert capsys.readouterr().err == ""
    talk.chat.cut_at = 7
    chat._note_cut(talk.chat)
    assert capsys.readouterr().err == "(cut at 7 tokens: --max_new_tokens raises the limit)\n"


def test_input_in_another_encoding_is_refused_and_an_empty_answer_begins_nothing(
    talk: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def undecodable(prompt: str) -> str:
        assert prompt == "", "no prompt without a terminal"
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr("builtins.input", undecodable)
    with pytest.raises(UserError, match="standard input is not utf-8: write it in this encoding"):
        chat._line()
    converse(talk.chat, asked("", "  "))
    assert capsys.readouterr().err == "", "there was no conversation to end"


def test_tools_need_messages_and_no_environment() -> None:
    request = chat.Request(model="m")
    with pytest.raises(UserError, match="`environment_factory`: an environment begins with a row of a dataset"):
        chat._tools(request, {"environment_factory": "x"})
    with pytest.raises(UserError, match="`tools` needs messages, and the prompts are text: leave out --prompt_format"):
        chat._tool_turns(None, "m", Prompting(is_text=True), "tried")


@pytest.mark.parametrize(("stdin", "stdout"), [(True, False), (False, True), (False, False)])
def test_a_prompt_is_shown_only_if_input_and_output_are_a_terminal(
    stdin: bool, stdout: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def ask(prompt: str) -> str:
        assert prompt == ""
        raise EOFError

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr("sys.stdin.isatty", lambda: stdin)
    monkeypatch.setattr("sys.stdout.isatty", lambda: stdout)
    with pytest.raises(EOFError):
        chat._line()
    assert capsys.readouterr().err == ""


def test_a_plain_text_prompt_that_is_too_long_can_only_be_shortened(talk: Scripted) -> None:
    talk.chat.turns = [{"role": "user", "content": "x"}]
    with pytest.raises(UserError, match="begin a new conversation with an empty line$"):
        talk.chat._room(128)
    talk.chat.prompting = Prompting(is_text=True)
    with pytest.raises(UserError, match="write a shorter one$"):
        talk.chat._room(1_280)


def test_an_answer_that_ends_is_not_noted_as_cut_after_one_that_was(talk: Scripted) -> None:
    talk.chat.cut_at = 7
    talk.script = ["one", "two"]
    assert [talk.chat.answer("a"), talk.chat.answer("b")] == ["one", "two"]
    assert talk.chat.cut_at is None


@pytest.mark.parametrize(
    ("completion", "cut_at"),
    [([7, 8], 2), ([7, 257], None), ([257, 7], 2), ([7, 257, 8], 3), ([7, 8, 257], None), ([66, 67], None)],
    ids=str,
)
def test_an_answer_is_cut_unless_it_ends_with_an_end_token_or_a_stop_string(
    completion: list[int], cut_at: int | None, talk: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.cat([input_ids, torch.tensor([completion])], 1)

    monkeypatch.setattr(talk.chat.model, "generate", generate)
    stop = talk.chat.tokenizer.decode([66, 67])
    talk.chat.stop = chat.StopStrings((stop,), talk.chat.tokenizer)
    inputs = {"input_ids": torch.tensor([[257, 257, 257]])}
    assert talk.chat._generate(inputs, talk.chat.settings, chat.Streamer(talk.chat.tokenizer)) == completion
    assert talk.chat.cut_at == cut_at


def test_a_conversation_is_rendered_with_the_arguments_of_the_recipe_and_no_other_special_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = "{{ mode }}" + CHATML
    talk = Scripted(monkeypatch, Prompting(is_text=False, template_kwargs={"mode": "slow"}))
    talk.chat.tokenizer = chat_tokenizer(template)
    begin = TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", 257)])
    talk.chat.tokenizer.backend_tokenizer.post_processor = begin
    talk.script = ["one", "two"]
    talk.chat.answer("a")
    assert talk.prompts == ["slow<|im_start|>user\na<|im_end|><|im_start|>assistant\n"]
    talk.chat.prompting = Prompting(is_text=True)
    talk.chat.answer("a")
    assert talk.prompts[1] == "<|im_end|>a", "as the tokenizer begins a text"


# ---- tools


def test_each_result_is_shown_in_one_line_of_bounded_length(capsys: Any) -> None:
    results = [[Result("first", "a\nb"), Result("second", "x" * 600)], [], [Result("third", {"n": 1})]]
    calls = [["call"], [], ["other"]]

    def run(given: Any) -> Any:
        assert given is calls
        return results

    assert chat.ShownCalls(SimpleNamespace(run=run)).run(calls) is results
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["[first: a b]", f"[second: {'x' * 497}...]", "[third: {'n': 1}]"]


class ToolTalk:
    """A conversation with tools whose loop generates one more turn, after a result of ten tokens."""

    def __init__(self, talk: Scripted, monkeypatch: pytest.MonkeyPatch, ending: str = "answered") -> None:
        self.chat, self.seen, self.ending = talk.chat, [], ending
        self.made: list[Any] = [[7, 7, 7], [8]]
        self.looped: list[Any] = []
        tool = SimpleNamespace(function=len)
        toolset = SimpleNamespace(tools=[tool], all_tools=[tool])
        self.chat.tools = SimpleNamespace(
            tools=SimpleNamespace(toolset=toolset),
            prompt_ids=self.prompt_ids,
            row=self.row,
            loop=self.loop,
            runner="runner",
        )
        monkeypatch.setattr(self.chat, "_generate", self.generate)

    def prompt_ids(self, prompt: Any) -> list[int]:
        self.prompt = prompt
        return [5] * 50

    def row(self, prompt: list[int], first: list[int], functions: list[Any], name: None) -> Any:
        assert (prompt, first, functions, name) == ([5] * 50, [7, 7, 7], [len], None)
        return SimpleNamespace(
            completion=first, messages=[{"role": "assistant", "content": "a call"}], ending="answered"
        )

    def loop(self, next_turn: Any, room: int, positions: int, runner: Any) -> Any:
        self.looped.append((room, positions, type(runner), runner.runner))

        def run(rows: list[Any]) -> None:
            (row,) = rows
            row.completion = [*row.completion, *[9] * 10]
            row.messages.append({"role": "tool", "name": "len", "content": "3"})
            ((turn,), _) = next_turn([[5] * 50 + row.completion])
            row.completion = [*row.completion, *turn]
            row.messages.append({"role": "assistant", "content": "the answer"})
            row.ending = self.ending

        return run

    def generate(self, inputs: Any, settings: Settings, streamer: Any) -> list[int]:
        assert inputs["attention_mask"].tolist() == [[1] * inputs["input_ids"].shape[1]]
        self.seen.append((inputs["input_ids"].tolist(), settings.max_new_tokens))
        made = self.made.pop(0)
        if made is KeyboardInterrupt:
            streamer.parts.append("half of it")
            raise KeyboardInterrupt
        streamer.parts.append("streamed")
        return made


def test_an_answer_with_tools_shares_its_tokens_among_its_turns(
    talk: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tools = ToolTalk(talk, monkeypatch)
    talk.chat.cut_at = 3
    assert talk.chat.answer("how long?") == "the answer"
    question = {"role": "user", "content": "how long?"}
    assert tools.prompt == [{"role": "system", "content": "Be brief."}, question]
    room = 128 - 50
    assert tools.looped == [(room, 129, chat.ShownCalls, "runner")]
    assert tools.seen == [([[5] * 50], room), ([[5] * 50 + [7] * 3 + [9] * 10], room - 13)]
    assert [turn["content"] for turn in talk.chat.turns] == ["how long?", "a call", "3", "the answer"]
    assert talk.chat.cut_at is None
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("ending", ["iterations", "no room", "full", "dropped"])
def test_an_answer_that_ends_in_a_call_says_why(
    ending: str, talk: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ToolTalk(talk, monkeypatch, ending)
    talk.chat.answer("how long?")
    assert capsys.readouterr().err == f"({chat.UNANSWERED[ending]})\n"


@pytest.mark.parametrize("made", [[KeyboardInterrupt], [[7, 7, 7], KeyboardInterrupt]], ids=len)
def test_ctrl_c_keeps_the_turn_with_tools_that_was_printed_last(
    made: list[Any], talk: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tools = ToolTalk(talk, monkeypatch)
    tools.made = made
    with pytest.raises(KeyboardInterrupt):
        talk.chat.answer("how long?")
    assert talk.chat.turns == [
        {"role": "user", "content": "how long?"},
        {"role": "assistant", "content": "half of it"},
    ]
    assert capsys.readouterr().out == "\n", "the line of the answer ends"


# ---- Settings and prompts of a request


class Stopped(Exception):
    pass


@pytest.mark.parametrize(
    ("prompt", "tried"),
    [("x" * 100_001, "x" * 100_000), (None, "How are you?"), ("1 + 1", "1 + 1")],
    ids=["a", "b", "c"],
)
@pytest.mark.parametrize("with_tools", [False, True])
def test_the_tokenizer_is_tried_on_the_beginning_of_the_first_message(
    with_tools: bool, prompt: str | None, tried: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[object, ...]] = []

    def load(*words: object) -> None:
        given.append(words)
        raise Stopped

    tool = SimpleNamespace(schema={"name": "len"})
    tools = SimpleNamespace(toolset=SimpleNamespace(tools=[], all_tools=[tool]))
    trusted: list[bool] = []
    monkeypatch.setattr(chat, "check_model", lambda name: None)
    monkeypatch.setattr(
        chat, "tools_of", lambda recipe, is_trusted: trusted.append(is_trusted) or (tools if with_tools else None)
    )
    monkeypatch.setattr(chat, "load_tokenizer" if with_tools else "load_engine", load)
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "chat_template.jinja").write_text("a template")
    recipe = {
        "dataset": {"name": "gsm8k", "system_prompt": "none", "prompt_format": "conversational"},
        "chat_template_kwargs": {"thinking": True},
        "chat_template_path": str(tmp_path / "template"),
    }
    monkeypatch.setattr(chat, "recipe_of", lambda *_: recipe)
    for named in ("r.yaml", None):
        with pytest.raises(Stopped):
            chat.chat(chat.Request(model="m", prompt=prompt, recipe=named))
    template = chat.ChatTemplate.read(str(tmp_path / "template"))
    kwargs = {"thinking": True, **({"tools": [{"name": "len"}]} if with_tools else {})}
    messages = [{"role": "user", "content": tried}]
    assert given == [("m", [messages], kwargs, template), ("m", [messages], kwargs, None)], "a run has saved its own"
    assert trusted == [True, False]


def test_tools_are_rendered_by_the_models_tokenizer_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = SimpleNamespace(toolset=SimpleNamespace(all_tools=[]))
    monkeypatch.setattr(chat, "load_tokenizer", lambda *_: "tokenizer")
    monkeypatch.setattr(chat, "ToolTurns", lambda *given: given)
    prompting = Prompting(is_text=False, template_kwargs={"thinking": True})
    assert chat._tool_turns(tools, "m", prompting, []) == (tools, "m", "tokenizer", {"thinking": True})


def test_the_form_of_prompts_needs_no_held_out_rows_and_no_pass_rates(tmp_path: Path) -> None:
    """A single row has no share to hold out, and the evaluation of its pass rate may be gone."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1 ="}) + "\n")
    dataset = {"path": str(tmp_path / "rows.jsonl"), "eval_share": 0.5}
    for more in ({}, {"pass_rate": {"evaluation": "gone", "keep": [0.1, 0.9]}}):
        assert chat._prompting(chat.Request(model="m"), {"dataset": {**dataset, **more}}).is_text is True


@pytest.mark.parametrize(
    ("keys", "way"),
    [
        ({"prompt_template": "{{ a }} {{ b }}", "prompt_format": "text"}, "in the words of `dataset.prompt_template`)"),
        ({"name": "multiple_choice"}, "as in training)"),
    ],
)
def test_the_wording_of_several_columns_is_the_users(keys: dict[str, Any], way: str, capsys: Any) -> None:
    chat._note_columns(DatasetSpec.parse({"path": "rows.jsonl"}))
    assert capsys.readouterr().err == "", "its prompts are a column"
    chat._note_columns(DatasetSpec.parse({**keys, "path": "rows.jsonl"}))
    assert capsys.readouterr().err.strip().endswith(f"write all of them into it, {way}")
