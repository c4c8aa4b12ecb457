"""Shares and means of an evaluation with 95 % intervals, and paired differences of two evaluations.

The sampling unit is the problem: k samples of one problem are alike, so they carry less information than k problems.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean, stdev
from typing import Any

import pandas as pd

from grpo_recipes.evaluation import accuracy
from grpo_recipes.evaluation.accuracy import PASSED, PAY
from grpo_recipes.runs.files import MAX_LABELS
from grpo_rewards.math.answers import answer_number
from grpo_rewards.terminal import Cell, Part, Table

LABEL_CHARS = 60
"""Largest number of characters of a label."""
LABEL_PROBLEMS = 5
"""Smallest number of problems per label for which golds count as labels."""
NO_LABEL = "no label"
"""Name of the column for answers that are no label."""

CONFIDENCE = 0.95
_LABEL_KEYS = ("names", "problems", "answers", "accuracy")
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True)
class Estimate:
    """Share, mean or difference, with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def from_dict(cls, numbers: Mapping[str, float]) -> Estimate:
        """Return the estimate that `as_dict` wrote. Other keys are ignored."""
        return cls(numbers["value"], numbers["low"], numbers["high"])

    def as_dict(self) -> dict[str, float]:
        """Return the three numbers by name, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_share(shares: Sequence[float]) -> Estimate:
    """Return the mean of one share in [0, 1] per problem, with the score interval clustered by problem.

    The score interval (Wilson 1927, "Probable inference, the law of succession, and statistical inference") holds the
    values p for which the observed share lies within z = 1.96 standard errors of p, where the standard error is that of
    p itself. It keeps its coverage for small n and near 0 and 1. The number of trials n is the effective one,
    n_eff = p (1 - p) / v, where v is the variance of this mean (sum of squared deviations / n^2). With one sample per
    problem n_eff is n, and the interval is Wilson's. If all problems have the same share, their spread is unknown, and
    n_eff is n.

    Raises:
        ValueError: There is no problem.
    """
    value = fmean(shares)
    variance = math.fsum((share - value) ** 2 for share in shares) / len(shares) ** 2
    trials = value * (1 - value) / variance if variance > 1e-15 else float(len(shares))
    return Estimate(value, *_score_interval(min(1.0, max(0.0, value)), trials))


def mean_value(values: Sequence[float]) -> Estimate:
    """Return the mean of one number of any range per problem, with Student's interval.

    Raises:
        ValueError: There are fewer than two problems, so their spread is unknown.
    """
    value, error = fmean(values), stdev(values) / math.sqrt(len(values))
    half_width = _student_quantile(len(values) - 1) * error
    return Estimate(value, value - half_width, value + half_width)


def paired_mean(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the mean of second - first over the same problems, of any range, with Student's interval.

    Raises:
        ValueError: There are fewer than two problems, or the lengths differ.
    """
    return mean_value([after - before for before, after in zip(first, second, strict=True)])


