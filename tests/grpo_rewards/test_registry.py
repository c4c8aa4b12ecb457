"""Reward specs that build, specs that are refused, and rewards made of others."""

import asyncio
import inspect
import pickle
import sys
from dataclasses import dataclass

import pytest

import grpo_rewards
from grpo_rewards.built import RewardSpecError, UnbuiltReward
from grpo_rewards.cli import main
from grpo_rewards.composed import leaves
from grpo_rewards.registry import REGISTERED, TRL_REWARDS, build_rewards, own_name, resolve, spec_parts
from tests.support.errors import refused

HERE = __name__
TEXT = "<think>\nsix threes\n</think>\n<answer>\n18\n</answer>"


def length_reward(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]


def length_factory(scale=1.0):
    def scaled(prompts, completions, **columns):
        return [scale * len(completion) for completion in completions]

    return scaled


def group_size_reward(prompts, completions, num_generations, **columns):
    return [float(num_generations)] * len(completions)


def never_scores(prompts, completions, **columns):
    return [None] * len(completions)


async def async_reward(prompts, completions, **columns):
    return [1.0] * len(completions)


@dataclass(frozen=True)
class Constant:
    value: float = 1.0
    num_generations: int | None = None

    def __call__(self, prompts, completions, **columns):
        return [self.num_generations or self.value] * len(completions)


def one(spec, **options):
    (built,) = build_rewards([spec], **options)
    return built


def test_dotted_paths_name_functions_factories_and_classes():
    for spec, expected in (
        (f"{HERE}.length_reward", [3.0]), ({"name": f"{HERE}.length_factory", "kwargs": {"scale": 2}}, [6.0]),
        ({"name": f"{HERE}.length_factory", "kwargs": {}}, [3.0]), (f"{HERE}.Constant", [1.0]),
        ({"name": f"{HERE}.Constant", "kwargs": {"value": 4.0}}, [4.0]),
        ({"name": "grpo_rewards.tag_count", "kwargs": {"tags": ["a", "b"]}}, [0.0]),
    ):  # fmt: skip
        assert one(spec).function(prompts=["p"], completions=["abc"]) == expected
    built = one("gsm8k_correctness")
    assert (built.function, built.weight, built.name) == (grpo_rewards.gsm8k_correctness, 1.0, "gsm8k_correctness")
    assert one("builtins.max").function is max, "a builtin without a signature is a reward"


def test_the_group_size_is_passed_unless_kwargs_set_it():
    own = {"name": f"{HERE}.Constant", "kwargs": {"num_generations": 2}}
    for spec, expected in ((f"{HERE}.group_size_reward", 4.0), (f"{HERE}.Constant", 4), (own, 2)):
        assert one(spec, num_generations=4).function(prompts=["p"], completions=["c"]) == [expected]
    assert one("group_length", num_generations=4).function.num_generations == 4
    assert one(f"{HERE}.Constant").unbound.num_generations is None
    assert one(f"{HERE}.length_reward", num_generations=4).function is length_reward
    built = one({"name": f"{HERE}.group_size_reward", "alias": "size"}, num_generations=4)
    assert built.unbound is group_size_reward


# --- Specs that are refused


def needs_both(first, second, *rest, third=3, **others):
    return length_reward


def raises(error):
    if error == "text":
        raise ValueError("  no\n  good. ")
    raise {"key": KeyError("k"), "empty": ValueError(), "import": ImportError("no such thing.")}[error]


class Secret:
    def __init__(self, api_key):
        raise ValueError(f"{api_key} is not a key")


