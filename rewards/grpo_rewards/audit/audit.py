"""Audit of rewards: which wrong completions they pay, whether they keep their contract, and what laziness earns."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_rewards.audit.calls import Caller, Failure, Item, Outcome, Shape
from grpo_rewards.audit.contract import Broken, contract
from grpo_rewards.audit.layouts import Layout, layouts_for, source_texts
from grpo_rewards.audit.questions import Question
from grpo_rewards.audit.wrong_completions import GENERATORS, Case, shuffled, wrong_completions
from grpo_rewards.errors import UserError
from grpo_rewards.registry import BuiltReward, leaves
from grpo_rewards.reward import FunctionReward

PAID = 0.5
"""Share of the right answer's pay from which a wrong completion counts as paid."""

_PROBED = 8
_OTHERS = 60
_MOST_CONSTANTS = 12
_LAZY_ROWS = 200


@dataclass(frozen=True)
class Subject:
    """Reward, or sum of rewards, that must tell right answers from wrong ones.

    Attributes:
        name: name for messages.
        parts: rewards with their weights.
    """

    name: str
    parts: Sequence[tuple[BuiltReward, float]]


@dataclass(frozen=True)
class Setting:
    """Way to call a subject, and the places in which it looks for the answer.

    Attributes:
        shape: shape of prompts and completions.
        reduces_golds: True if the column with the gold holds only its final answer, as a preset leaves it.
        way: way to state the answer.
        layouts: layouts in which the right answer is paid best, the preferred one first.
        right: mean pay of the right answer there.
        wrong: mean pay of another question's answer there.
    """

    shape: Shape
    reduces_golds: bool
    way: str
    layouts: Sequence[Layout]
    right: float
    wrong: float


@dataclass(frozen=True)
class Paid:
    """Wrong completion, its pay, and the pay of the right answer to the same question."""

    row: int
    completion: str
    pay: float
    right: float
    share: float


@dataclass
class Kind:
    """Result of one kind of wrong completions.

    Attributes:
        name: name of the kind.
        tried: number of completions.
        paid: number of completions paid at least `PAID` of what the right one is paid.
        best: completion with the largest share; None if none was scored.
    """

    name: str
    tried: int = 0
    paid: int = 0
    best: Paid | None = None


@dataclass
class Lazy:
    """Constant completion that earns most, as a share of what right answers earn."""

    completion: str
    share: float
    rows: int


@dataclass
class Total:
    """Weighted sum of all rewards: the mean for right answers, and the most for a wrong completion."""

    right: float
    wrong: float
    kind: str
    completion: str


@dataclass
class Verdict:
    """Result of a subject."""

    name: str
    setting: Setting
    rows: int
    kinds: list[Kind] = field(default_factory=list)
    unpaid: list[int] = field(default_factory=list)
    """Numbers of the rows whose right answer earns nothing."""
    lazy: Lazy | None = None
    total: Total | None = None
    """Pay of all rewards together, if there are several."""

    @property
    def paid_kinds(self) -> list[Kind]:
        """Kinds with a completion that is paid."""
        return [kind for kind in self.kinds if kind.paid]


@dataclass
class Audit:
    """Result of an audit.

    Attributes:
        rows: number of audited rows.
        unreadable: number of rows whose gold can't be read.
        verdicts: results of the subjects.
        broken: broken contract checks of every reward.
        checks: number of contract checks.
        ignored: names of rewards that were not judged, each with the reason.
        is_judged: False if no reward judges correctness, so that a paid wrong completion is no finding.
    """

    rows: int
    unreadable: int
    verdicts: list[Verdict]
    broken: list[Broken]
    checks: int
    ignored: dict[str, str]
    is_judged: bool

    @property
    def kinds(self) -> int:
        """Number of kinds of wrong completions that were tried."""
        return len({kind.name for verdict in self.verdicts for kind in verdict.kinds if kind.tried})

    @property
    def found(self) -> bool:
        """True if a reward pays a wrong completion, pays no right answer, or breaks its contract."""
        is_paid = any(verdict.paid_kinds or _pays_nothing(verdict) for verdict in self.verdicts)
        return (self.is_judged and is_paid) or any(broken.is_serious for broken in self.broken)


def _pays_nothing(verdict: Verdict) -> bool:
    return verdict.rows > 0 and len(verdict.unpaid) == verdict.rows


