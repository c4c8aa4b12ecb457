"""Summary of an evaluation, and difference of two, from their completions (columns of `completions.parquet`).

`compare` reads both from the folders of two finished evaluations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_recipes.evaluation import accuracy, estimates
from grpo_recipes.evaluation.accuracy import PASSED, PAY
from grpo_recipes.evaluation.estimates import Difference, Estimate, p_text
from grpo_recipes.runs import files
from grpo_rewards.errors import UserError
from grpo_rewards.files import relative_to
from grpo_rewards.math.numbers import answer_number
from grpo_rewards.registry import attribute_name
from grpo_rewards.terminal import Cell, Part, Table

Pays = Mapping[str, float | None]
"""Largest score of one completion by the name of the reward, or None if it is not known."""


def summarise(table: pd.DataFrame, highest: Pays | None = None) -> dict[str, Any]:
    """Return the shares and means of an evaluation from its completions (columns of `completions.parquet`).

    Args:
        table: Completions.
        highest: Largest scores of the rewards, which bound the intervals of their means.

    Returns:
        `strict` and `lenient`, mean shares over problems; `pass_at`, the probability that one of k completions is
        strictly right; `majority`, the share of problems whose most frequent answer is right. These need golds.
        Under `rewards`, for each reward of the recipe: `mean` score, share of completions that `passed` with its own
        `pass_at` and `majority`, `highest_pay` if it is known, and the number of `unscored` completions, which are in
        none of these.
        Under `tools`, if the recipe has tools: share of completions that `called` one, mean number of `calls`, and the
        results of the completions `with_call` and `without_call`, over the problems that have such completions.
        Each estimate has its 95 % interval. Rows with the same prompt count as one problem.
    """
    highest = highest or {}
    summary = _results(table, highest)
    if "strict" in table:
        summary |= _several_samples(table, "strict", "lenient")
    for name, entry in summary.get("rewards", {}).items():
        scored = _scored(table, name)
        entry["unscored"] = len(table) - len(scored)
        if highest.get(name) is not None:
            entry["highest_pay"] = highest[name]
        if "passed" in entry:
            entry |= _several_samples(scored, PASSED.format(name), PASSED.format(name))
    if "calls" in table:
        summary["tools"] = _by_call(table, highest)
    return summary


def _results(table: pd.DataFrame, highest: Pays) -> dict[str, Any]:
    """Return the accuracy of some completions, and the mean and the share of passes of each reward."""
    results: dict[str, Any] = {
        name: _mean_of_shares(table, name).as_dict() for name in ("strict", "lenient") if name in table
    }
    rewards: dict[str, Any] = {}
    for name in reward_names(table):
        passed, scored = PASSED.format(name), _scored(table, name)
        rewards[name], clusters = {}, _clusters(scored)
        if len(set(clusters)) > 1:
            values = _by_problem(scored, PAY.format(name)).tolist()
            rewards[name]["mean"] = estimates.mean_score(values, highest.get(name), clusters).as_dict()
        if passed in table and len(scored):
            rewards[name]["passed"] = _mean_of_shares(scored, passed).as_dict()
    return {**results, "rewards": rewards} if rewards else results


def _scored(table: pd.DataFrame, reward: str) -> pd.DataFrame:
    """Return the completions that a reward scored. A missing score does not mean that the completion is wrong."""
    return table[table[PAY.format(reward)].notna()]


def _by_problem(table: pd.DataFrame, column: str) -> pd.Series:
    """Return the mean of a column over the completions of each problem, by problem."""
    return table.groupby("problem")[column].mean().astype(float)


def _clusters(table: pd.DataFrame) -> list[Hashable]:
    """Return the label of each problem, by problem. Problems with one label are copies of one another.

    Two rows with the same prompt are copies. A prompt need not name the state of an environment. So in a table with
    transcripts the golds of copies are equal too, and rows without golds are different problems.
    """
    keys = ["prompt"] if "transcript" not in table else ["prompt", "gold"]
    groups = table.groupby("problem")
    if not all(key in table for key in keys):
        return list(groups.size().index)
    return list(groups[keys].first().itertuples(index=False, name=None))


def _common_clusters(first: pd.DataFrame, second: pd.DataFrame) -> list[Hashable]:
    """Return the labels of the problems of two tables, from the one with transcripts if only one has them."""
    return _clusters(second if "transcript" in second else first)


def _mean_of_shares(table: pd.DataFrame, column: str) -> Estimate:
    """Return the mean over problems of the share of completions with a true value in a column."""
    return estimates.mean_share(_by_problem(table, column).tolist(), len(table), _clusters(table))


def _by_call(table: pd.DataFrame, highest: Pays) -> dict[str, Any]:
    """Return how often tools were called, and the results of the completions that called one, and of the others."""
    has_called = table["calls"] > 0
    called = _mean_of_shares(table.assign(called=has_called), "called")
    summary: dict[str, Any] = {"called": called.as_dict(), "calls": float(table["calls"].mean())}
    for name, chosen in (("with_call", table[has_called]), ("without_call", table[~has_called])):
        if len(chosen):
            summary[name] = {"problems": chosen["problem"].nunique(), **_results(chosen, highest)}
    return summary


def _several_samples(table: pd.DataFrame, column: str, vote_column: str) -> dict[str, Any]:
    """Return pass@k for k = 1, 2, 4, ... and all samples, and the majority vote, if problems have several samples.

    A problem with fewer than k completions, because a reward could not score some, is not in the mean of pass@k.
    """
    groups = [rows for _, rows in table.groupby("problem")]
    samples = max(map(len, groups))
    if samples == 1:
        return {}
    result: dict[str, Any] = {"pass_at": {}}
    clusters = _clusters(table)
    for k in sorted({2**power for power in range(samples.bit_length())} | {samples}):
        enough = [(rows, label) for rows, label in zip(groups, clusters, strict=True) if len(rows) >= k]
        chances = [estimates.pass_at_k(len(rows), int(rows[column].sum()), k) for rows, _ in enough]
        # The completions of a problem are len(rows) / k separate draws of k.
        draws = sum(len(rows) for rows, _ in enough) / k
        result["pass_at"][str(k)] = estimates.mean_share(chances, draws, [label for _, label in enough]).as_dict()
    if "answer" in table:
        votes = [float(majority(rows["answer"], rows[vote_column])) for rows in groups]
        result["majority"] = estimates.mean_share(votes, clusters=clusters).as_dict()
    return result


def majority(answers: Iterable[Any], right: Iterable[Any]) -> bool:
    """Return True if the most frequent answer is right, the first one winning a tie.

    Numbers are equal in any form. Completions without an answer do not vote.
    """
    stated = []
    for answer, is_right in zip(answers, right, strict=True):
        if not pd.isna(answer):
            number = answer_number(answer)
            stated.append((answer.strip().casefold() if number is None else number, bool(is_right)))
    if not stated:
        return False
    winner = Counter(answer for answer, _ in stated).most_common(1)[0][0]
    return any(is_right for answer, is_right in stated if answer == winner)


def reward_names(table: pd.DataFrame) -> list[str]:
    """Return the names of the rewards that a table has scores of."""
    prefix = PAY.format("")
    return [name.removeprefix(prefix) for name in table.columns if name.startswith(prefix)]


def compare_tables(first: pd.DataFrame, second: pd.DataFrame, highest: Pays | None = None) -> dict[str, Any]:
    """Return the paired differences second - first of two tables on the same problems, with both values.

    Both sides are shares of completions, so that their numbers of samples may differ.

    Args:
        first: Completions of one evaluation.
        second: Completions of the other one. Rewards that are not in both tables are skipped.
        highest: Largest scores of the rewards, as in `summarise`.

    Returns:
        `rewards`, by name; and, with golds, `strict` and `lenient`. Each has the values of `first` and `second` and
        their `difference` with its p-value. `mcnemar`, with golds, one sample per problem on both sides and no prompt
        twice, has the numbers of problems that one side alone solved strictly, and the p-value.
    """
    rewards: dict[str, Any] = {}
    for name in reward_names(first):
        pay, passed = PAY.format(name), PASSED.format(name)
        if pay not in second:
            continue
        one, other = _scored(first, name), _scored(second, name)
        tables = one[one["problem"].isin(other["problem"])], other[other["problem"].isin(one["problem"])]
        clusters = _common_clusters(*tables)
        if len(set(clusters)) < 2:
            continue
        before, after = (_by_problem(table, pay).tolist() for table in tables)
        most = (highest or {}).get(name)
        mean = estimates.mean_score(before, most, clusters), estimates.mean_score(after, most, clusters)
        rewards[name] = {"mean": _pair(*mean, estimates.paired_mean(before, after, clusters, most))}
        if passed in first and passed in second:
            rewards[name]["passed"] = _compared_shares(*tables, passed)
    result: dict[str, Any] = {"rewards": rewards} if rewards else {}
    if "strict" in first and "strict" in second:
        for name in ("strict", "lenient"):
            result[name] = _compared_shares(first, second, name)
        is_single = all(table["problem"].is_unique for table in (first, second))
        clusters = _common_clusters(first, second)
        if is_single and len(set(clusters)) == len(clusters):
            before, after = (_by_problem(table, "strict") for table in (first, second))
            only_first, only_second = int((before > after).sum()), int((after > before).sum())
            p = estimates.mcnemar(only_first, only_second)
            result["mcnemar"] = {"only_first": only_first, "only_second": only_second, "p": p}
    return result


def _compared_shares(first: pd.DataFrame, second: pd.DataFrame, column: str) -> dict[str, Any]:
    before, after = (_by_problem(table, column).tolist() for table in (first, second))
    difference = estimates.paired_difference(before, after, _common_clusters(first, second))
    return _pair(_mean_of_shares(first, column), _mean_of_shares(second, column), difference)


def _pair(first: Estimate, second: Estimate, difference: Difference) -> dict[str, Any]:
    return {"first": first.as_dict(), "second": second.as_dict(), "difference": difference.as_dict()}


# Comparison of two folders


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Return the paired differences second - first of two finished evaluations of the same problems.

    The differences are of the problems' shares of right completions, so that the numbers of samples may differ. Rewards
    are compared if both recipes have them with equal specs.

    Raises:
        UserError: A folder has no finished evaluation, the problems or the rewards of strict accuracy differ, or a file
            is damaged.
    """
    records = []
    for folder in (first, second):
        try:
            records.append(files.read_object(folder / files.RESULT, files.EVALUATION))
        except FileNotFoundError as error:
            raise _no_evaluation(folder) from error
    if records[0]["settings"].get("strict") != records[1]["settings"].get("strict"):
        problem = "they define strict accuracy differently (`settings.strict` of their evaluation.json)"
        raise UserError(f"{first} and {second}", problem, "evaluate both with the same --recipe")
    shared = [spec for spec in records[0].get("paid_by", []) if spec in records[1].get("paid_by", [])]
    tables = [_read_completions(folder, shared) for folder in (first, second)]
    prompts = [table.groupby("problem")["prompt"].first() for table in tables]
    if not prompts[0].equals(prompts[1]):
        problem = "they are not on the same problems"
        raise UserError(f"{first} and {second}", problem, "evaluate both with the same options")
    highest = {name: entry.get("highest_pay") for name, entry in records[0].get("rewards", {}).items()}
    differences = compare_tables(tables[0], tables[1], highest)
    return {"problems": len(prompts[0]), "warnings": _warnings(*records), **differences}


