"""Memory of one GPU in a GRPO run, by part, estimated from the model's configuration without loading weights.

Under DeepSpeed the model states follow its own estimators (`estimate_zero2_model_states_mem_needs`,
`estimate_zero3_model_states_mem_needs`). On one process they follow accelerate's (`estimate_training_usage`: 16 bytes
per float32 parameter). Both cover only full fine-tuning, so frozen parameters are counted separately. What a
micro-batch and the prompts in generation take is measured (`training/activations.py`), in the layout that training is
expected to choose (`LayoutFacts`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from trl import GRPOConfig, ModelConfig

from grpo_recipes.checks.checks import Machine, optimizer_name
from grpo_recipes.checks.geometry import Geometry
from grpo_recipes.checks.precision import uses_bf16
from grpo_recipes.generation.kept_cache import MEMORY_SHARE
from grpo_recipes.generation.models import base_model
from grpo_recipes.plan.model_shape import MemoryUnknown, ModelShape, load_model, policy_model
from grpo_recipes.plan.prompts import PromptReport
from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_recipes.recipe.recipe import Recipe, model_config
from grpo_recipes.recipe.trl_keys import ADAMW_BF16
from grpo_recipes.training.layout_facts import LayoutFacts, MicroBatchShape, NotMeasured, describe
from grpo_rewards.composed import leaves
from grpo_rewards.errors import UserError
from grpo_rewards.registry import BuiltReward
from grpo_rewards.reward_model import RewardModelScore
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
# Standard deviation of freshly drawn weights, unless the configuration sets it.
SPREAD = 0.02


@dataclass(frozen=True)
class Sharding:
    """Number of GPUs, and what of a model is split over them: `none`, `zero2`, `zero3` or `fsdp2`."""

    num_processes: int = 1
    split: str = "none"
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @property
    def is_deepspeed(self) -> bool:
        """True if DeepSpeed splits the states."""
        return self.split.startswith("zero")

    @classmethod
    def described(cls, accelerate_config: Path) -> Sharding:
        """Return the sharding of an accelerate configuration. Raise `MemoryUnknown` if it is not covered here."""
        raw = load_yaml(accelerate_config.read_text(encoding="utf-8"))
        kind = raw.get("distributed_type", "NO")
        deepspeed = raw.get("deepspeed_config") or {}
        split = SHARDING.get(kind)
        if kind == "DEEPSPEED":
            split = {0: "none", 2: "zero2", 3: "zero3"}.get(deepspeed.get("zero_stage", -1))
        if split is None:
            fix = "name another `--accelerate_config`"
            raise MemoryUnknown(accelerate_config, "no estimate covers its layout", fix)
        return cls(
            raw["num_processes"],
            split,
            offload_optimizer=deepspeed.get("offload_optimizer_device", "none") != "none",
            offload_parameters=deepspeed.get("offload_param_device", "none") != "none",
        )


@dataclass(frozen=True)
class MemoryPlan:
    """Quantities that determine the memory of one GPU.

    Attributes:
        shape: Sizes of the model.
        facts: Facts about the micro-batches.
        sharding: Number of GPUs, and what of the model is split over them.
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
        keeps_groups: True if micro-batches get the expected layout, because the rows of a group stay together.
    """

    shape: ModelShape
    facts: LayoutFacts
    sharding: Sharding
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
    keeps_groups: bool = False

    def parts(self) -> dict[str, float]:
        """Return the bytes on one GPU by part.

        `activations` belong to training, and the parts behind them to generation. They are held at the same time only
        if vLLM shares the GPU and does not sleep during training.
        """
        return {
            **(self._deepspeed_states() if self.sharding.is_deepspeed else self._torch_states()),
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
        splits_parameters = self.sharding.split == "zero3"
        gathered = GATHERED * self.shape.largest_module if splits_parameters else 0
        trained = 0 if self.sharding.offload_optimizer else self.shape.trained / self.sharding.num_processes
        adam = MASTER_AND_MOMENTS if self.mixed_precision else 2 * self.dtype_bytes
        return {
            "parameters": self._weights() + gathered,
            "gradients": (ZERO3_GRADIENT if splits_parameters else ZERO2_GRADIENT) * trained,
            "optimizer": adam * trained,
        }

    def _torch_states(self) -> dict[str, float]:
        """Return the states on one process, under DistributedDataParallel and under FSDP2."""
        splits, shape = self.sharding.split == "fsdp2", self.shape
        ranks = self.sharding.num_processes if splits else 1
        trained, frozen = shape.trained / ranks, (shape.parameters - shape.trained) / ranks
        size = self._trained_bytes()
        base = self.dtype_bytes * frozen
        if self.quantised_bytes is not None:
            base -= (self.dtype_bytes - self.quantised_bytes) * shape.quantisable / ranks
        # FSDP2 gathers what lies outside the layers for the whole pass, and a layer while the next one is on its way.
        outside = shape.parameters - shape.in_layers
        gathered = self._compute_bytes() * (outside + 2 * shape.largest_layer) if splits else 0
        # DistributedDataParallel copies gradients into buckets.
        copies = 2 if not splits and self.sharding.num_processes > 1 else 1
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
        if self.sharding.is_deepspeed:
            return self._compute_bytes()
        if self.quantised_bytes is not None:
            return 2  # TRL casts adapters on a quantized base to bfloat16
        # FSDP2 under mixed precision keeps trained parameters in float32, and PEFT keeps adapters in float32.
        holds_float32 = self.is_adapter or (self.sharding.split == "fsdp2" and self.mixed_precision)
        return 4 if holds_float32 else self.dtype_bytes

    def _weights(self) -> float:
        """Return the bytes of the weights alone, which are all that a reference model needs."""
        if self.sharding.offload_parameters:
            return 0
        size = self._compute_bytes() if self.sharding.is_deepspeed else self.dtype_bytes
        # With ZeRO-2 every GPU holds all weights, also of a reference (TRL's `prepare_deepspeed`).
        ranks = self.sharding.num_processes if self.sharding.split in ("zero3", "fsdp2") else 1
        return size * self.shape.parameters / ranks

    # ---- Training

    def micro_batch(self) -> MicroBatchShape:
        """Return the micro-batch of the longest prompts and completions."""
        holds_all = self.sharding.split == "none"
        batch = MicroBatchShape(
            rows=self.rows,
            prompt=self.prompt_tokens,
            completion=self.config.max_completion_length,
            # DeepSpeed and FSDP2 cast weights to the compute precision. Autocast does not.
            weight_bytes=self.dtype_bytes if holds_all else self._compute_bytes(),
            trained_bytes=self._trained_bytes() if holds_all else self._compute_bytes(),
            autocast=holds_all and self.mixed_precision,
            checkpointing=self.config.gradient_checkpointing,
            makes_gradients=holds_all and self.config.gradient_accumulation_steps == 1,
            full_kl=self.full_kl,
        )
        return self.facts.arranged(batch, self.config.num_generations) if self.keeps_groups else batch

    def _training(self) -> float:
        """Return the most bytes that a micro-batch holds beside the states, which count all gradients."""
        batch = self.micro_batch()
        new = batch.trained_bytes * self.shape.trained if self.sharding.split == "none" else 0
        held: float = self.facts.measure(batch).peak - (new if batch.makes_gradients else 0)
        if batch.layout.shares_prompts:
            # The run compares its layout before the first gradient.
            held = max(held, self.facts.measure(self.facts.compared(batch)).peak - new)
        dequantised = 0 if self.quantised_bytes is None else self._compute_bytes() * self.shape.largest_matrix
        return ROUNDED * held + dequantised

    # ---- Generation

    def _generation(self) -> dict[str, float]:
        """Return the bytes that generation takes, by part. vLLM's share includes its keys and values.

        Under ZeRO-3 two cases gather the whole model on every GPU: generation by transformers with
        `ds3_gather_for_generation`, and the merge of an adapter for vLLM (`VLLMGeneration._iter_named_params`).
        """
        gathers = self.config.ds3_gather_for_generation if self.vllm is None else self.is_adapter
        weights = self._compute_bytes() * self.shape.parameters if gathers and self.sharding.split == "zero3" else 0
        held = 0.0
        if self.vllm is None:
            rows = self.rows * self.steps_per_generation
            distinct = math.ceil(rows / self.config.num_generations) if self.decodes_groups else rows
            # Every row is taken to have the longest prompt and completion.
            longest = self._forward(1, self.prompt_tokens, self.config.max_completion_length)
            cache = rows * self.facts.measure(longest).cache
            prompts = self.facts.measure(self._forward(distinct, self.prompt_tokens, 1)).peak
            held = cache + ROUNDED * prompts
            # Copies of rows whose completion calls a tool, which may be all rows.
            if self.keeps_turns and not self.config.use_transformers_continuous_batching:
                held += min(cache, MEMORY_SHARE * (self.gpu_memory or math.inf))
        share = self.vllm_weights() if self.gpu_memory is None else self.vllm_budget()
        shared = share if self.vllm == "colocate" else 0
        return {"gathered weights": weights, "generation": held, "vLLM's share": shared}

    def _forward(self, rows: int, prompt: int, completion: int) -> MicroBatchShape:
        """Return padded rows that run forward without gradients and, as in generation, without autocast."""
        return replace(self.micro_batch().forward(rows, prompt, completion), autocast=False)

    def vllm_budget(self) -> float:
        """Return the bytes that vLLM may take on this GPU, infinite if it takes none or the GPU's size is not given."""
        if self.vllm != "colocate" or self.gpu_memory is None:
            return math.inf
        return float(self.config.vllm_gpu_memory_utilization * self.gpu_memory)

    def vllm_weights(self) -> float:
        """Return the bytes of vLLM's own copy of the weights on this GPU."""
        return 2 * self.shape.parameters / self.config.vllm_tensor_parallel_size if self.vllm == "colocate" else 0

    # ---- The estimate as text

    def describe(self) -> list[Part]:
        """Return the estimate for the terminal: memory by part, whether it fits, and what to change if it does not."""
        sizes = {name: size for name, size in self.parts().items() if size} | {"peak": self.peak()}
        rows = [(Cell(name, "head" if name == "peak" else ""), gib(size)) for name, size in sizes.items()]
        parts: list[Part] = [Table(rows, numbers=frozenset({1}))]
        usable = self.usable()
        if usable is None:
            return parts
        of = f"{gib(usable)}, which is the GPU less context and fragmentation"
        parts.append(Cell(f"  fits in {of}", "good") if self.fits() else Cell(f"  does not fit in {of}", "bad"))
        if self.vllm_weights() >= self.vllm_budget():
            budget, weights = gib(self.vllm_budget()), gib(self.vllm_weights())
            parts.append(
                f"  vLLM's share of {budget} can't hold its {weights} of weights: raise "
                "`vllm_gpu_memory_utilization` or `vllm_tensor_parallel_size`"
            )
        if not self.fits():
            parts_at_peak = self.at_the_peak()
            name = max(parts_at_peak, key=lambda name: parts_at_peak[name])
            change = CHANGES[name]
            if name == "activations" and not self.config.gradient_checkpointing:
                change = "set `gradient_checkpointing: true`"
            if name == "parameters" and self.sharding.num_processes > 1:
                change = "`--accelerate_config zero3` splits them over the GPUs"
            parts.append(Labelled("largest part", f"{name}, {gib(parts_at_peak[name])}: {change}"))
        return parts

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate for `--json`, sizes in bytes."""
        return {
            **{name.replace("'s", "").replace(" ", "_").lower(): round(size) for name, size in self.parts().items()},
            "peak": round(self.peak()),
            "usable": self.usable(),
            "fits": self.fits(),
            "shape": asdict(self.shape),
        }


# ---- From a recipe


@dataclass(frozen=True)
class RunEstimate:
    """Layout, tokens and memory that a run is expected to have.

    Attributes:
        facts: Facts about the micro-batches, or None if the model's configuration is unknown.
        tokens: Most tokens of a micro-batch with padding, in the expected layout (`micro_batch`) and in TRL's rows
            (`padded`). Empty if the configuration is unknown.
        memory: Estimate of the memory of a GPU, the reason why it is unknown, or None if the recipe trains on a CPU.
        spread: Standard deviation of freshly drawn weights.
        notes: Sentences on what was assumed.
    """

    facts: LayoutFacts | None
    tokens: Mapping[str, int]
    memory: MemoryPlan | str | None
    spread: float = SPREAD
    notes: Sequence[str] = ()

    def describe_layout(self) -> list[str]:
        """Return the labelled lines of the layout and the tokens, none if they are unknown."""
        if self.facts is None:
            return []
        tokens = f"at most {self.tokens['micro_batch']:,} in a micro-batch"
        if self.tokens["micro_batch"] != self.tokens["padded"]:
            tokens += f" ({self.tokens['padded']:,} in TRL's rows)"
        return [f"  layout          {self.facts.describe()}", f"  tokens          {tokens}"]

    def describe_memory(self) -> list[Part]:
        """Return the memory for the terminal."""
        if self.memory is None:
            return []
        head = Cell("  memory of one GPU", "head")
        if isinstance(self.memory, MemoryPlan):
            return [head, *self.memory.describe()]
        return [head, Labelled("memory", f"unknown: {self.memory}")]

    def as_dict(self) -> dict[str, Any]:
        """Return the entries for `--json`, None for what is unknown."""
        return {
            "layout": self.facts.as_dict() if self.facts else None,
            "tokens": self.tokens or None,
            "memory": self.memory.as_dict() if isinstance(self.memory, MemoryPlan) else None,
        }


def estimate(
    recipe: Recipe,
    config: GRPOConfig,
    machine: Machine,
    geometry: Geometry,
    rewards: Sequence[BuiltReward],
    shown: PromptReport | None,
    layout_file: Path | None,
    gpu_memory: float | None,
    model_config_file: str | None,
) -> RunEstimate:
    """Return the layout, tokens and memory that a run is expected to have.

    Args:
        recipe: Recipe of the run.
        config: TRL's training arguments of the run.
        machine: Machine of the run.
        geometry: Batch geometry.
        rewards: Rewards, which may hold models on the GPU.
        shown: Report on the prompts, or None if the dataset can't be reached.
        layout_file: Path of an accelerate configuration, or None for a run without sharding.
        gpu_memory: Bytes of one GPU, or None if not given.
        model_config_file: Path of the model's config.json, or None for the one that the recipe's model has.
    """
    on_cpu = recipe.config.use_cpu and gpu_memory is None
    prompt_tokens, assumed = longest_prompt(recipe, shown)
    try:
        sharding = Sharding.described(layout_file) if layout_file is not None else Sharding()
        sharding = replace(sharding, num_processes=machine.num_processes)
        shape, model = _policy(recipe, sharding, model_config_file)
    except MemoryUnknown as error:
        return RunEstimate(None, {}, None if on_cpu else str(error))
    reward_parameters, uncounted = _reward_parameters(rewards)
    most = prompt_tokens + recipe.config.max_completion_length
    full_kl = recipe.kl_estimator == "full"
    facts = describe(config, model, most, recipe.micro_batching, full_kl=full_kl, sharding=sharding.split)
    planned = MemoryPlan(
        shape=shape,
        facts=facts,
        sharding=sharding,
        config=recipe.config,
        rows=recipe.config.per_device_train_batch_size,
        steps_per_generation=geometry.steps_per_generation,
        prompt_tokens=prompt_tokens,
        dtype_bytes=4 if model_config(recipe).dtype in (None, "float32") else 2,
        optim=optimizer_name(recipe, machine),
        reward_parameters=reward_parameters,
        gpu_memory=gpu_memory,
        quantised_bytes=quantised_bytes(model_config(recipe)),
        keeps_turns=bool(recipe.tools or recipe.environment_factory) and recipe.generation != "off",
        decodes_groups=recipe.generation != "off",
        full_kl=full_kl,
        keeps_groups=keeps_groups_together(recipe, geometry),
    )
    notes = [*uncounted, *assumed, *_stored_notes(recipe, model), *facts.notes()]
    spread = getattr(base_model(model).config.get_text_config(), "initializer_range", None) or SPREAD
    return _measured(planned, spread, notes, on_cpu=on_cpu)


def _measured(planned: MemoryPlan, spread: float, notes: list[str], *, on_cpu: bool) -> RunEstimate:
    """Return the estimate of a run with its memory, except on a CPU. Add to `notes` what TRL's rows would need."""
    facts, padded = planned.facts, replace(planned, keeps_groups=False)
    tokens = {"micro_batch": planned.micro_batch().tokens, "padded": padded.micro_batch().tokens}
    memory: MemoryPlan | str | None = None
    if not on_cpu:
        memory = planned
        try:
            if padded.peak() > planned.peak():
                notes.append(f"a run that warns of trimmed or padded rows needs up to {gib(padded.peak())}")
        except NotMeasured as error:
            memory = f"{facts.model_type} can't run without data, so its memory is not predicted ({error})"
    return RunEstimate(facts, tokens, memory, spread, notes)