def _student_quantile(freedom: int) -> float:
    """Return the quantile of Student's distribution for a two-sided 95 % interval.

    Hill's expansion of the normal quantile (1970, "Algorithm 396: Student's t-quantiles") is within 0.1 % from 4
    degrees of freedom on. For 1 and 2 degrees the closed form is exact.
    """
    tail = 1 - CONFIDENCE
    if freedom == 1:
        return 1 / math.tan(tail * math.pi / 2)
    if freedom == 2:
        return math.sqrt(2 / (tail * (2 - tail)) - 2)
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
        (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / 92160,
    )
    return Z + sum(term / freedom ** (power + 1) for power, term in enumerate(terms))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that k of `samples` completions, drawn without replacement, include a right one.

    The value 1 - C(n-c, k) / C(n, k) is an unbiased estimate for k fresh completions (Chen et al. 2021, arXiv
    2107.03374, equation 1).

    Raises:
        ValueError: Not 1 <= k <= samples, or not 0 <= right <= samples.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"no pass@{k} from {right} right of {samples} samples")
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Return the mean of second - first over the same problems, shares in [0, 1], with its 95 % interval.

    The interval is that of Agresti and Min (2005, "Simple improved confidence intervals for comparing matched
    proportions"): half a problem is added to each of the four outcomes. Without this correction the interval would
    vanish if no verdict differs, and miss the true value for few problems.

    Raises:
        ValueError: There is no problem, or the lengths differ.
    """
    differences = [after - before for before, after in zip(first, second, strict=True)]
    value = fmean(differences)
    n = len(differences) + 2
    centre = math.fsum(differences) / n
    variance = ((math.fsum(value**2 for value in differences) + 1) / n - centre**2) / n
    half_width = Z * math.sqrt(variance)
    return Estimate(value, max(-1.0, centre - half_width), min(1.0, centre + half_width))


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the exact two-sided p-value of McNemar's test.

    Args:
        only_first: Number of problems that only the first policy solved.
        only_second: Number of problems that only the second policy solved.
    """
    discordant, smaller = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(discordant, count) for count in range(smaller + 1)) / 2**discordant
    return min(1.0, 2 * tail)


def _score_interval(share: float, n: float) -> tuple[float, float]:
    """Return the ends of Wilson's interval for a share of `n` trials."""
    z2 = Z**2
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half_width = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # At 0 of n and n of n, rounding must not move an end past the share itself.
    return min(share, max(0.0, centre - half_width)), max(share, min(1.0, centre + half_width))


# Tables of completions


def summarise(table: pd.DataFrame) -> dict[str, Any]:
    """Return the shares and means of an evaluation from its completions (columns of `completions.parquet`).

    Returns:
        `strict` and `lenient`, mean shares over problems; `pass_at`, the probability that one of k completions is
        strictly right; `majority`, the share of problems whose most frequent answer is right; `labels`, the confusion
        matrix if the golds are labels. These need golds. Under `rewards`, for each reward of the recipe: `mean` score,
        share of completions that `passed` with its own `pass_at` and `majority`, and number of `unscored` completions.
        Under `tools`, if the recipe has tools: share of completions that `called` one, mean number of `calls`, and the
        results of the completions `with_call` and `without_call`, over the problems that have such completions.
        Each estimate has its 95 % interval.
    """
    groups = [rows for _, rows in table.groupby("problem", sort=True)]
    summary: dict[str, Any] = {}
    if "strict" in table:
        for name in ("strict", "lenient"):
            summary[name] = mean_share([rows[name].mean() for rows in groups]).as_dict()
        summary |= _several_samples(groups, "strict", "lenient")
        if (labels := confusion(table)) is not None:
            summary["labels"] = labels
    rewards: dict[str, Any] = {}
    for name in reward_names(table):
        passed = PASSED.format(name)
        entry: dict[str, Any] = {"unscored": int(table[PAY.format(name)].isna().sum()), **_mean_score(groups, name)}
        if passed in table:
            entry["passed"] = mean_share([rows[passed].mean() for rows in groups]).as_dict()
            entry |= _several_samples(groups, passed, passed)
        rewards[name] = entry
    if rewards:
        summary["rewards"] = rewards
    if "calls" in table:
        summary["tools"] = _by_call(table, groups)
    return summary


def _mean_score(groups: Sequence[pd.DataFrame], reward: str) -> dict[str, Any]:
    """Return the mean score of a reward over problems, or nothing if fewer than two problems have one."""
    means = [float(rows[PAY.format(reward)].mean()) for rows in groups]
    known = [mean for mean in means if not math.isnan(mean)]
    return {"mean": mean_value(known).as_dict()} if len(known) > 1 else {}


