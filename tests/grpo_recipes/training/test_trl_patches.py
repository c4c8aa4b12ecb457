"""Replacements inside TRL: what vLLM gets, casts, counts of completions, files of evaluations, secrets and durations.

tests/vllm runs vLLM itself.
"""

import copy
import inspect
import logging
import pickle
import time
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, PeftConfig, PeftModel
from torch import nn
from transformers import GenerationConfig, TrainingArguments
from transformers import trainer as transformers_trainer
from trl import GRPOTrainer as TRLGRPOTrainer
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation.sampling_settings import PublishedSettings
from grpo_recipes.training.reference import set_reference, without_trl_reference
from grpo_recipes.training.trl_patches import (
    NOT_SENT_BY_TRL,
    are_truncated,
    hide_secrets,
    neutral_engine,
    refuse_cast,
    sampling_by_seed,
    send_policy,
    send_settings,
    separate_eval_completions,
    steady_clock,
    without_secrets,
)
from tests.grpo_recipes.test_published_settings import BIAS, VALUES, publish
from tests.support import tiny
from tests.support.errors import refused
from tests.support.grids import only
from tests.support.short_runs import adapted, arguments, load, trainer
from tests.support.trainers import one_batch

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


KINDS = [(kind, "default", 0.0) for kind in ADAPTERS]
KINDS += [("LoRA", "default", 0.04), ("LoRA", "policy", 0.0), ("modules_to_save", "policy", 0.04)]


@pytest.mark.parametrize("case", only([KINDS[-1], ("trainable tokens", "default", 0.0)], KINDS), ids=str)
def test_vllm_gets_the_merged_weights(policy: Path, tmp_path: Path, case: tuple[str, str, float]) -> None:
    kind, name, beta = case
    built = with_vllm(adapted(policy, ADAPTERS[kind], continued=True, name=name), arguments(tmp_path, beta=beta))
    expected = merged(built.model)
    for _ in range(2):  # again, as a script may: the weights are filtered once
        set_reference(built, "initial" if beta else None)
    for _ in range(2):  # the base is unchanged after the first time
        sent = dict(built.vllm_generation._iter_named_params())
        assert sent.keys() == expected.keys()
        for key, tensor in sent.items():
            # Merging and unmerging leaves a rounding in the base.
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6)


def test_a_full_model_is_sent_by_trl() -> None:
    vllm = SimpleNamespace(_iter_named_params=print)
    send_policy(SimpleNamespace(model=nn.Linear(1, 1), vllm_generation=vllm))  # type: ignore[arg-type]
    send_policy(SimpleNamespace(model=nn.Linear(1, 1)))  # type: ignore[arg-type]
    assert vars(vllm) == {"_iter_named_params": print}


def test_trl_sends_the_base(policy: Path) -> None:
    """If this fails, TRL has fixed it: `send_policy` need no longer copy, only rename."""
    model = adapted(policy, ADAPTERS["trainable tokens"], continued=True)
    expected, base = merged(model), model.get_base_model()
    sent = dict(exporter(model)._iter_named_params())
    assert "model.embed_tokens.weight" not in sent
    assert "model.embed_tokens.token_adapter.weight" in sent
    layer = "model.layers.0.mlp.up_proj.weight"
    assert (sent[layer] - expected[layer]).abs().max() > 0.01
    assert torch.equal(sent[layer], base.model.layers[0].mlp.up_proj.get_base_layer().weight)


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
    for rank, split, seeded in ((0, 1, 40), (3, 1, 43), (3, 2, 41), (2, 2, 41)):  # ranks that share an engine
        monkeypatch.setitem(PartialState._shared_state, "process_index", rank)
        shared: Any = SimpleNamespace(use_vllm=True, vllm_mode="colocate", seed=40, vllm_tensor_parallel_size=split)
        with sampling_by_seed(shared):
            pass
        assert torch.initial_seed() == seeded


def test_an_engine_is_restored_also_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_generation, "LLM", dict, raising=False)
    with suppress(RuntimeError), neutral_engine():
        assert vllm_generation.LLM(model="x") == {"model": "x", "generation_config": "vllm"}
        raise RuntimeError
    assert vllm_generation.LLM is dict


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

    def __init__(self, **settings: Any) -> None: ...

    def init_communicator(self, device: Any) -> None: ...

    def update_named_params(self, metadata: Any, named_params: Any) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        return {"model_config": {"logprobs_mode": "processed_logprobs", "generation_config": "auto"}}

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


SENT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
SENT |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "max_tokens": 8}


def engine_trainer(folder: Path, model: Any, mode: str = "colocate", **changes: Any) -> GRPOTrainer:
    args = arguments(folder, use_vllm=True, vllm_mode=mode, beta=0.0, **changes)
    return trainer(GRPOTrainer, model, args, generation_check=False)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize(("mode", "stub"), [("colocate", StubLLM), ("server", StubClient)])
