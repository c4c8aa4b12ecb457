"""Mappings of a recipe, parsed on their own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from grpo_recipes.recipe.specs import (
    DatasetSpec,
    MicroBatching,
    OfflineSpec,
    PassRateSpec,
    ReferenceSpec,
    SamplingSpec,
    SourceSpec,
    ToolLimits,
    typed,
)
from grpo_rewards.errors import UserError
from grpo_rewards.redaction import HIDDEN


def test_tool_limits_have_defaults_and_take_numbers_as_yaml_writes_them() -> None:
    assert ToolLimits.parse({}) == ToolLimits(seconds=30.0, result_tokens=512, failures=0.5)
    assert ToolLimits.parse({"seconds": "2.5", "result_tokens": 64.0}) == ToolLimits(2.5, 64)
    assert ToolLimits.parse({"failures": 0}).failures == 0.0
    assert ToolLimits.parse({"seconds": 0.5}).seconds == 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seconds": 0}, "`tool_limits.seconds` is 0.0: set a number above 0 and at most 86,400"),
        ({"seconds": float("inf")}, "`tool_limits.seconds` is inf"),
        ({"seconds": True}, "`tool_limits.seconds` must be a number, not True"),
        ({"result_tokens": 0}, "`tool_limits.result_tokens` is 0: set a number of at least 1"),
        ({"failures": 50}, "`tool_limits.failures` is 50.0: set a number of at least 0 and at most 1"),
        ({"timeout": 3}, "unknown key `tool_limits.timeout`"),
        ({"second": 3}, "unknown key `tool_limits.second`: did you mean `seconds`?"),
        ([30], "`tool_limits` must be a name, or a mapping of seconds, result_tokens, failures, not [30]"),
    ],
)
def test_tool_limits_out_of_range_are_named(given: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        ToolLimits.parse(given)
    assert str(caught.value).startswith(message)


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


@pytest.mark.parametrize("key", KEYS)
def test_a_dataset_refuses_a_key_that_it_does_not_use(key: str) -> None:
    value, users = KEYS[key]
    for name in (*MADE, *READ):
        if name in users:
            DatasetSpec.parse({**own(name), key: value})
            continue
        with pytest.raises(UserError) as caught:
            DatasetSpec.parse({**own(name), key: value})
        assert str(caught.value) == f"`dataset.{key}` does not go with the dataset `{name or 'path'}`: remove it"


@pytest.mark.parametrize(
    ("system_prompt", "names"),
    [
        ("reasoning", ["gsm8k", "multiple_choice", "classification", "rlaif", "arithmetic"]),
        ("boxed", ["math", "products"]),
        ("program", ["programs"]),
        (None, ["extraction", "secret_number", "scored", None]),
    ],
)
def test_a_preset_has_its_system_prompt_and_its_own_form(system_prompt: str | None, names: list[str | None]) -> None:
    for name in names:
        spec = DatasetSpec.parse(own(name))
        form = {None: None, "scored": "text"}.get(name, "conversational")
        assert (spec.system_prompt, spec.prompt_format) == (system_prompt, form)


def test_a_path_is_needed_unless_the_preset_has_a_home() -> None:
    for name in (*MADE, "gsm8k", "math"):
        assert DatasetSpec.parse({"name": name}).path is None
    for name in ("multiple_choice", "extraction", "rlaif", "scored"):
        with pytest.raises(UserError) as caught:
            DatasetSpec.parse({"name": name})
        assert str(caught.value) == (
            f"`dataset.path` is missing: name the file, folder or hub id that `{name}` is to read"
        )
    with pytest.raises(UserError, match="folder or hub id to read, or a preset with `dataset.name`$"):
        DatasetSpec.parse({})


def test_recorded_responses_are_in_one_table_of_text() -> None:
    for path in ("a.jsonl", "a.json.gz", "a.csv.zst", "a.tsv", "a.parquet"):
        assert DatasetSpec.parse({"name": "scored", "path": path}).path == path
    for path in ("a", "a.parquet.gz", "a.jsonl.zip", "a.jsonl/b", ["a.jsonl", "b.jsonl"]):
        with pytest.raises(UserError, match=r"^`dataset\.path`: `scored` reads a file, not .*: name a \.jsonl file$"):
            DatasetSpec.parse({"name": "scored", "path": path})
    with pytest.raises(UserError, match="recorded prompts are text as they stand: remove the key"):
        DatasetSpec.parse({"name": "scored", "path": "a.jsonl", "prompt_format": "conversational"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pass_rate": {"evaluation": "e", "keep": [0.5]}}, "`dataset.pass_rate.keep` is [0.5]"),
        ({"pass_rate": {"evaluation": "e", "keep": [0.1, 0.2, 0.3]}}, "`dataset.pass_rate.keep` is [0.1, 0.2, 0.3]"),
        ({"pass_rate": {"evaluation": "e", "keep": [0.9, 0.1]}}, "`dataset.pass_rate.keep` is [0.9, 0.1]"),
        ({"pass_rate": {"evaluation": "e", "keep": [-0.1, 0.1]}}, "`dataset.pass_rate.keep` is [-0.1, 0.1]"),
        ({"pass_rate": {"evaluation": "e", "keep": [0.0, 1.1]}}, "`dataset.pass_rate.keep` is [0.0, 1.1]"),
        ({"max_prompt_tokens": 0}, "`dataset.max_prompt_tokens` is 0: set a number of at least 1"),
        ({"eval_share": 0}, "`dataset.eval_share` is 0.0: set a number above 0 and below 1"),
        ({"eval_share": 1}, "`dataset.eval_share` is 1.0: set a number above 0 and below 1"),
        ({"eval_share": 0.5, "eval_split": "test"}, "`dataset.eval_split` does not go with `dataset.eval_share`"),
        ({"eval_share": 0.5, "eval_path": "b"}, "`dataset.eval_path` does not go with `dataset.eval_share`"),
        ({"delimiter": ""}, "`dataset.delimiter` is '': set one ASCII character"),
        ({"delimiter": '"'}, "`dataset.delimiter` is '\"': set one ASCII character"),
        ({"delimiter": "\n"}, "`dataset.delimiter` is '\\n': set one ASCII character"),
        ({"delimiter": "\r"}, "`dataset.delimiter` is '\\r': set one ASCII character"),
        ({"path": []}, "`dataset.path` is an empty list: name at least one source"),
        ({"path": [{"path": "a", "fraction": 1}, "b"]}, "`dataset.path`: give every source a `fraction`, or none"),
        (
            {"path": [{"path": "a", "fraction": 0}, {"path": "b", "fraction": 1}]},
            "`dataset.path.fraction` of a is 0.0: set a number above 0 and at most 1",
        ),
        *(
            (
                {"path": ["a", "b"], key: value},
                f"`dataset.{key}` does not go with a list of sources, each of which has keys of its own: remove it",
            )
            for key, value in {"config": "main", "split": "test", "eval_split": "test", "encoding": "cp1252"}.items()
        ),
        ({"system_prompt": {"text": "x"}}, "`dataset.system_prompt` must be a name, the text, or {file: prompt.txt}"),
        ({"system_prompt": {"file": "x", "more": 1}}, "`dataset.system_prompt` must be a name, the text, or {file"),
        ({"system_prompt": {"file": 1}}, "`dataset.system_prompt` must be a name, the text, or {file: prompt.txt}"),
        ({"system_prompt": " "}, "`dataset.system_prompt` is empty: write `none` for no system prompt"),
        (
            {"system_prompt": "reasonning"},
            "`dataset.system_prompt` can't be the one word `reasonning`: did you mean `reasoning`?",
        ),
        ({"columns": {"question": ""}}, "`dataset.columns` has '' in place of a column's name"),
        ({"columns": {"question": 3}}, "`dataset.columns` has 3 in place of a column's name"),
        ({"columns": {"a\0": "b"}}, "`dataset.columns` has 'a\\x00' in place of a column's name"),
        ({"columns": ["a\ud800"]}, "`dataset.columns` has 'a\\ud800' in place of a column's name"),
        ({"path": ""}, "`dataset.path` is empty: name a file, a folder or a hub id"),
        ({"eval_path": ""}, "`dataset.eval_path` is empty: name a file, a folder or a hub id"),
        ({"eval_path": []}, "`dataset.eval_path` is an empty list: name at least one source"),
        ({"eval_path": ["b"], "config": "main"}, "`dataset.config` does not go with a list of sources"),
        ({"eval_path": ["b"], "eval_split": "x"}, "`dataset.eval_split` does not go with a list of sources"),
        ({"eval_path": ["b", {"path": "c", "fraction": 1}]}, "`dataset.eval_path`: give every source a `fraction`"),
        ({"path": ["b"], "decimal": "comma"}, "`dataset.decimal` does not go with a list of sources"),
        ({"path": [{"path": "a", "delimiter": ";;"}]}, "`dataset.path.delimiter` is ';;': set one ASCII character"),
        ({"path": [{"path": "a", "encoding": "cp99"}]}, "`dataset.path.encoding` is 'cp99', which Python does not"),
        ({"path": [{"path": "a", "columns": {"q": ""}}]}, "`dataset.columns` has '' in place of a column's name"),
        ({"path": [{"name": "a"}]}, "`dataset.path.path` is missing: give it"),
        ({"path": [3]}, "`dataset.path` must be a name, or a mapping of path, name, data_dir, "),
        ({"pass_rate": {"evaluation": "e"}}, "`dataset.pass_rate.keep` is missing: give it"),
        ({"encoding": "undefined"}, "`dataset.encoding` is 'undefined', which Python does not know: set for example"),
        ({"system_prompt": ""}, "`dataset.system_prompt` is empty: write `none` for no system prompt"),
        ({"system_prompt": "xyz"}, "`dataset.system_prompt` can't be the one word `xyz`: choose reasoning or think or"),
    ],
)
def test_a_mistake_in_a_dataset_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        DatasetSpec.parse({"path": "a.jsonl", **given})
    assert str(caught.value).startswith(message)


def test_what_lies_on_a_limit_of_a_dataset_is_taken() -> None:
    for keep in ([0, 1], [0.5, 0.5]):
        spec = DatasetSpec.parse({"path": "a.jsonl", "pass_rate": {"evaluation": "e", "keep": keep}})
        assert spec.pass_rate == PassRateSpec("e", [float(share) for share in keep])
    mixture = DatasetSpec.parse({"path": [{"path": "a", "fraction": 1}, {"path": "b", "fraction": 0.5}]})
    assert isinstance(mixture.path, list)
    assert [source.fraction for source in mixture.path] == [1.0, 0.5]
    held_out = DatasetSpec.parse({"path": "a", "split": "x", "encoding": "cp1252", "eval_path": ["b", "c"]})
    assert [source.path for source in held_out.eval_path or [] if isinstance(source, SourceSpec)] == ["b", "c"]
    for name in ("reasoning", "think", "boxed", "program", "minimind", "none", "two words"):
        assert DatasetSpec.parse({"path": "a", "system_prompt": f" {name}\n"}).system_prompt == name


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file or directory"),
        (b"caf\xe9", "it is not UTF-8"),
        ("a folder", "it is not a regular file"),
    ],
)
def test_a_file_of_a_system_prompt_that_can_not_be_read_is_named(tmp_path: Path, content: Any, reason: str) -> None:
    file = tmp_path / "prompt.txt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content:
        file.mkdir()
    with pytest.raises(UserError) as caught:
        DatasetSpec.parse({"path": "a", "system_prompt": {"file": str(file)}})
    assert str(caught.value).startswith(f"`dataset.system_prompt`: {file} can't be read ({reason}")
    assert str(caught.value).endswith("): correct the path")


def test_a_file_of_a_system_prompt_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompt.txt").write_text("Be brief.")
    assert DatasetSpec.parse({"path": "a", "system_prompt": {"file": "~/prompt.txt"}}).system_prompt == "Be brief."
    (tmp_path / "prompt.txt").write_text(" \n")
    for file, message in (
        ("~/prompt.txt", " (read from ~/prompt.txt) is empty: write `none` for no system prompt"),
        ("~nobody-here/a.txt", ": ~nobody-here/a.txt can't be read (No such file or directory): correct the path"),
    ):
        with pytest.raises(UserError) as caught:
            DatasetSpec.parse({"path": "a", "system_prompt": {"file": file}})
        assert str(caught.value) == f"`dataset.system_prompt`{message}"


def test_a_reference_has_a_name_or_an_adapter() -> None:
    assert ReferenceSpec.parse("base") == ReferenceSpec(name="base")
    assert ReferenceSpec.parse({}).as_dict() == {"name": "initial", "reset_optimizer_on_sync": False}
    assert ReferenceSpec.parse({"adapter": "a"}).as_dict() == {"adapter": "a", "reset_optimizer_on_sync": False}
    for given, message in (
        ({"name": "base", "adapter": ""}, "`reference` has both `name` and `adapter`: keep one, as in"),
        ("bsae", "`reference.name` can't be `bsae`: did you mean `base`?"),
    ):
        with pytest.raises(UserError) as caught:
            ReferenceSpec.parse(given)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("of", "`micro_batching` must be auto, off, or a mapping of layout, skip_zero_advantage, not 'of'"),
        (True, "`micro_batching` must be auto, off, or a mapping of layout, skip_zero_advantage, not True"),
        ({"layout": "of"}, "`micro_batching.layout` can't be `of`: choose packed or shared or trimmed or padded"),
        ({"rows": 1}, "unknown key `micro_batching.rows`: choose from layout, skip_zero_advantage"),
        ({"n": 1}, "unknown key `micro_batching.n`: choose from layout, skip_zero_advantage"),
    ],
)
def test_a_mistake_in_a_mapping_or_its_word_is_named(given: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        MicroBatching.parse(given)
    assert str(caught.value) == message


def test_a_mapping_that_is_parsed_stays_as_it_is() -> None:
    spec = MicroBatching("trimmed")
    assert MicroBatching.parse(spec) is spec
    assert [OfflineSpec.parse(word).compares_whole_batch for word in ("group", "batch")] == [False, True]
    assert OfflineSpec.parse({}).baseline == "group"
    assert [SamplingSpec.parse(word).is_unbiased for word in ("informative", {"informative": "unbiased"})] == [
        False,
        True,
    ]


def test_a_secret_is_not_shown_in_an_error() -> None:
    for value in (["hf_0123456789abcdefghij"], "a secret of one's own"):
        with pytest.raises(UserError) as caught:
            typed("hub_token", value, bool)
        assert str(caught.value) == f"`hub_token` must be true or false, not {HIDDEN}"
    with pytest.raises(UserError) as caught:
        typed("wandb", {"api_key": "0123456789abcdef", "name": "x"}, bool)
    assert "0123456789abcdef" not in str(caught.value)
    assert "'name': 'x'" in str(caught.value)


@pytest.mark.parametrize(
    ("hint", "given", "expected"),
    [
        (str, Path("a/b"), "a/b"),
        (list[str], 1.5, ["1.5"]),
        (list[int], ["1", 2.0], [1, 2]),
        (list, [1, "a"], [1, "a"]),
        (dict[str, Any], {"a": 1}, {"a": 1}),
        (float, -3, -3.0),
        (Literal["1", "2"], "2", "2"),
        (Literal["on", "off"] | None, None, None),
        (str, False, "false"),
        (int | None, 0, 0),
        (str | None, "", ""),
        (list[str] | None, [], []),
        (int | str, False, "false"),
        (int | None, None, None),
        (int, 8.0, 8),
        (int, "8", 8),
        (float, 8, 8.0),
        (float, "5e-6", 5e-6),
        (bool, "TRUE", True),
        (bool, "false", False),
        (str, 8, "8"),
        (str, 1.5, "1.5"),
        (str, True, "true"),
        (str | bool, True, True),
        (list[str], "a", ["a"]),
        (list[str], ["a", 1], ["a", "1"]),
        (list[float], 2, [2.0]),
        (Literal["on", "off"], False, "off"),
        (Any, [1], [1]),
    ],
)
def test_a_value_is_converted_if_nothing_is_lost(hint: Any, given: Any, expected: Any) -> None:
    found = typed("key", given, hint)
    assert (found, type(found)) == (expected, type(expected))


def test_the_word_no_of_yaml_is_a_strategy() -> None:
    assert (typed("eval_strategy", False, str), typed("other", False, str)) == ("no", "false")
    assert typed("eval_strategy", True, str) == "true"


@pytest.mark.parametrize(
    ("hint", "given", "message"),
    [
        (int, 8.5, "`key` must be a whole number, not 8.5"),
        (int, True, "`key` must be a whole number, not True"),
        (float, "much", "`key` must be a number, not 'much'"),
        (bool, "yes", "`key` must be true or false, not 'yes'"),
        (bool, 1, "`key` must be true or false, not 1"),
        (int | float, "x", "`key` must be a whole number or a number, not 'x'"),
        (str | Literal["a"] | None, [], "`key` can't be `[]`: choose a"),
        (list[int], ["x"], "`key` must be a list, not ['x']"),
        (list[str], {"a": 1}, "`key` must be a list, not {'a': 1}"),
        (int, "8.5", "`key` must be a whole number, not '8.5'"),
        (int, float("inf"), "`key` must be a whole number, not inf"),
        (dict[str, Any] | None, 3, "`key` must be a mapping, not 3"),
        (list[int] | int, "x", "`key` must be a list or a whole number, not 'x'"),
        (str | list[str], {}, "`key` must be text or a list, not {}"),
        (Literal["on", "off"], "of", "`key` can't be `of`: did you mean `off`?"),
        (Literal["on", "off"], 3, "`key` can't be `3`: choose on or off"),
        (str, None, "`key` must be text, not None"),
    ],
)
def test_a_value_of_another_type_is_named(hint: Any, given: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        typed("key", given, hint)
    assert str(caught.value) == message


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
        with pytest.raises(UserError, match=f"^`{key}: {value}` does not go with `sampling: "):
            unbiased.check(config, router_loss=True)
        SamplingSpec("biased").check(config, router_loss=True)
    unbiased.check(SimpleNamespace(**{**independent, "router_aux_loss_coef": 0.01}), router_loss=False)


@pytest.mark.parametrize("key", ["exploration", "floor"])
def test_probabilities_of_sampling_are_shares(key: str) -> None:
    assert SamplingSpec.parse({}) == SamplingSpec("biased", 0.5, 0.1) == SamplingSpec.parse("informative")
    assert getattr(SamplingSpec.parse({key: 1}), key) == 1.0
    for value in (0, 1.5):
        with pytest.raises(UserError, match=f"^`sampling.{key}` is {float(value)}: set a number above 0 and at most 1"):
            SamplingSpec.parse({key: value})