def _by_call(table: pd.DataFrame, groups: Sequence[pd.DataFrame]) -> dict[str, Any]:
    """Return how often tools were called, and the results of the completions that called one, and of the others."""
    called = [float((rows["calls"] > 0).mean()) for rows in groups]
    summary: dict[str, Any] = {"called": mean_share(called).as_dict(), "calls": float(table["calls"].mean())}
    for name, chosen in (("with_call", table["calls"] > 0), ("without_call", table["calls"] == 0)):
        parts = [rows for _, rows in table[chosen].groupby("problem", sort=True)]
        if not parts:
            continue
        entry: dict[str, Any] = {"problems": len(parts)}
        for verdict in ("strict", "lenient"):
            if verdict in table:
                entry[verdict] = mean_share([rows[verdict].mean() for rows in parts]).as_dict()
        rewards = {}
        for reward in reward_names(table):
            rewards[reward] = _mean_score(parts, reward)
            if (passed := PASSED.format(reward)) in table:
                rewards[reward]["passed"] = mean_share([rows[passed].mean() for rows in parts]).as_dict()
        summary[name] = {**entry, **({"rewards": rewards} if rewards else {})}
    return summary


def _several_samples(groups: Sequence[pd.DataFrame], column: str, vote_column: str) -> dict[str, Any]:
    """Return pass@k for k = 1, 2, 4, ... and all samples, and the majority vote, if problems have several samples."""
    samples = len(groups[0])
    if samples == 1:
        return {}
    result: dict[str, Any] = {"pass_at": {}}
    for k in sorted({2**power for power in range(samples.bit_length())} | {samples}):
        chances = [pass_at_k(samples, int(rows[column].sum()), k) for rows in groups]
        result["pass_at"][str(k)] = mean_share(chances).as_dict()
    if "answer" in groups[0]:
        votes = [majority(rows["answer"], rows[vote_column]) for rows in groups]
        result["majority"] = mean_share([float(vote) for vote in votes]).as_dict()
    return result


def majority(answers: Iterable[Any], right: Iterable[Any]) -> bool:
    """Return True if the most frequent answer is right, the first one winning a tie.

    Numbers are equal in any form. Completions without an answer do not vote.
    """
    stated = []
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None and not pd.isna(answer):
            stated.append((_comparable(answer), bool(is_right)))
    if not stated:
        return False
    winner = Counter(answer for answer, _ in stated).most_common(1)[0][0]
    return any(is_right for answer, is_right in stated if answer == winner)


def _comparable(answer: str) -> Any:
    """Return a key that is equal for the same number in any form, and for the same text in any case."""
    number = answer_number(answer)
    return answer.strip().casefold() if number is None else number


def confusion(table: pd.DataFrame) -> dict[str, Any] | None:
    """Return a confusion matrix if the golds are labels: from 2 to `MAX_LABELS` texts, each of several problems.

    The golds are no labels if a text is longer than `LABEL_CHARS`, or if there are fewer than `LABEL_PROBLEMS` problems
    per label. An answer names the label that it equals, where numbers are equal in any form and letters in either case.
    If it equals none, as a letter where the golds are numbers of choices, it names the label for which it was right.

    Returns:
        `names` of the labels in order, number of `problems` of each, number of completions by gold and answer in
        `answers` (the last column counts answers that are no label, and missing ones), and `accuracy`, the share of
        the completions of each label that name it. None if the golds are no labels.
    """
    golds = {_comparable(gold): gold for gold in table["gold"].drop_duplicates()[::-1]}
    problems = table["problem"].nunique()
    if not 2 <= len(golds) <= MAX_LABELS or problems < LABEL_PROBLEMS * len(golds):
        return None
    if any(len(gold) > LABEL_CHARS for gold in golds.values()):
        return None
    labels = sorted(golds, key=lambda label: (isinstance(label, str), label))
    place = {label: number for number, label in enumerate(labels)}
    gold_places = [place[_comparable(gold)] for gold in table["gold"]]
    answer_places = _answer_places(table, place, gold_places)
    answers = [[0] * (len(labels) + 1) for _ in labels]
    for gold, answer in zip(gold_places, answer_places, strict=True):
        answers[gold][answer] += 1
    named = table[["problem"]].assign(label=gold_places)
    named["right"] = named["label"] == answer_places
    shares = named.groupby(["label", "problem"])["right"].mean().groupby("label").agg(list)
    return {
        "names": [golds[label] for label in labels],
        "problems": [len(shares[number]) for number in range(len(labels))],
        "answers": answers,
        "accuracy": [mean_share(shares[number]).as_dict() for number in range(len(labels))],
    }


