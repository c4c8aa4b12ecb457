"""Scoring by group with a reward model, against one forward pass per score.

    python benchmarks/reward_model.py                  # hidden 512 x 8 layers, CPU time of one thread
    python benchmarks/reward_model.py --size 1.8b --device cuda --dtype bfloat16      # wall time

Both sides score every completion twice on one random model: the full text, and its answer alone. The loop is that of
the MiniMind notebook (`get_score` for one conversation at a time). `RewardModelScore` scores by group. Rounds alternate
between the two, and the ratio is that of the medians.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from grpo_rewards.reward_model import LoadedRewardModel, RewardModelScore

LAYOUTS = [  # prompt tokens, completion tokens, group size, long-tailed lengths, number of groups
    (200, 100, 8, False, 1),
    (200, 100, 8, True, 1),
    (500, 100, 8, False, 1),
    (100, 300, 8, False, 1),
    (200, 100, 8, False, 4),
]
SIZES = {
    "small": {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "1.8b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
}
WORDS = 2000
ANSWER_TOKENS = 20
TEMPLATE = "<s>{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}<|reward|>"


def build(folder: Path, size: str, dtype: torch.dtype) -> None:
    """Write a random Llama reward model, and a tokenizer with one token per word."""
    special = ["<s>", "<|im_start|>", "<|im_end|>", "<|reward|>"]
    words = ["user", "assistant", "<answer>", "</answer>", *(f"w{i}" for i in range(WORDS))]
    vocabulary = {token: i for i, token in enumerate(["[UNK]", *special, *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", unk_token="[UNK]", additional_special_tokens=special[1:]
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    network = LlamaForSequenceClassification(LlamaConfig(vocab_size=92544, num_labels=1, pad_token_id=0, **SIZES[size]))
    network.score.weight.data.normal_(std=network.config.hidden_size**-0.5)  # scores of order 1
    network.to(dtype).save_pretrained(folder)


def batch(
    prompt: int, completion: int, group: int, long_tail: bool, groups: int, seed: int = 0
) -> tuple[list[str], list[str]]:
    """Return random prompts and completions of about the given lengths, each completion with a final answer tag."""
    rng = np.random.default_rng(seed)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(WORDS, size=count))

    def length() -> int:
        if not long_tail:
            return completion
        return int(np.clip(completion * rng.lognormal(-0.5, 1.0), ANSWER_TOKENS + 4, 6 * completion))

    prompts = [words(prompt) for _ in range(groups)]
    rows = [(text, length()) for text in prompts for _ in range(group)]
    completions = [f"{words(count - ANSWER_TOKENS - 2)} <answer> {words(ANSWER_TOKENS)} </answer>" for _, count in rows]
    return [text for text, _ in rows], completions


def score_one_by_one(loaded: LoadedRewardModel, prompts: list[str], completions: list[str]) -> list[float]:
    """Score by the source's loop: two conversations per completion, each rendered, encoded and scored by itself."""

    def get_score(prompt: str, reply: str) -> float:
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
        text = loaded.tokenizer.apply_chat_template(messages, tokenize=False)
        ids = loaded.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return loaded.network(input_ids=ids.to(loaded.network.device)).logits[0, 0].float().item()

    rows = []
    with torch.no_grad():
        for prompt, reply in zip(prompts, completions, strict=True):
            answer = reply.partition("<answer>")[2].partition("</answer>")[0].strip()
            rows.append(0.4 * get_score(prompt, reply) + 0.6 * get_score(prompt, answer))
    return rows


def timed(work: Callable[[], list[float]], clock: Callable[[], float]) -> tuple[float, list[float]]:
    """Return the seconds on `clock`, and the scores."""
    start = clock()
    scores = work()
    return clock() - start, scores


def compare(
    reward: RewardModelScore, layout: tuple[int, int, int, bool, int], rounds: int, clock: Callable[[], float]
) -> str:
    """Return one row of the table: median seconds of both, their ratio, and the largest difference of a score."""
    prompts, completions = batch(*layout)
    loaded = reward.load()
    sides = [
        lambda: score_one_by_one(loaded, prompts, completions),
        lambda: [score for score in reward(prompts, completions) if score is not None],
    ]
    scores = [side() for side in sides]
    seconds = [[timed(side, clock)[0] for side in sides] for _ in range(rounds)]
    loop, grouped = (statistics.median(column) for column in zip(*seconds, strict=True))
    difference = max(abs(a - b) for a, b in zip(*scores, strict=True))
    prompt, completion, group, long_tail, groups = layout
    name = f"{prompt} / {completion}{' long tail' if long_tail else ''} / {group}, groups: {groups}"
    rate = 2 * len(prompts) / grouped
    return f"| {name} | {loop:.3f} | {grouped:.3f} | {loop / grouped:.2f}x | {rate:.1f} | {difference:.1e} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    on_cpu = options.device == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    machine = platform.processor() or platform.machine() if on_cpu else torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{machine}, {options.device}; {versions}; {options.size}, {options.dtype}\n")
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), options.size, getattr(torch, options.dtype))
        reward = RewardModelScore(folder, device=options.device, clamp=None)
        print(f"| prompt / completion / G | loop, s | by group, s | ratio | scores/s | max difference |\n|{'---|' * 6}")
        clock = time.process_time if on_cpu else time.perf_counter
        for layout in LAYOUTS:
            print(compare(reward, layout, options.rounds, clock), flush=True)
    if not on_cpu:
        print(f"\npeak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
