"""Data that vLLM gets: the run's seed, its settings, and the policy's weights, even if read after TRL's iterator.

tests/vllm runs the same with vLLM itself.
"""

import copy
import inspect
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, PeftConfig, PeftModel
from trl import GRPOTrainer as TRLGRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.training.reference import set_reference, without_trl_reference
from grpo_recipes.training.trl_patches import sampling_by_seed, send_settings
from grpo_rewards.errors import UserError
from tests.grpo_recipes.test_published_settings import BIAS, VALUES, publish
from tests.support import tiny
from tests.support.short_runs import adapted, arguments, load, trainer

ATTENTION = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **changes})


ADAPTERS: dict[str, PeftConfig] = {
    "LoRA": lora(),
    "LoRA on the embedding": lora(target_modules=["embed_tokens", "q_proj"]),
    "DoRA": lora(use_dora=True),
    "modules_to_save": lora(modules_to_save=["lm_head"]),
    "trainable tokens": lora(trainable_token_indices=[5, 6, 7]),
    "IA3": IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": LoHaConfig(r=4, **ATTENTION),
    "OFT": OFTConfig(r=0, oft_block_size=8, **ATTENTION),
}


class GatherNothing:
    """Stub of TRL's `DistributedBackend` on one process."""

    is_fsdp = False

    def gather_params(self, parameters: list[torch.Tensor]) -> Any:
        return torch.no_grad()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_policy(tmp_path_factory.mktemp("policy"))


def exporter(model: PeftModel) -> VLLMGeneration:
    """TRL's `VLLMGeneration` without an engine behind it."""
    vllm = object.__new__(VLLMGeneration)
    vllm.model, vllm._dist = model, GatherNothing()
    return vllm


def merged(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return the policy's weights by PEFT's own export."""
    return dict(copy.deepcopy(model).merge_and_unload().named_parameters())


def with_vllm(model: PeftModel, args: Any) -> TRLGRPOTrainer:
    """Return TRL's trainer in the state in which a reference is set, with a vLLM that gets its weights."""
    with without_trl_reference(args):
        built = trainer(TRLGRPOTrainer, model, args)
    built.vllm_generation = exporter(model)
    return built


def sent_by_trl(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return what vLLM's packer reads: it collects the tensors and copies them when the iterator has ended."""
    return dict(exporter(model)._iter_named_params())


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("beta", [0.04, 0.0])
@pytest.mark.parametrize("name", ["default", "policy"])
@pytest.mark.parametrize("kind", ["LoRA", "modules_to_save"])
def test_vllm_gets_the_merged_weights(policy: Path, tmp_path: Path, kind: str, name: str, beta: float) -> None:
    built = with_vllm(adapted(policy, ADAPTERS[kind], continued=True, name=name), arguments(tmp_path, beta=beta))
    expected = merged(built.model)
    set_reference(built, "initial")
    set_reference(built, "initial")  # again, as a script may: the weights are filtered once
    assert_sent(built, expected)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if kind not in ("LoRA", "modules_to_save")])
def test_vllm_gets_the_merged_weights_of_every_kind_of_adapter(policy: Path, tmp_path: Path, kind: str) -> None:
    built = with_vllm(adapted(policy, ADAPTERS[kind], continued=True), arguments(tmp_path, beta=0.0))
    expected = merged(built.model)
    set_reference(built)
    assert_sent(built, expected)


def assert_sent(built: TRLGRPOTrainer, expected: dict[str, torch.Tensor]) -> None:
    """Assert that names and values are the merged model's, twice, and that the base is unchanged afterwards."""
    for _ in range(2):
        sent = dict(built.vllm_generation._iter_named_params())
        assert sent.keys() == expected.keys()
        for key, tensor in sent.items():
            # Merging and unmerging leaves a rounding in the base.
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["LoRA", "trainable tokens"])
def test_trl_sends_the_base(policy: Path, kind: str) -> None:
    """If this fails, TRL has fixed it: `send_policy` need no longer copy, only rename."""
    model = adapted(policy, ADAPTERS[kind], continued=True)
    expected, base = merged(model), model.get_base_model()
    sent = sent_by_trl(model)
    if kind == "trainable tokens":
        assert "model.embed_tokens.weight" not in sent
        assert "model.embed_tokens.token_adapter.weight" in sent
    layer = "model.layers.0.mlp.up_proj.weight"
    assert (sent[layer] - expected[layer]).abs().max() > 0.01
    unmerged = base.model.layers[0].mlp.up_proj.get_base_layer().weight
    assert torch.equal(sent[layer], unmerged)


class SeededEngine:
    """Seed this process's random state by the rank that TRL passes, as vLLM does when an engine is built."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)


def test_the_seed_decides_what_a_colocated_engine_draws(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", SeededEngine)

    def drawn(trainer_class: Any, seed: int) -> list[float]:
        args = arguments(tmp_path, seed=seed, use_vllm=True, vllm_mode="colocate", beta=0.0)
        trainer(trainer_class, str(policy), args)
        return torch.rand(4).tolist()

    assert drawn(TRLGRPOTrainer, 1) == drawn(TRLGRPOTrainer, 2), "if this fails, TRL has mended it"
    assert drawn(GRPOTrainer, 1) == drawn(GRPOTrainer, 1) != drawn(GRPOTrainer, 2)
    for unseeded in ({"vllm_mode": "server"}, {"use_vllm": False}):  # no engine draws from this process's random state
        args = arguments(tmp_path, **{"use_vllm": True, "vllm_mode": "colocate", **unseeded})
        state = torch.get_rng_state()
        with sampling_by_seed(args):
            pass
        assert torch.equal(torch.get_rng_state(), state)


class StubLLM:
    """Stub of vLLM's engine as TRL uses it: every completion is the token 5."""

    made: ClassVar[list[dict[str, Any]]] = []
    asked: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **settings: Any) -> None:
        self.made.append(settings)
        model = SimpleNamespace(load_weights=lambda named: None)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        self.asked.append(vars(sampling_params))
        made = SimpleNamespace(token_ids=[5], logprobs=[{5: SimpleNamespace(logprob=-1.0, rank=1)}])
        return [SimpleNamespace(prompt_token_ids=row["prompt_token_ids"], outputs=[made]) for row in prompts]


