"""The argument parser of our commands: one sentence for a mistake, and options in either spelling."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from grpo_rewards.errors import did_you_mean
from grpo_rewards.terminal import say_error


class Parser(argparse.ArgumentParser):
    """argparse's parser with one sentence for a mistake, and without abbreviations.

    Abbreviated, `plan x --model m` would set `--model_config` where it means to override the recipe. Options are declared
    with underscores, as the keys of a recipe are, and may be given with hyphens too. In help texts, `%` is written twice.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})

    @property
    def long_options(self) -> list[str]:
        """What may be given, as `--name`."""
        names = [name for action in self._actions for name in action.option_strings]
        return [name for name in names if name.startswith("--")]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, with options in either spelling."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._underscored(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        """Print one sentence and end with exit code 2."""
        say_error(message)
        raise SystemExit(2)

    def check_command(self, arguments: Sequence[str], commands: Iterable[str]) -> None:
        """End with one sentence unless `arguments` name one of `commands`, or ask for help or the version."""
        word = next((word for word in arguments if not word.startswith("-")), None)
        *others, last = commands
        choices = f"{', '.join(others)} or {last}"
        if word is not None and word not in (*others, last):
            nearest = did_you_mean(word, (*others, last), f": choose {choices}")
            self.error(f"there is no command `{word}`{nearest}")
        if word is None and not {"-h", "--help", "--version"} & set(arguments):
            self.error(f"name a command, {choices}: `{self.prog} --help` says what each does")

    def _underscored(self, word: str) -> str:
        name, equals, value = word.partition("=")
        underscored = "--" + name[2:].replace("-", "_")
        return underscored + equals + value if name.startswith("--") and underscored in self.long_options else word
