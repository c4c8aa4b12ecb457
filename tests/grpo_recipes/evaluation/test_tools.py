"""Evaluation of recipes with tools and environments: the turns of training, transcripts, and accuracy by call."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset

from grpo_recipes import GRPOTrainer, cli
from grpo_recipes.evaluation import evaluate
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.estimates import describe
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.tools import (
    Played,
    RecipeTools,
    Rollouts,
    Turns,
    _LaterTurns,
    tools_of,
)
from grpo_rewards.errors import UserError
from grpo_rewards.terminal import rendered
from tests.support.tool_rollouts import (
    ADD,
    BROKEN,
    END,
    FETCH,
    MALFORMED,
    TOOLS,
    UNFIT,
    call,
    tool_policy,
    tool_tokenizer,
    transcript_reward,
)
from tests.support.trainers import make_trainer

HERE = "tests.grpo_recipes.evaluation.test_tools"
SUPPORT = "tests.support.tool_rollouts"
COUNT = call("count", times=2)
LIMITS = {"max_completion_length": 400, "max_tool_calling_iterations": 4}


class Counter:
    """Environment that counts its calls."""

    def reset(self, answer: str, **columns: Any) -> str:
        self.calls = 0
        return " (count)"

    def count(self, times: int) -> str:
        """Count a call.

        Args:
            times: Length of the answer.
        """
        self.calls += 1
        return f"{self.calls} " * times

    def get_reward(self) -> float:
        return 0.5 * self.calls


class Slow(Counter):
    """Environment whose calls pass their time limit."""

    def count(self, times: int) -> str:
        """Count a call.

        Args:
            times: Length of the answer.
        """
        time.sleep(0.4)
        return super().count(times)


def quote() -> str:
    """Quote the end token."""
    return END


def counted(prompts: list[Any], completions: list[Any], environments: list[Counter], **columns: Any) -> list[float]:
    """Return the number of results in each transcript, which must be that of its environment."""
    scores = []
    for prompt, messages, environment in zip(prompts, completions, environments, strict=True):
        results = sum(message["role"] == "tool" for message in messages)
        assert results in (0, environment.calls), "a trial has no turns"
        assert results == 0 or prompt[-1]["content"].endswith(" (count)")
        scores.append(float(results))
    return scores


class Scripted:
    """Engine whose rows of an even case make calls before they answer 3."""

    positions = float("inf")

    def __init__(self, first: str) -> None:
        self.tokenizer, self.first = tool_tokenizer(), first
        self.seen: list[tuple[list[str], Sequence[int] | None]] = []

    def generate(self, prompts: list[list[int]], settings: Settings, room: Any = None) -> list[list[int]]:
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        self.seen.append((texts, room))
        turns = []
        for text in texts:
            is_first = "<tool_response>" not in text
            is_even = int(text.split("case ")[1][0]) % 2 == 0
            turns.append(self.first if is_first and is_even else f"The answer is 3{END}")
        return self.tokenizer(turns, add_special_tokens=False)["input_ids"]

    def sampling(self, settings: Settings) -> dict[str, Any]:
        return {}


@pytest.fixture
def evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that evaluates a recipe with keys on four cases, of which the first is answered wrongly."""
    rows = [{"question": f"case {n}", "answer": "4" if n == 0 else "3"} for n in range(4)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "model"
    tokenizer = tool_tokenizer()
    tool_policy(tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)

    def run(first: str = f"{ADD}{END}", options: Sequence[str] = (), **keys: Any) -> tuple[Scripted, int]:
        engine = Scripted(first)
        monkeypatch.setattr(evaluate, "load_engine", lambda *_: engine)
        dataset = {"path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "test.jsonl")}
        recipe = {
            "model_name_or_path": str(model),
            "dataset": {**dataset, "prompt_format": "conversational"},
            "rewards": [f"{SUPPORT}.transcript_reward"],
            **LIMITS,
            **keys,
        }
        (tmp_path / "r.yaml").write_text(json.dumps(recipe))
        command = ["evaluate", str(model), "--recipe", str(tmp_path / "r.yaml"), *options]
        return engine, cli.main([*command, "--output", str(tmp_path / "e")])

    return run


# ---- the turns of training


def calling_policy(tokenizer: Any) -> Any:
    """Return a policy that writes calls, a few words and the end token, in up to four turns, by greedy decoding too."""
    policy = tool_policy(tokenizer, seed=20)
    written = [*tokenizer.convert_tokens_to_ids([ADD, FETCH, BROKEN]), tokenizer.eos_token_id]
    written += tokenizer("so", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        kept = policy.lm_head.weight[written].clone()
        policy.lm_head.weight.zero_()
        policy.lm_head.weight[written] = kept
    return policy


def played(tools: RecipeTools, engine: Any, rows: Sequence[dict[str, Any]], **settings: Any) -> Played:
    tokenizer = tool_tokenizer()
    rollouts = Rollouts(tools, lambda: Turns(tools, "m", tokenizer), lambda: engine)
    return rollouts.play(rows, Settings(strict=None, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [1, 3])
def test_greedy_turns_are_those_of_training(iterations: int, tmp_path: Path) -> None:
    tokenizer = tool_tokenizer()
    policy = calling_policy(tokenizer)
    rows = [{"prompt": [{"role": "user", "content": f"case {n} {'so ' * n}"}]} for n in range(8)]
    trainer = make_trainer(
        GRPOTrainer,
        policy,
        tmp_path,
        rewards=transcript_reward,
        rows=Dataset.from_list(rows),
        tokenizer=tokenizer,
        tools=TOOLS,
        num_generations=2,
        per_device_train_batch_size=16,
        max_completion_length=300,
        max_tool_calling_iterations=iterations,
        max_steps=1,
        learning_rate=0.0,
        shuffle_dataset=False,
        generation_kwargs={"do_sample": False},
    )
    batches = []
    loop = trainer._tool_call_loop
    trainer._tool_call_loop = lambda *given: batches.append(loop(*given)) or batches[-1]
    trainer.train()
    recipe = {
        "tools": [f"{SUPPORT}.{tool.__name__}" for tool in TOOLS],
        "max_tool_calling_iterations": iterations,
    }
    tools = tools_of(recipe, is_trusted=True)
    assert tools is not None
    found = played(tools, Transformers(policy, tokenizer), rows, max_new_tokens=300)
    (values,) = batches
    assert {len(row.turns) for row in found.rows} >= {0, 1, iterations}, "rows call tools in different numbers of turns"
    assert [row.completion for row in found.rows] == list(values[2])[::2]
    assert [row.mask for row in found.rows] == list(values[0])[::2]
    assert found.completions == list(values[1])[::2]


def test_later_turns_have_the_room_that_is_left(evaluated: Any) -> None:
    engine, code = evaluated(tools=[f"{SUPPORT}.add"])
    assert code == 0
    (texts, room), (later, left) = engine.seen
    assert room is None
    assert len(texts) == 4
    assert all("def add" in text or '"name": "add"' in text for text in texts), "the prompt describes the tool"
    lengths = [len(ids) for ids in engine.tokenizer([text.split("assistant\n", 1)[1] for text in later])["input_ids"]]
    assert list(left) == [400 - length for length in lengths]
    assert len(later) == 2, "only the rows that called"


# ---- results


def test_accuracy_with_and_without_a_call(evaluated: Any, tmp_path: Path) -> None:
    _, code = evaluated(tools=[f"{SUPPORT}.add"], rewards=["math_correctness", f"{SUPPORT}.transcript_reward"])
    assert code == 0
    summary = json.loads((tmp_path / "e" / "evaluation.json").read_text())
    found = summary["tools"]
    assert found["called"]["value"] == found["calls"] == 0.5
    assert found["with_call"]["lenient"]["value"] == 0.5
    assert found["without_call"]["lenient"]["value"] == 1.0
    assert summary["lenient"]["value"] == 0.75
    assert found["with_call"]["problems"] == found["without_call"]["problems"] == 2
    shown = rendered(describe(summary), 100)
    assert "with a call" in shown
    assert "0.50 calls per completion" in shown
    table = pd.read_parquet(tmp_path / "e" / "completions.parquet")
    assert table["calls"].tolist() == [1, 0, 1, 0]
    assert table["completion"].tolist() == ["The answer is 3"] * 4
    roles = [[message["role"] for message in json.loads(text)][-3:] for text in table["transcript"]]
    assert roles[0] == ["assistant", "tool", "assistant"]
    assert json.loads(table["transcript"][0])[-2]["content"] == "3"
    assert summary["settings"]["tools"]["tool_limits"] == {"seconds": 30.0, "result_tokens": 512, "failures": 0.5}


def test_an_environment_begins_each_row_and_scores_it(evaluated: Any, tmp_path: Path) -> None:
    keys = {"environment_factory": f"{HERE}.Counter", "rewards": [f"{HERE}.counted"]}
    _, code = evaluated(f"{COUNT}{COUNT}{END}", ["--samples", "2", "--batch_size", "4"], **keys)
    assert code == 0
    table = pd.read_parquet(tmp_path / "e" / "completions.parquet")
    assert table["calls"].tolist() == [2, 2, 0, 0] * 2
    assert table["reward/counted"].tolist() == table["calls"].tolist()
    assert table["reward/Counter"].tolist() == [0.5 * calls for calls in table["calls"]]
    assert "strict" not in table, "the environment decides what is right"
    assert json.loads(table["prompt"][0])[-1]["content"] == "case 0"
    first = json.loads(table["transcript"][0])
    assert [message["content"] for message in first if message["role"] == "tool"] == ["1 1 ", "2 2 "]
    assert "case 0 (count)" in [message["content"] for message in first]


def test_an_environment_with_an_abandoned_call_is_not_used_again() -> None:
    recipe = {"environment_factory": f"{HERE}.Slow", "tool_limits": {"seconds": 0.1}, "max_tool_calling_iterations": 2}
    tools = tools_of(recipe, is_trusted=True)
    assert tools is not None
    engine = Scripted(f"{COUNT}{END}")
    rows = [{"prompt": [{"role": "user", "content": f"case {n}"}], "answer": "3"} for n in range(3)]
    rollouts = Rollouts(tools, lambda: Turns(tools, "m", engine.tokenizer), lambda: engine)
    first, second = [rollouts.play(rows, Settings(strict=None)).environments for _ in range(2)]
    assert [one in first for one in second] == [True, False, False], "only the call of row 1 was not made"


def test_other_limits_are_another_evaluation(evaluated: Any, capsys: Any) -> None:
    tools = [f"{SUPPORT}.add"]
    assert evaluated(tools=tools)[1] == 0
    assert evaluated(tools=tools)[0].seen == [], "the finished evaluation is read"
    assert evaluated(tools=tools, tool_limits={"seconds": 5})[1] == 2
    assert "settings.tools.tool_limits.seconds was 30.0 and is now 5" in capsys.readouterr().err
    assert evaluated(tools=None, max_tool_calling_iterations=None)[1] == 2
    assert "settings.tools was {" in capsys.readouterr().err


def test_a_tool_that_fails_too_often_stops_the_evaluation(
    evaluated: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_recipes.tools.run.ENOUGH_CALLS", 2)
    assert evaluated(f"{BROKEN}{END}", tools=[f"{SUPPORT}.broken"])[1] == 2
    assert "100.0% of the last 2 calls of tools failed" in capsys.readouterr().err


def test_mistakes_of_the_policy_stop_no_evaluation(
    evaluated: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grpo_recipes.tools.run.ENOUGH_MISTAKES", 2)
    assert evaluated(f"{MALFORMED}{UNFIT}{END}", tools=[f"{SUPPORT}.add"])[1] == 0
    assert "calls of `add` were mistakes of the policy" in caplog.text


def test_a_result_does_not_end_its_message() -> None:
    tools = tools_of({"tools": [f"{HERE}.quote"], "max_tool_calling_iterations": 1}, is_trusted=True)
    assert tools is not None
    rows = [{"prompt": [{"role": "user", "content": "case 0"}]}]
    (row,) = played(tools, Scripted(f"{call('quote')}{END}"), rows).rows
    assert row.messages[1]["content"] == "< |im_end|>"


def test_a_call_that_no_file_can_hold_is_stored(evaluated: Any, tmp_path: Path) -> None:
    lone = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800", "b": {"c": [NaN]}}}\n</tool_call>'
    assert evaluated(f"{lone}{END}", tools=[f"{SUPPORT}.add"])[1] == 0
    assert pd.read_parquet(tmp_path / "e" / "completions.parquet")["calls"].tolist() == [1, 0, 1, 0]


# ---- refusals


def test_a_reset_that_fails_is_named(evaluated: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(self: Counter, **columns: Any) -> None:
        raise KeyError("board")

    monkeypatch.setattr(Counter, "reset", reset)
    assert evaluated(environment_factory=f"{HERE}.Counter")[1] == 2
    assert "`reset` of Counter fails on a held-out row (KeyError: 'board')" in capsys.readouterr().err


def test_a_reset_that_returns_no_text_is_named(evaluated: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "reset", lambda self, **columns: 7)
    assert evaluated(environment_factory=f"{HERE}.Counter")[1] == 2
    assert "`reset` of Counter returned the type int" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["evaluate", "chat"])
def test_the_tools_of_a_run_are_not_imported(verb: str, tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"recipe": {"tools": ["my_tools.calculator"]}, "config": {}}))
    for name in ("config.json", "model.safetensors"):
        (run / name).symlink_to(tiny_model / name)
    assert cli.main([verb, str(run)]) == 2
    assert "`tools`: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"tools": ["os.system"]}, "os.system is code that the run names: give its recipe with --recipe"),
        ({"tools": ["grpo_recipes.tools.examples.run"]}, "is code that the run names"),
        ({"environment_factory": {"a": "my_envs.Game"}}, "my_envs.Game is code that the run names"),
        ({"tools": "calculator"}, "name functions or classes by their paths"),
        ({"tools": ["grpo_recipes.tools.examples.calculator"], "max_tool_calling_iterations": None}, "is None"),
    ],
)
def test_a_record_is_not_trusted(recipe: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        tools_of({"max_tool_calling_iterations": 2, **recipe}, is_trusted=False)


def test_a_template_without_tools_is_refused_before_the_model_loads(
    tiny_model: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "load_engine", None)
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": "1"}) + "\n")
    recipe = {"model_name_or_path": str(tiny_model), "tools": ["grpo_recipes.tools.examples.calculator"], **LIMITS}
    recipe |= {
        "dataset": {"path": str(tmp_path / "train.jsonl"), "prompt_format": "conversational"},
        "rewards": ["math_correctness"],
    }
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    command = [
        "evaluate",
        str(tiny_model),
        "--recipe",
        str(tmp_path / "r.yaml"),
        "--path",
        str(tmp_path / "test.jsonl"),
    ]
    assert cli.main([*command, "--output", str(tmp_path / "e")]) == 2
    assert "its chat template renders no tool calls and results" in capsys.readouterr().err


# ---- vLLM


TURNS = [{"role": "system", "content": "s"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("observation", "expected"),
    [(None, "q"), ("", "q"), (" and more", "q and more")],
)
@pytest.mark.parametrize("is_routed", [False, True])
def test_the_text_of_a_reset_follows_the_last_message(observation: Any, expected: str, is_routed: bool) -> None:
    given: dict[str, Any] = {}

    def reset(**columns: Any) -> Any:
        given.update(columns)
        return observation

    rollouts: Any = SimpleNamespace(tools=SimpleNamespace(toolset=SimpleNamespace(is_routed=is_routed)))
    row = {"prompt": [*TURNS, {"role": "user", "content": "q"}], "environment": "e", "level": 3}
    prompt = Rollouts._observed(rollouts, SimpleNamespace(reset=reset), row)
    assert prompt == [*TURNS, {"role": "user", "content": expected}]
    assert given.keys() == row.keys() - ({"environment"} if is_routed else set())


def test_a_later_turn_is_as_long_as_its_row_and_the_model_have_room() -> None:
    """Rows that end in a result go on, each batch of turns with random numbers of its own."""
    calls: list[tuple[Any, int, list[int]]] = []

    def generate(prompts: Any, settings: Settings, room: list[int]) -> list[list[int]]:
        calls.append((prompts, settings.seed, room))
        return [[7]] * len(prompts)

    def row(ending: str, *mask: int) -> Any:
        return SimpleNamespace(ending=ending, mask=list(mask), completion=[5] * len(mask))

    rows = [row("answered", 1, 0), row("answered", 0, 1), row("full", 1, 0), row("answered", 1, 1, 1, 0)]
    engine: Any = SimpleNamespace(positions=13, generate=generate)
    later = _LaterTurns(rows, engine, Settings(max_new_tokens=10, seed=3))
    assert later([[1] * 4, [1] * 9]) == ([[7], [7]], None)
    later([[1] * 6, [1] * 7])
    assert [room for _, _, room in calls] == [[8, 4], [7, 6]]
    assert [seed for _, seed, _ in calls] == [3 + 2**40, 3 + 2**41], "a published result is reproduced by its seed"


def test_an_environment_that_pays_later_is_awaited() -> None:
    class Paying:
        async def get_reward(self) -> float:
            return 0.5

    class Silent:
        pass

    environments = [
        SimpleNamespace(scores=True, kind=Paying, path="my.Paying"),
        SimpleNamespace(scores=True, kind=Paying, path="my.Again"),
        SimpleNamespace(scores=False, kind=Silent, path="my.Silent"),
    ]
    toolset = SimpleNamespace(environments=environments)
    rollouts: Any = SimpleNamespace(tools=SimpleNamespace(toolset=toolset))
    (reward,) = Rollouts.rewards(rollouts)
    assert (reward.name, reward.passing) == ("Paying", None)
    assert reward.spec == {"name": "my.Paying", "alias": "Paying"}
    assert reward.scores(["p", "q"], ["a", "b"], {"environments": [Paying(), Silent()]}) == [0.5, None]


def test_the_text_between_two_turns_is_what_the_template_writes_there() -> None:
    tools = tools_of({"tools": [f"{SUPPORT}.add"], "max_tool_calling_iterations": 1}, is_trusted=True)
    assert tools is not None
    tokenizer = tool_tokenizer()
    turns = Turns(tools, "m", tokenizer)
    results = [{"role": "tool", "name": "add", "content": content} for content in ("3", "4")]
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}]  # fmt: skip
    whole = tokenizer.apply_chat_template([*asked, *results], tokenize=False, add_generation_prompt=True)
    between = tokenizer.decode(turns.render(results))
    assert whole.endswith(f"</tool_call>{END}{between}")
    assert between.startswith("\n")


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ({"tools": [3]}, "`tools` is [3]: name functions or classes by their paths"),
        ({"environment_factory": {"a": 3}}, "`environment_factory` is {'a': 3}: name functions or classes by"),
        ({"environment_factory": 3}, "`environment_factory` is 3: name functions or classes by their paths"),
        ({"max_tool_calling_iterations": "2"}, "`max_tool_calling_iterations` is '2': set it to at least 1"),
        ({"tool_limits": {"seconds": -1}}, "seconds"),
    ],
)
def test_wrong_keys_of_tools_are_named(recipe: dict[str, Any], says: str) -> None:
    valid = {"tools": [f"{SUPPORT}.add"], "max_tool_calling_iterations": 1}
    tools = tools_of(valid, is_trusted=True)
    assert tools is not None
    assert tools.iterations == 1
    assert tools.identity["code"].keys() == {"add"}
    with pytest.raises(UserError) as caught:
        tools_of({**valid, **recipe}, is_trusted=True)
    assert says in str(caught.value)


def test_rows_that_name_no_environment_are_refused(evaluated: Any, capsys: Any) -> None:
    assert evaluated(environment_factory={"a": f"{HERE}.Counter"})[1] == 2
    assert "the dataset has no column 'environment' that names the environment" in capsys.readouterr().err
