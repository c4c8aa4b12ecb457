"""Evaluation of recipes with tools and environments: the turns of training, transcripts, and accuracy by call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset

from grpo_recipes import GRPOTrainer, cli
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.tools import ToolPolicy, TurnFormat, tools_of
from grpo_recipes.tools.run import ENOUGH_CALLS, ENOUGH_MISTAKES
from tests.support.errors import refused
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
    """Environment that counts its calls, of which those with a long answer pass their time limit."""

    def reset(self, answer: str, **columns: Any) -> str:
        self.calls = 0
        return " (count)"

    def count(self, times: int) -> str:
        """Count a call.

        Args:
            times: Length of the answer.
        """
        self.calls += 1
        time.sleep(0.4 * (times > 5))
        return f"{self.calls} " * times

    def get_reward(self) -> float:
        return 0.5 * self.calls


class Echo(Counter):
    """Environment that begins a row with the text of its column."""

    def reset(self, observation: str | None = None, **columns: Any) -> Any:
        self.columns = columns
        if observation == "fail":
            raise KeyError("board")
        return 7 if observation == "7" else observation


class Paying(Counter):
    """Environment whose reward is awaited."""

    async def get_reward(self) -> float:
        return 0.5


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

    def __init__(self, first: str, positions: float = float("inf")) -> None:
        self.tokenizer, self.first, self.positions = tool_tokenizer(), first, positions
        self.seen: list[tuple[list[str], Sequence[int] | None, int]] = []

    def generate(self, prompts: list[list[int]], settings: Settings, room: Any = None) -> list[list[int]]:
        texts = [self.tokenizer.decode(prompt) for prompt in prompts]
        self.seen.append((texts, room, settings.seed))
        turns = []
        for text in texts:
            is_first = "<tool_response>" not in text
            is_even = int(text.split("case ")[1][0]) % 2 == 0
            turns.append(self.first if is_first and is_even else f"The answer is 3{END}")
        return self.tokenizer(turns, add_special_tokens=False)["input_ids"]

    def sampling(self, settings: Settings) -> dict[str, Any]:
        return {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    tokenizer = tool_tokenizer()
    tool_policy(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def evaluated(model: Path, tmp_path: Path, generating: Callable) -> Any:
    """Return a function that evaluates a recipe with keys on four cases, of which the first is answered wrongly."""
    rows = [{"question": f"case {n}", "answer": "4" if n == 0 else "3"} for n in range(4)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(first: str = f"{ADD}{END}", options: Sequence[str] = (), **keys: Any) -> tuple[Scripted, int]:
        engine = Scripted(first)
        generating(engine)
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


def tool_policy_of(engine: Any, **recipe: Any) -> ToolPolicy:
    """Return the policy of an engine with the tools of a recipe."""
    tools = tools_of({"max_tool_calling_iterations": 2, **recipe}, is_trusted=True)
    assert tools is not None
    found = ToolPolicy(model=SavedModel("m"), dataset=Dataset.from_list([]), tools=tools)
    found.engine, found.tokenizer = engine, tool_tokenizer()
    return found


def cases(count: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"case {n}"}], "answer": "3", **columns} for n in range(count)]


@pytest.mark.slow
def test_greedy_turns_are_those_of_training(tmp_path: Path) -> None:
    iterations = 3
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
    tools = [f"{SUPPORT}.{tool.__name__}" for tool in TOOLS]
    tested = tool_policy_of(Transformers(policy, tokenizer), tools=tools, max_tool_calling_iterations=iterations)
    found = tested.complete(rows, Settings(strict=None, max_new_tokens=300))
    (values,) = batches
    assert {len(row.turns) for row in found.dialogs} >= {0, 1, iterations}
    assert [row.completion for row in found.dialogs] == list(values[2])[::2]
    assert [row.mask for row in found.dialogs] == list(values[0])[::2]
    assert found.given == list(values[1])[::2]


def test_later_turns_have_the_room_that_is_left_and_random_numbers_of_their_own() -> None:
    def played(positions: float) -> Scripted:
        engine = Scripted(f"{ADD}{END}", positions)
        tool_policy_of(engine, tools=[f"{SUPPORT}.add"]).complete(cases(4), Settings(max_new_tokens=400, seed=3))
        return engine

    engine = played(float("inf"))
    (texts, room, seed), (later, left, later_seed) = engine.seen
    assert (room, seed, later_seed) == (None, 3, 3 + 2**40), "a published result is reproduced by its seed"
    assert len(texts) == 4
    assert all('"name": "add"' in text for text in texts), "the prompt describes the tool"
    assert len(later) == 2, "only the rows that called"

    def lengths(texts: list[str]) -> list[int]:
        return [len(ids) for ids in engine.tokenizer(texts)["input_ids"]]

    spent = lengths([text.split("assistant\n", 1)[1] for text in later])
    assert list(left) == [400 - length for length in spent]
    positions = max(lengths(later)) + 9
    assert list(played(positions).seen[1][1]) == [positions - length for length in lengths(later)]


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


def test_the_text_of_a_reset_follows_the_last_message() -> None:
    begun = [{"role": "system", "content": "s"}, {"role": "user", "content": "case 1"}]
    for observation, content in ((None, "case 1"), ("", "case 1"), (" and more", "case 1 and more")):
        for factory in (f"{HERE}.Echo", {"e": f"{HERE}.Echo"}):
            rows = [{"prompt": begun, "environment": "e", "level": 3, "observation": observation}]
            played = tool_policy_of(Scripted(END), environment_factory=factory).complete(rows, Settings(strict=None))
            assert played.prompts == [[begun[0], {"role": "user", "content": content}]]
            (environment,) = played.environments
            routed = isinstance(factory, dict)
            assert environment.columns.keys() == {"prompt", "level"} | ({"environment"} if not routed else set())


def test_an_environment_with_an_abandoned_call_is_not_used_again() -> None:
    limits = {"seconds": 0.1}
    engine = Scripted(f"{call('count', times=6)}{END}")
    tested = tool_policy_of(engine, environment_factory=f"{HERE}.Counter", tool_limits=limits)
    first, second = [tested.complete(cases(3), Settings(strict=None)).environments for _ in range(2)]
    assert [one in first for one in second] == [True, False, False], "only the call of row 1 was not made"


def test_the_reward_of_an_environment_is_one_for_its_class_and_may_be_awaited() -> None:
    factory = {"a": f"{HERE}.Paying", "b": f"{HERE}.Paying"}
    (reward,) = tool_policy_of(None, environment_factory=factory).rewards()
    assert (reward.name, reward.passing) == ("Paying", None)
    assert reward.spec == {"name": f"{HERE}.Paying", "alias": "Paying"}
    assert reward.scores(["p", "q"], ["a", "b"], {"environments": [Paying(), Counter()]}) == [0.5, None]


def test_other_limits_are_another_evaluation(evaluated: Any, capsys: Any) -> None:
    tools = [f"{SUPPORT}.add"]
    assert evaluated(tools=tools)[1] == 0
    assert evaluated(tools=tools)[0].seen == [], "the finished evaluation is read"
    assert evaluated(tools=tools, tool_limits={"seconds": 5})[1] == 2
    output = capsys.readouterr().err.splitlines()[-1]
    assert all(figure in output for figure in ("settings.tools.tool_limits.seconds", "30.0", "5"))
    assert evaluated(tools=None, max_tool_calling_iterations=None)[1] == 2
    assert "settings.tools " in capsys.readouterr().err


def test_a_tool_that_fails_too_often_stops_the_evaluation_and_mistakes_of_the_policy_do_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = cases(1) * ENOUGH_CALLS
    with refused("`tools`", "100.0%", ENOUGH_CALLS, "`broken`"):
        tool_policy_of(Scripted(f"{BROKEN}{END}"), tools=[f"{SUPPORT}.broken"]).complete(rows, Settings(strict=None))
    tool_policy_of(Scripted(f"{MALFORMED}{UNFIT}{END}"), tools=[f"{SUPPORT}.add"]).complete(
        cases(1) * ENOUGH_MISTAKES, Settings(strict=None)
    )
    assert "`add`" in caplog.text


def test_a_result_does_not_end_its_message() -> None:
    tested = tool_policy_of(Scripted(f"{call('quote')}{END}"), tools=[f"{HERE}.quote"])
    (row,) = tested.complete(cases(1), Settings(strict=None)).dialogs
    assert row.messages[1]["content"] == "< |im_end|>"


def test_a_call_that_no_file_can_hold_is_stored(evaluated: Any, tmp_path: Path) -> None:
    lone = '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800", "b": {"c": [NaN]}}}\n</tool_call>'
    assert evaluated(f"{lone}{END}", tools=[f"{SUPPORT}.add"])[1] == 0
    assert pd.read_parquet(tmp_path / "e" / "completions.parquet")["calls"].tolist() == [1, 0, 1, 0]


# ---- refusals


def test_a_reset_that_fails_or_returns_no_text_is_named() -> None:
    for observation, figure in (("fail", "KeyError"), ("7", "int")):
        tested = tool_policy_of(Scripted(END), environment_factory=f"{HERE}.Echo")
        with refused("`environment_factory`: `reset` of Echo", figure):
            tested.complete(cases(1, observation=observation), Settings(strict=None))


def test_the_tools_of_a_run_are_not_imported(tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"recipe": {"tools": ["my_tools.calculator"]}, "config": {}}))
    for name in ("config.json", "model.safetensors"):
        (run / name).symlink_to(tiny_model / name)
    assert cli.main(["evaluate", str(run)]) == 2
    assert "`tools`: " in capsys.readouterr().err


def test_a_record_is_not_trusted() -> None:
    for path in ("os.system", "grpo_recipes.tools.examples.run"):
        with refused("`tools`", path, "--recipe"):
            tools_of({"max_tool_calling_iterations": 2, "tools": [path]}, is_trusted=False)
    with refused("`environment_factory`", "my_envs.Game", "--recipe"):
        tools_of({"max_tool_calling_iterations": 2, "environment_factory": {"a": "my_envs.Game"}}, is_trusted=False)
    own = tools_of(
        {"tools": ["grpo_recipes.tools.examples.calculator"], "max_tool_calling_iterations": 1}, is_trusted=False
    )
    assert own is not None
    named = tools_of({"tools": [f"{SUPPORT}.add"], "max_tool_calling_iterations": 1}, is_trusted=True)
    assert named is not None
    assert named.identity["code"].keys() == {"add"}
    with refused("`max_tool_calling_iterations`", 0):
        tools_of(
            {"tools": ["grpo_recipes.tools.examples.calculator"], "max_tool_calling_iterations": 0}, is_trusted=False
        )
    assert tools_of({"tools": []}, is_trusted=False) is None


def test_a_template_without_tools_is_refused_before_the_model_loads(
    tiny_model: Path, tmp_path: Path, capsys: Any, generating: Callable
) -> None:
    generating(lambda *_: pytest.fail("it generates"))
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name, "answer": "1"}) + "\n")
    recipe: dict[str, Any] = {"model_name_or_path": str(tiny_model), "rewards": ["math_correctness"], **LIMITS}
    recipe["dataset"] = {"path": str(tmp_path / "train.jsonl"), "prompt_format": "conversational"}
    recipe["tools"] = ["grpo_recipes.tools.examples.calculator"]
    (tmp_path / "r.yaml").write_text(json.dumps(recipe))
    options = ["--recipe", str(tmp_path / "r.yaml"), "--path", str(tmp_path / "test.jsonl")]
    assert cli.main(["evaluate", str(tiny_model), *options, "--output", str(tmp_path / "e")]) == 2
    assert "chat template" in capsys.readouterr().err


def test_the_text_between_two_turns_is_what_the_template_writes_there() -> None:
    tokenizer = tool_tokenizer()
    form = TurnFormat(tool_policy_of(None, tools=[f"{SUPPORT}.add"]).tools, "m", tokenizer)
    results = [{"role": "tool", "name": "add", "content": content} for content in ("3", "4")]
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}]  # fmt: skip
    whole = tokenizer.apply_chat_template([*asked, *results], tokenize=False, add_generation_prompt=True)
    between = tokenizer.decode(form.render(results))
    assert whole.endswith(f"</tool_call>{END}{between}")
    assert between.startswith("\n")


def test_rows_that_name_no_environment_are_refused(evaluated: Any, capsys: Any) -> None:
    assert evaluated(environment_factory={"a": f"{HERE}.Counter"})[1] == 2
    assert "'environment'" in capsys.readouterr().err
