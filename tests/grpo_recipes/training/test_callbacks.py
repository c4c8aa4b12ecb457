"""The callback that saves and stops a run after a signal."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainerControl, TrainerState

from grpo_recipes.process.ranks import on_any_rank
from grpo_recipes.training.callbacks import StopOnSignal


def test_a_second_ctrl_c_stops_at_once_and_the_launchers_echo_does_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted_twice() -> StopOnSignal:
        callback = StopOnSignal(lambda step: True)
        args, state = SimpleNamespace(device=torch.device("cpu")), TrainerState(max_steps=9, global_step=1)
        previous = signal.getsignal(signal.SIGINT)
        callback.on_train_begin(args, state, TrainerControl())
        try:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            callback.on_step_end(args, state, TrainerControl())
        finally:
            callback.restore_handlers()
        assert signal.getsignal(signal.SIGINT) == previous
        return callback

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    stopped = interrupted_twice()
    assert (stopped.stopped, stopped.name) == (True, "Ctrl-C")
    assert capfd.readouterr().err.count("a second Ctrl-C stops it at once") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_stops_after_the_generation_batch(number: signal.Signals) -> None:
    callback = StopOnSignal(lambda step: step % 3 == 0)
    args, state = SimpleNamespace(device=torch.device("cpu")), TrainerState(max_steps=100)
    previous = signal.signal(number, signal.SIG_DFL)
    callback.on_train_begin(args, state, TrainerControl())
    try:
        stopped = []
        for state.global_step in range(1, 7):
            control = TrainerControl()
            if state.global_step == 4:
                os.kill(os.getpid(), number)
            callback.on_step_end(args, state, control)
            stopped.append((control.should_save, control.should_training_stop))
    finally:
        callback.on_train_end(args, state, TrainerControl())
    assert stopped == [(False, False)] * 5 + [(True, True)]
    assert callback.stopped
    assert callback.name == number.name
    assert signal.signal(number, previous) == signal.SIG_DFL


ON_TWO_RANKS = [((0, 0), None), ((0, signal.SIGTERM), "SIGTERM"), ((signal.SIGINT, signal.SIGINT), "Ctrl-C")]


def stops_of_rank(rank: int, store: Path) -> list[str | None]:
    """Return the name of the signal for which one of two ranks stops, for each case of `ON_TWO_RANKS`."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        stops = []
        for signals, _ in ON_TWO_RANKS:
            callback, control = StopOnSignal(lambda step: True), TrainerControl()
            callback.requested = signals[rank]
            callback.on_step_end(SimpleNamespace(device=torch.device("cpu")), TrainerState(max_steps=9), control)
            stops.append(callback.name if control.should_training_stop else None)
        assert on_any_rank(rank == 1, torch.device("cpu")) is True
        assert on_any_rank(False, torch.device("cpu")) is False
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