def subjects(rewards: Sequence[BuiltReward]) -> tuple[list[Subject], dict[str, str], bool]:
    """Return what is judged, the rewards that are not, each with the reason, and True if any judges correctness.

    Where a reward declares the kind `correctness`, each such reward is judged. Otherwise the weighted sum of the
    rewards that declare no kind is judged, and if all declare another kind, the weighted sum of all.
    """
    single = different_rewards(rewards)
    for reward in single:
        if _calls_a_model(reward):
            raise UserError(
                f"reward `{reward.name}` calls a model, and an audit would call it thousands of times: "
                "audit the other rewards"
            )
    alone = [reward for reward in single if not reward.needs_whole_groups]
    correct = [reward for reward in alone if reward.kind == "correctness"]
    undeclared = [reward for reward in alone if _declares_no_kind(reward) and reward.kind == "other"]
    judged = correct or undeclared
    ignored = {}
    for reward in single:
        if reward.needs_whole_groups:
            ignored[reward.name] = "compares the completions of a group"
        elif reward not in judged:
            ignored[reward.name] = f"is of kind {reward.kind}" if reward not in undeclared else "declares no kind"
    if correct:
        return [Subject(reward.name, [(reward, 1.0)]) for reward in correct], ignored, True
    parts = [(reward, reward.weight) for reward in undeclared or alone]
    name = parts[0][0].name if len(parts) == 1 else "sum of " + ", ".join(reward.name for reward, _ in parts)
    return [Subject(name, parts)] if parts else [], ignored, bool(undeclared)


def different_rewards(rewards: Sequence[BuiltReward]) -> list[BuiltReward]:
    """Return the single rewards that `rewards` are made of, each once: `group_length` may consult one of the others."""
    different: list[BuiltReward] = []
    for reward in leaves(rewards):
        if all(reward.function != other.function for other in different):
            different.append(reward)
    return different


def _declares_no_kind(reward: BuiltReward) -> bool:
    declared = reward.declared
    return isinstance(declared, FunctionReward) and declared.declared_kind is None


def _calls_a_model(reward: BuiltReward) -> bool:
    return reward.kind == "judge" or reward.declared.model_source is not None


