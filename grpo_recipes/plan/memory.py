"""Memory of one GPU in a GRPO run, by part, estimated from the model's configuration without loading weights.

Under DeepSpeed the model states follow its own estimators (`estimate_zero2_model_states_mem_needs`,
`estimate_zero3_model_states_mem_needs`). On one process they follow accelerate's (`estimate_training_usage`: 16 bytes
per float32 parameter). Both cover only full fine-tuning, so frozen parameters are counted separately. What a
micro-batch and the prompts in generation take is measured (`activations.py`).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from trl import ModelConfig, get_peft_config

from grpo_recipes.data.hub import hub_answers, is_missing
from grpo_recipes.generation.kept_cache import MEMORY_SHARE
from grpo_recipes.plan.activations import Activations, MicroBatch
from grpo_recipes.recipe.recipe import Recipe, model_config
from grpo_recipes.recipe.trl_keys import ADAMW_BF16
from grpo_recipes.runs.files import read_object
from grpo_recipes.runs.weights import check_descriptions
from grpo_recipes.training.adamw_bf16 import CHUNK
from grpo_recipes.training.buckets import LAUNCH_TOKENS_ELSEWHERE
from grpo_recipes.training.layout_check import COMPARED_ROWS, EXTRA_PADDING
from grpo_recipes.training.log_probs import MAX_PACKED_SHARE
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.segments import lists_of_layers
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import relative_to
from grpo_rewards.strict import load_yaml
from grpo_rewards.terminal import Cell, Labelled, Part, Table

GIB = 2**30

# Bytes per parameter of Adam under mixed precision: a float32 copy of the parameter, and its two moments.
MASTER_AND_MOMENTS = 12
# Bytes per parameter of `adamw_bf16`: two float32 moments, and the 16 bits that a bfloat16 weight drops.
ADAMW_BF16_STATE = 10
# Bytes of temporaries of its step per weight of a chunk.
ADAMW_BF16_TEMPORARY = 9
# Bytes per token of the tensors that TRL computes from a generation batch: at most eight of 8 bytes.
BATCH_BYTES = 64
# What the allocator rounds up: blocks of more than 1 MiB to whole multiples of 2 MiB.
ROUNDED = 1.02
# State of other optimizers, as numbers in the weight's own dtype or as bytes. An optimizer that is not listed counts as
# Adam.
ADAM_MOMENTS = 2
MOMENTS = {"sgd": 0, "adafactor": 0, "adagrad": 1, "rmsprop": 1, "lion_32bit": 1, "paged_lion_32bit": 1}
STATE_BYTES = {
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), 2),
    **dict.fromkeys(("adamw_torch_4bit", "lion_8bit", "paged_lion_8bit", "rmsprop_bnb_8bit"), 1),
}
# Bytes per weight in bitsandbytes' 8 and 4 bits. In 4 bits, 64 weights share a float32 scale. Nested quantization
# stores the scale in 8 bits.
QUANTISED_BYTES = {8: 1.0, 4: 0.5 + 4 / 64}
NESTED_4BIT_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
# A 16-bit gradient, and what DeepSpeed reserves beside it: together 18 bytes per parameter in its estimators.
ZERO2_GRADIENT, ZERO3_GRADIENT = 6, 4
# Bytes per parameter of a layer that ZeRO-3 gathers: the parameter and its gradient, 16 bits each.
GATHERED = 4
# Host memory as a multiple of the states, DeepSpeed's `additional_buffer_factor`.
HOST_BUFFERS = 1.5

# CUDA context with communication buffers, and the share lost to fragmentation. No estimator includes them.
CONTEXT_BYTES = 1.5 * GIB
FRAGMENTATION = 0.05

ASSUMED_PROMPT_TOKENS = 512
SHARDING = {"NO": "none", "MULTI_GPU": "none", "MULTI_CPU": "none", "FSDP": "fsdp2"}


class MemoryUnknown(UserError):
    """Error for memory that can't be estimated. Its message names what is missing."""


