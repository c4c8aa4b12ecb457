"""Audit of rewards: the wrong completions that they pay, and breaches of their contract.

The contract: a reward returns one finite number or None for any completion, at any time and among any other rows.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import itertools
import math
import statistics
import types
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from grpo_rewards.audit import wrong_completions
from grpo_rewards.audit.wrong_completions import (
    GOLD_COLUMNS,
    KINDS,
    Case,
    CompletionLayout,
    Question,
    question_of,
    shuffled,
)
from grpo_rewards.built import BuiltReward
from grpo_rewards.completions import listed_scores, score_value
from grpo_rewards.composed import leaves
from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.registry import RewardSpec, build_rewards

# --- Calls and their contract ---

CHECKS = ("raises", "count", "finite", "none", "columns", "deterministic", "other rows", "order", "arguments", "prints")
"""Names of the checks."""


@dataclass(frozen=True)
class Failure:
    """Failure of a reward on a completion.

    Attributes:
        check: name of the contract check that it breaks: `raises`, `count` or `finite`.
        reason: clause that describes it.
    """

    check: str
    reason: str


PayOrFailure = float | None | Failure
Item = tuple[Question, str]
"""Question and completion."""


@dataclass
class Caller:
    """Reward that is called with questions and texts.

    Attributes:
        reward: reward to call.
        columns: names of the columns that every call passes.
        shape: shape of prompts and completions: text or messages.
        reduced: names of columns that hold the right answer alone, as a preset leaves them.
        known: outcome of each completion that was scored.
        printed: first text that the reward printed.
    """

    reward: BuiltReward
    columns: Sequence[str]
    shape: str
    reduced: Sequence[str] = ()
    known: dict[Item, PayOrFailure] = field(default_factory=dict)
    printed: str = ""

    def scores(self, items: Sequence[Item]) -> list[PayOrFailure]:
        """Return the outcome of each completion. One that was seen before is not scored again."""
        new = list(dict.fromkeys(item for item in items if item not in self.known))
        for start in range(0, len(new), 128):
            batch = new[start : start + 128]
            outcomes = self.call(batch)
            if all(isinstance(outcome, Failure) for outcome in outcomes):
                single = [self.call([item])[0] for item in batch]
                # A failure that no completion causes alone is one of the whole batch.
                outcomes = single if any(isinstance(outcome, Failure) for outcome in single) else outcomes
            self.known.update(zip(batch, outcomes, strict=True))
        return [self.known[item] for item in items]

    def batch(self, items: Sequence[Item]) -> dict[str, Any]:
        """Return everything that a trainer passes."""
        batch: dict[str, Any] = {}
        for name in self.columns:
            batch[name] = [question.columns.get(name) for question, _ in items]
        batch.update({name: [question.gold for question, _ in items] for name in self.reduced})
        batch["prompts"] = [self._shaped(question.prompt, "user") for question, _ in items]
        if self.shape == "messages" and all(isinstance(prompt, list) for prompt in batch.get("prompt", ["text"])):
            batch["prompts"] = batch["prompt"]
        batch["completions"] = [self._shaped(text, "assistant") for _, text in items]
        batch["completion_ids"] = [list(range(len(text.split()))) for _, text in items]
        batch["trainer_state"] = types.SimpleNamespace(global_step=0, max_steps=1, epoch=0.0)
        batch["log_extra"] = batch["log_metric"] = lambda *logged: None
        return batch

    def _shaped(self, text: str, role: str) -> Any:
        return text if self.shape == "text" else [{"role": role, "content": text}]

    def call(self, items: Sequence[Item], batch: Mapping[str, Any] | None = None) -> list[PayOrFailure]:
        """Return the outcomes of one call. If the whole call fails, each of them is the failure."""
        batch = self.batch(items) if batch is None else batch
        given = {name: batch[name] for name in batch.keys() - untaken(self.reward, batch)}
        output = io.StringIO()
        try:
            with redirect_stdout(output), redirect_stderr(output):
                scores = self.reward.function(**given)
                scores = asyncio.run(scores) if inspect.iscoroutine(scores) else scores
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {one_line(error) or '(no message)'}"
            return [Failure("raises", shortened(reason, 160))] * len(items)
        finally:
            self.printed = self.printed or output.getvalue()
        try:
            listed = listed_scores(self.reward.name, scores, len(items))
        except ValueError as error:
            return [Failure("count", str(error))] * len(items)
        outcomes: list[PayOrFailure] = []
        for score in listed:
            value = score_value(score)
            is_valid = value is None or math.isfinite(value)
            outcomes.append(value if is_valid else Failure("finite", f"returned {shortened(repr(score))}"))
        return outcomes


def parameters(reward: BuiltReward) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a reward by name; none for a builtin without a signature."""
    try:
        return inspect.signature(reward.unbound).parameters
    except (TypeError, ValueError):
        return {}


