"""The command `grpo-rewards`: list the rewards, score a file of completions, check a dataset's golds."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import inspect
import json
import math
import os
import statistics
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_rewards import __version__
from grpo_rewards.completions import completion_text, listed_scores
from grpo_rewards.errors import UserError, did_you_mean, one_line
from grpo_rewards.files import LINE_BYTES, replacing
from grpo_rewards.registry import BuiltReward, RewardSpecError, build_rewards, leaves, registered_names, resolve
from grpo_rewards.terminal import (
    Cell,
    Parser,
    Part,
    Table,
    lasting_output,
    say,
    say_error,
    show,
    visible,
    visible_messages,
)

Rows = list[tuple[int, dict[str, Any]]]  # line (or row) number from 1, and the row
_CHUNK_ROWS = 256
_EXAMPLES = 2
_TOLD_CHARS = 200


class CommandError(UserError):
    """Something the user can fix: printed as one line, exit code 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `grpo-rewards` and return its exit code: 0 done, 1 some rows could not be used, 2 bad usage."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # a reward of the user's own is found from here, as with `python -m`
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
    parser = Parser(prog="grpo-rewards", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")

    command = commands.add_parser("list", help="every reward, with what it pays")
    command.set_defaults(run=_list)

    command = commands.add_parser("score", help="score the completions of a JSONL or Parquet file")
    command.add_argument("file", type=Path, help="rows with `completion`, perhaps `prompt`, and the gold column")
    command.add_argument(
        "--reward", action="append", required=True, metavar="SPEC", help="a name, or a recipe's mapping"
    )
    command.add_argument("--gold_column", metavar="NAME", help="where the gold is (default: answer)")
    command.add_argument(
        "--num_generations", type=int, metavar="G", help="rows per prompt, for rewards of whole groups"
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="write every row with its scores (.jsonl or .parquet)"
    )
    command.add_argument("--explain", action="store_true", help="print why each row earned what it did")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(run=_score)

    command = commands.add_parser("check", help="check that each gold earns full pay against itself")
    command.add_argument("file", type=Path, metavar="dataset", help="rows with the gold column")
    command.add_argument("--reward", default="gsm8k_correctness", metavar="SPEC", help="default: gsm8k_correctness")
    command.add_argument("--gold_column", metavar="NAME", help="where the gold is (default: where the reward looks)")
    command.set_defaults(run=_check)

    command = commands.add_parser("convert-internlm2", help="write an InternLM2 reward model as a native one")
    command.add_argument("source", metavar="SRC", help="hub id or folder, in InternLM2's own layout")
    command.add_argument("target", metavar="DST", type=Path, help="the folder to write, which must not exist yet")
    command.add_argument("--allow_pickle", action="store_true", help="also read pytorch_model*.bin, if you trust it")
    command.set_defaults(run=_convert_internlm2)

    parser.check_command(arguments, commands.choices)
    options, rest = parser.parse_known_args(arguments)
    if rest:
        known = next(commands.choices[word].long_options for word in arguments if word in commands.choices)
        parser.error(f"unknown argument `{rest[0]}`{did_you_mean(rest[0], known)}")
    return options


def _list(options: argparse.Namespace) -> int:
    for name in registered_names():
        say(name)
        try:
            documentation = inspect.getdoc(resolve(name)) or "(not documented)"
        except RewardSpecError as error:
            documentation = str(error)
        shown = documentation.partition("\nArgs:")[0].partition("\nSource:")[0].strip()
        say("\n".join(f"    {line}".rstrip() for line in shown.splitlines()) + "\n")
    return 0


def _score(options: argparse.Namespace) -> int:
    if options.num_generations is not None and options.num_generations < 1:
        raise CommandError(f"--num_generations must be at least 1, not {options.num_generations}")
    gold_column = options.gold_column or "answer"
    rewards = build_rewards([_spec(text) for text in options.reward], num_generations=options.num_generations)
    if options.out:
        _check_out(options.out, options.file)
    rows, complaints = _read(options.file, "completion", optional=gold_column)
    if options.gold_column and not any(gold_column in row for _, row in rows):
        columns = ", ".join(f"`{key}`" for key in rows[0][1])
        raise CommandError(f"{options.file} has no column `{gold_column}` (--gold_column): it has {columns}")
    clash = {reward.name for reward in rewards} & {key for _, row in rows for key in row}
    if clash and options.out:
        raise CommandError(f"{options.file} already has a column `{min(clash)}`: give that reward an alias")
    if complaints and any(reward.needs_whole_groups for reward in rewards):
        raise CommandError(f"{options.file}: {complaints[0]}: mend it first, since a lost row would shift the groups")
    explain = _Explanations() if options.explain else None
    scores = _score_rows(rewards, rows, gold_column, explain)
    summaries = {reward.name: _summary(reward, scores[reward.name], rows) for reward in rewards}
    if options.json:
        said = {"explained": explain.as_rows(rewards, scores, rows)} if explain else {}
        say(json.dumps({"file": str(options.file), "rewards": summaries, **said}, indent=2))
    else:
        if explain:
            explain.show(rewards, scores, rows)
        for name, summary in summaries.items():
            show(*_described(name, summary))
    if options.out:
        scored = [
            {**row, **{name: column[index] for name, column in scores.items()}} for index, (_, row) in enumerate(rows)
        ]
        _write(options.out, scored)
        if not options.json:
            say(f"\nwrote {len(scored)} rows to {options.out}")
    complaints += [
        f"{reward.name} could score none of {len(rows)} rows: {_why_unscorable(reward, rows[0], gold_column)}"
        for reward in rewards
        if all(score is None for score in scores[reward.name])
    ]
    return _complain(options.file, complaints)


def _why_unscorable(reward: BuiltReward, row: tuple[int, dict[str, Any]], gold_column: str) -> str:
    number, columns = row
    own = reward.declared.gold_column
    if own is None:
        return "it returned None for each"
    column = gold_column if own == "answer" else own
    return f"no gold in `{column}` can be read (row {number}: {_excerpt(str(columns.get(column)), 60)!r})"


def _check_out(out: Path, source: Path) -> None:
    if out.suffix not in (".jsonl", ".parquet"):
        raise CommandError(f"--out {out}: the name must end in .jsonl or .parquet")
    if not out.parent.is_dir():
        raise CommandError(f"--out {out}: the folder {out.parent} does not exist")
    if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
        raise CommandError(f"--out {out} can't be written: choose a file in a folder of yours")
    if out.exists() and source.exists() and out.samefile(source):
        raise CommandError(f"--out {out} is the file to score: choose another name")


def _spec(text: str) -> str | Mapping[str, Any]:
    if not text.lstrip().startswith("{"):
        return text
    import yaml

    from grpo_rewards.strict import load_yaml

    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise CommandError(f"--reward {text!r} is not a YAML mapping ({str(error).splitlines()[0]})") from error


def _score_rows(
    rewards: Sequence[BuiltReward], numbered: Rows, gold_column: str, explain: _Explanations | None
) -> dict[str, list]:
    rows = [row for _, row in numbered]
    scores: dict[str, list] = {reward.name: [] for reward in rewards}
    # Whole groups must meet in one call; otherwise chunks, so that the progress bar moves.
    size = len(rows) if any(reward.needs_whole_groups for reward in rewards) else _CHUNK_ROWS
    columns = {key for row in rows for key in row} - {"prompt", "completion"}
    for numbers, chunk in _chunks(numbered, size, "scoring"):
        batch = {column: [row.get(column) for row in chunk] for column in columns}
        if gold_column in batch:
            batch["answer"] = batch[gold_column]
        prompts = [row.get("prompt") for row in chunk]
        completions = [row["completion"] for row in chunk]
        for reward in rewards:
            logs = explain.logs(reward, numbers) if explain else {}
            given = {**batch, "prompts": prompts, "completions": completions, **logs}
            scores[reward.name] += _call(reward, given, numbers)
    return scores


class _Explanations:
    """What rewards say of each row: what they log for a trainer (`log_extra`), and their `log_reason`."""

    def __init__(self) -> None:
        self._said: dict[str, dict[int, dict[str, Any]]] = {}  # by reward, then by row, then by column

    def logs(self, reward: BuiltReward, numbers: Sequence[int]) -> dict[str, Callable[[str, list], None]]:
        """The logging callables for a reward's call on the rows `numbers`, as far as it takes them."""
        said = self._said.setdefault(reward.name, {})

        def log(column: str, values: list) -> None:
            if len(values) != len(numbers):
                raise CommandError(
                    f"reward `{reward.name}` logged {len(values)} values of `{column}` for {len(numbers)} completions"
                )
            for number, value in zip(numbers, values, strict=True):
                said.setdefault(number, {})[column] = value

        return {key: log for key in ("log_extra", "log_reason") if _takes(reward.unbound, key)}

    def as_rows(self, rewards: Sequence[BuiltReward], scores: Mapping[str, list], rows: Rows) -> list[dict[str, Any]]:
        """Every row with its scores and what was said of each, ready for JSON."""
        return [
            {
                "row": number,
                "pay": {reward.name: scores[reward.name][index] for reward in rewards},
                "said": {
                    reward.name: {
                        key: _json_value(value) for key, value in self._said[reward.name].get(number, {}).items()
                    }
                    for reward in rewards
                },
            }
            for index, (number, _) in enumerate(rows)
        ]

    def show(self, rewards: Sequence[BuiltReward], scores: Mapping[str, list], rows: Rows) -> None:
        """Print every row with its scores and what was said of each."""
        for index, (number, row) in enumerate(rows):
            say(f"row {number}: {_excerpt(row['completion'])}")
            for reward in rewards:
                score = scores[reward.name][index]
                said = self._said[reward.name].get(number, {})
                prefix = f"{reward.name}/"
                terms = [f"{key.removeprefix(prefix)} {_told(value)}" for key, value in said.items() if value != ""]
                shown = "no score" if score is None else f"{score:g}"
                say(f"  {reward.name} {shown}: {', '.join(terms) or 'it gives no reason'}")


def _takes(function: Callable[..., Any], keyword: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin that does not tell
        return False
    return keyword in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def _told(value: Any) -> str:
    if value is None or isinstance(value, float):
        return "none" if value is None else f"{value:g}"
    text = str(value)
    return f"`{visible(text if len(text) <= _TOLD_CHARS else text[:_TOLD_CHARS] + '…')}`"


def _json_value(value: Any) -> Any:
    """What a reward logged, which may be anything: text where JSON has no word for it."""
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _call(reward: BuiltReward, batch: Mapping[str, Any], numbers: Sequence[int]) -> list[float | None]:
    """Call a reward, which may be anyone's, and return its scores, checked; `numbers` names the rows in complaints."""
    if problem := _mismatch(reward.function, batch):
        takes = "a reward takes prompts, completions and, by name, the columns it needs and **columns for the others"
        raise CommandError(f"reward `{reward.name}` can't be called ({problem}): {takes}")
    try:
        scores = reward.function(**batch)
        scores = asyncio.run(scores) if inspect.iscoroutine(scores) else scores
    except Exception as error:
        raise CommandError(_failure(reward.name, error)) from error
    try:
        scores = listed_scores(reward.name, scores, len(numbers))
    except ValueError as error:
        raise CommandError(str(error)) from error
    return [_checked_score(reward.name, score, number) for score, number in zip(scores, numbers, strict=True)]


def _mismatch(function: Callable[..., Any], batch: Mapping[str, Any]) -> str | None:
    try:
        inspect.signature(function).bind(**batch)
    except ValueError:  # a builtin that does not tell
        return None
    except TypeError as error:
        return str(error)
    return None


def _checked_score(name: str, score: Any, number: int) -> float | None:
    if score is None:
        return None
    try:
        value = math.nan if isinstance(score, (str, bytes)) else float(score)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise CommandError(f"reward `{name}` returned {score!r} for row {number}: a score is a finite number, or None")
    return value


def _failure(name: str, error: Exception) -> str:
    """Return one sentence on a reward that raised: what our own say, or the error and where it was raised."""
    said = one_line(error).rstrip(".")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, ValueError) and Path(frame.filename).parent == Path(__file__).parent:
        return said
    return f"reward `{name}` raised {type(error).__name__}: {said or '(no message)'} ({frame.filename}, line {frame.lineno})"


def _summary(reward: BuiltReward, column: Sequence[float | None], rows: Rows) -> dict[str, Any]:
    """What a reward paid a file of completions, ready for JSON."""
    scored = sorted((score, index) for index, score in enumerate(column) if score is not None)
    summary: dict[str, Any] = {"rows": len(column), "unscorable": len(column) - len(scored)}
    if not scored:
        return summary
    values = [score for score, _ in scored]
    summary |= {"mean": statistics.fmean(values), "standard_deviation": statistics.pstdev(values)}
    summary["histogram"] = [{"pay": label, "share": share, "rows": count} for label, share, count in _histogram(values)]
    for title, examples in (("worst", scored[:_EXAMPLES]), ("best", scored[: -_EXAMPLES - 1 : -1])):
        summary[title] = [
            {"row": rows[index][0], "pay": score, "completion": _excerpt(rows[index][1]["completion"])}
            for score, index in examples
        ]
    if note := reward.declared.unparsed_note([row["completion"] for _, row in rows]):
        summary["note"] = note
    return summary


def _described(name: str, summary: Mapping[str, Any]) -> Iterator[Part]:
    """The same for the terminal: what share of the rows earned what, and the worst and best of them."""
    yield ""
    yield Cell(f"{name}: {summary['rows']} rows, {summary['unscorable']} unscorable", "head")
    if "mean" not in summary:
        return
    yield f"  mean {summary['mean']:.4f}, standard deviation {summary['standard_deviation']:.4f}"
    bars = [
        (bar["pay"], "█" * round(40 * bar["share"]), f"{bar['rows']:,}", f"{bar['share']:.1%}")
        for bar in summary["histogram"]
    ]
    yield Table(bars, ("pay", "", "rows", "share"), frozenset({0, 2, 3}))
    yield Table(
        [
            (f"{title}: row {one['row']}, {one['pay']:g}: {one['completion']}",)
            for title in ("worst", "best")
            for one in summary[title]
        ]
    )
    if "note" in summary:
        yield f"  {summary['note']}"


def _histogram(values: Sequence[float], bins: int = 8) -> Iterator[tuple[str, float, int]]:
    """Yield the label, share and count of each bar for values in ascending order."""
    counts = Counter(values)
    if len(counts) <= bins:
        for value, count in counts.items():
            yield f"{value:g}", count / len(values), count
        return
    low, width = values[0], (values[-1] - values[0]) / bins
    for i in range(bins):
        count = sum(min(int((value - low) / width), bins - 1) == i for value in values)
        yield f"{low + i * width:.3g} … {low + (i + 1) * width:.3g}", count / len(values), count


def _excerpt(completion: Any, length: int = 90) -> str:
    text = one_line(completion_text(completion))
    return visible(text if len(text) <= length else f"…{text[-length:]}")


def _check(options: argparse.Namespace) -> int:
    reward, full = _judge(options.reward)
    function: Any = reward.function
    gold_column = options.gold_column or function.gold_column
    rows, complaints = _read(options.file, gold_column)
    unscorable, underpaid = [], []
    for numbers, chunk in _chunks(rows, _CHUNK_ROWS, "checking"):
        golds = [row[gold_column] for row in chunk]
        columns = {key for row in chunk for key in row} - {"prompts", "completions"}
        batch = {column: [row.get(column) for row in chunk] for column in columns}
        batch |= {function.gold_column: golds, "prompts": golds}
        logged: dict[str, list] = {}  # each gold as the reward reads it
        _call(reward, {**batch, "completions": [""] * len(chunk), "log_extra": logged.__setitem__}, numbers)
        batch["completions"] = [_right_completion(function, answer) for answer in logged[f"{function.prefix}gold"]]
        for number, gold, score in zip(numbers, golds, _call(reward, batch, numbers), strict=True):
            if score is None:
                unscorable.append(f"row {number}: {_excerpt(str(gold))}")
            elif score != full:
                underpaid.append(f"row {number}: {_excerpt(str(gold))}")
    say(f"{options.file}: {len(rows)} golds, {len(rows) - len(unscorable) - len(underpaid)} earn full pay ({full:g})")
    for title, listed in (("can't be scored", unscorable), ("earn less than full pay", underpaid)):
        if listed:
            say(f"{len(listed)} {title}:")
        for line in _shortened(listed):
            say(f"  {line}")
    if len(unscorable) == len(rows):
        complaints.append(f"none of {len(rows)} golds in `{gold_column}` can be read")
    return max(_complain(options.file, complaints), int(bool(unscorable or underpaid)))


def _judge(text: str) -> tuple[BuiltReward, float]:
    """The reward of a spec that reads golds, inside a gate or a sum too, and its full pay."""
    built = build_rewards([_spec(text)])
    for reward in leaves(built):
        has_gold = reward.declared.gold_column is not None and bool(reward.declared.columns_read)
        if reward.kind == "correctness" and has_gold and reward.highest_pay is not None:
            return reward, reward.highest_pay
    raise CommandError(f"check needs a correctness reward, and `{built[0].name}` compares with no gold")


def _right_completion(reward: Any, answer: str | None) -> str:
    """A completion that states `answer` wherever `reward` may look for it."""
    thinking, tag = f"<{reward.tags[0]}>\n…\n</{reward.tags[0]}>\n", reward.tags[1]
    if reward.extract == "whole":
        return f"{thinking}{answer}"
    return f"{thinking}\\boxed{{{answer}}}\nThe answer is {answer}.\nA: {answer}\n#### {answer}\n<{tag}>\n{answer}\n</{tag}>"


def _convert_internlm2(options: argparse.Namespace) -> int:
    try:
        from grpo_rewards.internlm2 import CheckpointError, convert
    except ImportError as error:
        needs = error.name if isinstance(error, ModuleNotFoundError) else f"another version ({error})"
        raise CommandError(f"convert-internlm2 needs {needs}: pip install 'grpo-rewards[models]'") from error
    try:
        folder = convert(options.source, options.target, allow_pickle=options.allow_pickle)
    except (CheckpointError, OSError) as error:
        raise CommandError(str(error)) from error
    say(f"wrote {folder}: transformers, vLLM and TRL's reward_funcs load it as it is")
    return 0


def _read(path: Path, needed: str, optional: str = "") -> tuple[Rows, list[str]]:
    """Return the usable rows of a file, and a complaint about each other one by its number.

    Every row needs the column `needed`, and `optional` too as soon as one row has it.
    """
    if not path.is_file():
        raise CommandError(f"{path} is not a file")
    read = _parquet_rows if path.suffix == ".parquet" else _jsonl_rows
    try:
        numbered = list(read(path))
    except OSError as error:
        raise CommandError(f"{path} can't be read ({error.strerror or error})") from error
    also = any(isinstance(row, dict) and optional in row for _, row in numbered)
    rows: Rows = []
    complaints = []
    for number, row in numbered:
        problem = row if isinstance(row, str) else _problem(row, (needed, optional) if also else (needed,))
        if problem:
            complaints.append(f"row {number}: {problem}")
        else:
            rows.append((number, row))
    if not rows:
        hint = f" ({complaints[0]})" if complaints else ""
        raise CommandError(f"{path} has no row that can be used{hint}")
    return rows, complaints


def _problem(row: dict[str, Any], needed: Sequence[str]) -> str | None:
    missing = [column for column in needed if column not in row]
    if missing:
        return f"no `{missing[0]}`; it has {', '.join(f'`{key}`' for key in row) or 'nothing'}"
    if "completion" in needed and not isinstance(row["completion"], (str, list)):
        return "`completion` is neither a string nor a list of messages"
    return None


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES), b""), 1):
            if len(line) == LINE_BYTES:
                raise CommandError(f"{path} has a line of {LINE_BYTES:,} bytes or more: correct the file")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield number, row if isinstance(row, dict) else f"a {type(row).__name__}, not an object"
            except (ValueError, RecursionError) as error:
                yield number, f"not JSON ({error})"  # a string stands for its complaint


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    parquet = _pyarrow("pyarrow.parquet")
    try:
        batches = parquet.ParquetFile(path).iter_batches()
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} is not a Parquet file, or is damaged ({' '.join(str(error).split())})") from error


