"""Generation of multi-turn tool calls by stock TRL and ours in one run: tokens through the model, and CPU time.

    python benchmarks/tool_turns.py                              # 4 and 8 turns, prompts of 600 characters: minutes
    python benchmarks/tool_turns.py --turns 4 --characters 200 600 1800

A policy that is not trained for it calls no tool. Here a logits processor makes each turn end with a call: the policy
samples 8 to 40 letters, then the call is forced. From halfway on, a quarter of the rows calls nothing at each turn, and
ends. All tokens are bytes. The contestants take turns, with the same random numbers, and must generate the same tokens.
"Tokens through the model" are those of every forward, padding included.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import string
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config
from transformers.generation import LogitsProcessorList
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer
from trl.chat_template_utils import qwen3_template

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation.groups import Turn

PROMPTS, GROUP = 4, 4
SIZES = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
IM_START, IM_END = len(BYTES), len(BYTES) + 1
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>{"name": "look_up", "arguments": {"page": %d}}</tool_call>'


def look_up(page: int) -> str:
    """Return the text of a page.

    Args:
        page: number of the page
    """
    return " ".join(str(page * number % 89) for number in range(8 + page % 12))


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with a chat template for tools."""
    names = [*BYTES, "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    made = PreTrainedTokenizerFast(tokenizer_object=backend, padding_side="left", **special)
    made.chat_template, made.response_template = TEMPLATE, qwen3_template
    return made


def policy(**sizes: int) -> PreTrainedModel:
    """Return a Qwen2 over the bytes, always the same."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(BYTES) + 2,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        pad_token_id=IM_END,
        eos_token_id=IM_END,
        bos_token_id=None,
        **{**SIZES, **sizes},
    )
    return AutoModelForCausalLM.from_config(config)


class Script(LogitsProcessor):
    """Processor of one turn: letters are sampled, then the row's call and its end are forced.

    Args:
        turn: number of the turn.
        turns: number of turns that call a tool.
        tokenizer: tokenizer of the calls.
        rows: number of completions.
    """

    def __init__(self, turn: int, turns: int, tokenizer: PreTrainedTokenizerFast, rows: int) -> None:
        self.turn, self.turns, self.tokenizer = turn, turns, tokenizer
        self.endings = [self.ending(row) for row in range(rows)]
        self.letters = torch.tensor(tokenizer.convert_tokens_to_ids(list(string.ascii_lowercase)))
        self.width = 0
        """Number of columns of the prompts, known from the first call on."""

    def ending(self, row: int) -> list[int]:
        """Return the tokens that end a row's turn."""
        leaves = self.turn == self.turns or (2 * self.turn >= self.turns and (row + self.turn) % 4 == 0)
        call = "" if leaves else CALL % (17 * row + self.turn)
        return [*self.tokenizer(call, add_special_tokens=False)["input_ids"], IM_END]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores of the letters, or of the forced token alone."""
        self.width = self.width or input_ids.shape[1]
        allowed = torch.full_like(scores, -torch.inf)
        for row in range(len(scores)):
            place = input_ids.shape[1] - self.width - (8 + (11 * row + 7 * self.turn) % 33)
            ending = self.endings[row]
            if place < 0:
                allowed[row, self.letters] = 0.0
            else:
                allowed[row, ending[min(place, len(ending) - 1)]] = 0.0
        return scores + allowed


class Contestant:
    """Trainer whose policy follows the script, and the measurements of its generation batches and steps."""

    def __init__(
        self,
        cls: type[TRLGRPOTrainer],
        turns: int,
        folder: str,
        sampled: bool = True,
        prompts: int = PROMPTS,
        group: int = GROUP,
        micro_batches: int = 1,
        **more: Any,
    ) -> None:
        self.turns, self.tokenizer, self.model = turns, tokenizer(), policy(**more.pop("sizes", {}))
        self.prompts, self.group, self.micro_batches = prompts, group, micro_batches
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            gradient_checkpointing=False,
            num_generations=group,
            per_device_train_batch_size=prompts * group // micro_batches,
            gradient_accumulation_steps=micro_batches,
            max_completion_length=8192,
            top_k=0 if sampled else 1,
        )
        # The processor of the script is one that the settings do not ask for.
        options = {"generation_check": False, **more} if issubclass(cls, GRPOTrainer) else more
        self.trainer = cls(
            self.model,
            lambda completions, **_: [float(len(completion)) for completion in completions],
            config,
            train_dataset=Dataset.from_dict({"prompt": conversations(10, prompts)}),
            processing_class=self.tokenizer,
            tools=[look_up],
            **options,
        )
        self.calls = 0
        self.stock = self.model._get_logits_processor
        self.model._get_logits_processor = self.scripted
        self.tokens = 0
        self.counts: list[int] = []
        """Tokens through the model in each generation batch."""
        self.seconds: list[float] = []
        """CPU seconds of each generation batch."""

    def scripted(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        """Return the processors of a call of `generate` behind the script's."""
        script = Script(self.calls, self.turns - 1, self.tokenizer, self.prompts * self.group)
        self.calls += 1
        return LogitsProcessorList([script, *self.stock(*args, **kwargs)])

    def batch(self, prompts: list[Any], seed: int) -> list[list[int]]:
        """Generate one batch and return its completions."""
        torch.manual_seed(seed)
        with self.measured() as found:
            self.trainer._generate_and_score_completions(
                [{"prompt": row} for row in prompts for _ in range(self.group)]
            )
        return found[-1][1]

    def step(self, prompts: list[Any], seed: int, update: Callable[[PreTrainedModel], None]) -> list[list[int]]:
        """Generate a batch, train on it, update the weights by a function of the model, and return the completions."""
        torch.manual_seed(seed)
        self.trainer.current_gradient_accumulation_steps = self.micro_batches
        with self.measured() as found:
            for _ in range(self.micro_batches):
                rows = [{"prompt": row} for row in prompts for _ in range(self.group)]
                self.trainer.training_step(self.model, rows, None)
            update(self.model)
        return found[-1][1]

    @contextmanager
    def measured(self) -> Iterator[list[Any]]:
        """Measure the generation batch inside this block, and yield the list that its result is appended to."""
        generate, found = self.trainer._generate, []
        self.calls = self.tokens = 0

        def timed(rows: list[Any]) -> Any:
            start = time.process_time()
            with self.counted():
                found.append(generate(rows))
            self.seconds.append(time.process_time() - start)
            self.counts.append(self.tokens)
            return found[-1]

        self.trainer._generate = timed
        try:
            yield found
        finally:
            del self.trainer._generate

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the tokens of the forwards inside this block."""

        def count(_: Any, args: Any, given: dict[str, Any]) -> None:
            self.tokens += given["input_ids"].numel()

        handle = self.model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


def conversations(characters: int, count: int, seed: int = 0) -> list[list[dict[str, str]]]:
    """Return prompts of the given number of characters."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        letters = torch.randint(97, 123, (characters,), generator=generator).tolist()
        found.append([{"role": "user", "content": "".join(map(chr, letters))}])
    return found


def rows(turns: int, characters: int, sampled: bool, batches: int, **sizes: int) -> Iterator[str]:
    """Yield the rows of the table for one number of turns and one length of prompts."""
    folder = tempfile.mkdtemp()
    contestants = {
        "TRL": Contestant(TRLGRPOTrainer, turns, folder, sampled, sizes=sizes),
        "ours, nothing kept": Contestant(GRPOTrainer, turns, folder, sampled, sizes=sizes),
        "ours": Contestant(GRPOTrainer, turns, folder, sampled, sizes=sizes),
    }
    contestants["ours, nothing kept"].trainer._generation.reuse.doubt = "this contestant keeps nothing"
    same = dict.fromkeys(contestants, True)
    # In the first batch, ours verifies groups and the first reuse.
    for seed in range(batches + 1):
        prompts = conversations(characters, PROMPTS, seed)
        expected: list[list[int]] = []
        for name, contestant in contestants.items():
            completions = contestant.batch(prompts, seed)
            expected = expected or completions
            same[name] &= completions == expected
            assert contestant.calls >= turns
    stock = contestants["TRL"]
    for name, contestant in contestants.items():
        tokens, stock_tokens = (statistics.median(each.counts[1:]) for each in (contestant, stock))
        seconds, stock_seconds = (statistics.median(each.seconds[1:]) for each in (contestant, stock))
        yield (
            f"| {turns} | {characters:,} | {'sampled' if sampled else 'greedy'} | {name} | {tokens:,.0f} | "
            f"{stock_tokens / tokens:.2f} | {seconds:.2f} | {stock_seconds / seconds:.2f} | "
            f"{'yes' if same[name] else 'NO'} |"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", nargs="+", type=int, default=[4, 8], help="turns of the longest rows")
    parser.add_argument("--characters", nargs="+", type=int, default=[600], help="length of the prompts")
    parser.add_argument("--batches", type=int, default=3, help="generation batches of each contestant that count")
    parser.add_argument("--greedy", action="store_true", help="also decode greedily")
    parser.add_argument("--sizes", type=json.loads, default={}, help="sizes of the policy, as JSON")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    Turn.same_stream = True  # the random numbers of the stock loop, so that tokens can be compared
    versions = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch"))
    print(f"{platform.machine()}, one thread, {versions}\n")
    print(
        "| turns | characters | decoding | | tokens through the model | TRL ÷ | CPU s | TRL ÷ | tokens as TRL's |\n"
        "|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    for turns in asked.turns:
        for characters in asked.characters:
            for sampled in (True, False)[: 1 + asked.greedy]:
                for row in rows(turns, characters, sampled, asked.batches, **asked.sizes):
                    print(row, flush=True)


if __name__ == "__main__":
    main()
