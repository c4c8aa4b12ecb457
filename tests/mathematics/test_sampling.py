"""`sampling: {informative: unbiased}`: the expected gradient over all draws is that of the full generation batch.

One generation of four prompts is sampled and scored once. Then our trainer trains on each possible draw from it. TRL's
generation and scoring are replaced by what was recorded for the drawn prompts. Skipping rows, weighting, regrouping and
TRL's loss are the real ones. The gradients, weighted by the probabilities of the draws, are compared with the oracle's
gradient of all rows, which knows nothing of sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.training import prompt_sampler
from grpo_recipes.training.prompt_sampler import Draw, inclusion, systematic
from tests.mathematics import oracle
from tests.mathematics.harness import (
    NUM_GENERATIONS,
    PROMPTS,
    REWARDS,
    WEIGHTS,
    Difference,
    difference,
    edited,
    float64_model,
    make_trainer,
    moved,
    token_lists,
)
from tests.mathematics.oracle import Completion, Geometry, Objective
from tests.support.grids import covering

LIMIT = 1e-10
UNBIASED = {"informative": "unbiased", "exploration": 0.5, "floor": 0.2}
UNVARIED = (1, 0, 5, 2)  # probabilities 1/2, 1, floor, 1/4, raised until they sum to 2
ROWS = [{"prompt": prompt} for prompt in PROMPTS for _ in range(NUM_GENERATIONS)]

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "sapo": {"loss_type": "sapo"},
}


@dataclass
class Recorded:
    """A generation batch as TRL made it, and the policy that is then trained on it."""

    trainer: Any
    rows: dict[str, Any]
    rewards: dict[str, list[float]]

    def of(self, trainer: Any, rows: list[dict[str, str]]) -> dict[str, Any]:
        """Return and log what TRL would have for these rows, which are complete groups in any order."""
        prompts = [row["prompt"] for row in rows[::NUM_GENERATIONS]]
        places = [
            PROMPTS.index(prompt) * NUM_GENERATIONS + member for prompt in prompts for member in range(NUM_GENERATIONS)
        ]
        for name, values in self.rewards.items():
            trainer._logs["rewards"][name].extend(values[place] for place in places)

        def pick(value: Any) -> Any:
            return value[places] if isinstance(value, Tensor) and value.ndim > 0 else value

        return {name: pick(value) for name, value in self.rows.items()}


def recorded(checkpoint: Path, steps: int, micro_batching: Any = "auto", **objective: Any) -> Recorded:
    """Return a generation of all prompts, and a trainer whose policy has moved, so that ratios clip on both sides."""
    trainer = make_trainer(
        checkpoint,
        torch.float64,
        trainer=partial(GRPOTrainer, sampling=UNBIASED, micro_batching=micro_batching),
        per_device_train_batch_size=len(ROWS) // steps,
        gradient_accumulation_steps=steps,
        beta=0.0,
        **objective,
    )
    trainer._get_train_sampler()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = steps
    torch.manual_seed(39)
    rows = TRLGRPOTrainer._generate_and_score_completions(trainer, ROWS)
    rewards = {name: list(values) for name, values in trainer._logs["rewards"].items()}
    policy = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    old = log_probs(trainer, policy, rows)
    trainer.model.load_state_dict(moved(trainer.model, seed=1, size=0.08))
    return Recorded(trainer, {**rows, "old_per_token_logps": old}, rewards)


def double(trainer: Any, state: dict[str, Tensor]) -> Any:
    model = type(trainer.model)(trainer.model.config).double()
    model.load_state_dict({name: value.double() for name, value in state.items()})
    return model


def log_probs(trainer: Any, state: dict[str, Tensor], rows: dict[str, Any]) -> Tensor:
    """Return the oracle's log-probabilities of every completion, (B, T), 0 after its end."""
    model, padded = double(trainer, state), torch.zeros_like(rows["completion_ids"], dtype=torch.float64)
    with float64_model(), torch.no_grad():
        for place, (prompt, tokens) in enumerate(token_lists(rows)):
            padded[place, : len(tokens)] = oracle.token_statistics(model, prompt, tokens, 1.0)[0]
    return padded


