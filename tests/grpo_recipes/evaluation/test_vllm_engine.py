"""Requests of an evaluation to vLLM, which a stub replaces. tests/vllm compares real completions with transformers."""

import json
import math
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_recipes.evaluation import evaluate, vllm_engine
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.summary import compare
from grpo_recipes.evaluation.vllm_engine import VLLM
from tests.support import tiny
from tests.support.errors import refused
from tests.support.quantized import needs_bitsandbytes

PROMPTS = ["1 + 1 ="] * 8
SETTINGS = Settings(samples=8, temperature=0.5, max_new_tokens=7, stop=("</b>",))
CONTEXT = 64
NEUTRAL = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
"""Neutral values of every field that vLLM would read from a generation_config.json, and of its penalties."""
FIXED = {"dtype": "float32", "generation_config": "vllm", "trust_remote_code": False}
"""Arguments that vLLM gets for every policy of these tests."""


def load_vllm(name: str, options: VLLM) -> Any:
    return vllm_engine.load_vllm(SavedModel(name), options, tiny.byte_tokenizer())


def made_with(name: str, options: VLLM) -> dict[str, Any]:
    return vllm_engine.made_with(SavedModel(name), options)


def needs_merging(name: Path) -> str | None:
    return vllm_engine.needs_merging(SavedModel(str(name)))


class StubLLM:
    """Stub of vLLM. A completion is the seed, temperature and length of its row."""

    made: ClassVar[list[dict[str, Any]]] = []
    sampling: ClassVar[list[Any]] = []
    inputs: ClassVar[list[Any]] = []
    requests: ClassVar[list[dict[str, Any]]] = []
    llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=CONTEXT))

    def __init__(self, **settings: Any) -> None:
        self.made.append(settings)

    def generate(self, inputs: list, sampling: list, use_tqdm: bool, **more: Any) -> list[SimpleNamespace]:
        assert len(sampling) == len(inputs)
        assert not use_tqdm
        self.sampling.extend(sampling)
        self.inputs.extend(inputs)
        self.requests.append(more)
        texts = [f"{row.seed} {row.temperature} {row.max_tokens}" for row in sampling]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[*tokens(text), 1])]) for text in texts]


def tokens(text: str) -> list[int]:
    return tiny.byte_tokenizer()(text)["input_ids"]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubLLM]:
    lora = SimpleNamespace(LoRARequest=lambda name, number, path: (name, number, path))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=StubLLM, SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace(request=lora))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", lora)
    for name in ("made", "sampling", "inputs", "requests"):
        monkeypatch.setattr(StubLLM, name, [])
    return StubLLM


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_policy(tmp_path_factory.mktemp("policy"))


def save_adapter(policy: Path, folder: Path, **features: Any) -> Path:
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", **features)
    get_peft_model(AutoModelForCausalLM.from_pretrained(policy), config).save_pretrained(folder)
    return folder


def test_vllm_gets_the_dtype_the_options_and_the_end_tokens(policy: Path, stub: type[StubLLM]) -> None:
    options = VLLM(vllm_tensor_parallel_size=2, vllm_max_model_length=CONTEXT, vllm_gpu_memory_utilization=0.5)
    load_vllm(str(policy), options)(PROMPTS, SETTINGS)
    (made,) = stub.made
    given = {"tensor_parallel_size": 2, "max_model_len": CONTEXT, "gpu_memory_utilization": 0.5}
    assert made == {"model": str(policy), **FIXED, **given}
    assert stub.inputs == [{"prompt_token_ids": tokens(prompt)} for prompt in PROMPTS]
    assert stub.requests == [{}], "no adapter"
    for row in stub.sampling:
        assert (row.stop, row.include_stop_str_in_output, row.stop_token_ids) == (["</b>"], True, [1])
        assert vars(row).items() >= NEUTRAL.items()