class RefusedAdapter(UserError):
    """Error for an adapter that PEFT can't add to the model. Its message names the key and a value that would do."""


@dataclass(frozen=True)
class Sharding:
    """Layout of a model: the number of GPUs, and what is split over them (`none`, `zero2`, `zero3` or `fsdp2`)."""

    num_processes: int = 1
    num_machines: int = 1
    sharding: str = "none"
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @property
    def is_deepspeed(self) -> bool:
        """True if DeepSpeed splits the states."""
        return self.sharding.startswith("zero")

    @classmethod
    def described(cls, accelerate_config: Path) -> Sharding:
        """Return the layout of an accelerate configuration. Raise `MemoryUnknown` if it is not covered here."""
        raw = load_yaml(accelerate_config.read_text(encoding="utf-8"))
        kind, machines = raw.get("distributed_type", "NO"), raw.get("num_machines", 1)
        deepspeed = raw.get("deepspeed_config") or {}
        if kind == "DEEPSPEED":
            sharding = {0: "none", 2: "zero2", 3: "zero3"}.get(deepspeed.get("zero_stage", -1))
        else:
            sharding = SHARDING.get(kind)
        if sharding is None:
            raise MemoryUnknown(f"no estimate for the layout of {accelerate_config}")
        return cls(
            raw["num_processes"],
            machines,
            sharding,
            offload_optimizer=deepspeed.get("offload_optimizer_device", "none") != "none",
            offload_parameters=deepspeed.get("offload_param_device", "none") != "none",
        )


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model that determine its memory, as numbers of parameters.

    Attributes:
        parameters: All parameters.
        trained: Trained parameters.
        largest_module: Parameters of the largest module.
        largest_layer: Parameters of the largest decoder layer.
        in_layers: Parameters of all decoder layers.
        quantisable: Parameters quantized by loading in 4 or 8 bits: those of linear layers without the head.
        largest_matrix: Parameters of the largest of these linear layers.
        initializer_range: Standard deviation of freshly drawn weights, 0.02 unless the configuration sets it.
    """

    parameters: int
    trained: int
    largest_module: int
    largest_layer: int
    in_layers: int
    quantisable: int = 0
    largest_matrix: int = 0
    initializer_range: float = 0.02

    @classmethod
    def built(cls, config: Any, peft_config: Any = None) -> tuple[ModelShape, nn.Module]:
        """Return the sizes of a model, and the model on the meta device, with an adapter or without."""
        import torch
        from transformers import AutoModelForCausalLM

        text = config.get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            modules = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
            head, linear = model.get_output_embeddings(), [m for m in model.modules() if isinstance(m, nn.Linear)]
            matrices = [module.weight.numel() for module in linear if module is not head]
            layers = []
            for module, name in lists_of_layers(model.base_model, text.num_hidden_layers):
                layers += [sum(p.numel() for p in layer.parameters()) for layer in getattr(module, name)]
            if peft_config is not None:
                model = _with_adapter(model, peft_config)
        shape = cls(
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            largest_module=max(modules),
            largest_layer=max(layers, default=0),
            in_layers=sum(layers),
            quantisable=sum(matrices),
            largest_matrix=max(matrices, default=0),
            initializer_range=getattr(text, "initializer_range", None) or cls.initializer_range,
        )
        return shape, model


def _with_adapter(model: Any, peft_config: Any) -> Any:
    """Return `model` with a new adapter. Raise `RefusedAdapter` if PEFT can't add it."""
    from peft import get_peft_model
    from peft.utils.error import NoMatchingPeftModuleError
    from torch import nn

    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    try:
        return get_peft_model(model, peft_config)
    except NoMatchingPeftModuleError as error:
        wanted = peft_config.target_modules
        # TRL turns a list of one name into a string, and peft reads a string as a pattern.
        if isinstance(wanted, str) and wanted in linear:
            raise RefusedAdapter(
                f"`lora_target_modules`: a single name is a pattern for the whole path: write `.*{wanted}`, or name "
                "two modules"
            ) from error
        names = wanted if isinstance(wanted, str) else ", ".join(sorted(wanted or ["PEFT's default"]))
        raise RefusedAdapter(
            f"`lora_target_modules`: {names} matches no module of the model: name some of "
            f"{', '.join(sorted(linear))}, or `all-linear`"
        ) from error
    except ValueError as error:
        if peft_config.lora_dropout and "lora_dropout" in str(error):
            raise RefusedAdapter(
                "`lora_dropout`: the adapter covers experts of the model, for which PEFT has no dropout: "
                "set `lora_dropout: 0`"
            ) from error
        raise RefusedAdapter(f"PEFT can't add the adapter ({one_line(error)}): correct the `lora_*` keys") from error


