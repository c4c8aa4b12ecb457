"""A resume after a change behind an unchanged path, of a recipe and of a script without one."""

import importlib
import json
import logging
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from grpo_recipes import GRPOTrainer, train
from grpo_recipes.data import hub
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.runs import identity
from grpo_recipes.runs.checkpoints import MANIFEST, read_manifest
from grpo_recipes.runs.identity import (
    NOT_IDENTIFIED,
    SLICE_ROWS,
    Source,
    column_digests,
    differences,
    source_digest,
)
from grpo_recipes.tools.examples import calculator
from grpo_recipes.training.callbacks import identity_of
from grpo_rewards.math.correctness import GSM8KCorrectness
from tests.support import launching, short_runs, tiny
from tests.support.errors import refused
from tests.support.grids import only

REWARD = """
def by_length(prompts, completions, answer, **columns):
    return [float(len(set(text))) for text in completions]
"""
LORA = {"use_peft": True, "lora_r": 2, "lora_target_modules": "all-linear"}


def change_one_tensor(folder: Path, name: str = "model.safetensors") -> None:
    """Change one tensor of a saved model or adapter, with no change to the size of the file."""
    file = folder / name
    tensors = load_file(file)
    last = sorted(tensors)[-1]
    tensors[last] = tensors[last] + 1.0
    save_file(tensors, file, metadata={"format": "pt"})


def write_golds(path: Path, shift: int) -> None:
    """Write the prompts of `launching.write_rows` with golds that are `shift` too high."""
    rows = ({"question": f"What is {n} + {n}?", "answer": f"#### {2 * n + shift}"} for n in range(8))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder with a policy, a reward model, rows and a module of rewards. Its run is in `run`."""
    launching.build_policy(tmp_path / "policy")
    tiny.save_reward_model(tmp_path / "scorer")
    write_golds(tmp_path / "rows.jsonl", 0)
    (tmp_path / "own_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("own_rewards", None)


def edit(path: Path, **values: Any) -> None:
    """Replace entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


Change = Callable[[Path], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "golds": (lambda place: write_golds(place / "rows.jsonl", 1), "`answer`"),
    "policy": (lambda place: change_one_tensor(place / "policy"), "policy/model.safetensors"),
    "configuration": (lambda place: edit(place / "policy" / "config.json", rms_norm_eps=0.1), "policy/config.json"),
    "tokenizer": (
        lambda place: edit(place / "policy" / "tokenizer_config.json", model_max_length=7),
        "policy/tokenizer_config.json",
    ),
    "reward model": (lambda place: change_one_tensor(place / "scorer"), "scorer/model.safetensors"),
    "reward code": (lambda place: (place / "own_rewards.py").write_text(REWARD + "\n# another\n"), ""),
}


def recipe(place: Path, **changes: Any) -> list[str]:
    """Return the command line of a recipe on the files of a folder."""
    values: dict[str, Any] = {
        "rewards": ["own_rewards.by_length", {"name": "reward_model", "kwargs": {"model": str(place / "scorer")}}],
        "max_completion_length": 4,
        "max_steps": 1,
        "beta": 0.04,
        "report_to": "none",
        **changes,
    }
    written = (place / "mine.yaml", place / "policy", place / "rows.jsonl", place / "run")
    return ["--config", str(launching.write_recipe(*written, **values))]


def script(place: Path, **changes: Any) -> GRPOTrainer:
    """Return the trainer that a script without a recipe builds from a folder's files."""
    from grpo_rewards.reward_model import RewardModelScore

    sys.modules.pop("own_rewards", None)
    importlib.invalidate_caches()
    own = importlib.import_module("own_rewards")
    rows = [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]
    table = datasets.Dataset.from_list([{"prompt": row["question"], "answer": row["answer"]} for row in rows])
    args = short_runs.arguments(place / "run", save_strategy="steps", save_steps=1, max_completion_length=4)
    return GRPOTrainer(
        model=str(place / "policy"),
        reward_funcs=[own.by_length, RewardModelScore(str(place / "scorer"))],
        args=args,
        train_dataset=table,
        processing_class=tiny.byte_tokenizer(),
        **changes,
    )


