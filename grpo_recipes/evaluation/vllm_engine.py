"""vLLM as the engine of an evaluation: in this process, or a server that runs already."""

from __future__ import annotations

import json
import logging
import random
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from grpo_recipes.evaluation.engines import (
    Engine,
    checkpoint_dtype,
    end_tokens,
    generation_options,
    load_tokenizer,
    published_config,
    token_ids,
)
from grpo_recipes.evaluation.merge import merge
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.generation.generation_config import PublishedSettings
from grpo_recipes.runs.record import VLLM as DISTRIBUTIONS
from grpo_recipes.runs.weights import ADAPTER_CONFIG, adapter_config
from grpo_rewards.errors import UserError

CONCURRENT_REQUESTS = 64
SECONDS = 600.0
"""How long a server may take over one completion."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VLLM:
    """How vLLM generates; the names are those of the recipe's keys.

    Attributes:
        vllm_server_base_url: a server that serves the model; None for an engine in this process, which the rest is about.
        vllm_tensor_parallel_size: GPUs that share the model.
        vllm_max_model_length: tokens of prompt and completion together; None for the model's own.
        vllm_gpu_memory_utilization: the share of each GPU that vLLM takes.
    """

    vllm_server_base_url: str | None = None
    vllm_tensor_parallel_size: int | None = None
    vllm_max_model_length: int | None = None
    vllm_gpu_memory_utilization: float | None = None

    def __post_init__(self) -> None:
        if self.vllm_server_base_url is None:
            return
        own = [field.name for field in fields(self) if field.name != "vllm_server_base_url"]
        for name in own:
            if getattr(self, name) is not None:
                raise UserError(f"--{name} is the server's own: leave it out, or --vllm_server_base_url")

    @property
    def name(self) -> str:
        """The engine as `evaluation.json` names it."""
        return "vllm" if self.vllm_server_base_url is None else "vllm server"

    def settings(self) -> dict[str, Any]:
        """The arguments of vLLM's `LLM` that are given, under its names."""
        named = {
            "tensor_parallel_size": self.vllm_tensor_parallel_size,
            "max_model_len": self.vllm_max_model_length,
            "gpu_memory_utilization": self.vllm_gpu_memory_utilization,
        }
        return {name: value for name, value in named.items() if value is not None}


def load_vllm(name: str, options: VLLM, prompts: Sequence[Any] = ()) -> Engine:
    """Return the engine of a model or adapter, its tokenizer tried on some prompts first. Raises `UserError` if it
    fails."""
    tokenizer = load_tokenizer(name, prompts)
    if options.vllm_server_base_url is not None:
        return Server(options.vllm_server_base_url, name, tokenizer)
    return Local(name, options, tokenizer)


def made_with(name: str, options: VLLM) -> dict[str, Any]:
    """The version and dtype, and how an adapter is applied; null is what a server does not tell.

    Raises `UserError` if a server does not answer.
    """
    if options.vllm_server_base_url is not None:
        server = Served(options.vllm_server_base_url)
        return {"version": server.version(), "dtype": server.dtype()}
    adapter = {"adapter": "merged" if needs_merging(name) else "LoRARequest"} if _is_adapter(name) else {}
    return {"version": _version(), "dtype": _dtype(name), **adapter}


def _version() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _dtype(name: str) -> str:
    """The checkpoint's; float32, which loses nothing of any, where it names none."""
    return checkpoint_dtype(name) or "float32"


def needs_merging(name: str) -> str | None:
    """What of the adapter in folder `name` vLLM's `LoRARequest` has no place for; None if it takes the adapter as it is.

    It knows the two factors, their rank and scale. Whatever else an adapter's configuration says, vLLM refuses or ignores.
    """
    from peft import LoraConfig, PeftType

    config = adapter_config(name)
    assert config is not None, "the caller knows that it is an adapter"
    if config.peft_type != PeftType.LORA:
        return f"its kind, {config.peft_type.value}"
    plain = LoraConfig(target_modules=config.target_modules).to_dict()
    for key, value in config.to_dict().items():
        if key not in _SERVED and value and value != plain.get(key):
            return f"`{key}`"
    targets = config.target_modules
    if isinstance(targets, str) or {"embed_tokens", "lm_head"} & set(targets or ()):
        return "`target_modules`"
    return None


# What of a LoRA's configuration vLLM applies, and what only training needs.
_SERVED = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "peft_type",
    "peft_version",
    "r",
    "revision",
    "target_modules",
    "task_type",
    "use_rslora",
}


def _is_adapter(name: str) -> bool:
    return (Path(name) / ADAPTER_CONFIG).is_file()


class Sampling:
    """Sampling settings of every request. All fields are sent: vLLM fills missing ones from the generation_config.json."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.config = published_config(name)
        self.ends, self.pad = end_tokens(self.config, tokenizer), tokenizer.pad_token_id
        self.published = PublishedSettings(logger.warning)

    def __call__(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of `SamplingParams`, without the seed of each request."""
        asked = GenerationConfig(**generation_options(settings, self.ends, self.pad))
        self.published.announce_ignored(self.config, asked)
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
            "stop_token_ids": self.ends,
            "include_stop_str_in_output": True,  # as in training
        }