def _policy(recipe: Recipe, sharding: Sharding, model_config_file: str | None) -> tuple[ModelShape, nn.Module]:
    """Return the sizes of the policy, and the policy on the meta device.

    Raises:
        MemoryUnknown: The layout or the model is not covered by the estimate, or can't be read.
    """
    is_quantised = quantised_bytes(model_config(recipe)) is not None
    if is_quantised and sharding.split != "none":
        problem = "it is estimated only if each GPU holds all of it"
        raise MemoryUnknown("a quantised model", problem, "give `--accelerate_config single_gpu` or `ddp`")
    shape, model = policy_model(recipe, model_config_file)
    if is_quantised and shape.trained == shape.parameters:
        raise MemoryUnknown("a quantised model", "it can only be trained with an adapter", "set `use_peft: true`")
    return shape, model


def longest_prompt(recipe: Recipe, shown: PromptReport | None) -> tuple[int, list[str]]:
    """Return the tokens of the longest prompt, and a note if they are not those of all prompts."""
    lengths, limit = shown.lengths if shown else None, recipe.dataset.max_prompt_tokens
    longest = lengths.longest_trained(recipe.dataset) if lengths else None
    if lengths is None or longest is None:
        if limit is not None:
            return limit, []
        assumed = ASSUMED_PROMPT_TOKENS
        return assumed, [f"prompts are taken to have {assumed} tokens: `dataset.max_prompt_tokens` sets a limit"]
    if not lengths.is_sample or longest == limit:
        return longest, []
    return longest, [
        f"memory is that of the longest prompt of a sample, {longest:,} tokens, and of {lengths.rows:,} prompts others "
        "may be longer: `dataset.max_prompt_tokens` sets a limit"
    ]


