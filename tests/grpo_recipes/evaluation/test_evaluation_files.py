"""`grpo-recipes evaluate`: its files against a recount, interrupted evaluations, and comparisons."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import datasets
import pandas as pd
import pytest

from grpo_recipes import cli
from grpo_recipes.data.load import load
from grpo_recipes.evaluation import evaluate
from grpo_recipes.evaluation.comparison import compare
from grpo_recipes.evaluation.estimates import mean_share, summarise
from grpo_recipes.evaluation.evaluate import (
    evaluate_into,
    held_out_spec,
    weights_fingerprint,
)
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.runs.files import RunError
from grpo_recipes.runs.lock import LOCK, only_writer
from grpo_rewards.errors import UserError

FILES = ("completions.parquet", "evaluation.json")


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


def run(folder: Path, complete=policy, **settings) -> dict:
    return evaluate_into(folder, complete, dataset(), Settings(batch_size=4, **settings), {"model": "m"})


def recount(table: pd.DataFrame) -> int:
    """Count strictly right completions by their text alone."""
    return sum(f"<think>x</think><answer>{row.gold}</answer>" == row.completion for row in table.itertuples())


def test_the_shares_equal_a_recount_of_the_completions(tmp_path: Path) -> None:
    summary = run(tmp_path / "e")
    table = pd.read_parquet(tmp_path / "e" / "completions.parquet")
    assert len(table) == 10
    right = recount(table)
    assert right == 4  # 2, 4, 6 and 8 are right, 0 is not
    assert summary["strict"] == mean_share([1.0] * 4 + [0.0] * 6).as_dict()
    assert summary["lenient"]["value"] == 0.8
    assert json.loads((tmp_path / "e" / "evaluation.json").read_text()) == summary
    assert sorted(path.name for path in (tmp_path / "e").iterdir()) == sorted(FILES)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("settings", [{}, {"samples": 3, "temperature": 1.0}])
@pytest.mark.parametrize("died_in", [1, 2, 3])
def test_a_killed_evaluation_continues_to_the_same_files(tmp_path: Path, settings: dict, died_in: int) -> None:
    run(tmp_path / "whole", **settings)
    calls = []

    def dies(prompts: list[str], given: Settings) -> list[str]:
        calls.append(prompts)
        if len(calls) == died_in:
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
    finished = len(calls)
    run(tmp_path / "halves", dies, **settings)
    assert len(calls) == finished, "a finished evaluation is only read"


def test_a_second_evaluation_into_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    def meets_another(prompts: list[str], given: Settings) -> list[str]:
        with pytest.raises(UserError) as caught:
            run(tmp_path / "e")
        refused.append(str(caught.value))
        return policy(prompts, given)

    run(tmp_path / "e", meets_another)
    process = f"process {os.getpid()} on "
    assert all(f"{tmp_path}/e: another evaluation writes there just now ({process}" in output for output in refused)
    assert len(refused) == 3
    run(tmp_path / "whole")
    for name in FILES:
        assert (tmp_path / "e" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "e").iterdir()) == sorted(FILES)


def test_the_command_refuses_a_second_evaluation_before_the_model_is_loaded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "load_engine", lambda name: pytest.fail("the model was loaded"))
    with only_writer(tmp_path / "e", "evaluation"):
        arguments = ["--dataset", "arithmetic", "--limit", "2", "--output", str(tmp_path / "e")]
        assert cli.main(["evaluate", str(tiny_model), *arguments]) == 2
        output = capsys.readouterr().err.splitlines()[-1]
        assert output.startswith(
            f"error: {tmp_path}/e: another evaluation writes there just now (process {os.getpid()} "
        )
        assert [path.name for path in (tmp_path / "e").iterdir()] == [LOCK]


def test_an_evaluation_whose_folder_was_taken_over_writes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def loses(prompts: list[str], given: Settings) -> list[str]:
        calls.append(prompts)
        if len(calls) == 2:
            (tmp_path / "e" / LOCK).write_text(
                "filelock/2\npid=17\nhost=other-host\nmode=lease\ntoken=x\nduration=60.0\n"
            )
        return policy(prompts, given)

    with pytest.raises(UserError, match="process 17 on other-host.* has taken it over.*this evaluation stops"):
        run(tmp_path / "e", loses)
    assert [path.name for path in (tmp_path / "e" / "parts").iterdir()] == ["000000.parquet"]
    assert not (tmp_path / "e" / "evaluation.json").exists()


def test_another_evaluation_is_never_mixed_in(tmp_path: Path) -> None:
    run(tmp_path / "e")
    with pytest.raises(UserError, match="holds another evaluation"):
        run(tmp_path / "e", seed=1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(UserError, match="no evaluation"):
        run(tmp_path / "other")
    assert (tmp_path / "other" / "notes.txt").exists()


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_model_with_changed_weights_is_another_model(tmp_path: Path, is_finished: bool) -> None:
    def dies(prompts: list[str], settings: Settings) -> list[str]:
        raise KeyboardInterrupt

    def evaluated(weights: str, complete=policy) -> dict:
        return evaluate_into(tmp_path / "e", complete, dataset(), Settings(), {"model": "m", "weights": weights})

    if is_finished:
        evaluated("sha256 1")
    else:
        with pytest.raises(KeyboardInterrupt):
            evaluated("sha256 1", dies)
    with pytest.raises(UserError, match=r"weights or its tokenizer have changed since; remove the folder, or give"):
        evaluated("sha256 2")
    assert evaluated("sha256 1")["weights"] == "sha256 1"


@pytest.mark.parametrize("column", ["prompt", "answer"])
def test_changed_rows_make_another_evaluation(tmp_path: Path, column: str) -> None:
    changed = dataset().to_dict()
    changed[column][3] = "30"
    assert set(run(tmp_path / "e")["rows"]) == {"prompt", "answer"}
    with pytest.raises(UserError, match="the problems have changed since"):
        evaluate_into(
            tmp_path / "e", policy, datasets.Dataset.from_dict(changed), Settings(batch_size=4), {"model": "m"}
        )


def test_the_error_names_the_setting_that_differs(tmp_path: Path) -> None:
    run(tmp_path / "e")
    with pytest.raises(UserError, match=r"settings\.seed was 0 and is now 1; remove"):
        run(tmp_path / "e", seed=1)
    without = {key: value for key, value in run(tmp_path / "e").items() if key != "rows"}
    (tmp_path / "e" / "evaluation.json").write_text(json.dumps(without))
    with pytest.raises(UserError, match="it does not record `rows`; remove"):
        run(tmp_path / "e")


def test_a_fingerprint_covers_the_content_of_the_weights(tiny_model: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(tiny_model, tmp_path / "copied")
    before = weights_fingerprint(str(copied))
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= set(before)
    (copied / "trainer_state.json").write_text("{}")  # other files of a run are no weights
    os.utime(copied / "model.safetensors", (0, 0))
    assert weights_fingerprint(str(copied)) == before == weights_fingerprint(str(tiny_model))
    content = bytearray((copied / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copied / "model.safetensors").write_bytes(content)
    assert weights_fingerprint(str(copied)) != before


def test_a_fingerprint_of_an_adapter_covers_its_base(tiny_model: Path, tmp_path: Path) -> None:
    base, adapter = Path(shutil.copytree(tiny_model, tmp_path / "base")), save_adapter(tiny_model, tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(base)}))
    before = weights_fingerprint(str(adapter))
    (base / "model.safetensors").write_bytes(b"another model")
    assert weights_fingerprint(str(adapter)) != before


def test_a_fingerprint_of_a_hub_model_is_its_revision(tmp_path: Path, monkeypatch) -> None:
    cache = tmp_path / "models--org--name"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("c0ffee" * 6 + "beef")
    snapshot = cache / "snapshots" / ("c0ffee" * 6 + "beef")
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("grpo_recipes.data.hub.hub_answers", lambda: False)
    assert weights_fingerprint("org/name") == {"commit": snapshot.name}
    assert weights_fingerprint("org/other") == {}
    assert weights_fingerprint("/no/such-folder") == {}


def save_adapter(base: Path, folder: Path) -> Path:
    """Save a LoRA adapter as PEFT does, without a tokenizer."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(folder)
    return folder


