"""`grpo-recipes chat`: prompts as in training, answers as they are generated, and what Ctrl-C leaves behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_recipes import cli
from grpo_recipes.data.load import load
from grpo_recipes.data.prompts import prompt_of, system_text
from grpo_recipes.evaluation import chat
from grpo_recipes.evaluation.chat import Chat, converse
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_rewards.terminal import visible_lines
from tests.support.tiny import byte_tokenizer, chat_tokenizer, policy

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


@pytest.fixture
def run(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "run"))


def record(run: Path, config: Any = None, dataset: Any = None, **recipe: Any) -> None:
    """Write the record of a run."""
    recipe["dataset"] = dataset or {"name": "gsm8k"}
    (run / "run.json").write_text(json.dumps({"recipe": recipe, "config": config or {}}))


def test_one_prompt_is_answered_as_the_recipe_prompts(tiny_model: Path, capsys: Any) -> None:
    options = ["--recipe", "quickstart", "--temperature", "0", "--max_new_tokens", "12"]
    assert cli.main(["chat", str(tiny_model), *options, "--prompt", QUESTION]) == 0
    prompt = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    expected = greedy(tiny_model, prompt, 12)
    assert expected.strip()
    captured = capsys.readouterr()
    assert captured.out == visible_lines(expected) + "\n"
    assert " 12 tokens" in captured.err


def test_filters_of_the_training_apply_and_published_settings_do_not(tiny_model: Path, run: Path, capsys: Any) -> None:
    published = json.loads((run / "generation_config.json").read_text())
    (run / "generation_config.json").write_text(json.dumps({**published, "suppress_tokens": [*range(3, 400)]}))
    config = {"temperature": 0.7, "top_k": 1, "max_completion_length": 12}
    record(run, config, {"name": "arithmetic", "size": 5, "system_prompt": "none"})
    assert cli.main(["chat", str(run), "--prompt", QUESTION]) == 0
    expected = greedy(tiny_model, f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n", 12)
    assert capsys.readouterr().out == visible_lines(expected) + "\n"


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
        longest: Largest number of tokens of each prompt with its answer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_text: bool = False) -> None:
        tokenizer = chat_tokenizer()
        model = policy(eos_token_id=257, pad_token_id=257)
        self.script: list[str | None] = []
        self.prompts: list[str] = []
        self.longest: list[int] = []
        dataset = DatasetSpec.parse({"path": "none", "system_prompt": "Be brief."})
        settings = Settings(max_new_tokens=100, strict=None)
        self.chat = Chat(Transformers(model, tokenizer), dataset, is_text, settings, {})
        self.lines: Iterator[Any] = iter(())

        def generate(input_ids: torch.Tensor, streamer: Any, **options: Any) -> torch.Tensor:
            self.prompts.append(tokenizer.decode(input_ids[0]))
            self.longest.append(input_ids.shape[1] + options["max_new_tokens"])
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

        def line() -> str:
            line = next(self.lines)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(model, "generate", generate)
        monkeypatch.setattr("builtins.input", line)

    def converse(self, *lines: str | type[BaseException]) -> None:
        """Hold the conversation with these lines, the exceptions among them raised, and then the end of input."""
        self.lines = iter([*lines, EOFError])
        converse(self.chat)


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    return Scripted(monkeypatch)


def turns(*contents: str) -> str:
    """Return the rendered prompt of a conversation, by the template of `chat_tokenizer`."""
    roles = ["system", *["user", "assistant"] * len(contents)]
    messages = [f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in zip(roles, contents, strict=False)]
    return "".join(messages) + "<|im_start|>assistant\n"


def test_a_conversation_continues_until_an_empty_line(talk: Scripted, capsys: Any) -> None:
    talk.script = ["one", "two", "three"]
    talk.converse("a", "b", "", "c")
    assert talk.prompts == [turns("Be brief.", "a"), turns("Be brief.", "a", "one", "b"), turns("Be brief.", "c")]
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_each_line_is_one_prompt_for_a_model_of_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Scripted(monkeypatch, is_text=True)
    talk.script = ["one", "two"]
    talk.converse("a", "b")
    assert talk.prompts == ["Be brief.\na", "Be brief.\nb"]


def test_ctrl_c_stops_an_answer_and_keeps_what_was_printed(talk: Scripted, capsys: Any) -> None:
    talk.script = ["half of", None, "two"]
    talk.converse("a", "b", KeyboardInterrupt, "never asked")
    assert talk.prompts[1] == turns("Be brief.", "a", "half of", "b")
    assert capsys.readouterr().out == "half of\ntwo\n"
    assert len(talk.prompts) == 2, "Ctrl-C at a line leaves"


def test_a_refused_message_is_not_in_the_conversation(talk: Scripted, capsys: Any) -> None:
    talk.script = ["one", "two"]
    talk.converse("a", "x" * 200, "c\ud800")
    assert talk.prompts[1] == turns("Be brief.", "a", "one", "c?")
    assert " 128" in capsys.readouterr().err


def test_an_answer_fits_into_the_context(talk: Scripted) -> None:
    talk.script = ["one"]
    talk.chat.answer("x" * 50)
    assert talk.longest == [128]


def test_an_answer_ends_at_a_stop_string_of_the_recipe(capsys: Any) -> None:
    """A random model of bytes draws each of these letters often."""
    settings = Settings(temperature=1.0, max_new_tokens=50, strict=None, stop=("e", "a", "1", "W", "b"))
    talk = Chat(Transformers(policy(), byte_tokenizer()), DatasetSpec.parse({"path": "none"}), True, settings, {})
    torch.manual_seed(0)
    answers = [talk.answer("1 + 1 =") for _ in range(3)]
    assert any(answer.endswith(settings.stop) for answer in answers)
    assert not any(stop in answer[:-1] for answer in answers for stop in settings.stop)


def test_the_form_of_prompts_without_a_key_is_that_of_the_rows(
    tmp_path: Path, tiny_model: Path, run: Path, capsys: Any
) -> None:
    """A single row has no share to hold out, and the evaluation of its pass rate may be gone."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1 ="}) + "\n")
    record(run, dataset={"path": str(tmp_path / "rows.jsonl"), "eval_share": 0.5})
    assert cli.main(["chat", str(run), "--prompt", "7", "--temperature", "0", "--max_new_tokens", "8"]) == 0
    assert capsys.readouterr().out == visible_lines(greedy(tiny_model, "7", 8)) + "\n"


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
    spec = DatasetSpec.parse(dataset)
    prompt = prompt_of([chat._worded(text, spec)], system_text(spec), spec.prompt_format == "text")
    assert prompt == expected


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"prompt_template": "{{ text }} {{ hint }}", "prompt_format": "text"}, "hint, text"),
        ({"name": "multiple_choice"}, "question, choices"),
        ({"name": "classification", "labels": ["a", "b"]}, None),
    ],
)
def test_columns_that_a_message_lacks_are_named(
    keys: dict[str, Any], words: str | None, run: Path, capsys: Any
) -> None:
    record(run, dataset={**keys, "path": "rows.jsonl"})
    assert cli.main(["chat", str(run), "--prompt", "1", "--max_new_tokens", "1"]) == 0
    said = capsys.readouterr().err
    assert (words or "") in said
    assert ("columns" in said) == (words is not None)


def test_recipes_with_tools_are_refused(run: Path, capsys: Any) -> None:
    for key in ("tools", "environment_factory"):
        record(run, **{key: ["calculator"]})
        assert cli.main(["chat", str(run), "--prompt", "1"]) == 2
        assert f"`{key}`" in capsys.readouterr().err
