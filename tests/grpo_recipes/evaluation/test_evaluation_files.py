"""`grpo-recipes evaluate`: its files against a recount, interrupted evaluations, other evaluations, and comparisons."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow.parquet as pq
import pytest

from grpo_recipes import cli
from grpo_recipes.evaluation.accuracy import MeasuredReward, strict_rewards
from grpo_recipes.evaluation.estimates import mean_share
from grpo_recipes.evaluation.evaluate import evaluate_into
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.summary import compare
from grpo_recipes.runs import lock
from grpo_recipes.runs.files import RunError
from grpo_recipes.runs.lock import LOCK
from tests.support.errors import refused
from tests.support.policies import FunctionPolicy, evaluate_by

FILES = ("completions.parquet", "evaluation.json")
TAKEN_OVER = "filelock/2\npid=17\nhost=other-host\nmode=lease\ntoken=x\nduration=60.0\n"


def dataset(size: int = 10) -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {"prompt": [f"{n}+1=" for n in range(size)], "answer": [str(n + 1) for n in range(size)]}
    )


def policy(prompts: list[str], settings: Settings) -> list[str]:
    """Complete even problems in the required format, others in prose, and every fifth wrongly.

    Samples depend on the seed.
    """
    completions = []
    for place, prompt in enumerate(prompts):
        n = int(prompt.partition("+")[0])
        answer = n + 1 + (n % 5 == 0) + (settings.seed + place) % 3 * (settings.temperature > 0)
        completions.append(f"<think>x</think><answer>{answer}</answer>" if n % 2 == 0 else f"The answer is {answer}.")
    return completions


def never(prompts: list[str], settings: Settings) -> list[str]:
    return pytest.fail("a finished batch was made again")


def run(folder: Path, complete: Any = policy, described: Any = None, rows: Any = None, **settings: Any) -> dict:
    given = Settings(**{"batch_size": 4, **settings})
    return evaluate_by(folder, complete, rows or dataset(), given, described or {"model": "m"})


def test_the_shares_equal_a_recount_of_the_completions(tmp_path: Path) -> None:
    summary = run(tmp_path / "e")
    table = pd.read_parquet(tmp_path / "e" / "completions.parquet")
    assert len(table) == 10
    right = sum(f"<think>x</think><answer>{row.gold}</answer>" == row.completion for row in table.itertuples())
    assert right == 4  # 2, 4, 6 and 8 are right, 0 is not
    assert summary["strict"] == mean_share([1.0] * 4 + [0.0] * 6).as_dict()
    assert summary["lenient"]["value"] == 0.8
    assert json.loads((tmp_path / "e" / "evaluation.json").read_text()) == summary
    assert sorted(path.name for path in (tmp_path / "e").iterdir()) == sorted(FILES)


def test_batches_hold_all_samples_of_a_problem_and_have_separate_seeds(tmp_path: Path) -> None:
    """Otherwise all batches would draw the same random numbers, or a run with another seed some of the same ones."""
    calls: list[tuple[int, int]] = []

    def recording(prompts: list[str], settings: Settings) -> list[str]:
        calls.append((settings.seed, len(prompts)))
        return policy(prompts, settings)

    for seed in (0, 2):
        run(tmp_path / f"e{seed}", recording, samples=2, temperature=1.0, seed=seed)
    seeds, sizes = zip(*calls, strict=True)
    assert sizes == (4,) * 10, "two problems of two samples at a time"
    # A published result is reproduced by its seed.
    assert seeds == (0, 1, 2, 3, 4, 2_000_006, 2_000_007, 2_000_008, 2_000_009, 2_000_010)
    table = pd.read_parquet(tmp_path / "e0" / "completions.parquet")
    assert table["problem"].tolist() == [n for n in range(10) for _ in range(2)]
    assert table["sample"].tolist() == [0, 1] * 10
    for samples, size, batches in ((3, 7, [6, 6]), (8, 4, [8] * 4)):
        calls.clear()
        run(tmp_path / f"s{samples}", recording, rows=dataset(4), samples=samples, batch_size=size, temperature=1.0)
        assert [size for _, size in calls] == batches


def test_a_reward_gets_every_column_but_the_prompt(tmp_path: Path) -> None:
    seen: list[Any] = []

    def score(**given: Any) -> list[float]:
        seen.append(given)
        return [1.0] * len(given["prompts"])

    rows = datasets.Dataset.from_dict({"prompt": ["1?", "2?"], "answer": ["1", "2"], "zone": ["a", "b"]})
    settings = Settings(samples=2, temperature=1.0, strict=None)
    reward = MeasuredReward("mine", score, None)
    evaluate_by(tmp_path / "e", lambda prompts, settings: ["a", "b", "c", "d"], rows, settings, {}, [reward])
    columns = {"answer": ["1", "1", "2", "2"], "zone": ["a", "a", "b", "b"]}
    assert seen == [{"prompts": ["1?", "1?", "2?", "2?"], "completions": ["a", "b", "c", "d"], **columns}]
    names = pq.read_schema(tmp_path / "e" / "completions.parquet").names
    assert names == ["problem", "sample", "prompt", "completion", "reward/mine"]


def test_prompts_are_stored_in_their_own_letters_and_golds_are_read_with_their_mark(tmp_path: Path) -> None:
    strict = strict_rewards([{"name": "gsm8k_correctness", "kwargs": {"decimal": "comma"}}], ("think", "answer"))
    prompts = [[{"role": "user", "content": "Größe?"}]] * 4
    texts = ["<answer>1,5</answer>", "#### 1,5", "#### 1.500", "#### 1.500"]
    rows = datasets.Dataset.from_dict({"prompt": prompts, "answer": [1.5] * 3 + [1500.0]})
    evaluate_by(tmp_path / "e", lambda prompts, settings: texts, rows, Settings(strict=strict), {})
    table = pd.read_parquet(tmp_path / "e" / "completions.parquet")
    assert "Größe" in table["prompt"][0]
    assert table["strict"].tolist() == [True, False, False, False]
    assert table["lenient"].tolist() == [True, True, False, True]


def test_several_golds_and_numbers_are_stored_as_texts(tmp_path: Path) -> None:
    for name, golds, stored in (("a", [["18", None], ["x", "y"]], ["18", "x or y"]), ("b", [0, 5], ["0", "5"])):
        rows = datasets.Dataset.from_dict({"prompt": ["p", "q"], "answer": golds})
        evaluate_by(tmp_path / name, lambda prompts, settings: ["", ""], rows, Settings(), {})
        assert pd.read_parquet(tmp_path / name / "completions.parquet")["gold"].tolist() == stored


# ---- interrupted evaluations


def test_a_killed_evaluation_continues_to_the_same_files(tmp_path: Path) -> None:
    settings = {"rows": dataset(5), "samples": 3, "temperature": 1.0}
    run(tmp_path / "whole", **settings)
    calls = []

    def dies(prompts: list[str], given: Settings) -> list[str]:
        calls.append(prompts)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return policy(prompts, given)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "halves", dies, **settings)
    assert not (tmp_path / "halves" / "evaluation.json").exists()
    batches = len(calls)
    run(tmp_path / "halves", dies, **settings)
    again = [prompt for prompts in calls[batches:] for prompt in prompts]
    done = [prompt for prompts in calls[: batches - 1] for prompt in prompts]
    assert not set(again) & set(done), "a finished batch was made again"
    for name in FILES:
        assert (tmp_path / "halves" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    run(tmp_path / "halves", never, **settings)


def test_a_damaged_part_is_named_and_made_again(tmp_path: Path) -> None:
    def dies(prompts: list[str], settings: Settings) -> list[str]:
        if prompts[0] == "8+1=":
            raise KeyboardInterrupt
        return policy(prompts, settings)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "e", dies)
    part = tmp_path / "e" / "parts" / "000001.parquet"
    (part.parent / ".DS_Store").touch()
    part.write_bytes(part.read_bytes()[:-30])
    with refused(part, by=RunError):
        run(tmp_path / "e")
    part.unlink()
    assert run(tmp_path / "e") == run(tmp_path / "whole")


def test_ctrl_c_names_what_is_saved_and_the_same_command_continues(
    tiny_model: Path, tmp_path: Path, generating: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list] = []

    def complete(prompts: list, settings: Settings) -> list[str]:
        calls.append(prompts)
        if len(calls) in (1, 4):
            raise KeyboardInterrupt
        return [""] * len(prompts)

    generating(complete)
    arguments = ["evaluate", str(tiny_model), "--dataset", "arithmetic", "--split", "test[:6]", "--batch_size", "2"]
    arguments += ["--output", str(tmp_path / "e")]
    for saved in (False, True):
        assert cli.main(arguments) == 130
        output = capsys.readouterr().err
        assert (str(tmp_path / "e" / "parts") in output.splitlines()[-1]) == saved
        assert "Traceback" not in output
    assert cli.main(arguments) == 0
    assert len(calls) == 5, "a finished batch was made again"


# ---- one writer


def test_a_second_evaluation_into_a_folder_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)

    def meets_another(prompts: list[str], given: Settings) -> list[str]:
        with refused(tmp_path / "e", os.getpid(), LOCK):
            run(tmp_path / "e")
        return policy(prompts, given)

    run(tmp_path / "e", meets_another)
    assert sorted(path.name for path in (tmp_path / "e").iterdir()) == sorted(FILES)


def test_an_evaluation_whose_folder_was_taken_over_writes_nothing_more(tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def loses(prompts: list[str], given: Settings) -> list[str]:
        calls.append(prompts)
        if len(calls) == 2:
            (tmp_path / "e" / LOCK).write_text(TAKEN_OVER)
        return policy(prompts, given)

    with refused(tmp_path / "e", "17", "other-host"):
        run(tmp_path / "e", loses)
    assert [path.name for path in (tmp_path / "e" / "parts").iterdir()] == ["000000.parquet"]
    assert not (tmp_path / "e" / "evaluation.json").exists()

    def loses_last(settings: Settings) -> dict[str, Any]:
        (tmp_path / "f" / LOCK).write_text(TAKEN_OVER)
        return {}

    with refused(tmp_path / "f", "17"):
        evaluate_into(tmp_path / "f", FunctionPolicy(policy, loses_last), dataset(), Settings(), {})
    assert not (tmp_path / "f" / "completions.parquet").exists()


# ---- other evaluations in the folder


def test_an_evaluation_is_not_mixed_with_other_files_or_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with refused(tmp_path / "other"):
        run(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["notes.txt"]
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / f"{LOCK}.of-a-killed-process").touch()
    run(tmp_path / "locked")
    (tmp_path / "locked" / "parts").symlink_to(tmp_path / "other")
    with refused(tmp_path / "locked" / "parts", by=RunError):
        run(tmp_path / "locked")


IDENTITY: dict[str, Any] = {
    "model": "m",
    "weights": {"sha": "1"},
    "dataset": {"path": "a.jsonl", "split": "test"},
    "paid_by": ["r"],
    "released": date(2026, 1, 2),
}
OTHERS: list[tuple[dict[str, Any], list[str]]] = [
    ({"weights": {"sha": "2"}}, ["weights"]),
    ({"model": "copy", "weights": {"sha": "2"}}, ["model", "'m'", "'copy'"]),
    ({"dataset": {"path": "b.jsonl", "split": "test"}}, ["dataset.path", "'a.jsonl'", "'b.jsonl'"]),
    ({"dataset": {"path": "a.jsonl"}}, ["dataset.split", "None"]),
    ({"dataset": "a.jsonl"}, ["dataset"]),
    ({"paid_by": []}, ["rewards"]),
    ({"engine": "vllm"}, ["`engine`"]),
]


@pytest.mark.parametrize("is_finished", [True, False])
def test_another_evaluation_is_refused_with_what_differs(tmp_path: Path, is_finished: bool) -> None:
    def dies(prompts: list[str], settings: Settings) -> list[str]:
        raise KeyboardInterrupt

    settings = {"stop": ("x",), "seed": 3}
    if is_finished:
        run(tmp_path / "e", described=IDENTITY, **settings)
    else:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "e", dies, IDENTITY, **settings)
    before = sorted(path.name for path in (tmp_path / "e").iterdir())
    for changed, figures in OTHERS:
        with refused(tmp_path / "e", *figures):
            run(tmp_path / "e", never, {**IDENTITY, **changed}, **settings)
    strict = strict_rewards(["gsm8k_correctness"], ("think", "answer"))
    for given, figures in (
        ({**settings, "seed": 4}, ["settings.seed", "3", "4"]),
        ({"seed": 3}, ["settings.stop", "'x'", "[]"]),
        ({**settings, "strict": strict}, ["`settings.strict`"]),
        ({**settings, "chat_template_kwargs": {"a": 1}}, ["settings.chat_template_kwargs", "None"]),
    ):
        with refused(tmp_path / "e", *figures):
            run(tmp_path / "e", never, IDENTITY, **given)
    for column in ("prompt", "answer"):
        rows = dataset().to_dict()
        rows[column][3] = "30"
        with refused(tmp_path / "e", "problems"):
            run(tmp_path / "e", never, IDENTITY, datasets.Dataset.from_dict(rows), **settings)
    assert sorted(path.name for path in (tmp_path / "e").iterdir()) == before
    copy = {**IDENTITY, "model": "copy"}  # with equal weights
    assert run(tmp_path / "e", never if is_finished else policy, copy, **settings)["released"] == "2026-01-02"


def test_one_file_may_have_two_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name).touch()
    described = {"model": "a", "dataset": {"path": "a"}}
    run(tmp_path / "e", described=described)
    for spelling in ("./a", str(tmp_path / "a")):
        assert run(tmp_path / "e", never, {"model": spelling, "dataset": {"path": spelling}})["model"] == "a"
    with refused(tmp_path / "e", "dataset.path", "b"):
        run(tmp_path / "e", never, {**described, "dataset": {"path": "b"}})
    with refused(tmp_path / "e", "model", "b"):
        run(tmp_path / "e", never, {**described, "model": "b"})


def test_the_rows_are_known_by_the_columns_that_an_evaluation_reads(tmp_path: Path) -> None:
    names = ("prompt", "answer", "choices", "level", "size", "colour")
    rows = datasets.Dataset.from_dict({name: [["x", "y"] if name == "choices" else "B"] for name in names})
    choice = strict_rewards(["choice_correctness"], ("think", "answer"))
    for place, (settings, columns) in enumerate(
        [
            (Settings(strict=None), {"prompt", "answer"}),
            (Settings(strict=None, tools={"tools": ["my.tool"]}), {"prompt", "answer"}),
            (Settings(strict=None, tools={"environment_factory": "my.Game"}), set(names)),
            (Settings(strict=choice), {"prompt", "answer", "choices"}),
        ]
    ):
        found = evaluate_by(tmp_path / str(place), lambda prompts, settings: [""], rows, settings, {})
        assert found["rows"].keys() == columns


# ---- weights


def save_adapter(base: Path, folder: Path) -> Path:
    """Save a LoRA adapter as PEFT does, without a tokenizer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(folder)
    return folder


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def command(model: Path, folder: Path, *more: str) -> list[str]:
    """Return the command of an evaluation of two problems with four tokens each."""
    options = ["--dataset", "arithmetic", "--split", "test[:2]", "--max_new_tokens", "4", "--output", str(folder)]
    return ["evaluate", str(model), *options, *more]


