"""Training, generation and evaluation on the pretend GPU: no operator mixes devices, and waits are bounded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.generation.groups import Turn, decoding
from grpo_recipes.training import callbacks, layout_check, tool_turns
from grpo_recipes.training.adamw_bf16 import AdamWBF16
from grpo_rewards.reward_model import RewardModelScore
from tests.support import short_runs, tiny
from tests.support.grids import only
from tests.support.pretend_gpu import DEVICE, MixedDevices, PretendGPU, PretendTensor
from tests.support.recorded import Recording, make_trainer, model
from tests.support.short_runs import PROMPTS


@pytest.fixture(autouse=True)
def reductions_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reductions of a number over ranks refuse another device, which several processes on GPUs would."""

    def checked(reduce: Callable[..., int], number: int, device: torch.device) -> int:
        assert PretendGPU.current is None or device == DEVICE
        return reduce(number, device)

    for module, name in (
        (tool_turns, "largest_of_ranks"),
        (layout_check, "on_any_rank"),
        (callbacks, "largest_of_ranks"),
    ):
        monkeypatch.setattr(module, name, functools.partial(checked, getattr(module, name)))


RECORDING = Recording.random(prompts=2, group=4, seed=3)
MICRO_BATCHES = 2


@dataclass(frozen=True)
class Counts:
    """Counts of one training micro-batch: preparation, loss and backward pass."""

    launches: int
    synchronisations: int
    uploads: int
    loss: float


def counts(cls: type[TRLGRPOTrainer], folder: Path, launches: float | None = None, **config: Any) -> list[Counts]:
    """Return the counts of the micro-batches of two generation batches. Layouts are verified on the first."""
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": MICRO_BATCHES}
    trainer: Any = make_trainer(cls, RECORDING, model(num_hidden_layers=1), folder, **sizes, **config)
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
                loss = trainer.compute_loss(trainer.model, inputs)
            loss.backward()
            trainer._step += 1
            found.append(Counts(gpu.launches, gpu.synchronisations, gpu.uploads, loss.host.item()))
    return found


# ---- The equipment


def test_what_the_equipment_counts() -> None:
    with PretendGPU() as gpu:
        values = torch.arange(4).to("cuda")
        assert isinstance(values, PretendTensor)
        assert (gpu.launches, gpu.synchronisations, gpu.uploads) == (0, 1, 1)
        doubled = values[1:].view(1, 3) * 2  # views launch nothing
        assert (gpu.launches, gpu.synchronisations) == (1, 1)
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
    stock = counts(TRLGRPOTrainer, tmp_path / "trl")
    # The rows have too few tokens for a second segment to pay otherwise.
    launches = 1.0 if layout == "shared" else None
    ours = counts(GRPOTrainer, tmp_path / "ours", launches, micro_batching={"layout": layout})
    # The rows of a generation batch are distributed differently, and its loss stays the same.
    assert sum(count.loss for count in ours) == pytest.approx(sum(count.loss for count in stock), abs=1e-5)
    first, later = ours[MICRO_BATCHES], ours[MICRO_BATCHES + 1]
    assert [count.synchronisations for count in stock[MICRO_BATCHES:]] == STOCK
    assert first.synchronisations <= FIRST[layout]
    assert later.synchronisations <= LATER[layout]
    assert later.uploads <= UPLOADS
    assert later.launches <= LAUNCHES[layout]


STOCK = [44, 12]
"""Waits of TRL in the first and in the second micro-batch of a generation batch."""

FIRST = {"packed": 45, "shared": 47, "trimmed": 46, "padded": 44}
"""Largest number of waits in the first micro-batch of a generation batch, by layout."""

LATER = {"packed": 11, "shared": 14, "trimmed": 12, "padded": 12}
"""Largest number of waits in another micro-batch, by layout. The shared one has three segments, and transformers waits
once for the mask of each."""

UPLOADS = 1
"""Largest number of copies to the device in another micro-batch."""

LAUNCHES = {"packed": 380, "shared": 670, "trimmed": 365, "padded": 362}
"""Largest number of launches in another micro-batch of a model of one layer, by layout. TRL's takes 360."""


# ---- Whole runs: generation, its check, the layout check, the update and its sample


EVALUATED_RUN = {"eval_strategy": "steps", "eval_steps": 2}
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int, int]]] = {
    "generated": ({}, {}, (7_830, 489, 143)),
    "evaluated": (EVALUATED_RUN, {"eval_dataset": PROMPTS.select(range(4))}, (13_050, 694, 207)),
}
"""Arguments of runs of two steps, with the launches, waits and copies to the device that each must not exceed. About
270 of the waits belong to the check of the layout, once in a run."""


