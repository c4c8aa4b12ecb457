"""The tool loop of a trainer: `tools/loop.py` with the trainer's generator, parser, template, tools and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger

from grpo_recipes.checks.tools import check_unique
from grpo_recipes.generation.sampling import random_state_kept
from grpo_recipes.process.faults import RunFault
from grpo_recipes.process.messages import Announcer
from grpo_recipes.process.ranks import gather, largest_of_ranks, on_first_rank
from grpo_recipes.recipe.specs import ToolLimits
from grpo_recipes.tools.loop import (
    Ids,
    Message,
    Row,
    RowTools,
    ToolLoop,
    TurnLimits,
    Values,
    beginning,
    drop_abandoned,
    read_turn,
    result_text,
)
from grpo_recipes.tools.metrics import counts_of, last_calls, metrics
from grpo_recipes.tools.run import Call, FailureWindow, Result, ToolRunner
from grpo_recipes.training.callbacks import StopOnSignal
from grpo_rewards.errors import UserError

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer

logger = get_logger(__name__)


class ToolTurns:
    """Tool loop of a trainer.

    Args:
        trainer: the trainer.
        limits: limits on each call.

    Raises:
        UserError: two tools of a row have one name, or the policy reads images and there are several ranks.
    """

    def __init__(self, trainer: TRLTrainer, limits: ToolLimits) -> None:
        self.trainer, self.limits = trainer, limits
        self.rows: list[Row] = []
        """Rows of the last generation batch."""
        cut = result_text(trainer._tokenizer, limits.result_tokens)
        # Async tools and async rewards share TRL's event loop.
        loop = getattr(trainer, "async_loop", None)
        self.runner = ToolRunner(limits, cut, loop=loop, is_stopping=self._is_stopping)
        self._failures = FailureWindow(limits.failures)
        self._announcer = Announcer(logger.warning)
        self._positions: float | None = None
        if trainer.environment_factories is not None:
            for tools in trainer._env_tools.values():
                check_unique(tool.__name__ for tool in tools)
        if trainer.tools and trainer._is_vlm:
            self._check_one_process()

    def are_trls(self, multimodal_fields: dict[str, Any]) -> bool:
        """Return True if TRL's own loop has to run, because prompts hold more than token IDs.

        Raises:
            UserError: there are several ranks.
        """
        if not (self.trainer._is_vlm or multimodal_fields):
            return False
        self._check_one_process()
        self._announcer.once(
            "the tools of a policy that reads images are called by TRL's own loop, without `tool_limits`"
        )
        return True

    def __call__(
        self,
        prompt_ids: Sequence[Ids],
        completion_ids: Sequence[Ids],
        completions: Sequence[list[Message]],
        log_probs: Sequence[list[float]] | None,
    ) -> Values:
        """Run the turns of a generation batch after its first, and return TRL's values. Collective.

        Raises:
            RunFault: on every rank, if the share of calls that failed is above the limit.
        """
        trainer = self.trainer
        if self._positions is None:
            self._positions = positions(trainer)
        self._warn_of_short_context(max(map(len, prompt_ids)), self._positions)
        loop = ToolLoop(
            generate=self._generate,
            parse=partial(read_turn, trainer._tokenizer),
            render=trainer._get_tool_suffix_ids,
            shorten=partial(beginning, trainer._tokenizer),
            run=self._run,
            limits=TurnLimits(trainer.max_tool_calling_iterations, trainer.max_completion_length, self._positions),
            largest=partial(largest_of_ranks, device=trainer.accelerator.device),
            padding=trainer._tokenizer.pad_token_id,
        )
        self.rows = []
        for number, tools in enumerate(tools_of_rows(trainer)):
            row_log_probs = None if log_probs is None else log_probs[number]
            row = Row(prompt_ids[number], completion_ids[number], completions[number], tools, row_log_probs)
            self.rows.append(row)
        values = loop(self.rows)
        if trainer.environment_factories is not None:
            # `trainer.environments`, which the rewards of this batch read, keeps them.
            drop_abandoned(trainer._environment_pool, trainer.environments, self.rows)
        self._finish()
        return values

    def _run(self, calls: Sequence[Sequence[Call]]) -> list[list[Result]]:
        """Run the calls of each row without an effect on what is sampled next, and return the results of each row."""
        with random_state_kept():
            return self.runner.run(calls)

    def _generate(self, prompts: list[Ids]) -> tuple[list[Ids], list[list[float]] | None]:
        # Each row has a history of its own, so there is one completion per prompt.
        return self.trainer._generate_single_turn(prompts, None, {}, num_generations=1)

    def _is_stopping(self) -> bool:
        callbacks = self.trainer.callback_handler.callbacks
        return any(isinstance(one, StopOnSignal) and one.requested for one in callbacks)

    def _warn_of_short_context(self, longest: int, readable: float) -> None:
        """Warn if the turns of a prompt of `longest` tokens have less than `max_completion_length` at a server."""
        trainer = self.trainer
        if not is_at_server(trainer) or readable > longest + trainer.max_completion_length:
            return
        self._announcer.once(
            f"the vLLM server's context is too small for all turns of a prompt of {longest} tokens, and completions "
            "that call tools may end early: start the server with a `--max-model-len` of at least the prompt and twice "
            f"`max_completion_length`, {longest + 2 * trainer.max_completion_length}",
            "context",
        )

    def _finish(self) -> None:
        """Log the metrics of all ranks' rows, and stop the run if too many of their calls failed. Collective."""
        # One gather, because ranks wait for each other in each.
        ranks = gather((counts_of(self.rows), last_calls(self.rows)))
        logged = self.trainer._metrics["train" if self.trainer.model.training else "eval"]
        for name, value in metrics([counts for counts, _ in ranks]).items():
            logged[name].append(value)
        self._failures.add([calls for _, calls in ranks])
        for sentence in self._failures.without_success():
            logger.warning(sentence)
        if reason := self._failures.reason_to_stop():
            raise RunFault(reason)

    def _check_one_process(self) -> None:
        if self.trainer.accelerator.num_processes > 1:
            problem = "one process is needed if a policy reads images, or ranks would wait for those with more turns"
            raise UserError("tools", problem, "use one process, or a policy of text")


