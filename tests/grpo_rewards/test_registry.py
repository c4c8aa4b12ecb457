"""Reward specs: what builds, what is refused, and the sum."""

import asyncio
import inspect
import pickle
from dataclasses import dataclass

import pytest

import grpo_rewards
from grpo_rewards.registry import RewardSpecError, SumReward, build_rewards, registered_names, resolve

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


def test_a_name_is_the_ready_reward():
    built = one("gsm8k_correctness")
    assert (built.function, built.weight, built.name) == (grpo_rewards.gsm8k_correctness, 1.0, "gsm8k_correctness")


def test_kwargs_reach_a_registered_class():
    built = one({"name": "gsm8k_correctness", "kwargs": {"extract": "hashes", "pay_exact": "3e0"}, "weight": 0.5})
    assert built.weight == 0.5
    assert built.function(prompts=None, completions=["#### 18"], answer=["18"]) == [3.0]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (f"{HERE}.length_reward", [3.0]),
        ({"name": f"{HERE}.length_factory", "kwargs": {"scale": 2}}, [6.0]),
        ({"name": f"{HERE}.length_factory", "kwargs": {}}, [3.0]),
        (f"{HERE}.Constant", [1.0]),
        ({"name": f"{HERE}.Constant", "kwargs": {"value": 4.0}}, [4.0]),
        ({"name": "grpo_rewards.tag_count", "kwargs": {"tags": ["a", "b"]}}, [0.0]),
    ],
)
def test_dotted_paths(spec, expected):
    assert one(spec).function(prompts=["p"], completions=["abc"]) == expected


def test_a_trl_factory_is_called_first():
    pytest.importorskip("trl")
    spec = {"name": "trl.rewards.get_soft_overlong_punishment",
            "kwargs": {"max_completion_len": 10, "soft_punish_cache": 5}}  # fmt: skip
    assert one(spec).function(prompts=["p"], completions=["c"], completion_ids=[[1] * 20]) == [-1]


def test_an_alias_renames_functions_classes_and_coroutines():
    for name in ("length_reward", "Constant", "async_reward"):
        built = one({"name": f"{HERE}.{name}", "alias": "renamed"})
        assert built.name == built.function.__name__ == "renamed"
        pickle.loads(pickle.dumps(built.function))
    assert inspect.iscoroutinefunction(built.function.__call__)
    assert asyncio.run(built.function(prompts=["p"], completions=["c"])) == [1.0]


def test_the_group_size_reaches_who_asks_for_it_and_yields_to_kwargs():
    specs = [
        (f"{HERE}.group_size_reward", 4.0),
        (f"{HERE}.Constant", 4),
        ({"name": f"{HERE}.Constant", "kwargs": {"num_generations": 2}}, 2),
    ]
    for spec, expected in specs:
        assert one(spec, num_generations=4).function(prompts=["p"], completions=["c"]) == [expected]
    assert one("group_length", num_generations=4).function.num_generations == 4


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ("gsm8k_correctness", "must be a list"),
        (["gsm8k_corectness"], "did you mean 'gsm8k_correctness'"),
        (["grpo_rewards.tag_prezence"], "did you mean 'tag_presence'"),
        (["no_such_package.reward"], "'no_such_package' can't be imported"),
        ([{"weight": 1.0}], "key 'name'"),
        ([{"name": "tag_count", "wieght": 1.0}], "'tag_count': unknown key 'wieght'; did you mean 'weight'"),
        ([{"name": "tag_count", "rewards": []}], "unknown key 'rewards'"),
        ([{"name": "tag_count", "weight": float("nan")}], "weight must be a finite number"),
        ([{"name": "tag_count", "weight": True}], "weight must be a finite number"),
        ([{"name": "tag_count", "kwargs": {"tag": []}}], "unknown kwarg 'tag'; did you mean 'tags'"),
        ([{"name": "tag_count", "kwargs": {"tags": "think"}}], "'tag_count': tags must be two different tag names"),
        ([{"name": "tag_count", "kwargs": ["think"]}], "kwargs must be a mapping"),
        ([{"name": "tag_count", "alias": 3}], "alias must be a string"),
        ([{"name": "gsm8k_correctness", "kwargs": {"extract": "tag"}}], "extract must be one of answer_tag, hashes"),
        ([{"name": "gsm8k_correctness", "kwargs": {"pay_exact": "inf"}}], "pay_exact must be a finite number"),
        ([{"name": "reward_model"}], "'reward_model'"),
        (["tag_count", "tag_count"], "2 rewards are named 'tag_count'"),
        ([{"name": "sum", "rewards": []}], "at least one reward"),
        ([{"name": "sum", "rewards": ["tag_count", "tag_count"]}], "2 rewards are named 'tag_count'"),
        ([{"name": "sum", "rewards": [f"{HERE}.async_reward"]}], "asynchronous"),
        (["math.pi"], "can't be called"),
    ],
)
def test_a_bad_spec_is_one_sentence(specs, message):
    with pytest.raises(RewardSpecError, match=message.replace("'", ".")) as caught:
        build_rewards(specs)
    assert "\n" not in str(caught.value)


