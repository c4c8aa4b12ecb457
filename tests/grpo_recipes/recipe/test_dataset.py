"""The key `dataset` of a recipe, parsed on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.recipe.dataset import DatasetSpec, PassRateSpec, SourceSpec
from tests.support.errors import refused

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