# Weights in transfer to a vLLM server (`vllm.distributed.weight_transfer.packed_tensor`, 0.30).
PACK_BYTES = 1 << 30
PACKS_IN_FLIGHT = 2


@dataclass(frozen=True)
class MemoryPlan:
    """Quantities that determine the memory of one GPU.

    Attributes:
        shape: Sizes of the model.
        activations: Measurement of the model.
        layout: Layout of the model over the GPUs.
        config: Object with the attributes of `GRPOConfig`.
        rows: Completions in one micro-batch on one GPU.
        steps_per_generation: Micro-batches into which a generation batch is split. A rank generates all of them at
            once, but trains on one at a time.
        prompt_tokens: Tokens of the longest prompt.
        dtype_bytes: Bytes per weight as loaded.
        optim: Name of the optimizer.
        reward_parameters: Parameters of the reward models.
        gpu_memory: Bytes of the GPU, or None if not given.
        quantised_bytes: Bytes per weight of a frozen base loaded in 4 or 8 bits, or None if the base is not quantized.
        keeps_turns: True if transformers' generation keeps keys and values between the turns of a generation batch.
        decodes_groups: True if transformers' generation runs each distinct prompt once (`generation`).
        full_kl: True if the KL term is that over the vocabulary (`kl_estimator: full`).
        prompts: Number of distinct prompts in a micro-batch.
        rows_as: Layout of the rows.
    """

    shape: ModelShape
    activations: Activations
    layout: Sharding
    config: Any
    rows: int
    steps_per_generation: int
    prompt_tokens: int
    dtype_bytes: int
    optim: str = "adamw_torch"
    reward_parameters: int = 0
    gpu_memory: float | None = None
    quantised_bytes: float | None = None
    keeps_turns: bool = False
    decodes_groups: bool = True
    full_kl: bool = False
    prompts: int = 1
    rows_as: Layout = Layout.PADDED

    def parts(self) -> dict[str, float]:
        """Return the bytes on one GPU by part.

        `activations` belong to training, and the last six parts to generation. They are held at the same time only if
        vLLM shares the GPU and does not sleep during training.
        """
        return {
            **(self._deepspeed_states() if self.layout.is_deepspeed else self._torch_states()),
            "reference": self._weights() if self.full_reference else 0,
            "reward model": 2 * self.reward_parameters,
            "activations": self._training(),
            **self._generation(),
        }

    def peak(self) -> float:
        """Return the most bytes held at once: the permanent parts, and the larger of training and generation."""
        return sum(self._at_the_peak().values())

    def largest(self) -> tuple[str, float]:
        """Return the largest of the parts that are held at the peak, with its bytes."""
        parts = self._at_the_peak()
        name = max(parts, key=lambda name: parts[name])
        return name, parts[name]

    def _at_the_peak(self) -> dict[str, float]:
        parts, generation = self.parts(), self._generation()
        if self.vllm == "colocate" and not self.config.vllm_enable_sleep_mode:  # vLLM keeps its share during training
            return parts
        is_training = parts["activations"] >= sum(generation.values())
        idle = set(generation) if is_training else {"activations"}
        return {name: size for name, size in parts.items() if name not in idle}

    def host(self) -> float:
        """Return the bytes of host memory that offloading needs on each machine."""
        if not (self.layout.offload_parameters or self.layout.offload_optimizer):
            return 0
        # DeepSpeed's own figures: 16 bytes for the gradient, the float32 copy and the moments of a trained parameter,
        # and 2 more for each parameter if those are offloaded, also for those of a reference.
        models = 2 if self.full_reference else 1
        weights = 2 * models * self.shape.parameters if self.layout.offload_parameters else 0
        return (16 * self.shape.trained + weights) / self.layout.num_machines * HOST_BUFFERS

    def usable(self) -> float | None:
        """Return the bytes of a GPU that are left for tensors, or None if its size is not given."""
        return None if self.gpu_memory is None else self.gpu_memory * (1 - FRAGMENTATION) - CONTEXT_BYTES

    def fits(self) -> bool | None:
        """Return True if the peak and vLLM's weights fit on the GPU, or None if its size is not given."""
        if (usable := self.usable()) is None:
            return None
        return self.vllm_weights() < self.vllm_budget() and self.peak() <= usable

    @property
    def tokens(self) -> int:
        """Tokens of the longest prompt and completion together."""
        return self.prompt_tokens + self.config.max_completion_length

    @property
    def vllm(self) -> str | None:
        """`colocate`, `server`, or None for generation by transformers."""
        return self.config.vllm_mode if self.config.use_vllm else None

    @property
    def mixed_precision(self) -> bool:
        """True if matrix products are computed in 16 bits."""
        bf16 = self.config.bf16 if self.config.bf16 is not None else not self.config.use_cpu
        return bool(bf16 or self.config.fp16)

    @property
    def full_reference(self) -> bool:
        """True if a second, frozen model is held for the KL term. An adapter's reference is its own base."""
        return self.config.beta != 0 and not self.is_adapter

    @property
    def is_adapter(self) -> bool:
        """True if an adapter is trained on a frozen base."""
        return self.shape.trained < self.shape.parameters

    # ---- States

    def _deepspeed_states(self) -> dict[str, float]:
        """Return the states under ZeRO. In full fine-tuning their sum is DeepSpeed's estimate."""
        splits_parameters = self.layout.sharding == "zero3"
        gathered = GATHERED * self.shape.largest_module if splits_parameters else 0
        trained = 0 if self.layout.offload_optimizer else self.shape.trained / self.layout.num_processes
        adam = MASTER_AND_MOMENTS if self.mixed_precision else ADAM_MOMENTS * self.dtype_bytes
        return {
            "parameters": self._weights() + gathered,
            "gradients": (ZERO3_GRADIENT if splits_parameters else ZERO2_GRADIENT) * trained,
            "optimizer": adam * trained,
        }

    def _torch_states(self) -> dict[str, float]:
        """Return the states on one process, under DistributedDataParallel and under FSDP2."""
        splits, shape = self.layout.sharding == "fsdp2", self.shape
        ranks = self.layout.num_processes if splits else 1
        trained, frozen = shape.trained / ranks, (shape.parameters - shape.trained) / ranks
        size = self._trained_bytes()
        base = self.dtype_bytes * frozen
        if self.quantised_bytes is not None:
            base -= (self.dtype_bytes - self.quantised_bytes) * shape.quantisable / ranks
        # FSDP2 gathers what lies outside the layers for the whole pass, and a layer while the next one is on its way.
        outside = shape.parameters - shape.in_layers
        gathered = self._compute_bytes() * (outside + 2 * shape.largest_layer) if splits else 0
        # DistributedDataParallel copies gradients into buckets.
        copies = 2 if not splits and self.layout.num_processes > 1 else 1
        state = STATE_BYTES.get(self.optim, MOMENTS.get(self.optim, ADAM_MOMENTS) * size)
        if self.optim == ADAMW_BF16:
            state = ADAMW_BF16_STATE if size == 2 else 4 * ADAM_MOMENTS
        return {
            "parameters": base + size * trained + gathered,
            "gradients": copies * size * trained,
            "optimizer": state * trained,
        }

    def _compute_bytes(self) -> int:
        """Return the bytes of a number in the precision of the matrix products."""
        return 2 if self.mixed_precision else self.dtype_bytes

    def _trained_bytes(self) -> int:
        """Return the bytes of a trained weight."""
        if self.layout.is_deepspeed:
            return self._compute_bytes()
        if self.quantised_bytes is not None:
            return 2  # TRL casts adapters on a quantized base to bfloat16
        # FSDP2 under mixed precision keeps trained parameters in float32, and PEFT keeps adapters in float32.
        holds_float32 = self.is_adapter or (self.layout.sharding == "fsdp2" and self.mixed_precision)
        return 4 if holds_float32 else self.dtype_bytes

    def _stream_bytes(self) -> int:
        """Return the bytes of a key or value in the cache, and of a weight that computes it.

        DeepSpeed and FSDP2 cast weights to the compute precision. Autocast does not, and generation runs without it.
        """
        return self.dtype_bytes if self.layout.sharding == "none" else self._compute_bytes()

    def _weights(self) -> float:
        """Return the bytes of the weights alone, which are all that a reference model needs."""
        if self.layout.offload_parameters:
            return 0
        size = self._compute_bytes() if self.layout.is_deepspeed else self.dtype_bytes
        # With ZeRO-2 every GPU holds all weights, also of a reference (TRL's `prepare_deepspeed`).
        ranks = self.layout.num_processes if self.layout.sharding in ("zero3", "fsdp2") else 1
        return size * self.shape.parameters / ranks

    # ---- Training

    def micro_batch(self) -> MicroBatch:
        """Return the micro-batch of the longest prompts and completions."""
        holds_all = self.layout.sharding == "none"
        return MicroBatch(
            rows=self.rows,
            prompt=self.prompt_tokens,
            completion=self.config.max_completion_length,
            prompts=self.prompts,
            layout=self.rows_as,
            weight_bytes=self._stream_bytes(),
            trained_bytes=self._trained_bytes() if holds_all else self._compute_bytes(),
            autocast=holds_all and self.mixed_precision,
            checkpointing=self.config.gradient_checkpointing,
            makes_gradients=holds_all and self.config.gradient_accumulation_steps == 1,
            full_kl=self.full_kl,
        )

    def _training(self) -> float:
        """Return the most bytes that a micro-batch or the optimizer's step holds beside the states."""
        batch = self.micro_batch()
        new = self._trained_bytes() * self.shape.trained  # the states count all gradients
        held: float = self.activations.measure(batch) - (new if batch.makes_gradients else 0)
        if self.rows_as.shares_prompts:
            # The run compares its layout with a forward pass of a few padded rows, before the first gradient.
            padded = self._forward(min(self.rows, COMPARED_ROWS), self.prompt_tokens + 2 * EXTRA_PADDING)
            completion = self.config.max_completion_length
            check = self.activations.measure(replace(padded, completion=completion, autocast=batch.autocast))
            held = max(held, check - (new if self.layout.sharding == "none" else 0), self._simpler_rows(batch))
        dequantised = 0 if self.quantised_bytes is None else self._compute_bytes() * self.shape.largest_matrix
        batch_bytes = BATCH_BYTES * self.rows * self.tokens
        return max(ROUNDED * held + dequantised + batch_bytes, self._optimizer_step())

    def _simpler_rows(self, batch: MicroBatch) -> float:
        """Return the bytes of the longest rows with their own prompts that training prefers to shared prompts."""
        padded = replace(batch, layout=Layout.PADDED, makes_gradients=False)
        if batch.layout is Layout.PACKED:
            most = batch.tokens / MAX_PACKED_SHARE
        else:  # a segment of prompts costs as much as so many tokens, and TRL's rows have no bucket either
            most = batch.tokens + LAUNCH_TOKENS_ELSEWHERE * (2 if batch.layout is Layout.SHARED_PADDED else 1)
        return self.activations.measure(padded) * min(most / padded.tokens, 1)

    def _optimizer_step(self) -> float:
        """Return the bytes of the optimizer's temporaries."""
        if self.optim != ADAMW_BF16 or self.layout.is_deepspeed or self._trained_bytes() != 2:
            return 0
        ranks = self.layout.num_processes if self.layout.sharding == "fsdp2" else 1
        return ADAMW_BF16_TEMPORARY * min(CHUNK, self.shape.trained / ranks)

    # ---- Generation

    def _generation(self) -> dict[str, float]:
        """Return the bytes that generation takes, by part. vLLM's share includes its keys and values.

        Under ZeRO-3 two cases gather the whole model on every GPU: generation by transformers with
        `ds3_gather_for_generation`, and the merge of an adapter for vLLM (`VLLMGeneration._iter_named_params`).
        """
        gathers = self.config.ds3_gather_for_generation if self.vllm is None else self.is_adapter
        weights = self._compute_bytes() * self.shape.parameters if gathers and self.layout.sharding == "zero3" else 0
        prompts = cache = kept = 0.0
        if self.vllm is None:
            rows = self.rows * self.steps_per_generation
            distinct = math.ceil(rows / self.config.num_generations) if self.decodes_groups else rows
            prompts = ROUNDED * self.activations.measure(self._forward(distinct, self.prompt_tokens))
            # Every row is taken to have the longest prompt and completion.
            cache = rows * self.activations.cache(self._forward(1, self.tokens))
            # Copies of rows whose completion calls a tool, which may be all rows.
            if self.keeps_turns and not self.config.use_transformers_continuous_batching:
                kept = min(cache, MEMORY_SHARE * (self.gpu_memory or math.inf))
        share = self.vllm_budget() if self.gpu_memory else self.vllm_weights()
        return {
            "gathered weights": weights,
            "prompts in generation": prompts,
            "KV cache": cache,
            "KV cache kept between turns": kept,
            "vLLM's share": share if self.vllm == "colocate" else 0,
            "weights on their way": self._packs() if self.vllm == "server" else 0,
        }

    def _forward(self, rows: int, tokens: int) -> MicroBatch:
        """Return padded rows that run forward without gradients and, as in generation, without autocast."""
        batch = replace(self.micro_batch(), rows=rows, prompt=tokens, completion=1, prompts=1, layout=Layout.PADDED)
        return replace(batch, autocast=False, checkpointing=False, makes_gradients=False, full_kl=False, trains=False)

    def _packs(self) -> float:
        """Return the bytes on rank 0 while weights go to a vLLM server: two packs in flight, and sources of a third.

        A pack is sent once it exceeds `PACK_BYTES` (vLLM's `pack_tensors`). Its sources are views if this rank holds
        all weights, and copies if the weights are gathered from a split model or merged with an adapter.
        """
        size = self._compute_bytes() if self.layout.is_deepspeed else self.dtype_bytes
        model = size * self.shape.parameters
        pack = min(PACK_BYTES + size * self.shape.largest_module, model)
        copies = pack if self.is_adapter or self.layout.sharding in ("zero3", "fsdp2") else 0
        return min(PACKS_IN_FLIGHT * pack, model) + copies

    def vllm_budget(self) -> float:
        """Return the bytes that vLLM may take on this GPU, infinite if it takes none or the GPU's size is not given."""
        return (
            self.config.vllm_gpu_memory_utilization * self.gpu_memory
            if self.vllm == "colocate" and self.gpu_memory
            else math.inf
        )

    def vllm_weights(self) -> float:
        """Return the bytes of vLLM's own copy of the weights on this GPU."""
        return 2 * self.shape.parameters / self.config.vllm_tensor_parallel_size if self.vllm == "colocate" else 0


