"""Generation of one turn: in groups or not, with what recorded and verified, and with which consequences."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from grpo_recipes.generation.groups import Turn
from grpo_recipes.training import generation
from grpo_recipes.training.generation import Generation

PROMPTS = [[1, 2]] * 6
COMPLETIONS = [[3]] * 6


class Check:
    """Stand-in for the generator check, with the differences that `verify` finds in turn."""

    def __init__(self) -> None:
        self.every, self.found, self.events, self.comparison = 3, [], [], None

    def record_every(self, rows: int) -> int:
        return self.every

    def verify(self, prompts: Any, completions: Any, recorded: Any, where: str = "the first batch") -> str:
        assert (prompts, completions) == (PROMPTS, COMPLETIONS)
        self.events.append((where, sorted(recorded)))
        return self.found.pop(0) if self.found else ""

    def processor_comparison(self, rows: int) -> Any:
        return self.comparison

    def __call__(self, prompts: Any, completions: Any, recorded: Any, reason: str = "") -> Any:
        assert (prompts, completions) == (PROMPTS, COMPLETIONS)
        self.events.append(("compared", None if recorded is None else sorted(recorded), reason))
        return 1.0, 2.0

    def compare_processors(self, completions: Any, comparison: Any) -> None:
        assert completions == COMPLETIONS
        self.events.append(("processors", comparison))

    def of_vllm(self, *given: Any) -> Any:
        self.events.append(("vllm", given))
        return 3.0, 4.0


class Loop:
    """Stand-in for TRL's turn, which records the requests and fills in their results."""

    def __init__(self, **results: Any) -> None:
        self.requests: list[Turn] = []
        self.results = results

    def run(self, request: Turn) -> Any:
        self.requests.append(request)
        for name, value in self.results.items():
            setattr(request, name, value)
        rows = request.recorded_rows(len(PROMPTS))
        request.log_probs = torch.zeros(len(rows), 1) if rows else None  # type: ignore[assignment]
        return COMPLETIONS


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a generation on stand-ins: itself, its check, its loop and its sentences."""
    monkeypatch.setattr(generation, "unfit", lambda policy: "")
    monkeypatch.setattr(generation, "has_dropout", lambda base: False)
    monkeypatch.setattr(generation, "base_model", lambda policy: policy)
    monkeypatch.setattr(generation, "unfit_layout", lambda trainer: "")
    monkeypatch.setattr(generation, "send_settings", lambda trainer, published: trainer.events.append("settings"))
    monkeypatch.setattr(generation, "refuse_cast", lambda model, args: model.events.append("cast"))

    def make(mode: Any = "auto", device: str = "cpu", **changes: Any) -> tuple[Generation, Check, Loop, list[str]]:
        loop = Loop(**changes.pop("results", {}))
        monkeypatch.setattr(Generation, "_run", lambda self, turn, policy, request: loop.run(request))
        accelerator = SimpleNamespace(
            device=torch.device(device), unwrap_model=lambda policy: policy, gather=lambda tensor: tensor.cpu()
        )
        policy = nn.Linear(1, 1)
        policy.events = []  # type: ignore[assignment]
        values: dict[str, Any] = {
            **{"accelerator": accelerator, "model": policy, "use_vllm": False, "tools": None, "rollout_func": None},
            **{
                "use_transformers_continuous_batching": False,
                "temperature": 0.7,
                "events": [],
                "generation_config": "own",
            },
            **{"_dist": SimpleNamespace(is_zero3=False), "args": SimpleNamespace(ds3_gather_for_generation=True)},
        }
        check = Check()
        found = Generation(SimpleNamespace(**{**values, **changes}), check, None, mode)  # type: ignore[arg-type]
        accelerator.device = torch.device("cpu")  # where the stand-ins' tensors are
        said: list[str] = []
        found._announcer._warn = said.append
        return found, check, loop, said

    return make


def turn(found: Generation, *, drops: bool = False, comparison: Any = None) -> Any:
    policy: Any = found.trainer.model
    completions, recorded = found._generate(lambda: None, policy, PROMPTS, drops, comparison)
    assert completions == COMPLETIONS
    return None if recorded is None else sorted(recorded)


def test_all_rows_of_the_first_batch_of_groups_are_verified_and_then_few_recorded(made: Any) -> None:
    found, check, loop, said = made()
    assert turn(found) == [0, 1, 2, 3, 4, 5]
    assert found.is_verified
    assert check.events == [("the first batch", [0, 1, 2, 3, 4, 5])]
    assert turn(found) == [0, 3]
    assert len(check.events) == 1
    check.every = 0
    assert turn(found) is None
    first, second, third = loop.requests
    assert (first.grouped, first.record_every, first.temperature, first.together) == (True, 1, 0.7, False)
    assert (second.record_every, third.record_every) == (3, 0)
    assert (first.comparison, first.kept) == (None, None)
    assert type(first) is Turn
    turn(found, comparison="comparison")
    assert loop.requests[-1].comparison == "comparison"
    assert said == []


def test_a_first_batch_that_differs_is_generated_again_by_transformers_own_loop(made: Any) -> None:
    found, check, loop, said = made()
    check.found = ["by 3"]
    assert turn(found) == [0, 3]
    assert [request.grouped for request in loop.requests] == [True, False]
    reason = "group decoding picks tokens under other log-probabilities than the policy's (by 3)"
    assert found.stock_because == reason
    turn(found)
    assert said == [f"completions are generated by transformers' own loop: {reason}"]
    assert [request.grouped for request in loop.requests] == [True, False, False]
    assert len(check.events) == 1
    assert not found.is_verified


@pytest.mark.parametrize(
    ("changes", "declined", "reason"),
    [
        ({"_dist": SimpleNamespace(is_zero3=True), "args": SimpleNamespace(ds3_gather_for_generation=False)}, "",
         "ZeRO-3 shards the weights, with ds3_gather_for_generation: false"),
        ({}, "a beam", "a beam"),
        ({"mode": "off"}, "", None),
        ({"mode": "off"}, "a beam", None),
    ],
)  # fmt: skip
def test_transformers_own_loop_runs_for_a_reason_that_is_announced_once(
    changes: dict[str, Any], declined: str, reason: str | None, made: Any
) -> None:
    found, check, loop, said = made(**changes, results={"declined": declined})
    for _ in range(2):
        turn(found)
    assert check.events == [], "nothing is verified"
    assert said == ([] if reason is None else [f"completions are generated by transformers' own loop: {reason}"])
    assert [request.grouped for request in loop.requests] == [bool(declined) and not changes] * 2
    assert [request.record_every for request in loop.requests] == [1 if declined and not changes else 3] * 2


@pytest.mark.parametrize("source", ["unfit", "unfit_layout"])
def test_a_policy_that_does_not_fit_is_left_to_transformers_own_loop(
    source: str, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, source, lambda given: "a reason of its own")
    found, check, loop, said = made("auto", "cuda")
    turn(found)
    assert [request.grouped for request in loop.requests] == [False]
    assert check.events == []
    assert said == ["completions are generated by transformers' own loop: a reason of its own"]


@pytest.mark.parametrize("stops", [True, False])
def test_completions_are_cut_behind_their_stop_strings(stops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    @contextmanager
    def entering(*given: Any) -> Any:
        entered.append(given)
        yield

    monkeypatch.setattr(generation, "base_model", lambda policy: f"base of {policy}")
    monkeypatch.setattr(generation, "decoding", entering)
    monkeypatch.setattr(generation, "Ends", lambda stop: SimpleNamespace(stop=stop, cut=lambda rows: [rows[0][:1]]))
    found: Any = object.__new__(Generation)
    found.stop = "stop" if stops else None
    found.trainer = SimpleNamespace(generation_config="own")
    found.published = SimpleNamespace(aside=entering)
    assert found._run(lambda: ([[1, 2]], None), "policy", "request") == ([[1]] if stops else [[1, 2]])
    (aside, (base, given, ends)) = entered
    assert (aside, base, given) == (("policy", "own"), "base of policy", "request")
    assert [end.stop for end in ends] == ["stop"] * stops


def test_a_rank_runs_as_many_forwards_as_the_others_under_zero3(made: Any) -> None:
    found, _, loop, _ = made(_dist=SimpleNamespace(is_zero3=True))
    turn(found)
    assert loop.requests[0].together


def test_rows_sampled_with_dropout_are_not_recorded(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, check, loop, _ = made(mode="off")
    assert turn(found, drops=True) is None
    monkeypatch.setattr(generation, "has_dropout", lambda base: True)
    for training, reason in ((True, "they are sampled with dropout"), (False, generation.OTHER_LOOP)):
        check.events.clear()
        found.trainer.model.train(training)
        assert found(lambda: None, PROMPTS) == (COMPLETIONS, None, (1.0, 2.0))
        assert check.events == [("compared", None if training else [0, 3], reason), ("processors", None)]
    assert [request.record_every for request in loop.requests] == [0, 0, 3]


# ---- keys and values between turns


class Kept:
    def __init__(self, holds: bool = True) -> None:
        self.holds = holds

    def holds_start_of(self, prompts: Any) -> bool:
        return self.holds


def test_the_first_turn_that_reuses_keys_is_verified(made: Any) -> None:
    found, check, loop, said = made(results={"reused": True})
    found._kept = Kept(False)
    assert turn(found) == [0, 1, 2, 3, 4, 5]
    assert turn(found) == [0, 3], "nothing is kept yet"
    found._kept = kept = Kept()
    assert turn(found) == [0, 1, 2, 3, 4, 5]
    assert check.events[1:] == [("the first turn that uses them", [0, 1, 2, 3, 4, 5])]
    assert found.is_reuse_verified
    assert turn(found) == [0, 3]
    assert loop.requests[-1].kept is kept
    assert said == []


def test_a_turn_that_reuses_keys_and_differs_is_generated_again_without(made: Any) -> None:
    found, check, loop, said = made(results={"reused": True})
    turn(found)
    found._kept, check.found = Kept(), ["by 3"]
    assert turn(found) == [0, 3]
    assert (found.keeps_cache, found._kept, found.stock_because) == (False, None, "")
    assert [request.kept is None for request in loop.requests] == [True, False, True]
    assert said == [
        "keys and values are not kept between turns: tokens are picked under other log-probabilities than the policy's "
        "(by 3)"
    ]


def test_a_turn_that_could_reuse_keys_but_did_not_proves_nothing(made: Any) -> None:
    found, check, _, said = made(results={"not_kept": "the model has states"})
    turn(found)
    assert found.keeps_cache, "nothing was to be kept"
    found._kept = Kept()
    turn(found)
    assert not found.is_reuse_verified
    assert len(check.events) == 1
    assert said == ["keys and values are not kept between turns: the model has states"]
    off, _, loop, _ = made(mode="off")
    off._kept = Kept()
    turn(off)
    assert loop.requests[0].kept is None


class NoResponses(list[int]):
    """A `rollout_func` with a length, which is 0."""

    def __call__(self, prompts: Any) -> None: ...


@pytest.mark.parametrize(
    ("mode", "changes", "keeps"),
    [
        ("auto", {}, False),
        ("auto", {"tools": [print]}, True),
        ("auto", {"rollout_func": print}, True),
        ("auto", {"rollout_func": NoResponses()}, True),
        ("off", {"tools": [print]}, False),
    ],
)
def test_keys_are_kept_for_one_batch_of_several_turns(
    mode: str, changes: dict[str, Any], keeps: bool, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, *_ = made(mode, **changes, _tokenizer="tokenizer")
    with suppress(RuntimeError), found.one_batch():
        assert (found._kept is not None) is keeps
        raise RuntimeError
    assert found._kept is None, "training needs the memory"
    if keeps:
        found.keeps_cache = False
        with found.one_batch():
            assert found._kept is None
    calls: list[Any] = []
    monkeypatch.setattr(generation, "parse_response", lambda *given, prefix: calls.append((given, prefix)) or parsed)
    for parsed in ({"tool_calls": [1]}, {"tool_calls": []}, {}):
        assert found._may_go_on([1], [2]) is ("rollout_func" in changes or bool(parsed.get("tool_calls")))
    assert calls == ([] if "rollout_func" in changes else [(("tokenizer", [2]), [1])] * 3)


# ---- other generators


def test_an_engine_and_continuous_batching_generate_by_themselves(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, check, loop, _ = made(use_vllm=True)
    assert engine.trainer.events == ["settings"]
    assert engine(lambda: (COMPLETIONS, "log-probabilities"), PROMPTS) == (
        COMPLETIONS, "log-probabilities", (3.0, 4.0),
    )  # fmt: skip
    assert check.events == [("vllm", (PROMPTS, COMPLETIONS, "log-probabilities"))]
    entered: list[Any] = []

    @contextmanager
    def entering(*given: Any) -> Any:
        entered.append(given)
        yield

    monkeypatch.setattr(generation, "continuous_batching", entering)
    batching, check, loop, _ = made(
        use_transformers_continuous_batching=True, continuous_batching_config="config", max_completion_length=9
    )
    assert batching.trainer.model.events == ["cast"]
    monkeypatch.setattr(batching.published, "aside", entering)
    assert batching(lambda: (COMPLETIONS, "dropped"), PROMPTS) == (COMPLETIONS, None, (1.0, 2.0))
    policy = batching.trainer.model
    assert entered == [(policy, "own"), ("config", policy, PROMPTS, 9)]
    assert check.events == [("compared", None, "")]
    assert loop.requests == []
