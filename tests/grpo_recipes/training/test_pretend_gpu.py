"""Training, generation and evaluation on the pretend GPU: no operator mixes devices, and waits are bounded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_recipes import GRPOTrainer
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.generation.groups import Turn, decoding
from grpo_recipes.process import ranks
from grpo_recipes.training import callbacks, tool_turns
from grpo_recipes.training.adamw_bf16 import AdamWBF16
from grpo_rewards.reward_model import RewardModelScore
from tests.support import tiny
from tests.support.grids import only
from tests.support.pretend_gpu import DEVICE, MixedDevices, PretendGPU, PretendTensor
from tests.support.recorded import Recording, make_trainer, model


@pytest.fixture(autouse=True)
def reductions_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reductions of a number over ranks refuse another device, which several processes on GPUs would."""

    def checked(reduce: Callable[..., int], number: int, device: torch.device) -> int:
        assert PretendGPU.current is None or device == DEVICE
        return reduce(number, device)

    for module, name in (
        (tool_turns, "largest_of_ranks"),
        (ranks, "largest_of_ranks"),
        (callbacks, "largest_of_ranks"),
    ):
        monkeypatch.setattr(module, name, functools.partial(checked, getattr(module, name)))


RECORDING = Recording.random(prompts=2, group=4, seed=3)
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Counts:
    """Counts of one training micro-batch: preparation, loss and backward pass."""

    synchronisations: int
    uploads: int


def counts(folder: Path, launches: float | None = None, **config: Any) -> list[Counts]:
    """Return the counts of the micro-batches of two generation batches. Layouts are verified on the first."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": MICRO_BATCHES}
    trainer: Any = make_trainer(GRPOTrainer, RECORDING, model(num_hidden_layers=1), folder, **sizes, **config)
    if launches is not None:
        trainer._log_probs.launches = launches
    found = []
    with PretendGPU() as gpu:
        gpu.adopt(trainer)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = MICRO_BATCHES
        for _ in range(2 * MICRO_BATCHES):
            gpu.reset()
            inputs = trainer._prepare_inputs(RECORDING.rows())
            with trainer.compute_loss_context_manager():  # autocast, with `bf16`
                trainer.compute_loss(trainer.model, inputs).backward()
            trainer._step += 1
            found.append(Counts(gpu.synchronisations, gpu.uploads))
    return found


# ---- The equipment


def test_what_the_equipment_counts() -> None:
    with PretendGPU() as gpu:
        values = torch.arange(4).to("cuda")
        assert isinstance(values, PretendTensor)
        assert (gpu.synchronisations, gpu.uploads) == (1, 1)
        doubled = values[1:].view(1, 3) * 2
        assert gpu.synchronisations == 1
        assert int(doubled.sum()) == 12
        assert doubled.cpu().tolist() == [[2, 4, 6]]
        assert values[values > 1].tolist() == [2, 3]
        assert gpu.synchronisations == 5  # both copies, the sum, the boolean index and the list
        torch.arange(4).pin_memory().to("cuda", non_blocking=True)
        assert (gpu.synchronisations, gpu.uploads) == (5, 2)
        for mixed in (lambda: values + torch.ones(4), lambda: torch.cat([torch.ones(2), values])):
            with pytest.raises(MixedDevices, match=r"test_pretend_gpu\.py"):
                mixed()
    assert PretendGPU.current is None


# ---- Training


@pytest.mark.parametrize("layout", only(["packed"], ["packed", "shared", "trimmed", "padded"]))
def test_training_mixes_no_devices_and_bounds_its_waits(layout: str, tmp_path: Path) -> None:
    # The rows have too few tokens for a second segment to pay otherwise.
    first, later = counts(tmp_path, 1.0 if layout == "shared" else None, micro_batching={"layout": layout})[-2:]
    assert first.synchronisations <= FIRST[layout]
    assert later.synchronisations <= LATER[layout]
    assert later.uploads <= UPLOADS


FIRST = {"packed": 45, "shared": 47, "trimmed": 46, "padded": 44}
"""Largest number of waits in the first micro-batch of a generation batch, by layout. TRL waits 44 times."""

LATER = {"packed": 11, "shared": 14, "trimmed": 12, "padded": 12}
"""Largest number of waits in another micro-batch, by layout. The shared one has three segments, and transformers waits
once for the mask of each."""

UPLOADS = 1
"""Largest number of copies to the device in another micro-batch."""

# ---- Other seams


def test_an_evaluation_and_a_reward_model_compute_on_the_device(tmp_path: Path) -> None:
    policy, tokenizer = tiny.policy(num_hidden_layers=1), tiny.byte_tokenizer()
    prompts, settings = ["2 + 2 =", "1 =", "a longer prompt"], Settings(max_new_tokens=2, batch_size=2)
    answers = Transformers(policy, tokenizer)(prompts, settings)
    tiny.save_reward_model(tmp_path)
    rows: dict[str, Any] = {"prompts": ["What is 2 + 2?"] * 3 + ["Hi."] * 2, "completions": ["4", "five", "", "a", "b"]}
    scores = RewardModelScore(str(tmp_path), device="cpu")(**rows)
    with PretendGPU() as gpu:
        engine = Transformers(policy.to("cuda"), tokenizer)
        assert engine(prompts, settings) == answers
        assert not engine.groups.doubt
        gpu.reset()
        assert RewardModelScore(str(tmp_path), device="cuda")(**rows) == pytest.approx(scores, abs=1e-5)
        assert gpu.uploads > 20, "weights and rows"


def test_a_step_of_adamw_bf16_does_not_wait() -> None:
    policy = model(num_hidden_layers=1).to(torch.bfloat16)
    with PretendGPU() as gpu:
        policy.to("cuda")
        optimizer = AdamWBF16(policy.parameters(), lr=1e-3)

        def check_second_step() -> None:
            for _ in range(2):
                for parameter in policy.parameters():
                    parameter.grad = torch.ones_like(parameter)
                gpu.reset()
                optimizer.step()
            assert gpu.synchronisations == gpu.uploads == 0

        check_second_step()
        stored = optimizer.state_dict()
        for state in stored["state"].values():
            state.update({name: value.cpu() for name, value in state.items()})  # as a checkpoint is loaded
        optimizer.load_state_dict(stored)
        check_second_step()


def test_group_decoding_bounds_its_waits_per_token() -> None:
    """Transformers waits as often."""
    policy = model(num_hidden_layers=1)
    found = []
    with PretendGPU() as gpu:
        policy.to("cuda")
        ids = torch.tensor([[0, 0, 5, 6, 7]] * 2 + [[2, 3, 4, 5, 6]] * 2, device="cuda")
        for tokens in (2, 4):
            gpu.reset()
            turn = Turn(record_every=2)
            lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
            with decoding(policy, turn):
                policy.generate(input_ids=ids, attention_mask=(ids != 0).long(), do_sample=False, **lengths)
            assert not turn.declined
            found.append((gpu.synchronisations, gpu.uploads))
    (waits, uploads), (more_waits, more_uploads) = found
    assert (waits, uploads) <= (21, 9)
    assert more_waits - waits <= 2 * 2, "two waits per token of all rows"
    assert more_uploads == uploads
