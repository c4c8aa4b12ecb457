"""Conclusions of a preview, from samples written by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from grpo_recipes.checks.geometry import Geometry
from grpo_recipes.reports.preview import Completion, Cost, Group, Preview, _seconds
from grpo_recipes.reports.transcript import Part as Turn
from grpo_rewards.registry import BuiltReward, build_rewards
from grpo_rewards.terminal import rendered

CORRECT, FORMAT = "gsm8k_correctness", "well_formed"
RIGHT = "<think>1</think>\n<answer>2</answer>"
GEOMETRY = Geometry(
    num_processes=2,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=3,
    steps_per_generation=3,
    num_generations=4,
    num_iterations=1,
)


def sampled(correct: float | None, form: float | None = 1.0, text: str = RIGHT, *, is_cut: bool = False) -> Completion:
    """Return a completion of 10 tokens with two scores, which weigh 1 and 0.5."""
    terms = [weight * score for weight, score in ((1.0, correct), (0.5, form)) if score is not None]
    total = math.fsum(terms) if terms else None
    return Completion(text, 10, is_cut, {CORRECT: correct, FORMAT: form}, {CORRECT: {}, FORMAT: {}}, total)


def preview_of(*groups: Sequence[Completion], rewards: Sequence[BuiltReward] = (), by_reward: bool = False) -> Preview:
    specs = [CORRECT, {"name": FORMAT, "weight": 0.5}]
    return Preview(
        source="mine.yaml",
        model="a model",
        generator="group decoding",
        max_completion_length=10,
        temperature=1.0,
        by_reward=by_reward,
        rewards=rewards or build_rewards(specs, num_generations=4),
        groups=[Group("a prompt", 5, list(group)) for group in groups],
        cost=Cost(GEOMETRY, "a GPU", 100, completions=8, tokens=80, generation=4.0, scoring=2.0, training=1.0),
    )


MIXED = [sampled(2.0), sampled(0.0, text="no"), sampled(2.0, text="2"), sampled(0.0, 0.0, "")]
SOLVED = [sampled(2.0, text=f"{RIGHT}{number}") for number in range(4)]
FAILED = [sampled(0.0, text=f"{RIGHT}{number}") for number in range(4)]


def only_finding(preview: Preview) -> str:
    (sentence,) = preview.findings()
    return sentence


def test_groups_that_differ_leave_nothing_to_suggest() -> None:
    assert only_finding(preview_of(MIXED, MIXED, SOLVED)) == "nothing stands in the way: 2 of 3 groups have a gradient"


@pytest.mark.parametrize(("flat", "says"), [(SOLVED, "too easy: in 2 of 3"), (FAILED, "too hard: in 2 of 3")])
def test_problems_that_teach_nothing_are_too_hard_or_too_easy(flat: list[Completion], says: str) -> None:
    sentence = only_finding(preview_of(flat, MIXED, flat))
    assert sentence.startswith(says)
    assert "`dataset.pass_rate`" in sentence


def test_a_policy_that_solves_everything_is_not_told_that_the_problems_are_too_hard() -> None:
    """Where all completions earn the same, what the rewards can pay decides."""
    assert only_finding(preview_of(SOLVED, SOLVED)).startswith("too easy: in 2 of 2")


def test_a_policy_that_solves_nothing_is_told_so() -> None:
    first, second = preview_of(FAILED, FAILED).findings()
    assert first == f"`{CORRECT}` pays for none of 8 completions"
    assert second.startswith("too hard: in 2 of 2")
    assert preview_of(FAILED, FAILED, rewards=build_rewards([FORMAT, CORRECT])).findings()[0] == first


def of_floor(*totals: float, **declared: float) -> Preview:
    """Return a preview with a group for each total, which all its completions earn from one reward."""
    (known,) = build_rewards([FORMAT])
    reward = replace(
        known, kind="correctness", highest_pay=declared.get("highest_pay"), passes_at=declared.get("passes_at")
    )
    groups = []
    for total in totals:
        groups.append([Completion(str(n), 10, False, {FORMAT: total}, {FORMAT: {}}, total) for n in range(4)])
    return preview_of(*groups, rewards=[reward])


@pytest.mark.parametrize(
    ("totals", "declared", "says"),
    [
        # float32's 0.01, 0.6 and 0.9, as a trainer's tensor of scores returns them
        ((0.009999999776482582,) * 2, {"highest_pay": 1.0}, "too hard: in 2 of 2"),
        ((0.6000000238418579,) * 2, {"highest_pay": 1.0, "passes_at": 0.9}, "too hard: in 2 of 2"),
        ((0.8999999761581421,) * 2, {"highest_pay": 1.0, "passes_at": 0.9}, "too easy: in 2 of 2"),
        ((0.01, 0.01, 1.0), {"highest_pay": 1.0, "passes_at": 1.0}, "too hard: in 2 of 3"),
    ],
)
def test_a_reward_with_a_floor_is_judged_by_its_declarations(
    totals: tuple[float, ...], declared: dict[str, float], says: str
) -> None:
    assert any(sentence.startswith(says) for sentence in of_floor(*totals, **declared).findings())


@pytest.mark.parametrize("totals", [(0.01, 0.01), (0.01, 0.02, 0.02), (1.0, 1.0), (-3.0, -1.0), (0.0, 0.0)])
def test_nothing_is_easy_or_hard_if_the_highest_pay_is_not_known(totals: tuple[float, ...]) -> None:
    *_, sentence = of_floor(*totals).findings()
    assert f"{len(totals)} of {len(totals)} groups have zero variance" in sentence
    assert f"`highest_pay` in the spec of `{FORMAT}`" in sentence
    assert "too " not in sentence
    deducted = [one if one.name == CORRECT else replace(one, weight=-0.5) for one in build_rewards([CORRECT, FORMAT])]
    assert "easy" not in only_finding(preview_of(SOLVED, SOLVED, rewards=deducted))
    one_known = [replace(reward, highest_pay=most) for reward, most in zip(deducted, (100.0, None), strict=True)]
    assert "easy" not in only_finding(preview_of(SOLVED, SOLVED, rewards=one_known))


def test_a_full_score_is_recognised_in_float32() -> None:
    (reward,) = build_rewards([{"name": FORMAT, "kwargs": {"pay": 0.1}}])
    paid = 0.10000000149011612  # float32's 0.1
    group = [Completion(str(n), 10, False, {FORMAT: score}, {FORMAT: {}}, score) for n, score in enumerate((paid, 0.0))]
    preview = preview_of(group, rewards=[reward])
    assert preview.summaries()[0].full == 0.5
    assert "nothing stands in the way" in only_finding(preview)


def test_a_declared_highest_pay_that_is_exceeded_is_named() -> None:
    (sentence,) = of_floor(3.0, 1.0, 1.0, highest_pay=1.0).findings()[:1]
    assert sentence == f"`{FORMAT}` pays 3, more than its `highest_pay` 1: correct its spec"


def test_a_format_that_is_never_met_is_named_with_the_keys_that_help() -> None:
    group = [sampled(2.0, 0.0), sampled(0.0, 0.0), sampled(2.0, 0.0, "2"), sampled(0.0, 0.0, "")]
    sentence = only_finding(preview_of(group))
    assert f"no completion has the format of `{FORMAT}`" in sentence
    assert all(key in sentence for key in ("`dataset.system_prompt`", "`tag_presence`", "`model_name_or_path`"))
    assert "nothing stands in the way" in only_finding(preview_of([*group[:3], sampled(0.0, 1.0)]))


def test_partial_credit_is_not_suggested_to_a_recipe_that_has_it() -> None:
    scores = {CORRECT: 2.0, "tag_presence": 0.0}
    details: dict[str, dict[str, str]] = {name: {} for name in scores}
    group = [Completion("2", 10, False, {**scores, CORRECT: pay}, details, pay) for pay in (2.0, 0.0, 2.0, 0.0)]
    sentence, *_ = preview_of(group, rewards=build_rewards([CORRECT, "tag_presence"])).findings()
    assert "no completion has the format of `tag_presence`" in sentence
    assert "partial credit" not in sentence


def test_an_answer_elsewhere_is_found_by_the_extractor_that_the_suggestion_names() -> None:
    group = [sampled(0.0, form, f"so #### {form}") for form in (0.0, 1.0, 0.0, 1.0)]
    sentence = only_finding(preview_of(group))
    assert "`extract: hashes` finds one in 4 of 4" in sentence


def test_completions_at_the_cap_are_counted() -> None:
    cut = [replace(one, is_cut=True) for one in MIXED[:2]]
    sentence = only_finding(preview_of([*cut, *MIXED[2:]]))
    assert sentence.startswith("2 of 4 completions are cut at 10 tokens")
    assert "`max_completion_length`" in sentence
    assert "nothing stands in the way" in only_finding(preview_of([cut[0], *MIXED[1:]]))


def test_groups_that_repeat_one_text_need_a_higher_temperature() -> None:
    same = [replace(one, text=RIGHT) for one in MIXED]
    assert "raise `temperature` above 1" in only_finding(preview_of(same, same, MIXED))


def test_a_reward_that_scores_nothing_is_named() -> None:
    group = [replace(one, scores={CORRECT: None, FORMAT: 1.0}) for one in MIXED]
    assert only_finding(preview_of(group)).startswith(f"`{CORRECT}` scores none of 4 completions")
    never = [replace(one, scores={CORRECT: None, FORMAT: 0.0}) for one in MIXED]
    assert preview_of(never).findings()[1].startswith(f"no completion has the format of `{FORMAT}`")


def test_a_group_is_flat_by_its_total_or_by_every_reward() -> None:
    """Half a point of format makes up for half a point of correctness, but not where each reward is normalized."""
    group = [sampled(0.5, 0.0), sampled(0.0, 1.0), sampled(0.5, 0.0), sampled(0.0, 1.0)]
    assert preview_of(group).as_dict()["zero_variance"]["groups"] == 1
    assert preview_of(group, by_reward=True).as_dict()["zero_variance"]["groups"] == 0


def test_rows_without_a_score_have_no_part_in_a_groups_variance() -> None:
    group = [sampled(None, None), sampled(2.0), sampled(2.0), sampled(2.0)]
    assert preview_of(group).as_dict()["zero_variance"]["groups"] == 1


def test_the_table_of_rewards_counts_completions_and_groups() -> None:
    found = preview_of(MIXED, [*SOLVED[:3], sampled(None)]).as_dict()["rewards"]
    assert found[CORRECT]["mean"] == pytest.approx(10 / 7)
    assert found[CORRECT]["full"] == pytest.approx(5 / 8)
    assert (found[CORRECT]["unscored"], found[CORRECT]["varies"]) == (1, 1)
    assert found[FORMAT]["full"] == pytest.approx(7 / 8)


def test_the_cost_of_a_step_is_that_of_one_process() -> None:
    """A step has 2 × 8 × 3 completions. Each of the 2 processes generates 24, at half a second each."""
    preview = preview_of(MIXED)
    cost = preview.as_dict()["cost"]
    assert cost["tokens_per_second"] == 20
    assert cost["tokens_per_step"] == 480
    assert [preview.cost.tokens_per_step(mean) for mean in (10.01, 10.02)] == [480, 481]  # 480.48 and 480.96
    assert cost["step"] == pytest.approx({"generation": 12, "scoring": 6, "training": 3})
    again = replace(preview.cost, geometry=replace(GEOMETRY, num_iterations=2))
    assert again.step() == pytest.approx({"generation": 6, "scoring": 3, "training": 3})


def test_a_gradient_without_memory_leaves_the_sample_and_a_suggestion() -> None:
    preview = preview_of(MIXED)
    small = replace(preview, cost=replace(preview.cost, training=None))
    assert only_finding(small).startswith("the loss and its gradient need more memory")
    assert small.cost.step() == pytest.approx({"generation": 12, "scoring": 6})


def test_text_of_the_policy_cannot_control_the_terminal() -> None:
    hostile = [replace(one, text="\x1b[2J\x1b]0;title\x07\r\u202ehidden") for one in MIXED]
    said = rendered(preview_of(hostile).describe())
    assert "\\x1b[2J" in said
    assert all(letter.isprintable() or letter == "\n" for letter in said)


def test_long_texts_are_shown_without_their_middle() -> None:
    long = [replace(one, text=f"begin {'x' * 10_000} end") for one in MIXED]
    lines = [replace(one, text="\n".join(f"line {number}." for number in range(1_000))) for one in MIXED]
    said = rendered(preview_of(long, lines).describe())
    assert len(said) < 20_000
    assert "begin x" in said
    assert "x end" in said
    assert "line 0." in said
    assert "line 999." in said


def test_a_reward_whose_full_score_nobody_earns_is_told_from_one_without_a_known_maximum() -> None:
    unknown = [replace(reward, highest_pay=None) for reward in build_rewards([CORRECT, FORMAT])]
    for rewards, shown in (((), "0%"), (unknown, "-")):
        said = rendered(preview_of(FAILED, rewards=rewards).describe())
        (row,) = [line.split() for line in said.splitlines() if line.startswith(f"  {CORRECT} ")]
        assert row[2:4] == ["0.000", shown]
    nothing = [replace(one, scores={CORRECT: None, FORMAT: 1.0}) for one in MIXED]
    said = rendered(preview_of(nothing, rewards=unknown).describe())
    (row,) = [line.split() for line in said.splitlines() if line.startswith(f"  {CORRECT} ")]
    assert row[2:4] == ["-", "-"]
    found = preview_of(nothing).as_dict()["rewards"][CORRECT]
    assert found == {"weight": 1.0, "kind": "correctness", "mean": None, "full": 0.0, "unscored": 4, "varies": 0}


def test_the_best_the_middle_and_the_worst_completion_are_shown_once_each() -> None:
    group = [sampled(score, text=text) for score, text in ((1.0, "b"), (None, "e"), (2.0, "a"), (0.5, "c"), (0.0, "d"))]
    group += [replace(group[2])]  # a copy is not shown twice
    unscored = replace(group[1], total=None)
    shown = Group("p", 1, [group[0], unscored, *group[2:]]).extremes()
    assert [one.text for one in shown] == ["a", "c", "e"], "a completion without a total is the last"
    assert [one.text for one in Group("p", 1, group[:1]).extremes()] == ["b"]
    assert [one.text for one in Group("p", 1, [group[0], group[2]]).extremes()] == ["a", "b"]


def test_a_completion_of_turns_is_told_apart_by_its_turns() -> None:
    turn = Turn("call", 1, "1 + 1", "calculator")
    with_turns = replace(MIXED[0], turns=(turn,))
    assert len({MIXED[0].content, with_turns.content}) == 2
    written = with_turns.as_dict()
    assert written["turns"] == [vars(turn)]
    assert {key: written[key] for key in ("text", "tokens", "cut", "total", "pay", "said")} == {
        "text": RIGHT, "tokens": 10, "cut": False, "total": 2.5, "pay": {CORRECT: 2.0, FORMAT: 1.0},
        "said": {CORRECT: {}, FORMAT: {}},
    }  # fmt: skip
    assert "turns" not in MIXED[0].as_dict()


def test_a_preview_is_written_with_all_its_numbers() -> None:
    found = preview_of(MIXED, SOLVED).as_dict()
    assert [found[key] for key in ("recipe", "model", "generator")] == ["mine.yaml", "a model", "group decoding"]
    assert [(group["prompt"], group["tokens"], group["zero_variance"]) for group in found["groups"]] == [
        ("a prompt", 5, False), ("a prompt", 5, True),
    ]  # fmt: skip
    assert found["zero_variance"].items() >= {"groups": 1, "of": 2, "value": 0.5}.items()
    assert (found["cut"], found["mean_length"]) == (0, 10.0)
    assert found["cost"].items() >= {"device": "a GPU", "steps": 100, "completions": 8, "tokens": 80}.items()
    assert found["findings"] == ["nothing stands in the way: 1 of 2 groups have a gradient"]


def test_four_prompts_are_all_that_are_shown() -> None:
    assert "prompts are shown" not in rendered(preview_of(*[MIXED] * 4).describe())
    assert "4 of 5 prompts are shown" in rendered(preview_of(*[MIXED] * 5).describe())


def test_a_text_is_shown_whole_up_to_2000_characters() -> None:
    fits = "b" + "x" * 1998 + "e"
    assert "…" not in rendered(preview_of([replace(one, text=fits) for one in MIXED]).describe())
    (line,) = [one for one in preview_lines(f"{fits}z") if "…" in one]
    assert line == f"  | b{'x' * 999} … {'x' * 998}ez"


def preview_lines(text: str) -> list[str]:
    return rendered(preview_of([replace(one, text=text) for one in MIXED]).describe()).splitlines()


def test_the_first_and_the_last_15_lines_of_a_longer_text_are_shown() -> None:
    shown = [line for line in preview_lines("\n".join(f"line {n}" for n in range(40))) if line.startswith("  | line")]
    assert shown == [f"  | line {n}" for n in (*range(15), *range(25, 40))]


def test_what_rewards_can_pay_decides_what_is_easy() -> None:
    """Half of the range is little. A reward that takes away has no known range."""
    half = [sampled(1.0, 0.5, text=str(number)) for number in range(4)]  # 1.25 of 2.5
    assert only_finding_of(preview_of(half, half)).startswith("too hard: in 2 of 2")
    more = [sampled(1.0, 1.0, text=str(number)) for number in range(4)]
    assert only_finding_of(preview_of(more, more)).startswith("too easy: in 2 of 2")
    one_each = preview_of(SOLVED, FAILED)
    assert only_finding_of(one_each).startswith("too hard: in 1 of 2"), "as many are too easy"
    taken = [replace(reward, weight=-1.0) for reward in build_rewards([CORRECT, FORMAT])]
    losing = [
        Completion(str(n), 10, False, {CORRECT: 1.0, FORMAT: 1.0}, {CORRECT: {}, FORMAT: {}}, -2.0) for n in range(4)
    ]
    sentence = next(one for one in preview_of(losing, losing, rewards=taken).findings() if "zero variance" in one)
    assert sentence.startswith("2 of 2 groups have zero variance, and all completions earn the same: check `rewards`")


def only_finding_of(preview: Preview) -> str:
    (sentence,) = [one for one in preview.findings() if one.startswith("too ")]
    return sentence


def test_a_part_of_the_format_is_told_from_none_and_a_format_that_costs_is_not_asked_for() -> None:
    partly = [sampled(2.0, 0.5), sampled(0.0, 0.0), sampled(2.0, 0.0, "2"), sampled(0.0, 0.0, "")]
    assert only_finding(preview_of(partly)).startswith(
        f"no completion has the format of `{FORMAT}` (some earn a part),"
    )
    never = [replace(one, scores={**one.scores, FORMAT: 0.0}) for one in partly]
    assert only_finding(preview_of(never)).startswith(f"no completion has the format of `{FORMAT}`, and")
    free = [
        replace(reward, weight=weight) for reward, weight in zip(build_rewards([CORRECT, FORMAT]), (1, 0), strict=True)
    ]
    assert "nothing stands in the way" in only_finding(preview_of(never, rewards=free))


def test_half_of_the_groups_may_repeat_one_completion() -> None:
    same = [replace(one, text=RIGHT) for one in MIXED]
    assert "nothing stands in the way" in only_finding(preview_of(same, MIXED))


def test_a_single_point_for_a_right_answer_is_enough() -> None:
    group = [sampled(0.0, form, f"so {form}") for form in (0.0, 1.0, 0.0, 1.0)]
    assert f"`{CORRECT}` pays for none of 4 completions" in only_finding(preview_of(group))
    paid = [*group[:3], sampled(0.001, 1.0)]
    assert "nothing stands in the way" in only_finding(preview_of(paid))


def test_only_the_first_prompts_are_shown_and_json_has_all() -> None:
    preview = preview_of(*[MIXED] * 6)
    said = rendered(preview.describe())
    assert said.count("a prompt") == 4
    assert "4 of 6 prompts are shown" in said
    assert len(json.loads(json.dumps(preview.as_dict()))["groups"]) == 6


def test_the_terminal_shows_the_numbers_of_the_sample() -> None:
    """8 completions: one of 30 tokens and cut, one of 2. Of 7 scores, 5 are 2.0: mean 10 / 7, and 5 of 8 are full."""
    short, long = replace(MIXED[1], tokens=2), replace(sampled(None), tokens=30, is_cut=True)
    said = rendered(preview_of([MIXED[0], short, *MIXED[2:]], [*SOLVED[:3], long]).describe())
    head, _, below = said.partition("\n\n")
    assert head == "mine.yaml: a model before training"
    first, second = below.split("\n\n")[:2]
    assert first.splitlines()[0] == "prompt 1: 5 tokens, exactly as the model sees it"
    assert [line.strip() for line in first.splitlines() if "reward" in line] == [
        "completion of 10 tokens: reward 2.5",
        "completion of 2 tokens: reward 0.5",
        "completion of 10 tokens: reward 0",
    ]
    assert "completion of 30 tokens, cut: reward 0.5" in second
    heading = next(line for line in said.splitlines() if "full score" in line)
    row = next(line for line in said.splitlines() if line.startswith(f"  {CORRECT} "))
    assert len(heading) == len(row)
    values = {"weight": "0.5", "mean": "0.875", "full score": "88%", "no score": "0 of 8", "varies in": "1 of 2 groups"}
    row = next(line for line in said.splitlines() if line.startswith(f"  {FORMAT} "))
    for name, value in values.items():
        assert heading.index(name) + len(name) == row.index(value) + len(value), "aligned at their right"
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert f"{CORRECT} 1 1.429 62% 1 of 8 1 of 2 groups" in lines
    assert f"{FORMAT} 0.5 0.875 88% 0 of 8 1 of 2 groups" in lines
    text = " ".join(said.split())
    # Both groups have one prompt: the exact interval of 0 of 1 ends at 1 - 0.025.
    assert "zero variance 0 of 2 groups (95 % interval 0% to 98%)" in text
    assert "completions 2 to 30 tokens, mean 12; 1 of 8 are cut at `max_completion_length` 10" in text
    assert "generation 20 tokens/s on a GPU by group decoding, 8 completions at once" in text
    # 48 completions of mean length 11.5. The 100 steps take 21 s each.
    assert "21 s for 48 completions, about 552 tokens: 12 s generation, 6.0 s scoring, 3.0 s training." in text
    assert "Training generates 24 completions at once, which takes less time for each on a GPU" in text
    assert "run 100 optimizer steps: 35 min, if the lengths stay" in text
    assert text.endswith("what follows nothing stands in the way: 2 of 2 groups have a gradient")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *((0.0004, "0 ms"), (0.094, "94 ms"), (0.096, "0.1 s"), (9.9, "9.9 s"), (9.97, "10 s"), (119.4, "119 s")),
        *((120.0, "2 min"), (7140.0, "119 min"), (7200.0, "2.0 h"), (36000.0, "10.0 h")),
    ],
)
def test_a_time_is_shown_in_the_unit_in_which_it_has_two_digits(seconds: float, shown: str) -> None:
    preview = preview_of(MIXED)
    cost = replace(preview.cost, generation=seconds / 3, scoring=0.0, training=0.0)
    assert f"{shown} generation" in rendered(replace(preview, cost=cost).describe())


def test_nothing_follows_from_shares_at_their_limits() -> None:
    """Half of the groups without variance, a quarter of the completions cut: advice begins above."""
    cut = [replace(one, is_cut=place < 2) for place, one in enumerate(MIXED)]
    assert "nothing stands in the way: 1 of 2 groups" in only_finding(preview_of(cut, SOLVED))
    (finding,) = preview_of([replace(one, is_cut=place < 3) for place, one in enumerate(MIXED)], SOLVED).findings()
    assert finding.startswith("3 of 8 completions are cut at 10 tokens")


def test_a_text_is_shown_whole_up_to_30_lines() -> None:
    fits = "\n".join(f"line {number}" for number in range(30))
    assert "…" not in rendered(preview_of([replace(one, text=fits) for one in MIXED]).describe())
    assert "…" in rendered(preview_of([replace(one, text=f"{fits}\nx") for one in MIXED]).describe())


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0949, "95 ms"), (0.095, "0.1 s"), (9.949, "9.9 s"), (9.95, "10 s"), (119.9, "120 s"), (7199.0, "120 min")],
)
def test_a_unit_ends_where_the_next_has_two_digits(seconds: float, shown: str) -> None:
    assert _seconds(seconds) == shown


def test_a_reward_without_weight_gives_a_group_no_variance() -> None:
    """Correctness is the same in all completions. Only the format differs, which weighs nothing."""
    group = [sampled(2.0, form) for form in (0.0, 1.0, 0.0, 1.0)]
    weights = [
        replace(one, weight=weight) for one, weight in zip(build_rewards([CORRECT, FORMAT]), (1, 0), strict=True)
    ]
    assert len(preview_of(group, by_reward=True, rewards=weights).flat_groups()) == 1
    assert preview_of(group, by_reward=True).flat_groups() == []


@pytest.mark.parametrize(
    ("totals", "is_flat"),
    [([0.0, 1e-9], True), ([0.0, 1e-8], False), ([1.0], True), ([], True), ([None, 1.0], True), ([-1.0, -2.0], False)],
)
def test_a_group_varies_if_two_totals_differ_by_more_than_rounding(totals: list[float | None], is_flat: bool) -> None:
    preview = preview_of([replace(MIXED[0], total=total) for total in totals])
    assert bool(preview.flat_groups()) == is_flat


def test_the_caveat_says_if_training_generates_more_at_once() -> None:
    preview = preview_of(MIXED)
    for completions, says in ((23, True), (24, False), (25, False)):
        said = " ".join(
            rendered(replace(preview, cost=replace(preview.cost, completions=completions)).describe()).split()
        )
        assert "training. The update and messages between processes are not included" in said
        assert ("Training generates 24 completions at once" in said) == says


def test_groups_that_no_reward_scores_point_to_the_rewards() -> None:
    unscored = [sampled(None, None, text=str(number)) for number in range(4)]
    first, second, last = preview_of(unscored, unscored).findings()
    assert first == (
        f"`{CORRECT}` scores none of 8 completions: its gold can't be read in these rows; correct `dataset.columns`, "
        "or the reward's `kwargs` in `rewards`"
    )
    assert second.startswith(f"`{FORMAT}` scores none of 8")
    assert last == (
        "2 of 2 groups have zero variance, and all completions earn the same: check `rewards` against the completions "
        "above"
    )
    found = preview_of(unscored).as_dict()
    assert [found["rewards"][name]["mean"] for name in (CORRECT, FORMAT)] == [None, None]
    assert "no reward scores it" in rendered(preview_of(unscored).describe())


def test_groups_without_totals_do_not_decide_what_is_hard() -> None:
    unscored = [sampled(None, None, text=str(number)) for number in range(4)]
    assert only_finding_of(preview_of(SOLVED, unscored, unscored)).startswith("too easy: in 1 of 3 groups")
    assert only_finding_of(preview_of(FAILED, unscored, unscored, MIXED)).startswith("too hard: in 1 of 4 groups")


def test_a_reward_without_weight_does_not_hide_what_the_others_can_pay() -> None:
    known, unknown = build_rewards([CORRECT, FORMAT])
    rewards = [known, replace(unknown, weight=0, highest_pay=None)]
    half = [replace(one, total=1.0) for one in FAILED]
    more = [replace(one, total=1.5) for one in FAILED]
    assert only_finding_of(preview_of(half, half, rewards=rewards)).startswith("too hard"), "1 of 2"
    assert only_finding_of(preview_of(more, more, rewards=rewards)).startswith("too easy"), "1.5 of 2"


def test_what_is_taken_away_belongs_to_the_range_of_the_rewards() -> None:
    """From -2 to 2.5, a total of 0.5 is above the middle."""
    paid = [replace(one, total=0.5) for one in SOLVED]
    taken = [replace(MIXED[0], total=total) for total in (-2.0, 0.0, 0.0, 0.0)]
    assert only_finding_of(preview_of(paid, paid, taken)).startswith("too easy: in 2 of 3")
    assert only_finding_of(preview_of(paid, paid, MIXED)).startswith("too hard: in 2 of 3")


def test_a_reward_that_takes_away_for_wrong_answers_pays_for_right_ones() -> None:
    scores = ((-1.0, 0.0), (-1.0, 1.0), (1.0, 0.0), (-1.0, 1.0))
    group = [sampled(score, form, f"so {place}") for place, (score, form) in enumerate(scores)]
    assert "nothing stands in the way" in only_finding(preview_of(group))


def test_a_correctness_reward_that_only_takes_away_pays_for_none() -> None:
    scores = ((-1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, 1.0))
    group = [sampled(score, form, f"so {place}") for place, (score, form) in enumerate(scores)]
    assert f"`{CORRECT}` pays for none of 4 completions" in only_finding(preview_of(group))


def test_all_that_follows_is_said_in_the_order_of_its_weight() -> None:
    same = [sampled(0.0, 0.0, text="x", is_cut=True) for _ in range(4)]
    preview = preview_of(same)
    findings = replace(preview, cost=replace(preview.cost, training=None)).findings()
    beginnings = [
        "the loss and its gradient need more memory than the device has",
        f"no completion has the format of `{FORMAT}`",
        f"`{CORRECT}` pays for none of 4 completions",
        "too hard",
        "4 of 4 completions are cut at 10 tokens, and an answer behind the cut is lost",
        "1 of 1 groups repeat one completion, so that there is nothing to compare",
    ]
    assert [sentence[: len(start)] for sentence, start in zip(findings, beginnings, strict=True)] == beginnings


def test_a_completion_of_turns_is_printed_turn_by_turn() -> None:
    turns = tuple(Turn("call", number, f"{number} + 1", "add") for number in range(1, 15))
    group = [replace(MIXED[0], turns=turns, logged={CORRECT: {"gold": "2"}, FORMAT: {}})]
    lines = rendered(preview_of(group).describe()).splitlines()
    assert [line.strip() for line in lines if line.startswith("    Turn")] == [
        f"Turn {number} calls add" for number in (*range(1, 7), *range(9, 15))
    ]
    assert "    Left out" in lines
    assert "  | … 2 parts …" in lines
    assert "  | 14 + 1" in lines
    assert f"  | {RIGHT}" not in "\n".join(lines), "the last message is one of the turns"
    assert any(line.startswith(f"    {CORRECT} 2: gold `2`") for line in lines)


def test_a_total_of_0_is_above_a_negative_one_and_nine_completions_are_shown_by_three() -> None:
    totals = {"none": None, "less": -1.0, "zero": 0.0}
    few = [replace(MIXED[0], text=text, total=total) for text, total in totals.items()]
    assert [one.text for one in Group("p", 1, few).extremes()] == ["zero", "less", "none"]
    nine = [replace(MIXED[0], text=f"{total}", total=float(total)) for total in range(9)]
    assert [one.text for one in Group("p", 1, nine).extremes()] == ["8", "4", "0"]


def test_a_gradient_that_takes_no_time_is_a_part_of_the_step() -> None:
    cost = replace(preview_of(MIXED).cost, training=0.0)
    assert cost.step()["training"] == 0.0
    assert "`per_device_train_batch_size`" not in only_finding(replace(preview_of(MIXED), cost=cost))


def test_a_penalty_is_earned_in_full_by_those_that_it_spares() -> None:
    rewards = [replace(reward, highest_pay=0.0) for reward in build_rewards([CORRECT, FORMAT])]
    preview = preview_of([sampled(0.0), sampled(-1.0), sampled(0.0), sampled(-0.5)], rewards=rewards)
    assert preview.as_dict()["rewards"][CORRECT]["full"] == 0.5
    paid = [replace(one, total=1.2) for one in SOLVED]  # the most is 2, which a penalty does not raise
    rewards = [build_rewards([CORRECT])[0], rewards[1]]
    assert only_finding_of(preview_of(paid, paid, rewards=rewards)).startswith("too easy")
    less = [replace(one, total=0.9) for one in SOLVED]
    assert only_finding_of(preview_of(less, less, rewards=rewards)).startswith("too hard")
    cut = [replace(one, is_cut=place < 2) for place, one in enumerate(MIXED)]
    assert preview_of(cut).as_dict()["cut"] == 2
