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

from grpo_recipes.checks.precision import uses_bf16
from grpo_recipes.data.hub import hub_answers, is_missing
from grpo_recipes.generation.kept_cache import MEMORY_SHARE
from grpo_recipes.plan.activations import Activations, MicroBatch
from grpo_recipes.recipe.recipe import Recipe, model_config
from grpo_recipes.recipe.trl_keys import ADAMW_BF16
from grpo_recipes.runs.files import read_object
from grpo_recipes.runs.weights import check_descriptions
from grpo_recipes.training.layout_trial import COMPARED_ROWS, EXTRA_PADDING
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
# Allowance for the rounding of CUDA's caching allocator, which takes large blocks in multiples of 2 MiB. The share is
# an estimate, and has not been measured on a GPU.
ROUNDED = 1.02
# A 16-bit gradient, and what DeepSpeed reserves beside it: together 18 bytes per parameter in its estimators.
ZERO2_GRADIENT, ZERO3_GRADIENT = 6, 4
# Bytes per parameter of a layer that ZeRO-3 gathers: the parameter and its gradient, 16 bits each.
GATHERED = 4
# CUDA context with communication buffers, and the share lost to fragmentation. No estimator includes them.
CONTEXT_BYTES = 1.5 * GIB
FRAGMENTATION = 0.05

ASSUMED_PROMPT_TOKENS = 512
SHARDING = {"NO": "none", "MULTI_GPU": "none", "MULTI_CPU": "none", "FSDP": "fsdp2"}


_GIVE_CONFIG = "give the model's config.json with --model_config"


class MemoryUnknown(UserError):
    """Error for memory that can't be estimated. Its message names what is missing."""


class RefusedAdapter(UserError):
    """Error for an adapter that PEFT can't add to the model. Its message names the key and a value that would do."""


@dataclass(frozen=True)
class Sharding:
    """Layout of a model: the number of GPUs, and what is split over them (`none`, `zero2`, `zero3` or `fsdp2`)."""

    num_processes: int = 1
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
        kind = raw.get("distributed_type", "NO")
        deepspeed = raw.get("deepspeed_config") or {}
        if kind == "DEEPSPEED":
            sharding = {0: "none", 2: "zero2", 3: "zero3"}.get(deepspeed.get("zero_stage", -1))
        else:
            sharding = SHARDING.get(kind)
        if sharding is None:
            raise MemoryUnknown(
                accelerate_config, "no estimate covers its layout", "name another `--accelerate_config`"
            )
        return cls(
            raw["num_processes"],
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
    """

    parameters: int
    trained: int
    largest_module: int
    largest_layer: int
    in_layers: int
    quantisable: int = 0
    largest_matrix: int = 0

    @classmethod
    def built(cls, config: Any, peft_config: Any = None) -> tuple[ModelShape, nn.Module]:
        """Return the sizes of a model, and the model on the meta device, with an adapter or without."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            modules = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
            head, linear = model.get_output_embeddings(), [m for m in model.modules() if isinstance(m, nn.Linear)]
            matrices = [module.weight.numel() for module in linear if module is not head]
            layers = []
            for module, name in lists_of_layers(model.base_model, config.get_text_config().num_hidden_layers):
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
        )
        return shape, model


