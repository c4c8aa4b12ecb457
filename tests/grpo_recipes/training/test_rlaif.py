"""MiniMind's RLAIF system: its file format, its two-stage advantage, and its recipe on tiny models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2MoeConfig
from trl import GRPOTrainer

from grpo_recipes import train
from grpo_recipes.checks.checks import Machine, check
from grpo_recipes.data.load import load
from grpo_recipes.data.rendering import limit_prompts
from grpo_recipes.recipe.dataset import SYSTEM_PROMPTS, DatasetSpec
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_rewards.internlm2 import convert
from grpo_rewards.reward_model import RewardModelScore
from tests.support import launching, trainers
from tests.support.errors import refused
from tests.support.tiny import chat_tokenizer, policy, save_internlm2, save_reward_model

RLAIF_FILE = Path(__file__).parents[2] / "data" / "rlaif.jsonl"
SYSTEM = {"role": "system", "content": SYSTEM_PROMPTS["minimind"]}


def spec(path=RLAIF_FILE, **settings):
    return DatasetSpec("rlaif", path=str(path), system_prompt="minimind", **settings)


def write(path, *conversations):
    path.write_text("".join(json.dumps({"conversations": turns}) + "\n" for turns in conversations), encoding="utf-8")
    return path


# Reading the file


def test_prompts_are_the_turns_before_the_one_to_generate():
    dataset = load(spec())
    assert len(dataset) == 8
    assert set(dataset["answer"]) == {""}
    assert dataset["prompt"][0] == [SYSTEM, {"role": "user", "content": "用一句话说明什么是指南针。"}]
    assert dataset["prompt"][2][0] == {"role": "system", "content": "你回答得很简短。"}
    assert [turn["role"] for turn in dataset["prompt"][3]] == ["system", "user", "assistant", "user"]


def test_a_reference_reply_is_kept_as_the_answer_and_a_trailing_one_is_optional(tmp_path):
    user = {"role": "user", "content": "hi"}
    path = write(tmp_path / "x.jsonl", [user, {"role": "assistant", "content": " hello "}], [user])
    dataset = load(spec(path))
    assert dataset["answer"] == ["hello", ""]
    assert dataset["prompt"] == [[SYSTEM, user]] * 2


def test_a_bad_row_a_missing_column_and_a_missing_path_are_named(tmp_path):
    path, user = tmp_path / "bad.jsonl", {"role": "user", "content": "hi"}
    bad = [[], "hi", ["hi"], [{"role": "assistant", "content": "空"}], [{**user, "role": "human"}]]
    bad += [[{**user, "content": " "}, {"role": "assistant", "content": ""}], [{**user, "content": None}]]
    for turns in bad:
        with refused("", "line 1"):
            load(spec(write(path, turns)))
    path.write_text('{"question": "?"}\n')
    with refused("", "line 1", "question", "conversations"):
        load(spec(path))
    with refused("", "dataset.path"):
        DatasetSpec("rlaif")


def test_cutting_a_long_prompt_drops_its_oldest_turns_first(tmp_path):
    tokenizer = chat_tokenizer()
    turns = [{"role": role, "content": text * 20} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    system = {"role": "system", "content": "s"}
    dataset = load(spec(write(tmp_path / "long.jsonl", [system, *turns])))

    def cut(limit):
        limited, touched = limit_prompts(dataset, spec(max_prompt_tokens=limit, overlong_prompts="cut_left"), tokenizer)
        ids = tokenizer.apply_chat_template(limited["prompt"][0], add_generation_prompt=True)["input_ids"]
        assert len(ids) <= limit
        return limited["prompt"][0], touched

    assert cut(1000) == ([system, *turns], 0)
    assert cut(100) == ([system, turns[2]], 1)
    assert cut(40)[0][1]["content"] == "c" * 12


# The two-stage advantage


def two_stage_advantage(rewards, group):
    """Return MiniMind's advantage: z-score in the group, clamped to +-10, then z-score over the batch."""
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    grouped = rewards.view(-1, group)
    mean, std = grouped.mean(1).repeat_interleave(group), grouped.std(1).repeat_interleave(group)
    first = torch.clamp((rewards - mean) / (std + 1e-4), -10, 10)
    return first, (first - first.mean()) / (first.std() + 1e-8)


def one_step(folder, **settings):
    """Return TRL's configuration for one step with 2 prompts and 8 completions of 4 tokens each."""
    sizes = {"per_device_train_batch_size": 16, "num_generations": 8, "max_completion_length": 4, "max_steps": 1}
    return trainers.arguments(folder, **sizes, **settings)


