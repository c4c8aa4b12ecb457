"""The command `grpo-rewards`: list the rewards, score a file of completions, check a dataset's golds."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import math
import os
import statistics
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from grpo_rewards import __version__
from grpo_rewards.built import BuiltReward, RewardSpecError
from grpo_rewards.completions import completion_text, copied, listed_scores, score_value
from grpo_rewards.composed import leaves
from grpo_rewards.errors import UserError, did_you_mean, one_line
from grpo_rewards.explain import Reasons, score_line
from grpo_rewards.files import read_text, replacing
from grpo_rewards.registry import REGISTERED, build_rewards, missing_package, resolve
from grpo_rewards.startup import prepare_libraries
from grpo_rewards.terminal import (
    Cell,
    CommandParser,
    Part,
    Table,
    lasting_output,
    say,
    say_error,
    show,
    visible,
    visible_messages,
)

_EXAMPLES = 2
_MOST_LINES = 20
_BINS = 8


class FileRow(NamedTuple):
    """Row of a file, with its number from 1."""

    number: int
    columns: dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `grpo-rewards` and return its exit code: 0 for success, 1 if some rows could not be used, 2 for bad usage."""
    prepare_libraries()
    if "" not in sys.path:
        sys.path.insert(0, "")  # the working folder, as with `python -m`, so that the user's own rewards are found
    with lasting_output() as output:
        options = _options(sys.argv[1:] if arguments is None else list(arguments))
        try:
            with visible_messages():
                code = options.run(options)
        except UserError as error:
            say_error(error)
            return 2
    return code if output.error is None else 2


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(prog="grpo-rewards", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")

    command = commands.add_parser("list", help="list every reward with its table of scores")
    command.set_defaults(run=_list)

    _add_score_options(commands.add_parser("score", help="score the completions of a JSONL or Parquet file"))

    command = commands.add_parser("check", help="check that each gold earns the full score against itself")
    add = command.add_argument
    add("file", type=Path, metavar="dataset", help="file with the gold column")
    add("--reward", default="gsm8k_correctness", metavar="SPEC", help="name or mapping (default: gsm8k_correctness)")
    add("--gold_column", metavar="NAME", help="column with the gold (default: the column that the reward reads)")
    command.set_defaults(run=_check)

    _add_audit_options(commands.add_parser("audit", help="look for wrong completions that a reward pays"))

    command = commands.add_parser("convert-internlm2", help="convert an InternLM2 reward model to a native checkpoint")
    add = command.add_argument
    add("source", metavar="SRC", help="hub id or folder of the model in InternLM2's own layout")
    add("target", metavar="DST", type=Path, help="folder to write, which must not exist yet")
    add("--allow_pickle", action="store_true", help="also read pytorch_model*.bin, if you trust its source")
    command.set_defaults(run=_convert_internlm2)

    parser.check_command(arguments, commands.choices)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        known = next(commands.choices[word].long_options for word in arguments if word in commands.choices)
        parser.error(f"unknown argument `{rest[0]}`: {did_you_mean(rest[0], known, '`--help` lists all')}")
    return options


def _add_score_options(command: CommandParser) -> None:
    add = command.add_argument
    add("file", type=Path, help="file with the column `completion`, optionally `prompt`, and the gold column")
    add("--reward", action="append", required=True, metavar="SPEC", help="name of a reward, or a recipe's mapping")
    add("--gold_column", metavar="NAME", help="column with the gold (default: answer)")
    add("--num_generations", type=int, metavar="G", help="rows per prompt, for rewards that compare a group")
    add("--out", type=Path, metavar="FILE", help="JSONL file to write every row to, with its scores")
    add("--explain", action="store_true", help="print the reason for the score of each row")
    command.set_defaults(run=_score)


def _add_audit_options(command: CommandParser) -> None:
    add = command.add_argument
    add("file", type=Path, metavar="dataset", help="file with the gold column, and optionally prompts")
    specs = "name or mapping, a function in a file (rewards.py:score), or a recipe with all its rewards (recipe.yaml)"
    add("--reward", action="append", required=True, metavar="SPEC", help=specs)
    add("--gold_column", metavar="NAME", help="column with the gold (default: the column that the reward reads)")
    add("--right", metavar="COLUMN", help="column with a right completion, for a reward that verifies without a gold")
    add("--layout", metavar="TEXT", help="completion with {answer} in it (default: the layout that pays best)")
    add("--rows", type=int, default=24, metavar="N", help="rows to make wrong completions for (default: 24)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the choice of rows (default: 0)")
    add("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(run=_audit)


def _list(options: argparse.Namespace) -> int:
    for name in REGISTERED:
        say(name)
        try:
            documentation = inspect.getdoc(resolve(name)) or "(not documented)"
        except RewardSpecError as error:
            documentation = str(error)
        shown = documentation.partition("\nArgs:")[0].partition("\nSource:")[0].strip()
        say("\n".join(f"    {line}".rstrip() for line in shown.splitlines()) + "\n")
    return 0


def _convert_internlm2(options: argparse.Namespace) -> int:
    try:
        from grpo_rewards.internlm2 import convert
    except ImportError as error:
        needs = missing_package(error)
        raise UserError("convert-internlm2", f"it needs {needs}", "pip install 'grpo-rewards[models]'") from error
    try:
        folder = convert(options.source, options.target, allow_pickle=options.allow_pickle)
    except OSError as error:
        raise UserError("convert-internlm2", str(error), "name another folder") from error
    say(f"wrote {folder}: transformers, vLLM and TRL's reward_funcs load it as it is")
    return 0


# --- score ---


def _score(options: argparse.Namespace) -> int:
    if options.num_generations is not None and options.num_generations < 1:
        raise UserError("--num_generations", f"it is {options.num_generations}", "set it to at least 1")
    rewards = build_rewards([_spec(text) for text in options.reward], num_generations=options.num_generations)
    out, source = options.out, options.file
    if out:
        if out.suffix != ".jsonl" or out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
            raise UserError(f"--out {out}", "it can't be written", "name a .jsonl file in an existing folder of yours")
        if out.exists() and source.exists() and out.samefile(source):
            raise UserError(f"--out {out}", "it is the file to score", "choose another name")
    gold_column = options.gold_column or "answer"
    rows, complaints = _read(source, "completion", optional=gold_column)
    _check_rows(options, rewards, rows, complaints)
    batch = _columns(rows, exclude={"prompt", "completion"})
    if gold_column in batch:
        batch["answer"] = batch[gold_column]
    batch["prompts"] = [row.columns.get("prompt") for row in rows]
    batch["completions"] = [row.columns["completion"] for row in rows]
    scores: dict[str, list[float | None]] = {}
    reasons = {reward.name: Reasons(reward) for reward in rewards}
    for reward in rewards:
        heard = reasons[reward.name]
        heard.begin(len(rows))
        scores[reward.name] = _call(reward, {**batch, **(heard.loggers() if options.explain else {})}, rows)
    for index, row in enumerate(rows if options.explain else []):
        say(f"row {row.number}: {_excerpt(row.columns['completion'])}")
        for name, heard in reasons.items():
            say(f"  {score_line(name, scores[name][index], heard.rows[index])}")
    for reward in rewards:
        show(*_described(reward, scores[reward.name], rows))
    if out:
        _write_scores(out, scores, rows)
        say(f"\nwrote {len(rows)} rows to {out}")
    for reward in rewards:
        if all(score is None for score in scores[reward.name]):
            reason, own = "it returned None for each", reward.declared.gold_column
            if own is not None:
                column = gold_column if own == "answer" else own
                excerpt = _excerpt(str(rows[0].columns.get(column)), 60)
                reason = f"no gold in `{column}` can be read (row {rows[0].number}: {excerpt!r})"
            complaints.append(f"{reward.name} could score none of {len(rows)} rows: {reason}")
    return _complain(source, complaints)


def _spec(text: str) -> str | Mapping[str, Any]:
    return _yaml(text, f"--reward {text!r}") if text.lstrip().startswith("{") else text


def _yaml(text: str, place: str) -> Any:
    import yaml

    from grpo_rewards.strict import DuplicateKey, load_yaml

    try:
        return load_yaml(text)
    except DuplicateKey as error:
        raise error.within(place) from error
    except yaml.YAMLError as error:
        raise UserError(place, f"it is not YAML ({str(error).splitlines()[0]})", "correct it") from error


def _check_rows(
    options: argparse.Namespace, rewards: Sequence[BuiltReward], rows: Sequence[FileRow], complaints: Sequence[str]
) -> None:
    columns = {name for row in rows for name in row.columns}
    if options.gold_column and options.gold_column not in columns:
        found = ", ".join(f"`{key}`" for key in rows[0].columns)
        problem, fix = f"there is no such column ({found})", "name one of them by --gold_column"
        raise UserError(f"{options.file}: `{options.gold_column}`", problem, fix)
    clash = columns & {reward.name for reward in rewards}
    if clash and options.out:
        raise UserError(f"{options.file}: `{min(clash)}`", "the file has this column", "give that reward an alias")
    if complaints and any(reward.needs_whole_groups for reward in rewards):
        fix = "correct it first, because a dropped row would shift the groups"
        raise UserError(options.file, complaints[0], fix)


def _columns(rows: Sequence[FileRow], exclude: set[str]) -> dict[str, Any]:
    """Return the columns of a batch but for some, with None for each row that lacks one."""
    names = {name for row in rows for name in row.columns} - exclude
    return {name: [row.columns.get(name) for row in rows] for name in names}


def _call(reward: BuiltReward, batch: Mapping[str, Any], rows: Sequence[FileRow]) -> list[float | None]:
    """Call a reward, which may be a user's own, and return its checked scores, one per row."""
    try:
        with suppress(ValueError):  # a builtin without a signature
            inspect.signature(reward.function).bind(**batch)
    except TypeError as error:
        fix = "let it take prompts, completions and, by name, the columns it needs and **columns for the others"
        raise UserError(f"reward `{reward.name}`", f"it can't be called ({error})", fix) from error
    try:
        scores = reward.function(**copied(dict(batch)))
        scores = asyncio.run(scores) if inspect.iscoroutine(scores) else scores
    except (Exception, SystemExit) as error:
        raise _failure(reward.name, error) from error
    try:
        scores = listed_scores(reward.name, scores, len(rows))
    except ValueError as error:
        raise UserError(f"--reward {reward.name}", str(error), "correct the reward") from error
    values = list(map(score_value, scores))
    for score, value, row in zip(scores, values, rows, strict=True):
        if value is not None and not math.isfinite(value):
            problem = f"it returned {score!r} for row {row.number}"
            raise UserError(f"reward `{reward.name}`", problem, "return a finite number, or None")
    return values


def _failure(name: str, error: BaseException) -> UserError:
    """Return the error of a reward that raised: our own error, or another's with its place."""
    text = one_line(error).rstrip(".")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, ValueError) and Path(frame.filename).parent == Path(__file__).parent:
        return error if isinstance(error, UserError) else UserError(f"--reward {name}", text, "correct it or the file")
    problem = f"it raised {type(error).__name__}: {text or '(no message)'} ({frame.filename}, line {frame.lineno})"
    return UserError(f"reward `{name}`", problem, "correct the reward")


def _described(reward: BuiltReward, column: Sequence[float | None], rows: Sequence[FileRow]) -> Iterator[Part]:
    """Yield a summary of a reward's scores: their mean and histogram, and the worst and best rows."""
    scored = sorted((score, index) for index, score in enumerate(column) if score is not None)
    yield ""
    yield Cell(f"{reward.name}: {len(column)} rows, {len(column) - len(scored)} unscorable", "head")
    if not scored:
        return
    values = [score for score, _ in scored]
    yield f"  mean {statistics.fmean(values):.4f}, standard deviation {statistics.pstdev(values):.4f}"
    yield Table(_histogram(values), ("pay", "rows", "share"), frozenset({0, 1, 2}))
    examples = []
    for title, found in (("worst", scored[:_EXAMPLES]), ("best", scored[: -_EXAMPLES - 1 : -1])):
        for score, index in found:
            excerpt = _excerpt(rows[index].columns["completion"])
            examples.append((f"{title}: row {rows[index].number}, {score:g}: {excerpt}",))
    yield Table(examples)
    if note := reward.declared.unparsed_note([row.columns["completion"] for row in rows]):
        yield f"  {note}"


def _histogram(values: Sequence[float]) -> list[tuple[str, str, str]]:
    """Return the pay, the rows and the share of each value, or of eight bins, for values in ascending order."""
    counts = Counter(values)
    bars = [(f"{value:g}", count) for value, count in counts.items()]
    if len(counts) > _BINS:
        low, width = values[0], (values[-1] - values[0]) / _BINS
        bins = Counter(min(int((value - low) / width), _BINS - 1) for value in values)
        bars = [(f"{low + i * width:.3g} … {low + (i + 1) * width:.3g}", bins[i]) for i in range(_BINS)]
    return [(label, f"{count:,}", f"{count / len(values):.1%}") for label, count in bars]


def _excerpt(completion: Any, length: int = 90) -> str:
    """Return the end of a completion on one line: the answer is there."""
    text = one_line(completion_text(completion))
    return visible(text if len(text) <= length else f"…{text[-length:]}")


# --- check ---


def _check(options: argparse.Namespace) -> int:
    reward, full = _gold_reward(options.reward)
    function: Any = reward.function
    gold_column = options.gold_column or function.gold_column
    rows, complaints = _read(options.file, gold_column)
    unscorable, below, untried = [], [], 0
    for line, score, is_tried in _tried_golds(reward, rows, gold_column):
        if score is None:
            unscorable.append(line)
        elif not is_tried:
            untried += 1
        elif score != full:
            below.append(line)
    full_pay = len(rows) - len(unscorable) - len(below) - untried
    without = f", {untried} without a `{function.solution_column}` were only read" if untried else ""
    say(f"{options.file}: {len(rows)} golds, {full_pay} earn full pay ({full:g}){without}")
    for title, listed in (("can't be scored", unscorable), ("earn less than full pay", below)):
        if listed:
            say(f"{len(listed)} {title}:")
        for line in _first_lines(listed):
            say(f"  {line}")
    if note := reward.declared.gold_note((f"row {row.number}", row.columns.get(gold_column)) for row in rows):
        say(note)
    if len(unscorable) == len(rows):
        complaints.append(f"none of {len(rows)} golds in `{gold_column}` can be read")
    return max(_complain(options.file, complaints), int(bool(unscorable or below)))


def _tried_golds(
    reward: BuiltReward, rows: Sequence[FileRow], gold_column: str
) -> Iterator[tuple[str, float | None, bool]]:
    """Yield a line on each gold, the score of its answer, and False if it has no answer that could be tried."""
    function: Any = reward.function
    batch = _columns(rows, exclude={"prompts", "completions"})
    golds = batch[gold_column]
    batch |= {function.gold_column: golds, "prompts": golds}
    read: dict[str, list] = {}
    if function.solution_column is None:  # the golds as the reward reads them
        _call(reward, {**batch, "completions": [""] * len(rows), "log_extra": read.__setitem__}, rows)
        answers = read[f"{function.prefix}gold"]
    else:
        answers = batch.get(function.solution_column, [None] * len(rows))
    batch["completions"] = [_right_completion(function, answer) for answer in answers]
    scores = _call(reward, {**batch, "log_extra": read.__setitem__}, rows)
    for index, (row, gold, score) in enumerate(zip(rows, golds, scores, strict=True)):
        shown = _excerpt(str(gold))
        if function.solution_column is not None:
            shown = visible(one_line(read[f"{function.prefix}verdict"][index]))
        yield f"row {row.number}: {shown}", score, function.solution_column is None or answers[index] is not None


def _gold_reward(text: str) -> tuple[BuiltReward, float]:
    """Return the reward of a spec that reads golds, also inside a gate or a sum, and its largest score."""
    built = build_rewards([_spec(text)])
    for reward in leaves(built):
        has_gold = reward.declared.gold_column is not None and bool(reward.declared.columns_read)
        if reward.kind == "correctness" and has_gold and reward.highest_pay is not None:
            return reward, reward.highest_pay
    problem = "it is not a correctness reward of this package, which tries each gold against itself"
    raise UserError(f"reward `{built[0].name}`", problem, "try it with `grpo-rewards audit`")


def _right_completion(reward: Any, answer: str | None) -> str:
    """Return a completion that states `answer` in every place where `reward` may look for it."""
    if reward.solution_column is not None:
        return f"```\n{answer}\n```"
    thinking, tag = f"<{reward.tags[0]}>\n…\n</{reward.tags[0]}>\n", reward.tags[1]
    if reward.extract == "whole":
        return f"{thinking}{answer}"
    stated = f"\\boxed{{{answer}}}\nThe answer is {answer}.\nA: {answer}\n#### {answer}"
    return f"{thinking}{stated}\n<{tag}>\n{answer}\n</{tag}>"


# --- audit ---


def _audit(options: argparse.Namespace) -> int:
    from grpo_rewards.audit.audit import auditor_of
    from grpo_rewards.audit.report import print_audit

    if options.rows < 1:
        raise UserError("--rows", f"it is {options.rows}", "set it to at least 1")
    if options.layout is not None and "{answer}" not in options.layout:
        fix = "write {answer} where it belongs"
        raise UserError(f"--layout {options.layout!r}", "it has no place for the answer", fix)
    specs: list[Any] = []
    for text in options.reward:
        specs += _recipe_rewards(Path(text)) if text.endswith((".yaml", ".yml")) else [_spec(text)]
    rows, complaints = _read(options.file, options.gold_column)
    try:
        columns = {"gold_column": options.gold_column, "right": options.right}
        chosen = {"layout": options.layout, "most": options.rows, "seed": options.seed}
        result = auditor_of(specs, rows, options.file, **columns, **chosen).audit()
    except KeyboardInterrupt:
        say_error("interrupted: nothing was written")
        return 130
    print_audit(result, as_json=options.json)
    return max(_complain(options.file, complaints), int(result.found))


def _recipe_rewards(path: Path) -> list[Any]:
    """Return the reward specs of a recipe."""
    try:
        recipe = _yaml(read_text(path), f"--reward {path}")
    except FileNotFoundError as error:
        raise UserError(f"--reward {path}", "it is not a file", "correct the path") from error
    rewards = recipe.get("rewards") if isinstance(recipe, dict) else None
    if not isinstance(rewards, list) or not rewards:
        raise UserError(f"--reward {path}", "it has no list `rewards`", "name a recipe, or a reward")
    return rewards


# --- Files of rows ---


def _read(path: Path, needed: str | None, optional: str = "") -> tuple[list[FileRow], list[str]]:
    """Return the usable rows of a file, and a complaint with its number about each other row.

    Every row needs the column `needed`, if one is named. If one row has the column `optional`, every row needs it.
    """
    if not path.is_file():
        raise UserError(path, "it is not a file", "correct the path")
    read = _parquet_rows if path.suffix == ".parquet" else _jsonl_rows
    try:
        numbered = list(read(path))
    except OSError as error:
        raise UserError(path, f"it can't be read ({error.strerror or error})", "correct its permissions") from error
    columns = [needed] if needed else []
    if any(optional in row for _, row in numbered if isinstance(row, dict)):
        columns.append(optional)
    rows, complaints = [], []
    for number, row in numbered:
        problem = row if isinstance(row, str) else _problem(row, columns)
        if isinstance(row, dict) and problem is None:
            rows.append(FileRow(number, row))
        else:
            complaints.append(f"row {number}: {problem}")
    if not rows:
        hint = f" ({complaints[0]})" if complaints else ""
        raise UserError(path, f"it has no row that can be used{hint}", "correct its rows")
    return rows, complaints


def _problem(row: dict[str, Any], needed: Sequence[str]) -> str | None:
    for column in needed:
        if column not in row:
            return f"no `{column}`; it has {', '.join(f'`{key}`' for key in row) or 'nothing'}"
    if "completion" in needed and not isinstance(row["completion"], (str, list)):
        return "`completion` is neither a string nor a list of messages"
    return None


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield the number of each line with its row, or with a complaint about it."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield number, row if isinstance(row, dict) else f"a {type(row).__name__}, not an object"
            except (ValueError, RecursionError) as error:
                yield number, f"not JSON ({error})"


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(path, "Parquet files need pyarrow", "pip install 'grpo-rewards[parquet]'") from error
    try:
        yield from enumerate(parquet.ParquetFile(path).read().to_pylist(), 1)
    except (OSError, ValueError) as error:
        problem = f"it is not a Parquet file, or is damaged ({one_line(error)})"
        raise UserError(path, problem, "write it again") from error


def _write_scores(path: Path, scores: Mapping[str, Sequence[float | None]], rows: Sequence[FileRow]) -> None:
    lines = []
    for index, row in enumerate(rows):
        scored = {**row.columns, **{name: column[index] for name, column in scores.items()}}
        lines.append(json.dumps(scored, default=str) + "\n")
    try:
        with replacing(path.resolve()) as part:
            part.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        fix = "name a file that you may write"
        raise UserError(f"--out {path}", f"it can't be written ({one_line(error)})", fix) from error


def _complain(path: Path, complaints: Sequence[str]) -> int:
    for line in _first_lines(complaints):
        say_error(f"{path}: {line}")
    return int(bool(complaints))


def _first_lines(lines: Sequence[str]) -> list[str]:
    if len(lines) <= _MOST_LINES:
        return list(lines)
    return [*lines[:_MOST_LINES], f"… and {len(lines) - _MOST_LINES} more"]
