"""Arguments that the trainer's overrides pass to TRL, and their use of its results, on stand-ins for TRL's methods."""

from __future__ import annotations

import inspect
from collections import defaultdict, deque
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.training import trainer as trainer_module


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a trainer of attributes, above methods of TRL that return what they are given."""

    def make(*methods: str, training: bool = True, **attributes: Any) -> Any:
        for name in methods:
            monkeypatch.setattr(
                TRLGRPOTrainer, name, lambda self, *given, _name=name, **named: (_name, given, *named.items())
            )
        trainer: Any = object.__new__(GRPOTrainer)
        vars(trainer).update(
            {
                "model": nn.Linear(1, 1).train(training),
                "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
                "_resets": ExitStack(),
                "tools": [],
                "_finite": SimpleNamespace(check_steps=lambda: None, check_rewards=lambda: None),
            }
        )
        vars(trainer).update(attributes)
        return trainer

    return make


def test_a_script_that_leaves_an_option_out_gets_the_documented_one() -> None:
    parameters = inspect.signature(GRPOTrainer.__init__).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert defaults == {
        "reference": None, "kl_estimator": "sampled", "micro_batching": "auto", "generation": "auto", "sampling": None,
        "advantages": None, "generation_check": True, "tool_limits": None, "optimizer_cls_and_kwargs": None,
    }  # fmt: skip


# ---- prompts and advantages


@pytest.mark.parametrize(("training", "drawn"), [(True, True), (False, False)])
def test_prompts_are_drawn_for_a_training_and_not_for_an_evaluation(made: Any, training: bool, drawn: bool) -> None:
    def generate(rows: list[int], of_all: Any) -> Any:
        return "drawn", of_all(rows[:1])

    trainer = made("_generate_and_score_completions", training=training, _advantage_rule=None, _prompts=None)
    every = ("_generate_and_score_completions", ([1, 2],))
    assert trainer._generate_and_score_completions([1, 2]) == every
    trainer._prompts = SimpleNamespace(generate=generate)
    first = ("drawn", ("_generate_and_score_completions", ([1],)))
    assert trainer._generate_and_score_completions([1, 2]) == (first if drawn else every)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (True, [1.0, -1.0, -1 / 3, 1 / 3]),  # groups of two: rewards 2 and 0, 1 and 2
        (False, [0.6, -1.0, -0.2, 0.6]),  # one group of four, with a mean of 1.25
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("room", "kept"), [(None, [9.0, 9.0]), (10, [9.0, 9.0]), (9, [9.0]), (3, [])])
def test_the_advantages_of_the_rule_replace_trls_in_the_batch_and_in_the_log(
    training: bool, expected: list[float], rank: int, room: int | None, kept: list[float], made: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Two ranks have four completions each, the second with half of the first one's rewards."""
    rewards = torch.tensor([[2.0], [0.0], [1.0], [2.0]])
    trainer = made(
        training=training, _advantage_rule="max_rl", num_generations=2, num_generations_eval=4,
        reward_weights=torch.ones(1), accelerator=SimpleNamespace(process_index=rank),
        _gathered_rewards=torch.cat([rewards, rewards.flip(0)]), _logs={"advantages": deque([9.0] * 2, maxlen=room)},
    )  # fmt: skip
    trainer._logs["advantages"].extend([0.0] * 8)  # TRL's own
    monkeypatch.setattr(TRLGRPOTrainer, "_generate_and_score_completions", lambda self, inputs: {"advantages": "TRL's"})
    found = trainer._generate_with_advantages(["row"] * 4)["advantages"]
    every = [*expected, *reversed(expected)]
    assert found.tolist() == pytest.approx(every[4 * rank : 4 * rank + 4])
    logged = list(trainer._logs["advantages"])
    assert logged == pytest.approx([*kept, *every][-(room or 10) :])


def test_the_rewards_are_kept_for_the_rule(made: Any) -> None:
    trainer = made("_calculate_rewards", reward_funcs=[])
    given = ("_calculate_rewards", (1, 2), ("more", 3))
    assert trainer._calculate_rewards(1, 2, more=3) == given
    assert trainer._gathered_rewards == given


# ---- the loss


