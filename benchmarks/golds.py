r"""Golds of public data sets, paid or not by `math_correctness` and Math-Verify.

    python benchmarks/golds.py FOLDER [--limit 200] [--list] [--record benchmarks/results/golds.md]
    python benchmarks/golds.py --dataset openai/gsm8k:main --split test [--column answer]

FOLDER has one `*.jsonl` file per set. A gold is read from the column `answer`, `gold` or `final_answer`. A list counts
as its entries.

Every completion is `So the answer is \boxed{ANSWER}.` with one of these answers:

- by itself: the gold's final answer without `$`
- respelled: the same with spaces around operators and commas, and with `\dfrac` for `\frac`
- reversed: the items of a set or of a bare list in reverse order
- constants: `1=1`, `0=1`, `0`, `1`, `x`, `\emptyset`, `42` and nothing
- another: the next gold of the set in shuffled order whose text differs
- digit, sign: one digit changed, or the sign of the first number toggled

A mutation is scored only if it changes the text. The first three answers are right, except that the order of a bare
list can matter. `50/60` means that 50 of 60 are paid. Any other answer is right if its text or its value equals the
gold's, which is decided here without either reward. `5 (2)/60` means that 5 of 60 are paid, of which 2 are not right.
`--list` prints the right answers that are not paid and the payments for answers that are not right, each with its set,
reward, check, outcome, gold and answer. The list is for reading, because some of those answers are right after all,
such as `\cos(-2t)` for `\cos(2t)`.

Math-Verify is called like TRL's `accuracy_reward`, with two differences. The gold is written as `$\boxed{GOLD}$`,
because Math-Verify reads bare LaTeX unreliably. The time limits are 5 seconds for parsing and 1 second for comparing,
instead of 10 and 5, to bound the time of the run. A comparison that runs out of time is not paid.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import random
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import load_dataset
from gold_answers import CONSTANTS, RIGHT, WRONG, Case, cases, final_answer
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from grpo_rewards.math.correctness import math_correctness

PARSING_SECONDS, COMPARISON_SECONDS = 5, 1
BATCH = 64
"""Number of completions in one call of `math_correctness`, which has a time limit for the comparisons of a call."""

COLUMNS = ("answer", "gold", "final_answer")


def completion(answer: str) -> str:
    """Return the text of a completion with an answer."""
    return rf"So the answer is \boxed{{{answer}}}."


def with_math_correctness(scored: Sequence[Case]) -> list[str]:
    """Return the outcome of each case: paid, unpaid, unscorable or timeout."""
    scores: list[float | None] = []
    verdicts: list[str] = []

    def keep_verdicts(column: str, values: list) -> None:
        if column == "verdict":
            verdicts.extend(values)

    for start in range(0, len(scored), BATCH):
        batch = scored[start : start + BATCH]
        texts = [completion(case.answer) for case in batch]
        golds = [case.gold for case in batch]
        scores += math_correctness(prompts=golds, completions=texts, answer=golds, log_extra=keep_verdicts)
    outcomes = []
    for score, verdict in zip(scores, verdicts, strict=True):
        if score is None:
            outcomes.append("unscorable")
        elif score > 0:
            outcomes.append("paid")
        else:
            outcomes.append("timeout" if verdict == "timeout" else "unpaid")
    return outcomes


@cache
def parsed(text: str, is_gold: bool) -> list:
    """Parse a gold or a completion with Math-Verify, by the settings of TRL's `accuracy_reward`."""
    if is_gold:
        return parse(text, parsing_timeout=PARSING_SECONDS)
    units = NormalizationConfig(units=True)
    layout = LatexExtractionConfig(normalization_config=units, boxed_match_priority=0, try_extract_without_anchor=False)
    return parse(text, [layout], extraction_mode="first_match", parsing_timeout=PARSING_SECONDS)


def with_math_verify(scored: Sequence[Case]) -> list[str]:
    """Return the outcome of each case: paid, unpaid, unscorable or timeout."""
    outcomes = []
    for case in scored:
        gold = parsed(rf"$\boxed{{{final_answer(case.gold)}}}$", is_gold=True)
        if not gold:
            outcomes.append("unscorable")
            continue
        answer = parsed(completion(case.answer), is_gold=False)
        started = time.perf_counter()
        is_paid = verify(gold, answer, timeout_seconds=COMPARISON_SECONDS)
        ran_out = time.perf_counter() - started > COMPARISON_SECONDS
        if is_paid:
            outcomes.append("paid")
        else:
            outcomes.append("timeout" if ran_out else "unpaid")
    return outcomes


REWARDS: dict[str, Callable[[Sequence[Case]], list[str]]] = {
    "math_correctness": with_math_correctness,
    "Math-Verify": with_math_verify,
}


