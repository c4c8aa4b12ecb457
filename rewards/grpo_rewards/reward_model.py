"""Scalar reward models as a reward: any one-label sequence classifier, and InternLM2's models without remote code.

The conversations of a group differ only in their last message, and by default each completion is scored twice: the full
text, and its answer alone. So the longest common prefix of a group's token ids goes through the model once. Its keys
and values are repeated for batches of the remaining tokens, cut by length. Equal sequences are scored once.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo_rewards import internlm2
from grpo_rewards.attention import without_cudnn_attention
from grpo_rewards.completions import check_rows, completion_text
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.loading import check_loaded, without_load_report
from grpo_rewards.reward import BaseReward, Kind, Scored, check_choice, check_count, checked_number, checked_positive

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Conversation = Sequence[Message]
TokenIds = tuple[int, ...]

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_CUTS = ("prompt", "completion")
# Cost of one more forward pass, in tokens of forward work: next to nothing on a CPU, and the launch of a few hundred
# kernels on an accelerator.
_FORWARD_COST_ON_CPU, _FORWARD_COST_ELSEWHERE = 8, 512


@dataclass(frozen=True)
class RewardModelScore(BaseReward):
    """The score of a scalar reward model for the prompt and the completion as its answer.

    | completion | pay |
    |---|---|
    | no answer tag, or `answer_weight` 0 | the score, clamped to [-`clamp`, `clamp`] |
    | `<answer>content</answer>` (the first one) | 0.4 * its clamped score + 0.6 * that of `content` alone |
    | empty, or the tag without content | the empty turn is scored like any other |
    | a score that is not finite (16-bit overflow) | None; logged as `rewards/reward_model/unscored_rows` |

    The rule and its defaults are those of `calculate_rewards` in the MiniMind GRPO notebook. A prompt is a list of
    messages, used as it is, or a string, used as one user turn. Each process scores its own rows on its own copy of the
    model. The copy is loaded at the first call or by `load`, and rewards with equal settings share it. Groups may be
    incomplete.

    Args:
        model: hub id or folder of a one-label sequence classifier, or of an InternLM2 reward model in its own layout.
        revision: branch, tag or commit on the hub.
        dtype: `auto` (the checkpoint's), `float32`, `bfloat16` or `float16`.
        device: torch device; null for the trainer's device, else the accelerator, else the CPU.
        clamp: bound on each of the two scores before they are blended; null for none.
        answer_tag: name of the tag whose content is scored by itself; null for none.
        answer_weight: share of that second score, in [0, 1]; 0 for none.
        max_length: longest conversation in tokens; null for the model's own limit.
        cut: part that a longer conversation loses, counted in `rewards/reward_model/cut_conversations`: its oldest
            tokens behind the leading BOS (`prompt`), or the end of the completion before its closing tokens
            (`completion`).
        max_batch_tokens: largest number of tokens in one forward pass, with padding and shared prefix. A single
            conversation may be longer.
        prefix_sharing: compute the common prefix of a group once. The scores are the same up to rounding.
        parse_special_tokens: read special-token strings in a message as special tokens, like the model's own code. By
            default they are ordinary text, so that a completion can neither end its turn nor forge another.
        name: name of the reward in logs.

    Raises:
        ValueError: an argument is out of range, a row has no prompt, or the model cannot be loaded.
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
        try:
            torch.device(self.device or "cpu")
        except (RuntimeError, TypeError) as error:
            problem = f"device must be null or a torch device such as cuda:0 or cpu, not {self.device!r}"
            raise ValueError(problem) from error
        if self.clamp is not None:
            object.__setattr__(self, "clamp", checked_positive(self.clamp, "clamp"))
        object.__setattr__(self, "answer_weight", checked_number(self.answer_weight, "answer_weight", 0.0, 1.0))
        if self.max_length is not None:
            check_count(self.max_length, "max_length", 2)
        check_count(self.max_batch_tokens, "max_batch_tokens")

    @property
    def highest_pay(self) -> float | None:
        """Bound on the score; None without `clamp`."""
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
        """Load the model and return a line about it. Raise `UserError`, a ValueError, if it cannot be loaded."""
        return self.load().summary()

    def load(self) -> LoadedRewardModel:
        """Return the model, which is loaded once per process. An early call stops a run with a bad checkpoint."""
        return _load(self.model, self.revision, self.dtype, str(self.device or _default_device()))

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        check_rows(self.name, prompts=prompts, completions=completions)
        full: list[Conversation] = []
        answers: list[Conversation | None] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            if prompt is None:
                raise ValueError(f"{self.name} scores an answer to its prompt: every row needs a `prompt`")
            history = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            text = completion_text(completion)
            full.append(_with_reply(history, text))
            content, is_closed, _ = text.partition(f"<{self.answer_tag}>")[2].partition(f"</{self.answer_tag}>")
            has_answer = self.answer_tag and self.answer_weight and is_closed
            answers.append(_with_reply(history, content.strip()) if has_answer else None)
        scores, cut = self._scores([*full, *(answer for answer in answers if answer is not None)])
        answer_scores = iter(scores[len(full) :])
        rows: list[float | None] = []
        for score, answer in zip(scores[: len(full)], answers, strict=True):
            rows.append(self._clamped(score) if answer is None else self._blended(score, next(answer_scores)))
        return Scored(rows, metrics={"unscored_rows": float(rows.count(None)), "cut_conversations": float(cut)})

    def scores(self, conversations: Sequence[Conversation]) -> list[float]:
        """Return the model's own score of each conversation: not clamped, not blended, not finite after an overflow.

        Conversations with equal messages before the last one form a group.
        """
        return self._scores(conversations)[0]

    def token_ids(self, conversations: Sequence[Conversation]) -> list[list[int]]:
        """Return the token ids of each conversation, before any cut to `max_length`."""
        return self.load().encode(conversations, self.parse_special_tokens)

    def _clamped(self, score: float) -> float | None:
        if not math.isfinite(score):
            return None
        return score if self.clamp is None else max(min(score, self.clamp), -self.clamp)

    def _blended(self, score: float, answer_score: float) -> float | None:
        full, answer = self._clamped(score), self._clamped(answer_score)
        if full is None or answer is None:
            return None
        return (1 - self.answer_weight) * full + self.answer_weight * answer

    def _scores(self, conversations: Sequence[Conversation]) -> tuple[list[float], int]:
        """Return the scores of the model, and the number of conversations that were cut."""
        loaded = self.load()
        limit = self.max_length or loaded.max_length
        sequences: list[TokenIds] = []
        groups: dict[str, list[TokenIds]] = {}
        cut = 0
        for conversation, ids in zip(conversations, self.token_ids(conversations), strict=True):
            sequence = tuple(ids)
            if len(ids) > limit:
                sequence = self._cut(conversation, ids, limit)
                cut += 1
            sequences.append(sequence)
            groups.setdefault(json.dumps(conversation[:-1], sort_keys=True, default=str), []).append(sequence)
        scores = loaded.score(list(groups.values()), self.max_batch_tokens, self.prefix_sharing)
        return [scores[ids] for ids in sequences], cut

    def _cut(self, conversation: Conversation, ids: list[int], limit: int) -> TokenIds:
        if self.cut == "prompt":
            return cut_middle(ids, int(ids[0] == self.load().tokenizer.bos_token_id), limit)
        empty = [*conversation[:-1], {**conversation[-1], "content": ""}]
        closing = _common_prefix(ids[::-1], self.token_ids([empty])[0][::-1])
        return cut_middle(ids, limit - min(closing, limit - 1), limit)


def _with_reply(history: Conversation, reply: str) -> Conversation:
    return [*history, {"role": "assistant", "content": reply}]


def cut_middle(ids: Sequence[int], head: int, length: int) -> TokenIds:
    """Return the first `head` and the last `length - head` ids, for head < length <= len(ids)."""
    return (*ids[:head], *ids[len(ids) - (length - head) :])


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    for one, other in zip(first, second):  # noqa: B905 (their lengths differ)
        if one != other:
            break
        length += 1
    return length


def shared_prefix_length(sequences: Sequence[TokenIds]) -> int:
    """Return the length of the longest common prefix that leaves every sequence at least one token of its own.

    The prefix consists of ids, not of rendered text, because a tokenizer may merge the last characters of the template
    with the first ones of the completion.
    """
    # In lexicographic order the first and the last sequence differ no later than any other two.
    common = _common_prefix(min(sequences), max(sequences))
    return min(common, min(map(len, sequences)) - 1)


def length_buckets(
    lengths: Sequence[int], prefix: int, max_tokens: int, forward_cost: int
) -> tuple[float, list[slice]]:
    """Split sequences into the cheapest batches, exactly, by dynamic programming over the last batch.

    Args:
        lengths: lengths in descending order.
        prefix: tokens of cached keys and values before each row.
        max_tokens: largest number of tokens in a batch of more than one row, with the prefix of each row.
        forward_cost: cost of one batch in tokens, in addition to rows * its longest sequence.

    Returns:
        The total cost in tokens, and the batches as slices of `lengths`.
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
    return best[-1], slices


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


class LoadedRewardModel:
    """Reward model in memory, in evaluation mode and without gradients, with its tokenizer."""

    def __init__(self, name: str, network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.chat_template is None:
            fix = "add one to its tokenizer, or name another model"
            raise UserError(name, "its tokenizer has no chat template, so it can't be shown a conversation", fix)
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
        self._forward_cost = _FORWARD_COST_ON_CPU if network.device.type == "cpu" else _FORWARD_COST_ELSEWHERE

    def summary(self) -> str:
        """Return one line for the start of a run: the model, its size and its device."""
        count = sum(p.numel() for p in self.network.parameters())
        size = sum(p.numel() * p.element_size() for p in self.network.parameters())
        dtype = str(self.network.dtype).removeprefix("torch.")
        parameters = f"{count / 1e9:.2f} B parameters in {dtype}, {size / 2**30:.2f} GiB on {self.network.device}"
        return f"reward model {self.name}: {parameters} in every process"

    def encode(self, conversations: Sequence[Conversation], parse_special_tokens: bool = False) -> list[list[int]]:
        """Return the token ids of each conversation under the model's chat template.

        Unless `parse_special_tokens`, special-token strings in a message become ordinary tokens.
        """
        if not conversations:
            return []
        texts = [self._render(conversation) for conversation in conversations]
        encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        for row, conversation in enumerate(conversations):
            forges = any(self._special.search(_content(message)) for message in conversation)
            if forges and not parse_special_tokens:
                encoded[row] = self._encode_as_text(conversation)
        end = getattr(self.network.config, "reward_token_id", None)
        return [ids if end is None or ids[-1:] == [end] else [*ids, end] for ids in encoded]

    def _render(self, conversation: Conversation) -> str:
        text = self.tokenizer.apply_chat_template(
            [{**message, "content": _content(message)} for message in conversation], tokenize=False
        )
        # Tokenizers raise for lone surrogates.
        return cast(str, text).encode("utf-8", errors="replace").decode("utf-8")

    def _encode_as_text(self, conversation: Conversation) -> list[int]:
        """Return the token ids of a conversation whose messages contain special-token strings, read as text.

        A mark replaces each such string while the template is rendered. The special tokens of the rendered text are
        then the template's own. They split the text into pieces, which a tokenizer encodes independently. In each piece
        the strings are put back.
        """
        contents = [_content(message) for message in conversation]
        # The mark is longer than any run of its character, so that no message can contain it.
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
        """Return the ids of a text as ordinary tokens.

        The merges of a tokenizer can build a special token even if none is searched for, such as InternLM2's `<s>`.
        The first character of that string is then encoded by itself.
        """
        ids = self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        built = {self._special_ids[name]: name for name in self._special.findall(text) if len(name) > 1}
        ordinary: list[int] = []
        for i in ids:
            if i in built:
                ordinary += self._without_special(built[i][0]) + self._without_special(built[i][1:])
            else:
                ordinary.append(i)
        return ordinary

    @torch.inference_mode()
    @without_cudnn_attention()
    def score(
        self, groups: Sequence[Sequence[TokenIds]], max_batch_tokens: int, prefix_sharing: bool
    ) -> dict[TokenIds, float]:
        """Return the score of each distinct sequence of token ids, NaN or infinite after an overflow.

        Args:
            groups: sequences that probably share a prefix, such as those of one prompt.
            max_batch_tokens: see `RewardModelScore`.
            prefix_sharing: compute the common prefix of a group once, if the model and the lengths allow it.
        """
        scores: dict[TokenIds, float] = {}
        if self._head is None:
            _warn_once(f"{self.name}: conversations are scored one by one, because {self._obstacle}.")
            for ids in (ids for group in groups for ids in group):
                row = torch.tensor([ids], device=self.network.device)
                output = self.network(input_ids=row, attention_mask=torch.ones_like(row))
                scores[ids] = output.logits[0, 0].float().item()
            return scores
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
        """Return the length of the prefix to share, or 0 if the model can't share it or sharing saves no work."""
        lengths = sorted(map(len, sequences), reverse=True)
        prefix = shared_prefix_length(sequences)
        rest = [length - prefix for length in lengths]
        rest_cost, _ = length_buckets(rest, prefix, max_batch_tokens, self._forward_cost)
        separate_cost, _ = length_buckets(lengths, 0, max_batch_tokens, self._forward_cost)
        if len(sequences) < 2 or prefix + self._forward_cost + rest_cost >= separate_cost:
            return 0
        if lengths[0] > self._shares_up_to:
            reach = f" beyond {self._shares_up_to} tokens" if self._shares_up_to else ""
            _warn_once(f"{self.name}: the common prefix of a group is not shared{reach}, because {self._obstacle}.")
            return 0
        return prefix

    def _score_batches(
        self, sequences: list[TokenIds], prefix: int, cache: DynamicCache | None, max_batch_tokens: int
    ) -> dict[TokenIds, float]:
        ordered = sorted(sequences, key=len, reverse=True)
        lengths = [len(ids) - prefix for ids in ordered]
        _, slices = length_buckets(lengths, prefix, max_batch_tokens, self._forward_cost)
        scores: dict[TokenIds, float] = {}
        for part in slices:
            rows = ordered[part]
            own = copy.deepcopy(cache)
            if own is not None:
                own.batch_repeat_interleave(len(rows))
            hidden = self._last_hidden([ids[prefix:] for ids in rows], own, prefix)
            # In float32: bfloat16 rounds scores around 3 to multiples of 1/64, which the z-score of a group magnifies.
            assert self._head is not None
            bias = None if self._head.bias is None else self._head.bias.float()
            heads = nn.functional.linear(hidden.float(), self._head.weight.float(), bias)
            scores |= zip(rows, heads[:, 0].tolist(), strict=True)
        return scores

    def _last_hidden(self, rows: list[TokenIds], cache: DynamicCache | None, prefix: int = 0) -> torch.Tensor:
        """Return the hidden state (rows, hidden size) of each row's last attended token.

        `cache` holds the keys and values of the `prefix` tokens before the rows. Those of the rows are added to it.
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


def _content(message: Message) -> str:
    """Return the text of a message. Parts are joined, and None is empty."""
    return completion_text([{"content": message.get("content")}])


def _sharing_limit(network: PreTrainedModel) -> tuple[int, str]:
    """Return the longest sequence for which a shared prefix gives the same scores, and the obstacle beyond it."""
    if "past_key_values" not in inspect.signature(network.base_model.forward).parameters:
        return 0, "the model keeps no key-value cache"
    layers = {type(layer) for layer in DynamicCache(config=network.config).layers}
    if not layers <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return 0, "the model has layers whose state is not a list of keys and values"
    config = network.config.get_text_config()
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return 0, "the model attends to later tokens"
    limits = [(sys.maxsize, "")]
    if DynamicSlidingWindowLayer in layers:
        limits.append((config.sliding_window, "the model attends to a sliding window"))
    rotary = getattr(config, "rope_parameters", None) or {}
    # One mapping, or one for each kind of layer.
    ropes = [rotary] if "rope_type" in rotary else [part for part in rotary.values() if isinstance(part, dict)]
    if any(rope.get("rope_type") in ("dynamic", "longrope") for rope in ropes):
        length = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
        limits.append((length, "the model's rotary embedding depends on the total length"))
    return min(limits)


def _default_device() -> torch.device:
    """Return the device that accelerate gave this process, else the accelerator, else the CPU."""
    if "accelerate" in sys.modules:
        from accelerate import PartialState

        # A look at the shared state, because a call of the class would create the state.
        if PartialState._shared_state:
            return PartialState().device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


@functools.cache
def _load(model: str, revision: str | None, dtype: str, device: str) -> LoadedRewardModel:
    folder = internlm2.checkpoint_folder(model, revision)
    config = internlm2.read_config(folder)
    network: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    with _outside_zero3():
        if internlm2.is_internlm2_reward(config):
            network, tokenizer = internlm2.load(folder, dtype=dtype, device=device)
        else:
            network, tokenizer = _load_classifier(model, folder, dtype)
        # mypy takes the decorated `to` of transformers for a function without `self`.
        return LoadedRewardModel(model, network.to(device), tokenizer)  # type: ignore[arg-type]


@contextmanager
def _outside_zero3() -> Iterator[None]:
    """Load a complete copy. While transformers knows of a ZeRO-3 policy, it partitions every model that it builds."""
    from transformers.integrations import deepspeed

    config = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed._hf_deepspeed_config_weak_ref = None
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config


def _load_classifier(name: str, folder: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a native one-label sequence classifier and its tokenizer. Raise UserError if the checkpoint has no head."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        problem = "it needs code from its own repository, which is never run here"
        fix = "use a reward model that transformers has natively, or an InternLM2 one"
        raise UserError(name, problem, fix) from error
    if config.num_labels != 1:
        raise UserError(name, f"it has {config.num_labels} labels, not 1", "name a scalar reward model")
    if not any(folder.glob("*.safetensors")):
        raise UserError(name, "it has no safetensors weights", "choose a revision that has, or save it as such")
    # A reader of a damaged file may raise any error. The tokenizers library raises `Exception` itself.
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        fix = "copy the model's tokenizer files into it"
        raise UserError(name, f"its tokenizer can't be loaded ({one_line(error)})", fix) from error
    try:
        with without_load_report():
            network, report = AutoModelForSequenceClassification.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `check_loaded` names the tensor
            )
    except Exception as error:
        problem = f"it can't be loaded as a sequence classifier ({one_line(error)})"
        raise UserError(name, problem, "download it again, or name another model") from error
    check_loaded(name, report)
    return network, tokenizer