def untaken(reward: BuiltReward, batch: Mapping[str, Any]) -> list[str]:
    """Return the names of the arguments that a reward does not take."""
    found = parameters(reward)
    takes_any = not found or any(parameter.kind is parameter.VAR_KEYWORD for parameter in found.values())
    return [] if takes_any else sorted(batch.keys() - found.keys())


_FAILURES = {
    "raises": ("raises", "a completion may be any text: pay it as a wrong one"),
    "count": ("returns not one score per completion", "return a list with one number for each completion"),
    "finite": ("returns scores that are not finite", "return a number, or None for a row that can't be scored"),
    "none": ("returns None for a row that it can score", "pay a wrong answer, because None drops its completion"),
}


@dataclass(frozen=True)
class Broken:
    """Broken contract.

    Attributes:
        reward: name of the reward.
        check: name of the check.
        reason: clause that describes the fault, and the fix.
        is_serious: False if training works nevertheless.
        example: completion that shows it; None if none does.
    """

    reward: str
    check: str
    reason: str
    is_serious: bool = True
    example: str | None = None


def contract(caller: Caller, items: Sequence[Item]) -> list[Broken]:
    """Return the broken contracts of a reward.

    Args:
        caller: reward to call, with the completions that it has scored so far.
        items: right and wrong completions of different questions.
    """
    name = caller.reward.name
    broken = [*_failures(caller), *_differences(caller, items)]
    batch = caller.batch(items)
    if left_out := untaken(caller.reward, batch):
        reason = f"takes no `{left_out[0]}`, and a trainer passes it: add `**columns` to its parameters"
        broken.append(Broken(name, "columns", reason))
    # A reward may change the other arguments.
    before = {key: repr(batch[key]) for key in (*caller.columns, "prompts", "completions", "completion_ids")}
    caller.call(items, batch)
    if changed := [key for key in before if repr(batch[key]) != before[key]]:
        reason = f"changes its argument `{changed[0]}`, which the next reward reads: change a copy"
        broken.append(Broken(name, "arguments", reason))
    if caller.printed:
        reason = f"prints ({shortened(one_line(caller.printed), 60)}): use `log_extra`"
        broken.append(Broken(name, "prints", reason, is_serious=False))
    return broken


def _failures(caller: Caller) -> list[Broken]:
    """Return one broken contract for each way in which a reward failed, with its shortest example."""
    scored = {question for (question, _), outcome in caller.known.items() if isinstance(outcome, float)}
    found: dict[str, list[tuple[str, str]]] = {}
    for (question, text), outcome in caller.known.items():
        if isinstance(outcome, Failure):
            found.setdefault(outcome.check, []).append((text, f" ({outcome.reason})"))
        elif outcome is None and question in scored:
            found.setdefault("none", []).append((text, ""))
    broken = []
    for check, failures in found.items():
        what, fix = _FAILURES[check]
        shortest, reason = min(failures, key=lambda failure: len(failure[0]))
        counted = f"{what} for {len(failures)} of {len(caller.known)} completions{reason}: {fix}"
        broken.append(Broken(caller.reward.name, check, counted, example=shortest))
    return broken


def _differences(caller: Caller, items: Sequence[Item]) -> list[Broken]:
    """Return the broken contracts of a reward whose scores depend on the call."""
    first = caller.call(items)
    name, by_itself = caller.reward.name, "score each completion by itself"
    for _ in range(3):
        if found := _difference(items, first, caller.call(items)):
            reason = f"gives the same completion another score ({found[1]}): remove randomness and state"
            # A reward that gives another score each time depends on everything else too.
            return [Broken(name, "deterministic", reason, example=found[0])]
    broken = []
    alone = [caller.call([item])[0] for item in items[:8]]
    if found := _difference(items, first, alone):
        reason = f"gives a completion another score without the other rows ({found[1]}): {by_itself}"
        broken.append(Broken(name, "other rows", f"{reason}, or declare `needs_whole_groups`", example=found[0]))
    if found := _difference(items, first, caller.call(items[::-1])[::-1]):
        reason = f"gives a completion another score in another order of the rows ({found[1]}): {by_itself}"
        broken.append(Broken(name, "order", reason, example=found[0]))
    return broken


