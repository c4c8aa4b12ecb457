"""Training, generation and evaluation on the pretend GPU: no operator mixes devices, and waits are bounded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import TrainerCallback
from transformers.cache_utils import DynamicLayer
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.generation.groups import Turn, decoding
from grpo_recipes.generation.hypotheses import Processing
from grpo_recipes.generation.kv_cache import FullBuffer
from grpo_recipes.recipe.specs import OfflineSpec
from grpo_recipes.training import buckets, callbacks, layout_check, tool_turns, varlen
from grpo_recipes.training.adamw_bf16 import CHANGED, EXPECTED, AdamWBF16, UpdateSample
from grpo_recipes.training.offline import RecordedRollout, recorded_reward
from grpo_recipes.training.reference import kl_to_reference
from grpo_recipes.training.varlen import TRIAL_SPANS
from grpo_rewards.reward_model import RewardModelScore
from tests.support import short_runs, tiny
from tests.support.grids import only
from tests.support.pretend_gpu import DEVICE, MixedDevices, PretendGPU, PretendTensor
from tests.support.recorded import Recording, make_trainer, model
from tests.support.short_runs import PROMPTS
from tests.support.tool_rollouts import ADD, CASES, UNFIT, UNKNOWN, add, tool_policy, tool_tokenizer, transcript_reward
from tests.support.varlen_kernel import VERSIONS, on_pretend_gpu


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


def counts(
    cls: type[TRLGRPOTrainer], folder: Path, architecture: dict[str, Any] | None = None, **config: Any
) -> list[Counts]:
    """Return the counts of the micro-batches of two generation batches. Layouts are verified on the first."""
    trainer: Any = make_trainer(
        cls,
        RECORDING,
        model(**{"num_hidden_layers": 1, **(architecture or {})}),
        folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=MICRO_BATCHES,
        **config,
    )
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


def test_an_operator_refuses_tensors_of_two_devices() -> None:
    with PretendGPU():
        on_gpu = torch.ones(2, device="cuda")
        for operation in (
            lambda: on_gpu + torch.ones(2),
            lambda: torch.cat([torch.ones(2), on_gpu]),
            lambda: torch.stack([torch.tensor(1.0), on_gpu[0]]),
            lambda: on_gpu + on_gpu.new_zeros(2, device="cpu"),
            lambda: torch.tensor(1.0).add_(on_gpu[0]),
        ):
            with pytest.raises(MixedDevices, match=r"test_pretend_gpu\.py"):
                operation()
        assert (on_gpu + torch.tensor(1.0)).tolist() == [2.0, 2.0]  # a number may come from the CPU
        with pytest.raises(TypeError, match="numpy"):
            on_gpu.numpy()


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
    assert PretendGPU.current is None


def test_gradients_are_those_of_the_cpu() -> None:
    policy = model(num_hidden_layers=1)
    ids = torch.arange(2, 10)[None]
    policy(input_ids=ids, labels=ids).loss.backward()
    expected = [parameter.grad.clone() for parameter in policy.parameters()]
    policy.zero_grad()
    with PretendGPU():
        policy.to("cuda")
        on_gpu = ids.to("cuda")
        policy(input_ids=on_gpu, labels=on_gpu).loss.backward()
        got = [parameter.grad.cpu() for parameter in policy.parameters()]
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)


# ---- Training


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("layout", only(["packed", "shared"], ["packed", "shared", "trimmed", "padded"]))
def test_training_mixes_no_devices_and_bounds_its_waits(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "shared":  # the rows have too few tokens for a second segment to pay otherwise
        monkeypatch.setitem(buckets.LAUNCH_TOKENS, "cpu", 1.0)
    stock = counts(TRLGRPOTrainer, tmp_path / "trl")
    ours = counts(GRPOTrainer, tmp_path / "ours", micro_batching={"layout": layout})
    # The rows of a generation batch are distributed differently, and its loss stays the same.
    assert sum(count.loss for count in ours) == pytest.approx(sum(count.loss for count in stock), abs=1e-5)
    first, later = ours[MICRO_BATCHES], ours[MICRO_BATCHES + 1]
    assert [count.synchronisations for count in stock[MICRO_BATCHES:]] == STOCK
    assert first.synchronisations <= FIRST[layout]
    assert later.synchronisations <= LATER[layout]
    assert later.uploads <= UPLOADS
    assert later.launches <= LAUNCHES[layout]


@pytest.mark.slow
def test_the_metrics_of_passes_wait_for_nothing(tmp_path: Path) -> None:
    """In the second iteration of a generation batch each micro-batch waits as often as one without the metrics."""
    second_iteration = counts(GRPOTrainer, tmp_path, num_iterations=2)[MICRO_BATCHES:]
    assert max(count.synchronisations for count in second_iteration) <= LATER["packed"]
    assert max(count.uploads for count in second_iteration) <= UPLOADS


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


# ---- 16 bits: autocast, and the kernel of FlashAttention


@pytest.mark.slow
def test_full_kl_mixes_no_dtypes_under_autocast(tmp_path: Path) -> None:
    stock = counts(TRLGRPOTrainer, tmp_path / "trl", bf16=True)
    ours = counts(GRPOTrainer, tmp_path / "ours", bf16=True, beta=0.04, kl_estimator="full")
    # The KL of the policy to itself is 0.
    assert sum(count.loss for count in ours) == pytest.approx(sum(count.loss for count in stock), abs=1e-6)
    assert ours[MICRO_BATCHES + 1].synchronisations <= LATER_FULL_KL[0]
    assert ours[MICRO_BATCHES + 1].launches <= LATER_FULL_KL[1]


LATER_FULL_KL = (19, 649)
"""Largest numbers of waits and launches in a micro-batch that is not the first of its generation batch."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "capability", "taken"),
    [
        (4, (9, 0), True),
        pytest.param(4, (7, 5), False, marks=pytest.mark.slow),
        pytest.param(8, (9, 0), False, marks=pytest.mark.slow),  # heads of 4 dimensions
    ],
)
def test_packed_rows_under_autocast_run_in_the_varlen_kernel_if_it_takes_them(
    heads: int, capability: tuple[int, int], taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []

    @functools.wraps(VERSIONS["2.12"])
    def counted(query: Tensor, *args: Any, **options: Any) -> Tensor:
        lengths.append(len(query))
        return VERSIONS["2.12"](query, *args, **options)

    monkeypatch.setattr(varlen, "varlen_attn", on_pretend_gpu(counted))
    monkeypatch.setattr(PretendGPU, "capability", capability)
    architecture = {"num_attention_heads": heads, "num_hidden_layers": 2}
    stock = counts(TRLGRPOTrainer, tmp_path / "trl", architecture, bf16=True)
    assert not lengths
    ours = counts(GRPOTrainer, tmp_path / "ours", architecture, bf16=True)
    assert sum(count.loss for count in ours) == pytest.approx(sum(count.loss for count in stock), abs=1e-3)
    assert any(length > TRIAL_SPANS[-1][1][-1][1] for length in lengths) is taken
    assert ours[MICRO_BATCHES + 1].synchronisations <= LATER["packed"]
    assert ours[MICRO_BATCHES + 1].launches <= (559 if taken else 611)  # one SDPA call per completion otherwise
    assert ours[MICRO_BATCHES + 1].uploads <= UPLOADS + taken  # the spans, for all layers


# ---- Whole runs: generation, its check, the layout check, the update and its sample


class Run(NamedTuple):
    """A run of two steps, with the counts that it must not exceed."""

    arguments: dict[str, Any]
    more: dict[str, Any]
    launches: int
    synchronisations: int
    uploads: int


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
REFRESH = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
EVALUATION = {"eval_strategy": "steps", "eval_steps": 2}
RUNS = {
    "generated": Run({}, {}, 7_770, 487, 143),
    "full KL": Run({}, {"kl_estimator": "full"}, 5_169, 269, 115),
    "refreshed reference": Run(
        REFRESH, {"reference": {"name": "initial", "reset_optimizer_on_sync": True}}, 7_818, 487, 143
    ),
    "adapter switched off for the reference": Run({}, {"peft_config": LORA}, 8_485, 435, 135),
    "evaluated": Run(EVALUATION, {"eval_dataset": PROMPTS.select(range(4))}, 12_987, 694, 207),
    "informative prompts": Run({}, {"sampling": "informative"}, 7_772, 489, 145),
    "transformers' own generation": Run({}, {"generation": "off"}, 7_648, 559, 208),
    "two iterations": Run({"num_iterations": 2}, {}, 6_013, 401, 106),
}
"""Runs of two steps. About 270 of the waits belong to the check of the layout, once in a run."""


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("name", only(["generated", "full KL", "refreshed reference"], list(RUNS)))
def test_a_run_mixes_no_devices(name: str, tmp_path: Path) -> None:
    run = RUNS[name]
    policy = tiny.policy(vocab_size=258, num_hidden_layers=1)
    policy.save_pretrained(tmp_path / "policy")
    policy.config._name_or_path = str(tmp_path / "policy")
    arguments = short_runs.arguments(tmp_path / "run", max_steps=2, **run.arguments)
    trainer = short_runs.trainer(GRPOTrainer, policy, arguments, **run.more)
    with PretendGPU() as gpu:
        gpu.adopt(trainer)
        trainer.train()
        assert all(parameter.is_cuda for parameter in trainer.model.parameters())
        assert gpu.launches <= run.launches
        assert gpu.synchronisations <= run.synchronisations, gpu.sites
        assert gpu.uploads <= run.uploads
        if trainer.beta:
            assert kl_to_reference(trainer, short_runs.TEXTS) >= 0


# ---- Runs whose completions are recorded, or call tools


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("recorded", [False, True], ids=["without log-probabilities", "with log-probabilities"])
def test_an_offline_run_mixes_no_devices(recorded: bool, tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "prompt": [f"{n} + {n} =" for n in range(4)],
        "responses": [[f" {n + k}" for k in range(4)] for n in range(4)],  # 3 tokens each
        # Rows of the first prompt have the advantage 0, and are skipped.
        "rewards": [[0.5] * 4, *[[float(n == k) for k in range(4)] for n in range(1, 4)]],
    }
    arguments: dict[str, Any] = {"scale_rewards": "none", "per_device_train_batch_size": 8}
    options: dict[str, Any] = {"advantages": "max_rl", "micro_batching": "off"}
    if recorded:
        columns["logprobs"] = [[[-1.0, -2.0, -3.0]] * 4] * 4
        # TRL computes log-probabilities of a generation batch in parts, and advantages carry the divisor's change.
        arguments = {"loss_type": "bnpo", "steps_per_generation": 2}
        options = {"micro_batching": {"layout": "trimmed"}}
    rows = Dataset.from_dict(columns)
    rollout = RecordedRollout(rows, tiny.byte_tokenizer(), OfflineSpec(), 8)
    trainer = short_runs.trainer(
        GRPOTrainer,
        tiny.policy(num_hidden_layers=1),
        short_runs.arguments(tmp_path, beta=0.0, max_steps=3, shuffle_dataset=False, **arguments),
        rows=rows.select_columns(["prompt"]),
        rewards=recorded_reward,
        rollout_func=rollout,
        **options,
    )
    with PretendGPU() as gpu:
        gpu.adopt(trainer)
        trainer.add_callback(CountsOfTheLastStep(gpu))
        trainer.train()
        launches, synchronisations, uploads = OFFLINE[recorded]
        assert gpu.launches <= launches
        assert gpu.synchronisations <= synchronisations, gpu.sites
        assert gpu.uploads <= uploads
    assert trainer.state.log_history[0].get("efficiency/rows_skipped") == (4.0 if recorded else None)


OFFLINE = [(597, 55, 16), (910, 62, 24)]
"""Largest numbers of launches, waits and copies to the device of the third step, without and with log-probabilities.

The first one also verifies the layout, and the third one regroups a generation batch.
"""


class CountsOfTheLastStep(TrainerCallback):
    """Callback that sets the counts of the pretend GPU to 0 before the last step."""

    def __init__(self, gpu: PretendGPU) -> None:
        self.gpu = gpu

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the counts to 0 after each step but the last one."""
        if state.global_step < state.max_steps:
            self.gpu.reset()


def test_a_run_with_tools_mixes_no_devices(tmp_path: Path) -> None:
    tokenizer = tool_tokenizer()
    sampled = {tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids([ADD, UNFIT, UNKNOWN])}
    arguments = short_runs.arguments(
        tmp_path,
        beta=0.0,
        max_completion_length=160,
        max_tool_calling_iterations=2,
        generation_kwargs={
            "suppress_tokens": [token for token in range(len(tokenizer)) if token not in sampled],
            "stop": ["@"],
        },
    )
    trainer = short_runs.trainer(
        GRPOTrainer,
        tool_policy(tokenizer, num_hidden_layers=1),
        arguments,
        rows=CASES,
        tokenizer=tokenizer,
        rewards=transcript_reward,
        tools=[add],
        sampling="informative",
    )
    with PretendGPU() as gpu:
        gpu.adopt(trainer)
        trainer.train()
        assert gpu.launches <= TOOLS[0]
        assert gpu.synchronisations <= TOOLS[1], gpu.sites
        assert gpu.uploads <= TOOLS[2]
    assert trainer.state.log_history[0]["tools/turns"] > 1


TOOLS = (6_158, 458, 136)
"""Largest numbers of launches, waits and copies to the device of one step with tools."""


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


def test_vllms_processing_of_logits_stays_on_the_device() -> None:
    logits, ids = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)), torch.tensor([5, 6, 5, 7, 8])
    processing = Processing(repetition_penalty=1.2, min_p=0.01, top_k=8, top_p=0.99)
    expected = processing.log_probs(logits, ids, 0.9)
    with PretendGPU() as gpu:
        logits, ids = logits.to("cuda"), ids.to("cuda")
        gpu.reset()
        got = processing.log_probs(logits, ids, 0.9)
        assert gpu.synchronisations == 0, gpu.sites
        torch.testing.assert_close(got.cpu(), expected)


def test_a_reward_model_of_internlm2_scores_on_the_device(tmp_path: Path) -> None:
    tiny.save_internlm2(tmp_path, seed=0, heads=4, kv_heads=2, hidden=32, layers=1)
    rows: dict[str, Any] = {"prompts": ["2 + 2 ="] * 2, "completions": ["4", "five"]}
    expected = RewardModelScore(str(tmp_path), device="cpu")(**rows)
    with PretendGPU():
        assert RewardModelScore(str(tmp_path), device="cuda")(**rows) == pytest.approx(expected, abs=1e-4)


def test_a_reward_model_scores_groups_on_the_device(tmp_path: Path) -> None:
    tiny.save_reward_model(tmp_path)
    prompts = ["What is 2 + 2?"] * 3 + ["Say hi."] * 2
    completions = ["4", "five <answer>5</answer>", "", "hi", "hello"]
    expected = RewardModelScore(str(tmp_path), device="cpu")(prompts=prompts, completions=completions)
    with PretendGPU() as gpu:
        scores = RewardModelScore(str(tmp_path), device="cuda")(prompts=prompts, completions=completions)
        assert scores == pytest.approx(expected, abs=1e-5)
        assert gpu.launches <= 116
        assert gpu.synchronisations <= 29, gpu.sites  # 23 for the weights
        assert 20 < gpu.uploads <= 26  # those of the 21 weights included


def test_a_reward_model_without_a_linear_head_scores_on_the_device(tmp_path: Path) -> None:
    tiny.save_reward_model(tmp_path)

    def scores(device: str) -> list[float | None]:
        reward = RewardModelScore(str(tmp_path), device=device)
        reward.load()._head = None  # conversations are then scored one by one
        return reward(prompts=["2 + 2 ="] * 2, completions=["4", "five"])

    expected = scores("cpu")
    with PretendGPU() as gpu:
        assert scores("cuda") == pytest.approx(expected, abs=1e-5)
        assert gpu.synchronisations <= 35, gpu.sites


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


def test_the_sample_of_an_update_waits_for_few_results() -> None:
    metrics: dict[str, list[float]] = {CHANGED: [], EXPECTED: []}
    with PretendGPU() as gpu:
        used, unused = (torch.nn.Parameter(torch.ones(64, device="cuda")) for _ in range(2))
        optimizer = torch.optim.AdamW([used, unused], lr=1e-3, foreach=True)
        sample: Any = UpdateSample(metrics)
        trained = {"optimizer": optimizer}
        sample.on_train_begin(None, None, **trained)
        used.grad = torch.ones_like(used)
        sample.on_step_begin(None, None, **trained)
        optimizer.step()
        gpu.reset()
        sample.on_optimizer_step(None, None, **trained)
        assert gpu.launches <= 34
        assert gpu.synchronisations <= 1, gpu.sites  # the shares; foreach AdamW counts its steps on the host
        assert gpu.uploads == 0
    assert metrics == {CHANGED: [1.0], EXPECTED: [1.0]}


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


def test_keys_and_values_that_need_more_room_are_copied_on_the_device() -> None:
    columns = torch.randn(2, 3, 1, 5, 4, generator=torch.Generator().manual_seed(0))

    def grown(parts: Tensor) -> Tensor:
        """Return the keys after four appended columns, of which one has room."""
        layer = DynamicLayer()
        layer.update(parts[0, :, :, :1], parts[1, :, :, :1])
        buffer = FullBuffer(layer, torch.tensor([2, 0], device=parts.device), room=1)
        for place in range(1, 5):
            keys, values = (parts[n, :2, :, place : place + 1] for n in range(2))
            buffer.update(keys, values)
        return buffer.keys

    expected = grown(columns)
    with PretendGPU() as gpu:
        on_gpu = columns.to("cuda")
        gpu.reset()
        got = grown(on_gpu)
        assert gpu.synchronisations == 3, gpu.sites  # copies: our index, and the empty tensors of transformers' layer
        assert torch.equal(got.cpu(), expected)


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