def _with_adapter(model: Any, peft_config: Any) -> Any:
    """Return `model` with a new adapter. Raise `RefusedAdapter` if PEFT can't add it."""
    from peft import get_peft_model
    from peft.utils.error import NoMatchingPeftModuleError

    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wanted = peft_config.target_modules
    try:
        return get_peft_model(model, peft_config)
    except NoMatchingPeftModuleError as error:
        names = wanted if isinstance(wanted, str) else ", ".join(sorted(wanted or ["PEFT's default"]))
        fix = f"name some of {', '.join(sorted(linear))}, or `all-linear`"
        if wanted in linear:  # TRL turns a list of one name into a string, and PEFT reads a string as a pattern
            fix = f"a single name is a pattern for the whole path: write `.*{wanted}`"
        raise RefusedAdapter("`lora_target_modules`", f"{names} matches no module of the model", fix) from error
    except ValueError as error:
        raise RefusedAdapter(
            "`lora_*`", f"PEFT can't add the adapter ({one_line(error)})", "correct the keys"
        ) from error


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

        `activations` belong to training, and the parts behind them to generation. They are held at the same time only
        if vLLM shares the GPU and does not sleep during training.
        """
        return {
            **(self._deepspeed_states() if self.layout.is_deepspeed else self._torch_states()),
            # The reference of an adapter is its own base.
            "reference": self._weights() if self.config.beta != 0 and not self.is_adapter else 0,
            "reward model": 2 * self.reward_parameters,
            "activations": self._training(),
            **self._generation(),
        }

    def at_the_peak(self) -> dict[str, float]:
        """Return the parts that are held at the peak: the permanent ones, and the larger of training and generation."""
        parts, generation = self.parts(), self._generation()
        if self.vllm == "colocate" and not self.config.vllm_enable_sleep_mode:  # vLLM keeps its share during training
            return parts
        is_training = parts["activations"] >= sum(generation.values())
        idle = set(generation) if is_training else {"activations"}
        return {name: size for name, size in parts.items() if name not in idle}

    def peak(self) -> float:
        """Return the most bytes held at once."""
        return sum(self.at_the_peak().values())

    def usable(self) -> float | None:
        """Return the bytes of a GPU that are left for tensors, or None if its size is not given."""
        return None if self.gpu_memory is None else self.gpu_memory * (1 - FRAGMENTATION) - CONTEXT_BYTES

    def fits(self) -> bool | None:
        """Return True if the peak and vLLM's weights fit on the GPU, or None if its size is not given."""
        usable = self.usable()
        return None if usable is None else self.vllm_weights() < self.vllm_budget() and self.peak() <= usable

    @property
    def vllm(self) -> str | None:
        """`colocate`, `server`, or None for generation by transformers."""
        return self.config.vllm_mode if self.config.use_vllm else None

    @property
    def mixed_precision(self) -> bool:
        """True if matrix products are computed in 16 bits."""
        return bool(uses_bf16(self.config) or self.config.fp16)

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
        adam = MASTER_AND_MOMENTS if self.mixed_precision else 2 * self.dtype_bytes
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
        if self.optim == ADAMW_BF16 and size == 2:
            state = ADAMW_BF16_STATE
        elif self.optim in ("sgd", "adafactor"):
            state = 0
        else:  # every other optimizer counts as Adam
            state = 2 if "8bit" in self.optim else 2 * size
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
            # DeepSpeed and FSDP2 cast weights to the compute precision. Autocast does not.
            weight_bytes=self.dtype_bytes if holds_all else self._compute_bytes(),
            trained_bytes=self._trained_bytes() if holds_all else self._compute_bytes(),
            autocast=holds_all and self.mixed_precision,
            checkpointing=self.config.gradient_checkpointing,
            makes_gradients=holds_all and self.config.gradient_accumulation_steps == 1,
            full_kl=self.full_kl,
        )

    def _training(self) -> float:
        """Return the most bytes that a micro-batch holds beside the states, which count all gradients."""
        batch = self.micro_batch()
        new = batch.trained_bytes * self.shape.trained if self.layout.sharding == "none" else 0
        held: float = self.activations.measure(batch).peak - (new if batch.makes_gradients else 0)
        if batch.layout.shares_prompts:
            # The run compares its layout with a forward pass of a few padded rows, before the first gradient.
            rows, prompt = min(self.rows, COMPARED_ROWS), self.prompt_tokens + 2 * EXTRA_PADDING
            check = self._forward(rows, prompt, batch.completion)
            held = max(held, self.activations.measure(replace(check, autocast=batch.autocast)).peak - new)
        dequantised = 0 if self.quantised_bytes is None else self._compute_bytes() * self.shape.largest_matrix
        return ROUNDED * held + dequantised

    # ---- Generation

    def _generation(self) -> dict[str, float]:
        """Return the bytes that generation takes, by part. vLLM's share includes its keys and values.

        Under ZeRO-3 two cases gather the whole model on every GPU: generation by transformers with
        `ds3_gather_for_generation`, and the merge of an adapter for vLLM (`VLLMGeneration._iter_named_params`).
        """
        gathers = self.config.ds3_gather_for_generation if self.vllm is None else self.is_adapter
        weights = self._compute_bytes() * self.shape.parameters if gathers and self.layout.sharding == "zero3" else 0
        held = 0.0
        if self.vllm is None:
            rows = self.rows * self.steps_per_generation
            distinct = math.ceil(rows / self.config.num_generations) if self.decodes_groups else rows
            # Every row is taken to have the longest prompt and completion.
            longest = self._forward(1, self.prompt_tokens, self.config.max_completion_length)
            cache = rows * self.activations.measure(longest).cache
            prompts = self.activations.measure(self._forward(distinct, self.prompt_tokens, 1)).peak
            held = cache + ROUNDED * prompts
            # Copies of rows whose completion calls a tool, which may be all rows.
            if self.keeps_turns and not self.config.use_transformers_continuous_batching:
                held += min(cache, MEMORY_SHARE * (self.gpu_memory or math.inf))
        share = self.vllm_weights() if self.gpu_memory is None else self.vllm_budget()
        shared = share if self.vllm == "colocate" else 0
        return {"gathered weights": weights, "generation": held, "vLLM's share": shared}

    def _forward(self, rows: int, prompt: int, completion: int) -> MicroBatch:
        """Return padded rows that run forward without gradients and, as in generation, without autocast."""
        batch = replace(self.micro_batch(), rows=rows, prompt=prompt, completion=completion, layout=Layout.PADDED)
        return replace(batch, prompts=1, autocast=False, makes_gradients=False, full_kl=False, trains=False)

    def vllm_budget(self) -> float:
        """Return the bytes that vLLM may take on this GPU, infinite if it takes none or the GPU's size is not given."""
        if self.vllm != "colocate" or self.gpu_memory is None:
            return math.inf
        return float(self.config.vllm_gpu_memory_utilization * self.gpu_memory)

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
        raise MemoryUnknown(model, f"there is no such folder{relative_to(model)}", _GIVE_CONFIG)
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
        raise MemoryUnknown(model, f"no configuration could be loaded ({one_line(error)})", _GIVE_CONFIG) from error


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
        raise recipe.error(error.place, error.problem, error.fix) from error


