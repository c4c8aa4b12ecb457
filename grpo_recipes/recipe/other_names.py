"""Keys under the names that earlier versions of TRL and other trainers give them, for the hint of an unknown key.

A similar name may be another key: `max_prompt_length` is nearest to `max_completion_length`, which sets another limit.
"""

from __future__ import annotations

from collections.abc import Mapping

# Our key, and its names in TRL and transformers (earlier versions, scripts), axolotl, LLaMA-Factory, OpenRLHF, Unsloth,
# verl, ms-swift and torchtune. A key with a value is what the name means in full. A name with a dot is a nested key.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "model_name_or_path": (
        *("base_model", "model_name", "model_path", "pretrain", "actor_model", "policy_model"),
        *("pretrained_model_name_or_path", "sft_model_path", "model", "model.path", "lora_model_dir"),
    ),
    "dataset.path": (
        *("datasets", "dataset_name", "dataset_dir", "dataset_path", "train_dataset", "train_file", "train_files"),
        *("prompt_data", "data_path", "data_files", "data"),
    ),
    "dataset.config": ("dataset_config", "dataset_config_name"),
    "dataset.split": ("dataset_train_split", "train_split"),
    "dataset.eval_split": ("dataset_test_split", "test_split", "eval_split"),
    "dataset.eval_path": ("eval_dataset", "test_datasets", "eval_file", "val_files", "validation_file"),
    "dataset.eval_share": ("val_set_size", "val_size", "validation_split", "split_dataset_ratio"),
    "dataset.max_prompt_tokens": (
        *("max_prompt_length", "prompt_max_len", "max_prompt_len", "max_prompt_tokens"),
        *("max_source_length", "max_input_length"),
    ),
    "dataset.overlong_prompts": ("filter_overlong_prompts", "truncation", "truncation_strategy"),
    "dataset.columns": (
        *("input_key", "label_key", "prompt_key", "answer_key", "field_messages", "dataset.prompt", "dataset.question"),
        *("dataset.answer", "dataset.solution", "dataset.problem", "dataset.target", "dataset.label", "dataset.gold"),
    ),
    "dataset.system_prompt": ("system_prompt", "default_system", "system"),
    "dataset.prompt_template": ("prompt_template", "input_template"),
    "max_completion_length": (
        *("max_new_tokens", "generate_max_len", "max_response_length", "max_output_length", "max_tokens"),
        *("max_generated_tokens", "response_length", "max_completion_tokens"),
    ),
    "num_generations": (
        *("n_samples_per_prompt", "group_size", "num_return_sequences", "samples_per_prompt", "grpo_samples"),
        *("num_samples", "rollout_n", "num_rollouts", "n", "rollouts_per_example"),
    ),
    "per_device_train_batch_size": (
        *("micro_batch_size", "batch_size", "micro_train_batch_size", "mini_batch_size", "per_gpu_train_batch_size"),
        *("micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu"),
    ),
    "per_device_eval_batch_size": ("eval_batch_size", "val_batch_size"),
    "num_iterations": ("ppo_epochs", "num_ppo_epochs", "mu"),
    "gradient_accumulation_steps": ("grad_accum", "grad_accum_steps", "gradient_accumulation", "accumulation_steps"),
    "learning_rate": ("lr", "actor_learning_rate", "actor_lr"),
    "lr_scheduler_type": ("lr_scheduler", "scheduler", "lr_schedule"),
    "optim": ("optimizer", "optimizer_name"),
    "num_train_epochs": ("epochs", "num_epochs", "max_epochs", "total_epochs"),
    "max_steps": ("steps", "num_steps", "train_steps", "total_steps", "total_training_steps", "max_train_steps"),
    "max_grad_norm": ("grad_clip", "gradient_clipping", "clip_grad_norm", "max_norm"),
    "warmup_steps": ("warmup", "num_warmup_steps", "lr_warmup_steps", "warmup_ratio", "lr_warmup_steps_ratio"),
    "lr_scheduler_kwargs": ("cosine_min_lr_ratio", "min_lr_ratio"),
    "eval_strategy": ("evaluation_strategy",),
    "eval_steps": ("eval_interval", "test_freq"),
    "eval_on_start": ("val_before_train",),
    "save_steps": ("save_interval", "save_freq", "save_every"),
    "resume_from_checkpoint": ("resume_mode", "resume"),
    "output_dir": ("output", "output_path", "save_path", "save_dir", "ckpt_path", "default_local_dir"),
    "run_name": ("experiment_name", "wandb_name", "wandb_run_name"),
    "hub_model_id": ("push_to_hub_model_id",),
    "seed": ("random_state", "random_seed"),
    "use_cpu": ("no_cuda",),
    "report_to": ("logger", "use_wandb", "wandb_project", "tracker"),
    "beta": ("kl_coef", "kl_coeff", "init_kl_coef", "kl_loss_coef", "kl_beta", "kl_weight", "beta_kl", "kl"),
    "kl_estimator": ("kl_loss_type", "kl_penalty"),
    "loss_type": ("loss_agg_mode",),
    "scale_rewards": ("norm_adv_by_std_in_grpo",),
    "epsilon": ("clip_ratio", "clip_range", "cliprange", "eps_clip", "clip_eps", "clip_ratio_low", "epsilon_low"),
    "epsilon_high": ("clip_ratio_high", "eps_clip_high"),
    "reference": ("ref_model", "reference_model", "ref_model_path", "ref_adapter"),
    "rewards": ("reward_funcs", "reward_functions", "reward_func", "reward_fn", "reward_model", "reward_pretrain"),
    "generation_kwargs.stop": ("stop", "stop_strings", "stop_words", "stop_sequences"),
    "temperature": ("sampling.temperature",),
    "top_p": ("sampling.top_p",),
    "top_k": ("sampling.top_k",),
    "use_vllm": ("vllm", "use_fast_generation", "fast_inference"),
    "vllm_gpu_memory_utilization": ("gpu_memory_utilization",),
    "vllm_structured_outputs_regex": ("vllm_guided_decoding_regex",),
    "use_peft": (
        *("use_lora", "lora", "peft", "adapter", "finetuning_type", "peft_config", "lora_config", "train_type"),
        *("tuner_type",),
    ),
    "lora_r": ("lora_rank", "rank", "max_lora_rank", "r"),
    "lora_target_modules": ("lora_target", "target_modules", "lora_modules"),
    "lora_target_modules: all-linear": ("lora_target_linear",),
    "load_in_4bit": ("quantization_bit", "qlora"),
    "dtype": ("torch_dtype", "precision"),
    "attn_implementation": ("attention_implementation",),
    "attn_implementation: flash_attention_2": ("flash_attn", "flash_attention", "use_flash_attention_2"),
    "attn_implementation: sdpa": ("sdp_attention", "sdpa_attention"),
}