GATED = {"name": "gate", "reward": "tag_count", "only_if": "tag_presence"}
REFUSED = [
    ("gsm8k_corectness", "gsm8k_corectness", "gsm8k_correctness"), ("nothing_like_it", "nothing_like_it", "list"),
    ("grpo_rewards.tag_prezence", "tag_prezence", "tag_presence"), ("no_such_package.reward", "", "no_such_package"),
    ({"weight": 1.0}, "rewards", "name"), ({"name": ""}, "rewards", "name"), (7, "rewards", 7),
    ({"name": "tag_count", "wieght": 1.0}, "`tag_count`: `wieght`", "weight"),
    ({"name": "tag_count", "x": []}, "`tag_count`: `x`", "passes_at"),
    ({"name": "tag_count", "rewards": []}, "`tag_count`: `rewards`"),
    ({"name": "tag_count", "weight": float("nan")}, "tag_count", "weight"),
    ({"name": "tag_count", "weight": True}, "tag_count", "weight"),
    ({"name": "tag_count", "weight": "heavy"}, "tag_count", "heavy"),
    ({"name": "tag_count", "kwargs": {"tag": []}}, "`tag_count`: `tag`", "tags"),
    ({"name": "tag_count", "kwargs": {"tags": "think"}}, "tag_count", "tags"),
    ({"name": "tag_count", "kwargs": ["think"]}, "kwargs", "think"), ({"name": "tag_count", "alias": 3}, "alias", 3),
    ({"name": "gsm8k_correctness", "kwargs": {"extract": "tag"}}, "gsm8k_correctness", "extract", "answer_tag"),
    ({"name": "gsm8k_correctness", "kwargs": {"pay_exact": "inf"}}, "gsm8k_correctness", "pay_exact"),
    ({"name": "sum", "rewards": []}, "`sum`: `rewards`"), ({"name": "sum"}, "`sum`: `rewards`"),
    ({"name": "sum", "reward": {}}, "`sum`: `reward`", "rewards"),
    ({"name": "sum", "rewards": ["tag_count", "tag_count"]}, "tag_count", 2, "alias"),
    ({"name": "sum", "rewards": ["tag_count", f"{HERE}.async_reward"]}, "`sum`: `async_reward`"),
    ("math.pi", "math.pi", "float"), ({"name": "math.pi", "kwargs": {}}, "math.pi", "TypeError", "float"),
    ({"name": "builtins.max", "kwargs": {}}, "builtins.max", "TypeError"),
    ({"name": "gate", "only_if": "tag_count"}, "`gate`: `reward`"),
    ({"name": "gate", "reward": "tag_count"}, "`gate`: `only_if`"),
    ({**GATED, "only_if": "tag_count"}, "tag_count", 2), ({**GATED, "onlyif": "tag_count"}, "`onlyif`", "only_if"),
    ({**GATED, "kwargs": {}}, "`gate`: `kwargs`", "at_least"), ({**GATED, "at_least": "all"}, "gate", "at_least"),
    ({**GATED, "only_if": {"name": "tag_presence", "weight": 2}}, "`gate`: `only_if`", "at_least"),
    ({**GATED, "reward": f"{HERE}.async_reward"}, "`gate`: `async_reward`"),
    ({**GATED, "only_if": f"{HERE}.async_reward"}, "`gate`: `async_reward`"),
    ({"name": f"{HERE}.length_reward", "kind": "speed"}, "length_reward", "speed", "correctness"),
    ({"name": "tag_count", "kind": "length"}, "`tag_count`: `kind`"),
    ({"name": "tag_count", "highest_pay": 1}, "`tag_count`: `highest_pay`"),
    ({"name": "gsm8k_correctness", "passes_at": 1}, "`gsm8k_correctness`: `passes_at`"),
    ({"name": f"{HERE}.length_reward", "highest_pay": "all"}, "length_reward", "highest_pay", "all"),
    ({"name": f"{HERE}.length_reward", "highest_pay": 1, "passes_at": 2}, "length_reward", "passes_at", 2),
    ({"name": f"{HERE}.needs_both", "kwargs": {}}, "needs_both`: `kwargs`", "first"),
    ({"name": f"{HERE}.needs_both", "kwargs": {"first": 1}}, "needs_both`: `kwargs`", "second"),
    ({"name": f"{HERE}.needs_both", "kwargs": "abc"}, "needs_both`: `kwargs`", "abc"),
    ({"name": f"{HERE}.raises", "kwargs": {"error": "text"}}, "raises", "no good"),
    ({"name": f"{HERE}.raises", "kwargs": {"error": "key"}}, "raises", "KeyError: 'k'"),
    ({"name": f"{HERE}.raises", "kwargs": {"error": "empty"}}, "raises", "ValueError"),
    ({"name": f"{HERE}.takes_neither"}, "takes_neither", "completions"),
    ("nowhere.py:score", "nowhere.py"), ("~nobody-here/own.py:score", "~nobody-here/own.py", "No such file"),
    ("own.py:scor", "own.py:scor", "`score`"), ("ow\0n.py:score", "n.py"), ("own.txt:score", "own.txt", "score"),
    ("broken.py:score", "broken.py", "ZeroDivisionError: division by zero"),
    ("exits_early.py:score", "exits_early", "SystemExit: 0"), ("exits_early.score", "exits_early", "SystemExit: 0"),
    ({"name": "exits_late.S", "kwargs": {}}, "exits_late", "SystemExit: 0"),
]  # fmt: skip


