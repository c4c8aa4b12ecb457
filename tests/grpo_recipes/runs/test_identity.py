"""A resume after a change behind an unchanged path, of a recipe and of a script without one."""

import importlib
import json
import logging
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from grpo_recipes import GRPOTrainer, train
from grpo_recipes.runs import identity
from grpo_recipes.runs.checkpoints import read_manifest, write_manifest
from grpo_recipes.runs.identity import NOT_IDENTIFIED, SLICE_ROWS, column_digests, source_digest
from grpo_recipes.tools.examples import calculator
from grpo_rewards.math.correctness import GSM8KCorrectness
from tests.grpo_recipes.runs.test_identity_differences import edit
from tests.support import launching, short_runs, tiny
from tests.support.errors import refused

REWARD = """
def by_length(prompts, completions, answer, **columns):
    return [float(len(set(text))) for text in completions]
"""


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
    folder = tmp_path / "place"
    launching.build_policy(folder / "policy")
    tiny.save_reward_model(folder / "scorer")
    write_golds(folder / "rows.jsonl", 0)
    (folder / "own_rewards.py").write_text(REWARD)
    monkeypatch.syspath_prepend(folder)
    yield folder
    sys.modules.pop("own_rewards", None)


def change_contents(place: Path) -> None:
    """Change the golds and the weights of both models."""
    write_golds(place / "rows.jsonl", 1)
    change_one_tensor(place / "policy")
    change_one_tensor(place / "scorer")


CONFIG = "policy/config.json"
TOKENIZER = "policy/tokenizer_config.json"
CHANGES: tuple[tuple[Callable[[Path], object], tuple[str, ...]], ...] = (
    (change_contents, ("`answer`", "policy/model.safetensors", "scorer/model.safetensors")),
    (lambda place: edit(place / TOKENIZER, model_max_length=7), (TOKENIZER,)),
    (lambda place: edit(place / CONFIG, rms_norm_eps=0.1), (CONFIG,)),
)
"""Changes that refuse a resume, with what the message names."""


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


@contextmanager
def restored(place: Path) -> Iterator[None]:
    """Undo all changes to a folder at the end."""
    kept = shutil.copytree(place, place.with_name("kept"))
    yield
    shutil.rmtree(place)
    kept.rename(place)


def test_a_recipe_notices_changes_behind_its_paths(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, checkpoint = recipe(place, max_steps=2), place / "run" / "checkpoint-2"
    assert train.main(command) == 0
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    record = json.loads((place / "run" / "run.json").read_text())
    assert manifest.identity == record["identity"] == record["launches"][0]["identity"]
    assert str(place) not in json.dumps(manifest.identity), "a manifest may be pushed to the hub"
    capsys.readouterr()
    resumed = [*command, "--resume_from_checkpoint=true", "--max_steps=3"]
    for change, figures in CHANGES:
        with restored(place):
            change(place)
            assert (train.main(resumed), (place / "run" / "checkpoint-3").exists()) == (2, False), figures
            last = capsys.readouterr().err.splitlines()[-1]
            assert all(part in last for part in ("mine.yaml: `resume_from_checkpoint`: ", "checkpoint-2", *figures)), (
                last
            )
    with restored(place):  # the checkpoint before a damaged one is compared too
        (checkpoint / "model.safetensors").write_bytes(bytes((checkpoint / "model.safetensors").stat().st_size))
        columns = {**manifest.identity["columns"], "answer": "0"}
        other = replace(manifest, step=1, identity={**manifest.identity, "columns": columns})
        write_manifest(place / "run" / "checkpoint-1", other, each_node=False, writes=True)
        assert train.main(resumed) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert all(part in last for part in ("checkpoint-1: ", "`answer`")), last
    shutil.move(place / "policy", place / "moved")
    (place / "policy").symlink_to(place / "moved")
    (place / "own_rewards.py").write_text(REWARD + "\n# another\n")
    assert train.main(resumed) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "checkpoint-2 was saved" in line)
    assert ("`by_length`" in line, "policy" in line) == (True, False), "the contents of the policy are the same"