def _difference(
    items: Sequence[Item], one: Sequence[PayOrFailure], other: Sequence[PayOrFailure]
) -> tuple[str, str] | None:
    """Return the first completion, and both scores as text, where two calls differ."""
    for (_, text), first, second in zip(items, one, other, strict=False):
        if isinstance(first, Failure) or isinstance(second, Failure):
            continue
        differs = first != second
        if isinstance(first, float) and isinstance(second, float):
            differs = abs(first - second) > 1e-6  # a sum in another order may differ in the last digit
        if differs:
            return text, f"{first}, then {second}"
    return None


# --- Wrong completions ---

PAID = 0.5
"""Share of the right answer's pay from which a wrong completion counts as paid."""

_PROBED = 8


@dataclass(frozen=True)
class Setting:
    """Way to call a reward, and the place in which it looks for the answer.

    Attributes:
        caller: reward with the shape of its completions and the form of its golds.
        way: way to state the answer.
        layout: layout in which the right answer is paid best.
        right: mean pay of the right answer there.
        wrong: mean pay of another answer there.
    """

    caller: Caller
    way: str
    layout: CompletionLayout
    right: float = 0.0
    wrong: float = 0.0


@dataclass
class KindResult:
    """Result of one kind of wrong completions.

    Attributes:
        name: name of the kind.
        tried: number of completions.
        paid: number of completions paid at least `PAID` of what the right one is paid.
        share: largest share of the right answer's pay; 0 if none earns more.
        row: number of the row of that completion.
        completion: completion with the largest share.
    """

    name: str
    tried: int
    paid: int = 0
    share: float = 0.0
    row: int = 0
    completion: str = ""


@dataclass
class JudgedReward:
    """Result of a reward that judges correctness.

    Attributes:
        name: name of the reward.
        called: way in which it is called: the layout and the shape of completions, and the form of the golds.
        right: mean pay of the right answer.
        wrong: mean pay of another answer.
        rows: number of rows that it scores.
        kinds: results of the kinds of wrong completions that were tried.
        unpaid: numbers of the rows whose right answer earns no more than a wrong one.
    """

    name: str
    called: str
    right: float
    wrong: float
    rows: int = 0
    kinds: list[KindResult] = field(default_factory=list)
    unpaid: list[int] = field(default_factory=list)


@dataclass
class Audit:
    """Result of an audit.

    Attributes:
        rows: number of audited rows.
        unreadable: number of rows whose gold can't be read.
        verdicts: results of the rewards that judge correctness.
        broken: broken contract checks of every reward.
    """

    rows: int
    unreadable: int
    verdicts: list[JudgedReward]
    broken: list[Broken]

    @property
    def found(self) -> bool:
        """True if a reward pays a wrong completion, pays no right answer, or breaks its contract."""
        pays_wrong = any(kind.paid for verdict in self.verdicts for kind in verdict.kinds)
        pays_nothing = any(len(verdict.unpaid) == verdict.rows > 0 for verdict in self.verdicts)
        return pays_wrong or pays_nothing or any(broken.is_serious for broken in self.broken)


def judged_rewards(rewards: Sequence[BuiltReward]) -> list[BuiltReward]:
    """Return the rewards that are judged: those of the kind `correctness`, or else the only one without a kind."""
    single = different_rewards(rewards)
    models = [reward.name for reward in single if reward.kind == "judge" or reward.declared.model_source is not None]
    if models:
        raise UserError(f"reward `{models[0]}`", "it calls a model, thousands of times here", "audit the others")
    alone = [reward for reward in single if not reward.needs_whole_groups]
    correct = [reward for reward in alone if reward.kind == "correctness"]
    other = [reward for reward in alone if reward.kind == "other"]
    undeclared = [reward for reward in other if getattr(reward.declared, "declared_kind", "other") is None]
    if len(undeclared) > 1 and not correct:
        names = ", ".join(f"`{reward.name}`" for reward in undeclared)
        fix = "set `kind: correctness` in the spec of the one to judge"
        raise UserError(f"rewards {names}", "they declare no kind", fix)
    return correct or undeclared


