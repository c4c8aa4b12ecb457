"""Evaluation during training (`eval_strategy`): its completions have files beside those of training."""

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer, train
from grpo_recipes.reports.run import Run
from tests.support import trainers
from tests.support.grids import only
from tests.support.probe_rewards import distinct_characters
from tests.support.synthetic import write_run


def arguments(tiny_model: Path, gsm8k_file: Path, output: Path, *more: str) -> list[str]:
    """Train with generation batches that serve two steps, and 8 of 40 problems held out."""
    given = {
        "model_name_or_path": tiny_model, "output_dir": output,
        "dataset.path": gsm8k_file, "dataset.split": "train[:32]", "dataset.eval_split": "train[32:]",
        "rewards": "[tests.support.probe_rewards.distinct_characters]", "max_completion_length": 8,
        "use_cpu": "true", "bf16": "false", "dtype": "float32", "gradient_checkpointing": "false",
        "num_iterations": 2, "logging_steps": 1, "max_steps": 2, "save_strategy": "no",
    }  # fmt: skip
    return ["--config", "gsm8k-qwen2.5-1.5b-24gb", *(f"--{key}={value}" for key, value in given.items()), *more]


@pytest.mark.slow
def test_evaluation_completions_have_files_of_their_own(tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    evaluated = tmp_path / "evaluated"
    more = ["--eval_strategy=steps", "--eval_steps=1", "--num_generations_eval=2", "--per_device_eval_batch_size=4"]
    assert train.main(arguments(tiny_model, gsm8k_file, evaluated, *more)) == 0
    files = [f"{kind}completions_{step:05d}.parquet" for kind in ("", "eval_") for step in (1, 2)]
    assert sorted(path.name for path in (evaluated / "completions").iterdir()) == files
    history = json.loads((evaluated / "trainer_state.json").read_text())["log_history"]
    for entry in (entry for entry in history if "eval_reward" in entry):
        table = pd.read_parquet(evaluated / "completions" / f"eval_completions_{entry['step']:05d}.parquet")
        questions = list(table["prompt"])
        counts = {n: sum(f"Ann has {n} figs" in question for question in questions) for n in range(33, 41)}
        assert set(counts.values()) == {2}
        assert len(table) == 16
        assert entry["eval_reward"] == pytest.approx(table["distinct_characters"].mean())
    assert sum("eval_reward" in entry for entry in history) == 2


def questions(*words: str) -> Dataset:
    return Dataset.from_dict({"prompt": list(words)})


def held_out_prompts(file: Path) -> list[str]:
    return sorted(pd.read_parquet(file)["prompt"])


@pytest.mark.parametrize("handed_over", only([True], [False, True]))
def test_several_datasets_are_evaluated_one_by_one(tiny_model: Path, tmp_path: Path, handed_over: bool) -> None:
    """A dict of datasets is evaluated one by one, whether the trainer or the caller holds it."""

    def trained(name: str, **evaluation: Any) -> tuple[GRPOTrainer, Path]:
        sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 2, "max_completion_length": 6}
        sizes |= {"num_generations": 4, "num_generations_eval": 2, "max_steps": 2, "logging_steps": 1}
        sizes |= {"num_iterations": 2}  # one generation, which no evaluation comes before, serves both steps
        evaluates = {"eval_strategy": "steps", "eval_steps": 1} if evaluation else {}
        args = trainers.arguments(tmp_path / name, log_completions=True, **sizes, **evaluates)
        training = questions("one", "two plus two", "three", "four")
        trainer = GRPOTrainer(str(tiny_model), distinct_characters, args, training, **evaluation)
        trainer.train()
        return trainer, tmp_path / name / "completions"

    plain, expected = trained("plain")
    datasets = {"easy": questions("five", "six"), "org/hard": questions("seven")}
    if handed_over:
        trainer, files = plain, expected
        expected = Path(shutil.copytree(expected, tmp_path / "copy"))
        trainer.evaluate(datasets)
        steps = ["00002"]
    else:
        trainer, files = trained("evaluated", eval_dataset=datasets)
        steps = ["00001", "00002"]
    for step in ("00001", "00002"):
        name = f"completions_{step}.parquet"
        pd.testing.assert_frame_equal(pd.read_parquet(files / name), pd.read_parquet(expected / name))
    for step in steps:
        assert held_out_prompts(files / f"eval_easy_completions_{step}.parquet") == ["five"] * 2 + ["six"] * 2
        assert held_out_prompts(files / f"eval_org-hard_completions_{step}.parquet") == ["seven"] * 2
    assert len(list(files.iterdir())) == 2 + 2 * len(steps)
    assert not list(files.glob("eval_completions_*"))