def tools_of_rows(trainer: TRLTrainer) -> list[RowTools]:
    """Return the tools of each row of a generation batch, which TRL has collected."""
    found = []
    for number, (sync, later) in enumerate(zip(trainer._sync_tool_dicts, trainer._async_tool_dicts, strict=True)):
        schemas: Sequence[Any] = trainer.tools
        if trainer.environment_factories is not None:
            schemas = trainer._env_tools[trainer._batch_environments[number]]
        found.append(RowTools({**later, **sync}, schemas))  # TRL looks a name up among the sync tools first
    return found


def is_at_server(trainer: TRLTrainer) -> bool:
    """Return True if a vLLM server generates."""
    return trainer.use_vllm and trainer.vllm_mode == "server"


def positions(trainer: TRLTrainer) -> float:
    """Return the number of tokens that the generator of a trainer can read. Collective."""
    if is_at_server(trainer):
        # TRL asks for `max_completion_length` tokens in every turn, also where fewer are left, and a server refuses a
        # request whose prompt and `max_tokens` exceed its context.
        engine = trainer.vllm_generation  # which has a client on the first rank only
        context = on_first_rank(lambda: engine.vllm_client.get_server_info()["model_config"]["max_model_len"])
        return context - trainer.max_completion_length + 1
    if trainer.use_vllm:
        return trainer.vllm_generation.llm.llm_engine.model_config.max_model_len
    # Some architectures have no such limit, as Bloom.
    return getattr(trainer.model.config, "max_position_embeddings", None) or float("inf")