def load_model(model: str, peft_config: Any = None) -> tuple[ModelShape, nn.Module]:
    """Return the sizes of a model, and the model on the meta device, from its configuration.

    The configuration is a file, a folder, in the hub's cache, or on the hub.

    Raises:
        MemoryUnknown: There is no configuration, or transformers can't build a model from it.
        UserError: The file is damaged, or PEFT can't add the adapter.
    """
    from transformers import AutoConfig

    if is_missing(model):
        raise MemoryUnknown(
            f"{model}: there is no such folder{relative_to(model)} (--model_config FILE gives a configuration)"
        )
    path = Path(model)
    if path.is_dir():
        check_descriptions(path)
    elif path.exists():
        read_object(path, {}, "give a model's config.json")
    try:
        here_only = path.exists() or not hub_answers()
        # Without `trust_remote_code`, transformers asks on the terminal whether to run the code of a folder.
        config = AutoConfig.from_pretrained(model, local_files_only=here_only, trust_remote_code=False)
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # about peft's own use of transformers
            return ModelShape.built(config, peft_config)
    except UserError:
        raise
    except Exception as error:  # transformers raises any class for the values of a stranger's file
        reason = f"no configuration could be loaded (--model_config FILE gives one): {one_line(error)}"
        raise MemoryUnknown(f"{model}: {reason}") from error