def _answer_places(table: pd.DataFrame, place: Mapping[Any, int], gold_places: Sequence[int]) -> list[int]:
    """Return the number of the label that each answer names, or the number of labels if it names none."""
    keys = [None if pd.isna(answer) else _comparable(answer) for answer in table["answer"]]
    right_for: dict[Any, set[int]] = {}
    for key, gold, is_right in zip(keys, gold_places, table["lenient"], strict=True):
        if is_right and key is not None and key not in place:
            right_for.setdefault(key, set()).add(gold)
    places = {**{key: min(golds) for key, golds in right_for.items() if len(golds) == 1}, **place}
    return [places.get(key, len(place)) for key in keys]


def reward_names(table: pd.DataFrame) -> list[str]:
    """Return the names of the rewards that a table has scores of."""
    prefix = PAY.format("")
    return [name.removeprefix(prefix) for name in table.columns if name.startswith(prefix)]


def compare_tables(first: pd.DataFrame, second: pd.DataFrame) -> dict[str, Any]:
    """Return the paired differences second - first of two tables on the same problems, with both values.

    Args:
        first: Completions of one evaluation.
        second: Completions of the other one. Rewards that are not in both tables are skipped.

    Returns:
        `rewards`, by name; and, with golds, `strict`, `lenient` and `mcnemar`, the exact test of the first completions'
        verdicts, or of majority votes if there are several samples.
    """
    rewards: dict[str, Any] = {}
    for name in reward_names(first):
        pay, passed = PAY.format(name), PASSED.format(name)
        if pay not in second:
            continue
        means = pd.concat([table.groupby("problem")[pay].mean() for table in (first, second)], axis=1).dropna()
        if len(means) < 2:
            continue
        before, after = means.iloc[:, 0].tolist(), means.iloc[:, 1].tolist()
        rewards[name] = {"mean": _pair(mean_value(before), mean_value(after), paired_mean(before, after))}
        if passed in first and passed in second:
            rewards[name]["passed"] = _compared_shares(first, second, passed)
    result: dict[str, Any] = {"rewards": rewards} if rewards else {}
    if "strict" in first and "strict" in second:
        for name in ("strict", "lenient"):
            result[name] = _compared_shares(first, second, name)
        only_first, only_second = 0, 0
        for vote, other in zip(_votes(first), _votes(second), strict=True):
            only_first += vote and not other
            only_second += other and not vote
        result["mcnemar"] = {
            "only_first": only_first,
            "only_second": only_second,
            "p": mcnemar(only_first, only_second),
        }
    return result


def _compared_shares(first: pd.DataFrame, second: pd.DataFrame, column: str) -> dict[str, Any]:
    before, after = (table.groupby("problem")[column].mean().tolist() for table in (first, second))
    return _pair(mean_share(before), mean_share(after), paired_difference(before, after))


def _pair(first: Estimate, second: Estimate, difference: Estimate) -> dict[str, Any]:
    return {"first": first.as_dict(), "second": second.as_dict(), "difference": difference.as_dict()}


def _votes(table: pd.DataFrame) -> list[bool]:
    """Return the verdict on each problem: strictly right, or by majority vote if there are several samples."""
    votes = []
    for _, rows in table.groupby("problem", sort=True):
        is_single = len(rows) == 1
        votes.append(bool(rows["strict"].iloc[0]) if is_single else majority(rows["answer"], rows["lenient"]))
    return votes


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
    if labels := summary.get("labels"):
        parts += ["", *_label_tables(labels)]
    if rewards := summary.get("rewards"):
        parts += ["", _reward_table(rewards)]
    if tools := summary.get("tools"):
        parts += ["", *_tool_table(tools)]
    return parts


