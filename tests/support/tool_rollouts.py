"""Completions that call tools: a tokenizer with Qwen3's template, a policy, tools, and turns that a script writes.

A scripted turn begins with a tag, `[case.member.turn]`. The next turn of a row is found by the last tag of its prompt,
so that one script serves a trainer, several ranks and a stub of a server.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOTrainer as TRLGRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from grpo_recipes import GRPOTrainer
from tests.support import tiny
from tests.support.exact_generation import generate_exactly
from tests.support.trainers import make_trainer, one_batch

END = "<|im_end|>"
GROUP = 4


# Tools


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: Other.
    """
    return a + b


def repeat(text: str, times: int) -> str:
    """Repeat a text.

    Args:
        text: Text.
        times: Number.
    """
    return text * times


def broken(text: str) -> str:
    """Fail.

    Args:
        text: Text.
    """
    raise OSError(f"can't read {text}")


async def fetch(text: str) -> str:
    """Fetch a text.

    Args:
        text: Text.
    """
    await asyncio.sleep(0)
    if text == "lost":
        raise TimeoutError("no answer")
    return text.upper()


TOOLS = [add, repeat, broken, fetch]


def call(name: str, **arguments: Any) -> str:
    """Write a call as the policy does."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD, REPEAT, BROKEN = call("add", a=1, b=2), call("repeat", text="ab ", times=9), call("broken", text="x")
FETCH, LOST = call("fetch", text="w"), call("fetch", text="lost")
UNKNOWN, UNFIT, MALFORMED = call("none", a=1), call("add", a=1, c=2), "<tool_call>\n{'name': add}\n</tool_call>"


# Scripts: the turns of each completion, by case (prompt) and member of its group

Script = list[list[list[str]]]

SCRIPTS: dict[str, Script] = {
    "ragged": [[[], [ADD], [ADD, ADD], [ADD] * 3], [[ADD], [], [REPEAT, ADD], [ADD]]],
    "deep": [[[ADD] * (member + 3) for member in range(GROUP)] for _ in range(2)],
    "none": [[[]] * GROUP] * 2,
    "all": [[[ADD + REPEAT, ADD + ADD], [ADD], [REPEAT], [ADD, ADD]]] * 2,
    "errors": [[[UNKNOWN, ADD], [BROKEN], [BROKEN + ADD, UNKNOWN], [ADD]], [[ADD], [], [BROKEN], [UNKNOWN]]],
    "async": [[[FETCH + ADD + LOST, FETCH], [LOST], [FETCH + FETCH], [ADD]], [[], [FETCH], [ADD + FETCH + ADD], []]],
    "one rank": [[[], [], [], []], [[ADD], [ADD, ADD], [], []]],
}
"""Turns that call tools, before the answer. The last one is for two ranks with one prompt each."""


def turn_text(script: Script, case: int, member: int, turn: int) -> str:
    """Return the text of a turn: its calls, or the answer."""
    turns = script[case % len(script)][member % GROUP]
    tag = f"[{case}.{member}.{turn}]"
    # Answers differ in length, so that rows end at different places.
    return f"{tag}{turns[turn]}{END}" if turn < len(turns) else f"{tag} {'so ' * (member + 1)}{END}"


def next_turns(script: Script, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the next turn of each prompt, as a generator does. A prompt without a case gets the end token."""
    completions, members = [], [0, 0, 0, 0, 0, 0, 0, 0]
    for prompt in prompts:
        text = tokenizer.decode(prompt)
        tags = re.findall(r"\[(\d+)\.(\d+)\.(\d+)\]", text)
        asked = re.findall(r"case (\d+)", text)
        if tags:
            case, member, turn = map(int, tags[-1])
            written = turn_text(script, case, member, turn + 1)
        elif asked:
            case = int(asked[-1])
            written = turn_text(script, case, members[case], 0)
            members[case] += 1
        else:
            written = END
        completions.append(tokenizer(written, add_special_tokens=False)["input_ids"])
    return completions


