"""Differences between two identities, one at a time, and the files and functions that an identity covers."""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from grpo_recipes.runs import identity
from grpo_recipes.runs.identity import NOT_IDENTIFIED, Identity, Source, differences, source_digest, weights_of
from grpo_recipes.runs.weights import identify_weights
from grpo_rewards.files import JSON_BYTES
from grpo_rewards.registry import BuiltReward, build_rewards
from tests.support import tiny

CONTENT: dict[str, Any] = {
    "rows": 3,
    "columns": {"prompt": "1", "gold": "2"},
    "weights": {"policy": {"model.safetensors": "1", "config.json": "2", "tokenizer.json": "3"}},
    "rewards": {"own": "1"},
    "tools": {},
    "chat_template": None,
    "versions": {"trl": "1.0"},
}
FILES: dict[str, str] = CONTENT["weights"]["policy"]


def found(before: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the refused and the logged differences between two launches that share all but some entries."""
    launch = Identity({**CONTENT, **now}, {"policy": "there"})
    comparison = differences({**CONTENT, **before}, launch)
    return comparison.refused, comparison.logged


def weights(**changes: str | None) -> dict[str, Any]:
    """Return an entry of weights with the identity of some files replaced, or removed for None."""
    names = {"model": "model.safetensors", "config": "config.json", "tokenizer": "tokenizer.json"}
    files = {**FILES, **{names.get(name, f"{name}.json"): value for name, value in changes.items()}}
    return {"weights": {"policy": {name: value for name, value in files.items() if value is not None}}}


COMMIT = {"weights": {"policy": {"commit": "abc"}}}


@pytest.mark.parametrize(
    ("before", "now", "refused", "logged"),
    [
        ({}, {}, [], []),
        ({"rows": 1_000}, {"rows": 2_000}, ["1,000 2,000"], []),
        ({"rows": None}, {}, [], ["dataset"]),
        ({}, {"rows": None}, [], ["dataset"]),
        ({"columns": {"prompt": "9", "gold": "2"}}, {}, ["`prompt`"], []),
        ({"columns": dict.fromkeys("cab", "1")}, {"columns": dict.fromkeys("abc", "2")}, ["`a`", "`b`", "`c`"], []),
        # Changed code of a reward may read other columns.
        ({"columns": {}, "rewards": {"own": "9"}}, {"columns": {"a": "1"}}, [], ["`own`", "`a` new"]),
        ({"columns": {"prompt": "1"}}, {}, ["`gold` new"], []),
        ({}, {"columns": {"prompt": "1"}}, ["`gold` missing"], []),
        (weights(model="9"), {}, ["policy there/model.safetensors"], []),
        (weights(tokenizer="9", config="9"), {}, ["policy there/config.json"], []),
        (weights(model="9", another="9"), weights(another="8"), ["policy there/another.json"], []),
        ({}, weights(tokenizer=None), ["policy there/tokenizer.json"], []),
        ({}, {"weights": {"policy": {}}}, [], ["policy"]),
        ({}, COMMIT, [], ["policy"]),
        (COMMIT, COMMIT, [], []),
        ({"weights": {**CONTENT["weights"], "reference": {"a": "1"}}}, {}, [], ["reference"]),
        (COMMIT, {"weights": {"policy": {"commit": "def"}}}, ["policy there abc def"], []),
        ({"chat_template": "1"}, {}, ["template"], []),
        ({"chat_template": "1"}, {"chat_template": "2"}, ["template"], []),
        ({"versions": {"trl": "0.9"}}, {}, [], ["trl 0.9 1.0"]),
        ({"versions": {}}, {}, [], []),  # recorded before the package counted
        ({"rewards": {"own": "9"}}, {}, [], ["reward `own`"]),
        ({"rewards": {"own": NOT_IDENTIFIED}}, {}, [], ["`own`"]),
        ({}, {"rewards": {}}, [], ["rewards `own` none"]),
        ({"tools": {"add": "1"}}, {"tools": {"add": "2"}}, [], ["tool `add`"]),
    ],
)
def test_one_difference_is_one_clause(
    before: dict[str, Any], now: dict[str, Any], refused: list[str], logged: list[str]
) -> None:
    """A clause has names and values, that of the launch before first."""
    for clauses, expected in zip(found(before, now), (refused, logged), strict=True):
        for clause, figures in zip(clauses, expected, strict=True):
            assert re.search(".*".join(map(re.escape, figures.split())), clause), clause


def test_a_checkpoint_without_an_identity_is_not_compared() -> None:
    found = differences(None, Identity(CONTENT, {"policy": "there"}))
    assert (found.refused, len(found.logged)) == ([], 1)
    older = {name: value for name, value in CONTENT.items() if name != "chat_template"}
    assert not differences(older, Identity(CONTENT, {"policy": "there"})).refused, "older ones record no template"


# Files


def edit(path: Path, **values: Any) -> None:
    """Replace entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_an_entry_counts_if_it_changes_what_a_step_computes(tmp_path: Path) -> None:
    folder = tiny.save_policy(tmp_path / "policy")
    for file, values, counts in (
        ("config.json", {"rope_theta": 7.0}, True),
        ("config.json", {"dtype": "bfloat16", "torch_dtype": "bfloat16", "_name_or_path": "elsewhere"}, False),
        ("config.json", {"transformers_version": "6.0.0"}, False),
        ("generation_config.json", {"eos_token_id": 7}, True),
        ("generation_config.json", {"pad_token_id": 7}, True),
        ("generation_config.json", {"top_k": 7, "temperature": 0.1}, False),
    ):
        before = weights_of(Source(str(folder)))
        edit(folder / file, **values)
        after = weights_of(Source(str(folder)))
        assert {name for name in after if before[name] != after[name]} == ({file} if counts else set()), values
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(dict(reversed(content.items())), indent=3))
        assert weights_of(Source(str(folder))) == after, "the order of keys is no difference"