def test_contract_with_trl() -> None:
    """Names of TRL that `separate_eval_completions` and `GRPOTrainer.log` use beside its public methods."""
    log, build = inspect.getsource(TRLGRPOTrainer.log), inspect.getsource(TRLGRPOTrainer.__init__)
    sentence = "TRL has changed {}: look at training/trl_patches.py and at `log` in training/trainer.py"
    for said in ('self._logs["prompt"]', '"completions"', "completions_{self.state.global_step:05d}.parquet"):
        assert said in log, sentence.format("what its log writes of the completions")
    assert "self.accelerator.is_main_process and self.log_completions" in log, sentence.format("when it writes them")
    assert "self._logs = {" in build, sentence.format("where it keeps them")


def held_out(step: int, right: list[list[int]]) -> pd.DataFrame:
    """Return a table with a problem for each list. A 1 stands for a correct completion."""
    rows = [(n, 2.0 * verdict) for n, verdicts in enumerate(right) for verdict in verdicts]
    table = pd.DataFrame({"prompt": [f"problem {n}" for n, _ in rows], "gsm8k_correctness": [pay for _, pay in rows]})
    return table.assign(step=step, completion="7", tag_presence=0.8)


def test_evaluations_have_an_accuracy_with_an_interval(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert Run.read(folder).held_out_accuracy() == []
    held_out(10, [[0, 0], [1, 0], [0, 0], [1, 1]]).to_parquet(folder / "completions" / "eval_completions_00010.parquet")
    held_out(20, [[1], [1], [1], [0]]).to_parquet(folder / "completions" / "eval_completions_00020.parquet")
    (first, early), (second, late) = Run.read(folder).held_out_accuracy()
    assert (first, second) == (10, 20)
    assert early.value == 3 / 8
    # One sample a problem: the exact interval of 3 of 4 (statsmodels' proportion_confint, method "beta").
    assert (late.value, late.low, late.high) == pytest.approx((0.75, 0.1941204, 0.9936905), abs=1e-6)


def test_a_completion_that_no_reward_could_score_is_not_counted_as_wrong(tmp_path: Path) -> None:
    """One of two rewards makes it right. A problem without a readable gold has no accuracy."""
    reward = {"source": "x", "weight": 1.0, "kind": "correctness"}
    folder = write_run(tmp_path / "run", rewards=[{**reward, "name": name} for name in ("gsm8k_correctness", "exact")])
    table = held_out(10, [[1, 0], [0, 1], [0, 0], [0, 0]]).assign(exact=[None, None, 1.0, None] + [0.0] * 4)
    table.loc[table["prompt"] == "problem 3", ["gsm8k_correctness", "exact"]] = None
    file = folder / "completions" / "eval_completions_00010.parquet"
    table.to_parquet(file)
    ((_, found),) = Run.read(folder).held_out_accuracy()
    assert found.value == 0.5, "3 of 6"
    pd.concat([table] * 20).to_parquet(file)
    ((_, copied),) = Run.read(folder).held_out_accuracy()
    assert copied.value == 0.5
    assert copied.high - copied.low > 0.5, "three prompts, whatever the number of their rows"
