"""A policy that has learnt one transcript per question by heart: how often it calls `add` depends on the question.

Row n asks "What is n + n?". Each call adds 10 to the number so far, and the last turn names the last result, so that a
turn that follows the result of another row is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from grpo_recipes.evaluation.tools import TurnFormat, tools_of
from grpo_recipes.tools.loop import tool_message
from tests.support.tool_rollouts import END, call, tool_policy, tool_tokenizer

TOOLS = {"tools": ["tests.support.tool_rollouts.add"], "max_tool_calling_iterations": 3}
CALLS = [1, 1, 1, 0, 0, 0, 2, 1]
"""Number of calls of each row. A step of two ranks has two rows of each. In the first step both rows of rank 0 and one
of rank 1 call, in the second both rows of rank 1 and none of rank 0."""

ENOUGH = 1e-2
"""Mean loss at which greedy decoding writes every token that was taught, with a margin far above rounding."""


def question(number: int) -> str:
    """Return the question of a row."""
    return f"What is {number} + {number}?"


def transcripts() -> list[list[str]]:
    """Return the texts of each row's completion: calls and their results in turn, and the answer."""
    found = []
    for row, calls in enumerate(CALLS):
        texts = []
        for number in range(row, row + 10 * calls, 10):
            texts += [call("add", a=number, b=10), str(number + 10)]
        found.append([*texts, f"so {row + 10 * calls}"])
    return found


def save_taught_policy(folder: Path) -> Path:
    """Save a policy that writes `transcripts` by greedy decoding, and its tokenizer."""
    tokenizer = tool_tokenizer()
    # Heads of 32 are the smallest that vLLM has on a CPU, and its server there does not update tied embeddings.
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "initializer_range": 0.05, "tie_word_embeddings": False}
    policy = tool_policy(tokenizer, **sizes)
    examples = [tokenized(number, texts, tokenizer) for number, texts in enumerate(transcripts())]
    padded = torch.nn.utils.rnn.pad_sequence
    ids = padded([ids for ids, _ in examples], batch_first=True, padding_value=tokenizer.pad_token_id)
    is_taught = padded([taught for _, taught in examples], batch_first=True)[:, 1:]
    # The description of the tool, most of each prompt, runs once for all rows.
    shared = int((ids != ids[:1]).any(0).nonzero()[0])
    is_taught, targets = is_taught[:, shared:], ids[:, 1 + shared :]
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(400):
        cache = DynamicCache(config=policy.config)
        policy.model(input_ids=ids[:1, :shared], past_key_values=cache)
        cache.batch_repeat_interleave(len(ids))
        states = policy.model(input_ids=ids[:, shared:-1], past_key_values=cache).last_hidden_state
        loss = cross_entropy(policy.lm_head(states[is_taught]), targets[is_taught])
        if loss < ENOUGH:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < ENOUGH
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tokenized(number: int, texts: list[str], tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens (T,) of a row's prompt and completion, and the mask (T,) of those that the policy writes."""
    tools = tools_of(TOOLS, is_trusted=True)
    assert tools is not None
    form = TurnFormat(tools, "taught", tokenizer)
    ids = form.prompt_ids([{"role": "user", "content": question(number)}])
    taught = [False] * len(ids)
    for position, text in enumerate(texts):
        is_turn = position % 2 == 0
        if is_turn:
            more = tokenizer(text + END, add_special_tokens=False)["input_ids"]
        else:
            more = form.render([tool_message("add", text)])
        ids = ids + more
        taught += [is_turn] * len(more)
    return torch.tensor(ids), torch.tensor(taught)
