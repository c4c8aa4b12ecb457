"""Every causal language model of the installed transformers, tiny: its layout, and how far its gradient is from TRL's.

    make models                                # all of them: a minute or two; writes docs/model-layouts.md
    python -m tests.tools.models qwen2 gemma3_text   # some of them, printed

A model is built from its configuration class, with the sizes made small by their names. One generation batch of
recorded completions goes through TRL's trainer and through ours, and the gradients of its two optimizer steps are
compared. The exit code is 1 if a gradient is further than `FAR` from TRL's.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import math
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.training import layout_check
from tests.support.recorded import WORDS, Recording, gradients, largest_gap, make_trainer

FAR = 1e-3
"""The largest difference of a gradient that is put down to float32's rounding, over the largest entry of its tensor."""

LARGEST = 5_000_000
"""Parameters of a model that counts as tiny."""

SAMPLE = (
    "bloom", "deepseek_v3", "falcon_h1", "gemma2", "gpt2", "gpt_oss", "hy_v4", "llama", "ministral3", "qwen3_moe",
    "qwen3_next", "recurrent_gemma",
)  # fmt: skip
"""One of each kind: what the slow tests run."""

SIZES: list[tuple[str, int]] = [
    (r"vocab", WORDS),
    (r"^(n|topk)_group$|^n_groups$|num_expert_groups", 1),
    (r"key_value_heads|num_kv_heads", 2),
    (r"index_topk", 16),
    (r"per_tok|topk|top_k|moe_k$|num_selected", 2),
    (r"experts$|expert_num$", 4),
    (r"heads?$", 4),
    (r"layers?$|num_blocks", 4),
    (r"rotary_dim", 4),
    (r"head_dim|head_size|dim_head|d_head|kv_channels", 8),
    (r"rank$", 8),
    (r"position|n_ctx|seq_len|context_length", 128),
    (r"window", 64),
    (r"chunk", 16),
    (r"state", 8),
    (r"ffn|intermediate|dim_ff|dff|d_inner|n_inner|feed_forward|mid_dim", 48),
    (r"hidden|d_model|n_embd|emb_dim|embed_dim|embedding_size|embedding_dim|proj_dim|lru_width", 32),
]
"""The sizes of a tiny model by the names of its configuration's keys: the first pattern found in a name counts."""

_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_HYBRID = {"layers_block_type": ["linear_attention", "hybrid"] * 2}
_INDEXER = {"n_heads": 4, "kv_heads": 1, "head_dim": 8, "budget": 16, "compress_ratio": 4}
_QWEN4 = {
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "ngram_vocab_size_base": WORDS,
    **{f"indexer_{key}": value for key, value in _INDEXER.items()},
}
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR,
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": _LINEAR,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "kimi_linear": _LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 16]},
    "xlstm": {"mode": "train"},
    "xmod": {"default_language": "en_XX"},
    "zamba": _HYBRID,
    "zamba2": _HYBRID,
}
"""Errors of the patterns, by model type."""


NONE = "not applicable"


@dataclasses.dataclass(frozen=True)
class Row:
    """Result for one model type."""

    model_type: str
    layout: str
    """packed, trimmed, plain, or `NONE`."""
    gap: float
    """`largest_gap` of our gradient and TRL's; NaN where there is none."""
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """Return True if the model trains with another gradient than TRL's."""
        return self.layout != NONE and not self.gap <= FAR

    @property
    def distance(self) -> str:
        """The gap as the table has it."""
        return (
            "" if math.isnan(self.gap) else "0" if self.gap == 0 else f"{self.gap:.0e}{' WRONG' if self.wrong else ''}"
        )


def model_types() -> list[str]:
    """Return the causal language models of the installed transformers."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_settings(config_class: type[PreTrainedConfig], special: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that make a configuration's model tiny and its training deterministic.

    Sub-configurations get theirs too. The router loss is off, because no row is packed with it.
    """
    settings: dict[str, Any] = {}
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    for name, field in fields.items():
        default = field.default
        if isinstance(default, float) and re.search(r"drop|jitter|router_aux_loss_coef", name):
            settings[name] = 0.0
        elif name in ("initializer_range", "init_std"):
            settings[name] = 0.2
        elif name in ("pad_token_id", "eos_token_id", "bos_token_id"):
            unset = None if "None" in str(field.type) else 2
            settings[name] = {"pad_token_id": 0, "eos_token_id": 1}.get(name, unset)
        elif isinstance(default, int) and not isinstance(default, bool) and not name.endswith("_id"):
            size = next((size for pattern, size in SIZES if re.search(pattern, name)), default)
            settings[name] = min(default, size)
    if "head_dim" in fields and fields["head_dim"].default is None:
        settings["head_dim"] = 8
    if "kv_lora_rank" in fields:  # latent attention has as many heads of keys as of queries
        settings["num_key_value_heads"] = 4
    if "is_decoder" in fields:
        settings["is_decoder"] = True
    for name, part in config_class.sub_configs.items():
        if isinstance(part, type) and issubclass(part, PreTrainedConfig) and dataclasses.is_dataclass(part):
            settings[name] = tiny_settings(part, SPECIAL.get(part.model_type, {}))
    return {**settings, **special}


