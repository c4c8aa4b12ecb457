"""Watch GRPO raise a tiny model's accuracy, on a CPU and without a network.

    python -m grpo_recipes.quickstart [--seed 0] [--output_dir runs/quickstart]

A policy of 0.4 million parameters first learns from worked solutions, some of which use the tags that the prompt asks
for. It is evaluated on held-out problems with `grpo-recipes evaluate`, trained with `recipes/quickstart.yaml` through
`grpo_recipes.train` like any other model, and evaluated again. `evaluation.json` in the output folder compares both
results, and the run's own folder holds every completion.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.process.signals import INTERRUPTED, leave_on_interrupt, raise_on_interrupt
from grpo_rewards.startup import prepare_libraries

if __name__ == "__main__":  # before the imports that take seconds
    leave_on_interrupt()
    prepare_libraries()

from datasets import Dataset, disable_progress_bars
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from grpo_recipes import cli
from grpo_recipes.data.arithmetic import made_problems
from grpo_recipes.data.load import load
from grpo_recipes.data.presets import final_answer
from grpo_recipes.evaluation.summary import compare, describe_comparison
from grpo_recipes.process.messages import fewer_library_messages
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.recipe.recipe import Recipe, parse_recipe, shipped
from grpo_recipes.run import train
from grpo_recipes.runs.files import AFTER, BEFORE, EVALUATIONS, write_atomically
from grpo_rewards.files import give_default_mode
from grpo_rewards.terminal import lasting_output, say, show

HELD_OUT_PROBLEMS = 400
EVALUATION_BATCH_SIZE = 200
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen's chat format, without its default system prompt and tools."""

LAYOUTS = {
    "tags": "<think>{steps}</think>\n<answer>{number}</answer>",
    "sentence": "{steps}\nThe answer is {number}.",
    "steps": "{steps}",
}
"""Layouts of demonstrations: the rewarded format, the answer in a sentence, or no stated answer."""


@dataclass(frozen=True)
class WarmStart:
    """Settings of the tiny policy and of its supervised fine-tuning."""

    seed: int = 0
    demonstrations: int = 20_000
    shares: tuple[float, float, float] = (0.4, 0.3, 0.3)
    """Share of the demonstrations in each of `LAYOUTS`."""
    vocab_size: int = 512
    hidden_size: int = 96
    num_layers: int = 3
    batch_size: int = 16
    learning_rate: float = 3e-3


@fewer_library_messages()
def main(args: Sequence[str] | None = None) -> int:
    """Run the quickstart.

    Returns:
        0, the exit code of a training that could not run, or 130 after Ctrl-C.
    """
    with lasting_output():
        try:
            return _main(_parse_arguments(args))
        except KeyboardInterrupt:
            # Training and evaluation handle Ctrl-C themselves, so this one came before or between them.
            say("stopped by Ctrl-C: the same command starts again", to_stderr=True)
            return INTERRUPTED


def _main(options: argparse.Namespace) -> int:
    started = time.monotonic()
    output_dir: Path = options.output_dir
    settings = WarmStart(seed=options.seed)
    policy_dir, run_dir = output_dir / f"policy-seed{settings.seed}", output_dir / f"grpo-seed{settings.seed}"
    arguments = ["--config", str(shipped("recipes", "quickstart")), "--seed", str(settings.seed)]
    arguments += ["--model_name_or_path", str(policy_dir), "--output_dir", str(run_dir)]
    recipe = parse_recipe(arguments)

    with _phase(f"1. Warm start: {settings.demonstrations:,} worked solutions, {settings.shares[0]:.0%} with the tags"):
        warm_start(settings, recipe.dataset, policy_dir)
    if run_dir.is_dir():
        say(f"\nreplacing the earlier run in {run_dir}")
        shutil.rmtree(run_dir)
    with _phase(f"2. Accuracy on {HELD_OUT_PROBLEMS} held-out problems, before GRPO"):
        evaluate(policy_dir, run_dir / EVALUATIONS / BEFORE, recipe)
    with _phase(f"3. GRPO: python -m grpo_recipes.train {' '.join(arguments)}"):
        status = train.main(arguments)
    if status != 0:
        return status
    with _phase(f"4. Accuracy on {HELD_OUT_PROBLEMS} held-out problems, after GRPO"):
        evaluate(run_dir, run_dir / EVALUATIONS / AFTER, recipe)

    result = compare(run_dir / EVALUATIONS / BEFORE, run_dir / EVALUATIONS / AFTER)
    seconds = round(time.monotonic() - started, 1)
    file = output_dir / "evaluation.json"
    write_atomically(file, json.dumps({**result, "seconds": seconds}, indent=2) + "\n")
    say("\nA is the policy before GRPO, and B the policy after it. Strict: right and in the requested format.")
    # Each evaluation has shown its rewards, and the file holds their comparison too.
    show(*describe_comparison({key: result[key] for key in ("problems", "warnings", "strict", "lenient")}))
    say(f"{seconds:.0f} s in all; these numbers are in {file}")
    say("\nA report on the run, its diagnosis, and the plan for a real model:")
    say(f"grpo-recipes report {run_dir}\ngrpo-recipes diagnose {run_dir}")
    say("grpo-recipes plan gsm8k-qwen2.5-1.5b-lora --accelerate_config single_gpu --gpu_memory 24GB")
    return 0