@pytest.mark.parametrize("kind", only(["policy"], [*CHANGES, "adapter's base"]))
def test_a_recipe_notices_changes_behind_its_paths(place: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    change, figure = CHANGES["policy" if kind == "adapter's base" else kind]
    command = recipe(place, **(LORA if kind == "adapter's base" else {}))
    assert train.main(command) == 0
    capsys.readouterr()
    change(place)
    resumed = [*command, "--resume_from_checkpoint=true", "--max_steps=2"]
    if not figure:
        assert train.main(resumed) == 0
        assert capsys.readouterr().out.count("`by_length`") == 1
        return
    assert train.main(resumed) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert all(part in said for part in ("mine.yaml: `resume_from_checkpoint`: ", "checkpoint-1", figure)), said
    assert not (place / "run" / "checkpoint-2").exists()


@pytest.mark.slow
@pytest.mark.parametrize("role", ["base", "reference"])
def test_a_recipe_notices_another_model_behind_its_adapter(
    place: Path, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    for name in ("continued", "kept"):
        shutil.copytree(place / "policy", place / f"{name}-base")
        config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
        short_runs.adapted(place / f"{name}-base", config, continued=True).save_pretrained(place / name)
        tiny.byte_tokenizer().save_pretrained(place / name)
    command = recipe(
        place,
        rewards=["tests.support.launching.variety"],
        model_name_or_path=str(place / "continued"),
        reference={"adapter": str(place / "kept")},
    )
    assert train.main(command) == 0
    resumed = [*command, "--resume_from_checkpoint=true", "--max_steps=2"]
    if role == "base":
        change_one_tensor(place / "continued-base")
    else:
        change_one_tensor(place / "kept", "adapter_model.safetensors")
    assert train.main(resumed) == 2
    assert f"the {role} " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", only([*CHANGES][1:3], CHANGES))
def test_a_script_notices_changes_behind_its_paths(place: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    change, figure = CHANGES[kind]
    script(place).train()
    change(place)
    again = script(place)
    if figure:
        with refused(place / "run" / "checkpoint-1", figure):
            again.train(resume_from_checkpoint=True)
        return
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint=True)
    assert caplog.text.count("`by_length`") == 1


def test_a_script_notices_another_base_under_its_adapter(place: Path) -> None:
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    script(place, peft_config=adapter).train()
    change_one_tensor(place / "policy")
    with refused(place / "run" / "checkpoint-1", place / "policy" / "model.safetensors"):
        script(place, peft_config=adapter).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_nothing_is_printed_if_nothing_changed(
    place: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a recipe, in a script that resumes a recipe's run, and with the same contents in another folder."""
    command = recipe(place, max_steps=1)
    assert train.main(command) == 0
    record = json.loads((place / "run" / "run.json").read_text())
    manifest = read_manifest(place / "run" / "checkpoint-1")
    assert manifest is not None
    assert manifest.identity == record["identity"] == record["launches"][0]["identity"]
    assert str(place) not in json.dumps(manifest.identity), "a manifest may be pushed to the hub"
    shutil.move(place / "policy", place / "moved")
    (place / "policy").symlink_to(place / "moved")
    capsys.readouterr()
    with caplog.at_level(logging.WARNING):
        assert train.main([*command, "--resume_from_checkpoint=true", "--max_steps=2"]) == 0
    assert "checkpoint-1 was saved" not in capsys.readouterr().out + caplog.text


@pytest.mark.slow
def test_a_checkpoint_without_an_identity_is_not_compared_with_a_line_that_says_so(
    place: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    command = recipe(place)
    assert train.main(command) == 0
    checkpoint = place / "run" / "checkpoint-1"
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    older = replace(manifest, identity=None).text()
    (checkpoint / MANIFEST).write_text(older)
    capsys.readouterr()
    assert train.main([*command, "--resume_from_checkpoint=true"]) == 0
    assert capsys.readouterr().out.count("not compared") == 1
    with caplog.at_level(logging.WARNING):
        script(place).train(resume_from_checkpoint=str(checkpoint))
    assert caplog.text.count("not compared") == 1


@pytest.mark.slow
def test_the_checkpoint_before_a_damaged_one_is_compared_too(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = recipe(place, max_steps=2)
    assert train.main(command) == 0
    checkpoint = place / "run" / "checkpoint-1"
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    assert manifest.identity is not None
    of_another = {**manifest.identity, "columns": {**manifest.identity["columns"], "answer": "0"}}
    (checkpoint / MANIFEST).write_text(replace(manifest, identity=of_another).text())
    weights = place / "run" / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert train.main([*command, "--resume_from_checkpoint=true"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert all(part in said for part in (f"{checkpoint}: ", "`answer`"))


def table(**columns: Any) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], **columns})


def digest(dataset: datasets.Dataset, name: str) -> str:
    return column_digests(dataset)[name]


def test_a_digest_is_of_the_values_in_row_order() -> None:
    chats = [[{"role": "user", "content": text}] for text in ("x", "y", "z")]
    one = table(chat=chats, level=[1, None, 3])
    for name in one.column_names:
        expected = digest(one, name)
        reordered = one.select([2, 1, 0]).select([2, 1, 0])
        joined = datasets.concatenate_datasets([one.select([0]), one.select([1, 2])])
        assert digest(reordered, name) == digest(joined, name) == digest(one.with_format("numpy"), name) == expected
        assert digest(one.select([1, 0, 2]), name) != expected
    moved = [[{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], [], chats[2]]
    assert digest(table(chat=moved), "chat") != digest(one, "chat")
    assert digest(table(chat=[chats[0], None, chats[2]]), "chat") != digest(
        table(chat=[chats[0], [], chats[2]]), "chat"
    )
    missing = [{"role": None, "content": None}, None, {"role": "user", "content": "z"}]
    swapped = [None, missing[0], missing[2]]
    assert digest(table(message=missing), "message") != digest(table(message=swapped), "message")
    assert digest(table(message=[{"a": 1}] * 3), "message") != digest(table(message=[{"b": 1}] * 3), "message")
    seen = set()
    for row in (None, 0, SLICE_ROWS - 1, SLICE_ROWS):  # in the first slice, at its end, and in a slice of one row
        levels = [4 if place == row else 1 for place in range(SLICE_ROWS + 1)]
        seen.add(digest(datasets.Dataset.from_dict({"level": levels}), "level"))
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.list_(pa.int64()), pa.large_list(pa.int64())),
        (pa.string(), pa.large_string()),
        (pa.binary(), pa.large_binary()),
        (pa.list_(pa.struct({"text": pa.string()})), pa.large_list(pa.struct({"text": pa.large_string()}))),
    ],
    ids=str,
)
def test_a_digest_does_not_depend_on_how_arrow_stores_the_values(one: pa.DataType, other: pa.DataType) -> None:
    """Tables of another size, or written by another library, have 64-bit offsets."""
    values = {"string": ["x", None, "y"], "binary": [b"x", None, b"y" * 9000]}.get(str(one), [[1, 2], None, []])
    if "struct" in str(one):
        values = [[{"text": "a"}, {"text": None}], None, []]
    found = []
    for kind in (one, other):
        stored = datasets.Dataset(pa.table({"prompt": ["a", "b", "c"], "value": pa.array(values, kind)}))
        assert stored.data.column("value").type == kind
        found.append(digest(stored, "value"))
    assert found[0] == found[1]


def test_a_digest_of_images_reads_both_ends_of_each() -> None:
    noise = np.random.default_rng(0).integers(0, 255, 50_000, np.uint8).tobytes()
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})

    def images(*values: bytes) -> datasets.Dataset:
        rows = {"prompt": ["a", "b"], "image": [{"bytes": value, "path": None} for value in values]}
        return datasets.Dataset.from_dict(rows, features=features)

    expected = digest(images(noise, noise), "image")
    assert digest(images(noise, noise), "image") == expected
    for place in (0, 4095, len(noise) - 4096, len(noise) - 1):
        other = bytearray(noise)
        other[place] ^= 1
        assert digest(images(noise, bytes(other)), "image") != expected
    assert digest(images(noise, noise + b"\0"), "image") != expected
    middle = noise[:4096] + bytes(len(noise) - 8192) + noise[-4096:]
    assert digest(images(noise, middle), "image") == expected, "reading all bytes would take too long"
    cut = noise[:20_000] + noise[30_000:]  # both ends are equal
    assert digest(images(noise, cut), "image") != expected


