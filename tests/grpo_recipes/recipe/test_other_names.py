"""Keys under other trainers' names: each hint leads to a key, and comes before a name that is only similar."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig, ModelConfig

from grpo_recipes.recipe.other_names import OTHER_NAMES, known_elsewhere
from grpo_recipes.recipe.recipe import OUR_KEYS, RecipeError, parse_recipe
from grpo_recipes.recipe.specs import DatasetSpec, hints

KEYS = {*OUR_KEYS, *hints(ModelConfig), *hints(GRPOConfig)}


@pytest.mark.parametrize("advice", sorted(set(OTHER_NAMES.values())))
def test_every_hint_names_only_keys(advice: str) -> None:
    keys = re.findall(r"`(.+?)`", advice)
    assert keys or advice == "remove it"
    for key in keys:
        first, _, inner = key.partition(":")[0].partition(".")
        assert first in KEYS or key == "kwargs.tags"
        assert first != "dataset" or inner in DatasetSpec.hints()


def test_no_key_of_ours_or_of_trl_is_called_another_trainers() -> None:
    assert KEYS.isdisjoint(OTHER_NAMES)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("max_prompt_length", "dataset.max_prompt_tokens"),
        ("base_model", "model_name_or_path"),
        ("lr", "learning_rate"),
        ("micro_batch_size", "per_device_train_batch_size"),
        ("lora_rank", "lora_r"),
        ("datasets", "dataset.path"),
        ("kl_coef", "beta"),
        ("lora_target_linear", "lora_target_modules: all-linear"),
        ("fast_inference", "use_vllm"),
        ("max_lora_rank", "lora_r"),
        ("loss_agg_mode", "loss_type"),
        ("truncation", "dataset.overlong_prompts"),
        ("peft_config", "use_peft"),
    ],
)
def test_a_key_of_another_trainer_is_translated(tmp_path: Path, name: str, key: str) -> None:
    """In a file and on the command line, with hyphens too."""
    file = tmp_path / "theirs.yaml"
    file.write_text(f"model_name_or_path: m\ndataset: gsm8k\nrewards: [gsm8k_correctness]\n{name}: 1\n")
    with pytest.raises(RecipeError) as refused:
        parse_recipe(["--config", str(file)])
    assert str(refused.value) == f"{file}: unknown key `{name}`: here it is `{key}`"
    for option in (f"--{name}", f"--{name.replace('_', '-')}"):
        with pytest.raises(RecipeError, match=f"here it is `{key}`"):
            parse_recipe(["--config", "quickstart", option, "1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trl: {beta: 0.1}", "unknown key `trl.beta`: here it is `beta`, without `trl`"),
        ("lora: {r: 8}", "unknown key `lora.r`: here it is `lora_r`"),
        (
            "actor_rollout_ref: {rollout: {n: 8}}",
            "unknown key `actor_rollout_ref.rollout.n`: here it is `num_generations`",
        ),
        ("optimizer: {_component_: torch.optim.AdamW}", "unknown key `optimizer._component_`: here it is `optim`"),
        ("trainer: {}", "unknown key `trainer`: remove it"),
        ("dataset: {path: a.csv, answer: gold}", "unknown key `dataset.answer`: here it is `dataset.columns`"),
        ("sampling: {temperature: 0.7}", "unknown key `sampling.temperature`: here it is `temperature`"),
    ],
)
def test_a_nested_key_of_another_trainer_is_translated(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "theirs.yaml"
    ours = {"dataset": "gsm8k", "rewards": ["gsm8k_correctness"], "model_name_or_path": "m"}
    file.write_text(yaml.safe_dump({**ours, **yaml.safe_load(text)}, sort_keys=False))
    with pytest.raises(RecipeError) as refused:
        parse_recipe(["--config", str(file)])
    assert str(refused.value) == f"{file}: {message}"


@pytest.mark.parametrize(
    "name", ["model_type", "save_safetensors", "overwrite_output_dir", "chat_template", "sample_packing"]
)
def test_a_key_without_a_counterpart_is_to_be_removed(name: str) -> None:
    """A key with a similar name, such as `save_steps`, would set something else."""
    with pytest.raises(RecipeError, match=f"unknown argument `--{name}`: remove it"):
        parse_recipe(["--config", "quickstart", f"--{name}", "1"])


def test_a_limit_of_prompt_and_completion_names_both_limits() -> None:
    with pytest.raises(RecipeError, match="`dataset.max_prompt_tokens` limits .*`max_completion_length`"):
        parse_recipe(["--config", "quickstart", "--max_seq_length", "2048"])


def test_a_misspelt_key_is_still_a_question() -> None:
    with pytest.raises(RecipeError, match="did you mean `max_completion_length`"):
        parse_recipe(["--config", "quickstart", "--max_completion_lenght", "1"])


THEIRS = {
    "verl": """
    train_files val_files prompt_key max_prompt_length max_response_length filter_overlong_prompts truncation
    train_batch_size val_batch_size model.path use_kl_loss kl_loss_coef kl_loss_type kl_penalty use_kl_in_reward
    clip_ratio clip_ratio_low clip_ratio_high ppo_mini_batch_size ppo_micro_batch_size_per_gpu micro_batch_size_per_gpu
    ppo_epochs grad_clip loss_agg_mode adv_estimator norm_adv_by_std_in_grpo rollout_n n gpu_memory_utilization
    response_length total_epochs total_training_steps save_freq test_freq val_before_train experiment_name logger
    default_local_dir resume_mode critic_warmup trainer algorithm lr_warmup_steps lr_warmup_steps_ratio min_lr_ratio
    tags
    """,
    "OpenRLHF": """
    pretrain actor_model reward_pretrain prompt_data input_key label_key input_template prompt_max_len generate_max_len
    n_samples_per_prompt micro_train_batch_size micro_rollout_batch_size rollout_batch_size init_kl_coef eps_clip
    eps_clip_high advantage_estimator save_path ckpt_path max_epochs actor_learning_rate use_wandb wandb_run_name
    wandb_project lora_rank target_modules
    """,
    "TRL and transformers": """
    model_name model dataset_name dataset_config dataset_train_split dataset_test_split max_prompt_length reward_funcs
    ref_model torch_dtype attention_implementation evaluation_strategy no_cuda push_to_hub_model_id
    vllm_guided_decoding_regex vllm_device vllm_dtype pretrained_model_name_or_path dataset_config_name train_file
    validation_file max_source_length max_seq_length overwrite_output_dir overwrite_cache preprocessing_num_workers
    jit_mode_eval logging_dir save_safetensors num_return_sequences max_new_tokens warmup_ratio peft_config lora_config
    """,
    "axolotl": """
    base_model model_type tokenizer_type tokenizer_config datasets test_datasets dataset_prepared_path val_set_size
    sequence_len sample_packing eval_sample_packing adapter lora_model_dir lora_target_linear lora_target_modules
    gradient_accumulation_steps micro_batch_size num_epochs optimizer lr_scheduler cosine_min_lr_ratio evals_per_epoch
    saves_per_epoch flash_attention sdp_attention field_messages rl chat_template default_system
    """,
    "LLaMA-Factory and ms-swift": """
    model_path dataset dataset_dir eval_dataset cutoff_len stage template finetuning_type lora_target lora_rank
    quantization_bit flash_attn val_size split_dataset_ratio rlhf_type train_type tuner_type dataset_num_proc system
    truncation_strategy max_length per_gpu_train_batch_size loftq_config
    """,
    "Unsloth and torchtune": """
    max_lora_rank fast_inference use_fast_generation load_in_4bit random_state max_seq_len grpo_samples
    max_generated_tokens output_dir epochs max_steps lr batch_size precision vllm_sampling_params kl_coeff
    samples_per_prompt group_size num_rollouts rollouts_per_example max_completion_tokens clip_grad_norm
    """,
    "PPO of earlier TRL": """
    steps mini_batch_size ppo_epochs num_ppo_epochs init_kl_coef kl_coef cliprange tracker sft_model_path wandb_name
    response_length seq_len reward_model
    """,
    "MiniMind, nanochat, NeMo RL and prime-rl": """
    data_path save_dir save_interval accumulation_steps grad_clip max_seq_len num_samples save_every
    num_prompts_per_step max_input_length global_batch_size sampling.temperature sampling.top_p sampling.top_k
    max_tokens rollouts_per_example
    """,
    "vLLM, DeepSpeed and scripts with Accelerate": """
    stop max_tokens n gradient_clipping scheduler max_train_steps num_warmup_steps train_split test_split eval_split
    eval_batch_size data_files
    """,
    "papers and scripts of one's own": """
    policy_model train_dataset dataset_path data eval_file validation_split max_prompt_len max_prompt_tokens
    system_prompt prompt_template max_output_length mu actor_lr grad_accum grad_accum_steps gradient_accumulation
    lr_schedule optimizer_name num_steps train_steps total_steps max_norm warmup eval_interval resume output output_path
    random_seed
    kl kl_beta beta_kl kl_weight clip_range clip_eps epsilon_low reference_model ref_model_path ref_adapter
    reward_functions reward_func reward_fn stop_strings stop_words stop_sequences vllm use_lora lora peft rank r
    lora_modules qlora use_flash_attention_2 sdpa_attention model_max_length no_kl answer_key dataset.prompt
    dataset.question dataset.answer dataset.solution dataset.problem dataset.target dataset.label dataset.gold
    """,
}


@pytest.mark.parametrize("trainer", THEIRS)
def test_every_key_of_other_trainers_configurations_is_one_of_ours_or_has_advice(trainer: str) -> None:
    """Keys of published configurations and examples of each trainer."""
    keys = KEYS | (DatasetSpec.hints().keys() - OTHER_NAMES.keys())
    assert [name for name in THEIRS[trainer].split() if name not in keys and name not in OTHER_NAMES] == []


def test_every_name_with_advice_is_a_key_of_some_trainer_or_script() -> None:
    assert OTHER_NAMES.keys() - {name for names in THEIRS.values() for name in names.split()} == set()


def test_a_nested_key_of_another_trainer_is_known_by_its_end() -> None:
    assert known_elsewhere("actor_rollout_ref.rollout.n") == ": here it is `num_generations`"
    assert known_elsewhere("--Actor-LR") == ": here it is `learning_rate`"
    assert known_elsewhere("sampling.temperature") == ": here it is `temperature`"
    assert known_elsewhere("actor.nothing") is None
    assert known_elsewhere("nothing") is None