@pytest.mark.parametrize("training", [True, False])
def test_a_micro_batch_of_the_training_is_counted_once_with_its_log_probabilities(made: Any, training: bool) -> None:
    counted: list[Any] = []
    trainer = made(training=training, _passes=SimpleNamespace(add=lambda *given: counted.append(given)))

    def loss(*given: Any) -> Any:
        trainer._loss_log_probs = "log-probabilities"
        return given

    trainer._loss = loss
    assert trainer.compute_loss("model", "inputs", True, 7) == ("model", "inputs", True, 7)
    assert counted == [("inputs", "log-probabilities")] * training
    assert trainer._loss_log_probs is None, "they would stay in memory until the next loss"


# ---- the full KL


def test_the_reference_computes_hidden_states_and_as_few_logits_as_it_can(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of all tokens, and a cache, would be memory for nothing. No gradient flows to the reference."""
    seen: list[dict[str, Any]] = []

    def scored(**inputs: Any) -> None:
        assert not torch.is_grad_enabled()
        seen.append(inputs)
        states.append(torch.arange(10.0).view(2, 5, 1))

    states: list[torch.Tensor] = []
    head = SimpleNamespace(weight="weight", bias="bias")
    monkeypatch.setattr(trainer_module, "reference_in", lambda trainer: nullcontext(scored))
    monkeypatch.setattr(
        trainer_module, "base_model", lambda model: SimpleNamespace(get_output_embeddings=lambda: head, of=model)
    )
    monkeypatch.setattr(trainer_module, "last_hidden_states", lambda model: nullcontext(states))
    trainer = made(
        _log_probs=SimpleNamespace(bare=lambda model: model), accelerator=SimpleNamespace(autocast=nullcontext)
    )
    batch = {
        "prompt_ids": torch.tensor([[0, 5], [6, 7]]), "completion_ids": torch.tensor([[1, 2, 3], [4, 0, 0]]),
        "prompt_mask": torch.tensor([[0, 1], [1, 1]]), "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    }  # fmt: skip
    found = trainer._reference_projection(batch)
    (inputs,) = seen
    assert inputs.pop("input_ids").tolist() == [[0, 5, 1, 2, 3], [6, 7, 4, 0, 0]]
    assert inputs.pop("attention_mask").tolist() == [[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert inputs == {"logits_to_keep": 1, "use_cache": False}
    assert found.hidden.flatten(1).tolist() == [[1, 2, 3], [6, 7, 8]], "each predicts a token of the completion"
    assert (found.weight, found.bias) == ("weight", "bias")


# ---- generation


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("difference", [None, (0.0, 0.5)])
def test_one_turn_is_recorded_and_its_difference_is_logged(made: Any, training: bool, difference: Any) -> None:
    recorded: list[Any] = []
    check = SimpleNamespace(record=lambda *given: recorded.append(given))
    trainer = made("_generate_single_turn", training=training, _turn_check=check)
    trainer._generation = lambda turn, prompts: (*turn()[1][:2], difference)
    assert trainer._generate_single_turn([[1]], "images", {}, 4) == ([[1]], "images")
    assert recorded == [([[1]], [[1]], "images")]
    name, other = ("train", "eval") if training else ("eval", "train")
    prefix = "sampling/sampling_logp_difference"
    assert trainer._metrics[name] == ({f"{prefix}/mean": [0.0], f"{prefix}/max": [0.5]} if difference else {})
    assert trainer._metrics[other] == {}


@pytest.mark.parametrize("stops", [True, False])
def test_a_batch_is_checked_with_its_own_rows_before_its_mask_changes(
    made: Any, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[Any] = []

    class Check:
        def start(self, prompts: Any) -> None:
            did.append(("start", prompts))

        def __call__(self, output: Any, rows: Any) -> None:
            did.append(("check", output[0], rows))

    def correct(*given: Any) -> str:
        did.append("correct")
        assert given == (trainer, ("_generate", (["p"],)), trainer._stop, "masks")
        return "corrected"

    monkeypatch.setattr(trainer_module, "correct_counts", correct)
    trainer = made(
        "_generate", _turn_check=Check(), _tool_turns=SimpleNamespace(rows=["of the batch before"]),
        _log_probs=SimpleNamespace(restore_attention=lambda given: did.append(given)), _masks_truncated="masks",
        _generation=SimpleNamespace(one_batch=nullcontext), _stop="stop" if stops else None,
    )  # fmt: skip
    output = trainer._generate(["p"])
    assert output == ("corrected" if stops else ("_generate", (["p"],)))
    assert did == [("start", ["p"]), trainer.model, ("check", "_generate", []), *["correct"] * stops]


def test_the_turns_after_a_tool_call_are_ours_unless_prompts_hold_images(made: Any) -> None:
    class Turns:
        def are_trls(self, fields: dict[str, Any]) -> bool:
            return bool(fields)

        def __call__(self, *given: Any) -> Any:
            return "ours", given

    trainer = made("_tool_call_loop", _tool_turns=Turns())
    inputs = ("prompts", "prompt ids", "completion ids", "completions", "log-probabilities", "images")
    assert trainer._tool_call_loop(*inputs, {}) == ("ours", inputs[1:5])
    assert trainer._tool_call_loop(*inputs, {"x": 1}) == ("_tool_call_loop", (*inputs, {"x": 1}))


# ---- public methods


def test_a_training_restores_the_attention_also_after_a_failure(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[Any] = []
    trainer = made(
        "train", _log_probs=SimpleNamespace(restore_attention=restored.append),
        checkpoints=SimpleNamespace(resumption=lambda asked: f"resumed from {asked}"),
    )  # fmt: skip
    assert trainer.train("there", 1, more=2) == ("train", ("resumed from there", 1), ("more", 2))
    assert restored == [trainer.model]

    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(TRLGRPOTrainer, "train", fail)
    with pytest.raises(RuntimeError):
        trainer.train()
    assert restored == [trainer.model] * 2


def test_the_adapter_of_the_model_that_is_loaded_keeps_its_dtype(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    loaded: list[Any] = []

    @contextmanager
    def keep(model: Any) -> Any:
        kept.append(model)
        yield
        assert len(loaded) == len(kept), "loaded inside the block"

    monkeypatch.setattr(trainer_module, "adapter_dtype_kept", keep)
    monkeypatch.setattr(TRLGRPOTrainer, "_load_from_checkpoint", lambda self, *given: loaded.append(given))
    trainer = made()
    trainer._load_from_checkpoint("there")
    trainer._load_from_checkpoint("there", other := nn.Sequential())
    assert (kept[0], kept[1]) == (trainer.model, other)
    assert loaded == [("there", None), ("there", other)]


def test_an_evaluation_has_a_table_of_its_own(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    separated: list[Any] = []
    monkeypatch.setattr(
        trainer_module, "separate_eval_completions", lambda *given: separated.append(given) or nullcontext()
    )
    trainer = made("evaluate")
    assert trainer.evaluate("rows", ["ignored"], "test") == ("evaluate", ("rows", ["ignored"], "test"))
    assert separated == [(trainer, "rows", "test")]


@pytest.mark.parametrize("training", [True, False])
def test_an_entry_has_the_metrics_of_the_passes_and_the_rates_of_this_launch(
    made: Any, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_module, "storable_logs", lambda trainer: nullcontext())
    shown: list[Any] = []
    monkeypatch.setattr(
        TRLGRPOTrainer, "log", lambda self, logs, started: shown.append((dict(logs), started, self.log_completions))
    )
    trainer = made(
        training=training, _efficiency=None, _passes=SimpleNamespace(metrics=lambda: {"pass/x": 2.0}),
        checkpoints=SimpleNamespace(correct_rates=lambda logs: logs.update(rate=1.0)), log_completions=True,
        _logs={"prompt": deque()},
    )  # fmt: skip
    trainer.log({"loss": 0.5, "rate": 4.0}, 7.0)
    trainer._logs["prompt"].append("p")
    trainer.log({"loss": 0.5}, 8.0)
    assert shown == [({"loss": 0.5, "rate": 1.0}, 7.0, False), ({"loss": 0.5, "rate": 1.0}, 8.0, True)]
    assert trainer.log_completions
    assert trainer._metrics["train"] == ({"pass/x": [2.0, 2.0]} if training else {})