def test_every_column_is_identified(place: Path) -> None:
    rows = table(gold=["1"] * 3, note=["n"] * 3)
    built = SimpleNamespace(reward_funcs=[], reward_func_names=[], train_dataset=rows, rollout_func=None)
    assert set(identity_of(built, {}).content["columns"]) == {"prompt", "gold", "note"}
    recorded = recipe(place, rewards=["recorded"], dataset={"name": "scored", "path": "rows.jsonl"}, offline="group")
    checked = SimpleNamespace(train_dataset=rows, rewards=[], toolset=None)
    identity = train.identity_of(parse_recipe(recorded), checked)  # type: ignore[arg-type]
    assert set(identity.content["columns"]) == {"prompt", "gold", "note"}


def test_weights_on_the_hub_are_their_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = {"main": "c0ffee" * 6 + "beef", "v2": "decade" * 6 + "beef"}
    for revision, commit in commits.items():
        snapshot = tmp_path / "models--org--name" / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        (tmp_path / "models--org--name" / "refs").mkdir(exist_ok=True)
        (tmp_path / "models--org--name" / "refs" / revision).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    sources = [Source("org/name", hub.hub_commit("org/name", revision)) for revision in commits]
    identities = [identity.identify(table(), [], {"policy": source}) for source in sources]
    (reason,) = differences(identities[0].content, identities[1]).refused
    assert all(figure in reason for figure in ("org/name", *commits.values()))
    unknown = identity.identify(table(), [], {"policy": Source("org/other", hub.hub_commit("org/other"))})
    found = differences(identities[0].content, unknown)
    assert (found.refused, len(found.logged)) == ([], 1)


def test_rewards_without_a_source_file_are_not_identified() -> None:
    typed = types.FunctionType(compile("def f(completions, **columns): ...", "<stdin>", "exec").co_consts[0], {}, "f")
    assert source_digest(typed) == NOT_IDENTIFIED
    assert source_digest(GSM8KCorrectness()) is None, "it is identified by the version of its package"
    assert source_digest(launching.variety) == source_digest(launching.raises_on_rank_1) != NOT_IDENTIFIED
    content = identity.identify(
        table().to_iterable_dataset(), [], {}, {"a": launching.variety, "b": calculator}
    ).content
    assert (content["rows"], content["columns"], list(content["tools"])) == (None, {}, ["a"])
