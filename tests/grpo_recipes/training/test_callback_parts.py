"""Callbacks on stand-ins for the trainer: signals, merged completions, trackers, and what identifies a launch."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn

from grpo_recipes.runs.identity import Source
from grpo_recipes.training import callbacks
from grpo_recipes.training.callbacks import DropLaterCompletions, RecipeInTrackers, StopOnSignal, starting_weights
from tests.support.recorded import model


def control() -> Any:
    return SimpleNamespace(should_save=False, should_training_stop=False)


def state(step: int, most: int = 9, *, is_first: bool = True) -> Any:
    return SimpleNamespace(global_step=step, max_steps=most, is_world_process_zero=is_first)


# ---- signals


def test_the_name_of_the_signal_that_stopped_a_run() -> None:
    callback = StopOnSignal(lambda step: True)
    for number, name in ((signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")):
        callback.requested = number
        assert callback.name == name


def test_a_run_is_stopped_after_a_generation_batch_and_not_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[int] = []
    monkeypatch.setattr(callbacks, "largest_of_ranks", lambda ours, device: max([ours, *ranks]))
    callback = StopOnSignal(lambda step: step % 2 == 0)
    args: Any = SimpleNamespace(device="cpu")
    callback.on_step_end(args, state(2), quiet := control())
    assert (quiet.should_save, callback.stopped) == (False, False)
    ranks.append(signal.SIGTERM)  # another rank got it
    callback.on_step_end(args, state(3), quiet)
    assert (quiet.should_save, quiet.should_training_stop, callback.requested) == (False, False, signal.SIGTERM)
    callback.on_step_end(args, state(4), quiet)
    assert (quiet.should_save, quiet.should_training_stop, callback.stopped) == (True, True, True)
    callback.on_step_end(args, state(8, 8), last := control())
    assert (last.should_training_stop, callback.stopped) == (True, False)


def test_signals_are_handled_while_the_training_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    heeds = True
    monkeypatch.setattr(callbacks, "heeds_hangup", lambda: heeds)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    callback = StopOnSignal(lambda step: True)
    assert (callback.began, callback.requested, callback.stopped) == (False, 0, False)
    for heeds in (True, False):
        callback.on_train_begin(SimpleNamespace(), state(0))  # type: ignore[arg-type]
        handled = [signal.getsignal(number) == callback._request for number in numbers]
        assert handled == [True, True, heeds]
        callback.on_train_end(SimpleNamespace(), state(0))  # type: ignore[arg-type]
        callback.restore_handlers()
        assert [signal.getsignal(number) for number in numbers] == before
    assert callback.began
    try:
        signal.signal(signal.SIGTERM, later := lambda *_: None)
        callback.restore_handlers()
        assert signal.getsignal(signal.SIGTERM) is later, "a second call does nothing"
    finally:
        signal.signal(signal.SIGTERM, before[0])


def test_outputs_that_nobody_reads_are_dropped_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that ends closes the outputs, and writing the next line of the log would end the run."""
    dropped: list[int] = []
    monkeypatch.setattr(callbacks, "drop_closed_outputs", lambda: dropped.append(len(dropped)))
    monkeypatch.setattr(callbacks, "largest_of_ranks", lambda ours, device: ours)
    callback = StopOnSignal(lambda step: True)
    args: Any = SimpleNamespace(device="cpu")
    for step in (1, 2):
        callback.on_step_end(args, state(step), control())
    assert dropped == [0, 1]


@pytest.mark.parametrize(
    ("rank", "launched", "after", "raises"),
    [("0", False, 1.0, True), ("0", True, 1.9, False), ("0", True, 2.0, True), ("1", True, 1.9, False)],
)
def test_a_second_ctrl_c_stops_at_once_unless_it_is_the_launchers_copy(
    rank: str, launched: bool, after: float, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, said = 100.0, []
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now)
    monkeypatch.setattr(callbacks.os, "write", lambda stream, text: said.append((stream, text)))
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    callback = StopOnSignal(lambda step: True)
    callback._request(signal.SIGINT, None)
    assert callback.requested == signal.SIGINT
    text = b"\nCtrl-C: the run is saved and stops after this step; a second Ctrl-C stops it at once\n"
    assert said == ([(2, text)] if rank == "0" else [])
    now += after
    if raises:
        with pytest.raises(KeyboardInterrupt):
            callback._request(signal.SIGINT, None)
    else:
        callback._request(signal.SIGINT, None)
    assert len(said) == (rank == "0")