def test_a_sum_adds_weighted_parts_and_logs_them():
    total = one({"name": "sum", "alias": "format", "weight": 2.0,
                 "rewards": ["tag_structure", {"name": "tag_count", "weight": 2.0}]})  # fmt: skip
    columns, metrics = {}, {}
    scores = total.function(
        prompts=["p", "p"],
        completions=[TEXT, "<think>"],
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert scores == [0.5 + 2 * 1.0, 2 * 0.25]
    assert columns == {"format/tag_structure": [0.5, 0.0], "format/tag_count": [1.0, 0.25]}
    assert metrics == {"rewards/format/tag_structure": 0.25, "rewards/format/tag_count": 0.625}
    assert (total.name, total.weight) == ("format", 2.0)
    assert pickle.loads(pickle.dumps(total.function)) == total.function


def test_a_sum_with_an_unscorable_part_is_none():
    total = one({"name": "sum", "rewards": ["tag_count", f"{HERE}.never_scores"]})
    metrics = {}
    assert total.function(prompts=["p"], completions=["c"], log_metric=metrics.__setitem__) == [None]
    assert list(metrics) == ["rewards/sum/tag_count"]


def test_several_correctness_rewards_log_columns_of_their_own():
    # TRL appends what two rewards log under one name, and fails when it writes the table.
    lenient = {"name": "gsm8k_correctness", "alias": "lenient", "kwargs": {"extract": "auto"}}
    columns = []
    for built in build_rewards(["gsm8k_correctness", lenient, {"name": "sum", "rewards": ["math_correctness"]}]):
        built.function(completions=["a"], answer=["1"], log_extra=lambda column, values: columns.append(column))
    assert len(set(columns)) == len(columns) == 10
    (alone,) = build_rewards(["gsm8k_correctness"])
    columns.clear()
    alone.function(completions=["a"], answer=["1"], log_extra=lambda column, values: columns.append(column))
    assert columns == ["extracted", "gold", "verdict"]


def test_an_entry_point_is_a_registered_name(monkeypatch):
    from importlib.metadata import EntryPoint

    point = EntryPoint(name="my_length", value=f"{HERE}:length_reward", group="grpo_rewards.rewards")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    assert "my_length" in registered_names()
    assert one("my_length").function(prompts=["p"], completions=["abc"]) == [3.0]


def test_needs_whole_groups_shows_through_a_sum_and_an_alias():
    class Grouped(Constant):
        needs_whole_groups = True

    built = grpo_rewards.registry.BuiltReward(Grouped(), 1.0, "grouped")
    assert SumReward((built,)).needs_whole_groups
    assert not one("tag_count").function.__dict__.get("needs_whole_groups", False)


def test_every_ready_reward_is_exported_and_named_as_registered():
    # A model and an endpoint have to be named.
    ready = [name for name in registered_names() if name not in ("reward_model", "judge")]
    for name in ready:
        assert getattr(grpo_rewards, name).__name__ == name
        assert isinstance(getattr(grpo_rewards, name), resolve(name))