def test_every_sampling_setting_is_sent(policy: Path, tmp_path: Path, mode: str, stub: Any) -> None:
    """End tokens are sent too, because an engine without the model's generation_config does not know them."""
    published = {"eos_token_id": [1, 7, 9], "temperature": 0.1, "top_k": 1, "sequence_bias": BIAS, "min_p": 0.9}
    own = {"presence_penalty": 0.5, "top_k": 7}
    made = engine_trainer(tmp_path, publish(load(policy), **published), mode, generation_kwargs=own)
    one_batch(made, 1)
    (asked,) = stub.asked
    assert asked.items() >= {**SENT, **own, "stop_token_ids": [1, 7, 9]}.items()
    assert [settings["generation_config"] for settings in StubLLM.made] == ["vllm"] * (mode == "colocate")
    assert vllm_generation.LLM is StubLLM, "and nobody else's engine is"


def settings_sent(
    config: GenerationConfig, given: dict[str, Any] | None, server: str = "", *, first: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that vLLM is sent for a model with a configuration, and what is announced."""
    said: list[str] = []
    client = SimpleNamespace(get_server_info=lambda: {"model_config": {"generation_config": server}})
    trainer: Any = SimpleNamespace(
        vllm_generation=SimpleNamespace(vllm_client=client), model=SimpleNamespace(generation_config=config),
        args=SimpleNamespace(generation_kwargs=given, vllm_mode="server" if server else "colocate"),
        eos_token_ids=[9, 2], accelerator=SimpleNamespace(is_main_process=first), max_completion_length=64, **RUNS,
    )  # fmt: skip
    send_settings(trainer, PublishedSettings(said.append))
    return trainer.vllm_generation.generation_kwargs, said


RUNS = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}


def test_settings_that_a_model_is_published_with_are_announced_unless_they_are_the_runs() -> None:
    same = {**RUNS, "max_new_tokens": 64}
    assert settings_sent(GenerationConfig(do_sample=True, **same), None)[1] == []
    for name in same:
        (said,) = settings_sent(GenerationConfig(do_sample=True, **{**same, name: 2}), None)[1]
        assert f"({name}: 2)" in said


def test_completions_end_at_the_runs_own_tokens() -> None:
    for given, stops in (
        (None, [2, 9]),
        ({"stop_token_ids": [5, 9]}, [2, 5, 9]),
        ({"ignore_eos": True}, None),
        ({"ignore_eos": True, "stop_token_ids": [5]}, [5]),
        ({"ignore_eos": False, "min_tokens": 3}, [2, 9]),
    ):
        before = dict(given or {})
        sent, _ = settings_sent(GenerationConfig(), given)
        assert {**sent, "stop_token_ids": sent.get("stop_token_ids")} == {
            **NOT_SENT_BY_TRL, **before, "stop_token_ids": stops
        }  # fmt: skip
        assert (given or {}) == before, "the run's own settings are not changed"


def test_a_server_that_cuts_completions_is_refused() -> None:
    for published, server, is_first in ((64, "auto", True), (2, "vllm", True), (2, "auto", False), (2, "", True)):
        settings_sent(GenerationConfig(max_new_tokens=published), None, server, first=is_first)
    for published, server in ((63, "auto"), (2, "weights")):  # the second is a folder
        with refused("`max_completion_length`", 64, published):
            settings_sent(GenerationConfig(max_new_tokens=published), None, server)


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
            with refused("`max_completion_length`", value, "`--generation-config vllm`"):
                send_settings(built, built._generation.published)
            continue
        send_settings(built, built._generation.published)
        assert built.vllm_generation.generation_kwargs == expected, field
    announced = [record for record in caplog.records if "generation_config" in record.getMessage()]
    assert [record.levelno for record in announced] == [logging.WARNING]


def test_contract_of_the_settings_with_trl() -> None:
    """TRL builds the engine by a name of its module, and lets `generation_kwargs` prevail over what it sends itself."""
    source = inspect.getsource(VLLMGeneration)
    assert source.count("self.llm = LLM(") == 1
    assert "generation_config=" not in source, "if this fails, TRL chooses the engine's own settings"
    assert "generation_kwargs.update(self.generation_kwargs)" in source
    assert '"generation_kwargs": self.generation_kwargs' in source
    for name in ("presence_penalty", "frequency_penalty", "min_tokens", "stop_token_ids"):
        assert f'"{name}"' not in source, "if this fails, TRL sends it by itself"


# ---- continuous batching, truncation, evaluations


@pytest.mark.parametrize(
    ("changes", "dtype", "cast"),
    [
        ({"bf16": True}, torch.float32, "torch.bfloat16"),
        ({"bf16": True}, torch.bfloat16, None),
        ({"fp16": True}, torch.bfloat16, "torch.float16"),
        ({}, torch.float32, None),
        ({"bf16": True, "deepspeed_plugin": "x"}, torch.float32, None),
    ],
    ids=str,
)
def test_a_cast_of_trained_weights_is_refused(changes: dict[str, Any], dtype: torch.dtype, cast: str | None) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).to(dtype)
    model[1].float().requires_grad_(False)  # frozen weights may be cast
    args: Any = SimpleNamespace(**{"bf16": False, "fp16": False, "deepspeed_plugin": None, **changes})
    if cast is None:
        refuse_cast(model, args)
        return
    with refused("`use_transformers_continuous_batching`", cast):
        refuse_cast(model, args)


def test_padding_ends_a_completion_like_an_end_token() -> None:
    trainer: Any = SimpleNamespace(eos_token_ids=[2], _tokenizer=SimpleNamespace(pad_token_id=0))
    assert are_truncated(trainer, [[1, 2], [2, 1], [1, 0]], None) == [False, True, False]


def test_an_evaluation_has_a_file_of_its_own(tmp_path: Path) -> None:
    """It replaces no file of the training, also if it fails, and only the first rank moves files."""
    folder = tmp_path / "completions"
    folder.mkdir()
    table = folder / "completions_00012.parquet"
    logs = {"prompt": deque(["a"], maxlen=4), "rewards": defaultdict(deque, x=deque([1]))}
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(output_dir=str(tmp_path)), state=SimpleNamespace(global_step=12), _logs=logs,
        eval_dataset=None, accelerator=SimpleNamespace(is_main_process=True),
    )  # fmt: skip
    table.write_text("training")
    with suppress(RuntimeError), separate_eval_completions(trainer, None, "eval_a/b c"):
        assert trainer._logs["prompt"].maxlen is None, "every row of the evaluation has room"
        trainer._logs["rewards"]["x"].append(3)
        table.write_text("evaluation")
        raise RuntimeError
    assert trainer._logs is logs
    assert logs == {"prompt": deque(["a"]), "rewards": {"x": deque([1])}}
    files = {path.name: path.read_text() for path in folder.iterdir()}
    assert files == {table.name: "training", f"eval_a-b-c_{table.name}": "evaluation"}
    trainer.accelerator.is_main_process = False
    with separate_eval_completions(trainer, None, "eval"):
        assert not trainer._logs["prompt"]
    assert {path.name: path.read_text() for path in folder.iterdir()} == files
    for own, given, is_separate in (({}, None, False), ([], {}, False), ({}, [], True)):
        trainer.eval_dataset = own
        with separate_eval_completions(trainer, given, "eval"):
            assert (trainer._logs is not logs) is is_separate


# ---- secrets and durations


def test_arguments_hide_their_secrets_where_they_are_read_as_a_whole(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", hub_token="hf_secret")
    args.lr_scheduler_kwargs = {"a": (1, 2)}
    hide_secrets(args)
    kind = type(args)
    hide_secrets(args)
    assert type(args) is kind
    assert kind.__name__ == "TrainingArguments"
    assert args.hub_token == "hf_secret"
    assert "hf_secret" not in str(args.to_dict())
    again = pickle.loads(pickle.dumps(args))
    assert type(again) is TrainingArguments
    assert "hf_secret" not in str(vars(again))
    assert (again.lr_scheduler_kwargs, again.output_dir) == ({"a": (1, 2)}, args.output_dir)


def test_types_stay_where_nothing_is_hidden() -> None:
    shown = without_secrets({"betas": (0.9, 0.99), "hub_token": "hf_x", "urls": ("http://u:p@host/",), "steps": 3})
    assert (shown["betas"], shown["steps"]) == ((0.9, 0.99), 3)
    assert "hf_x" not in str(shown)
    assert "u:p" not in str(shown)
    for kind in (DeepSpeedPlugin, HfDeepSpeedConfig):
        plugin: Any = object.__new__(kind)
        vars(plugin).update(wandb={"api_key": "k3y"}, zero_stage=3)
        copied = without_secrets({"plugin": plugin})["plugin"]
        assert (type(copied), copied.zero_stage) == (kind, 3)
        assert "k3y" not in str(vars(copied))
        assert vars(plugin)["wandb"] == {"api_key": "k3y"}


def test_durations_have_no_jumps_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stock = time.time, transformers_trainer.speed_metrics
    with steady_clock():
        started = time.time()
        monkeypatch.setattr(time, "time", lambda: clock() - 3600)
        found = transformers_trainer.speed_metrics("train", started, num_steps=2)
    assert 0 <= found["train_runtime"] < 60
    assert found["train_steps_per_second"] > 0
    assert transformers_trainer.speed_metrics is stock