class Local:
    """Completions by an engine in this process, in the checkpoint's dtype: left alone, vLLM computes float32 in bfloat16."""

    def __init__(self, name: str, options: VLLM, tokenizer: Any) -> None:
        try:
            from vllm import LLM
        except ImportError as error:
            raise UserError("vLLM is not installed: leave --vllm out, or install the extra `vllm`") from error
        self.tokenizer = tokenizer
        self.request: Any = None
        settings = {"dtype": _dtype(name), **options.settings()}
        model = name
        self._merged: tempfile.TemporaryDirectory[str] | None = None
        if _is_adapter(name):
            config = adapter_config(name)
            assert config is not None, "adapter_config.json was read before"
            if reason := needs_merging(name):
                logger.warning("the adapter is merged into its base for vLLM, which takes no adapter with %s", reason)
                self._merged = tempfile.TemporaryDirectory(prefix="merged-")
                model = str(Path(self._merged.name) / "model")
                merge(Path(name), Path(model))
            else:
                from vllm.lora.request import LoRARequest

                model = config.base_model_name_or_path
                self.request = LoRARequest("policy", 1, str(Path(name).absolute()))
                settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _rank(config.r)}
        try:
            self.llm = LLM(model=model, trust_remote_code=False, generation_config="vllm", **settings)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"{name}: vLLM can't load it: {' '.join(str(error).split())}") from error
        self.sampling = Sampling(name, tokenizer)

    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        """One completion of each prompt, in order."""
        from vllm import SamplingParams

        inputs = token_ids(prompts, self.tokenizer)
        check_lengths(inputs, settings.max_new_tokens, self.llm.llm_engine.model_config.max_model_len)
        asked = self.sampling(settings)
        sampling = [SamplingParams(seed=seed, **asked) for seed in _seeds(settings.seed, len(prompts))]
        rows = [{"prompt_token_ids": ids} for ids in inputs]
        more = {"lora_request": self.request} if self.request is not None else {}
        outputs = self.llm.generate(rows, sampling, use_tqdm=False, **more)
        # Not vLLM's text, which lacks the bytes of a character that was cut off.
        made = [output.outputs[0].token_ids for output in outputs]
        return self.tokenizer.batch_decode(made, skip_special_tokens=True)


class Served:
    """What a running server says of itself. Raises `UserError` if it does not answer."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")

    def models(self) -> list[dict[str, Any]]:
        """The models that it serves, adapters among them."""
        return self.ask("/v1/models")["data"]

    def version(self) -> str:
        """Of vLLM."""
        return str(self.ask("/version")["version"])

    def dtype(self) -> str | None:
        """What it computes in; None unless it was started with `VLLM_SERVER_DEV_MODE=1`, as for training."""
        try:
            info = self.ask("/server_info?config_format=json")
        except UserError:
            return None
        told = info.get("vllm_config", {}).get("model_config", {}).get("dtype")
        return str(told).removeprefix("torch.") if told else None

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of one answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise UserError(f"the vLLM server {self.url}{path}: {error.code} {' '.join(said.split())}") from error
        except (OSError, ValueError) as error:
            raise UserError(
                f"the vLLM server {self.url} does not answer ({error}): start it, or correct --vllm_server_base_url"
            ) from error


class Server:
    """Completions by a server, one request each: requests of several prompts would share a seed."""

    def __init__(self, url: str, name: str, tokenizer: Any) -> None:
        self.server, self.tokenizer = Served(url), tokenizer
        models = self.server.models()
        asked = [name, *([str(Path(name).absolute())] if Path(name).exists() else [])]
        found = [model for model in models if {model["id"], model.get("root")} & set(asked)]
        if not found:
            served = ", ".join(str(model["id"]) for model in models)
            raise UserError(f"the vLLM server {url} serves {served}, and not {name}: name what it serves")
        self.model = found[0]["id"]
        self.limit = found[0].get("max_model_len")
        self.sampling = Sampling(name, tokenizer)

    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        """One completion of each prompt, in order."""
        inputs = token_ids(prompts, self.tokenizer)
        if self.limit is not None:
            check_lengths(inputs, settings.max_new_tokens, self.limit)
        asked = {"model": self.model, **self.sampling(settings), "return_token_ids": True}
        bodies = [
            {**asked, "prompt": ids, "seed": seed}
            for ids, seed in zip(inputs, _seeds(settings.seed, len(inputs)), strict=True)
        ]
        with ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
            answers = pool.map(lambda body: self.server.ask("/v1/completions", body), bodies)
            choices = [answer["choices"][0] for answer in answers]
        made = [choice["token_ids"] for choice in choices]
        for choice in choices:
            self._check_whole(choice, settings.max_new_tokens)
        return self.tokenizer.batch_decode(made, skip_special_tokens=True)

    def _check_whole(self, choice: Mapping[str, Any], max_new_tokens: int) -> None:
        """Raise `UserError` for a completion that the server has cut below the length that it was asked for."""
        length = len(choice["token_ids"])
        if choice.get("finish_reason") == "length" and length < max_new_tokens:
            raise UserError(
                f"the vLLM server {self.server.url} cuts completions at {length} tokens, and --max_new_tokens is "
                f"{max_new_tokens}: start it with `--generation-config vllm`, since a published `max_new_tokens` limits "
                "every request"
            )


def check_lengths(prompts: list[list[int]], max_new_tokens: int, limit: int) -> None:
    """Raise `UserError` for a prompt that leaves less than `max_new_tokens`: vLLM would cut its completion in silence."""
    longest = max(len(ids) for ids in prompts)
    if longest + max_new_tokens > limit:
        raise UserError(
            f"a prompt of {longest} tokens and --max_new_tokens {max_new_tokens} need {longest + max_new_tokens}, and vLLM's "
            f"context has {limit}: raise --vllm_max_model_length, or lower --max_new_tokens"
        )


def _seeds(seed: int, count: int) -> list[int]:
    """One for each request: vLLM seeds each by itself, and copies of a prompt with one seed would all end alike."""
    return random.Random(seed).sample(range(2**31), count)


def _rank(rank: int) -> int:
    """The smallest of the ranks that vLLM makes room for, which holds this one."""
    return next((room for room in (8, 16, 32, 64, 128, 256, 320, 512) if room >= rank), rank)