def _tool_table(tools: Mapping[str, Any]) -> list[Part]:
    """Return a table of the results of the completions that called a tool, beside those that called none."""
    called, ways = Estimate.from_dict(tools["called"]), ("with_call", "without_call")
    cells: dict[str, dict[str, object]] = {}
    for way in ways:
        entry = tools.get(way, {})
        measured = {verdict: entry[verdict] for verdict in ("strict", "lenient") if verdict in entry}
        for name, values in entry.get("rewards", {}).items():
            measured |= {f"{name}, {measure}": value for measure, value in values.items()}
        for name, value in measured.items():
            cells.setdefault(name, {})[way] = Estimate.from_dict(value)
    rows = [(name, *(found.get(way, "") for way in ways)) for name, found in cells.items()]
    head = f"  {called} of the completions call a tool, {tools['calls']:.2f} calls per completion"
    return [Table(rows, ("", "with a call", "without")), Cell(head, "dim")]


def _label_tables(labels: Mapping[str, Any]) -> list[Part]:
    """Return the confusion matrix, and the accuracy of each label."""
    names = labels["names"]
    counts, shares = [], []
    for name, problems, answers, share in zip(*(labels[key] for key in _LABEL_KEYS), strict=True):
        counts.append((name, *answers))
        shares.append((name, problems, Estimate.from_dict(share)))
    numbers = frozenset(range(1, len(names) + 2))
    return [
        Table(counts, ("gold", *names, NO_LABEL), numbers),
        Cell("  rows: label of the gold; columns: label of the answer, in completions", "dim"),
        "",
        Table(shares, ("label", "problems", "accuracy"), frozenset({1})),
    ]


def _reward_table(rewards: Mapping[str, Any]) -> Table:
    """Return a table of the rewards, without the columns that no reward has."""
    rows = []
    for name, entry in rewards.items():
        shown = {key: str(Estimate.from_dict(entry[key])) for key in ("mean", "passed", "majority") if key in entry}
        passes = [f"@{k} {Estimate.from_dict(share)}" for k, share in entry.get("pass_at", {}).items()]
        cells = {
            "reward": name,
            "mean": shown.get("mean", "fewer than two problems scored"),
            "passed": shown.get("passed", ""),
            "majority": shown.get("majority", ""),
            "pass": ", ".join(passes),
            "not scored": str(entry["unscored"] or ""),
        }
        rows.append(cells)
    columns = [column for column in rows[0] if any(cells[column] for cells in rows)]
    return Table([tuple(cells[column] for column in columns) for cells in rows], tuple(columns))


def describe_comparison(result: Mapping[str, Any]) -> list[Part]:
    """Return two evaluations side by side for the terminal, with paired differences and McNemar's test."""
    compared = {name: result[name] for name in ("strict", "lenient") if name in result}
    for name, entry in result.get("rewards", {}).items():
        compared |= {f"{name}, {measure}": values for measure, values in entry.items()}
    rows: list[tuple[object, ...]] = []
    for name, values in compared.items():
        first, second, difference = (Estimate.from_dict(values[key]) for key in ("first", "second", "difference"))
        style = ""
        if difference.low > 0:
            style = "good"
        elif difference.high < 0:
            style = "bad"
        rows.append((name, first, second, Cell(difference, style)))
    parts: list[Part] = [
        Cell(f"{result['problems']} problems, the same for both; 95 % intervals", "head"),
        *(f"  warning: {warning}" for warning in result["warnings"]),
        Table(rows, ("", "A", "B", "B - A")),
    ]
    if "mcnemar" in result:
        test = result["mcnemar"]
        alone = f"A alone right on {test['only_first']}, B alone on {test['only_second']}"
        parts.append(f"  McNemar: {alone}; exact p = {test['p']:.3g}")
    return parts