def test_the_first_signal_names_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[bool] = []
    said: list[Any] = []
    monkeypatch.setattr(callbacks, "drop_closed_outputs", lambda: dropped.append(True))
    monkeypatch.setattr(callbacks.os, "write", lambda *given: said.append(given))
    callback = StopOnSignal(lambda step: True)
    callback._request(signal.SIGTERM, None)
    assert dropped == []
    callback._request(signal.SIGINT, None)
    callback._request(signal.SIGHUP, None)
    assert (callback.requested, said, dropped) == (signal.SIGTERM, [], [True])


# ---- completions


@pytest.mark.parametrize("logs", [True, False])
def test_completions_after_the_first_step_are_removed(
    logs: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A training that starts from step 0 in a used folder may do so by mistake: this is a warning."""
    events: list[Any] = []
    monkeypatch.setattr(callbacks.completions, "drop_after", lambda folder, step: events.append((folder, step)) or 3)
    checkpoints = SimpleNamespace(check_folder=lambda: events.append("checked"))
    args: Any = SimpleNamespace(output_dir=str(tmp_path))
    callback = DropLaterCompletions(SimpleNamespace(args=args, checkpoints=checkpoints, log_completions=logs))
    with caplog.at_level(logging.INFO):
        for step in (5, 0):
            callback.on_train_begin(args, state(step))
    folder = tmp_path / "completions"
    assert events == (["checked", (folder, 5), "checked", (folder, 0)] if logs else ["checked"] * 2)
    removed = [record for record in caplog.records if "are removed" in record.getMessage()]
    assert [record.levelno for record in removed] == [logging.INFO, logging.WARNING] * logs


# ---- trackers


class Config(dict[str, Any]):
    def update(self, values: Any, allow_val_change: bool = False) -> None:  # type: ignore[override]
        assert allow_val_change
        super().update(values)


def test_trackers_that_have_a_place_for_it_get_the_recipe() -> None:
    def tracker(name: str, **attributes: Any) -> Any:
        made = type(name, (), {})()
        vars(made).update(attributes)
        return made

    configs = [Config(), Config()]
    wandb = tracker("WandbCallback", _wandb=SimpleNamespace(run="x", config=configs[0]))
    trackio = tracker("TrackioCallback", _trackio=SimpleNamespace(config=configs[1]))
    idle = [tracker("WandbCallback", _wandb=None),
            tracker("WandbCallback", _wandb=SimpleNamespace(run=None)), tracker("Other")]  # fmt: skip
    recipe = {"model": "é", "a": {"c": 1, "b": 2}}
    handler: Any = SimpleNamespace(callbacks=[*idle, wandb, trackio])
    callback = RecipeInTrackers(recipe, handler)
    callback.on_train_begin(SimpleNamespace(), state(0, is_first=False))  # type: ignore[arg-type]
    assert configs == [{}, {}]
    callback.on_train_begin(SimpleNamespace(), state(0))  # type: ignore[arg-type]
    assert configs == [{"recipe": recipe}] * 2


# ---- identity


def test_the_sources_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "loaded_source", lambda loaded: Source(f"of {type(loaded).__name__}"))
    full = model()
    adapted = get_peft_model(model(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    own = Source(f"of {type(full).__name__}")
    (tmp_path / "adapter_config.json").write_text("{}")
    folder = str(tmp_path)
    assert starting_weights("a/b", full, None) == starting_weights(full, full, "initial") == {"policy": own}
    assert starting_weights(adapted, adapted, None) == {"policy": Source(""), "base": own}
    assert starting_weights(folder, adapted, None) == {"policy": Source(folder), "base": own}
    assert starting_weights("a/b", adapted, {"adapter": "c/d"}) == {"policy": own, "reference": Source("c/d")}


def test_what_identifies_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(callbacks, "identify", lambda *given: seen.append(given) or "identity")

    def judges(rewards: Any, commit: Any) -> dict[str, Source]:
        assert ([one.function for one in rewards], commit) == ([reward], callbacks.hub_commit)
        return {"judge": Source("m")}

    monkeypatch.setattr(callbacks, "reward_models", judges)

    def reward() -> None: ...

    def tool() -> None: ...

    class Game: ...

    trainer: Any = SimpleNamespace(reward_funcs=[reward], reward_func_names=["mine"], train_dataset="rows")
    assert callbacks.identity_of(trainer, {"policy": Source("p")}) == "identity"
    rows, (built,), sources, tools = seen[0]
    assert (rows, built.function, built.name, tools) == ("rows", reward, "mine", {})
    assert sources == {"policy": Source("p"), "judge": Source("m")}
    trainer._standalone_tools, trainer.environment_factories = [tool], {"chess": nn.Linear, "": Game}
    callbacks.identity_of(trainer, {})
    names = seen[1][3]
    assert (names["tool"], names["chess"]) == (tool, nn.Linear)
    assert Game in names.values()
    assert len(names) == 3