def command(model: Path, folder: Path, *more: str) -> list[str]:
    """Return the command of an evaluation of two problems with four tokens each."""
    return ["evaluate", str(model), "--limit", "2", "--max_new_tokens", "4", "--output", str(folder), *more]


def test_an_adapter_without_a_tokenizer_uses_its_bases_tokenizer(tiny_model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tiny_model, tmp_path / "adapter")
    assert not (adapter / "tokenizer_config.json").exists()
    assert cli.main(command(adapter, tmp_path / "e", "--dataset", "arithmetic")) == 0


def test_the_result_of_a_model_that_changed_on_disk_is_not_reused(tiny_model: Path, tmp_path: Path, capsys) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    arguments = command(model, tmp_path / "e", "--dataset", "arithmetic")
    assert cli.main(arguments) == 0
    assert cli.main(arguments) == 0
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model.safetensors").write_bytes(content)
    assert cli.main(arguments) == 2
    assert "the model's weights or its tokenizer have changed since" in capsys.readouterr().err


@pytest.mark.slow
def test_another_spelling_of_a_models_path_names_the_same_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The later evaluations only read the files of the first one."""
    shutil.copytree(tiny_model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    options = ["--dataset", "arithmetic", "--limit", "2", "--max_new_tokens", "4", "--output", "e"]
    assert cli.main(["evaluate", "model", *options]) == 0
    monkeypatch.setattr(evaluate, "load_engine", None)
    for spelling in (str(tmp_path / "model"), "./model/", "../" + tmp_path.name + "/model"):
        assert cli.main(["evaluate", spelling, *options]) == 0
    assert len(set(capsys.readouterr().out.split("2 problems")[1:])) == 1
    assert json.loads(Path("e/evaluation.json").read_text())["model"] == "model"


def test_an_evaluation_with_several_samples_has_its_own_folder(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    options = ["--dataset", "arithmetic", "--limit", "2", "--max_new_tokens", "4"]
    for more in ([], ["--samples", "2"]):
        assert cli.main(["evaluate", "model", *options, *more]) == 0
    assert sorted(path.name for path in Path("model/evaluations").iterdir()) == ["after", "after-2-samples"]


def test_greedy_samples_are_refused() -> None:
    with pytest.raises(UserError, match="set --temperature"):
        Settings(samples=2)


def samples(verdicts: dict[int, list[tuple[str | None, bool]]]) -> pd.DataFrame:
    """Return a table of completions from the answers of each problem and their verdicts, strict and lenient alike."""
    rows = [
        {"problem": problem, "sample": place, "gold": "7", "answer": answer, "lenient": right, "strict": right}
        for problem, stated in verdicts.items()
        for place, (answer, right) in enumerate(stated)
    ]
    return pd.DataFrame(rows)


@pytest.mark.slow
def test_the_same_model_by_another_path_is_the_same_evaluation(tiny_model: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for path in ("model", "./model", str(tmp_path / "model")):
        assert cli.main(command(Path(path), tmp_path / "e", "--dataset", "arithmetic")) == 0
        assert cli.main(command(Path(path), tmp_path / "e", "--dataset", "arithmetic")) == 0
    assert json.loads((tmp_path / "e" / "evaluation.json").read_text())["model"] == "model"


def test_ctrl_c_reports_what_is_saved_and_the_same_command_continues(
    tiny_model: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    calls: list[list] = []

    def engine(prompts: list, settings: Settings) -> list[str]:
        calls.append(prompts)
        if len(calls) in (1, 4):
            raise KeyboardInterrupt
        return [""] * len(prompts)

    engine.sampling = lambda settings: {}
    monkeypatch.setattr(evaluate, "load_engine", lambda *_: engine)
    arguments = ["evaluate", str(tiny_model), "--dataset", "arithmetic", "--limit", "6", "--batch_size", "2"]
    arguments += ["--output", str(tmp_path / "e")]
    output = []
    for _ in range(2):
        assert cli.main(arguments) == 130
        output.append(capsys.readouterr().err)
    assert output[0].splitlines()[-1] == (
        "stopped by Ctrl-C: no batch was finished, so nothing is saved; the same command starts again"
    )
    assert output[1].splitlines()[-1] == (
        f"stopped by Ctrl-C: the finished batches are saved in {tmp_path / 'e' / 'parts'}; the same command continues "
        "from there"
    )
    assert "Traceback" not in "".join(output)
    assert cli.main(arguments) == 0
    assert len(calls) == 5, "a finished batch was made again"


def test_ctrl_c_before_the_evaluation_prints_no_traceback(monkeypatch, capsys) -> None:
    def interrupted(options: argparse.Namespace) -> dict:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "evaluate_request", interrupted)
    assert cli.main(["evaluate", "model"]) == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C: nothing was evaluated\n"


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("damage", [b"", b"junk", None])
def test_a_damaged_part_is_named_and_made_again(tmp_path: Path, damage: bytes | None) -> None:
    def dies(prompts: list[str], settings: Settings) -> list[str]:
        if prompts[0] == "8+1=":
            raise KeyboardInterrupt
        return policy(prompts, settings)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "e", dies)
    part = tmp_path / "e" / "parts" / "000001.parquet"
    (part.parent / ".DS_Store").touch()
    part.write_bytes(part.read_bytes()[:-30] if damage is None else damage)
    with pytest.raises(
        RunError, match=r"000001\.parquet: can't be read as parquet .*; remove the file: the same command"
    ):
        run(tmp_path / "e")
    part.unlink()
    assert run(tmp_path / "e") == run(tmp_path / "whole")


def test_weights_that_lack_a_tensor_are_not_evaluated_with_random_numbers(
    tiny_model: Path, tmp_path: Path, capsys
) -> None:
    from safetensors.torch import load_file, save_file

    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert cli.main(command(model, tmp_path / "e", "--dataset", "arithmetic")) == 2
    assert "lack 1 of the model's tensors (such as model.norm.weight)" in capsys.readouterr().err.splitlines()[-1]


def test_an_adapter_that_lacks_a_tensor_is_not_evaluated(tiny_model: Path, tmp_path: Path, capsys) -> None:
    from safetensors.torch import load_file, save_file

    adapter = save_adapter(tiny_model, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors.popitem()
    save_file(tensors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    assert cli.main(command(adapter, tmp_path / "e", "--dataset", "arithmetic")) == 2
    assert "can't be loaded: Found missing adapter keys" in capsys.readouterr().err.splitlines()[-1]


def test_a_runs_own_rewards_define_strict_accuracy(tiny_model: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    run_folder = Path(shutil.copytree(tiny_model, tmp_path / "run"))
    boxed = {"name": "gsm8k_correctness", "kwargs": {"extract": "boxed"}}
    recipe = {
        "dataset": {"name": "arithmetic", "system_prompt": "none"},
        "rewards": [boxed],
        "max_completion_length": 4,
    }
    (run_folder / "run.json").write_text(json.dumps({"recipe": recipe}))
    rows = load(DatasetSpec("arithmetic", split="test", system_prompt="none"))
    golds = {row["prompt"][0]["content"]: row["answer"].rpartition("#### ")[2] for row in rows}

    def engine(prompts: list, settings: Settings) -> list[str]:
        return [rf"\boxed{{{golds[prompt[0]['content']]}}}" for prompt in prompts]

    engine.sampling = lambda settings: {}
    monkeypatch.setattr(evaluate, "load_engine", lambda *_: engine)
    arguments = ["evaluate", str(run_folder), "--limit", "8", "--samples", "2"]
    assert cli.main(arguments) == 0
    assert "strict: right by `extract: boxed`" in capsys.readouterr().out
    summary = json.loads((run_folder / "evaluations" / "after-2-samples" / "evaluation.json").read_text())
    assert summary["strict"]["value"] == summary["pass_at"]["2"]["value"] == 1.0
    recipe["rewards"] = ["gsm8k_correctness"]
    (run_folder / "run.json").write_text(json.dumps({"recipe": recipe}))
    assert cli.main(arguments) == 2
    assert "the rewards of the recipe have changed since" in capsys.readouterr().err


def test_majority_votes_count_numbers_in_any_form() -> None:
    table = samples(
        {
            0: [("18", True), ("18.0", True), ("17", False), ("17", False), ("$18", True)],  # 3 for 18
            1: [("3", False), ("3", False), ("4", True), (None, False), (None, False)],  # None does not vote
            2: [("5", True), ("6", False), ("6", False), ("5", True), ("x", False)],  # a tie, in which 5 came first
            3: [(None, False)] * 5,
        }
    )
    summary = summarise(table)
    assert summary["majority"]["value"] == 0.5
    assert summary["strict"]["value"] == pytest.approx((3 + 1 + 2 + 0) / 20)
    # pass@2 by hand: 1 - C(5-c, 2) / 10 for c = 3, 1, 2, 0.
    assert summary["pass_at"]["2"]["value"] == pytest.approx((0.9 + 0.4 + 0.7 + 0.0) / 4)
    assert list(summary["pass_at"]) == ["1", "2", "4", "5"]
    assert summary["pass_at"]["5"]["value"] == 0.75


def test_a_winning_answer_is_right_if_one_of_its_forms_is() -> None:
    """A reward may accept a number in one form only. The vote is for the number."""
    assert summarise(samples({0: [("18.0", False), ("18", True), ("17", False)]}))["majority"]["value"] == 1.0


def test_batches_have_separate_seeds_and_the_requested_size(tmp_path: Path) -> None:
    """Otherwise all batches would draw the same random numbers, or a run with another seed some of the same ones."""
    calls: list[tuple[int, int]] = []

    def recording(prompts: list[str], settings: Settings) -> list[str]:
        calls.append((settings.seed, len(prompts)))
        return policy(prompts, settings)

    for seed in range(3):
        run(tmp_path / f"e{seed}", recording, samples=2, temperature=1.0, seed=seed)
    seeds, sizes = zip(*calls, strict=True)
    assert sizes == (4,) * 15, "two problems of two samples at a time"
    assert len(set(seeds)) == 15
    table = pd.read_parquet(tmp_path / "e0" / "completions.parquet")
    assert table["problem"].tolist() == [n for n in range(10) for _ in range(2)]
    assert table["sample"].tolist() == [0, 1] * 10


def test_the_same_problems_in_another_order_are_not_compared(tmp_path: Path) -> None:
    """Problems are paired by their number."""
    rows = dataset(6)
    evaluate_into(tmp_path / "a", policy, rows, Settings(), {})
    evaluate_into(tmp_path / "b", policy, rows.select([1, 0, 2, 3, 4, 5]), Settings(), {})
    with pytest.raises(UserError, match="not on the same problems"):
        compare(tmp_path / "a", tmp_path / "b")


def test_two_evaluations_are_compared_problem_by_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def always(prompts: list[str], settings: Settings) -> list[str]:
        return [f"<think>x</think><answer>{int(prompt.partition('+')[0]) + 1}</answer>" for prompt in prompts]

    run(tmp_path / "a")
    run(tmp_path / "b", always)
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result["strict"]["difference"]["value"] == pytest.approx(0.6)
    assert result["mcnemar"] == {"only_first": 0, "only_second": 6, "p": 2 / 2**6}
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "exact p = 0.0312" in capsys.readouterr().out
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    assert result["warnings"] == []
    evaluate_into(tmp_path / "sampled", always, dataset(), Settings(temperature=1.0, samples=2), {})
    sampled = compare(tmp_path / "a", tmp_path / "sampled")
    assert sampled["strict"]["difference"]["value"] == pytest.approx(0.6)
    assert "(temperature 0.0 and 1.0)" in sampled["warnings"][0]
    evaluate_into(tmp_path / "c", policy, dataset(4), Settings(), {})
    with pytest.raises(UserError, match="not on the same problems"):
        compare(tmp_path / "a", tmp_path / "c")
    assert cli.main(["compare", str(tmp_path / "a"), str(tmp_path / "nothing")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_the_command_evaluates_a_model_by_its_recipe(tiny_model: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "e"
    command = ["evaluate", str(tiny_model), "--recipe", "quickstart", "--limit", "6", "--batch_size", "4"]
    command += ["--max_new_tokens", "4", "--output", str(folder)]
    assert cli.main(command) == 0
    assert "6 problems, 1 completion each" in capsys.readouterr().out
    summary = json.loads((folder / "evaluation.json").read_text())
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary
    assert summary["dataset"]["name"] == "arithmetic"
    assert summary["dataset"]["split"] == "test"
    assert summary["settings"]["tags"] == ["think", "answer"]
    assert summary["settings"]["temperature"] == 0.0
    prompts = pd.read_parquet(folder / "completions.parquet")["prompt"]
    assert json.loads(prompts[0])[0]["role"] == "system"
    assert Counter(prompts).most_common(1)[0][1] == 1


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/no/such-folder", "--dataset", "arithmetic", "--limit", "2"], "can't be loaded"),
        (["MODEL", "--dataset", "arithmatic"], "did you mean `arithmetic`"),
        (["MODEL", "--dataset", "arithmetic", "--samples", "4", "--temperature", "0"], "greedy samples"),
        (["MODEL", "--dataset", "arithmetic", "--vllm"], "vLLM is not installed"),
        (["MODEL", "--vllm_max_model_length", "64"], "--vllm_max_model_length is an option of vLLM: add --vllm"),
        (
            ["MODEL", "--vllm", "--vllm_server_base_url", "http://x", "--vllm_tensor_parallel_size", "2"],
            "--vllm_tensor_parallel_size is set where the server is started",
        ),
        (
            ["MODEL", "--dataset", "arithmetic", "--vllm", "--vllm_server_base_url", "http://127.0.0.1:9"],
            "does not answer",
        ),
        (["MODEL", "--dataset", "arithmetic", "--max_new_tokens", "0"], "--max_new_tokens is 0: set it to at least 1"),
        (["MODEL", "--dataset", "arithmetic", "--batch_size", "0"], "--batch_size is 0: set it to at least 1"),
        (["MODEL", "--dataset", "arithmetic", "--limit", "0"], "--limit is 0: set it to at least 1"),
        (["MODEL", "--dataset", "arithmetic", "--temperature", "-1"], "--temperature is -1: set it to 0 for greedy"),
        (["MODEL", "--dataset", "arithmetic", "--temperature", "nan"], "--temperature is nan: set it to 0 for greedy"),
        (["MODEL", "--dataset", "scored"], "--dataset gsm8k --path"),
        (["MODEL", "--recipe", "no-such-recipe"], "no-such-recipe"),
    ],
)
def test_a_wrong_option_gets_one_sentence(
    arguments: list[str], says: str, tiny_model: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if "--vllm" in arguments:
        monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    given = [str(tiny_model) if word == "MODEL" else word for word in arguments]
    assert cli.main(["evaluate", *given, *(["--output", str(tmp_path / "e")] if given else [])]) == 2
    output = capsys.readouterr().err
    assert says in output.splitlines()[-1]


def test_a_run_is_evaluated_on_rows_that_it_was_not_trained_on(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys
) -> None:
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    for file in tiny_model.iterdir():
        (run_folder / file.name).write_bytes(file.read_bytes())
    recipe = {
        "dataset": {"name": "gsm8k", "path": str(gsm8k_file), "system_prompt": "reasoning"},
        "max_completion_length": 4,
    }
    (run_folder / "run.json").write_text(json.dumps({"recipe": recipe}))
    assert cli.main(["evaluate", str(run_folder)]) == 2
    assert "name the held-out problems with --path" in capsys.readouterr().err
    recipe["dataset"]["eval_split"] = "train[38:]"
    (run_folder / "run.json").write_text(json.dumps({"recipe": recipe}))
    assert cli.main(["evaluate", str(run_folder)]) == 0
    summary = json.loads((run_folder / "evaluations" / "after" / "evaluation.json").read_text())
    assert summary["problems"] == 2
    assert summary["settings"]["tags"] == ["reasoning", "answer"]


def dataset_options(**options: str) -> argparse.Namespace:
    """Return the options of `evaluate` that select the problems."""
    keys = ("dataset", "path", "split", "system_prompt", "prompt_format")
    return argparse.Namespace(**dict.fromkeys(keys) | options)


def test_a_folder_with_one_split_is_not_evaluated_as_its_test_split(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"question": ["1?"], "answer": ["#### 1"]})
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "two"))
    trained = {"name": "gsm8k", "path": str(tmp_path / "one")}
    for options in (dataset_options(), dataset_options(path=trained["path"])):
        with pytest.raises(UserError, match="name the held-out problems with --path"):
            held_out_spec(trained, options)
    assert held_out_spec({**trained, "eval_split": "train[90%:]"}, dataset_options()).split == "train[90%:]"
    assert held_out_spec(trained, dataset_options(split="train[90%:]")).split == "train[90%:]"
    assert (
        held_out_spec({**trained, "path": str(tmp_path / "two"), "split": "train"}, dataset_options()).split == "test"
    )


def test_another_path_ignores_the_recipes_slice() -> None:
    trained = {"name": "gsm8k", "path": "a.jsonl", "eval_split": "train[90%:]"}
    spec = held_out_spec(trained, dataset_options(path="b.jsonl"))
    assert (spec.path, spec.split) == ("b.jsonl", "test")
    spec = held_out_spec({**trained, "eval_path": "c.jsonl"}, dataset_options(path="b.jsonl", split="train[:5]"))
    assert (spec.path, spec.split) == ("b.jsonl", "train[:5]")


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("b.csv", {"delimiter", "encoding", "decimal"}),
        ("b.tsv.gz", {"delimiter", "encoding", "decimal"}),
        ("b.jsonl", {"encoding"}),
        ("b.parquet", set()),
        ("someone/problems", set()),
    ],
)
def test_another_path_keeps_the_keys_that_describe_such_a_file(path: str, kept: set[str]) -> None:
    notation = {"delimiter": ";", "encoding": "cp1252", "decimal": "comma"}
    spec = held_out_spec({"name": "gsm8k", "path": "a.csv", **notation}, dataset_options(path=path))
    assert {key for key in notation if getattr(spec, key) is not None} == kept


def test_tags_are_found_inside_a_gate() -> None:
    tagged = {"name": "well_formed", "kwargs": {"tags": ["t", "a"]}}
    recipe = {"rewards": [{"name": "gate", "reward": "gsm8k_correctness", "only_if": tagged}]}
    assert evaluate._tags(recipe, held_out_spec({}, dataset_options())) == ("t", "a")


def test_tags_are_found_inside_a_sum() -> None:
    inner = {"name": "sum", "rewards": ["tag_count", {"name": "tag_structure", "kwargs": {"tags": ["t", "a"]}}]}
    recipe = {"rewards": ["gsm8k_correctness", {"name": "sum", "rewards": [inner]}]}
    assert evaluate._tags(recipe, held_out_spec({}, dataset_options())) == ("t", "a")


def test_a_run_on_recorded_responses_is_refused_with_a_command_that_works(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys
) -> None:
    run_folder = Path(shutil.copytree(tiny_model, tmp_path / "run"))
    dataset = {"name": "scored", "path": "scored.jsonl", "prompt_format": "text"}
    (run_folder / "run.json").write_text(json.dumps({"recipe": {"dataset": dataset, "rewards": []}}))
    assert cli.main(command(run_folder, tmp_path / "e")) == 2
    output = capsys.readouterr().err
    assert "recorded responses" in output
    fix = output.partition("`")[2].partition("`")[0].replace("PROBLEMS.jsonl", str(gsm8k_file)).split()
    assert cli.main(command(run_folder, tmp_path / "e", *fix)) == 0
    assert "2 problems" in capsys.readouterr().out


@pytest.mark.slow
def test_a_comparison_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(tmp_path / name)
    program = "import sys\nsys.modules.update(torch=None, transformers=None)\nfrom grpo_recipes.cli import main\n"
    command = [sys.executable, "-c", f"{program}sys.exit(main(['compare', 'a', 'b']))"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "strict" in done.stdout