@pytest.mark.parametrize("served", [False, True])
def test_published_sampling_settings_are_not_passed_to_vllm(
    served: bool, tmp_path: Path, stub: type[StubLLM], request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny.save_policy(tmp_path / "policy")
    published = {"temperature": 0.1, "top_k": 1, "sequence_bias": [[[65], 50.0]], "eos_token_id": [1, 7]}
    (folder / "generation_config.json").write_text(json.dumps(published))
    options = VLLM()
    if served:
        options = VLLM(vllm_server_base_url=request.getfixturevalue("server"))
        StubServer.model = str(folder)
    engine = load_vllm(str(folder), options)
    for _ in range(2):
        engine(PROMPTS, SETTINGS)
    (sentence,) = [text for text in caplog.messages if "generation_config" in text]
    assert all(name in sentence for name in ("sequence_bias: [[[65], 50.0]]", "temperature: 0.1", "top_k: 1"))
    requests = StubServer.requests if served else [vars(row) for row in stub.sampling]
    assert len(requests) == 16
    for row in requests:
        assert row.items() >= {**NEUTRAL, "temperature": 0.5, "stop_token_ids": [1, 7]}.items()


def test_a_completion_that_vllm_would_cut_is_refused(policy: Path, stub: type[StubLLM]) -> None:
    engine = load_vllm(str(policy), VLLM())
    longest = CONTEXT - len("1 + 1 =")
    engine(PROMPTS, Settings(max_new_tokens=longest))
    with refused("--max_new_tokens", CONTEXT + 1, CONTEXT, "--vllm_max_model_length"):
        engine(PROMPTS, Settings(max_new_tokens=longest + 1))


def test_a_default_lora_is_served_without_merging(
    policy: Path, tmp_path: Path, stub: type[StubLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_adapter(policy, tmp_path / "adapter")
    monkeypatch.chdir(tmp_path)
    engine = load_vllm(folder.name, VLLM())
    assert stub.made == [{"model": str(policy), **FIXED, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8}]
    engine(PROMPTS, SETTINGS)
    assert stub.requests == [{"lora_request": ("policy", 1, str(folder))}]
    assert made_with(str(folder), VLLM())["adapter"] == "LoRARequest"


def test_vllm_gets_the_smallest_room_that_an_adapters_rank_fits_into(
    policy: Path, tmp_path: Path, stub: type[StubLLM]
) -> None:
    """The rooms are those of `MaxLoRARanks` in vLLM's `config/lora.py`. A larger rank is left to vLLM to refuse."""
    expected = {1: 8, 8: 8, 9: 16, 17: 32, 33: 64, 65: 128, 129: 256, 257: 320, 321: 512, 512: 512, 513: 513}
    save_file({"weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    for rank in expected:
        LoraConfig(r=rank, target_modules=["q_proj"], base_model_name_or_path=str(policy)).save_pretrained(tmp_path)
        load_vllm(str(tmp_path), VLLM())
    assert [made["max_lora_rank"] for made in stub.made] == list(expected.values())


def test_what_vllm_applies_or_only_training_reads_needs_no_merging(tmp_path: Path) -> None:
    served = {"r": 3, "lora_alpha": 7, "lora_dropout": 0.5, "use_rslora": True, "init_lora_weights": "gaussian"}
    named = {"base_model_name_or_path": "owner/base", "revision": "v2", "task_type": "CAUSAL_LM"}
    config = LoraConfig(**served, **named, inference_mode=True, target_modules=["q_proj", "v_proj"])
    config.save_pretrained(tmp_path)
    assert needs_merging(tmp_path) is None
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**written, "rank_pattern": None, "bias": None}))
    assert needs_merging(tmp_path) is None, "what is off needs nothing"


LINEAR: dict[str, Any] = {"target_modules": "all-linear"}
MERGED = {
    "use_dora": LoraConfig(**LINEAR, use_dora=True),
    "modules_to_save": LoraConfig(**LINEAR, modules_to_save=["lm_head"]),
    "rank_pattern": LoraConfig(**LINEAR, rank_pattern={"q_proj": 2}),
    "target_modules": LoraConfig(target_modules=["q_proj", "embed_tokens"]),
    "`target_modules`": LoraConfig(target_modules=["q_proj", "lm_head"]),
    "`target_modules": LoraConfig(target_modules=".*q_proj"),
    "IA3": IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "PROMPT_TUNING": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
}


@pytest.mark.parametrize("feature", MERGED)
def test_an_adapter_feature_that_vllm_ignores_makes_it_merge(feature: str, tmp_path: Path) -> None:
    MERGED[feature].save_pretrained(tmp_path)
    assert feature in str(needs_merging(tmp_path))
    assert made_with(str(tmp_path), VLLM())["adapter"] == "merged"


@needs_bitsandbytes
def test_an_adapter_on_a_quantized_base_needs_merging(tmp_path: Path) -> None:
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"recipe": {"load_in_8bit": True}}))
    assert needs_merging(tmp_path) is not None