def keeps_groups_together(recipe: Recipe, geometry: Geometry) -> bool:
    """Return True if rows may move between all micro-batches of a generation batch, so that groups stay together.

    Otherwise the number of prompts in a micro-batch, and with it its memory, is not known.
    """
    config, loss = recipe.config, LOSS_TYPES.get(recipe.config.loss_type)
    if loss is None or loss.counts_other_rows:
        return False
    if config.entropy_coef != 0 or config.use_adaptive_entropy or config.top_entropy_quantile < 1:
        return False  # statistics of one micro-batch
    if geometry.splits_groups or geometry.num_generations == 1:
        return False
    return geometry.gradient_accumulation_steps % geometry.steps_per_generation == 0


def _reward_parameters(rewards: Sequence[BuiltReward]) -> tuple[int, list[str]]:
    """Return the parameters of reward models on the training GPU, all of which every process holds, and notes."""
    total, notes = 0, []
    functions = [leaf.unbound for leaf in leaves(rewards)]
    for model in {one.model for one in functions if isinstance(one, RewardModelScore) and one.device != "cpu"}:
        try:
            total += load_model(model)[0].parameters
        except MemoryUnknown:
            notes.append(f"the reward model {model} is not counted: its configuration can't be read here")
    return total, notes


def _stored_notes(recipe: Recipe, model: Any) -> list[str]:
    """Return a note on a checkpoint in few bits, such as gpt-oss's MXFP4."""
    stored = getattr(model.config, "quantization_config", None)
    if not stored:
        return []
    kind = stored["quant_method"] if isinstance(stored, Mapping) else stored.quant_method
    dtype = model_config(recipe).dtype or "float32"
    return [f"the checkpoint is stored in {kind}: memory counts its weights as {dtype}"]


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
