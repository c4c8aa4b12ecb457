"""Callbacks of the trainer: signals that save and stop, merged completions, and what identifies a launch."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerControl, TrainerState

from grpo_recipes.training.callbacks import DropLaterCompletions, StopOnSignal, identity_of, starting_weights
from tests.support import tiny
from tests.support.recorded import model

ARGS: Any = SimpleNamespace(device=torch.device("cpu"))
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

# ---- signals


@pytest.mark.parametrize(
    ("rank", "launcher", "pause", "stops"),
    [("0", "", 0.0, True), ("0", "none", 0.0, False), ("0", "none", 2.1, True), ("1", "none", 0.0, False)],
)
def test_a_second_ctrl_c_stops_at_once_unless_it_is_the_launchers_copy(
    rank: str, launcher: str, pause: float, stops: bool, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launcher)
    callback, state = StopOnSignal(lambda step: True), TrainerState(max_steps=9, global_step=1)
    previous = signal.getsignal(signal.SIGINT)
    callback.on_train_begin(ARGS, state, TrainerControl())
    clock = time.monotonic()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr(time, "monotonic", lambda: clock + pause)
        os.kill(os.getpid(), signal.SIGINT)
        callback.on_step_end(ARGS, state, TrainerControl())
    except KeyboardInterrupt:
        callback.stopped = False
    finally:
        callback.restore_handlers()
    assert signal.getsignal(signal.SIGINT) == previous
    assert (callback.stopped, callback.name) == (not stops, "Ctrl-C")
    assert capfd.readouterr().err.count("a second Ctrl-C") == (rank == "0"), "one rank says it, once"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_stops_after_the_generation_batch(number: signal.Signals) -> None:
    callback, state = StopOnSignal(lambda step: step % 3 == 0), TrainerState(max_steps=100)
    before = [signal.signal(one, signal.SIG_DFL) for one in SIGNALS]
    assert not callback.began
    callback.on_train_begin(ARGS, state, TrainerControl())
    try:
        stopped = []
        for state.global_step in range(1, 7):
            control = TrainerControl()
            if state.global_step == 4:
                os.kill(os.getpid(), number)
                os.kill(os.getpid(), signal.SIGINT)  # the first signal names the stop
            callback.on_step_end(ARGS, state, control)
            stopped.append((control.should_save, control.should_training_stop))
    finally:
        callback.on_train_end(ARGS, state, TrainerControl())
    assert stopped == [(False, False)] * 5 + [(True, True)]
    assert (callback.began, callback.stopped, callback.name) == (True, True, number.name)
    callback.restore_handlers()  # a second call does nothing
    assert [signal.signal(one, old) for one, old in zip(SIGNALS, before, strict=True)] == [signal.SIG_DFL] * 3


def test_a_signal_in_the_last_step_stops_no_run_early() -> None:
    callback, control = StopOnSignal(lambda step: True), TrainerControl()
    callback.requested = signal.SIGTERM
    callback.on_step_end(ARGS, TrainerState(max_steps=8, global_step=8), control)
    assert (control.should_save, control.should_training_stop, callback.stopped) == (True, True, False)


def test_a_run_that_is_told_to_ignore_hangups_goes_on() -> None:
    """`nohup` ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    callback = StopOnSignal(lambda step: True)
    try:
        callback.on_train_begin(ARGS, TrainerState(), TrainerControl())
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    finally:
        callback.restore_handlers()
        signal.signal(signal.SIGHUP, before)


ON_TWO_RANKS = [((0, 0), None), ((0, signal.SIGTERM), "SIGTERM"), ((signal.SIGINT, signal.SIGINT), "Ctrl-C")]


def stops_of_rank(rank: int, store: Path) -> list[str | None]:
    """Return the name of the signal for which one of two ranks stops, for each case of `ON_TWO_RANKS`."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        stops = []
        for signals, _ in ON_TWO_RANKS:
            callback, control = StopOnSignal(lambda step: True), TrainerControl()
            callback.requested = signals[rank]
            callback.on_step_end(ARGS, TrainerState(max_steps=9), control)
            stops.append(callback.name if control.should_training_stop else None)
        return stops
    finally:
        torch.distributed.destroy_process_group()


def test_a_signal_to_one_rank_stops_both(tmp_path: Path) -> None:
    other = os.fork()
    if other == 0:
        code = 1
        try:
            code = int(stops_of_rank(1, tmp_path / "store") != [name for _, name in ON_TWO_RANKS])
        finally:
            os._exit(code)
    assert stops_of_rank(0, tmp_path / "store") == [name for _, name in ON_TWO_RANKS]
    assert os.waitpid(other, 0)[1] == 0


# ---- completions


def test_completions_after_the_first_step_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A training that starts from step 0 in a used folder may do so by mistake: this is a warning."""
    caplog.set_level(logging.INFO)
    folder, checked = tmp_path / "completions", []
    folder.mkdir()
    for step in (4, 5, 6):
        pd.DataFrame({"step": [step]}).to_parquet(folder / f"completions_{step:05d}.parquet")
    checkpoints = SimpleNamespace(check_folder=lambda: checked.append(len(list(folder.iterdir()))))
    args: Any = SimpleNamespace(output_dir=str(tmp_path))
    trainer = SimpleNamespace(args=args, checkpoints=checkpoints, log_completions=False)
    left = []
    for trainer.log_completions, step in ((False, 5), (True, 5), (True, 0), (True, 0)):
        DropLaterCompletions(trainer).on_train_begin(args, TrainerState(global_step=step), TrainerControl())
        left.append(len(list(folder.iterdir())))
    assert left == [3, 2, 0, 0]
    assert checked == [3, 3, 2, 0], "another launch may have taken the folder over"
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]


# ---- identity


def test_the_sources_of_weights(tmp_path: Path) -> None:
    tiny.policy().save_pretrained(tmp_path / "base")
    full = type(tiny.policy()).from_pretrained(tmp_path / "base")
    adapted = get_peft_model(full, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    base = str(tmp_path / "base")

    def names(given: Any, made: Any, reference: Any) -> dict[str, str]:
        return {role: source.name for role, source in starting_weights(given, made, reference).items()}

    assert names(base, full, None) == names(full, full, "initial") == {"policy": base}
    assert names(adapted, adapted, None) == {"policy": "", "base": base}
    assert names(base, adapted, {"adapter": "c/d"}) == {"policy": base, "reference": "c/d"}
    (tmp_path / "adapter_config.json").write_text("{}")
    assert names(str(tmp_path), adapted, None) == {"policy": str(tmp_path), "base": base}


def test_a_launch_is_identified_by_its_rows_rewards_and_tools() -> None:
    def reward() -> None: ...

    def other() -> None: ...

    class Game: ...

    trainer: Any = SimpleNamespace(
        reward_funcs=[reward], reward_func_names=["mine"], train_dataset=Dataset.from_dict({"prompt": ["p"]})
    )
    plain = identity_of(trainer, starting_weights(model(), model(), None)).content
    assert list(plain["rewards"]) == ["mine"]
    trainer._standalone_tools, trainer.environment_factories = [other], {"chess": Game, "": Game}
    with_tools = identity_of(trainer, starting_weights(model(), model(), None)).content
    shown = str(with_tools)
    assert with_tools != plain
    assert all(name in shown for name in ("other", "chess", "Game"))
    trainer.train_dataset = Dataset.from_dict({"prompt": ["q"]})
    assert identity_of(trainer, {}).content["columns"] != plain["columns"]
