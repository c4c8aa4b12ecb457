"""The trainer of a run: its policy, its arguments and its callbacks."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from transformers import EarlyStoppingCallback
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from trl import GRPOConfig, get_peft_config, get_quantization_config

from grpo_recipes.checks.checks import optimizer_name
from grpo_recipes.checks.rewards import checked_reward
from grpo_recipes.recipe.recipe import Recipe, model_config, resolved
from grpo_recipes.recipe.trl_keys import ADAMW_BF16
from grpo_recipes.reports.model_card import write_model_card
from grpo_recipes.run.endings import attempt
from grpo_recipes.run.inputs import Inputs
from grpo_recipes.run.live_line import LiveLine, LiveLog
from grpo_recipes.run.prepare import Prepared
from grpo_recipes.runs.files import LIVE
from grpo_recipes.runs.weights import adapter_config
from grpo_recipes.training.adamw_bf16 import adamw_bf16
from grpo_recipes.training.adapters import load_adapter
from grpo_recipes.training.callbacks import RecipeInTrackers
from grpo_recipes.training.data_order import ContinueSchedule
from grpo_recipes.training.trainer import GRPOTrainer
from grpo_rewards.errors import UserError
from grpo_rewards.redaction import redacted


def build_trainer(prepared: Prepared) -> GRPOTrainer:
    """Load the policy and its reference, and return the trainer of the run, with its callbacks and our model card."""
    recipe, training_args = prepared.recipe, prepared.training_args
    trainer = bare_trainer(prepared, training_args)
    trainer.checkpoints.decision, trainer.checkpoints.held = prepared.point, prepared.held
    trainer.checkpoints.identify = lambda: prepared.identity

    def create_model_card(**ignored: Any) -> None:
        if trainer.accelerator.is_main_process:
            attempt(recipe, "its model card was not written", write_model_card, recipe.output_dir)

    # TRL calls it with each checkpoint, and before it pushes. The class keeps TRL's, for scripts.
    trainer.create_model_card = create_model_card  # type: ignore[method-assign, assignment]
    if prepared.checkpoint is not None:
        trainer.add_callback(ContinueSchedule())
    trainer.add_callback(prepared.interruption)
    trainer.add_callback(LiveLog(recipe.output_dir / LIVE))
    if not training_args.disable_tqdm:
        # The bar for notebooks in transformers 5.23 raises when a run ends after its first step.
        trainer.remove_callback(DEFAULT_PROGRESS_CALLBACK)
        trainer.add_callback(LiveLine([reward.name for reward in prepared.checked.all_rewards]))
    if recipe.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(recipe.early_stopping_patience))
    if training_args.report_to:
        trainer.add_callback(RecipeInTrackers(redacted(resolved(recipe.as_dict())), trainer.callback_handler))
    return trainer


def bare_trainer(inputs: Inputs, training_args: GRPOConfig) -> GRPOTrainer:
    """Load the policy and its reference, and return a trainer without the callbacks and the checkpoint of a run."""
    recipe, checked, rollout = inputs.recipe, inputs.checked, inputs.rollout
    training_args.reward_weights = [reward.weight for reward in checked.rewards]
    model_args, toolset = model_config(recipe), checked.toolset
    has_own_optimizer = optimizer_name(recipe, inputs.machine) == ADAMW_BF16
    trainer = GRPOTrainer(
        model=load_policy(recipe, training_args),
        reward_funcs=[checked_reward(reward.function) for reward in checked.rewards],
        args=training_args,
        train_dataset=checked.train_dataset.select_columns(["prompt"]) if rollout else checked.train_dataset,
        eval_dataset=checked.eval_dataset,
        processing_class=inputs.tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
        rollout_func=rollout,
        tools=toolset.functions if toolset is not None else None,
        environment_factory=toolset.factory if toolset is not None else None,
        tool_limits=recipe.tool_limits,
        kl_estimator=recipe.kl_estimator,
        micro_batching=recipe.micro_batching,
        generation=recipe.generation,
        sampling=recipe.sampling,
        advantages=recipe.advantages,
        generation_check=recipe.generation_check,
        reference=recipe.reference,
        optimizer_cls_and_kwargs=adamw_bf16(training_args) if has_own_optimizer else None,
    )
    # TRL adds the rewards of environments to those of the recipe.
    for place in range(len(checked.rewards), len(trainer.reward_funcs)):
        reward: Any = trainer.reward_funcs[place]
        reward.__name__ = trainer.reward_func_names[place]
        trainer.reward_funcs[place] = checked_reward(reward)
    return trainer


def load_policy(recipe: Recipe, training_args: GRPOConfig) -> str | PeftModel:
    """Return TRL's `model` argument: the name of a model, or a trainable adapter on its base.

    Raises:
        UserError: the base of the adapter can't be loaded, or the recipe asks for a new adapter on top.
    """
    name, model_args = recipe.model["model_name_or_path"], model_config(recipe)
    if (config := adapter_config(name, model_args.model_revision)) is None:
        return name
    if model_args.use_peft:
        raise UserError("`use_peft`", "it asks for a new adapter, and `model_name_or_path` is one", "remove it")
    init = {}
    if (quantization := get_quantization_config(model_args)) is not None:
        init["quantization_config"] = quantization
    return load_adapter(name, config, training_args, "model_name_or_path", revision=model_args.model_revision, **init)
