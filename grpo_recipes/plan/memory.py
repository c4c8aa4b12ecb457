"""Memory of one GPU in a GRPO run, by part, estimated from the model's configuration without loading weights.

Under DeepSpeed the model states follow its own estimators (`estimate_zero2_model_states_mem_needs`,
`estimate_zero3_model_states_mem_needs`). On one process they follow accelerate's (`estimate_training_usage`: 16 bytes
per float32 parameter). Both cover only full fine-tuning, so frozen parameters are counted separately. The parts that
neither covers, above all generation, are estimated here and are less exact. Decoder layers are taken to be Llama's, or
measured (`layers.py`).
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from trl import ModelConfig, get_peft_config

from grpo_recipes.data.hub import hub_answers, is_missing
from grpo_recipes.generation.kept_cache import MEMORY_SHARE
from grpo_recipes.generation.models import cache_argument
from grpo_recipes.plan.layers import Measured, MeasuredLayers, Precision, RowSizes
from grpo_recipes.recipe.recipe import Recipe, model_config
from grpo_recipes.recipe.trl_keys import ADAMW_BF16
from grpo_recipes.runs.files import read_object
from grpo_recipes.runs.weights import check_descriptions
from grpo_recipes.training.adamw_bf16 import CHUNK
from grpo_recipes.training.buckets import LAUNCH_TOKENS_ELSEWHERE
from grpo_recipes.training.layout_check import COMPARED_ROWS, EXTRA_PADDING
from grpo_recipes.training.log_probs import MAX_PACKED_SHARE
from grpo_recipes.training.packing import Layout
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
# Tokens and logits of a tile of TRL's head, also if the vocabulary is smaller (`TOKEN_CHUNK_SIZE` and
# `_CHUNKED_LOGPROB_CHUNK_SIZE` of TRL).
HEAD_TOKENS, HEAD_VOCABULARY = 4096, 32768
# Columns of padding that the check of the layout adds.
CHECK_PADDING = 2 * EXTRA_PADDING
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
# Bytes per parameter of a gathered layer: the parameter and its gradient, 16 bits each.
GATHERED = 4
# Host memory as a multiple of the states, DeepSpeed's `additional_buffer_factor`.
HOST_BUFFERS = 1.5

# CUDA context with communication buffers, and the share lost to fragmentation. No estimator includes them.
CONTEXT_BYTES = 1.5 * GIB
FRAGMENTATION = 0.05

# Bytes of an element of a recurrent state: the scans of transformers compute in float32, whatever the weights are.
STATE_ELEMENT_BYTES = 4

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
    """Sizes of a causal language model that determine its memory, as numbers of elements.

    Attributes:
        parameters: All parameters.
        trained: Trained parameters.
        largest_layer: Parameters of the largest module.
        layers: Number of layers.
        hidden: Hidden size.
        intermediate: Size of the feed-forward layer.
        key_value: Elements of the keys, or of the values, of one token in one layer.
        query: Elements of the queries of one token in one layer.
        head: Parameters of the head, vocabulary x hidden size.
        ties_head: True if the head is the embedding.
        quantisable: Parameters quantized by loading in 4 or 8 bits: those of linear layers without the head.
        norms_heads: True if queries and keys have norms of their own (Qwen3).
        initializer_range: Standard deviation of freshly drawn weights, 0.02 unless the configuration sets it.
        cached: Elements of the keys and values of one token, in all layers.
        states: Elements of the recurrent and convolution states of one row, in all layers.
    """

    parameters: int
    trained: int
    largest_layer: int
    layers: int
    hidden: int
    intermediate: int
    key_value: int
    query: int
    head: int
    ties_head: bool
    quantisable: int = 0
    norms_heads: bool = False
    initializer_range: float = 0.02
    cached: int = 0
    states: int = 0

    @classmethod
    def from_config(cls, config: Any, peft_config: Any = None) -> ModelShape:
        """Return the sizes of a model built without storage, with an adapter unless `peft_config` is None."""
        return cls.built(config, peft_config)[0]

    @classmethod
    def built(cls, config: Any, peft_config: Any = None) -> tuple[ModelShape, nn.Module]:
        """Return the sizes of a model, and the model on the meta device, with an adapter or without."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            head = model.get_output_embeddings().weight
            ties_head = head is model.get_input_embeddings().weight
            norms_heads = any(name.endswith(("q_norm", "q_layernorm")) for name, _ in model.named_modules())
            largest = quantisable = 0
            for module in model.modules():
                largest = max(largest, sum(p.numel() for p in module.parameters(recurse=False)))
                if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
                    quantisable += module.weight.numel()
            cached, states = _cache_sizes(model)
            if peft_config is not None:
                model = _with_adapter(model, peft_config)
        text = config.get_text_config()
        # Models without attention have heads of another kind.
        heads = getattr(text, "num_attention_heads", None) or getattr(text, "num_heads", None) or 1
        head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
        key_value = (getattr(text, "num_key_value_heads", None) or heads) * head_size
        shape = cls(
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            largest_layer=largest,
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            key_value=key_value,
            query=heads * head_size,
            head=head.numel(),
            ties_head=ties_head,
            quantisable=quantisable,
            norms_heads=norms_heads,
            initializer_range=getattr(text, "initializer_range", None) or cls.initializer_range,
            # Where the model does not show its cache, every layer is taken to have keys and values of full size.
            cached=cached or (0 if states else 2 * key_value * text.num_hidden_layers),
            states=states,
        )
        return shape, model


