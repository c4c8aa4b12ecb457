"""An exit of user code inside a run."""

import signal
import sys

import pytest

from grpo_recipes.process import faults


def test_an_exit_of_user_code_is_an_error_that_names_its_place() -> None:
    @faults.no_exit()
    def leaves() -> None:
        exit(0)

    with pytest.raises(faults.RunFault, match=r"sys.exit\(0\).*test_faults.py, line \d+, in leaves"):
        leaves()


def test_a_signal_handler_of_a_script_may_end_it() -> None:
    def leave(signum: int, frame: object) -> None:
        sys.exit(143)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        with pytest.raises(SystemExit, match="143"), faults.no_exit():
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