# Advice on names that no key translates: another unit, or several keys.
_ADVICE: Mapping[str, tuple[str, ...]] = {
    "here `dataset.max_prompt_tokens` limits a prompt, and `max_completion_length` a completion": (
        *("max_seq_length", "max_seq_len", "sequence_len", "max_length", "cutoff_len", "model_max_length", "seq_len"),
    ),
    "here `per_device_train_batch_size` is set per process, and `generation_batch_size` in completions, not prompts": (
        *("train_batch_size", "global_batch_size", "ppo_mini_batch_size", "rollout_batch_size", "num_prompts_per_step"),
        *("micro_rollout_batch_size",),
    ),
    "here `eval_steps` is the number of steps between two evaluations": ("evals_per_epoch",),
    "here `save_steps` is the number of steps between two checkpoints": ("saves_per_epoch",),
    "here `beta` above 0 adds the KL term": ("use_kl_loss", "use_kl_in_reward", "no_kl"),
    "here `loss_type`, `scale_rewards` and `advantages` set it": ("adv_estimator", "advantage_estimator"),
    "write `kwargs.tags` in an entry of `rewards`": ("tags",),
}

# Names that nothing here corresponds to. Keys with a similar name are something else.
_WITHOUT_KEY = (
    *("model_type", "tokenizer_type", "tokenizer_config", "chat_template", "dataset_prepared_path", "dataset_num_proc"),
    *("preprocessing_num_workers", "overwrite_output_dir", "overwrite_cache", "save_safetensors", "logging_dir"),
    *("sample_packing", "eval_sample_packing", "loftq_config", "vllm_device", "vllm_dtype", "vllm_sampling_params"),
    *("jit_mode_eval", "stage", "template", "rl", "rlhf_type", "critic_warmup", "trainer", "algorithm"),
)


def _hints() -> dict[str, str]:
    hints = {}
    for key, others in _NAMES.items():
        hints.update(dict.fromkeys(others, f"here it is `{key}`"))
    for advice, others in _ADVICE.items():
        hints.update(dict.fromkeys(others, advice))
    return {**hints, **dict.fromkeys(_WITHOUT_KEY, "remove it")}


OTHER_NAMES: Mapping[str, str] = _hints()
"""Advice on a key by its name elsewhere."""


def known_elsewhere(word: str) -> str | None:
    """Return the end of an error message if `word` is another trainer's name of a key, or None.

    Of a nested key, such as verl's `actor_rollout_ref.rollout.n`, the end decides.
    """
    name = word.lstrip("-").replace("-", "_").lower()
    while name not in OTHER_NAMES:
        _, dot, name = name.partition(".")
        if not dot:
            return None
    return f": {OTHER_NAMES[name]}"
