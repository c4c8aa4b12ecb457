"""Engines of an evaluation that use vLLM: in this process, or by a running server."""

from __future__ import annotations

import json
import logging
import math
import random
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftType
from transformers import GenerationConfig

from grpo_recipes.evaluation.engines import Engine, Ids, generation_options
from grpo_recipes.evaluation.merge import write_merged
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.generation.sampling_settings import PublishedSettings
from grpo_recipes.runs import record
from grpo_recipes.runs.weights import adapter_kind, check_finite_files
from grpo_rewards.errors import UserError, one_line

CONCURRENT_REQUESTS = 64
SECONDS = 600.0
"""Time limit for one completion of a server."""
FLOAT32 = "float32"
"""Dtype of a checkpoint that names none: it loses nothing of any dtype."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's `max_lora_rank`."""
SERVED_KEYS = {
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "lora_alpha", "lora_dropout",
    "peft_type", "peft_version", "r", "revision", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""Keys of a LoRA configuration that vLLM applies, or that matter only in training."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VLLM:
    """Options of vLLM, under the names of the recipe's keys.

    Attributes:
        vllm_server_base_url: URL of a server that serves the model, or None for an engine in this process. The other
            options belong to the engine in this process.
        vllm_tensor_parallel_size: Number of GPUs that share the model.
        vllm_max_model_length: Maximum number of tokens of prompt and completion, or None for the model's own.
        vllm_gpu_memory_utilization: Share of each GPU's memory that vLLM uses.
    """

    vllm_server_base_url: str | None = None
    vllm_tensor_parallel_size: int | None = None
    vllm_max_model_length: int | None = None
    vllm_gpu_memory_utilization: float | None = None

    def __post_init__(self) -> None:
        if self.vllm_server_base_url is None:
            return
        for field in fields(self):
            if field.name != "vllm_server_base_url" and getattr(self, field.name) is not None:
                fix = "leave out it or --vllm_server_base_url"
                raise UserError(f"--{field.name}", "it is set where the server is started", fix)

    @property
    def name(self) -> str:
        """Name of the engine in `evaluation.json`."""
        return "vllm" if self.vllm_server_base_url is None else "vllm server"

    def arguments(self) -> dict[str, Any]:
        """Return the given arguments of vLLM's `LLM`, under its names."""
        named = {
            "tensor_parallel_size": self.vllm_tensor_parallel_size,
            "max_model_len": self.vllm_max_model_length,
            "gpu_memory_utilization": self.vllm_gpu_memory_utilization,
        }
        return {name: value for name, value in named.items() if value is not None}


def load_vllm(model: SavedModel, options: VLLM, tokenizer: Any) -> Engine:
    """Return the vLLM engine of a model or adapter.

    Args:
        model: Model or adapter.
        options: Options of vLLM.
        tokenizer: Tokenizer that can pad.

    Raises:
        UserError: The model can't be loaded, or the server does not serve it.
    """
    if options.vllm_server_base_url is not None:
        return VLLMServer(options.vllm_server_base_url, model, tokenizer)
    return LocalVLLM(model, options, tokenizer)


def made_with(model: SavedModel, options: VLLM) -> dict[str, Any]:
    """Return version and precision, and how an adapter is applied. None is a value that a server does not report.

    Raises:
        UserError: The server does not answer.
    """
    if (url := options.vllm_server_base_url) is not None:
        return {"version": str(_request(url, "/version")["version"]), "dtype": _server_dtype(url)}
    installed = record.versions()
    version = next((installed[package] for package in record.VLLM if package in installed), None)
    made: dict[str, Any] = {"version": version, "dtype": model.dtype or FLOAT32, **model.describe_quantization()}
    if model.is_adapter:
        made["adapter"] = "merged" if needs_merging(model) else "LoRARequest"
    return made


def needs_merging(model: SavedModel) -> str | None:
    """Return the feature of an adapter that vLLM's `LoRARequest` does not support, or None if it supports all.

    vLLM knows the two factors, their rank and their scale. It refuses or ignores everything else in the configuration.
    """
    config = model.adapter
    assert config is not None, "the caller knows that it is an adapter"
    if config.peft_type != PeftType.LORA:
        return f"its kind, {adapter_kind(config)}"
    assert isinstance(config, LoraConfig)
    defaults = LoraConfig().to_dict()
    for key, value in config.to_dict().items():
        if key not in SERVED_KEYS and value and value != defaults.get(key):
            return f"`{key}`"
    targets = config.target_modules
    if isinstance(targets, str) or {"embed_tokens", "lm_head"} & set(targets or ()):
        return "`target_modules`"
    return None if model.quantization is None else "a base that was quantized for training"


class _VLLMEngine(Engine):
    """Base class of both engines: requests with equal settings.

    All sampling settings are sent, because vLLM fills missing ones from the model's generation_config.json.
    """

    def __init__(self, model: SavedModel, tokenizer: Any) -> None:
        self.tokenizer, self.config = tokenizer, model.generation_config()
        self.published = PublishedSettings(logger.warning)

    def sampling(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of `SamplingParams`, without the seed of each request."""
        options = generation_options(settings, self.config, self.tokenizer)
        self.published.announce_ignored(self.config, GenerationConfig(**options))
        return {
            "temperature": settings.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "min_tokens": 0,
            "max_tokens": settings.max_new_tokens,
            "stop": list(settings.stop),
            "stop_token_ids": options["eos_token_id"],
            "include_stop_str_in_output": True,  # as in training
        }

    def requests(self, prompts: list[Ids], settings: Settings, room: Sequence[int] | None) -> list[dict[str, Any]]:
        """Return the fields of `SamplingParams` for each prompt. Raises `UserError` if a prompt leaves too little room.

        Args:
            prompts: Token IDs of each prompt.
            settings: Settings of sampling.
            room: Largest length of each completion in tokens, if it is not `settings.max_new_tokens`.
        """
        if room is None:
            most = settings.max_new_tokens
            room, longest = [most] * len(prompts), max(map(len, prompts))
            if longest + most > self.positions:  # vLLM would cut the completion silently
                need = f"a prompt of {longest} tokens needs a context of {longest + most}"
                fix = "lower it, or raise --vllm_max_model_length"
                raise UserError(f"--max_new_tokens {most}", f"{need}, and vLLM's has {self.positions}", fix)
        fixed = self.sampling(settings)
        # With one seed, copies of a prompt would get equal completions.
        seeds = random.Random(settings.seed).sample(range(2**31), len(prompts))
        return [{**fixed, "max_tokens": most, "seed": seed} for most, seed in zip(room, seeds, strict=True)]


class LocalVLLM(_VLLMEngine):
    """Completions by an engine in this process, in the checkpoint's dtype. By default vLLM runs float32 as bfloat16."""

    def __init__(self, model: SavedModel, options: VLLM, tokenizer: Any) -> None:
        try:
            from vllm import LLM
        except ImportError as error:
            raise UserError("--vllm", "vLLM is not installed", "leave it out, or install the extra `vllm`") from error
        if model.folder.is_dir():
            check_finite_files(model.folder)
        self.request: Any = None
        self._merged: tempfile.TemporaryDirectory[str] | None = None
        arguments = {"model": model.name, "dtype": model.dtype or FLOAT32, **options.arguments()}
        if model.is_adapter:
            arguments |= self._adapter_arguments(model)
        try:
            self.llm = LLM(trust_remote_code=False, generation_config="vllm", **arguments)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(model.name, f"vLLM can't load it ({one_line(error)})", "leave --vllm out") from error
        self.positions = self.llm.llm_engine.model_config.max_model_len
        super().__init__(model, tokenizer)

    def _adapter_arguments(self, model: SavedModel) -> dict[str, Any]:
        """Return the arguments of `LLM` for an adapter, which is merged into its base if vLLM does not support it."""
        if reason := needs_merging(model):
            logger.warning("the adapter is merged into its base for vLLM, which takes no adapter with %s", reason)
            self._merged = tempfile.TemporaryDirectory(prefix="merged-")
            merged = Path(self._merged.name) / "model"
            write_merged(model, merged)
            return {"model": str(merged)}
        from vllm.lora.request import LoRARequest

        config = model.adapter
        assert isinstance(config, LoraConfig), "`needs_merging` has looked"
        self.request = LoRARequest("policy", 1, str(model.folder.absolute()))
        rank = next((room for room in RANKS if room >= config.r), config.r)
        return {"model": config.base_model_name_or_path, "enable_lora": True, "max_loras": 1, "max_lora_rank": rank}

    def generate(self, prompts: list[Ids], settings: Settings, room: Sequence[int] | None = None) -> list[Ids]:
        """Return the token IDs of one completion of each prompt, as `Engine.generate` does."""
        from vllm import SamplingParams

        sampling = [SamplingParams(**request) for request in self.requests(prompts, settings, room)]
        rows = [{"prompt_token_ids": ids} for ids in prompts]
        adapter = {"lora_request": self.request} if self.request is not None else {}
        outputs = self.llm.generate(rows, sampling, use_tqdm=False, **adapter)
        return [list(output.outputs[0].token_ids) for output in outputs]


class VLLMServer(_VLLMEngine):
    """Completions by a running server, one request each, because the prompts of one request would share a seed."""

    def __init__(self, url: str, model: SavedModel, tokenizer: Any) -> None:
        self.url = url
        models = _request(url, "/v1/models")["data"]
        names = {model.name}
        if model.folder.exists():
            names.add(str(model.folder.absolute()))
        found = [one for one in models if {one["id"], one.get("root")} & names]
        if not found:
            served = ", ".join(str(one["id"]) for one in models)
            problem = f"it serves {served}, and not {model.name}"
            raise UserError(f"the vLLM server {url}", problem, "name what it serves")
        self.model = found[0]["id"]
        self.positions = found[0].get("max_model_len") or math.inf
        super().__init__(model, tokenizer)

    def generate(self, prompts: list[Ids], settings: Settings, room: Sequence[int] | None = None) -> list[Ids]:
        """Return the token IDs of one completion of each prompt, as `Engine.generate` does."""
        fixed = {"model": self.model, "return_token_ids": True}
        requests = self.requests(prompts, settings, room)
        bodies = [{**fixed, **request, "prompt": ids} for request, ids in zip(requests, prompts, strict=True)]
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            answers = list(pool.map(lambda body: _request(self.url, "/v1/completions", body), bodies))
        made: list[Ids] = []
        for request, answer in zip(requests, answers, strict=True):
            choice, most = answer["choices"][0], request["max_tokens"]
            length = len(choice["token_ids"])
            if choice.get("finish_reason") == "length" and length < most:
                problem = f"it cuts completions at {length} tokens, and --max_new_tokens is {most}"
                fix = "start it with `--generation-config vllm`, as a published `max_new_tokens` limits all requests"
                raise UserError(f"the vLLM server {self.url}", problem, fix)
            made.append(choice["token_ids"])
        return made


def _request(url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the JSON answer of a server. Raises `UserError` if it does not answer, or answers with an error."""
    url = url.rstrip("/").removesuffix("/v1")
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        text = one_line(error.read().decode(errors="replace")[:500])
        fix = "correct the options or the server"
        raise UserError(f"the vLLM server {url}{path}", f"it answers {error.code} {text}", fix) from error
    except (OSError, ValueError) as error:
        fix = "start it, or correct --vllm_server_base_url"
        raise UserError(f"the vLLM server {url}", f"it does not answer ({error})", fix) from error


def _server_dtype(url: str) -> str | None:
    """Return the dtype of a server, or None unless it was started with `VLLM_SERVER_DEV_MODE=1`, as for training."""
    try:
        info = _request(url, "/server_info?config_format=json")
    except UserError:
        return None
    dtype = info.get("vllm_config", {}).get("model_config", {}).get("dtype")
    return str(dtype).removeprefix("torch.") if dtype else None