def different_rewards(rewards: Sequence[BuiltReward]) -> list[BuiltReward]:
    """Return the single rewards that `rewards` are made of, each once: `group_length` may consult one of the others."""
    different: list[BuiltReward] = []
    for reward in leaves(rewards):
        if all(reward.function != other.function for other in different):
            different.append(reward)
    return different


@dataclass(frozen=True)
class Auditor:
    """Audit of rewards on questions.

    Attributes:
        rewards: rewards of a recipe.
        questions: questions of the audit.
        pool: all questions of the file, for the answers of others.
        unreadable: number of rows whose gold can't be read.
        gold_columns: names of the columns with the gold.
        template: layout that replaces the search for one; None to search.
        seed: seed of the choice among answers of other questions.
    """

    rewards: Sequence[BuiltReward]
    questions: Sequence[Question]
    pool: Sequence[Question]
    unreadable: int
    gold_columns: Sequence[str]
    template: str | None = None
    seed: int = 0

    def audit(self) -> Audit:
        """Return the result."""
        judged = judged_rewards(self.rewards)
        verdicts, broken = [], []
        for reward in different_rewards(self.rewards):
            if not reward.needs_whole_groups:
                setting = self.setting_of(reward)
                verdict = self.verdict(setting)  # its calls also show whether the contract is kept
                verdicts += [verdict] if reward in judged else []
                cases = self.cases(setting, _PROBED)
                broken += contract(setting.caller, [*_right(cases), *_wrong(cases)])
        return Audit(len(self.questions), self.unreadable, verdicts, broken)

    def setting_of(self, reward: BuiltReward) -> Setting:
        """Return the first way to call a reward in which right answers earn more than others, in its best layout."""
        tags, words = getattr(reward.unbound, "tags", None), wrong_completions.source_texts(reward.unbound)
        layouts = wrong_completions.layouts_for(words, tags if isinstance(tags, tuple) else None, self.template)
        ways = dict.fromkeys(way for question in self.questions[:_PROBED] for way in question.ways())
        shapes: list[str] = ["text", "messages"]
        if isinstance(self.questions[0].columns.get("prompt"), list):
            shapes.reverse()
        columns = sorted({name for question in self.pool for name in question.columns} - {"prompts", "completions"})
        tried: list[Setting] = []
        for reduced, shape in itertools.product(((), self.gold_columns), shapes):
            caller = Caller(reward, columns, shape, reduced)
            for way, layout in itertools.product(ways, layouts):
                cases = self.cases(Setting(caller, way, layout), _PROBED)
                right, wrong = (_mean(caller.scores(items)) for items in (_right(cases), _wrong(cases)))
                tried.append(Setting(caller, way, layout, right, wrong))
            if telling := [setting for setting in tried if setting.right > setting.wrong]:
                return max(telling, key=lambda setting: setting.right)
        best = max(tried, key=lambda setting: setting.right)
        outcomes = best.caller.scores(_right(self.cases(best, _PROBED)))
        reasons = [one.reason for one in outcomes if isinstance(one, Failure) and one.check == "raises"]
        if len(reasons) == len(outcomes):
            problem = f"it raises for every right answer ({reasons[0]})"
            raise UserError(f"reward `{reward.name}`", problem, "correct the reward")
        return best

    def cases(self, setting: Setting, most: int | None = None, words: Sequence[str] = ()) -> list[Case]:
        """Return the cases of the first questions."""
        golds = [question.ways().get(setting.way, [question.gold])[0] for question in self.pool]
        cases = []
        for question in self.questions[:most]:
            right, *others = question.ways().get(setting.way, [question.gold])
            if not others:
                # `is_right` of a formula is slow, so few candidates are compared.
                few = shuffled(golds, self.seed + question.number)[: 5 if question.form == "formula" else 60]
                others = [gold for gold in few if not question.is_right(gold)]
            cases.append(Case(question, setting.layout, right, others, words))
        return cases

    def verdict(self, setting: Setting) -> JudgedReward:
        """Return what a reward pays for wrong completions."""
        caller = setting.caller
        cases = self.cases(setting, words=wrong_completions.source_texts(caller.reward.unbound))
        right = caller.scores(_right(cases))
        usual = statistics.median([score for score in right if isinstance(score, float)] or [0.0])
        scored = [(case, score) for case, score in zip(cases, right, strict=True) if score is not None]
        if not scored:
            problem = f"it returns None for the right answer of each of {len(cases)} rows"
            fix = "name the column of the gold by --gold_column, or correct the reward"
            raise UserError(f"reward `{caller.reward.name}`", problem, fix)
        golds = "reduced to final answers" if caller.reduced else "as in the file"
        called = f"layout {setting.layout.slot!r}, completions are {caller.shape}, golds are {golds}"
        verdict = JudgedReward(caller.reward.name, called, setting.right, setting.wrong, len(scored))
        for case, score in scored:
            verdict.unpaid += [] if isinstance(score, float) and score > setting.wrong else [case.question.number]
        for name, completions in KINDS.items():
            items = list(dict.fromkeys((case.question, text) for case, _ in scored for text in completions(case)))
            kind = KindResult(name, len(items))
            for (question, text), paid in zip(items, caller.scores(items), strict=True):
                share = paid_share(paid, usual, setting.wrong) if isinstance(paid, float) else 0.0
                kind.paid += share >= PAID
                if share > kind.share:
                    kind.share, kind.row, kind.completion = share, question.number, text
            verdict.kinds += [kind] if items else []
        return verdict