# Tokenizer, policy, trainer


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer of 500 byte-level tokens with Qwen3's template. Each call above is one further token."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    training = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    schema = '{"type": "function", "function": {"name": "add", "description": "Add", "parameters": {"type": "object", '
    schema += '"properties": {"a": {"type": "integer", "description": "One."}}, "required": ["a"]}}}'
    backend.train_from_iterator([qwen3_chat_template, schema, schema, ADD, FETCH], training)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token="<pad>", padding_side="left")
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.add_tokens([ADD, REPEAT, BROKEN, FETCH, UNKNOWN, UNFIT, MALFORMED])
    tokenizer.chat_template = qwen3_chat_template
    return tokenizer


def tool_policy(tokenizer: PreTrainedTokenizerFast, **config: Any) -> PreTrainedModel:
    """Build a policy over a tokenizer of `tool_tokenizer`."""
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    return tiny.policy(**{**sizes, **ends, **config})


def only_calls(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return `generation_kwargs` under which a policy samples calls, a few words and the end token."""
    sampled = tokenizer("so 12", add_special_tokens=False)["input_ids"]
    sampled += [tokenizer.eos_token_id, *tokenizer.get_added_vocab().values()]
    # TRL answers calls that do not fit otherwise.
    sampled = set(sampled) - set(tokenizer.convert_tokens_to_ids(["<pad>", "<|im_start|>", UNFIT, MALFORMED]))
    return {"suppress_tokens": [token for token in range(len(tokenizer)) if token not in sampled]}


CASES = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"case {n}"}] for n in range(2)]})


def transcript_reward(completions: list[list[dict[str, Any]]], **columns: Any) -> list[float]:
    """Return a function of all messages whose value differs inside a group."""
    return [float(sum(map(ord, str(messages))) % 97) for messages in completions]


def tool_trainer(
    cls: Callable[..., TRLGRPOTrainer], folder: Path | str, script: Script | None = None, **settings: Any
) -> Any:
    """Build a trainer of two prompts per step, whose turns are those of a script, or sampled.

    `trainer.loops` holds the values of each tool loop.
    """
    tokenizer = settings.pop("tokenizer", None) or tool_tokenizer()
    rows = settings.pop("rows", CASES)
    known: dict[str, Any] = {
        "tools": TOOLS,
        "micro_batching": "off",  # else each run chooses a layout first
        "num_generations": GROUP,
        "per_device_train_batch_size": 2 * GROUP,
        "max_completion_length": 400,
        "max_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "adam_epsilon": 0.1,  # small gradients then move a weight in proportion, and rounding stays rounding
        "shuffle_dataset": False,
        **settings,
    }
    if script is None:
        known.setdefault("generation_kwargs", only_calls(tokenizer))
    # Scripted turns do not depend on the policy, so that it may be small.
    policy = tool_policy(tokenizer, **({} if script is None else {"num_hidden_layers": 1, "num_attention_heads": 2}))
    if known.get("beta"):  # TRL loads the reference from the path of the policy
        policy.save_pretrained(Path(folder) / "policy")
        policy.config._name_or_path = str(Path(folder) / "policy")
    made = make_trainer(cls, policy, folder, rewards=transcript_reward, rows=rows, tokenizer=tokenizer, **known)
    made.loops = []
    loop = made._tool_call_loop

    def recorded(*args: Any) -> Any:
        values = loop(*args)
        made.loops.append(json.loads(json.dumps(values)))
        return values

    made._tool_call_loop = recorded
    if script is not None:
        # TRL calls it with further arguments, which a script does not need.
        made._generate_single_turn = lambda prompts, *rest, **more: (next_turns(script, tokenizer, prompts), None)
    elif cls is GRPOTrainer:
        generate_exactly(made)
    return made


def play(made: Any, batches: int = 1, cases: int = 2) -> dict[str, list[float]]:
    """Generate and score batches without a training step, and return the metrics with a value per batch."""
    for _ in range(batches):
        one_batch(made, cases)
    return made._metrics["train"]