def check_adapter(recipe: Recipe) -> None:
    """Raise `RecipeError` if PEFT can't add the new adapter of a recipe, as far as the files here tell."""
    if recipe.model.get("use_peft"):
        with contextlib.suppress(MemoryUnknown):  # without a configuration, loading the model fails with the reason
            policy_model(recipe)


def quantised_bytes(arguments: ModelConfig) -> float | None:
    """Return the bytes of a quantized weight, or None if `arguments` quantize nothing."""
    if arguments.load_in_4bit:
        return 0.5 + 4 / 64  # 64 weights share a scale of at most four bytes
    return 1.0 if arguments.load_in_8bit else None


CHANGES = {
    **dict.fromkeys(("gradients", "optimizer"), "`use_peft: true` trains an adapter"),
    "parameters": "`load_in_4bit: true` quantizes those that an adapter freezes",
    "reference": "`beta: 0` needs none",
    "reward model": "`device: cpu` of the reward holds it elsewhere",
    "activations": "lower `per_device_train_batch_size`, and raise `gradient_accumulation_steps` as much",
    "gathered weights": "`ds3_gather_for_generation: false` gathers one layer at a time, which is far slower",
    "generation": "lower `steps_per_generation`",
    "vLLM's share": "lower `vllm_gpu_memory_utilization`",
}
"""Change of a recipe that makes a part smaller."""


def parse_size(text: str) -> float:
    """Return the bytes of `80GB` or `80`, both in GiB, or raise `UserError` if the text is no size."""
    with contextlib.suppress(ValueError):
        size = float(text.upper().removesuffix("B").removesuffix("I").removesuffix("G")) * GIB
        if 0 < size < math.inf:
            return size
    raise UserError("--gpu_memory", f"{text!r} is not a size", "write it as `80GB`")


def gib(size: float) -> str:
    """Return a number of bytes as text in GiB."""
    return f"{size / GIB:.1f} GiB"


def describe(plan: MemoryPlan) -> list[Part]:
    """Return the estimate for the terminal: memory by part, whether it fits, and what to change if it does not."""
    sizes = {name: size for name, size in plan.parts().items() if size} | {"peak": plan.peak()}
    rows = [(Cell(name, "head" if name == "peak" else ""), gib(size)) for name, size in sizes.items()]
    parts: list[Part] = [Table(rows, numbers=frozenset({1}))]
    usable = plan.usable()
    if usable is None:
        return parts
    of = f"{gib(usable)}, which is the GPU less context and fragmentation"
    parts.append(Cell(f"  fits in {of}", "good") if plan.fits() else Cell(f"  does not fit in {of}", "bad"))
    if plan.vllm_weights() >= plan.vllm_budget():
        parts.append(
            f"  vLLM's share of {gib(plan.vllm_budget())} can't hold its {gib(plan.vllm_weights())} of weights: raise "
            "`vllm_gpu_memory_utilization` or `vllm_tensor_parallel_size`"
        )
    if not plan.fits():
        parts_at_peak = plan.at_the_peak()
        name = max(parts_at_peak, key=lambda name: parts_at_peak[name])
        change = CHANGES[name]
        if name == "activations" and not plan.config.gradient_checkpointing:
            change = "set `gradient_checkpointing: true`"
        if name == "parameters" and plan.layout.num_processes > 1:
            change = "`--accelerate_config zero3` splits them over the GPUs"
        parts.append(Labelled("largest part", f"{name}, {gib(parts_at_peak[name])}: {change}"))
    return parts


def as_dict(plan: MemoryPlan) -> dict[str, Any]:
    """Return the estimate for `--json`, sizes in bytes."""
    return {
        **{name.replace("'s", "").replace(" ", "_").lower(): round(size) for name, size in plan.parts().items()},
        "peak": round(plan.peak()),
        "usable": plan.usable(),
        "fits": plan.fits(),
        "shape": asdict(plan.shape),
    }
