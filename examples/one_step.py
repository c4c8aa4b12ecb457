"""One GRPO step on one page and without a trainer: from a prompt to the update.

    python examples/one_step.py

Read it from top to bottom, in the order of the data. An arrow names the file of grpo_recipes, or the package, that does
the same in a training run. `tests/mathematics/test_one_step.py` shows that the gradient is that of `GRPOTrainer`.

Shapes: P prompts, G completions per prompt, N tokens of a packed row, n completion tokens.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

PROMPTS, GROUP = ["A telephone number: ", "Digits: "], 8


@dataclass
class Completion:
    """A sampled completion: token IDs of its prompt, and its own up to the end token, which is included."""

    prompt: list[int]
    tokens: list[int]
    advantage: float = 0.0


def tiny_policy() -> tuple[Any, PreTrainedTokenizerFast]:
    """Return a Llama of random weights, and a tokenizer whose tokens are single characters."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", *string.printable])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<end>")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(vocabulary), **sizes, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    return LlamaForCausalLM(config), tokenizer


# ---- 1. Sample -> generation/groups.py runs each prompt once, and drops finished rows


@torch.no_grad()
def sample(model: Any, tokenizer: PreTrainedTokenizerFast, prompts: list[str]) -> list[Completion]:
    """Return G completions of each prompt, one group after the other, sampled at temperature 1."""
    completions = []
    for text in prompts:
        prompt = tokenizer(text).input_ids
        ids = torch.tensor([prompt] * GROUP)
        rows = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=12)
        for row in rows[:, len(prompt) :].tolist():
            length = row.index(1) + 1 if 1 in row else len(row)  # 1 is <end>
            completions.append(Completion(prompt, row[:length]))
    return completions


# ---- 2. Reward -> grpo_rewards. A function of this form is a reward here, in grpo-recipes and in TRL


def digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Return the share of digits among the characters of each completion."""
    return [sum(map(str.isdigit, text)) / max(len(text), 1) for text in completions]


# ---- 3. Advantages -> TRL, or training/advantages.py for rules that TRL does not have


def set_advantages(completions: list[Completion], rewards: list[float]) -> None:
    """Set each advantage: the reward's distance from the mean of its group, in standard deviations of the group."""
    groups = torch.tensor(rewards).view(-1, GROUP)  # (P, G)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    for completion, advantage in zip(completions, advantages.flatten().tolist(), strict=True):
        completion.advantage = advantage


# ---- 4. Pack -> training/step_plan.py decides the layout of each micro-batch, training/packing.py packs it


def pack(group: list[Completion]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token IDs (1, N), position IDs (1, N) and attention mask (1, 1, N, N) of a group in one row.

    The row holds the prompt without its last token, and then for each completion a suffix: the last token of the
    prompt and the completion without its last token. So each position of a suffix predicts one completion token.
    """
    prefix, last = group[0].prompt[:-1], group[0].prompt[-1]
    ids, positions, owner = list(prefix), list(range(len(prefix))), [-1] * len(prefix)
    for number, completion in enumerate(group):
        ids += [last, *completion.tokens[:-1]]
        positions += range(len(prefix), len(prefix) + len(completion.tokens))
        owner += [number] * len(completion.tokens)
    # A suffix attends to the prompt and, causally, to itself. The completions of a group do not see each other.
    row = torch.tensor(owner)
    allowed = torch.ones(len(ids), len(ids), dtype=torch.bool).tril() & ((row[:, None] == row) | (row == -1))
    return torch.tensor([ids]), torch.tensor([positions]), allowed[None, None]


# ---- 5. Log-probabilities -> training/log_probs.py, once training/layout_check.py has compared them with TRL's


def log_probs(model: Any, group: list[Completion]) -> Tensor:
    """Return the log-probability of each completion token of a group, one completion after the other, (n,)."""
    ids, positions, allowed = pack(group)
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))
    logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits[0]
    labels = torch.tensor([token for completion in group for token in completion.tokens])
    return logits[-len(labels) :].log_softmax(-1).gather(1, labels[:, None])[:, 0]


# ---- 6. Loss -> TRL, whose loss training/trainer.py never copies


def grpo_loss(model: Any, completions: list[Completion]) -> Tensor:
    """Return DAPO's loss (arXiv 2503.14476, equation 8), the mean over the tokens of all completions."""
    total, tokens = torch.tensor(0.0), 0
    for start in range(0, len(completions), GROUP):
        group = completions[start : start + GROUP]
        policy = log_probs(model, group)
        advantages = torch.tensor([one.advantage for one in group for _ in one.tokens])
        # The policy has just sampled these tokens: the ratio is 1, with the gradient of the log-probability.
        ratio = (policy - policy.detach()).exp()
        total, tokens = total - (ratio * advantages).sum(), tokens + len(policy)
    return total / tokens


# ---- 7. Update -> transformers' Trainer


def step(model: Any, tokenizer: PreTrainedTokenizerFast, optimizer: torch.optim.Optimizer) -> float:
    """Make one GRPO step, and return the mean reward of its completions."""
    completions = sample(model, tokenizer, PROMPTS)
    texts = tokenizer.batch_decode([one.tokens for one in completions], skip_special_tokens=True)
    rewards = digits([], texts)
    set_advantages(completions, rewards)
    optimizer.zero_grad()
    grpo_loss(model, completions).backward()
    optimizer.step()
    return sum(rewards) / len(rewards)


if __name__ == "__main__":
    set_seed(0)
    policy, characters = tiny_policy()
    adam = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for number in range(1, 31):
        print(f"step {number:2}: {step(policy, characters, adam):.0%} of the characters are digits")
