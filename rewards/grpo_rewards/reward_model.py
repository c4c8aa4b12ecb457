"""Scalar reward models as a reward: any one-label sequence classifier, InternLM2's natively, scored by group.

A group's conversations differ only in their last message, and by default each completion is scored twice, whole and by
its answer alone. So the longest common prefix of a group's token ids goes through the model once; its keys and values
are then repeated for batches of the rest, cut by length. Equal sequences are scored once.

    reward = RewardModelScore("internlm/internlm2-1_8b-reward", dtype="bfloat16")
    trainer = GRPOTrainer(model, reward_funcs=reward, ...)

The module needs the extra `models`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo_rewards import internlm2
from grpo_rewards.completions import check_rows, completion_text
from grpo_rewards.internlm2 import CheckpointError
from grpo_rewards.reward import BaseReward, Kind, check_choice, checked_number

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Conversation = Sequence[Message]
TokenIds = tuple[int, ...]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_CUTS = ("prompt", "completion")
# What starting one more forward pass costs, in tokens of forward work: on a CPU next to nothing, on an accelerator the
# launch of a few hundred kernels.
_FORWARD_COST = {"cpu": 8}
_FORWARD_COST_ELSEWHERE = 512


@dataclass(frozen=True)
class RewardModelScore(BaseReward):
    """The score of a scalar reward model for the prompt and the completion as its answer.

    | completion | pay |
    |---|---|
    | no answer tag, or `answer_weight` 0 | the score, clamped to [-`clamp`, `clamp`] |
    | `<answer>content</answer>` (the first one) | 0.4 * its clamped score + 0.6 * that of `content` alone |
    | empty, or the tag without content | the empty turn is scored like any other |
    | a score that is not finite (half-precision overflow) | None; logged as `reward_model/unscored_rows` |

    The rule, with its defaults, is `calculate_rewards` of the MiniMind GRPO notebook. A prompt is a list of messages,
    taken as it is, or a string, taken as one user turn. Each process scores its own rows on its own copy of the model,
    which is loaded at the first call or by `load`; equal settings share one copy. Groups may be incomplete.

    Args:
        model: hub id or folder of a one-label sequence classifier, or of an InternLM2 reward model in its own layout.
        revision: branch, tag or commit on the hub.
        dtype: `auto` (the checkpoint's), `float32`, `bfloat16` or `float16`.
        device: null is the trainer's device, else the accelerator, else the CPU.
        clamp: bound on each score before the two are blended; null for none.
        answer_tag: name of the tag whose content is scored by itself; null for none.
        answer_weight: share of that second score, in [0, 1]; 0 for none.
        max_length: longest conversation in tokens; null is the model's own limit.
        cut: what a longer one loses, counted in `reward_model/cut_conversations`: its oldest tokens behind the leading
            BOS (`prompt`), or the end of the completion, its closing tokens kept (`completion`).
        max_batch_tokens: most tokens of one forward pass, padding and shared prefix included; a single conversation
            always goes through.
        prefix_sharing: compute a group's common prefix once. The scores are the same up to rounding.
        parse_special_tokens: read special-token strings in a message as special tokens, as the model's own code does.
            By default they are plain text, so that a completion can neither end its turn nor forge one.
        name: the name it logs under.

    Raises:
        ValueError: an argument out of range, or a row without a prompt. `CheckpointError`, a ValueError, at loading.
    """

    kind: ClassVar[Kind] = "judge"

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str | None = None
    clamp: float | None = 3.0
    answer_tag: str | None = "answer"
    answer_weight: float = 0.6
    max_length: int | None = None
    cut: str = "prompt"
    max_batch_tokens: int = 16384
    prefix_sharing: bool = True
    parse_special_tokens: bool = False
    name: str = "reward_model"

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, Path)) or not str(self.model):
            raise ValueError(f"model must be a hub id or a folder, not {self.model!r}")
        object.__setattr__(self, "model", str(self.model))
        check_choice(self.dtype, "dtype", _DTYPES)
        check_choice(self.cut, "cut", _CUTS)
        _check_device(self.device)
        if self.clamp is not None:
            object.__setattr__(self, "clamp", checked_number(self.clamp, "clamp"))
            if self.clamp <= 0:
                raise ValueError(f"clamp must be positive, or null for none, not {self.clamp!r}")
        object.__setattr__(self, "answer_weight", checked_number(self.answer_weight, "answer_weight"))
        if not 0 <= self.answer_weight <= 1:
            raise ValueError(f"answer_weight must lie in [0, 1], not {self.answer_weight!r}")
        if self.max_length is not None:
            _check_count("max_length", self.max_length, 2)
        _check_count("max_batch_tokens", self.max_batch_tokens, 1)

    @property
    def highest_pay(self) -> float | None:
        """The bound on the score; None without `clamp`."""
        return self.clamp

    @property
    def model_source(self) -> str:
        """Hub name or folder of the reward model."""
        return self.model

    @property
    def model_revision(self) -> str | None:
        """Branch, tag or commit of the reward model on the hub."""
        return self.revision

    def prepare(self) -> str:
        """Load the model and return a line about it. Raises `CheckpointError`, a ValueError, if it cannot be loaded."""
        return self.load().summary()

    def load(self) -> LoadedRewardModel:
        """Load the model in this process, once. Called early, it lets a bad checkpoint stop a run at its start."""
        return _load(self.model, self.revision, self.dtype, str(self.device or _default_device()))

    def __call__(
        self,
        prompts: Any = None,
        completions: Sequence[Any] = (),
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score every completion; None where a score is not finite."""
        check_rows(self.name, prompts=prompts, completions=completions)
        histories = [self._messages(prompt) for prompt in prompts]
        texts = [completion_text(completion) for completion in completions]
        answers = [self._answer(text) for text in texts]
        replies = [*zip(histories, texts, strict=True), *zip(histories, answers, strict=True)]
        scores, cut = self._scores([_with_reply(history, text) for history, text in replies if text is not None])
        whole, rest = scores[: len(texts)], iter(scores[len(texts) :])
        rows = [
            self._blend(score, None if answer is None else next(rest))
            for score, answer in zip(whole, answers, strict=True)
        ]
        if log_metric is not None:
            log_metric(f"{self.name}/unscored_rows", float(rows.count(None)))
            log_metric(f"{self.name}/cut_conversations", float(cut))
        return rows

    def scores(self, conversations: Sequence[Conversation]) -> list[float]:
        """The model's own score of each conversation, neither clamped nor blended; not finite where it overflowed.

        Conversations with equal messages before the last form a group.
        """
        return self._scores(conversations)[0]

    def rank(self, conversations: Sequence[Conversation]) -> list[int]:
        """The indices of the conversations by descending score, those without a finite one last."""
        scores = [score if math.isfinite(score) else -math.inf for score in self.scores(conversations)]
        return sorted(range(len(scores)), key=scores.__getitem__, reverse=True)

    def token_ids(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """The token ids that the model is shown for each conversation, before any cut to `max_length`."""
        return self.load().encode(conversations, self.parse_special_tokens)

    def _messages(self, prompt: str | Conversation | None) -> Conversation:
        if prompt is None:
            raise ValueError(f"{self.name} scores an answer to its prompt: every row needs a `prompt`")
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    def _answer(self, text: str) -> str | None:
        return _tag_content(text, self.answer_tag) if self.answer_tag and self.answer_weight else None

    def _blend(self, score: float, answer: float | None) -> float | None:
        if not all(math.isfinite(part) for part in (score, answer) if part is not None):
            return None
        if answer is None:
            return self._clamped(score)
        return (1 - self.answer_weight) * self._clamped(score) + self.answer_weight * self._clamped(answer)

    def _clamped(self, score: float) -> float:
        return score if self.clamp is None else max(min(score, self.clamp), -self.clamp)

    def _scores(self, conversations: Sequence[Conversation]) -> tuple[list[float], int]:
        """Raw scores, and how many conversations were cut."""
        loaded = self.load()
        whole = self.token_ids(conversations)
        limit = self.max_length or loaded.max_length
        kept = [
            tuple(ids) if len(ids) <= limit else self._cut(conversation, ids, limit)
            for conversation, ids in zip(conversations, whole, strict=True)
        ]
        groups: dict[str, list[TokenIds]] = {}
        for conversation, ids in zip(conversations, kept, strict=True):
            groups.setdefault(json.dumps(conversation[:-1], sort_keys=True, default=str), []).append(ids)
        scores = loaded.score(list(groups.values()), self.max_batch_tokens, self.prefix_sharing)
        return [scores[ids] for ids in kept], sum(len(ids) > limit for ids in whole)

    def _cut(self, conversation: Conversation, ids: list[int], limit: int) -> TokenIds:
        if self.cut == "prompt":
            return cut_middle(ids, self.load().leading_tokens(ids), limit)
        empty = [*conversation[:-1], {**conversation[-1], "content": ""}]
        closing = _common_prefix(ids[::-1], self.token_ids([empty])[0][::-1])
        return cut_middle(ids, limit - min(closing, limit - 1), limit)


def _check_device(device: str | None) -> None:
    try:
        torch.device(device or "cpu")
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be null or a torch device such as cuda:0 or cpu, not {device!r}") from error


def _check_count(key: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be a whole number of at least {least}, not {value!r}")


def _with_reply(history: Conversation, reply: str) -> Conversation:
    return [*history, {"role": "assistant", "content": reply}]


def _tag_content(text: str, tag: str) -> str | None:
    """The stripped content of the first `<tag>`, or None where it is absent or not closed."""
    content, closing, _ = text.partition(f"<{tag}>")[2].partition(f"</{tag}>")
    return content.strip() if closing else None


def cut_middle(ids: Sequence[int], head: int, length: int) -> TokenIds:
    """The first `head` and the last `length - head` of `ids`; needs head < length <= len(ids)."""
    return (*ids[:head], *ids[len(ids) - (length - head) :])


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second)  # noqa: B905 (their lengths differ)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def shared_prefix_length(sequences: Sequence[TokenIds]) -> int:
    """The length of the longest common prefix of token ids that leaves every sequence at least one token of its own.

    It is taken over ids, not over the rendered text: a tokenizer may merge the template's last characters with the
    completion's first ones.
    """
    # The least and the greatest in lexicographic order differ no later than any other two.
    common = _common_prefix(min(sequences), max(sequences))
    return min(common, min(map(len, sequences)) - 1)


class LengthBuckets(NamedTuple):
    """Batches of sequences by length, as `slices` of the lengths in descending order, and their `cost` in tokens."""

    cost: float
    slices: list[slice]


def length_buckets(lengths: Sequence[int], prefix: int, max_tokens: int, forward_cost: int) -> LengthBuckets:
    """Cut `lengths`, in descending order, into the cheapest batches: each costs rows * its longest + `forward_cost`.

    A batch of more than one row holds at most `max_tokens` tokens, the `prefix` tokens of cached keys and values before
    each row included. Solved exactly by dynamic programming over the last batch.
    """
    best, cuts = [0.0], [0]
    for end in range(1, len(lengths) + 1):
        options = []
        for start in range(end - 1, -1, -1):
            rows = end - start
            if rows > 1 and rows * (prefix + lengths[start]) > max_tokens:
                break
            options.append((best[start] + rows * lengths[start] + forward_cost, start))
        cost, start = min(options)
        best.append(cost)
        cuts.append(start)
    slices = []
    end = len(lengths)
    while end:
        slices.append(slice(cuts[end], end))
        end = cuts[end]
    return LengthBuckets(best[-1], slices)


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


class LoadedRewardModel:
    """A reward model in memory, in evaluation mode and without gradients: conversations to token ids to scores."""

    def __init__(self, name: str, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None:
            raise CheckpointError(f"{name}: its tokenizer has no chat template, so it can't be shown a conversation")
        self.name = name
        self.network = network.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.max_length = getattr(network.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self._special_ids = {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        score = getattr(network, "score", None)
        self._head = score if isinstance(score, nn.Linear) and score.out_features == 1 else None
        self._shares_up_to, self._obstacle = (
            _sharing_limit(network) if self._head else (0, "its head is not a linear `score` on the last token")
        )
        self._forward_cost = _FORWARD_COST.get(network.device.type, _FORWARD_COST_ELSEWHERE)

    def summary(self) -> str:
        """One line for the start of a run: what was loaded, how large it is, and where it lies."""
        sizes = [(p.numel(), p.numel() * p.element_size()) for p in self.network.parameters()]
        count, size = (sum(column) for column in zip(*sizes, strict=True))
        dtype = str(self.network.dtype).removeprefix("torch.")
        return (
            f"reward model {self.name}: {count / 1e9:.2f} B parameters in {dtype}, "
            f"{size / 2**30:.2f} GiB on {self.network.device} in every process"
        )

    def leading_tokens(self, ids: Sequence[int]) -> int:
        """How many leading tokens a cut keeps: 1 for a BOS, else 0."""
        return int(bool(ids) and ids[0] == self.tokenizer.bos_token_id)

    def encode(self, conversations: Sequence[Conversation], parse_special_tokens: bool = False) -> list[list[int]]:
        """The token ids of each conversation under the model's chat template.

        Unless `parse_special_tokens`, special-token strings in a message become ordinary tokens.
        """
        if parse_special_tokens:
            encoded = self._encode([self._render(conversation) for conversation in conversations])
        else:
            forging = [self._forges(conversation) for conversation in conversations]
            plain = [self._render(c) for c, forges in zip(conversations, forging, strict=True) if not forges]
            rest = iter(self._encode(plain))
            encoded = [
                self._encode_as_text(conversation) if forges else next(rest)
                for conversation, forges in zip(conversations, forging, strict=True)
            ]
        end = getattr(self.network.config, "reward_token_id", None)
        return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in encoded]

    def _render(self, conversation: Conversation) -> str:
        text = self.tokenizer.apply_chat_template(
            [{**message, "content": _content(message)} for message in conversation], tokenize=False
        )
        # Tokenizers refuse lone surrogates.
        return text.encode("utf-8", errors="replace").decode("utf-8")

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _forges(self, conversation: Conversation) -> bool:
        return any(self._special.search(_content(message)) for message in conversation)

    def _encode_as_text(self, conversation: Conversation) -> list[int]:
        """Encode a conversation whose messages contain special-token strings, as text.

        Each is hidden behind a mark while the template is rendered, so that what is then still a special token is the
        template's own. Special tokens cut a text into pieces that are encoded independently; these get their text back.
        """
        contents = [_content(message) for message in conversation]
        # Longer than any run of its character, so that no message can contain it.
        mark = "\ue000" * (1 + max(map(len, re.findall("\ue000+", "\n".join(contents))), default=0))
        names = list(self._special_ids)
        hidden = [self._special.sub(lambda match: f"{mark}{names.index(match[0])}{mark}", text) for text in contents]
        rendered = self._render([{**m, "content": text} for m, text in zip(conversation, hidden, strict=True)])
        ids: list[int] = []
        for number, piece in enumerate(self._special.split(rendered)):  # every second one is a special token
            if number % 2:
                ids.append(self._special_ids[piece])
            elif piece:
                text = re.sub(f"{mark}([0-9]+){mark}", lambda match: names[int(match[1])], piece)
                ids += self._without_special(text)
        return ids

    def _without_special(self, text: str) -> list[int]:
        """Encode text to ordinary tokens.

        Merges alone can build a special token even where none is looked for (InternLM2's `<s>`): its first character is
        then encoded by itself.
        """
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        built = {self._special_ids[name]: name for name in self._special.findall(text) if len(name) > 1}
        parts = (
            self._without_special(built[i][0]) + self._without_special(built[i][1:]) if i in built else [i] for i in ids
        )
        return [i for part in parts for i in part]

    @torch.inference_mode()
    def score(
        self, groups: Sequence[Sequence[TokenIds]], max_batch_tokens: int, prefix_sharing: bool
    ) -> dict[TokenIds, float]:
        """Score token-id sequences, each distinct one once.

        Args:
            groups: sequences that probably share a prefix, such as those of one prompt.
            max_batch_tokens: as in `RewardModelScore`.
            prefix_sharing: compute the common prefix of a group once, where the model and the lengths allow it.

        Returns:
            The score of every sequence; NaN or infinite where the network overflowed.
        """
        if self._head is None:
            _say_once(f"{self.name}: conversations are scored one by one, since {self._obstacle}.")
            return {ids: self._classify(ids) for group in groups for ids in group}
        scores: dict[TokenIds, float] = {}
        loose: list[TokenIds] = []
        for group in groups:
            sequences = list(dict.fromkeys(group))
            prefix = self._worthwhile_prefix(sequences, max_batch_tokens) if prefix_sharing else 0
            if prefix:
                cache = DynamicCache(config=self.network.config)
                self._last_hidden([sequences[0][:prefix]], cache)
                scores |= self._score_batches(sequences, prefix, cache, max_batch_tokens)
            else:
                loose += sequences
        return scores | self._score_batches(list(dict.fromkeys(loose)), 0, None, max_batch_tokens)

    def _worthwhile_prefix(self, sequences: list[TokenIds], max_batch_tokens: int) -> int:
        """The length of the prefix to share, or 0 where the model can't share it or it would not save work."""
        lengths = sorted(map(len, sequences), reverse=True)
        prefix = shared_prefix_length(sequences)
        rest = [length - prefix for length in lengths]
        shared = prefix + self._forward_cost + self._buckets(rest, prefix, max_batch_tokens).cost
        if len(sequences) < 2 or shared >= self._buckets(lengths, 0, max_batch_tokens).cost:
            return 0
        if lengths[0] > self._shares_up_to:
            reach = f" beyond {self._shares_up_to} tokens" if self._shares_up_to else ""
            _say_once(f"{self.name}: the common prefix of a group is not shared{reach}, since {self._obstacle}.")
            return 0
        return prefix

    def _buckets(self, lengths: Sequence[int], prefix: int, max_batch_tokens: int) -> LengthBuckets:
        return length_buckets(lengths, prefix, max_batch_tokens, self._forward_cost)

    def _score_batches(
        self, sequences: list[TokenIds], prefix: int, cache: DynamicCache | None, max_batch_tokens: int
    ) -> dict[TokenIds, float]:
        ordered = sorted(sequences, key=len, reverse=True)
        buckets = self._buckets([len(ids) - prefix for ids in ordered], prefix, max_batch_tokens)
        scores: dict[TokenIds, float] = {}
        for rows in (ordered[part] for part in buckets.slices):
            own = copy.deepcopy(cache)
            if own is not None:
                own.batch_repeat_interleave(len(rows))
            hidden = self._last_hidden([ids[prefix:] for ids in rows], own, prefix)
            scores |= zip(rows, self._apply_head(hidden), strict=True)
        return scores

    def _last_hidden(self, rows: list[TokenIds], cache: DynamicCache | None, prefix: int = 0) -> torch.Tensor:
        """The hidden state (rows, hidden size) of each row's last attended token, behind `prefix` tokens in `cache`.

        The rows' own keys and values are added to `cache`.
        """
        lengths = torch.tensor([len(row) for row in rows])
        width = int(lengths.max())
        ids = torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows])
        mask = torch.arange(-prefix, width)[None] < lengths[:, None]
        device = self.network.device
        hidden = self.network.base_model(
            input_ids=ids.to(device),
            attention_mask=mask.long().to(device),
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state
        return hidden[torch.arange(len(rows), device=hidden.device), lengths.to(hidden.device) - 1]

    def _apply_head(self, hidden: torch.Tensor) -> list[float]:
        # In single precision: rounded to bfloat16, scores around 3 are 1/64 apart, which a group's z-score magnifies.
        assert self._head is not None
        bias = None if self._head.bias is None else self._head.bias.float()
        return nn.functional.linear(hidden.float(), self._head.weight.float(), bias)[:, 0].tolist()

    def _classify(self, ids: TokenIds) -> float:
        row = torch.tensor([ids], device=self.network.device)
        return self.network(input_ids=row, attention_mask=torch.ones_like(row)).logits[0, 0].float().item()


def _content(message: Message) -> str:
    """A message's text; parts are joined, and None is empty."""
    return completion_text([{"content": message.get("content")}])


def _sharing_limit(network: PreTrainedModel) -> tuple[int, str]:
    """The longest sequence for which a shared prefix gives the same scores, and what stands in the way beyond it."""
    if "past_key_values" not in inspect.signature(network.base_model.forward).parameters:
        return 0, "the model keeps no key-value cache"
    layers = {type(layer) for layer in DynamicCache(config=network.config).layers}
    if not layers <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return 0, "the model has layers whose state is not a list of keys and values"
    config = network.config.get_text_config()
    limits = [(sys.maxsize, "")]
    if DynamicSlidingWindowLayer in layers:
        limits.append((config.sliding_window, "the model attends to a sliding window"))
    if any(rope.get("rope_type") in ("dynamic", "longrope") for rope in _ropes(config)):
        length = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
        limits.append((length, "the model's rotary embedding depends on the whole length"))
    return min(limits)


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary settings: one, or one for each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [part for part in parameters.values() if isinstance(part, dict)]


def _default_device() -> torch.device:
    """The device that accelerate has given this process, else the accelerator, else the CPU."""
    if "accelerate" in sys.modules:
        from accelerate import PartialState

        # Reading the shared state does not start one, as calling the class would.
        if PartialState._shared_state:
            return PartialState().device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


@functools.cache
def _load(model: str, revision: str | None, dtype: str, device: str) -> LoadedRewardModel:
    folder = internlm2.checkpoint_folder(model, revision)
    internlm2.check_files(folder)
    with _outside_zero3():
        if internlm2.is_internlm2_reward(internlm2.read_config(folder)):
            network, tokenizer = internlm2.load(folder, dtype=dtype, device=device)
        else:
            network, tokenizer = _load_classifier(model, folder, dtype)
        return LoadedRewardModel(model, network.to(device), tokenizer)


@contextmanager
def _outside_zero3() -> Iterator[None]:
    """Load whole: while transformers knows of a ZeRO-3 policy, it partitions every model that it builds."""
    from transformers.integrations import deepspeed

    held = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = held


def _load_classifier(name: str, folder: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A native one-label sequence classifier with its tokenizer; a head that the checkpoint lacks is an error."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        raise CheckpointError(
            f"{name} needs code from its own repository, which is never run here: use a reward model that transformers "
            "has natively, or an InternLM2 one"
        ) from error
    if config.num_labels != 1:
        raise CheckpointError(f"{name} has {config.num_labels} labels, not 1: it is not a scalar reward model")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{name} has no safetensors weights: choose a revision that has, or save it as such")
    with _one_sentence(f"{name}: its tokenizer can't be loaded; copy the model's tokenizer files into it"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    with _one_sentence(f"{name} can't be loaded as a sequence classifier"):
        network, report = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    absent = sorted(report["missing_keys"])
    if absent:
        raise CheckpointError(f"{name} lacks {', '.join(absent[:3])}: it is not a trained reward model")
    return network, tokenizer


@contextmanager
def _one_sentence(problem: str) -> Iterator[None]:
    try:
        yield
    except (
        Exception
    ) as error:  # of a damaged file, whatever its reader meets; the tokenizers library raises this very class
        raise CheckpointError(f"{problem} ({' '.join(str(error).split())})") from error