def oracle_loss(case: Recorded, objective: Objective, scale: str) -> tuple[Any, Tensor]:
    """Return the oracle's policy and its loss of all rows in one micro-batch."""
    model = double(case.trainer, case.trainer.model.state_dict())
    scores = [list(row) for row in zip(*(case.rewards[name.__name__] for name in REWARDS), strict=True)]
    scores = [[None if value != value else value for value in row] for row in scores]
    advantages = oracle.advantages(scores, WEIGHTS, NUM_GENERATIONS, scale)
    with float64_model():
        rows = []
        for place, (prompt, tokens) in enumerate(token_lists(case.rows)):
            row = Completion(prompt, tokens, advantages[place], *oracle.token_statistics(model, prompt, tokens, 1.0))
            row.old = case.rows["old_per_token_logps"][place, : len(tokens)]
            rows.append(row)
    return model, oracle.micro_batch_loss(rows, objective, Geometry(), sum(row.length for row in rows))


def all_draws(unvaried: tuple[int, ...]) -> Iterator[tuple[Draw, float]]:
    """Yield every draw of the four prompts with its probability, one per interval of starts."""
    probabilities = inclusion(np.array(unvaried), prompt_sampler.SamplingSpec.parse(UNBIASED), 1)
    cuts = sorted({0.0, 1.0, *np.cumsum(probabilities[probabilities < 1]) % 1.0})
    for low, high in pairwise(cuts):
        drawn = systematic(probabilities, (low + high) / 2)
        yield Draw(np.arange(4), probabilities, drawn, np.zeros(4, bool)), high - low


def expected(
    case: Recorded, steps: int, unvaried: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[float, int]:
    """Return the expected loss over all draws and their number, and leave its gradient in the trainer's model."""
    trainer, loss, draws = case.trainer, 0.0, list(all_draws(unvaried))
    monkeypatch.setattr(TRLGRPOTrainer, "_generate_and_score_completions", lambda self, rows: case.of(self, rows))
    trainer.model.zero_grad()
    for draw, chance in draws:
        trainer._prompts.sampler.draws, trainer._prompts.position = [draw], 0
        trainer._buffered_inputs, trainer._step = None, 0
        order = draw.rows(NUM_GENERATIONS, 1)
        for _ in range(steps):
            inputs = trainer._prepare_inputs([{"prompt": PROMPTS[place]} for place in order])
            part = chance * trainer.compute_loss(trainer.model, inputs)
            part.backward()
            loss += part.item()
            trainer._step += 1
    return loss, len(draws)


def compare(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    steps: int,
    unvaried: tuple[int, ...] = UNVARIED,
    **objective: Any,
) -> Difference:
    case = recorded(checkpoint, steps, **objective)
    loss, draws = expected(case, steps, unvaried, monkeypatch)
    assert draws >= 2
    keys = {key: value for key, value in objective.items() if key in asdict(Objective())}
    model, of_all_rows = oracle_loss(case, Objective(**keys), objective.get("scale_rewards", "group"))
    return difference(model, [of_all_rows], case.trainer.model, [loss])


@pytest.mark.one_case_in(3)
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss_type", CASES)
def test_the_expected_gradient_is_that_of_the_full_generation(
    loss_type: str, steps: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, record_cell: Callable
) -> None:
    found = compare(checkpoint, monkeypatch, steps=steps, **CASES[loss_type])
    assert found.loss <= LIMIT, found
    assert found.gradient <= LIMIT, found
    record_cell("unbiased sampling, all draws, float64", found)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("loss_type", "level", "scale", "unvaried"),
    covering(
        CASES,
        ["token", "sequence"],
        ["group", "none"],
        [(1, 1, 1, 1), (3, 2, 1, 0), (9, 9, 0, 9)],
        rest=pytest.mark.nightly,
    ),
    ids=str,
)
def test_the_expected_gradient_with_other_options_and_draws(
    loss_type: str, level: str, scale: str, unvaried: tuple[int, ...], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"loss_type": loss_type, "scale_rewards": scale, "importance_sampling_level": level}
    found = compare(
        checkpoint,
        monkeypatch,
        steps=2,
        unvaried=unvaried,
        micro_batching="off",
        delta=3.0,
        epsilon_high=0.3,
        **options,
    )
    assert found.loss <= LIMIT, found
    assert found.gradient <= LIMIT, found


FAULTS = {
    "advantages are not divided by the probability": ("weights / self.probabilities[self.drawn]", "weights"),
    "the divisor is of what was generated": ("self.share)", "1.0)"),
    "the weights are of the first prompts, not of those drawn": (
        "self.probabilities[self.drawn]",
        "self.probabilities[: len(weights)]",
    ),
}


@pytest.mark.one_case_in(3)
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with edited(Draw, "weights", FAULTS[fault]):
        found = compare(checkpoint, monkeypatch, steps=1, **CASES["grpo"])
    assert found.gradient > 1e-3, found
