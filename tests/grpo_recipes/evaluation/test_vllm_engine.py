"""Requests of an evaluation to vLLM, which a stub replaces. tests/vllm compares real completions with transformers."""

import io
import json
import sys
import threading
import urllib.error
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from grpo_recipes.evaluation import evaluate, vllm_engine
from grpo_recipes.evaluation.estimates import describe, describe_comparison
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.vllm_engine import VLLM, load_vllm, made_with, needs_merging
from grpo_rewards.errors import UserError
from tests.support import tiny

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


class StubLLM:
    """Stub of vLLM. A completion is the seed, temperature and length of its row."""

    made: ClassVar[list[dict[str, Any]]] = []
    sampling: ClassVar[list[Any]] = []
    llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=CONTEXT))

    def __init__(self, **settings: Any) -> None:
        self.made.append(settings)

    def generate(self, inputs: list, sampling: list, use_tqdm: bool, **more: Any) -> list[SimpleNamespace]:
        assert len(sampling) == len(inputs)
        self.sampling.extend(sampling)
        texts = [f"{row.seed} {row.temperature} {row.max_tokens}" for row in sampling]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens(text))]) for text in texts]


def tokens(text: str) -> list[int]:
    return tiny.byte_tokenizer()(text)["input_ids"]


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubLLM]:
    lora = SimpleNamespace(LoRARequest=lambda name, number, path: (name, path))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=StubLLM, SamplingParams=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "vllm.lora", SimpleNamespace(request=lora))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", lora)
    monkeypatch.setattr(StubLLM, "made", [])
    monkeypatch.setattr(StubLLM, "sampling", [])
    return StubLLM


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def adapters(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return adapters by their special feature."""
    plain = {"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear"}
    configs = {
        "plain": LoraConfig(**plain),
        "rslora": LoraConfig(**plain, use_rslora=True),
        "use_dora": LoraConfig(**plain, use_dora=True),
        "modules_to_save": LoraConfig(**plain, modules_to_save=["lm_head"]),
        "rank_pattern": LoraConfig(**plain, rank_pattern={"q_proj": 2}),
        "target_modules": LoraConfig(**{**plain, "target_modules": ["q_proj", "embed_tokens"]}),
        "IA3": IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]),
    }
    folders = {}
    for name, config in configs.items():
        folders[name] = tmp_path_factory.mktemp(name)
        get_peft_model(AutoModelForCausalLM.from_pretrained(policy), config).save_pretrained(folders[name])
    return folders


def test_vllm_gets_the_dtype_the_options_and_the_end_tokens(policy: Path, stub: type[StubLLM]) -> None:
    options = VLLM(vllm_tensor_parallel_size=2, vllm_max_model_length=CONTEXT, vllm_gpu_memory_utilization=0.5)
    load_vllm(str(policy), options)(PROMPTS, SETTINGS)
    (made,) = stub.made
    given = {"tensor_parallel_size": 2, "max_model_len": CONTEXT, "gpu_memory_utilization": 0.5}
    assert made.items() >= {"model": str(policy), "dtype": "float32", "generation_config": "vllm", **given}.items()
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
    assert sentence.endswith("(sequence_bias: [[[65], 50.0]], temperature: 0.1, top_k: 1)")
    requests = StubServer.requests if served else [vars(row) for row in stub.sampling]
    assert len(requests) == 16
    for row in requests:
        assert row.items() >= {**NEUTRAL, "temperature": 0.5, "stop_token_ids": [1, 7]}.items()


def test_vllm_draws_different_samples_of_a_prompt(policy: Path, stub: type[StubLLM]) -> None:
    engine = load_vllm(str(policy), VLLM())
    first = engine(PROMPTS, SETTINGS)
    assert len(set(first)) == 8
    assert all(text.endswith(" 0.5 7") for text in first)
    assert engine(PROMPTS, SETTINGS) == first
    assert not set(engine(PROMPTS, Settings(samples=8, temperature=0.5, max_new_tokens=7, seed=1))) & set(first)


def test_a_completion_that_vllm_would_cut_is_refused(policy: Path, stub: type[StubLLM]) -> None:
    engine = load_vllm(str(policy), VLLM())
    longest = CONTEXT - len("1 + 1 =")
    engine(PROMPTS, Settings(max_new_tokens=longest))
    with pytest.raises(UserError, match=f"need 65, and vLLM's context has {CONTEXT}.*--vllm_max_model_length"):
        engine(PROMPTS, Settings(max_new_tokens=longest + 1))


@pytest.mark.parametrize("kind", ["plain", "rslora"])
def test_a_default_lora_is_served_without_merging(
    kind: str, policy: Path, adapters: dict[str, Path], stub: type[StubLLM]
) -> None:
    folder = adapters[kind]
    engine = load_vllm(str(folder), VLLM())
    assert engine.request == ("policy", str(folder))
    assert stub.made[0].items() >= {"model": str(policy), "enable_lora": True, "max_lora_rank": 8}.items()
    assert made_with(str(folder), VLLM())["adapter"] == "LoRARequest"


@pytest.mark.parametrize("kind", ["use_dora", "modules_to_save", "rank_pattern", "target_modules", "IA3"])
def test_an_adapter_feature_that_vllm_ignores_makes_it_merge(kind: str, adapters: dict[str, Path]) -> None:
    assert kind in str(needs_merging(str(adapters[kind])))
    assert made_with(str(adapters[kind]), VLLM())["adapter"] == "merged"


def test_merging_an_adapter_logs_a_warning(
    adapters: dict[str, Path], stub: type[StubLLM], caplog: pytest.LogCaptureFixture
) -> None:
    engine = load_vllm(str(adapters["use_dora"]), VLLM())
    assert "merged into its base for vLLM, which takes no adapter with `use_dora`" in caplog.text
    merged = Path(stub.made[0]["model"])
    assert engine.request is None
    assert (merged / "model.safetensors").is_file()
    assert not (merged / "adapter_config.json").exists()


class StubServer(BaseHTTPRequestHandler):
    """Endpoints of a vLLM server that an evaluation uses."""

    requests: ClassVar[list[dict[str, Any]]] = []
    model = ""

    def do_GET(self) -> None:
        config = {"vllm_config": {"model_config": {"dtype": "torch.bfloat16"}}}
        models = {"data": [{"id": "mine", "root": self.model, "max_model_len": 512}]}
        answers = {"/version": {"version": "0.30.0"}, "/server_info": config, "/v1/models": models}
        self.answer(answers[self.path.partition("?")[0]])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        assert body["return_token_ids"]
        self.answer({"choices": [{"token_ids": tokens(f"{len(body['prompt'])} {body['seed']}")}]})

    def answer(self, value: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(policy: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(StubServer, "requests", [])
    monkeypatch.setattr(StubServer, "model", str(policy))
    with ThreadingHTTPServer(("127.0.0.1", 0), StubServer) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_a_server_completes_each_prompt_with_its_own_seed(policy: Path, server: str) -> None:
    options = VLLM(vllm_server_base_url=f"{server}/v1")
    made = load_vllm(str(policy), options)(["1 + 1 =", "2 +"], SETTINGS)
    assert [text.split()[0] for text in made] == ["7", "3"]
    requests = {body["seed"]: body for body in StubServer.requests}
    assert len(requests) == 2
    for body in requests.values():
        assert body.items() >= {"model": "mine", "temperature": 0.5, "max_tokens": 7, "stop": ["</b>"]}.items()
        assert body.items() >= {**NEUTRAL, "stop_token_ids": [1]}.items()
    assert made_with(str(policy), options) == {"version": "0.30.0", "dtype": "bfloat16"}


def test_a_server_that_cuts_completions_is_refused(policy: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A published `max_new_tokens` limits every request to a server, also larger ones."""
    engine = load_vllm(str(policy), VLLM(vllm_server_base_url=server))
    cut = {"token_ids": [5, 6], "finish_reason": "length"}
    monkeypatch.setattr(StubServer, "do_POST", lambda handler: handler.answer({"choices": [cut]}))
    engine(["1"], Settings(max_new_tokens=2))
    with pytest.raises(UserError, match="cuts completions at 2 tokens.* start it with `--generation-config vllm`"):
        engine(["1"], Settings(max_new_tokens=3))


def test_an_evaluation_records_the_sampling_settings_in_force(policy: Path, server: str, tmp_path: Path) -> None:
    options = {"dataset": "arithmetic", "limit": 2, "max_new_tokens": 4, "samples": 2, "prompt_format": "text"}
    summary = evaluate.evaluate_model(policy, output=tmp_path / "a", **options)
    assert summary["sampling"] == {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": 4,
        "eos_token_id": [1],
        "pad_token_id": 0,
        "stop": [],
    }
    served = {"vllm": True, "vllm_server_base_url": server, "output": tmp_path / "b"}
    summary = evaluate.evaluate_model(policy, **options, **served)
    assert summary["sampling"].items() >= {**NEUTRAL, "temperature": 1.0, "max_tokens": 4}.items()
    assert evaluate.evaluate_model(policy, **options, **served) == summary, "read, not evaluated again"
    said = describe(summary)
    assert any("  sampling: temperature 1.0, top_p 1.0, top_k 0, min_p 0.0, rep" in str(part) for part in said)
    del summary["sampling"]  # the key is optional
    assert not any("sampling" in str(part) for part in describe(summary))


def test_a_server_of_another_model_is_refused(tmp_path: Path, server: str) -> None:
    other = str(tiny.save_policy(tmp_path / "other"))
    with pytest.raises(UserError, match="serves mine, and not .*other"):
        load_vllm(other, VLLM(vllm_server_base_url=server))


def test_a_comparison_warns_about_different_engines(policy: Path, server: str, tmp_path: Path) -> None:
    options = {"dataset": "arithmetic", "limit": 2, "max_new_tokens": 4, "prompt_format": "text"}
    summary = evaluate.evaluate_model(policy, output=tmp_path / "a", **options)
    assert summary["engine"] == "transformers"
    assert summary["made_with"]["dtype"] == "float32"
    served = {"vllm": True, "vllm_server_base_url": server, "output": tmp_path / "b"}
    assert evaluate.evaluate_model(policy, **options, **served)["engine"] == "vllm server"
    result = evaluate.compare(tmp_path / "a", tmp_path / "b")
    (warning,) = result["warnings"]
    assert "engine transformers and vllm server; version" in warning
    assert "dtype float32 and bfloat16" in warning
    assert f"  warning: {warning}" in describe_comparison(result)
    assert evaluate.compare(tmp_path / "a", tmp_path / "a")["warnings"] == []


def test_what_a_server_answers_to_a_wrong_request_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(request: Any, timeout: float) -> None:
        assert request.full_url == "http://h/v1/models"
        body = io.BytesIO(b"no\nsuch \xff model" + b"x" * 900)
        raise urllib.error.HTTPError(request.full_url, 404, "Not Found", Message(), body)

    monkeypatch.setattr(vllm_engine.urllib.request, "urlopen", refuses)
    with pytest.raises(UserError) as raised:
        vllm_engine._request("http://h/v1/", "/v1/models")
    said = str(raised.value)
    assert said.startswith("the vLLM server http://h/v1/models: 404 no such \ufffd modelxxx")
    assert len(said) == len("the vLLM server http://h/v1/models: 404 ") + 500


def test_a_prompt_and_its_completion_may_fill_the_context() -> None:
    vllm_engine.check_lengths([[1] * 3, [1] * 5], 4, 9)
    with pytest.raises(
        UserError, match="a prompt of 5 tokens and --max_new_tokens 5 need 10, and vLLM's context has 9"
    ):
        vllm_engine.check_lengths([[1] * 5, [1] * 3], 5, 9)


def test_each_request_has_a_seed_of_its_own_that_the_evaluations_seed_decides() -> None:
    seeds = vllm_engine._seeds(3, 50)
    assert len(set(seeds)) == 50
    assert seeds == vllm_engine._seeds(3, 50) != vllm_engine._seeds(4, 50)
    assert vllm_engine._lengths([[1], [2]], Settings(max_new_tokens=7, strict=None), None) == [7, 7]
    assert vllm_engine._lengths([[1], [2]], Settings(max_new_tokens=7, strict=None), [3, 4]) == [3, 4]