def _cache_sizes(model: Any) -> tuple[int, int]:
    """Return the elements that one token leaves in the cache of a model without storage, or (0, 0) if it can't run.

    They are those of keys and values in all layers, which grow with each token, and those of recurrent and convolution
    states, which do not.
    """
    import torch
    from transformers import DynamicCache
    from transformers.utils import logging

    keys_and_values = states = 0
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # kernels that are missing on this machine say nothing about the run's
    try:
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        token = torch.zeros(1, 1, dtype=torch.long, device="meta")
        with torch.no_grad():
            # Experts need 16 bits to run without storage.
            copy.deepcopy(model).bfloat16()(token, use_cache=True, **{cache_argument(model): cache})
        for layer in cache.layers:
            pair = (getattr(layer, "keys", None), getattr(layer, "values", None))
            keys_and_values += sum(tensor.numel() for tensor in pair if tensor is not None)
            stores = (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
            states += sum(state.numel() for store in stores for state in store.values() if state is not None)
    except Exception:  # a model may need values, and its own code raises any class then
        return 0, 0
    finally:
        logging.set_verbosity(verbosity)
    return keys_and_values, states


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
        layout: Layout of the model over the GPUs.
        rows: Completions in one micro-batch on one GPU.
        generated_rows: Completions that one GPU generates at once.
        tokens: Tokens of the longest prompt and completion together.
        prompt_tokens: Tokens of the longest prompt.
        dtype_bytes: Bytes per weight as loaded.
        mixed_precision: True if matrix products are computed in 16 bits.
        gradient_checkpointing: True if activations are recomputed in the backward pass.
        full_reference: True if a second, frozen model is held for the KL term. An adapter's reference is its own base.
        gather_for_generation: `ds3_gather_for_generation`.
        vllm: `colocate`, `server`, or None for generation by transformers.
        vllm_share: Share of the GPU's memory for vLLM, in (0, 1].
        vllm_split: Number of GPUs that share one copy of vLLM's weights.
        vllm_sleeps: True if vLLM frees its memory during training.
        reward_parameters: Parameters of the reward models.
        gpu_memory: Bytes of the GPU, or None if not given.
        optim: Name of the optimizer.
        quantised_bytes: Bytes per weight of a frozen base loaded in 4 or 8 bits, or None if the base is not quantized.
        keeps_turns: True if transformers' generation keeps keys and values between the turns of a generation batch.
        accumulates: True if an optimizer step has several micro-batches, so that gradients exist from the first one on.
        full_kl: True if the KL term is that over the vocabulary (`kl_estimator: full`).
        prompts: Number of distinct prompts in a micro-batch whose rows share them, or None for rows with their own.
        rows_as: Layout of the rows. A layout that shares prompts needs `prompts`.
        layers: Decoder layers of the model, to be measured, or None for layers that are taken to be Llama's.
    """

    shape: ModelShape
    layout: Sharding
    rows: int
    generated_rows: int
    tokens: int
    prompt_tokens: int
    dtype_bytes: int
    mixed_precision: bool
    gradient_checkpointing: bool
    full_reference: bool
    gather_for_generation: bool
    vllm: str | None
    vllm_share: float
    vllm_split: int
    vllm_sleeps: bool
    reward_parameters: int
    gpu_memory: float | None
    optim: str = "adamw_torch"
    quantised_bytes: float | None = None
    keeps_turns: bool = False
    accumulates: bool = True
    full_kl: bool = False
    prompts: int | None = None
    rows_as: Layout = Layout.PADDED
    layers: MeasuredLayers | None = None

    def parts(self) -> dict[str, float]:
        """Return the bytes on one GPU by part.

        `activations` belong to training, and the last five parts to generation. They are held at the same time only if
        vLLM shares the GPU and does not sleep during training.
        """
        return {
            **(self._deepspeed_states() if self.layout.is_deepspeed else self._torch_states()),
            "reference": self._weights() if self.full_reference else 0,
            "reward model": 2 * self.reward_parameters,
            "activations": self._activations(),
            **self._generation(),
        }

    def peak(self) -> float:
        """Return the most bytes held at once: the permanent parts, and the larger of training and generation."""
        training, generation = self._activations(), sum(self._generation().values())
        permanent = sum(self.parts().values()) - training - generation
        if self.vllm == "colocate" and not self.vllm_sleeps:  # vLLM keeps its share during training
            return permanent + training + generation
        return permanent + max(training, generation)

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
        if self.vllm_weights() >= self.vllm_budget():
            return False
        # The measurement of layers takes seconds, so the parts are compared in the order of their cost.
        states = self._deepspeed_states() if self.layout.is_deepspeed else self._torch_states()
        if states["parameters"] + states["optimizer"] > usable or sum(states.values()) + self._micro_batch() > usable:
            return False
        return self.peak() <= usable

    def _deepspeed_states(self) -> dict[str, float]:
        """Return the states under ZeRO. In full fine-tuning their sum is DeepSpeed's estimate."""
        splits_parameters = self.layout.sharding == "zero3"
        gathered = GATHERED * self.shape.largest_layer if splits_parameters else 0
        trained = 0 if self.layout.offload_optimizer else self.shape.trained / self.layout.num_processes
        adam = MASTER_AND_MOMENTS if self.mixed_precision else ADAM_MOMENTS * self.dtype_bytes
        return {
            "parameters": self._weights() + gathered,
            "gradients": (ZERO3_GRADIENT if splits_parameters else ZERO2_GRADIENT) * trained,
            "optimizer": adam * trained,
        }

    def _torch_states(self) -> dict[str, float]:
        """Return the states on one process, under DistributedDataParallel and under FSDP2."""
        splits = self.layout.sharding == "fsdp2"
        ranks = self.layout.num_processes if splits else 1
        trained, frozen = self.shape.trained / ranks, (self.shape.parameters - self.shape.trained) / ranks
        size = self._trained_bytes()
        base = self.dtype_bytes * frozen
        if self.quantised_bytes is not None:
            base -= (self.dtype_bytes - self.quantised_bytes) * self.shape.quantisable / ranks
        gathered = GATHERED * self.shape.largest_layer if splits else 0
        # DistributedDataParallel copies gradients into buckets.
        copies = 2 if not splits and self.layout.num_processes > 1 else 1
        return {
            "parameters": base + size * trained + gathered,
            "gradients": copies * size * trained,
            "optimizer": self._state_bytes(size) * trained,
        }

    def _state_bytes(self, size: int) -> float:
        """Return the bytes of the optimizer's state for a trained weight of `size` bytes, without DeepSpeed."""
        if self.optim == ADAMW_BF16:
            return ADAMW_BF16_STATE if size == 2 else 4 * ADAM_MOMENTS
        return STATE_BYTES.get(self.optim, MOMENTS.get(self.optim, ADAM_MOMENTS) * size)

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
        is_adapter = self.shape.trained < self.shape.parameters
        return 4 if is_adapter or (self.layout.sharding == "fsdp2" and self.mixed_precision) else self.dtype_bytes

    def _stream_bytes(self) -> int:
        """Return the bytes of a number between the layers, and of a key or value in the cache.

        It has the dtype of the weights that compute it. DeepSpeed and FSDP2 cast them to the compute precision.
        Autocast does not, and generation runs without autocast.
        """
        return self.dtype_bytes if self.layout.sharding == "none" else self._compute_bytes()

    def _splits_gradients(self) -> bool:
        """Return True if a gradient is reduced and split as soon as it is complete."""
        return self.layout.sharding != "none"

    def _weights(self) -> float:
        """Return the bytes of the weights alone, which are all that a reference model needs."""
        if self.layout.offload_parameters:
            return 0
        size = self._compute_bytes() if self.layout.is_deepspeed else self.dtype_bytes
        # With ZeRO-2 every GPU holds all weights, also of a reference (TRL's `prepare_deepspeed`).
        ranks = self.layout.num_processes if self.layout.sharding in ("zero3", "fsdp2") else 1
        return size * self.shape.parameters / ranks

    def _activations(self) -> float:
        """Return the most bytes that a micro-batch or the optimizer's step holds beside the states."""
        held = self._micro_batch()
        if self.prompts is not None:
            held = max(held, self._simpler_rows()._micro_batch(), self._layout_check())
        return max(held, self._optimizer_step())

    def _simpler_rows(self) -> MemoryPlan:
        """Return the estimate of the longest rows with their own prompts that are preferred to shared prompts."""
        if self.rows_as is Layout.PACKED:  # packing hardly shortens them
            most = self.computed() / MAX_PACKED_SHARE
        else:  # a segment of prompts costs as much as so many tokens, and TRL's rows have no bucket either
            most = self.computed() + LAUNCH_TOKENS_ELSEWHERE * (2 if self.rows_as is Layout.SHARED_PADDED else 1)
        tokens = min(math.ceil(most / self.rows), self.tokens)
        prompt = tokens - self._completion()
        return replace(self, prompts=None, rows_as=Layout.TRIMMED, tokens=tokens, prompt_tokens=prompt)

    def _micro_batch(self) -> float:
        """Return the most bytes that the forward and the backward of a micro-batch hold beside the states.

        Gradients that the micro-batch has not computed yet are subtracted, because the states count all of them.
        """
        if self.layers is not None:
            return self._measured_micro_batch()
        checkpointing = self.gradient_checkpointing
        # Without checkpointing, the casts of all layers stay for the backward pass. With it, they stay in autocast's
        # cache until the end of the forward pass.
        cached = self._cast_weights() if checkpointing else 0
        kept = self.shape.layers * (self._checkpoint() if checkpointing else self._kept())
        head = self._head() + max(self._head_backward(), cached)
        layer = self._layer_backward() + (self._kept() if checkpointing else 0)
        start = kept + max(head, layer + self._head_gradient())
        if not self.accumulates and not self._splits_gradients():
            start -= self._trained_bytes() * self.shape.trained
        end = self._kept() + self._layer_backward()
        return max(start, end, self._embedding_gradient()) + self._batch()

    def _measured_micro_batch(self) -> float:
        """Return the bytes of a micro-batch whose decoder layers are measured."""
        assert self.layers is not None
        measured, casts = self._measured(), 0.0
        kept: list[float] = [layer.kept for layer in measured.layers]
        most = [layer.backward for layer in measured.layers]
        if self.gradient_checkpointing:
            # Without gradients, layers keep copies of weights alone, which are the same for rows of any size.
            shortest = self.layers.measure(self._precision(), RowSizes(1, 0, CHECK_PADDING), trains=False)
            casts = sum(layer.kept for layer in shortest.layers)
            kept = [measured.between] * len(kept)
            most = [max(layer.forward, layer.backward) for layer in measured.layers]
        dequantised = self._dequantised()
        stream = self._stream_bytes_of(measured)
        head = sum(kept) + self._head(stream, self.rows * self._completion()) + max(self._head_backward(), casts)
        missing = 0.0 if self.accumulates or self._splits_gradients() else self._trained_bytes() * self.shape.trained
        moments = [head - missing, self._embedding_gradient()]
        # The embedding's gradient comes last in a backward pass. An untied head has one of the same size, the first.
        trains_all = self.shape.trained == self.shape.parameters
        embedding = missing * self.shape.head / self.shape.parameters if trains_all else 0.0
        of_layers = max(missing - embedding * (1 if self.shape.ties_head else 2), 0.0)
        for number, bytes_of_layer in enumerate(most):
            # The layers behind this one have freed what they kept, and have their gradients.
            before, outgoing = sum(kept[:number]), measured.between
            gradients = self._head_gradient() - embedding - of_layers * number / len(most)
            moments.append(before + bytes_of_layer + outgoing + dequantised + gradients)
            if self.gradient_checkpointing:
                moments[-1] += measured.between
        return max(moments) + measured.shared + self.rows * self.tokens * BATCH_BYTES

    def _stream_bytes_of(self, measured: Measured) -> int:
        """Return the bytes of a number between the measured layers."""
        return max(round(measured.between / self.computed() / self.shape.hidden), self._stream_bytes())

    def _measured(self) -> Measured:
        """Return the bytes of the decoder layers for the rows of a micro-batch."""
        assert self.layers is not None
        prompt = self.prompt_tokens if self.prompts is not None else 0
        sizes = RowSizes(self.rows, prompt, self.tokens - prompt, self.prompts)
        return self.layers.measure(self._precision(), sizes)

    def _measured_check(self) -> Measured:
        """Return the bytes of the decoder layers for a forward in TRL's layout without gradients."""
        assert self.layers is not None
        return self.layers.measure(self._precision(), RowSizes(self.rows, 0, self.tokens + CHECK_PADDING), trains=False)

    def _precision(self) -> Precision:
        """Return the precision of the decoder layers."""
        holds_all = self.layout.sharding == "none"
        trained = self._trained_bytes() if holds_all else self._compute_bytes()
        autocast = holds_all and self.mixed_precision
        return Precision(self._stream_bytes(), trained, autocast)

    def _layout_check(self) -> float:
        """Return the bytes of the forward in TRL's layout with which a few rows of a run are compared.

        It keeps nothing for a backward, and comes before the first gradient.
        """
        if self.rows > COMPARED_ROWS:
            return replace(self, rows=COMPARED_ROWS)._layout_check()
        if self.layers is not None:
            return self._measured_layout_check()
        shape, size, stream = self.shape, self._compute_bytes(), self._stream_bytes()
        padded = replace(self, prompts=None, tokens=self.tokens + CHECK_PADDING)
        is_adapter = shape.trained < shape.parameters
        intermediate, hidden = (4 * size, 6) if is_adapter else (3 * size, 0)
        feed_forward = intermediate * shape.intermediate + hidden * shape.hidden
        attention = (4 * size + stream) * shape.query + 2 * stream * shape.key_value + padded.tokens * size
        layer = self.rows * padded.tokens * (4 * stream * shape.hidden + max(feed_forward, attention))
        # Autocast keeps its copies of trained weights only.
        casts = self._cast_weights() / (shape.layers if is_adapter else 1)
        gradients = 0 if self._splits_gradients() else self._trained_bytes() * shape.trained
        return max(layer, padded._head()) + casts + padded._batch() - gradients

    def _measured_layout_check(self) -> float:
        """Return the bytes of the forward that `_layout_check` describes, whose decoder layers are measured."""
        padded = replace(self, prompts=None, tokens=self.tokens + CHECK_PADDING)
        measured, casts, most = self._measured_check(), 0, 0.0
        for layer in measured.layers:
            most = max(most, casts + layer.forward + measured.between)
            casts += layer.kept
        gradients = 0 if self._splits_gradients() else self._trained_bytes() * self.shape.trained
        batch = self.rows * padded.tokens * BATCH_BYTES + measured.shared
        head = padded._head(padded._stream_bytes_of(measured), self.rows * self._completion())
        return max(most, casts + head) + batch - gradients

    def _batch(self) -> float:
        """Return the bytes of the mask of attention, of ids, other masks, labels and log-probabilities."""
        mask = self.tokens if self.prompts is None else 0
        return self.rows * self.tokens * (mask + BATCH_BYTES)

    def computed(self) -> int:
        """Return the number of tokens of a micro-batch that run through the model, padding included."""
        if self.prompts is None:
            return self.rows * self.tokens
        # The last token of a prompt is computed once per completion, in place of the completion's own last token.
        shared = self.prompts * (self.prompt_tokens - 1)
        return shared + self.rows * (self.tokens - self.prompt_tokens)

    def _checkpoint(self) -> float:
        """Return the bytes of the input of one layer."""
        return self.computed() * self.shape.hidden * self._stream_bytes()

    def _kept(self) -> float:
        """Return the bytes that one layer keeps for its backward pass without gradient checkpointing.

        A layer is taken to be Llama's: two norms, attention, and a gated feed-forward layer.
        """
        shape, size, stream = self.shape, self._compute_bytes(), self._stream_bytes()
        norm = 4.0  # the float32 input
        query = 0.0
        intermediate = 4.0 * size  # gate, its activation, up projection, input of the down projection
        if shape.trained == shape.parameters:
            norm += stream  # factor of the norm's weight
            # Autocast casts the input of each of five projections by itself, unless it has the dtype already.
            hidden = 2 * norm + size * (2 if stream == size else 5)
        else:
            # Each of seven adapters keeps its dropped input and the mask of the dropout. Five inputs are hidden states,
            # one is the output of attention, and the seventh replaces the frozen down projection's.
            hidden = 2 * norm + 5 * (size + 1)
            query = size + 1
            intermediate += 1
        elements = hidden * shape.hidden + query * shape.query + intermediate * shape.intermediate
        if shape.trained < shape.parameters:
            sizes = 7 * shape.hidden + 2 * (shape.query + shape.key_value) + 3 * shape.intermediate
            rank = shape.trained / shape.layers / sizes
            elements += 7 * rank * size  # between the two matrices of each adapter
        if shape.norms_heads:
            elements += (norm + 4 / 64) * (shape.query + shape.key_value)
        return self.computed() * elements + self._attention() + self._cast_weights() / shape.layers

    def _attention(self) -> float:
        """Return the bytes that the attention of one layer keeps: query, key, value and output.

        The mask for TRL's padding makes SDPA repeat keys and values for each head, and it gets a bias of the scores. A
        packed row is counted with one SDPA call per completion, which keeps more than one call of `varlen_attn`.
        """
        shape, size = self.shape, self._compute_bytes()
        per_head = 4 / 64  # a float32 number for each head, which has at least 64 elements
        if self.prompts is None:
            elements = shape.query * (4 * size + per_head)
            return self.rows * self.tokens * (elements + self.tokens * size)
        # In float32, keys and values are repeated for each head. The outputs are also kept as one row.
        key_value = shape.query if size == 4 else shape.key_value
        elements = shape.query * (2 * size + per_head) + 2 * key_value * size
        return self.rows * (self.tokens - 1) * elements + self.computed() * shape.query * size

    def _layer_backward(self) -> float:
        """Return the bytes of temporaries in the backward pass of one layer.

        The factors were fitted to `tests/support/memory_meter.py` at the moment at which its peak lies.
        """
        shape, size = self.shape, self._compute_bytes()
        hidden, intermediate = 4, 2 * size
        if shape.trained < shape.parameters:
            # A float32 adapter's dropout has a float32 input and output, and so have their gradients.
            hidden, intermediate = 11, size * (5 if self._trained_bytes() > size else 1)
        temporaries = self.computed() * (hidden * shape.hidden + intermediate * shape.intermediate)
        return temporaries + self._dequantised()

    def _dequantised(self) -> float:
        """Return the bytes of a quantized matrix, which is dequantized when it is used."""
        if self.quantised_bytes is None:
            return 0
        return self._compute_bytes() * self.shape.hidden * self.shape.intermediate

    def _cast_weights(self) -> float:
        """Return the bytes of the 16-bit copies that autocast makes of float32 weights."""
        if self._stream_bytes() == self._compute_bytes():
            return 0
        return self._compute_bytes() * (self.shape.parameters - self.shape.head)

    def _completion(self) -> int:
        """Return the tokens of the longest completion."""
        return self.tokens - self.prompt_tokens

    def _head(self, stream: int | None = None, scored: int = HEAD_TOKENS) -> float:
        """Return the bytes of hidden states behind the last layer, of their gradients, and of the tiles of the head.

        Args:
            stream: Bytes of a number behind the last layer, or None for that of the weights.
            scored: Number of tokens with a label.
        """
        tokens, stream = self.computed(), self._stream_bytes() if stream is None else stream
        # The last norm keeps its float32 input. TRL's head computes the gradient in float32.
        hidden = 8 + 4 * stream
        in_16_bits = self.mixed_precision and self.layout.sharding == "none"  # by autocast
        number = self._compute_bytes() if in_16_bits else max(stream, self._compute_bytes())
        tile = number
        if self.full_kl:
            # The reference's hidden states, and the completion tokens of both models. Two tiles of float32 logits.
            hidden += 3 * stream + 8
            tile = 8
        # Copies of the weights of a tile and of the one before it, by autocast or in the precision of hidden states.
        casts = self._stream_bytes() != self._compute_bytes() or stream > self._stream_bytes()
        copies = min(2 * HEAD_VOCABULARY * self.shape.hidden, self.shape.head) * number if casts else 0
        return min(tokens, scored, HEAD_TOKENS) * HEAD_VOCABULARY * tile + tokens * self.shape.hidden * hidden + copies

    def _head_backward(self) -> float:
        """Return the bytes of the gradient of the head's weight, in float32 and in its own dtype."""
        if not self._head_gradient():
            return 0
        return 4 * self.shape.head + (self._head_gradient() if self._stream_bytes() < 4 or self.full_kl else 0)

    def _head_gradient(self) -> float:
        """Return the bytes of the head's gradient, or 0 if the head is frozen."""
        return self._stream_bytes() * self.shape.head if self.shape.trained == self.shape.parameters else 0

    def _embedding_gradient(self) -> float:
        """Return the bytes of gradients that are added to the embedding's, at the end of the backward pass."""
        if not self.shape.ties_head:
            return 0
        # The head's, the embedding's, and their sum, one of which is the gradient that the states count.
        return self._head_gradient() * (3 if self.accumulates or self._splits_gradients() else 2)

    def _optimizer_step(self) -> float:
        """Return the bytes of the optimizer's temporaries."""
        if self.optim != ADAMW_BF16 or self.layout.is_deepspeed:
            return 0
        ranks = self.layout.num_processes if self.layout.sharding == "fsdp2" else 1
        is_bf16 = self._trained_bytes() == 2
        return ADAMW_BF16_TEMPORARY * min(CHUNK, self.shape.trained / ranks) if is_bf16 else 0

    def _generation(self) -> dict[str, float]:
        """Return the bytes that generation takes, by part. vLLM's share includes its keys and values.

        Under ZeRO-3 two cases gather the whole model on every GPU: generation by transformers with
        `ds3_gather_for_generation`, and the merge of an adapter for vLLM (`VLLMGeneration._iter_named_params`).
        """
        is_adapter = self.shape.trained < self.shape.parameters
        gathers = self.gather_for_generation if self.vllm is None else is_adapter
        weights = self._compute_bytes() * self.shape.parameters if gathers and self.layout.sharding == "zero3" else 0
        # An upper limit: every row is taken to have the longest prompt and completion.
        keys_and_values = self.generated_rows * self.tokens * self.shape.cached * self._stream_bytes()
        states = self.generated_rows * self.shape.states * STATE_ELEMENT_BYTES
        # Copies of rows whose completion calls a tool, which may be all rows. A model with states keeps none.
        keeps = self.keeps_turns and not states
        kept = min(keys_and_values, MEMORY_SHARE * (self.gpu_memory or math.inf)) if keeps else 0
        share = self.vllm_budget() if self.gpu_memory else self.vllm_weights()
        return {
            "gathered weights": weights,
            "KV cache": 0 if self.vllm else keys_and_values + states,
            "KV cache kept between turns": 0 if self.vllm else kept,
            "vLLM's share": share if self.vllm == "colocate" else 0,
            "weights on their way": self._packs() if self.vllm == "server" else 0,
        }

    def _packs(self) -> float:
        """Return the bytes on rank 0 while weights go to a vLLM server: two packs in flight, and sources of a third.

        A pack is sent once it exceeds `PACK_BYTES` (vLLM's `pack_tensors`). Its sources are views if this rank holds
        all weights, and copies if the weights are gathered from a split model or merged with an adapter.
        """
        size = self._compute_bytes() if self.layout.is_deepspeed else self.dtype_bytes
        model = size * self.shape.parameters
        pack = min(PACK_BYTES + size * self.shape.largest_layer, model)
        is_adapter = self.shape.trained < self.shape.parameters
        copies = pack if is_adapter or self.layout.sharding in ("zero3", "fsdp2") else 0
        return min(PACKS_IN_FLIGHT * pack, model) + copies

    def vllm_budget(self) -> float:
        """Return the bytes that vLLM may take on this GPU, infinite if it takes none or the GPU's size is not given."""
        return self.vllm_share * self.gpu_memory if self.vllm == "colocate" and self.gpu_memory else math.inf

    def vllm_weights(self) -> float:
        """Return the bytes of vLLM's own copy of the weights on this GPU."""
        return 2 * self.shape.parameters / self.vllm_split if self.vllm == "colocate" else 0


def load_shape(model: str, peft_config: Any = None) -> ModelShape:
    """Return the sizes of a model as `load_model` does, which raises the same errors."""
    return load_model(model, peft_config)[0]


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


def memory_plan(
    config: Any,
    dtype: str | None,
    shape: ModelShape,
    layout: Sharding,
    *,
    prompt_tokens: int | None,
    steps_per_generation: int,
    reward_parameters: int = 0,
    gpu_memory: float | None = None,
    optim: str = "adamw_torch",
    quantised_bytes: float | None = None,
    keeps_turns: bool = False,
    full_kl: bool = False,
) -> MemoryPlan:
    """Return the estimate of a run.

    Args:
        config: Object with the attributes of `GRPOConfig`.
        dtype: Dtype of the weights as loaded, where None is float32, as in TRL.
        shape: Sizes of the policy with its adapter.
        layout: Layout of the model over the GPUs.
        prompt_tokens: Longest prompt, or None to assume `ASSUMED_PROMPT_TOKENS`.
        steps_per_generation: Micro-batches into which a generation batch is split.
        reward_parameters: Parameters of the reward models.
        gpu_memory: Bytes of one GPU, or None if not given.
        optim: Name of the optimizer.
        quantised_bytes: Bytes per weight of a quantized base, or None if the base is not quantized.
        keeps_turns: True if completions have turns, and group decoding keeps their keys and values.
        full_kl: True for `kl_estimator: full`.
    """
    is_adapter = shape.trained < shape.parameters
    longest_prompt = prompt_tokens or ASSUMED_PROMPT_TOKENS
    # A rank generates all its micro-batches at once, but trains on one at a time.
    return MemoryPlan(
        shape=shape,
        layout=layout,
        rows=config.per_device_train_batch_size,
        generated_rows=config.per_device_train_batch_size * steps_per_generation,
        tokens=longest_prompt + config.max_completion_length,
        prompt_tokens=longest_prompt,
        dtype_bytes=4 if dtype in (None, "float32") else 2,
        mixed_precision=bool(config.bf16 if config.bf16 is not None else not config.use_cpu) or config.fp16,
        gradient_checkpointing=config.gradient_checkpointing,
        full_reference=config.beta != 0 and not is_adapter,
        gather_for_generation=config.ds3_gather_for_generation,
        vllm=config.vllm_mode if config.use_vllm else None,
        vllm_share=config.vllm_gpu_memory_utilization,
        vllm_split=config.vllm_tensor_parallel_size,
        vllm_sleeps=config.vllm_enable_sleep_mode,
        reward_parameters=reward_parameters,
        gpu_memory=gpu_memory,
        optim=optim,
        quantised_bytes=quantised_bytes,
        keeps_turns=keeps_turns and not config.use_transformers_continuous_batching,
        accumulates=config.gradient_accumulation_steps > 1,
        full_kl=full_kl,
    )


def sharing_prompts(
    plan: MemoryPlan, factor: int, group: int, accumulation: int, layout: Layout = Layout.PACKED
) -> MemoryPlan:
    """Return the estimate with `factor` times as many completions in a micro-batch, whose rows share their prompts.

    Args:
        plan: Estimate of the recipe.
        factor: Number of micro-batches of one generation batch that become one.
        group: Completions of a prompt, all of which are on the same GPU.
        accumulation: The recipe's `gradient_accumulation_steps`, which shrinks so that the optimizer step keeps its
            size.
        layout: Layout of the rows.
    """
    rows = factor * plan.rows
    # Rows are sorted by prompt, and each micro-batch takes the next ones. It may begin and end inside a group.
    starts = range(0, math.lcm(rows, group), rows)
    prompts = max((start + rows - 1) // group - start // group + 1 for start in starts)
    return replace(plan, rows=rows, prompts=prompts, rows_as=layout, accumulates=accumulation > factor)


def quantised_bytes(arguments: ModelConfig) -> float | None:
    """Return the bytes of a quantized weight, or None if `arguments` quantize nothing."""
    if arguments.load_in_4bit:
        return NESTED_4BIT_BYTES if arguments.use_bnb_nested_quant else QUANTISED_BYTES[4]
    return QUANTISED_BYTES[8] if arguments.load_in_8bit else None


def best_precision(plan: MemoryPlan) -> str:
    """Return the first precision that keeps small updates and fits, for full fine-tuning without DeepSpeed.

    If the GPU's size is not given, return all of them with their peaks.
    """
    ways = [
        ("dtype: float32", replace(plan, dtype_bytes=4, optim="adamw_torch")),
        (f"dtype: bfloat16 with optim: {ADAMW_BF16}", replace(plan, dtype_bytes=2, optim=ADAMW_BF16)),
        (
            "accelerate_configs/zero2_offload.yaml, which keeps float32 weights in host memory",
            replace(plan, dtype_bytes=2, layout=replace(plan.layout, sharding="zero2", offload_optimizer=True)),
        ),
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


def changes_that_fit(plan: MemoryPlan, accumulation: int) -> list[str]:
    """Return the single changes that make a recipe fit, each with its peak.

    Args:
        plan: Estimate of the recipe.
        accumulation: The recipe's `gradient_accumulation_steps`, which grows so that the optimizer step keeps its size.
    """
    fitting = [f"{text}: {gib(changed.peak())}" for text, changed in _changes(plan, accumulation) if changed.fits()]
    return fitting or ["no single change of the recipe or of the layout is enough: combine some, or take larger GPUs"]


def _changes(plan: MemoryPlan, accumulation: int) -> list[tuple[str, MemoryPlan]]:
    """Return the changes to try, the least intrusive first."""
    changes = []
    if not plan.gradient_checkpointing:
        changes.append(("gradient_checkpointing: true", replace(plan, gradient_checkpointing=True)))
    divisors = [divisor for divisor in range(plan.rows // 2, 0, -1) if plan.rows % divisor == 0]
    rows = 1
    if plan.rows > 1 and replace(plan, rows=1).fits():  # otherwise more rows do not fit either
        rows = next(rows for rows in divisors if replace(plan, rows=rows).fits())
    if rows < plan.rows:
        factor = plan.rows // rows
        text = f"per_device_train_batch_size: {rows} with gradient_accumulation_steps: {accumulation * factor}"
        changes.append((text, replace(plan, rows=rows, accumulates=True)))
    if plan.vllm != "server":
        # The server has its own GPUs, so this frees the memory that generation takes on the counted ones.
        changes.append(("vllm_mode: server, on GPUs of its own", replace(plan, vllm="server")))
    if plan.vllm == "colocate" and not plan.vllm_sleeps:
        changes.append(("vllm_enable_sleep_mode: true", replace(plan, vllm_sleeps=True)))
    if plan.layout.sharding == "zero3" and (plan.vllm or plan.gather_for_generation):
        text = "ds3_gather_for_generation: false (far slower)"
        text = f"use_vllm: false with {text}" if plan.vllm else text
        changes.append((text, replace(plan, vllm=None, gather_for_generation=False)))
    if plan.layout.sharding != "zero3" and plan.layout.num_processes > 1:
        changes.append(("accelerate_configs/zero3.yaml", replace(plan, layout=replace(plan.layout, sharding="zero3"))))
    if plan.layout.sharding in ("zero3", "fsdp2"):
        changes.append(_more_machines(plan))
    if not plan.layout.offload_parameters and plan.layout.sharding != "fsdp2":
        offload = replace(plan.layout, sharding="zero3", offload_optimizer=True, offload_parameters=True)
        changes.append(("accelerate_configs/zero3_offload.yaml (slower)", replace(plan, layout=offload)))
    return changes


def _more_machines(plan: MemoryPlan) -> tuple[str, MemoryPlan]:
    """Return the fewest machines on which the run fits, up to 16 times as many, or twice as many if none of them do."""
    machines, processes = plan.layout.num_machines, plan.layout.num_processes
    changes = []
    for factor in range(2, 17):
        layout = replace(plan.layout, num_machines=machines * factor, num_processes=processes * factor)
        text = f"num_machines: {layout.num_machines}, num_processes: {layout.num_processes}"
        changes.append((text, replace(plan, layout=layout)))
    return next((change for change in changes if change[1].fits()), changes[0])


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


def describe(plan: MemoryPlan, accumulation: int) -> list[Part]:
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
        parts += [Labelled("would fit", change) for change in changes_that_fit(plan, accumulation)]
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