def build(model_type: str) -> PreTrainedModel:
    """Build a tiny model of this type whose distributions are far from uniform, the same one at each call."""
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**tiny_settings(config_class, SPECIAL.get(model_type, {})))
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters with these sizes")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def measure(model_type: str) -> Row:
    """Train one generation batch with TRL and with ours.

    Drawing random numbers changes how TRL shuffles rows among the steps of a generation, even if the numbers are not
    used (PhiMoE without jitter). A type that seems far from TRL is measured again with all rows in one step.
    """
    row = _measure(model_type, accumulation=2)
    return _measure(model_type, accumulation=4) if row.wrong else row


def _measure(model_type: str, accumulation: int) -> Row:
    """Train one generation batch in optimizer steps of `accumulation` of its four micro-batches."""
    try:
        build(model_type)
    except Exception as error:  # any model may refuse any size
        return Row(model_type, NONE, math.nan, f"not built: {_sentence(error)}")
    recording = Recording.random(prompts=4, group=4, seed=3, zero=(2,))
    config = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": 4,
    }
    steps = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), _sentences() as said:
        warnings.simplefilter("ignore")
        for cls in (TRLGRPOTrainer, GRPOTrainer):
            try:
                trainer = make_trainer(cls, recording, build(model_type), Path(folder), **config)
                steps[cls] = gradients(trainer, recording.rows())
            except Exception as error:
                who = "TRL's trainer fails" if cls is TRLGRPOTrainer else "refused"
                return Row(model_type, NONE, math.nan, f"{who}: {_sentence(error)}")
        (layout,) = trainer._log_probs._layouts.values()
        gap = largest_gap(steps[GRPOTrainer], steps[TRLGRPOTrainer])
        reasons = dict.fromkeys(sentence.rpartition("micro-batches are ")[2].partition(": ")[2] for sentence in said)
        return Row(model_type, layout.name.lower(), gap, "; ".join(filter(None, reasons)))


def _sentence(error: Exception) -> str:
    """Return an error on one line, short enough for a table."""
    line = " ".join((str(error) or type(error).__name__).split())
    return line if len(line) < 120 else line[:117] + "..."


class _Sentences(logging.Handler):
    """Keeps what is logged about the layout."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def _sentences() -> Iterator[list[str]]:
    """Collect the messages of `layout_check` inside the `with`, without printing them."""
    handler, logger = _Sentences(), logging.getLogger(layout_check.__name__)
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield handler.said
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def table(rows: list[Row]) -> str:
    """Return the rows as docs/model-layouts.md."""
    versions = f"transformers {transformers.__version__}, trl {trl.__version__}, torch {torch.__version__}"
    counts = {layout: sum(row.layout == layout for row in rows) for layout in ("packed", "trimmed", "padded", NONE)}
    wrong = sum(row.wrong for row in rows)
    lines = [
        "# Which models are packed",
        "",
        "Made by `make models`. Every causal language model of the installed transformers is built tiny from its",
        "configuration, and trained for two optimizer steps by TRL and by us on the same completions. The distance",
        "is the largest difference of a gradient's entries, relative to the largest entry of its tensor, in",
        "float32, without router loss and dropout.",
        "",
        f"{versions}. {len(rows)} model types: {', '.join(f'{count} {layout}' for layout, count in counts.items())}; "
        f"{wrong} further than {FAR:g} from TRL's gradient.",
        "",
        "| model type | layout | distance from TRL's gradient | reason for not packing |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r.model_type} | {r.layout} | {r.distance} | {r.reason.replace('|', '/')} |" for r in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure the asked models, print them, and write the table if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types, all by default")
    parser.add_argument("--record", type=Path, help="a file for the table")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = []
    for model_type in asked.types or model_types():
        row = measure(model_type)
        rows.append(row)
        print(f"{row.model_type}: {row.layout} {row.distance} {row.reason}", flush=True)
    if asked.record:
        asked.record.write_text(table(rows), encoding="utf-8")
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