def warm_start(settings: WarmStart, prompts: DatasetSpec, folder: Path) -> None:
    """Fine-tune a new policy and save it in `folder`, which replaces an earlier one.

    Args:
        settings: settings of the policy.
        prompts: dataset whose prompts the demonstrations use.
        folder: folder for the policy.
    """
    conversations = demonstrations(settings, prompts)
    set_seed(settings.seed)
    tokenizer = build_tokenizer(conversations, settings.vocab_size)
    policy = build_policy(tokenizer, settings)
    say(f"a Qwen2 of {policy.num_parameters():,} parameters, {len(tokenizer)} tokens")
    shutil.rmtree(folder, ignore_errors=True)
    fine_tune(policy, tokenizer, conversations, settings, folder)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    give_default_mode(folder)


def demonstrations(settings: WarmStart, prompts: DatasetSpec) -> list[dict[str, list[dict[str, str]]]]:
    """Return conversations for supervised fine-tuning, each with a `prompt` and a `completion`.

    The problems are training problems, phrased as in the dataset `prompts`. Every completion is a correct solution. Its
    layout is drawn from `LAYOUTS`, of which GRPO rewards only the first.
    """
    spec = replace(prompts, split="train", size=settings.demonstrations, seed=settings.seed)
    problems = made_problems("arithmetic", "train", settings.demonstrations, settings.seed)
    layouts = random.Random(settings.seed).choices(list(LAYOUTS), settings.shares, k=settings.demonstrations)
    conversations = []
    for prompt, problem, layout in zip(load(spec)["prompt"], problems, layouts, strict=True):
        steps, number = problem["answer"].rpartition("\n")[0], final_answer(problem["answer"])
        solution = LAYOUTS[layout].format(steps=steps, number=number)
        conversations.append({"prompt": prompt, "completion": [{"role": "assistant", "content": solution}]})
    return conversations


def build_tokenizer(conversations: Sequence[dict[str, Any]], vocab_size: int) -> Qwen2Tokenizer:
    """Return a Qwen2 tokenizer whose merges are learned from conversations.

    It keeps Qwen2's own pre-tokenizer, because transformers 5 rebuilds a `qwen2` tokenizer from its class when it loads
    one, and would silently drop any other pre-tokenizer.
    """
    texts = []
    for conversation in conversations[:2_000]:
        for message in conversation["prompt"] + conversation["completion"]:
            texts.append(f"{message['role']}\n{message['content']}")
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts, vocab_size=vocab_size, new_special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False
    )
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_policy(tokenizer: Qwen2Tokenizer, settings: WarmStart) -> Qwen2ForCausalLM:
    """Return a Qwen2 model of less than a million parameters with random weights."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=256,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        # About 1 / sqrt(hidden_size). With the usual 0.02, which suits wide models, training takes three times the
        # steps.
        initializer_range=0.12,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


class QuietTrainer(SFTTrainer):
    """Trainer of the warm start, whose loss and speed tell a newcomer nothing."""

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Skip the line of metrics at the end."""


def fine_tune(
    policy: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    conversations: list[dict[str, Any]],
    settings: WarmStart,
    folder: Path,
) -> None:
    """Fine-tune a policy in place with TRL's `SFTTrainer`, for one epoch, with the loss on completions only."""
    config = SFTConfig(
        output_dir=str(folder),
        num_train_epochs=1,
        per_device_train_batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        adam_beta2=0.98,
        weight_decay=0.01,
        max_length=None,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        seed=settings.seed,
    )
    disable_progress_bars()  # tokenization would draw four bars in eight seconds
    trainer = QuietTrainer(policy, config, train_dataset=Dataset.from_list(conversations), processing_class=tokenizer)
    trainer.train()


def evaluate(model: Path, output: Path, recipe: Recipe) -> None:
    """Run `grpo-recipes evaluate` on held-out problems, with the recipe's sampling."""
    arguments = ["evaluate", str(model), "--recipe", "quickstart", "--limit", str(HELD_OUT_PROBLEMS)]
    arguments += ["--temperature", str(recipe.config.temperature)]
    arguments += ["--batch_size", str(EVALUATION_BATCH_SIZE), "--output", str(output)]
    say(f"grpo-recipes {' '.join(arguments)}")
    if status := cli.main(arguments):
        raise SystemExit(status)


@contextmanager
def _phase(title: str) -> Iterator[None]:
    say(f"\n{title}")
    started = time.monotonic()
    yield
    if (seconds := time.monotonic() - started) >= 10:
        say(f"({seconds:.0f} s)")


def _parse_arguments(args: Sequence[str] | None) -> argparse.Namespace:
    purpose = "Watch GRPO raise a tiny model's accuracy on a CPU."
    parser = argparse.ArgumentParser(prog="python -m grpo_recipes.quickstart", description=purpose)
    seed = "random seed of the weights, the demonstrations and GRPO (default: 0)"
    parser.add_argument("--seed", type=int, default=0, help=seed)
    default = Path("runs/quickstart")
    parser.add_argument("--output_dir", type=Path, default=default, help=f"folder for all files (default: {default})")
    return parser.parse_args(args)


if __name__ == "__main__":
    raise_on_interrupt()
    sys.exit(main())
