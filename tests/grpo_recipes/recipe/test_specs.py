"""Mappings of a recipe, parsed on their own, and the types of keys."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from grpo_recipes.recipe.dataset import DatasetSpec, PassRateSpec, SourceSpec
from grpo_recipes.recipe.specs import (
    MicroBatching,
    OfflineSpec,
    Range,
    ReferenceSpec,
    SamplingSpec,
    ToolLimits,
    check_number,
    typed,
)
from grpo_rewards.redaction import HIDDEN
from tests.support.errors import refused

INF, NAN = float("inf"), float("nan")
MADE = ("arithmetic", "products", "secret_number", "programs")
PAIRED = ("gsm8k", "math", "multiple_choice", "classification", "extraction", "rlaif", None)
READ = (*PAIRED, "scored")
KEYS: dict[str, tuple[Any, tuple[str | None, ...]]] = {
    "config": ("main", PAIRED),
    "columns": (["question"], READ),
    "eval_path": ("b.jsonl", READ),
    "delimiter": (";", READ),
    "encoding": ("cp1252", READ),
    "decimal": ("comma", READ),
    "drop_missing": (True, PAIRED),
    "size": (8, MADE[:-1]),
    "seed": (1, MADE[:-1]),
    "pass_rate": ({"evaluation": "e", "keep": [0.1, 0.9]}, (*MADE, *PAIRED)),
    "system_prompt": ("boxed", (*MADE, *PAIRED)),
    "prompt_template": ("{{ question }}", (*MADE, *PAIRED)),
    "eval_share": (0.5, (*MADE, *PAIRED)),
    "split": ("test", (*MADE, *READ)),
    "max_prompt_tokens": (9, (*MADE, *READ)),
}
"""A value of each key of `dataset`, and the datasets that use the key. None stands for rows without a preset."""


def own(name: str | None) -> dict[str, Any]:
    """Return the keys that a dataset needs."""
    path = {} if name in MADE else {"path": "a.jsonl"}
    labels = {"labels": ["no", "yes"]} if name == "classification" else {}
    return {"name": name, **path, **labels}


def dataset(**keys: Any) -> DatasetSpec:
    return DatasetSpec.parse({"path": "rows.jsonl", **keys})


def test_a_dataset_refuses_a_key_that_it_does_not_use() -> None:
    for key, (value, users) in KEYS.items():
        for name in (*MADE, *READ):
            if name in users:
                DatasetSpec.parse({**own(name), key: value})
                continue
            with refused(f"`dataset.{key}`", f"`{name or 'path'}`"):
                DatasetSpec.parse({**own(name), key: value})


def test_a_preset_has_its_system_prompt_and_its_own_form() -> None:
    for system_prompt, names in (
        ("reasoning", ["gsm8k", "multiple_choice", "classification", "rlaif", "arithmetic"]),
        ("boxed", ["math", "products"]),
        ("program", ["programs"]),
        (None, ["extraction", "secret_number", "scored", None]),
    ):
        for name in names:
            spec = DatasetSpec.parse(own(name))
            form = {None: None, "scored": "text"}.get(name, "conversational")
            assert (spec.system_prompt, spec.prompt_format) == (system_prompt, form)


def test_a_path_is_needed_unless_the_preset_has_a_home() -> None:
    for name in (*MADE, "gsm8k", "math"):
        assert DatasetSpec.parse({"name": name}).path is None
    for name in ("multiple_choice", "extraction", "rlaif", "scored"):
        with refused("`dataset.path`", name):
            DatasetSpec.parse({"name": name})
    with refused("`dataset.path`", "`dataset.name`"):
        DatasetSpec.parse({})


def test_recorded_responses_are_in_one_table_of_text() -> None:
    for path in ("a.jsonl", "a.json.gz", "a.csv.zst", "a.tsv", "a.parquet"):
        assert DatasetSpec.parse({"name": "scored", "path": path}).path == path
    for path in ("a", "a.parquet.gz", "a.jsonl.zip", "a.jsonl/b", ["a.jsonl", "b.jsonl"]):
        with refused("`dataset.path`", repr(path)):
            DatasetSpec.parse({"name": "scored", "path": path})
    with refused("`dataset.prompt_format`"):
        DatasetSpec.parse({"name": "scored", "path": "a.jsonl", "prompt_format": "conversational"})


# Keys of a dataset, the place of the error, and a figure of it.
MISTAKES: list[tuple[dict[str, Any], str, object]] = [
    *(
        ({"pass_rate": {"evaluation": "e", "keep": keep}}, "pass_rate.keep", keep)
        for keep in ([0.5], [0.1, 0.2, 0.3], [0.9, 0.1], [-0.1, 0.1], [0.0, 1.1])
    ),
    ({"pass_rate": {"evaluation": "e"}}, "pass_rate.keep", ""),
    ({"max_prompt_tokens": 0}, "max_prompt_tokens", 0),
    ({"eval_share": 0}, "eval_share", 0.0),
    ({"eval_share": 1}, "eval_share", 1.0),
    ({"eval_share": 0.5, "eval_split": "test"}, "eval_split", "`dataset.eval_share`"),
    ({"eval_share": 0.5, "eval_path": "b"}, "eval_path", "`dataset.eval_share`"),
    *(({"delimiter": delimiter}, "delimiter", repr(delimiter)) for delimiter in ("", '"', "\n", "\r", ";;", "é")),
    ({"encoding": "utf-9"}, "encoding", "'utf-9'"),
    *(({"columns": columns}, "columns", "") for columns in ({"q": ""}, {"": "p"}, {"q": 3}, {"a\0": "b"}, ["a\ud800"])),
    ({"name": "classification", "labels": ["a", "a"]}, "labels", ""),
    ({"path": ""}, "path", ""),
    ({"path": []}, "path", ""),
    ({"path": [{"name": "a"}]}, "path.path", ""),
    ({"path": [{"path": "a", "fraction": 1}, "b"]}, "path", "`fraction`"),
    ({"eval_path": ["b", {"path": "c", "fraction": 1}]}, "eval_path", "`fraction`"),
    ({"path": [{"path": "a", "fraction": 0}, {"path": "b", "fraction": 1}]}, "path.fraction", 0.0),
    *(
        ({"path": ["a", "b"], key: value}, key, "")
        for key, value in {"config": "main", "split": "test", "eval_split": "test", "encoding": "cp1252"}.items()
    ),
    ({"eval_path": ["b"], "config": "main"}, "config", ""),
    *(
        ({"system_prompt": given}, "system_prompt", given)
        for given in ({"text": "x"}, {"file": "x", "a": 1}, {"file": 1})
    ),
    ({"system_prompt": " \n"}, "system_prompt", "`none`"),
    ({"system_prompt": "reasonning"}, "system_prompt", "`reasoning`"),
]


@pytest.mark.parametrize(("given", "key", "figure"), MISTAKES)
def test_a_mistake_in_a_dataset_is_named(given: dict[str, Any], key: str, figure: object) -> None:
    with refused(f"`dataset.{key}`", figure):
        dataset(**given)


def test_a_misspelt_key_or_preset_is_named_with_the_nearest() -> None:
    for given, place, figure in (
        ({"name": "arithmetic", "sise": 3}, "`dataset.sise`", "`size`"),
        ("gsm9k", "`dataset.name`", "`gsm8k`"),
        ("rows.jsonl", "`dataset.name`", "{path: rows.jsonl}"),
    ):
        with refused(place, figure):
            DatasetSpec.parse(given)


def test_what_lies_on_a_limit_of_a_dataset_is_taken() -> None:
    for keep in ([0, 1], [0.5, 0.5]):
        spec = dataset(pass_rate={"evaluation": "e", "keep": keep})
        assert spec.pass_rate == PassRateSpec("e", [float(share) for share in keep])
    mixture = DatasetSpec.parse({"path": [{"path": "a", "fraction": 1}, {"path": "b", "fraction": 0.5}]})
    assert isinstance(mixture.path, list)
    assert [source.fraction for source in mixture.path] == [1.0, 0.5]
    held_out = dataset(split="test[:5%]", encoding="cp1252", delimiter="\t", eval_path=["b", "c"])
    assert [source.path for source in held_out.eval_path or [] if isinstance(source, SourceSpec)] == ["b", "c"]
    for name in ("reasoning", "think", "boxed", "program", "minimind", "none", "two words"):
        assert dataset(system_prompt=f" {name}\n").system_prompt == name
    assert dataset(name="gsm8k", system_prompt="boxed").system_prompt == "boxed"
    assert dataset(drop_missing=False).as_dict()["drop_missing"] is False


def test_a_system_prompt_may_be_the_text_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffThink first.\n".encode())
    for path in (str(file), "~/prompt.txt"):
        assert dataset(system_prompt={"file": path}).system_prompt == "Think first."
    (tmp_path / "folder").mkdir()
    # The last is the name of a prompt, which a file does not name.
    for content, path, figure in (
        (b"", "nowhere.txt", ""),
        (b"caf\xe9", "prompt.txt", "UTF-8"),
        (b"", "folder", ""),
        (b" \n", "prompt.txt", "`none`"),
        (b"reasoning\n", "prompt.txt", "`reasoning`"),
    ):
        file.write_bytes(content)
        with refused(f"`dataset.system_prompt`: ~/{path}", figure):
            dataset(system_prompt={"file": f"~/{path}"})


def test_a_reference_has_a_name_or_an_adapter() -> None:
    assert ReferenceSpec.parse("base") == ReferenceSpec(name="base")
    assert ReferenceSpec.parse({}).as_dict() == {"name": "initial", "reset_optimizer_on_sync": False}
    assert ReferenceSpec.parse({"adapter": "a"}).as_dict() == {"adapter": "a", "reset_optimizer_on_sync": False}
    for name in ("initial", "base"):
        with refused("`reference`", "`name` and `adapter`"):
            ReferenceSpec.parse({"name": name, "adapter": ""})
    with refused("`reference.name`", "`base`"):
        ReferenceSpec.parse("bsae")


def test_a_refresh_mixes_a_reference_that_the_loss_reads() -> None:
    keys = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 4, "ref_model_mixup_alpha": 0.5}

    def check(reference: ReferenceSpec, **changes: Any) -> None:
        reference.check_refresh(SimpleNamespace(**{**keys, **changes}))

    check(ReferenceSpec())
    check(ReferenceSpec(reset_optimizer_on_sync=True))
    check(ReferenceSpec(name="base"), sync_ref_model=False, beta=0.0)
    for key, value in (("beta", 0.0), ("ref_model_sync_steps", 0), *(("ref_model_mixup_alpha", n) for n in (1.5, 0.0))):
        with refused(f"`{key}`", value):
            check(ReferenceSpec(), **{key: value})
    with refused("`reference`", "`base`"):
        check(ReferenceSpec(name="base"))
    with refused("`sync_ref_model`", "`reference.reset_optimizer_on_sync`"):
        check(ReferenceSpec(reset_optimizer_on_sync=True), sync_ref_model=False)


def test_words_stand_for_mappings() -> None:
    assert MicroBatching.parse(False) == MicroBatching.parse("off") == MicroBatching(layout="padded")
    assert MicroBatching.parse("auto") == MicroBatching.parse({}) == MicroBatching("packed", True)
    assert not MicroBatching("padded", True).skip_zero_advantage, "TRL's layout skips no row"
    assert MicroBatching("trimmed", False).as_dict() == {"layout": "trimmed", "skip_zero_advantage": False}
    assert [OfflineSpec.parse(word).compares_whole_batch for word in ("group", "batch")] == [False, True]
    assert OfflineSpec.parse({}).baseline == "group"
    assert SamplingSpec.parse({}) == SamplingSpec("biased", 0.5, 0.1) == SamplingSpec.parse("informative")
    assert SamplingSpec.parse({"informative": "unbiased"}).is_unbiased
    assert not SamplingSpec.parse("informative").is_unbiased
    for given, place, figure in (
        ("of", "`micro_batching`", "auto, off"),
        (True, "`micro_batching`", "True"),
        ({"layout": "of"}, "`micro_batching.layout`", "packed"),
        ({"rows": 1}, "`micro_batching.rows`", "layout, skip_zero_advantage"),
    ):
        with refused(place, figure):
            MicroBatching.parse(given)


def test_tool_limits_have_defaults_and_take_numbers_as_yaml_writes_them() -> None:
    assert ToolLimits.parse({}) == ToolLimits(seconds=30.0, result_tokens=512, failures=0.5)
    assert ToolLimits.parse({"seconds": "2.5", "result_tokens": 64.0}) == ToolLimits(2.5, 64)
    assert ToolLimits.parse({"failures": 0}).failures == 0.0
    assert ToolLimits.parse({"seconds": 0.5}).seconds == 0.5


def test_a_value_out_of_the_range_of_its_field_is_named() -> None:
    for kind, given, key, figure in (
        (ToolLimits, {"seconds": 0}, "tool_limits.seconds", "86,400"),
        (ToolLimits, {"seconds": INF}, "tool_limits.seconds", "inf"),
        (ToolLimits, {"result_tokens": 0}, "tool_limits.result_tokens", 0),
        (ToolLimits, {"failures": 50}, "tool_limits.failures", 50.0),
        (ToolLimits, {"second": 3}, "tool_limits.second", "`seconds`"),
        (ToolLimits, [30], "tool_limits", "[30]"),
        (SamplingSpec, {"exploration": 0}, "sampling.exploration", 0.0),
        (SamplingSpec, {"floor": 1.5}, "sampling.floor", 1.5),
    ):
        with refused(f"`{key}`", figure):
            kind.parse(given)


@pytest.mark.parametrize(
    ("key", "sums", "others"),
    [
        ("loss_type", ("grpo", "sapo", "luspo", "dr_grpo"), ("bnpo", "dapo", "cispo", "vespo")),
        ("beta", (0.0,), (0.01,)),
        ("scale_rewards", ("group", "none"), ("batch",)),
        ("multi_objective_aggregation", ("sum_then_normalize",), ("normalize_then_sum",)),
        ("top_entropy_quantile", (1.0,), (0.5,)),
        ("entropy_coef", (0.0,), (0.01,)),
        ("use_adaptive_entropy", (False,), (True,)),
        ("router_aux_loss_coef", (0.0,), (0.01,)),
    ],
)
def test_unbiased_sampling_needs_independent_advantages(key: str, sums: Any, others: Any) -> None:
    """A loss that divides by the tokens or the rows of others is no sum of advantages."""
    independent = {
        **{"loss_type": "grpo", "beta": 0.0, "scale_rewards": "group", "entropy_coef": 0.0},
        **{"multi_objective_aggregation": "sum_then_normalize", "top_entropy_quantile": 1.0},
        **{"use_adaptive_entropy": False, "router_aux_loss_coef": 0.0},
    }
    unbiased = SamplingSpec("unbiased")
    for value in sums:
        unbiased.check(SimpleNamespace(**{**independent, key: value}), router_loss=True)
    for value in others:
        config = SimpleNamespace(**{**independent, key: value})
        with refused(f"`{key}`", value):
            unbiased.check(config, router_loss=True)
        SamplingSpec("biased").check(config, router_loss=True)
    unbiased.check(SimpleNamespace(**{**independent, "router_aux_loss_coef": 0.01}), router_loss=False)


# Types and ranges


def test_a_value_becomes_the_type_of_its_key_if_nothing_is_lost() -> None:
    for hint, given, expected in (
        (int | None, None, None),
        (int, 8.0, 8),
        (int, "8", 8),
        (float, -3, -3.0),
        (float, "5e-6", 5e-6),
        (bool, "TRUE", True),
        (str, 8, "8"),
        (str, True, "true"),
        (str, Path("a/b"), "a/b"),
        (str | None, "", ""),
        (int | str, "3", "3"),  # a type that the value has comes before one that it can become
        (list[str], "a", ["a"]),
        (list[str], ["a", 1], ["a", "1"]),
        (list[int], ["1", 2.0], [1, 2]),
        (list, [1, "a"], [1, "a"]),
        (Literal["1", "2"], "2", "2"),
        (Literal["on", "off"], False, "off"),
    ):
        found = typed("key", given, hint)
        assert (found, type(found)) == (expected, type(expected)), hint
    # `no` is a strategy, which YAML reads as false.
    assert (typed("eval_strategy", False, str), typed("run_name", False, str)) == ("no", "false")
    assert typed("eval_strategy", True, str) == "true"


def test_a_value_of_another_type_is_named() -> None:
    for hint, given, figure in (
        (int, 8.5, "8.5"),
        (int, True, "True"),
        (int, INF, "inf"),
        (int, None, "None"),
        (float, "much", "'much'"),
        (bool, "yes", "'yes'"),
        (bool, 1, "1"),
        (list[int], ["x"], "['x']"),
        (dict[str, Any] | None, 3, "3"),
        (Literal["on", "off"], "of", "`off`"),
        (str, None, "None"),
    ):
        with refused("`key`", figure):
            typed("key", given, hint)


def test_a_secret_is_not_shown_in_an_error() -> None:
    for value in (["hf_0123456789abcdefghij"], "a secret of one's own"):
        with refused("`hub_token`", HIDDEN) as caught:
            typed("hub_token", value, bool)
        assert str(value) not in str(caught.value)
    with refused("`wandb`", "'name': 'x'") as caught:
        typed("wandb", {"api_key": "0123456789abcdef", "name": "x"}, bool)
    assert "0123456789abcdef" not in str(caught.value)


def test_a_range_holds_its_ends_unless_its_words_exclude_them() -> None:
    for allowed, inside, outside, words in (
        (Range(0), [0, 1e9], [-1e-9, -1, INF, -INF, NAN], "0"),
        (Range(0, above=True), [1e-30, 1], [0, -1, INF, NAN], "above 0"),
        (Range(0, 1, above=True), [1e-9, 1], [0, 1.0001, NAN], "above 0 and at most 1"),
        (Range(0, 1, below=True), [0, 0.999], [1, -0.1], "0 and below 1"),
        (Range(0, or_=-1), [-1, 0, 50], [-2, -0.5], "0, or -1"),
        (Range(1, 65535), [1, 65535], [0, 65536], "65,535"),
        (Range(1, or_=0), [0, 1], [-1, 0.5], "1, or 0"),
    ):
        for value in (None, *inside):
            check_number("key", value, allowed)
        for value in outside:
            with refused("`key`", value, words):
                check_number("key", value, allowed)