def policy_model(recipe: Recipe, model_config_file: str | None = None) -> tuple[ModelShape, nn.Module]:
    """Return the sizes of the policy with its adapter, and the policy on the meta device.

    Both are made from the model's configuration, or from the file given in its place.

    Raises:
        RecipeError: PEFT can't add the adapter.
        MemoryUnknown: The configuration can't be read here.
    """
    arguments = model_config(recipe)
    model = model_config_file or str(arguments.model_name_or_path)
    try:
        return load_model(model, get_peft_config(arguments))
    except RefusedAdapter as error:
        raise recipe.error(str(error)) from error


def check_adapter(recipe: Recipe) -> None:
    """Raise `RecipeError` if PEFT can't add the new adapter of a recipe, as far as the files here tell."""
    if recipe.model.get("use_peft"):
        with contextlib.suppress(MemoryUnknown):  # without a configuration, loading the model fails with the reason
            policy_model(recipe)


def quantised_bytes(arguments: ModelConfig) -> float | None:
    """Return the bytes of a quantized weight, or None if `arguments` quantize nothing."""
    if arguments.load_in_4bit:
        return NESTED_4BIT_BYTES if arguments.use_bnb_nested_quant else QUANTISED_BYTES[4]
    return QUANTISED_BYTES[8] if arguments.load_in_8bit else None