def _right(cases: Sequence[Case]) -> list[Item]:
    return [(case.question, case.place(case.right)) for case in cases]


def _wrong(cases: Sequence[Case]) -> list[Item]:
    return [(case.question, case.place(case.other)) for case in cases]


def paid_share(pay: float, right: float, wrong: float) -> float:
    """Return the share of the right answer's pay that a wrong completion earns.

    Args:
        pay: pay of the wrong completion.
        right: pay of the right one.
        wrong: usual pay of a wrong answer, which is the zero of the scale if right answers earn nothing or less.
    """
    if right > 0:
        return pay / right
    return (pay - wrong) / (right - wrong) if right > wrong else float(pay > right)


def _mean(outcomes: Sequence[PayOrFailure]) -> float:
    """Return the mean of the scores. A completion without one earns nothing."""
    return statistics.fmean(outcome if isinstance(outcome, float) else 0.0 for outcome in outcomes)


def auditor_of(
    specs: Sequence[RewardSpec],
    rows: Sequence[tuple[int, Mapping[str, Any]]],
    file: object,
    *,
    gold_column: str | None = None,
    right: str | None = None,
    layout: str | None = None,
    most: int = 24,
    seed: int = 0,
) -> Auditor:
    """Return the auditor of rewards on rows.

    Args:
        specs: specs of the rewards, as in a recipe.
        rows: rows of a dataset, each with its number in the file.
        file: name of the dataset, for messages.
        gold_column: name of the column with the gold; None for the column that the rewards read.
        right: name of the column with a right completion of each row, for a reward that compares with no gold.
        layout: completion with `{answer}` in it; None to search for the layout that pays best.
        most: largest number of audited rows.
        seed: seed of the choice of rows and of wrong answers.

    Raises:
        UserError: a reward can't be built, or no gold can be read.
    """
    rewards = build_rewards(specs, num_generations=2)
    columns = sorted({name for _, row in rows for name in row})
    single = list(leaves(rewards))
    # A column that a reward declares or takes by name, else a usual one.
    declared = [reward.declared.gold_column for reward in single]
    taken = [name for reward in single for name in GOLD_COLUMNS if name in parameters(reward)]
    found = next((name for name in (*declared, *taken, *GOLD_COLUMNS) if name in columns), None)
    gold = gold_column or right or found or "answer"
    if gold not in columns:
        problem = f"there is no such column ({', '.join(f'`{name}`' for name in columns)})"
        raise UserError(f"{file}: `{gold}`", problem, "name the gold's by --gold_column or --right")
    solutions = [reward.declared.solution_column for reward in single if right is None]
    solution = next((name for name in solutions if name in columns), None)
    # Rewards that read the gold as `answer` find it there too.
    names = [gold] if gold_column is None else [gold, "answer"]
    pool = []
    for number, row in rows:
        extended = {**row, **dict.fromkeys(names, row.get(gold))}
        question = question_of(number, extended, gold, solution, right)
        if question is not None:
            pool.append(question)
    if not pool:
        fix = "name the gold's column by --gold_column or --right"
        raise UserError(f"{file}: `{solution or gold}`", "no gold can be read", fix)
    numbers = shuffled([str(question.number) for question in pool], seed)[:most]
    chosen = [question for question in pool if str(question.number) in numbers]
    return Auditor(rewards, chosen, pool, len(rows) - len(pool), names, layout, seed)