def _warnings(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return a sentence if two evaluations were sampled at different temperatures, or by different engines or versions.

    A difference of greedy and sampled completions is not a difference of two models.
    """
    made = []
    for record in (first, second):
        engine = {"temperature": record["settings"].get("temperature"), "engine": record.get("engine")}
        made.append({**engine, **record.get("made_with", {})})
    differences = []
    for key in {**made[0], **made[1]}:
        texts = ["not recorded" if one.get(key) is None else str(one[key]) for one in made]
        if texts[0] != texts[1]:
            differences.append(f"{key} {texts[0]} and {texts[1]}")
    if not differences:
        return []
    return [f"A and B were not generated alike ({'; '.join(differences)}), which may explain a part of the difference"]


def _no_evaluation(folder: Path) -> UserError:
    """Return the error about a folder without a finished evaluation, which may be the folder of a run."""
    if not folder.exists():
        return UserError(folder, f"there is no such folder{relative_to(folder)}", "correct the path")
    if inside := sorted(folder.glob(f"evaluations/*/{files.RESULT}")):
        return UserError(folder, "it is a run", f"name one of its evaluations, such as {inside[0].parent}")
    if (folder / files.RECORD).is_file():
        return UserError(folder, "it is a run without evaluations", f"run `grpo-recipes evaluate {folder}` first")
    return UserError(folder, "it has no finished evaluation", "run `grpo-recipes evaluate` with it as --output")


def _read_completions(folder: Path, specs: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return the completions of an evaluation, with the scores of the rewards that some specs describe."""
    columns: dict[str, files.Condition] = dict(files.EVALUATED)
    for spec in specs:
        name = str(spec.get("alias") or attribute_name(str(spec.get("name"))))
        columns[f"{PAY.format(name)}?"] = files.NUMBERS
        columns[f"{PASSED.format(name)}?"] = files.BOOLEANS
    table = files.read_table(folder / files.RESULT_TABLE, columns, "evaluate anew, into another --output")
    if not len(table):
        raise UserError(folder / files.RESULT_TABLE, "it holds no completions", "evaluate anew")
    return table


# Terminal


def describe(summary: Mapping[str, Any]) -> list[Part]:
    """Return an evaluation for the terminal: a table of its shares, and a table of its rewards."""
    rows = [(name, Estimate.from_dict(summary[name])) for name in ("strict", "lenient") if name in summary]
    rows += [(f"pass@{k}", Estimate.from_dict(share)) for k, share in summary.get("pass_at", {}).items()]
    if "majority" in summary:
        rows.append(("majority", Estimate.from_dict(summary["majority"])))
    settings = summary["settings"]
    samples = settings["samples"]
    head = f"{summary['problems']} problems, {samples} completion{'s' * (samples > 1)} each; 95 % intervals"
    parts: list[Part] = [Cell(head, "head")]
    if rows:
        parts.append(Table(rows, ("accuracy", "share")))
    if sampling := summary.get("sampling"):
        parts.append(Cell(f"  sampling: {', '.join(f'{key} {value}' for key, value in sampling.items())}", "dim"))
    if "strict" in summary:
        parts.append(Cell(f"  strict: {accuracy.describe(settings['strict'])}", "dim"))
    if rewards := summary.get("rewards"):
        parts += ["", _reward_table(rewards)]
    if tools := summary.get("tools"):
        parts += ["", *_tool_table(tools)]
    return parts


def _by_name(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the accuracy and the measures of each reward in some results, under the names that a table shows."""
    found = {name: results[name] for name in ("strict", "lenient") if name in results}
    for name, entry in results.get("rewards", {}).items():
        found |= {f"{name}, {measure}": value for measure, value in entry.items()}
    return found


def _tool_table(tools: Mapping[str, Any]) -> list[Part]:
    """Return a table of the results of the completions that called a tool, next to those that called none."""
    called, ways = Estimate.from_dict(tools["called"]), ("with_call", "without_call")
    cells: dict[str, dict[str, object]] = {}
    for way in ways:
        for name, value in _by_name(tools.get(way, {})).items():
            cells.setdefault(name, {})[way] = Estimate.from_dict(value)
    rows = [(name, *(found.get(way, "") for way in ways)) for name, found in cells.items()]
    head = f"  {called} of the completions call a tool, {tools['calls']:.2f} calls per completion"
    return [Table(rows, ("", "with a call", "without")), Cell(head, "dim")]


def _reward_table(rewards: Mapping[str, Any]) -> Table:
    """Return a table of the rewards, without the columns that no reward has."""
    rows = []
    for name, entry in rewards.items():
        cells = {"reward": name, "mean": "fewer than two problems scored", "passed": "", "majority": ""}
        cells |= {key: str(Estimate.from_dict(entry[key])) for key in ("mean", "passed", "majority") if key in entry}
        passes = [f"@{k} {Estimate.from_dict(share)}" for k, share in entry.get("pass_at", {}).items()]
        cells |= {"pass": ", ".join(passes), "not scored": str(entry["unscored"] or "")}
        rows.append(cells)
    columns = [column for column in rows[0] if any(cells[column] for cells in rows)]
    return Table([[cells[column] for column in columns] for cells in rows], columns)


def describe_comparison(result: Mapping[str, Any]) -> list[Part]:
    """Return two evaluations side by side for the terminal, with paired differences and their p-values."""
    rows: list[tuple[object, ...]] = []
    for name, values in _by_name(result).items():
        first, second, difference = (Estimate.from_dict(values[key]) for key in ("first", "second", "difference"))
        p = values["difference"].get("p")
        cell = Cell(difference, {1: "good", -1: "bad"}.get(difference.sign, ""))
        rows.append((name, first, second, cell, "" if p is None else p_text(p, digits=2)))
    parts: list[Part] = [
        Cell(f"{result['problems']} problems, the same for both; 95 % intervals", "head"),
        *(f"  warning: {warning}" for warning in result["warnings"]),
        Table(rows, ("", "A", "B", "B - A", "p"), frozenset({4})),
    ]
    if "mcnemar" in result:
        test = result["mcnemar"]
        alone = f"A alone right on {test['only_first']}, B alone on {test['only_second']}"
        parts.append(f"  McNemar: {alone}; exact p = {p_text(test['p'], digits=3)}")
    return parts