def best_precision(plan: MemoryPlan) -> str:
    """Return the first precision that keeps small updates and fits, for full fine-tuning without DeepSpeed.

    If the GPU's size is not given, return all of them with their peaks.
    """
    offloaded = replace(plan.layout, sharding="zero2", offload_optimizer=True)
    in_host_memory = "accelerate_configs/zero2_offload.yaml, which keeps float32 weights in host memory"
    ways = [
        ("dtype: float32", replace(plan, dtype_bytes=4, optim="adamw_torch")),
        (f"dtype: bfloat16 with optim: {ADAMW_BF16}", replace(plan, dtype_bytes=2, optim=ADAMW_BF16)),
        (in_host_memory, replace(plan, dtype_bytes=2, layout=offloaded)),
    ]
    texts = []
    for change, way in ways:
        if (fits := way.fits()) is not False:
            texts.append(f"{change} ({gib(way.peak())})")
        if fits:
            return texts[-1]
    if plan.gpu_memory is None:
        return ", else ".join(texts)
    return "none of these fits this GPU: an adapter (`use_peft: true`) is kept in float32"


CHANGES = {
    **dict.fromkeys(("gradients", "optimizer"), "`use_peft: true` trains an adapter"),
    "parameters": "`load_in_4bit: true` with `use_peft: true` quantizes them on a single GPU, and "
    "`--accelerate_config zero3` splits them over several",
    "reference": "`beta: 0` needs none",
    "reward model": "`device: cpu` of the reward holds it elsewhere",
    "activations": "lower `per_device_train_batch_size`, and raise `gradient_accumulation_steps` as much",
    "gathered weights": "`ds3_gather_for_generation: false` gathers one layer at a time, which is far slower",
    "prompts in generation": "lower `steps_per_generation` or `dataset.max_prompt_tokens`",
    **dict.fromkeys(("KV cache", "KV cache kept between turns"), "lower `steps_per_generation`"),
    "vLLM's share": "lower `vllm_gpu_memory_utilization`, or set `vllm_enable_sleep_mode: true`",
    "weights on their way": "`use_vllm: false` sends none",
}
"""Change of a recipe that makes a part smaller."""


