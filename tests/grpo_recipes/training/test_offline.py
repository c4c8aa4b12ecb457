"""Training on recorded responses: refused data and settings, and training on exactly the recorded rows."""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_recipes import GRPOTrainer, train
from grpo_recipes.checks.checks import Machine, check
from grpo_recipes.data.load import load
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.recipe.recipe import RecipeError, parse_recipe
from grpo_recipes.recipe.specs import OfflineSpec
from grpo_recipes.training.offline import RecordedRollout, recorded_reward
from tests.mathematics import oracle
from tests.support import trainers
from tests.support.errors import refused
from tests.support.grids import only

HERE = Machine(num_processes=1, bf16=False)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def grouped(prompts: int = 8, responses: int = 4) -> list[dict]:
    return [
        {
            "prompt": f"What is {n} + 1?",
            "responses": [f" {n + k}" for k in range(responses)],
            "rewards": [float(k == 1) for k in range(responses)],
        }
        for n in range(prompts)
    ]


def arguments(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    given = [f"--model_name_or_path={model}", f"--dataset.path={data}", f"--output_dir={output}"]
    return ["--config=offline-scored-gpt2", *given, "--use_cpu", "--save_strategy=no", "--report_to=none", *more]


def scored(path: Path) -> dict:
    return load(DatasetSpec.parse({"name": "scored", "path": str(path)})).to_dict()


# Reading the file


def test_triples_and_lists_are_grouped_by_prompt(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl",
        [
            {"prompt": "a", "response": "1", "reward": 5},
            {"prompt": "b", "response": "2", "reward": 0.5},
            {"prompt": "a", "responses": ["3", "4"], "rewards": [0, -1]},
        ],
    )
    assert scored(path) == {
        "prompt": ["a", "b"],
        "responses": [["1", "3", "4"], ["2"]],
        "rewards": [[5.0, 0.0, -1.0], [0.5]],
    }


def test_log_probabilities_are_read(tmp_path: Path) -> None:
    single = [
        {"prompt": "a", "response": "1", "reward": 1, "logprobs": [-0.5, 0]},
        {"prompt": "a", "response": "2", "reward": 0, "logprobs": [-1.0]},
    ]
    several = [{"prompt": "a", "responses": ["1", "2"], "rewards": [1, 0], "logprobs": [[-0.5, 0], [-1.0]]}]
    for rows in (single, several):
        assert scored(write(tmp_path / "rows.jsonl", rows))["logprobs"] == [[[-0.5, 0.0], [-1.0]]]
    with refused("", "line 3", "logprobs"):
        scored(write(tmp_path / "rows.jsonl", [*single, *several]))


def test_a_slice_of_the_file_counts_prompts(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", grouped())
    spec = DatasetSpec.parse({"name": "scored", "path": str(path), "split": "train[:2]", "eval_split": "train[2:5]"})
    assert load(spec)["prompt"][:] == ["What is 0 + 1?", "What is 1 + 1?"]
    assert len(load(spec, evaluation=True)) == 3


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    fine = {"prompt": "a", "response": "1", "reward": 1}
    table: list[tuple[dict, str]] = [
        ({"prompt": "a", "response": "1"}, "reward"),
        ({**fine, "response": 1}, "response"),
        ({**fine, "prompt": ""}, "prompt"),
        ({**fine, "reward": "good"}, "reward"),
        ({**fine, "reward": True}, "reward"),
        ({**fine, "reward": float("nan")}, "reward"),
        ({"prompt": "a", "responses": ["1", "2"], "rewards": [1]}, "reward"),
        ({"prompt": "a", "responses": [], "rewards": []}, "response"),
        ({"prompt": "a", "reward": 1}, "response"),
        ({**fine, "responses": ["1"]}, "response"),
        ({**fine, "logprobs": [0.5]}, "logprobs"),
        ({"prompt": "a", "responses": ["1", "2"], "rewards": [1, 1], "logprobs": [[-1]]}, "logprobs"),
    ]
    for row, column in table:
        with refused("", "line 3", column):
            scored(write(tmp_path / "rows.jsonl", [*grouped(2), row]))
    for prompt in ("a", "b"):  # log-probabilities for all responses, or for none
        rows = [{**fine, "logprobs": [-1]}, {**fine, "prompt": prompt}]
        with refused("", "logprobs"):
            scored(write(tmp_path / "rows.jsonl", rows))


def test_keys_that_the_dataset_scored_does_not_use_are_refused() -> None:
    raw: list[dict] = [{"path": None}, {"path": "openai/gsm8k"}, {"prompt_format": "conversational"}]
    for changes in [*raw, {"system_prompt": "think"}, {"size": 3}]:
        with refused("", *(f"dataset.{key}" for key in changes)):
            DatasetSpec.parse({"name": "scored", "path": "rows.jsonl", **changes})


# Checks of the recipe


def test_settings_that_need_generation_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", grouped())
    evaluated = ["--eval_strategy=steps", "--dataset.eval_split=train[:2]", "--per_device_eval_batch_size=8"]
    in_groups, two = ["--offline=group", "--num_generations=4"], Machine(num_processes=2, bf16=False)
    table: list[tuple[list[str], Machine, list[str]]] = [
        (["--offline.baseline=groups"], HERE, ["`groups`", "`group`"]),
        (["--offline.baseline=x"], HERE, ["`x`", "batch"]),
        (["--offline.base=group"], HERE, ["base", "`baseline`"]),
        (["--offline=group", "--num_generations=8"], HERE, ["8 of 8"]),
        (["--num_generations=4"], HERE, ["`num_generations`"]),
        (evaluated, HERE, ["eval_strategy"]),
        (["--use_vllm"], HERE, ["use_vllm"]),
        (["--dataset.name=gsm8k"], HERE, ["dataset.name", "scored"]),
        (["--rewards=group_length"], HERE, ["group_length"]),
        (["--per_device_train_batch_size=1", "--gradient_accumulation_steps=1"], HERE, ["1"]),
        (["--per_device_train_batch_size=16"], HERE, ["8 prompts", "64"]),
        ([*in_groups, "--per_device_train_batch_size=2", "--gradient_accumulation_steps=1"], two, ["processes"]),
    ]
    for more, machine, figures in table:
        given = [*arguments(tmp_path, path, tmp_path / "run", "--gradient_accumulation_steps=4"), *more]
        with refused("", *figures, by=RecipeError):
            check(parse_recipe(given), machine)


def test_the_dataset_scored_needs_the_key_offline(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: x\nrewards: [well_formed]\ndataset: {{name: scored, path: {tmp_path}/a.jsonl}}\n"
    )
    with refused("", "`offline: group`", by=RecipeError):
        check(parse_recipe(["--config", str(recipe), "--use_cpu", "--bf16=false"]), HERE)


# The rollout


@pytest.fixture
def tokenizer(tiny_model: Path):
    return AutoTokenizer.from_pretrained(tiny_model)


def rollout(tmp_path: Path, tokenizer, rows: list[dict], limit: int = 64, baseline: str = "group") -> RecordedRollout:
    path = write(tmp_path / "rows.jsonl", rows)
    dataset = load(DatasetSpec.parse({"name": "scored", "path": str(path)}))
    return RecordedRollout(dataset, tokenizer, OfflineSpec(baseline), limit)


def test_each_response_of_a_group_comes_once_with_its_reward(tmp_path: Path, tokenizer) -> None:
    recorded = rollout(tmp_path, tokenizer, grouped(prompts=3, responses=5))
    trainer = SimpleNamespace(processing_class=tokenizer)
    for _ in range(20):
        given = recorded(["What is 2 + 1?"] * 4 + ["What is 0 + 1?"] * 4, trainer)
        texts = tokenizer.batch_decode(given["completion_ids"], skip_special_tokens=True)
        assert len(set(texts[:4])) == len(set(texts[4:])) == 4
        assert given["recorded_reward"] == [float(text == " 3") for text in texts[:4]] + [
            float(text == " 1") for text in texts[4:]
        ]
        assert all(ids[-1] == tokenizer.eos_token_id for ids in given["completion_ids"])
        assert tokenizer.batch_decode(given["prompt_ids"]) == ["What is 2 + 1?"] * 4 + ["What is 0 + 1?"] * 4


def test_draws_continue_from_a_saved_generator_state(tmp_path: Path, tokenizer) -> None:
    recorded = rollout(tmp_path, tokenizer, grouped(prompts=1, responses=9))
    trainer = SimpleNamespace(processing_class=tokenizer)
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        draws.append([recorded(["What is 0 + 1?"] * 4, trainer)["completion_ids"] for _ in range(3)])
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[0][1]


def test_lengths_are_checked_before_training(tmp_path: Path, tokenizer) -> None:
    longest = 1 + max(len(tokenizer(f" {n + k}")["input_ids"]) for n in range(8) for k in range(4))
    with refused("`max_completion_length`", 1, "32 of 32", longest):
        rollout(tmp_path, tokenizer, grouped(), limit=1)
    rollout(tmp_path, tokenizer, grouped(), limit=longest)
    rows = [{"prompt": "a", "responses": [" 1", " 1 1", " 1 1 1 1 1 1"], "rewards": [0.0, 0.0, 1.0]}]
    lengths = [1 + len(tokenizer(text)["input_ids"]) for text in rows[0]["responses"]]
    assert lengths[0] < lengths[1] < lengths[2]
    with refused("`max_completion_length`", lengths[1], "1 of 3", lengths[2]):
        rollout(tmp_path, tokenizer, rows, limit=lengths[1])


class Letters:
    """Tokenizer whose tokens are letters, with a token before each text unless special tokens are left out."""

    def __init__(self, end: int | None = 0) -> None:
        self.eos_token_id = end

    def __call__(self, texts: list[str], add_special_tokens: bool = True) -> dict:
        return {"input_ids": [[1] * add_special_tokens + [ord(letter) for letter in text] for text in texts]}


def of_letters(end: int | None = 0, baseline: str = "group", limit: int = 3, **columns) -> RecordedRollout:
    rows = Dataset.from_dict({"prompt": ["p"], "responses": [["a", "bc"]], "rewards": [[1.0, 2.0]], **columns})
    return RecordedRollout(rows, Letters(end), OfflineSpec(baseline), limit)


@pytest.mark.parametrize("end", [0, 7])
def test_a_response_is_its_own_tokens_and_the_end_of_sequence(end: int) -> None:
    recorded = of_letters(end)
    given = recorded(["p", "p"], SimpleNamespace(processing_class=lambda text: {"input_ids": text}))
    assert given["completion_ids"] == [[ord("a"), end], [ord("b"), ord("c"), end]]
    assert (given["recorded_reward"], given["logprobs"]) == ([1.0, 2.0], None)
    with refused("tokenizer"):
        of_letters(None)


def test_every_token_needs_one_log_probability_and_every_response_one_reward() -> None:
    recorded = of_letters(logprobs=[[[-1.0, -2.0], [-3.0, -4.0, -5.0]]])
    given = recorded(["p", "p"], SimpleNamespace(processing_class=lambda text: {"input_ids": text}))
    assert given["logprobs"] == [[-1.0, -2.0], [-3.0, -4.0, -5.0]]
    for wrong in ([-1.0, -1.0], [-1.0] * 4, []):
        with refused("`logprobs`", len(wrong), 3):
            of_letters(logprobs=[[[-1.0, -2.0], wrong]])
    with pytest.raises(ValueError, match="zip"):
        of_letters(rewards=[[1.0, 2.0, 3.0]])


# Training


def completions(output: Path) -> pd.DataFrame:
    return pd.concat(pd.read_parquet(path) for path in sorted((output / "completions").glob("*.parquet")))


def test_a_batch_baseline_trains_on_one_response_per_prompt(tiny_model: Path, tmp_path: Path) -> None:
    rewards = [5.0, 0.0, 1.0, 2.0, 0.5, 3.0, 4.0, 0.5]
    rows = [{"prompt": f"q {n}?", "response": f" {n}", "reward": reward} for n, reward in enumerate(rewards)]
    data, output = write(tmp_path / "rows.jsonl", rows), tmp_path / "run"
    more = ["--per_device_train_batch_size=2", "--gradient_accumulation_steps=2", "--num_train_epochs=1"]
    assert train.main(arguments(tiny_model, data, output, *more)) == 0
    seen = completions(output)
    assert sorted(seen["prompt"]) == [f"q {n}?" for n in range(8)]  # each prompt once in one epoch
    for _, batch in seen.groupby("step"):
        reward = torch.tensor([rewards[int(prompt.split()[1][:-1])] for prompt in batch["prompt"]])
        assert list(batch["recorded_reward"]) == reward.tolist()
        expected = (reward - reward.mean()) / (reward.std() + 1e-4)
        assert list(batch["advantage"]) == pytest.approx(expected.tolist(), abs=1e-4)


def log_probs_of(model, prompt: list[int], ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


@pytest.mark.parametrize("case", only([("group", True)], product(("group", "batch"), (True, False))), ids=str)
def test_loss_and_gradient_equal_the_oracle(case: tuple[str, bool], tiny_model: Path, tmp_path: Path) -> None:
    """The oracle computes loss and gradient from the prompts, responses and rewards of the file."""
    baseline, recorded = case
    torch.manual_seed(0)
    tokenizer, reference = AutoTokenizer.from_pretrained(tiny_model), AutoModelForCausalLM.from_pretrained(tiny_model)
    size = 4 if baseline == "group" else 1
    rewards = [0.5, 3.0, -1.0, 2.0, 0.0, 0.25, 1.0, 4.0]
    rows: list[dict[str, Any]] = []
    for n in range(8 // size):
        responses = [f" it is {n + k}" for k in range(size)]
        row = {"prompt": f"What is {n}?", "responses": responses, "rewards": rewards[n * size : (n + 1) * size]}
        rows.append(row)
        if recorded:
            prompt = tokenizer(row["prompt"])["input_ids"]
            ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in row["responses"]]
            noise = torch.linspace(0.0, 0.6, max(map(len, ids)))
            row["logprobs"] = [(log_probs_of(reference, prompt, one) - noise[: len(one)]).tolist() for one in ids]
    rollout_func = rollout(tmp_path, tokenizer, rows, baseline=baseline)
    objective = oracle.Objective("grpo", beta=0.3, use_bias_correction_kl=False, max_completion_length=16)
    dataset = load(DatasetSpec.parse({"name": "scored", "path": str(tmp_path / "rows.jsonl")}))
    trainer = trainers.make_trainer(
        GRPOTrainer,
        str(tiny_model),
        tmp_path / "run",
        rewards=recorded_reward,
        rows=dataset.select_columns(["prompt"]),
        tokenizer=tokenizer,
        rollout_func=rollout_func,
        per_device_train_batch_size=8,
        num_generations=4 if baseline == "group" else 8,
        max_completion_length=objective.max_completion_length,
        loss_type=objective.loss_type,
        beta=objective.beta,
        use_bias_correction_kl=objective.use_bias_correction_kl,
    )
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}

    trainer.model.zero_grad()
    expected = oracle.advantages([[reward] for reward in rewards], [1.0], 4 if baseline == "group" else 8)
    completions = []
    for place, advantage in enumerate(expected):
        row, member = rows[place // size], place % size
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = [*tokenizer(row["responses"][member])["input_ids"], tokenizer.eos_token_id]
        log_probs, entropies = oracle.token_statistics(trainer.model, prompt, ids, 1.0)
        old = torch.tensor(row["logprobs"][member]) if recorded else None
        anchor = log_probs_of(reference, prompt, ids)
        completions.append(oracle.Completion(prompt, ids, advantage, log_probs, entropies, old=old, reference=anchor))
    tokens = sum(completion.length for completion in completions)
    oracle_loss = oracle.micro_batch_loss(completions, objective, oracle.Geometry(), tokens)
    oracle_loss.backward()
    assert loss.item() == pytest.approx(oracle_loss.item(), abs=1e-5)
    for name, parameter in trainer.model.named_parameters():
        assert torch.allclose(gradient[name], parameter.grad, atol=1e-5, rtol=1e-3), name
    assert max(grad.abs().max() for grad in gradient.values()) > 0.01