def test_the_revision_of_the_base_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"r": 2, "base_model_name_or_path": "a", "revision": None}))
    before = weights_of(Source(str(tmp_path)))
    assert before.keys() == {"adapter_model.safetensors", "adapter_config.json"}
    edit(config, base_model_name_or_path="b", revision="v2")
    assert weights_of(Source(str(tmp_path))) == before
    edit(config, r=4)
    assert weights_of(Source(str(tmp_path))) != before


OF_A_TOKENIZER = (
    "added_tokens.json", "chat_template.jinja", "merges.txt", "special_tokens_map.json", "spiece.model",
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt",
)  # fmt: skip


def test_every_file_of_a_tokenizer_counts(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    found = []
    for text in ("a", "b"):
        for name in OF_A_TOKENIZER:
            (tmp_path / name).write_text(text)
        found.append(weights_of(Source(str(tmp_path))))
    assert {name for name in found[0] if found[0][name] != found[1][name]} == set(OF_A_TOKENIZER)


def test_every_byte_of_a_tokenizer_counts(tmp_path: Path) -> None:
    vocabulary = tiny.save_policy(tmp_path / "policy") / "vocab.txt"
    found = []
    for middle in (b"x", b"y"):
        vocabulary.write_bytes(b"x" * (1 << 20) + middle + b"x" * (2 << 20))
        found.append(weights_of(Source(str(vocabulary.parent))))
    assert {name for name in found[0] if found[0][name] != found[1][name]} == {"vocab.txt"}
    with vocabulary.open("r+b") as file:
        file.truncate(JSON_BYTES + 1)  # no tokenizer is as large: it is not read to its end
    assert weights_of(Source(str(vocabulary.parent)))["vocab.txt"] == identify_weights(vocabulary)


def test_a_source_without_weights_has_no_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    assert weights_of(Source(".")) == {}
    assert weights_of(Source("org/name", "abc")) == {"commit": "abc"}
    Path("model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")
    assert weights_of(Source(".")).keys() == {"model.safetensors", "config.json"}
    assert weights_of(Source("")) == {}, "a model without a name is not the one in the working directory"
    Path("model.safetensors").write_bytes(b"cut off")
    assert weights_of(Source(".")) == {}, "loading the weights reports what is wrong with them"


# Code

REWARDS = """
class Judge:
    __name__ = "judge"
    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]
    def method(self, completions, **columns):
        return [0.0 for _ in completions]

def plain(completions, **columns):
    return [0.0 for _ in completions]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "identity_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield importlib.import_module("identity_rewards")
    del sys.modules["identity_rewards"]


def decorated_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a reward with a wrapper of this file."""

    @functools.wraps(function)
    def call(*args: Any, **columns: Any) -> Any:
        return function(*args, **columns)

    return call


def test_a_reward_is_identified_by_the_file_that_defines_it(own: ModuleType, tmp_path: Path) -> None:
    cached = functools.cache(functools.partial(own.plain, level=3))
    forms = {
        "function": own.plain,
        "partial": functools.partial(own.plain, level=3),
        "instance": own.Judge(),
        "method": own.Judge().method,
        "class": own.Judge,
        "cached": functools.cache(own.plain),
        "decorated": decorated_here(own.plain),
        "all": functools.partial(decorated_here(cached), level=4),
    }
    before = source_digest(own.plain)
    assert {name: source_digest(form) for name, form in forms.items()} == dict.fromkeys(forms, before)
    assert before != NOT_IDENTIFIED
    (tmp_path / "identity_rewards.py").write_text(REWARDS + "\n# another version\n")
    assert before not in [source_digest(form) for form in forms.values()]


def test_the_version_of_some_packages_identifies_their_code() -> None:
    versioned = ("trl.rewards.format_rewards.think_format_reward", "transformers.activations.GELUActivation")
    in_c = "torch.nn.functional.gelu"
    ours = ("grpo_recipes.tools.examples.calculator", "grpo_rewards.length.GroupLength")
    for name in (*versioned, in_c, *ours, "math.sqrt", "datasets.load_dataset"):
        module, _, attribute = name.rpartition(".")
        digest = source_digest(getattr(importlib.import_module(module), attribute))
        assert (digest is None) is (name not in ("math.sqrt", "datasets.load_dataset")), name


def test_rewards_inside_others_have_names_of_their_own(own: ModuleType) -> None:
    """Two parts of one name, in two sums, are four rewards."""
    parts = [{"name": "identity_rewards.plain"}, {"name": "identity_rewards.plain", "alias": "again"}]
    sums = [{"name": "sum", "alias": alias, "rewards": parts} for alias in ("one", "other")]
    rewards = build_rewards([*sums, {"name": "identity_rewards.Judge", "alias": "judge"}])
    content = identity.identify(SimpleNamespace(), rewards, {}).content
    assert set(content["rewards"]) == {"one/plain", "one/again", "other/plain", "other/again", "judge"}
    assert len(set(content["rewards"].values())) == 1


def test_models_of_rewards_are_identified(tmp_path: Path) -> None:
    """At their revision, and TRL takes models for rewards too."""
    folder = str(tiny.save_reward_model(tmp_path / "scorer"))
    rewards = build_rewards([{"name": "reward_model", "kwargs": {"model": folder, "revision": "v2"}}])
    found = identity.reward_models(rewards, lambda name, revision: f"{revision} of {name}")
    assert found == {"reward model `reward_model`": Source(folder, f"v2 of {folder}")}
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    found = identity.reward_models([BuiltReward(model, 1.0, "scorer")], lambda *_: None)
    assert found == {"reward model `scorer`": Source(folder)}