@pytest.mark.slow
def test_a_recipe_notices_another_model_behind_its_adapter(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    for name in ("continued", "kept"):
        shutil.copytree(place / "policy", place / f"{name}-base")
        short_runs.adapted(place / f"{name}-base", config, continued=True).save_pretrained(place / name)
        tiny.byte_tokenizer().save_pretrained(place / name)
    policy, reference = str(place / "continued"), {"adapter": str(place / "kept")}
    command = recipe(place, rewards=["own_rewards.by_length"], model_name_or_path=policy, reference=reference)
    assert train.main(command) == 0
    changed = {"base": ("continued-base", "model.safetensors"), "reference": ("kept", "adapter_model.safetensors")}
    for role, (folder, name) in changed.items():
        with restored(place):
            change_one_tensor(place / folder, name)
            assert train.main([*command, "--resume_from_checkpoint=true", "--max_steps=2"]) == 2
            assert f"the {role} " in capsys.readouterr().err.splitlines()[-1]


def test_a_script_notices_changes_behind_its_paths(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    script(place).train()
    for change, figures in CHANGES[:2]:
        with restored(place):
            change(place)
            with refused(place / "run" / "checkpoint-1", *figures):
                script(place).train(resume_from_checkpoint=True)
    (place / "own_rewards.py").write_text(REWARD + "\n# another\n")
    with caplog.at_level(logging.WARNING):
        script(place).train(resume_from_checkpoint=True)
    assert caplog.text.count("`by_length`") == 1


def test_a_script_notices_another_base_under_its_adapter(place: Path) -> None:
    adapter = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    script(place, peft_config=adapter).train()
    change_one_tensor(place / "policy")
    with refused(place / "run" / "checkpoint-1", place / "policy" / "model.safetensors"):
        script(place, peft_config=adapter).train(resume_from_checkpoint=True)


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
    with_none, with_empty = (table(chat=[chats[0], chat, chats[2]]) for chat in (None, []))
    assert digest(with_none, "chat") != digest(with_empty, "chat")
    missing = [{"role": None, "content": None}, None, {"role": "user", "content": "z"}]
    swapped = [None, missing[0], missing[2]]
    assert digest(table(message=missing), "message") != digest(table(message=swapped), "message")
    assert digest(table(message=[{"a": 1}] * 3), "message") != digest(table(message=[{"b": 1}] * 3), "message")
    seen = set()
    for row in (None, 0, SLICE_ROWS - 1, SLICE_ROWS):  # in the first slice, at its end, and in a slice of one row
        levels = [4 if place == row else 1 for place in range(SLICE_ROWS + 1)]
        seen.add(digest(datasets.Dataset.from_dict({"level": levels}), "level"))
    assert len(seen) == 4


def test_a_digest_does_not_depend_on_how_arrow_stores_the_values() -> None:
    """Tables of another size, or written by another library, have 64-bit offsets."""
    text, number, large = pa.string(), pa.int64(), pa.large_string()
    for values, kinds in (
        ([[1, 2], None, []], (pa.list_(number), pa.large_list(number))),
        (["x", None, "y"], (text, large)),
        ([b"x", None, b"y" * 9000], (pa.binary(), pa.large_binary())),
        ([[{"text": "a"}, {"text": None}], None, []],
         (pa.list_(pa.struct({"text": text})), pa.large_list(pa.struct({"text": large})))),
    ):  # fmt: skip
        columns = [pa.table({"prompt": ["a", "b", "c"], "value": pa.array(values, kind)}) for kind in kinds]
        one, other = (digest(datasets.Dataset(column), "value") for column in columns)
        assert one == other, kinds


def test_a_digest_of_images_reads_both_ends_of_each() -> None:
    noise = np.random.default_rng(0).integers(0, 255, 50_000, np.uint8).tobytes()
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})

    def images(*values: bytes) -> datasets.Dataset:
        rows = {"prompt": ["a", "b"], "image": [{"bytes": value, "path": None} for value in values]}
        return datasets.Dataset.from_dict(rows, features=features)

    expected = digest(images(noise, noise), "image")
    middle = noise[:4096] + bytes(len(noise) - 8192) + noise[-4096:]
    for same in (noise, middle):  # reading all bytes would take too long
        assert digest(images(noise, same), "image") == expected
    for place in (0, 4095, len(noise) - 4096, len(noise) - 1):
        other = bytearray(noise)
        other[place] ^= 1
        assert digest(images(noise, bytes(other)), "image") != expected
    cut = noise[:20_000] + noise[30_000:]  # both ends are equal
    for other in (cut, noise + b"\0"):
        assert digest(images(noise, other), "image") != expected


def test_rewards_without_a_source_file_are_not_identified() -> None:
    typed = types.FunctionType(compile("def f(completions, **columns): ...", "<stdin>", "exec").co_consts[0], {}, "f")
    assert source_digest(typed) == NOT_IDENTIFIED
    assert source_digest(GSM8KCorrectness()) is None, "it is identified by the version of its package"
    assert source_digest(launching.variety) == source_digest(launching.raises_on_rank_1) != NOT_IDENTIFIED
    streamed, tools = table().to_iterable_dataset(), {"a": launching.variety, "b": calculator}
    content = identity.identify(streamed, [], {}, tools).content
    assert (content["rows"], content["columns"], list(content["tools"])) == (None, {}, ["a"])