def check_at_most(gpu: PretendGPU, most: tuple[int, int, int]) -> None:
    """Check launches, waits and copies to the device."""
    found = (gpu.launches, gpu.synchronisations, gpu.uploads)
    assert all(count <= limit for count, limit in zip(found, most, strict=True)), (found, gpu.sites)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_mixes_no_devices(name: str, tmp_path: Path) -> None:
    given, more, most = RUNS[name]
    policy = tiny.policy(vocab_size=258, num_hidden_layers=1)
    policy.save_pretrained(tmp_path / "policy")
    policy.config._name_or_path = str(tmp_path / "policy")
    arguments = short_runs.arguments(tmp_path / "run", max_steps=2, **given)
    trainer = short_runs.trainer(GRPOTrainer, policy, arguments, **more)
    with PretendGPU() as gpu:
        gpu.adopt(trainer)
        trainer.train()
        assert all(parameter.is_cuda for parameter in trainer.model.parameters())
        check_at_most(gpu, most)


# ---- Other seams


def test_an_evaluation_in_padded_batches_bounds_its_waits_per_token() -> None:
    policy, tokenizer = tiny.policy(num_hidden_layers=1), tiny.byte_tokenizer()
    prompts = ["2 + 2 =", "1 =", "a longer prompt"]
    settings = Settings(max_new_tokens=4, batch_size=2)
    expected = Transformers(policy, tokenizer)(prompts, settings)
    with PretendGPU() as gpu:
        policy.to("cuda")
        engine = Transformers(policy, tokenizer)
        assert engine(prompts, settings) == expected
        assert not engine.stock_because

        def generate(tokens: int) -> None:
            engine(prompts[:2], replace(settings, max_new_tokens=tokens))

        check_counts_of_tokens(gpu, generate, EVALUATED)


EVALUATED = (245, 26, 13)
"""Launches, waits and copies to the device of an evaluation that generates two tokens."""


def test_a_reward_model_scores_groups_on_the_device(tmp_path: Path) -> None:
    tiny.save_reward_model(tmp_path)
    prompts = ["What is 2 + 2?"] * 3 + ["Say hi."] * 2
    completions = ["4", "five <answer>5</answer>", "", "hi", "hello"]
    expected = RewardModelScore(str(tmp_path), device="cpu")(prompts=prompts, completions=completions)
    with PretendGPU() as gpu:
        scores = RewardModelScore(str(tmp_path), device="cuda")(prompts=prompts, completions=completions)
        assert scores == pytest.approx(expected, abs=1e-5)
        check_at_most(gpu, (116, 29, 26))  # 23 waits and 21 copies for the weights
        assert gpu.uploads > 20


def test_adamw_bf16_stays_on_the_device_in_few_launches() -> None:
    policy = model(num_hidden_layers=1).to(torch.bfloat16)
    copies = [torch.nn.Parameter(parameter.detach().float()) for parameter in policy.parameters()]
    with PretendGPU() as gpu:

        def of_a_step(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> int:
            """Return the launches of a second step, and check that it waits for nothing."""
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
                gpu.reset()
                optimizer.step()
            assert gpu.synchronisations == gpu.uploads == 0
            return gpu.launches

        policy.to("cuda")
        ours = list(policy.parameters())
        theirs = [torch.nn.Parameter(copy.to("cuda")) for copy in copies]
        stock = of_a_step(torch.optim.AdamW(theirs, lr=1e-3, foreach=True), theirs)
        optimizer = AdamWBF16(ours, lr=1e-3)
        assert of_a_step(optimizer, ours) <= 1.5 * stock
        stored = optimizer.state_dict()
        for state in stored["state"].values():
            state.update({name: value.cpu() for name, value in state.items()})  # as a checkpoint is loaded
        optimizer.load_state_dict(stored)
        of_a_step(optimizer, ours)


def test_group_decoding_bounds_its_waits_per_token() -> None:
    policy = model(num_hidden_layers=1)
    with PretendGPU() as gpu:
        policy.to("cuda")
        ids = torch.tensor([[0, 0, 5, 6, 7]] * 2 + [[2, 3, 4, 5, 6]] * 2, device="cuda")
        mask = (ids != 0).long()

        def generate(tokens: int) -> None:
            turn = Turn(record_every=2)
            lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
            with decoding(policy, turn):
                policy.generate(input_ids=ids, attention_mask=mask, do_sample=False, **lengths)
            assert not turn.declined

        check_counts_of_tokens(gpu, generate, DECODED)


DECODED = (232, 20, 9)
"""Launches, waits and copies to the device of a call that decodes two tokens of each row."""

PER_TOKEN = (104, 2, 0)
"""The same per token of all rows, for a model of one layer. Transformers waits as often."""


def check_counts_of_tokens(gpu: PretendGPU, generate: Callable[[int], None], of_two: tuple[int, int, int]) -> None:
    """Check the counts of a function that generates a number of tokens: for two tokens, and for each further one."""
    found = []
    for tokens in (2, 4):
        gpu.reset()
        generate(tokens)
        found.append([gpu.launches, gpu.synchronisations, gpu.uploads])
    for few, more, most, most_per_token in zip(*found, of_two, PER_TOKEN, strict=True):
        assert few <= most, (found, gpu.sites)
        assert (more - few) / 2 <= most_per_token, (found, gpu.sites)