def test_a_fingerprint_covers_the_content_of_the_weights(tiny_model: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(tiny_model, tmp_path / "copied")
    before = SavedModel(str(copied)).fingerprint()
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(before)
    (copied / "trainer_state.json").write_text("{}")  # other files of a run are no weights
    os.utime(copied / "model.safetensors", (0, 0))
    assert SavedModel(str(copied)).fingerprint() == before == SavedModel(str(tiny_model)).fingerprint()
    flip_last_byte(copied / "model.safetensors")
    assert SavedModel(str(copied)).fingerprint() != before


def test_a_fingerprint_of_an_adapter_covers_its_base(tiny_model: Path, tmp_path: Path) -> None:
    base, adapter = Path(shutil.copytree(tiny_model, tmp_path / "base")), save_adapter(tiny_model, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())

    def on(named: str | None) -> dict[str, Any]:
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": named}))
        return SavedModel(str(adapter)).fingerprint()

    before = on(str(base))
    (base / "model.safetensors").write_bytes(b"another model")
    assert on(str(base)) != before
    assert "base" not in on(None)


def test_a_fingerprint_of_a_hub_model_is_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "c0ffee" * 6 + "beef"
    cache = tmp_path / "models--org--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    (cache / "snapshots" / commit).mkdir(parents=True)
    (cache / "snapshots" / commit / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("grpo_recipes.data.hub.hub_answers", lambda: False)
    assert SavedModel("org/name").fingerprint() == {"commit": commit}
    assert SavedModel("org/other").fingerprint() == {}


def test_the_result_of_a_model_that_changed_on_disk_is_not_reused(
    tiny_model: Path, tmp_path: Path, generating: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    generating(lambda prompts, settings: [""] * len(prompts))
    assert cli.main(command(model, tmp_path / "e")) == 0
    generating(never)
    assert cli.main(command(model, tmp_path / "e")) == 0
    flip_last_byte(model / "model.safetensors")
    assert cli.main(command(model, tmp_path / "e")) == 2
    assert "weights" in capsys.readouterr().err.splitlines()[-1]


def test_weights_that_lack_a_tensor_are_not_evaluated_with_random_numbers(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    adapter = save_adapter(tiny_model, tmp_path / "adapter")
    assert not (adapter / "tokenizer_config.json").exists()
    assert cli.main(command(adapter, tmp_path / "e")) == 0, "by its base's tokenizer"
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    for file, tensor in (
        (model / "model.safetensors", "model.norm.weight"),
        (adapter / "adapter_model.safetensors", ""),
    ):
        tensors = load_file(file)
        del tensors[tensor or next(iter(tensors))]
        save_file(tensors, file, metadata={"format": "pt"})
        capsys.readouterr()
        assert cli.main(command(file.parent, tmp_path / "f")) == 2
        output = capsys.readouterr().err.splitlines()[-1]
        assert str(file.parent) in output
        assert tensor in output


# ---- comparisons


def test_two_evaluations_are_compared_problem_by_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def always(prompts: list[str], settings: Settings) -> list[str]:
        return [f"<think>x</think><answer>{int(prompt.partition('+')[0]) + 1}</answer>" for prompt in prompts]

    run(tmp_path / "a")
    run(tmp_path / "b", always)
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result["strict"]["difference"]["value"] == pytest.approx(0.6)
    assert result["mcnemar"] == {"only_first": 0, "only_second": 6, "p": 2 / 2**6}
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert result["warnings"] == []
    evaluate_by(tmp_path / "sampled", always, dataset(), Settings(temperature=1.0, samples=2), {})
    sampled = compare(tmp_path / "a", tmp_path / "sampled")
    assert sampled["strict"]["difference"]["value"] == pytest.approx(0.6)
    assert "temperature 0.0 and 1.0" in sampled["warnings"][0]
    for name, rows in (("fewer", dataset(4)), ("shuffled", dataset().select([1, 0, *range(2, 10)]))):
        evaluate_by(tmp_path / name, policy, rows, Settings(), {})
        with refused(tmp_path / name):
            compare(tmp_path / "a", tmp_path / name)


def test_folders_that_can_not_be_compared_are_named(tmp_path: Path) -> None:
    after = tmp_path / "run" / "evaluations" / "after"
    run(after)
    for name in ("trained", "empty", "run/evaluations/later", "run/evaluations/before"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "evaluations" / "later" / "evaluation.json").touch()
    (tmp_path / "trained" / "run.json").write_text("{}")
    for name, figures in (
        ("absent", []),
        ("run", [after]),
        ("trained", [f"evaluate {tmp_path / 'trained'}"]),
        ("empty", ["--output"]),
    ):
        with refused(tmp_path / name, *figures):
            compare(after, tmp_path / name)
    table = pd.read_parquet(after / "completions.parquet")
    table.head(0).to_parquet(after / "completions.parquet")
    with refused(after / "completions.parquet"):
        compare(after, after)


@pytest.mark.parametrize(
    ("spec", "column"),
    [({"name": "my.rewards.style"}, "reward/style"), ({"name": "gsm8k_correctness", "alias": "right"}, "passed/right")],
)
def test_a_damaged_column_of_a_compared_reward_is_named(spec: dict[str, Any], column: str, tmp_path: Path) -> None:
    run(tmp_path / "e", described={"paid_by": [spec]})
    compare(tmp_path / "e", tmp_path / "e")  # a reward that was not measured has no column
    path = tmp_path / "e" / "completions.parquet"
    pd.read_parquet(path).assign(**{column: "text"}).to_parquet(path)
    with refused(path, column, by=RunError):
        compare(tmp_path / "e", tmp_path / "e")