def takes_neither(text):
    return [0.0]


def test_a_spec_that_cannot_be_built_is_named(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def score(prompts, completions, **columns):\n    return []\n")
    (tmp_path / "own.txt").write_text("")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "exits_early.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "exits_late.py").write_text("class S:\n    def __init__(self):\n        raise SystemExit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for spec, place, *figures in REFUSED:
        with refused(place, *figures, by=RewardSpecError) as caught:
            one(spec)
        assert "\n" not in str(caught.value), spec
    with refused("rewards", "gsm8k_correctness", by=RewardSpecError):
        build_rewards("gsm8k_correctness")
    with refused("tag_count", 2, by=RewardSpecError):
        build_rewards(["tag_count", "tag_count"])
    with refused("Secret", "is not a key", by=RewardSpecError) as caught:
        one({"name": f"{HERE}.Secret", "kwargs": {"api_key": "sesame-open-now"}})
    assert "sesame" not in str(caught.value)
    both = {"name": f"{HERE}.needs_both", "kwargs": {"first": 1, "second": 2, "fourth": 4}}
    assert one(both).function is length_reward
    (unbuilt,) = build_rewards([f"{HERE}.Constant"], call_factories=False)
    assert isinstance(unbuilt.function, UnbuiltReward)
    with refused("Constant", by=RewardSpecError):
        unbuilt.function(completions=["a"])


def test_a_missing_torch_names_the_extra(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "grpo_rewards.reward_model", raising=False)
    monkeypatch.delitem(sys.modules, "grpo_rewards.internlm2", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with refused("reward_model", "torch", "grpo-rewards[models]", by=RewardSpecError):
        build_rewards([{"name": "reward_model", "kwargs": {"model": "m"}}])
    assert main(["convert-internlm2", "a", "b"]) == 2
    assert "grpo-rewards[models]" in capsys.readouterr().err
    assert main(["list"]) == 0
    assert "grpo-rewards[models]" in capsys.readouterr().out


# --- Rewards made of others


def test_kwargs_reach_a_registered_class():
    built = one({"name": "gsm8k_correctness", "kwargs": {"extract": "hashes", "pay_exact": "3e0"}, "weight": 0.5})
    assert built.weight == 0.5
    assert built.function(prompts=None, completions=["#### 18"], answer=["18"]) == [3.0]


def test_an_alias_renames_functions_classes_and_coroutines():
    for name in ("length_reward", "Constant", "async_reward"):
        built = one({"name": f"{HERE}.{name}", "alias": "renamed"})
        assert built.name == built.function.__name__ == "renamed"
        pickle.loads(pickle.dumps(built.function))
    assert inspect.iscoroutinefunction(built.function.__call__)
    assert asyncio.run(built.function(prompts=["p"], completions=["c"])) == [1.0]


def test_a_sum_adds_weighted_parts_and_logs_them():
    total = one({"name": "sum", "alias": "format", "weight": 2.0,
                 "rewards": ["tag_structure", {"name": "tag_count", "weight": 2.0}]})  # fmt: skip
    columns, metrics = {}, {}
    scores = total.function(
        prompts=["p", "p"], completions=[TEXT, "<think>"], log_extra=columns.__setitem__, log_metric=metrics.__setitem__
    )
    assert scores == [0.5 + 2 * 1.0, 2 * 0.25]
    assert columns == {"format/tag_structure": [0.5, 0.0], "format/tag_count": [1.0, 0.25]}
    assert metrics == {"rewards/format/tag_structure": 0.25, "rewards/format/tag_count": 0.625}
    assert (total.name, total.weight) == ("format", 2.0)
    assert pickle.loads(pickle.dumps(total.function)) == total.function


def one_score(completions, **columns):
    return [1.0]


def test_a_sum_with_an_unscorable_part_is_none():
    total = one({"name": "sum", "rewards": ["tag_count", {"name": f"{HERE}.never_scores", "weight": -0.5}]})
    metrics, reasons = {}, {}
    loggers = {"log_metric": metrics.__setitem__, "log_reason": reasons.__setitem__}
    assert total.function(prompts=["p"], completions=["c"], **loggers) == [None]
    assert list(metrics) == ["rewards/sum/tag_count"]
    assert "never_scores" in reasons["sum/reason"][0]
    parts = ["tag_count", {"name": "well_formed", "weight": 0}, {"name": "tag_presence", "weight": 2.5}]
    assert one({"name": "sum", "rewards": parts}).function(completions=["x"], **loggers) == [0.0]
    assert reasons["sum/reason"] == ["1 * tag_count + 2.5 * tag_presence"]
    with pytest.raises(ValueError, match="`one_score`.*2 in `completions`, 1 in `scores`"):
        one({"name": "sum", "rewards": [f"{HERE}.one_score"]}).function(completions=["a", "b"])


def gate(reward="gsm8k_correctness", only_if="well_formed", **keys):
    return one({"name": "gate", "reward": reward, "only_if": only_if, **keys})


RIGHT_ANSWER = "<answer>18</answer>"  # right, but not well formed
WRONG_ANSWER = TEXT.replace("18", "17")
FINED = {"name": "gsm8k_correctness", "kwargs": {"pay_wrong": -1}}
FINES_FORMAT = {"name": "sum", "rewards": [{"name": "well_formed", "weight": -1}]}
THINKS = "<think>\n<answer>18</answer>\n</think>"
GATES = [
    ({}, TEXT, "18", 2.0), ({}, TEXT, "17", 0.0), ({}, TEXT, "", None), ({}, RIGHT_ANSWER, "", None),
    ({"only_if": f"{HERE}.never_scores"}, TEXT, "18", None), ({"only_if": "tag_count"}, RIGHT_ANSWER, "18", 2.0),
    ({"only_if": "tag_count", "at_least": 0.5}, RIGHT_ANSWER, "18", 2.0),
    ({"only_if": "tag_count", "at_least": "1"}, RIGHT_ANSWER, "18", 0.0),
    ({"reward": f"{HERE}.length_reward", "only_if": "tag_count", "at_least": 0}, "xx", "18", 2.0),
    ({"reward": f"{HERE}.length_reward", "only_if": "tag_count"}, "xx", "18", 0.0),
    ({"reward": {"name": "gsm8k_correctness", "weight": 0.5}}, TEXT, "18", 1.0),
    ({"reward": {"name": "gsm8k_correctness", "kwargs": {"pay_wrong": -1}}}, TEXT, "17", -1.0),
    ({"reward": {"name": "gsm8k_correctness", "weight": -1}}, RIGHT_ANSWER, "18", -2.0),
]  # fmt: skip
# Completions that a sum, a product, or a gate on "not 0" would reward. The gold is 18.
GATE_TRAPS = {
    "a right answer in no format": ({}, "18", 0.0),
    "a right answer in half of the format": ({}, RIGHT_ANSWER, 0.0),
    "the format around a wrong answer": ({}, WRONG_ANSWER, 0.0),
    "the whole document twice": ({}, TEXT + TEXT, 0.0),
    "the format inside the thinking": ({}, THINKS, 0.0),
    "text behind the format": ({}, f"{TEXT} Done.", 0.0),
    "nothing": ({}, "", 0.0),
    "nothing, by a bound of 0": ({"only_if": "tag_count", "at_least": 0}, "", 0.0),
    "just below the bound": ({"only_if": "tag_count", "at_least": 0.75}, RIGHT_ANSWER, 0.0),
    "just above what can be paid": ({"at_least": 1.01}, TEXT, 0.0),
    "a condition that fines": ({"only_if": FINES_FORMAT}, TEXT, 0.0),
    "a fine that a condition below 0 would make a gain": (
        {"reward": FINED, "only_if": FINES_FORMAT}, WRONG_ANSWER, -1.0),
    "a fine that a closed gate would spare": ({"reward": FINED}, "17", -1.0),
    "a fine for no answer at all": ({"reward": FINED}, "", -1.0),
    "the condition's own pay": ({"only_if": {"name": "well_formed", "kwargs": {"pay": 5}}}, WRONG_ANSWER, 0.0),
    "a gate within that is closed": (
        {"reward": {"name": "gate", "reward": "gsm8k_correctness", "only_if": "tag_structure"}, "only_if": "tag_count"},
        RIGHT_ANSWER, 0.0),
    "a condition that another condition closes": (
        {"only_if": {"name": "gate", "reward": "tag_count", "only_if": "well_formed"}}, RIGHT_ANSWER, 0.0),
}  # fmt: skip


def test_a_gate_counts_its_reward_only_if_the_condition_holds():
    for keys, completion, gold, pay in GATES:
        assert gate(**keys).function(completions=[completion], answer=[gold]) == [pay], keys
    for kind, (keys, completion, pay) in GATE_TRAPS.items():
        assert gate(**keys).function(completions=[completion], answer=["18"]) == [pay], kind


def test_a_gate_logs_both_parts():
    columns, metrics, reasons = {}, {}, {}
    built = gate(alias="strict", weight=3)
    scores = built.function(
        prompts=["p"] * 3, completions=[TEXT, RIGHT_ANSWER, TEXT], answer=["18", "18", ""],
        log_extra=columns.__setitem__, log_metric=metrics.__setitem__, log_reason=reasons.__setitem__,
    )  # fmt: skip
    opened, closed, lost = reasons["strict/reason"]
    assert ("open" in opened, "closed" in closed, "gsm8k_correctness" in lost) == (True, True, True)
    assert scores == [2.0, 0.0, None]
    assert columns["strict/gsm8k_correctness"] == [2.0, 2.0, None]
    assert columns["strict/well_formed"] == [1.0, 0.0, 1.0]
    assert columns["strict/gsm8k_correctness/verdict"] == ["exact", "exact", "no gold"]
    assert metrics["rewards/strict/gsm8k_correctness"] == 2.0
    assert metrics["rewards/strict/well_formed"] == pytest.approx(2 / 3)
    assert (built.name, built.weight) == ("strict", 3.0)
    assert pickle.loads(pickle.dumps(built.function)) == built.function


def test_gates_and_sums_nest():
    both = {"name": "sum", "rewards": ["gsm8k_correctness", "tag_presence"]}
    inner = {"name": "gate", "reward": "gsm8k_correctness", "only_if": "well_formed"}
    twice = {"name": "gate", "alias": "both", "reward": "tag_count", "only_if": "well_formed"}
    summed = {"name": "sum", "rewards": ["tag_count", "tag_presence"]}
    for spec, scores in (
        ({"name": "gate", "reward": both, "only_if": "well_formed"}, [2.8, 0.0]),
        ({**inner, "only_if": twice}, [2.0, 0.0]), ({**inner, "only_if": summed, "at_least": 1.8}, [2.0, 0.0]),
        ({"name": "sum", "rewards": [inner, "tag_presence"]}, [2.8, 0.4]),
    ):  # fmt: skip
        columns = []
        log = lambda column, values, columns=columns: columns.append(column)  # noqa: E731
        assert one(spec).function(completions=[TEXT, RIGHT_ANSWER], answer=["18"] * 2, log_extra=log) == scores
        assert len(set(columns)) == len(columns)
    assert {"sum/gate", "sum/gate/gate/gsm8k_correctness", "sum/gate/gate/well_formed"} <= set(columns)


def test_a_gate_declares_the_properties_of_its_parts():
    grouped = {"name": "group_length", "kwargs": {"num_generations": 2}}
    for function in (gate(reward=grouped).function, gate(only_if=grouped).function):
        assert function.needs_whole_groups
    assert not gate().function.needs_whole_groups
    choices = gate(reward={"name": "choice_correctness", "weight": 2, "kwargs": {"pay": 1.5}}).function
    assert (choices.kind, choices.highest_pay) == ("correctness", 3.0)
    assert gate(reward={"name": "choice_correctness", "weight": -1}).function.highest_pay is None
    spec = {"name": "gate", "reward": "a", "only_if": {"name": "sum", "rewards": ["b"]}}
    assert spec_parts(spec) == ["a", {"name": "sum", "rewards": ["b"]}]
    assert spec_parts("a") == spec_parts({"name": "a", "kwargs": {"reward": 1}}) == []


TEXTS = ["", TEXT, "<answer>18</answer>", "\\boxed{18}", "18", "A", f"{TEXT}{TEXT}", "a b c a b c a b c", "<think>"]


DECLARED = [
    ("gsm8k_correctness", "correctness", 2.0), ("math_correctness", "correctness", 1.0),
    ("choice_correctness", "correctness", 1.0), ("string_match", "correctness", 1.0),
    ({"name": "gsm8k_correctness", "kwargs": {"pay_equal": 3, "pay_exact": 1}}, "correctness", 3.0),
    ("tag_structure", "format", 0.5), ("tag_count", "format", 1.0), ("tag_presence", "format", 0.8),
    ("well_formed", "format", 1.0), ({"name": "well_formed", "kwargs": {"pay": -1}}, "format", 0.0),
    ({"name": "well_formed", "alias": "tidy", "kwargs": {"pay": 3}}, "format", 3.0), ("group_length", "length", 0.5),
    ("repetition", "other", 0.0),
    ({"name": "sum", "rewards": [{"name": "tag_count", "weight": 3}, "well_formed"]}, "format", 4.0),
    ({"name": "sum", "rewards": ["tag_count", "gsm8k_correctness"]}, "other", 3.0),
    ({"name": "sum", "rewards": ["tag_count", {"name": "repetition", "weight": -1}]}, "other", None),
    ({"name": "sum", "rewards": [{"name": "tag_count", "weight": 0.5}, "repetition"]}, "other", 0.5),
    ({"name": "sum", "rewards": ["tag_count", {"name": f"{HERE}.length_reward", "weight": 0}]}, "format", 1.0),
    ({"name": "sum", "rewards": ["tag_count", f"{HERE}.length_reward"]}, "other", None),
    ({"name": "gate", "reward": "gsm8k_correctness", "only_if": "well_formed"}, "correctness", 2.0),
    (f"{HERE}.length_reward", "other", None),
    ({"name": f"{HERE}.length_reward", "kind": "length", "alias": "short"}, "length", None),
]  # fmt: skip


def test_a_reward_declares_its_kind_and_its_largest_score():
    for spec, kind, highest in DECLARED:
        built = one(spec, num_generations=1)
        assert (built.kind, built.highest_pay) == (kind, highest), spec
        scores = built.function(prompts=["p"] * len(TEXTS), completions=TEXTS, answer=["18"] * len(TEXTS))
        assert highest is None or all(score <= highest for score in scores if score is not None)


def test_a_spec_declares_what_a_reward_of_ones_own_pays_and_what_passes():
    for keys, declared in (
        ({"kind": "correctness", "highest_pay": 2}, ("correctness", 2.0, 2.0)),
        ({"kind": "correctness", "highest_pay": 2, "passes_at": "5e-1"}, ("correctness", 2.0, 0.5)),
        ({"highest_pay": 2}, ("other", 2.0, None)), ({"passes_at": 1}, ("other", None, 1.0)),
        ({"kind": "correctness"}, ("correctness", None, None)),
    ):  # fmt: skip
        built = one({"name": f"{HERE}.length_reward", **keys})
        assert (built.kind, built.highest_pay, built.passes_at) == declared
        total = one({"name": "sum", "rewards": [{"name": f"{HERE}.length_reward", **keys}, "tag_count"]})
        assert total.highest_pay == (None if declared[1] is None else declared[1] + 1.0)


OVERLONG = {"max_completion_len": 10, "soft_punish_cache": 5}
OF_TRL = [
    ("accuracy_reward", None, "correctness", 1.0), ("reasoning_accuracy_reward", None, "correctness", 1.0),
    ("think_format_reward", None, "format", 1.0), ("get_soft_overlong_punishment", OVERLONG, "length", 0.0),
    ("get_repetition_penalty_reward", {}, "other", 0.0),
]  # fmt: skip


def test_trls_own_rewards_are_known_under_an_alias_too():
    pytest.importorskip("trl")
    for name, kwargs, kind, highest in OF_TRL:
        for spec in ({"name": f"trl.rewards.{name}"}, {"name": f"trl.rewards.{name}", "alias": "theirs"}):
            built = one(spec if kwargs is None else {**spec, "kwargs": kwargs})
            assert (built.kind, built.highest_pay) == (kind, highest)
            assert TRL_REWARDS[built.unbound.__name__] == (kind, highest), "a factory makes a function of another name"
    spec = {"name": "trl.rewards.get_soft_overlong_punishment", "kwargs": OVERLONG}
    assert one(spec).function(prompts=["p"], completions=["c"], completion_ids=[[1] * 20]) == [-1]


def test_the_leaves_carry_their_weight_in_the_total():
    correctness = {"name": "gsm8k_correctness", "weight": 3}
    gated = {"name": "gate", "weight": 2, "reward": correctness, "only_if": "well_formed"}
    total = {"name": "sum", "weight": 5, "rewards": [gated, {"name": "group_length", "weight": 0.5}, "tag_count"]}
    found = [(leaf.name, leaf.weight, leaf.kind) for leaf in leaves(build_rewards([total, f"{HERE}.length_reward"]))]
    assert found == [
        ("gsm8k_correctness", 30.0, "correctness"), ("well_formed", 0.0, "format"),  # a condition is not in the total
        ("group_length", 2.5, "length"), ("gsm8k_correctness", 0.0, "correctness"), ("tag_count", 5.0, "format"),
        ("length_reward", 1.0, "other"),
    ]  # fmt: skip


def test_several_correctness_rewards_log_columns_of_their_own():
    # TRL appends two columns of one name to each other, and fails when it writes the table.
    lenient = {"name": "gsm8k_correctness", "alias": "lenient", "kwargs": {"extract": "auto"}}
    columns = []
    for built in build_rewards(["gsm8k_correctness", lenient, {"name": "sum", "rewards": ["math_correctness"]}]):
        built.function(completions=["a"], answer=["1"], log_extra=lambda column, values: columns.append(column))
    assert len(set(columns)) == len(columns) == 10
    (alone,) = build_rewards(["gsm8k_correctness"])
    columns.clear()
    alone.function(completions=["a"], answer=["1"], log_extra=lambda column, values: columns.append(column))
    assert columns == ["extracted", "gold", "verdict"]


def test_every_ready_reward_is_exported_and_named_as_registered():
    # These two need the name of a model or an endpoint.
    ready = [name for name in REGISTERED if name not in ("reward_model", "judge")]
    for name in ready:
        assert getattr(grpo_rewards, name).__name__ == name
        assert isinstance(getattr(grpo_rewards, name), resolve(name))


def test_a_function_in_a_file_is_a_reward(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("calls = []\ncalls.append(1)\ndef score(prompts, completions, **columns):\n"
                                     "    return [float(len(calls))] * len(completions)\n")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    names = ["own.py:score", {"name": str(tmp_path / "own.py:score"), "alias": "again"}]
    built = build_rewards(names)
    assert [reward.name for reward in built] == ["score", "again"]
    assert [reward.function(prompts=["p"], completions=["c"]) for reward in built] == [[1.0], [1.0]]


def test_a_changed_file_is_read_again_in_the_same_second(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    file, paid = tmp_path / "own.py", []
    for value in (0, 1):  # Python takes its compiled copy for current if size and second are equal
        file.write_text(f"def score(prompts, completions, **columns):\n    return [{value}.0]\n")
        (reward,) = build_rewards([f"{file}:score"])
        paid.append(reward.function(prompts=["p"], completions=["c"]))
    assert paid == [[0.0], [1.0]]


def test_an_interrupt_while_a_file_is_imported_is_not_an_error_of_the_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("raise KeyboardInterrupt\n")
    for _ in range(2):  # a module whose import ended early is not taken for a finished one
        with pytest.raises(KeyboardInterrupt):
            build_rewards([f"{file}:score"])


def test_one_reward_that_logs_columns_needs_no_prefix():
    (alone, _) = build_rewards(["gsm8k_correctness", "tag_count"])
    assert alone.function.prefix == ""
    spec = {"name": "math_correctness", "alias": "m", "kwargs": {"prefix": "own_"}}
    (first, second) = build_rewards(["gsm8k_correctness", spec])
    assert (first.function.prefix, second.function.prefix) == ("gsm8k_correctness/", "own_")


def test_the_own_name_of_a_reward():
    ours = ("math_correctness", "grpo_rewards.math.correctness.MathCorrectness", "grpo_rewards.math_correctness",
            "grpo_rewards.math.correctness.math_correctness")  # fmt: skip
    assert {own_name(name) for name in ours} == {"math_correctness"}
    assert own_name("grpo_rewards.schema.json_schema") == "json_schema"
    for name in ("grpo_rewards.schema.math_correctness", "correctness.math_correctness", "MathCorrectness", "sum"):
        assert own_name(name) is None