class StubClient:
    """Stub of TRL's client of a server that was started without `--generation-config`."""

    asked: ClassVar[list[dict[str, Any]]] = []
    generation_config = "auto"

    def __init__(self, **settings: Any) -> None: ...

    def init_communicator(self, device: Any) -> None: ...

    def update_named_params(self, metadata: Any, named_params: Any) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs", "generation_config": self.generation_config}}

    def generate(self, prompts: list[list[int]], n: int, generation_kwargs: Any, **sampling: Any) -> dict[str, Any]:
        self.asked.append({**sampling, **generation_kwargs})
        made = [[5]] * (len(prompts) * n)
        return {"prompt_ids": prompts, "completion_ids": made, "logprobs": [[[-1.0]]] * len(made)}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stubs of vLLM under TRL's own `VLLMGeneration`."""
    for stub in (StubLLM, StubClient):
        monkeypatch.setattr(stub, "asked", [])
    monkeypatch.setattr(StubLLM, "made", [])
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda **_: True)
    monkeypatch.setattr(vllm_generation, "LLM", StubLLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setattr(vllm_generation, "VLLMClient", StubClient)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # TRL sets them
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


SENT = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "max_tokens": 8,
}


def engine_trainer(folder: Path, model: Any, mode: str = "colocate", **changes: Any) -> GRPOTrainer:
    args = arguments(folder, use_vllm=True, vllm_mode=mode, beta=0.0, **changes)
    return trainer(GRPOTrainer, model, args, generation_check=False)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("mode", "stub"), [("colocate", StubLLM), ("server", StubClient)])
def test_every_sampling_setting_is_sent(policy: Path, tmp_path: Path, mode: str, stub: Any) -> None:
    """End tokens are sent too, because an engine without the model's generation_config does not know them."""
    published = {"eos_token_id": [1, 7, 9], "temperature": 0.1, "top_k": 1, "sequence_bias": BIAS, "min_p": 0.9}
    engine_trainer(tmp_path, publish(load(policy), **published), mode).train()
    (asked,) = stub.asked
    assert asked.items() >= {**SENT, "stop_token_ids": [1, 7, 9]}.items()
    assert [settings["generation_config"] for settings in StubLLM.made] == ["vllm"] * (mode == "colocate")
    assert vllm_generation.LLM is StubLLM, "and nobody else's engine is"


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(
    ("own", "sent"),
    [
        ({"stop_token_ids": [9]}, {"stop_token_ids": [1, 9]}),
        ({"ignore_eos": True, "stop_token_ids": [9]}, {"stop_token_ids": [9]}),
        ({"presence_penalty": 0.5, "top_k": 7}, {"presence_penalty": 0.5, "top_k": 7, "stop_token_ids": [1]}),
    ],
)
def test_the_settings_of_the_run_reach_vllm(
    policy: Path, tmp_path: Path, own: dict[str, Any], sent: dict[str, Any]
) -> None:
    engine_trainer(tmp_path, load(policy), generation_kwargs=own).train()
    assert StubLLM.asked[0].items() >= {**SENT, **own, **sent}.items()


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_no_published_field_changes_a_request_to_vllm(
    policy: Path, tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    built = engine_trainer(tmp_path, load(policy), mode)
    expected = built.vllm_generation.generation_kwargs
    published = copy.deepcopy(built.model.generation_config)
    for field, value in VALUES.items():
        built.model.generation_config = copy.deepcopy(published)
        publish(built.model, **{field: value})
        if mode == "server" and field == "max_new_tokens":
            with pytest.raises(UserError, match="at 2 tokens, .*`--generation-config vllm`"):
                send_settings(built, built._generation.published)
            continue
        send_settings(built, built._generation.published)
        assert built.vllm_generation.generation_kwargs == expected, field
    announced = [record for record in caplog.records if "generation_config" in record.getMessage()]
    assert [record.levelno for record in announced] == [logging.WARNING]


@pytest.mark.usefixtures("vllm")
def test_a_server_without_the_published_limit_is_not_refused(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StubClient, "generation_config", "vllm")
    engine_trainer(tmp_path, publish(load(policy), max_new_tokens=2), "server").train()
    assert StubClient.asked[0]["max_tokens"] == 8


def test_contract_of_the_settings_with_trl() -> None:
    """TRL builds the engine by a name of its module, and lets `generation_kwargs` prevail over what it sends itself."""
    source = inspect.getsource(VLLMGeneration)
    assert source.count("self.llm = LLM(") == 1
    assert "generation_config=" not in source, "if this fails, TRL chooses the engine's own settings"
    assert "generation_kwargs.update(self.generation_kwargs)" in source
    assert '"generation_kwargs": self.generation_kwargs' in source
    for name in ("presence_penalty", "frequency_penalty", "min_tokens", "stop_token_ids"):
        assert f'"{name}"' not in source, "if this fails, TRL sends it by itself"