def _write(path: Path, rows: Sequence[dict]) -> None:
    parquet = path.suffix == ".parquet" and _pyarrow("pyarrow.parquet")
    try:
        with replacing(path.resolve()) as part:
            if parquet:
                parquet.write_table(_pyarrow("pyarrow").Table.from_pylist(list(rows)), part)
            else:
                part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:  # a full disk; a date in JSON; a column of two types in Parquet
        raise CommandError(f"--out {path} can't be written ({' '.join(str(error).split())})") from error


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CommandError("Parquet files need pyarrow: pip install 'grpo-rewards[parquet]'") from error


def _complain(path: Path, complaints: Sequence[str]) -> int:
    for line in _shortened(complaints):
        say_error(f"{path}: {line}")
    return int(bool(complaints))


def _shortened(lines: Sequence[str], most: int = 20) -> list[str]:
    more = [f"… and {len(lines) - most} more"] if len(lines) > most else []
    return [*lines[:most], *more]


def _chunks(rows: Rows, size: int, label: str) -> Iterator[tuple[list[int], list[dict[str, Any]]]]:
    """Yield the numbers and the rows of `size` rows at a time, and draw a bar on a terminal."""
    starts = range(0, len(rows), size)
    for done, start in enumerate(starts, 1):
        chunk = rows[start : start + size]
        yield [number for number, _ in chunk], [row for _, row in chunk]
        if sys.stderr.isatty():
            bar = "█" * (30 * done // len(starts))
            end = "\n" if done == len(starts) else ""
            sys.stderr.write(f"\r{label} {bar:30} {done / len(starts):4.0%}{end}")
            sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