def test_the_two_stage_advantage_is_normalize_then_sum(tmp_path):
    rng = np.random.default_rng(0)
    recorded = []

    def total(completions, **columns):
        recorded.extend(rng.normal(size=len(completions)) * rng.choice([0.1, 3.0]))
        return recorded[-len(completions) :]

    config = one_step(tmp_path / "run", multi_objective_aggregation="normalize_then_sum")
    trainer = GRPOTrainer(str(save_policy(tmp_path / "policy")), total, args=config, train_dataset=load(spec()))
    trainers.one_batch(trainer)
    first, expected = two_stage_advantage(recorded, 8)
    known_factor = (first.std() + 1e-8) / (first.std() + 1e-4)
    assert trainer._logs["advantages"] == pytest.approx((expected * known_factor).tolist(), abs=1e-5)


# Runs of the recipe


def save_policy(folder, mixture_of_experts=False):
    """Save a tiny policy over single bytes."""
    ends = {"vocab_size": 258, "eos_token_id": 257, "pad_token_id": 257}
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    if mixture_of_experts:
        made = policy(Qwen2MoeConfig, **ends, **experts, decoder_sparse_step=1)
    else:
        made = policy(Qwen2Config, **ends)
    made.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """Return the folder of a tiny converted InternLM2 reward model."""
    folder = tmp_path_factory.mktemp("internlm2")
    save_internlm2(folder / "hub", seed=0, heads=4, kv_heads=2, hidden=32, layers=2)
    return convert(folder / "hub", folder / "native")


def arguments(tmp_path, reward_model, *more, mixture_of_experts=False):
    """Return the arguments that override only models, data, device and sizes of the recipe."""
    folder = save_policy(tmp_path / "policy", mixture_of_experts)
    given = ["--config=rlaif-minimind-internlm2", f"--model_name_or_path={folder}", f"--dataset.path={RLAIF_FILE}"]
    given += [f"--rewards.0.rewards.2.kwargs.model={reward_model}", f"--output_dir={tmp_path / 'run'}", "--use_cpu"]
    sizes = ["--bf16=false", "--max_completion_length=12", "--max_steps=5", "--gradient_checkpointing=false"]
    return [*given, *sizes, *more]


def logged(tmp_path):
    """Return the steps that a run logged, and assert that they are five and finite."""
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in history if "loss" in entry]
    assert len(steps) == 5
    assert all(np.isfinite([entry["loss"], entry["reward"], entry["grad_norm"]]).all() for entry in steps)
    return steps


def test_the_recipe_passes_the_checks():
    args = ["--config=rlaif-minimind-internlm2", f"--dataset.path={RLAIF_FILE}"]
    checked = check(parse_recipe(args), Machine(1, bf16=True))
    assert [reward.name for reward in checked.rewards] == ["minimind"]
    assert checked.geometry.prompts_per_generation == 2
    assert len(checked.train_dataset) == 8


@pytest.mark.slow
def test_the_recipe_trains_on_one_process(converted, tmp_path):
    assert train.main(arguments(tmp_path, converted)) == 0
    for entry in logged(tmp_path):
        parts = [entry[f"rewards/minimind/{name}"] for name in ("tag_structure", "tag_count", "reward_model")]
        assert entry["reward"] == pytest.approx(sum(parts), abs=1e-5)
        assert abs(entry["rewards/minimind/reward_model"]) <= 3
        assert entry["rewards/reward_model/unscored_rows"] == 0
    rates = [entry["learning_rate"] for entry in logged(tmp_path)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == pytest.approx(8e-8)


@pytest.mark.slow
def test_the_recipe_keeps_a_routers_loss(converted, tmp_path):
    assert train.main(arguments(tmp_path, converted, mixture_of_experts=True)) == 0
    assert all(entry["aux_loss"] > 0 for entry in logged(tmp_path))


def test_trl_scores_a_converted_reward_model_the_same(converted, tmp_path):
    rewards = [str(converted), RewardModelScore(converted, clamp=None, answer_tag=None)]
    folder = save_policy(tmp_path / "policy")
    trainer = GRPOTrainer(str(folder), rewards, args=one_step(tmp_path / "run"), train_dataset=load(spec()))
    trainers.one_batch(trainer)
    theirs, ours = trainer._logs["rewards"].values()
    assert len(ours) == 16
    assert list(ours) == pytest.approx(list(theirs), abs=2e-5)


def test_a_reward_model_that_can_not_be_loaded_stops_the_run_first(tmp_path, capsys):
    folder = save_reward_model(tmp_path / "reward", template=None)
    assert train.main(arguments(tmp_path, folder)) == 2
    said = capsys.readouterr().err
    assert "rlaif-minimind-internlm2.yaml" in said
    assert "`rewards`" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp_cpu", "zero3_cpu"])
def test_the_recipe_trains_on_two_processes(layout, converted, tmp_path, extensions):
    if layout == "zero3_cpu":
        pytest.importorskip("deepspeed")
    args = arguments(tmp_path, converted)
    said = launching.launch_module(layout, "grpo_recipes.train", *args, TORCH_EXTENSIONS_DIR=extensions)
    assert said.count("reward model ") == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["world_size"] == 2
    assert all(abs(entry["rewards/minimind/reward_model"]) <= 3 for entry in logged(tmp_path))