class Auditor:
    """Audit of one set of rewards on one set of questions.

    Args:
        rewards: rewards of a recipe.
        questions: questions of the audit.
        pool: all questions of the file, for the answers of others and for lazy strategies.
        gold_columns: names of the columns with the gold. The first is the dataset's, and rewards may read it by another
            name too.
        template: layout that replaces the search for one; None to search.
        seed: seed of the choice among answers of other questions.
    """

    def __init__(
        self,
        rewards: Sequence[BuiltReward],
        questions: Sequence[Question],
        pool: Sequence[Question],
        gold_columns: Sequence[str],
        template: str | None = None,
        seed: int = 0,
    ) -> None:
        self.rewards, self.questions, self.pool = list(rewards), questions, pool
        self.gold_columns, self.template, self.seed = gold_columns, template, seed
        self.columns = sorted({name for question in pool for name in question.columns} - {"prompts", "completions"})
        self._callers: dict[tuple[int, Shape, bool], Caller] = {}

    def audit(self, unreadable: int = 0) -> Audit:
        """Return the result. `unreadable` is the number of rows that were left out because their gold can't be read."""
        judged, ignored, is_judged = subjects(self.rewards)
        verdicts, broken, checks = [], [], 0
        for subject in judged:
            setting = self.setting_of(subject)
            verdicts.append(self.verdict(subject, setting))
        for reward in different_rewards(self.rewards):
            setting = next((one.setting for one in verdicts if one.name == reward.name), None) or (
                verdicts[0].setting if verdicts else self.setting_of(Subject(reward.name, [(reward, 1.0)]))
            )
            caller = self.caller(reward, setting)
            found, checks = contract(caller, self._right_items(setting))
            broken += found
        return Audit(len(self.questions), unreadable, verdicts, broken, checks, ignored, is_judged)

    # --- Calls ---

    def caller(self, reward: BuiltReward, setting: Setting) -> Caller:
        """Return the caller of a reward in a setting, the same one each time."""
        return self._caller(reward, setting.shape, setting.reduces_golds)

    def _caller(self, reward: BuiltReward, shape: Shape, reduces_golds: bool) -> Caller:
        key = id(reward.function), shape, reduces_golds
        if key not in self._callers:
            answers = {question.number: question.gold for question in self.pool} if reduces_golds else None
            self._callers[key] = Caller(reward, self.columns, shape, self.gold_columns, answers)
        return self._callers[key]

    def scores(self, subject: Subject, setting: Setting, items: Sequence[Item]) -> list[Outcome]:
        """Return the weighted sum of a subject's rewards for each completion."""
        columns = []
        for reward, weight in subject.parts:
            column: list[Outcome] = []
            for outcome in self.caller(reward, setting).scores(items):
                column.append(weight * outcome if isinstance(outcome, float) else outcome)
            columns.append(column)
        return [_sum(row) for row in zip(*columns, strict=True)]

    # --- Where the reward looks for the answer ---

    def setting_of(self, subject: Subject) -> Setting:
        """Return the setting in which a subject pays right answers best and tells them from others."""
        functions: list[Any] = [reward.unbound for reward, _ in subject.parts]
        tags = [function.tags for function in functions if isinstance(getattr(function, "tags", None), tuple)]
        layouts = layouts_for(functions, tags, self.template)
        best: Setting | None = None
        for shape, reduces_golds in self._ways_to_call():
            for way in dict.fromkeys(way for question in self.questions[:_PROBED] for way in question.answers()):
                setting = self._probed(subject, shape, reduces_golds, way, layouts)
                is_better = best is None or (setting.right > setting.wrong and setting.right > best.right)
                if is_better or (best is not None and best.right <= best.wrong and setting.right > best.right):
                    best = setting
            if best is not None and best.right > best.wrong:
                break
        assert best is not None
        self._check_call(subject, best)
        return best

    def _check_call(self, subject: Subject, setting: Setting) -> None:
        """Raise UserError if a reward raises for every right answer, so that there is nothing to audit."""
        cases = self._cases(self.questions[:_PROBED], setting)
        items = [(case.question, case.place(case.right)) for case in cases]
        for reward, _ in subject.parts:
            outcomes = self.caller(reward, setting).scores(items)
            reasons = [one.reason for one in outcomes if isinstance(one, Failure) and one.check == "raises"]
            if len(reasons) == len(items):
                raise UserError(f"reward `{reward.name}` raises for every right answer: {reasons[0]}")

    def _ways_to_call(self) -> Iterator[tuple[Shape, bool]]:
        is_conversation = isinstance(self.questions[0].columns.get("prompt"), list)
        shapes: tuple[Shape, ...] = ("messages", "text") if is_conversation else ("text", "messages")
        for reduces_golds in (False, True):
            for shape in shapes:
                yield shape, reduces_golds

    def _probed(
        self, subject: Subject, shape: Shape, reduces_golds: bool, way: str, layouts: Sequence[Layout]
    ) -> Setting:
        """Return the setting of one way to call, with the layouts that pay best."""
        questions = self.questions[:_PROBED]
        found = []
        for layout in layouts:
            setting = Setting(shape, reduces_golds, way, [layout], 0.0, 0.0)
            right, wrong = [], []
            for case in self._cases(questions, setting):
                right.append((case.question, case.place(case.right)))
                wrong.append((case.question, case.place(case.other)))
            earned = _mean(self.scores(subject, setting, right))
            lost = _mean(self.scores(subject, setting, wrong))
            found.append((earned, lost, layout))
        telling = [one for one in found if one[0] > one[1]]
        right_pay, wrong_pay, _ = max(telling or found, key=lambda one: one[0])
        equal = [layout for earned, _, layout in telling or found if earned >= right_pay - 1e-9]
        if not telling:
            equal = equal[:1]
        return Setting(shape, reduces_golds, way, equal, right_pay, wrong_pay)

    def _cases(self, questions: Sequence[Question], setting: Setting, words: Sequence[str] = ()) -> Iterator[Case]:
        """Yield the cases of each question: in the preferred layout, and in another one that pays as well."""
        golds = [question.answers().get(setting.way, question.gold) for question in self.pool]
        for index, question in enumerate(questions):
            right = question.answers().get(setting.way, question.gold)
            others = question.options(setting.way)
            if not others:
                # `is_right` of a formula is slow, so few candidates are compared.
                candidates = [gold for gold in shuffled(golds, self.seed + question.number) if gold != right]
                most = 5 if question.form == "formula" else _OTHERS
                others = [gold for gold in candidates[:most] if not question.is_right(gold)]
            chosen = [setting.layouts[0], setting.layouts[index % len(setting.layouts)]]
            for layout in dict.fromkeys(chosen):
                yield Case(question, layout, right, setting.way, others, words)

    def _right_items(self, setting: Setting) -> list[Item]:
        items = []
        for index, case in enumerate(self._cases(self.questions[:_PROBED], setting)):
            items.append((case.question, case.place(case.right, thinking=f"Attempt {index}.")))
            items.append((case.question, case.place(case.other, thinking=f"Another attempt {index}.")))
        return items

    # --- Verdicts ---

    def verdict(self, subject: Subject, setting: Setting) -> Verdict:
        """Return what a subject pays for wrong completions."""
        words = [word for reward, _ in subject.parts for word in source_texts(reward.unbound)]
        cases = list(self._cases(self.questions, setting, words))
        right = self.scores(subject, setting, [(case.question, case.place(case.right)) for case in cases])
        usual = statistics.median([score for score in right if isinstance(score, float)] or [0.0])
        verdict = Verdict(subject.name, setting, len(self.questions))
        reference: dict[int, float] = {}
        for case, score in zip(cases, right, strict=True):
            number = case.question.number
            if score is None:
                continue
            own = score if isinstance(score, float) else 0.0
            reference[number] = max(own, usual, reference.get(number, own))
            if own <= setting.wrong and number not in verdict.unpaid:
                verdict.unpaid.append(number)
        verdict.rows = len(reference)
        wrong: dict[str, list[Item]] = {}
        for name in GENERATORS:
            items = []
            for case in cases:
                if case.question.number in reference:
                    items += [(case.question, text) for text in wrong_completions(case, name)]
            wrong[name] = list(dict.fromkeys(items))
        for name, items in _tracked(wrong):
            verdict.kinds.append(self._kind(subject, setting, name, items, reference))
        verdict.lazy = self.lazy(subject, setting)
        right_items = [(case.question, case.place(case.right)) for case in cases]
        verdict.total = self._total(setting, right_items, wrong)
        return verdict

    def _total(self, setting: Setting, right: Sequence[Item], wrong: Mapping[str, Sequence[Item]]) -> Total | None:
        """Return what all rewards pay together; None for a single one."""
        parts = [(reward, reward.weight) for reward in self.rewards if not reward.needs_whole_groups]
        if len(list(leaves(self.rewards))) < 2 or not parts:
            return None
        every = Subject("all rewards", parts)
        total = Total(_mean(self.scores(every, setting, right)), -math.inf, "", "")
        for name, items in wrong.items():
            for (_, text), score in zip(items, self.scores(every, setting, items), strict=True):
                if isinstance(score, float) and score > total.wrong:
                    total.wrong, total.kind, total.completion = score, name, text
        return total

    def _kind(
        self, subject: Subject, setting: Setting, name: str, items: Sequence[Item], reference: Mapping[int, float]
    ) -> Kind:
        kind = Kind(name, len(items))
        for (question, text), score in zip(items, self.scores(subject, setting, items), strict=True):
            if not isinstance(score, float):
                continue
            right = reference[question.number]
            share = paid_share(score, right, setting.wrong)
            kind.paid += share >= PAID
            if kind.best is None or share > kind.best.share:
                kind.best = Paid(question.number, text, score, right, share)
        return kind

    def lazy(self, subject: Subject, setting: Setting) -> Lazy | None:
        """Return the constant completion that earns most over the dataset."""
        questions = self.pool[:_LAZY_ROWS]
        layout = setting.layouts[0]
        answers = [question.answers().get(setting.way, question.gold) for question in questions]
        common = [answer for answer, _ in Counter(answers).most_common(_MOST_CONSTANTS)]
        constants = ["", layout.render(""), *map(layout.render, [*common, "0", "1", "yes"]), *common]
        stated = [(question, layout.render(answer)) for question, answer in zip(questions, answers, strict=True)]
        right = self._mean_over(subject, setting, stated)
        if right <= 0:
            return None
        best: Lazy | None = None
        for constant in dict.fromkeys(constants):
            share = self._mean_over(subject, setting, [(question, constant) for question in questions]) / right
            if best is None or share > best.share:
                best = Lazy(constant, share, len(questions))
        return best

    def _mean_over(self, subject: Subject, setting: Setting, items: Sequence[Item]) -> float:
        return _mean(self.scores(subject, setting, items))


def paid_share(pay: float, right: float, wrong: float) -> float:
    """Return the share of the right answer's pay that a wrong completion earns.

    Args:
        pay: pay of the wrong completion.
        right: pay of the right one.
        wrong: usual pay of a wrong answer, which is the zero of the scale if right answers earn nothing or less.
    """
    if right > 0:
        return pay / right
    if right > wrong:
        return (pay - wrong) / (right - wrong)
    return 1.0 if pay > right else 0.0


def _tracked(wrong: Mapping[str, list[Item]]) -> Iterable[tuple[str, list[Item]]]:
    """Return the kinds with their completions, and draw a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(list(wrong.items()), "auditing", console=console, disable=not console.is_terminal)


def _sum(row: Sequence[Outcome]) -> Outcome:
    total = 0.0
    for outcome in row:
        if outcome is None or isinstance(outcome, Failure):
            return outcome
        total += outcome
    return total


def _mean(outcomes: Sequence[Outcome]) -> float:
    """Return the mean of the scores. A completion without one earns nothing."""
    scores = [outcome if isinstance(outcome, float) else 0.0 for outcome in outcomes]
    return statistics.fmean(scores) if scores else 0.0