def test_a_model_that_vllm_can_not_load_is_named(
    policy: Path, tmp_path: Path, stub: type[StubLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (OSError("no\nroom"), RuntimeError("no room"), ValueError("no room")):
        monkeypatch.setattr(StubLLM, "__init__", Mock(side_effect=error))
        with refused(policy, "no room"):
            load_vllm(str(policy), VLLM())
    weights = tiny.save_policy(tmp_path / "broken")
    tensors = load_file(weights / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = math.nan
    save_file(tensors, weights / "model.safetensors", metadata={"format": "pt"})
    with refused(weights, "lm_head.weight"):
        load_vllm(str(weights), VLLM())


@pytest.mark.parametrize("name", ["tensor_parallel_size", "max_model_length", "gpu_memory_utilization"])
def test_an_option_of_the_engine_in_this_process_is_not_one_of_a_server(name: str) -> None:
    given = {f"vllm_{name}": 0}
    with refused(f"--vllm_{name}", "--vllm_server_base_url"):
        VLLM(vllm_server_base_url="http://h", **given)
    named = {"max_model_length": "max_model_len"}.get(name, name)
    assert VLLM(**given).arguments() == {named: 0}, "vLLM says what is wrong with it"
    assert (VLLM().arguments(), VLLM().name) == ({}, "vllm")


def test_an_empty_address_is_one_of_a_server() -> None:
    """An empty variable of a script must not start an engine in this process."""
    for address in ("", "gpu1"):
        with refused(f"server {address}", "--vllm_server_base_url"):
            load_vllm("m", VLLM(vllm_server_base_url=address))


def test_the_record_names_version_and_dtype(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine.record, "versions", lambda: {"torch": "2", "vllm": "0.30.0"})
    assert made_with(str(policy), VLLM()) == {"version": "0.30.0", "dtype": "float32"}
    assert made_with(str(tmp_path), VLLM())["dtype"] == "float32", "no file names a dtype"


@pytest.mark.parametrize("served", [False, True])
def test_each_row_has_the_length_that_it_has_room_for(
    served: bool, policy: Path, stub: type[StubLLM], server: str
) -> None:
    """The results of tools take room. Rows with room are not refused for the length of the others."""
    engine = load_vllm(str(policy), VLLM(vllm_server_base_url=server) if served else VLLM())
    settings = Settings(max_new_tokens=int(engine.positions))
    assert engine.positions == (512 if served else CONTEXT)
    engine.generate([[5], [5, 6]], settings, [2, 3])
    prompts = [row["prompt"] for row in StubServer.requests] or [given["prompt_token_ids"] for given in stub.inputs]
    lengths = [row["max_tokens"] for row in StubServer.requests] or [row.max_tokens for row in stub.sampling]
    assert sorted(zip(map(len, prompts), lengths, strict=True)) == [(1, 2), (2, 3)]
    with refused("--max_new_tokens", settings.max_new_tokens + 1):
        engine.generate([[5]], settings)


def test_merging_an_adapter_logs_a_warning(
    policy: Path, tmp_path: Path, stub: type[StubLLM], caplog: pytest.LogCaptureFixture
) -> None:
    engine = load_vllm(str(save_adapter(policy, tmp_path / "adapter", use_dora=True)), VLLM())
    assert "`use_dora`" in caplog.text
    merged = Path(stub.made[0]["model"])
    assert engine.request is None
    assert (merged / "model.safetensors").is_file()
    assert not (merged / "adapter_config.json").exists()


class StubServer(BaseHTTPRequestHandler):
    """Endpoints of a vLLM server that an evaluation uses."""

    requests: ClassVar[list[dict[str, Any]]] = []
    model = ""
    others: ClassVar[list[dict[str, Any]]] = []
    """Models that are served before `model`."""
    answers: ClassVar[dict[str, bytes]] = {}
    """Answers in place of those of a server that works, by path. One that is no JSON is an error 404."""
    config: ClassVar[Any] = {"vllm_config": {"model_config": {"dtype": "torch.bfloat16"}}}

    def do_GET(self) -> None:
        models = {"data": [*self.others, {"id": "mine", "root": self.model, "max_model_len": 512}]}
        answers = {"/version": {"version": "0.30.0"}, "/server_info": self.config, "/v1/models": models}
        self.answer(answers[self.path.partition("?")[0]])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        assert body["return_token_ids"]
        assert self.headers["Content-Type"] == "application/json"
        self.answer({"choices": [{"token_ids": [*tokens(f"{len(body['prompt'])} {body['seed']}"), 1]}]})

    def answer(self, value: Any) -> None:
        content = self.answers.get(self.path.partition("?")[0], json.dumps(value).encode())
        self.send_response(404 if content.startswith(b"no") else 200)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(policy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in {"requests": [], "model": str(policy), "others": [], "answers": {}}.items():
        monkeypatch.setattr(StubServer, name, value)
    with ThreadingHTTPServer(("127.0.0.1", 0), StubServer) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_server_completes_each_prompt_with_its_own_seed(policy: Path, server: str) -> None:
    options = VLLM(vllm_server_base_url=f"{server}/v1")
    made = load_vllm(str(policy), options)(["1 + 1 =", "2 +"], SETTINGS)
    assert [text.split()[0] for text in made] == ["7", "3"]
    assert all(text.split()[1].isdecimal() for text in made), "without the end token"
    requests = {body["seed"]: body for body in StubServer.requests}
    assert len(requests) == 2
    for body in requests.values():
        assert body.items() >= {"model": "mine", "temperature": 0.5, "max_tokens": 7, "stop": ["</b>"]}.items()
        assert body.items() >= {**NEUTRAL, "stop_token_ids": [1]}.items()
    assert made_with(str(policy), options) == {"version": "0.30.0", "dtype": "bfloat16"}


def test_a_server_that_cuts_completions_is_refused(policy: Path, server: str) -> None:
    """A published `max_new_tokens` limits every request to a server, also larger ones."""
    engine = load_vllm(str(policy), VLLM(vllm_server_base_url=server))
    cut = {"token_ids": [5, 6], "finish_reason": "length"}
    StubServer.answers["/v1/completions"] = json.dumps({"choices": [cut]}).encode()
    engine(["1"], Settings(max_new_tokens=2))
    with refused(server, "2", "3", "`--generation-config vllm`"):
        engine(["1"], Settings(max_new_tokens=3))


def test_an_evaluation_records_its_engine_and_the_sampling_settings_in_force(
    policy: Path, server: str, tmp_path: Path
) -> None:
    options = {"dataset": "arithmetic", "split": "test[:2]", "max_new_tokens": 4, "samples": 2, "prompt_format": "text"}
    summary = evaluate.evaluate_model(policy, output=tmp_path / "a", **options)
    assert (summary["engine"], summary["made_with"]["dtype"]) == ("transformers", "float32")
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    ends = {"max_new_tokens": 4, "eos_token_id": [1], "pad_token_id": 0, "stop": []}
    assert summary["sampling"] == {**sampling, **ends}
    served = {"vllm": True, "vllm_server_base_url": server, "output": tmp_path / "b"}
    summary = evaluate.evaluate_model(policy, **options, **served)
    assert summary["engine"] == "vllm server"
    assert summary["sampling"].items() >= {**NEUTRAL, "temperature": 1.0, "max_tokens": 4}.items()
    StubServer.answers["/v1/models"] = b"no answer"
    assert evaluate.evaluate_model(policy, **options, **served) == summary, "read, not evaluated again"
    (warning,) = compare(tmp_path / "a", tmp_path / "b")["warnings"]
    assert "engine transformers and vllm server; version" in warning
    assert "dtype float32 and bfloat16" in warning


def test_a_server_names_a_model_by_its_id_or_its_folder(
    policy: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(policy.parent)
    options = VLLM(vllm_server_base_url=server)
    named = {"id": policy.name, "root": None, "max_model_len": 9}
    unlimited = {"id": "other", "root": str(policy), "max_model_len": None}
    for others, model, positions in (
        ([{"id": "base", "root": "owner/base"}], "mine", 512),
        ([named], policy.name, 9),
        ([unlimited, named], "other", math.inf),
    ):
        StubServer.others = others
        engine = load_vllm(policy.name, options)
        assert (engine.model, engine.positions) == (model, positions)
    with refused(server, "other", policy.name, "mine", "owner/model"):
        load_vllm("owner/model", options)


def test_the_dtype_of_a_server_may_be_unknown(server: str) -> None:
    options = VLLM(vllm_server_base_url=f"{server}/v1/")
    for answer, dtype in (
        ({"vllm_config": {"model_config": {"dtype": "float32"}}}, "float32"),
        ({}, None),
        ("not found", None),
    ):
        StubServer.answers["/server_info"] = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        assert made_with("m", options) == {"version": "0.30.0", "dtype": dtype}


def test_what_a_server_answers_to_a_wrong_request_is_told_in_one_line(server: str) -> None:
    StubServer.answers["/version"] = b"no\nsuch \xff model" + b"x" * 900
    with refused(f"{server}/version", "404", "no such \ufffd modelxxx") as caught:
        made_with("m", VLLM(vllm_server_base_url=server))
    assert len(caught.value.problem) < 530
    StubServer.answers["/version"] = b"<html>"
    with refused(server, "--vllm_server_base_url"):
        made_with("m", VLLM(vllm_server_base_url=server))


def test_each_request_has_a_seed_of_its_own_that_the_evaluations_seed_decides(
    policy: Path, stub: type[StubLLM]
) -> None:
    engine = load_vllm(str(policy), VLLM())

    def seeds(seed: int) -> list[int]:
        stub.sampling.clear()
        engine.generate([[5]] * 50, Settings(max_new_tokens=7, seed=seed))
        return [row.seed for row in stub.sampling]

    assert len(set(seeds(3))) == 50
    assert 2**30 < max(seeds(3)) < 2**31, "vLLM's seeds are whole numbers of 32 bits"
    assert seeds(3) == seeds(3)
    assert not set(seeds(3)) & set(seeds(4))