def read_golds(name: str, rows: Iterable[dict[str, Any]], column: str | None) -> list[str]:
    """Return the golds of a set's rows, from a column or from the first of COLUMNS that a row has."""
    golds: list[str] = []
    for row in rows:
        found = column or next((known for known in COLUMNS if known in row), None)
        if found not in row:
            raise SystemExit(f"{name}: a row has the columns {', '.join(row)}. Name the gold's column by --column.")
        gold = row[found]
        golds += map(str, gold if isinstance(gold, list) else [gold])
    if not golds:
        raise SystemExit(f"{name} has no golds. Name a file or split with rows.")
    return golds


def sets_of(asked: argparse.Namespace) -> dict[str, list[str]]:
    """Return the golds of every set."""
    found = {}
    for folder in asked.folders:
        for file in sorted(folder.glob("*.jsonl")):
            lines = file.read_text(encoding="utf-8").split("\n")
            found[file.stem] = read_golds(str(file), map(json.loads, filter(None, lines)), asked.column)
    for name in asked.dataset:
        path, _, config = name.partition(":")
        found[name] = read_golds(name, load_dataset(path, config or None, split=asked.split), asked.column)
    if not found:
        raise SystemExit("No set is named. Name a FOLDER with *.jsonl files or a --dataset.")
    return found


def cell(scored: pd.DataFrame) -> str:
    """Return `paid/cases`, or for wrong answers `paid (paid but not right)/cases`."""
    paid = scored[scored["outcome"] == "paid"]
    wrong = "" if set(scored["check"]) <= set(RIGHT) else f" ({(~paid['right']).sum():,})"
    return f"{len(paid):,}{wrong}/{len(scored):,}"


def is_listed(scored: pd.DataFrame) -> pd.Series:
    """Return a boolean per case: True for a right answer that is not paid, and for a payment that is not right."""
    paid = scored["outcome"] == "paid"
    return (~paid & scored["check"].isin(RIGHT)) | (paid & ~scored["right"])


def row(name: str, reward: str, scored: pd.DataFrame) -> str:
    """Return a row of the table of sets."""
    own = scored[scored["check"] == "by itself"]
    cells = [name, f"{len(own):,}", reward, f"{(own['outcome'] == 'unscorable').sum():,}"]
    cells += [cell(scored[scored["check"] == check]) for check in RIGHT + WRONG]
    cells += [f"{(scored['outcome'] == 'timeout').sum():,}", f"{scored['seconds'].sum():.0f}"]
    return f"| {' | '.join(cells)} |"


def table(columns: Sequence[str]) -> list[str]:
    """Return the head of a Markdown table."""
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--dataset", action="append", default=[], metavar="NAME[:CONFIG]")
    parser.add_argument("--split", default="test")
    parser.add_argument("--column", help="column of the gold")
    parser.add_argument("--limit", type=int, help="largest number of golds per set, a random sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reward", choices=REWARDS, action="append", help="default: both")
    parser.add_argument("--list", action="store_true", help="print the outcomes to read")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the tables to a file")
    asked = parser.parse_args(arguments)
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # logs every comparison that runs out of time
    rewards = asked.reward or list(REWARDS)
    packages = ("grpo-rewards", "math-verify", "latex2sympy2_extended", "sympy", "trl")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    lines = [f"Python {platform.python_version()}, {platform.machine()}, {versions}, seed {asked.seed}", ""]
    lines += table(["set", "golds", "reward", "unscorable", *RIGHT, *WRONG, "timeouts", "seconds"])
    print("\n".join(lines), flush=True)
    frames = []
    for name, golds in sets_of(asked).items():
        rng = random.Random(f"{asked.seed} {name}")
        sample = golds if asked.limit is None else rng.sample(golds, min(asked.limit, len(golds)))
        answers = cases(sample, rng)
        for reward in rewards:
            started = time.perf_counter()
            outcomes = REWARDS[reward](answers)
            seconds = (time.perf_counter() - started) / len(answers)
            scored = pd.DataFrame(answers).assign(set=name, reward=reward, outcome=outcomes, seconds=seconds)
            frames.append(scored)
            lines.append(row(name, reward, scored))
            print(lines[-1], flush=True)
    everything = pd.concat(frames, ignore_index=True)
    by_reward = {reward: everything[everything["reward"] == reward] for reward in rewards}
    summary = [row("all", reward, scored) for reward, scored in by_reward.items()]
    summary += ["", *table(["constant", *rewards])]
    for constant in CONSTANTS:
        cells = [
            cell(scored[scored["check"].eq("constants") & scored["answer"].eq(constant)])
            for scored in by_reward.values()
        ]
        summary.append(f"| `{constant or ' '}` | {' | '.join(cells)} |")
    print("\n".join(summary))
    if asked.list:
        for case in everything[is_listed(everything)].itertuples():
            print(case.set, case.reward, case.check, case.outcome, repr(case.gold), repr(case.answer), sep="\t")
    if asked.record:
        explanation = str(__doc__).partition("\n\nEvery")[2]
        page = ["# Golds of public data sets\n", f"Every{explanation}", *lines, *summary]
        asked.record.write_text("\n".join(page) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