def parse_size(text: str) -> float:
    """Return the bytes of `80GB` or `80`, both in GiB, or raise `UserError` if the text is no size."""
    with contextlib.suppress(ValueError):
        size = float(text.upper().removesuffix("B").removesuffix("I").removesuffix("G")) * GIB
        if 0 < size < math.inf:
            return size
    raise UserError(f"--gpu_memory {text}: write a size as `80GB`")


def gib(size: float) -> str:
    """Return a number of bytes as text in GiB."""
    return f"{size / GIB:.1f} GiB"


def describe(plan: MemoryPlan) -> list[Part]:
    """Return the estimate for the terminal: memory by part, whether it fits, and what to change if it does not."""
    sizes = {name: size for name, size in plan.parts().items() if size} | {"peak": plan.peak()}
    if plan.host():
        sizes["host memory, each machine"] = plan.host()
    rows = [(Cell(name, "head" if name == "peak" else ""), gib(size)) for name, size in sizes.items()]
    parts: list[Part] = [Table(rows, numbers=frozenset({1}))]
    usable = plan.usable()
    if usable is None or plan.gpu_memory is None:
        return parts
    verdict = Cell("  fits in", "good") if plan.fits() else Cell("  does not fit in", "bad")
    of = f"{gib(usable)}: a GPU of {gib(plan.gpu_memory)} less context and fragmentation"
    parts.append(replace(verdict, text=f"{verdict.text} {of}"))
    if plan.vllm_weights() >= plan.vllm_budget():
        parts.append(
            f"  vLLM's share of {gib(plan.vllm_budget())} can't hold its {gib(plan.vllm_weights())} of weights: raise "
            "`vllm_gpu_memory_utilization` or `vllm_tensor_parallel_size`"
        )
    if not plan.fits():
        name, size = plan.largest()
        change = CHANGES[name]
        if name == "activations" and not plan.config.gradient_checkpointing:
            change = "set `gradient_checkpointing: true`"
        parts.append(Labelled("largest part", f"{name}, {gib(size)}: {change}"))
    return parts


def as_dict(plan: MemoryPlan) -> dict[str, Any]:
    """Return the estimate for `--json`, sizes in bytes."""
    return {
        **{name.replace("'s", "").replace(" ", "_").lower(): round(size) for name, size in plan.parts().items()},
        "peak": round(plan.peak()),
        "host": round(plan.host()),
        "usable": None if (usable := plan.usable()) is None else round(usable),
        "fits": plan.fits(),
        "shape": asdict(plan.shape),
        "layout": asdict(plan.layout),
    }
