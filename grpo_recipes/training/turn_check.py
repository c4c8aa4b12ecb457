"""Part of the generator check for completions of several turns: are the tokens in training those that were sampled?

A tool loop, or a `rollout_func`, puts turns and results together. A mask that is shifted by one token, or a turn that
is tokenized again, raises no error: the policy is then trained on tokens that it has never sampled. After each
generation batch the proof of `tools/transcript.py` runs on the token IDs, log-probabilities and results of all rows,
and renders and parses the messages of some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, cast

from accelerate.logging import get_logger

from grpo_recipes.generation.generator_check import compare_every
from grpo_recipes.generation.stop_strings import StopStrings
from grpo_recipes.process.faults import NotThePolicy
from grpo_recipes.process.messages import Announcer
from grpo_recipes.process.ranks import gather
from grpo_recipes.tools.loop import Ids, Message, Row, read_turn
from grpo_recipes.tools.transcript import Fault, Proof, TokenKey, Transcript, Turns
from grpo_recipes.training.tool_turns import tools_of_rows

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer

OWN_ENDS = frozenset({"max_new_tokens", "max_tokens", "max_length", "max_time", "stop_token_ids", "eos_token_id"})
"""Keys of `generation_kwargs` by which a turn may end without an end token that is known here."""

logger = get_logger(__name__)


class TurnCheck:
    """Check of the turns of each generation batch.

    Args:
        trainer: the trainer.
        stop: strings that end a turn, or None.
        enabled: False if nothing is checked.
    """

    def __init__(self, trainer: TRLTrainer, stop: StopStrings | None, enabled: bool) -> None:
        self.trainer, self.stop, self.enabled = trainer, stop, enabled
        self.all_messages = False
        """True to prove the messages of all rows of every batch, as tests do."""
        self.batches = 0
        """Number of batches of this launch that were checked."""
        self._turns: Turns | None = None
        self._prompts: Sequence[Sequence[Message]] = ()
        self._proven: dict[tuple[TokenKey, TokenKey], set[TokenKey]] = {}
        """Masks of the rows that were proven and not yet trained on, by prompt and completion."""
        self._announcer = Announcer(logger.warning)

    @property
    def is_needed(self) -> bool:
        """True if completions may have several turns. The same on every rank."""
        return self.enabled and bool(self.trainer.tools or self.trainer.rollout_func is not None)

    def start(self, prompts: Sequence[Sequence[Message]]) -> None:
        """Record the turns from here on, those of a new generation batch with these prompts."""
        self._turns = Turns() if self.is_needed else None
        self._prompts = prompts

    def record(
        self,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]] | None,
    ) -> None:
        """Record one call of the generator."""
        if self._turns is not None:
            self._turns.record(prompts, completions, log_probs)

    def __call__(self, output: tuple[Any, ...], played: Sequence[Row]) -> None:
        """Check the turns of a generation batch. Collective.

        Args:
            output: the return value of TRL's `_generate`.
            played: rows of the tool loop, or none if TRL's own loop ran.

        Raises:
            NotThePolicy: on every rank, if a token of any rank is neither sampled nor rendered as its mask says.
        """
        turns, self._turns = self._turns, None
        if turns is None:
            return
        prompt_ids, completion_ids, tool_mask, completions, log_probs, *_ = output
        fault = None
        if tool_mask is not None:
            fault = self._first_fault(turns, prompt_ids, completion_ids, tool_mask, completions, log_probs, played)
        elif self.trainer.tools:  # a `rollout_func` of single turns returns none
            fault = Fault(0, 0, "there is no mask of tool tokens")
        self._raise_first("does not consist of the turns that were sampled and their tool results", fault)
        self.batches += 1
        if self.trainer.model.training:
            for prompt, ids, mask in zip(prompt_ids, completion_ids, tool_mask or (), strict=tool_mask is not None):
                self._proven.setdefault((tuple(prompt), tuple(ids)), set()).add(tuple(mask))

    def check_micro_batches(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Check that the micro-batches of a generation batch hold rows that were proven. Collective.

        Raises:
            NotThePolicy: on every rank, if a row of any rank has other tokens or another mask.
        """
        if not self.is_needed:
            return
        proven, self._proven = self._proven, {}
        fault = None
        for number, batch in enumerate(batches if proven else ()):
            fault = fault or _training_fault(number, batch, proven)
        self._raise_first("is trained on otherwise than it was generated", fault)

    def _raise_first(self, what: str, fault: object) -> None:
        """Raise the fault of the first rank that has one. Collective."""
        faults = gather(None if fault is None else str(fault))
        for rank, found in enumerate(faults):
            if found is not None:
                where = f" of rank {rank}" if len(faults) > 1 else ""
                raise NotThePolicy(
                    f"a completion{where} at step {self.trainer.state.global_step} {what}: {found}; set "
                    "`generation_check: false` to go on anyway"
                )

    def _first_fault(
        self,
        turns: Turns,
        prompt_ids: Sequence[Ids],
        completion_ids: Sequence[Ids],
        tool_mask: Sequence[Sequence[int]],
        completions: Sequence[list[Message]],
        log_probs: Sequence[Sequence[float]] | None,
        played: Sequence[Row],
    ) -> Fault | None:
        """Return the first fault of this rank's rows, or None."""
        proof = self._proof(turns)
        tools = tools_of_rows(self.trainer) if self.trainer.tools else []
        rows = []
        for number, (prompt, ids, mask) in enumerate(zip(prompt_ids, completion_ids, tool_mask, strict=True)):
            row = Transcript(number, prompt, ids, mask, None)
            if tools:
                row.messages, row.tools = completions[number], tools[number].schemas
                row.prompt_messages = None if self.trainer._is_vlm else self._prompts[number]
                row.log_probs = None if log_probs is None else log_probs[number]
                row.played = played[number] if played else None
            if proof.covers(row):
                rows.append(row)
        if len(rows) < len(prompt_ids):
            self._announcer.once(
                "whether the tokens of all turns are those that were sampled is not checked: some turns were not "
                "generated by the trainer's `_generate_single_turn`",
            )
        chosen = self._rows_of_messages(rows)
        for row in rows:
            if fault := proof(row, row.number in chosen):
                return fault
        return proof.count(rows)

    def _rows_of_messages(self, rows: Sequence[Transcript]) -> set[int]:
        """Return the rows whose messages are rendered and parsed: all of the first batch, then a few."""
        numbers = [row.number for row in rows if row.messages is not None]
        if self.all_messages or self.batches == 0:
            return set(numbers)
        # Rows without a tool result have little to prove. Each batch takes others, so that none is left out for ever.
        numbers = [row.number for row in rows if row.messages is not None and len(row.messages) > 1]
        every = compare_every(len(rows)) if rows else 1
        return set(numbers[self.batches % every :: every])

    def _proof(self, turns: Turns) -> Proof:
        trainer = self.trainer
        return Proof(
            turns=turns,
            longest=trainer.max_completion_length,
            decode=trainer._tokenizer.decode,
            parse=partial(read_turn, trainer._tokenizer),
            render=trainer._get_tool_suffix_ids,
            render_prompt=self._render_prompt,
            ends=self._ends,
            in_order=trainer.rollout_func is None,
        )

    def _render_prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> Ids:
        trainer = self.trainer
        return trainer._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,  # Llama's template announces tools for an empty list
            chat_template=trainer.chat_template,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **cast(dict[str, Any], trainer.chat_template_kwargs),
        )

    def _ends(self, ids: Ids) -> bool:
        """Return True if a turn ends with an end token or a stop string, or may end without one."""
        if not OWN_ENDS.isdisjoint(self.trainer.args.generation_kwargs or {}):
            return True
        return bool(ids) and (ids[-1] in self.trainer.eos_token_ids or bool(self.stop and self.stop.end(ids)))


def _training_fault(
    number: int, batch: Mapping[str, Any], proven: Mapping[tuple[TokenKey, TokenKey], set[TokenKey]]
) -> str | None:
    """Return the fault of the first row of a micro-batch that was not proven, or None."""
    if "tool_mask" not in batch:
        return f"micro-batch {number} has no mask of tool tokens"
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask")
    columns = [batch[name].tolist() for name in names]
    for row, (prompt, is_prompt, ids, is_completion, padded_mask) in enumerate(zip(*columns, strict=True)):
        mask = tuple(compress(padded_mask, is_completion))
        if not any(mask):  # a truncated completion, or one without an advantage
            continue
        masks = proven.get((tuple(compress(prompt, is_prompt)), tuple(compress(ids, is_completion))))
        if masks is None:
            return f"row {row} of micro-batch {number} has tokens that no completion of the generation batch has"
        if mask not in masks:
            return f"row {row} of micro-batch {number} has another mask of tool tokens"
    return None
