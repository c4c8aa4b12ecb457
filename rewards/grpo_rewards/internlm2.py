"""InternLM2 reward models, loaded as transformers' own `LlamaForSequenceClassification`.

An InternLM2 reward model is a Llama model with other names: the rows of queries, keys and values are interleaved by
key-value group in one matrix, and a head with one output reads the last hidden state. The code published with it fails
under transformers 5, or runs and returns wrong scores. Nothing here executes code from a checkpoint.

    from grpo_rewards.internlm2 import load
    model, tokenizer = load("internlm/internlm2-1_8b-reward", dtype="bfloat16", device="cuda")
"""

import importlib
import os
import pickle
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import UnreadableFile, check_model_files, give_default_mode, read_json

ARCHITECTURE = "InternLM2ForRewardModel"

_LLAMA_TO_INTERNLM2 = {
    "embed_tokens": "tok_embeddings",
    "self_attn.q_proj": "attention.wqkv",
    "self_attn.k_proj": "attention.wqkv",
    "self_attn.v_proj": "attention.wqkv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "score": "v_head",
}
_SAME_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "*.safetensors"]
_PICKLED_FILES = ["pytorch_model*.bin"]


def is_internlm2_reward(config: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint's `config.json`, read as a mapping, declares an InternLM2 reward model."""
    return ARCHITECTURE in (config.get("architectures") or ())


def llama_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Return the configuration of the same network as a Llama model.

    Args:
        config: contents of an InternLM2 reward model's `config.json`.

    Raises:
        UserError: the mapping is not an InternLM2 reward model's, lacks a key, or has a rotary scaling other than none,
            `linear` and `dynamic`.
    """
    if not is_internlm2_reward(config):
        problem = f"it declares {config.get('architectures') or 'no architecture'}, not {ARCHITECTURE}"
        raise UserError("config.json", problem, "name an InternLM2 reward checkpoint")
    missing = [key for key in _SAME_KEYS if key not in config]
    if missing:
        raise UserError("config.json", f"it lacks {', '.join(missing)}", "complete it from the model's page")
    try:
        # transformers generates a signature without the fields of the base class and a checkpoint's own ones.
        return LlamaConfig(  # type: ignore[call-arg]
            **{key: config[key] for key in _SAME_KEYS},
            num_key_value_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            hidden_act=config.get("hidden_act", "silu"),
            initializer_range=config.get("initializer_range", 0.02),
            rope_parameters=_rope_parameters(config),
            attention_bias=bool(config.get("bias", False)),
            mlp_bias=False,
            tie_word_embeddings=False,
            num_labels=1,
            bos_token_id=config.get("bos_token_id", 1),
            eos_token_id=config.get("eos_token_id", 2),
            pad_token_id=config.get("pad_token_id", 2),
            reward_token_id=config.get("reward_token_id", 92527),
            dtype=config.get("torch_dtype") or config.get("dtype"),
        )
    except UserError:
        raise
    except (StrictDataclassError, AttributeError, TypeError, ValueError) as error:
        problem = f"it has a value that no such model can have ({one_line(error)})"
        raise UserError("config.json", problem, "download it again") from error


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", scaling.pop("rope_type", "default"))
    if kind not in ("default", "linear", "dynamic"):
        problem = f"InternLM2 has no type {kind!r} (linear, dynamic)"
        raise UserError("config.json: `rope_scaling`", problem, "download it again")
    return {"rope_type": kind, "rope_theta": config.get("rope_theta", 10000), **scaling}


def checkpoint_folder(
    model: str | os.PathLike[str], revision: str | None = None, *, allow_pickle: bool = False
) -> Path:
    """Return the local folder of a checkpoint: `model` itself, or a hub snapshot, downloaded if it is not cached.

    Only configuration, tokenizer and weight files are downloaded, never code.

    Raises:
        UserError: `model` is not a folder, and neither the hub nor its local cache has it.
    """
    if Path(model).is_dir():
        return Path(model)
    patterns = _FILES + _PICKLED_FILES if allow_pickle else _FILES
    try:
        return Path(snapshot_download(str(model), revision=revision, allow_patterns=patterns, ignore_patterns="*/*"))
    except (HFValidationError, OSError) as error:
        problem = f"neither a folder nor a model that the hub or its local cache can give ({type(error).__name__})"
        raise UserError(repr(str(model)), problem, "check the name and the revision, or download it first") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return `config.json` of a checkpoint folder, after a check of every file but the weights that loading reads.

    Raises:
        UserError: `config.json` is absent, or a file is damaged or unsafe to read.
    """
    try:
        check_model_files(folder)
        return read_json(folder / "config.json")
    except FileNotFoundError as error:
        raise UserError(folder, "it has no config.json", "name the folder of a model") from error
    except UnreadableFile as error:
        raise UserError(error.place, error.problem, "download it again") from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the fast tokenizer of an InternLM2 checkpoint, from `tokenizer.json` or else from `tokenizer.model`.

    The latter needs sentencepiece and protobuf. A folder that `convert` wrote needs neither.

    Raises:
        UserError: both files or one of the packages are absent.
    """
    if not (folder / "tokenizer.json").is_file():
        if not (folder / "tokenizer.model").is_file():
            problem = "it has neither tokenizer.json nor tokenizer.model"
            raise UserError(folder, problem, "copy the model's tokenizer files into it")
        try:
            for package in ("sentencepiece", "google.protobuf"):
                importlib.import_module(package)
        except ImportError as error:
            fix = "pip install 'grpo-rewards[models]', or convert the checkpoint once where it is installed"
            raise UserError(folder / "tokenizer.model", f"it needs {error.name}", fix) from error
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # the tokenizers library raises this class
        problem = f"its tokenizer can't be read ({one_line(error)})"
        raise UserError(folder, problem, "download its files again") from error
    # The entry names remote code. Saved with the tokenizer, it would make other loaders ask for that code.
    tokenizer.init_kwargs.pop("auto_map", None)
    return tokenizer


def load(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    allow_pickle: bool = False,
) -> tuple[LlamaForSequenceClassification, PreTrainedTokenizerFast]:
    """Load an InternLM2 reward checkpoint with its tokenizer.

    Each tensor goes from its file to `device` on its own, so that the peak memory is one model and one tensor.

    Args:
        model: hub id, or folder in the hub's layout.
        revision: branch, tag or commit on the hub.
        dtype: torch name, or `auto` for the checkpoint's dtype.
        device: device of the model.
        allow_pickle: True to read `pytorch_model*.bin` too, with torch's weights-only unpickler.

    Returns:
        The model, in evaluation mode and without gradients, and its tokenizer.

    Raises:
        UserError: a file or a tensor is missing or damaged. The message names it.
    """
    folder = checkpoint_folder(model, revision, allow_pickle=allow_pickle)
    config = llama_config(read_config(folder))
    files = _weight_files(folder, allow_pickle)
    tokenizer = load_tokenizer(folder)
    if dtype != "auto":
        config.dtype = getattr(torch, dtype)
    with torch.device("meta"):
        network = LlamaForSequenceClassification(config)
    # A non-persistent buffer such as inv_freq has no values on "meta", and no checkpoint stores them.
    network.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    # The configuration has turned the name of a dtype into the dtype.
    _fill(network, files, cast("torch.dtype | None", config.dtype), device)
    return network.eval().requires_grad_(False), tokenizer


def _weight_files(folder: Path, allow_pickle: bool) -> list[Path]:
    """Return the existing shards of a checkpoint, in safetensors if there are any."""
    for single in ("model.safetensors", "pytorch_model.bin") if allow_pickle else ("model.safetensors",):
        index = f"{single}.index.json"
        if (folder / index).is_file():
            names = _listed_shards(folder / index)
        elif (folder / single).is_file():
            names = {single}
        else:
            continue
        absent = sorted(name for name in names if not (folder / name).is_file())
        if absent:
            problem = f"it lacks the shard {', '.join(absent)} that {index} lists"
            raise UserError(folder, problem, "download it again")
        return [folder / name for name in sorted(names)]
    if any(folder.glob("pytorch_model*.bin")):
        fix = "if you trust their source, convert them with `grpo-rewards convert-internlm2 SRC DST --allow_pickle`"
        raise UserError(folder, "it has pickled weights only, which can carry code", fix)
    raise UserError(folder, "it has no model.safetensors (nor its index)", "download the weights")


def _listed_shards(index: Path) -> set[str]:
    try:
        names = set(read_json(index)["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.problem if isinstance(error, UnreadableFile) else type(error).__name__
        raise UserError(index, f"it is not an index of shards ({reason})", "download it again") from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise UserError(index, "it is not an index of shards (a shard is a file beside it)", "download it again")
    return names


def _fill(
    network: LlamaForSequenceClassification,
    files: list[Path],
    dtype: torch.dtype | None,
    device: str | torch.device,
) -> None:
    """Load the values of every parameter of a network on "meta" from shards with InternLM2's names."""
    missing = _sources(network)
    for file in files:
        for source, tensor in _tensors(file):
            targets = missing.pop(source, None)
            if targets is None:
                raise _of_another_model(f"has the unexpected {source}")
            shapes = [network.get_parameter(target).shape for target in targets]
            expected = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            if tensor.shape != expected:
                raise _of_another_model(f"has {source} in the shape {tuple(tensor.shape)}, not {expected}")
            parts = split_wqkv(tensor, network.config) if len(targets) > 1 else (tensor,)
            for target, part in zip(targets, parts, strict=True):
                owner, _, leaf = target.rpartition(".")
                # A copy even if dtype and device stay the same: a view would keep the mapping of the file open.
                value = part.to(device=device, dtype=dtype or part.dtype, copy=True)
                setattr(network.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))
    if missing:
        raise _of_another_model(f"lacks {', '.join(sorted(missing)[:3])}")


def _of_another_model(problem: str) -> UserError:
    return UserError("the checkpoint", f"it {problem}", "download weights and config.json of one model")


def _sources(network: nn.Module) -> dict[str, list[str]]:
    """Map InternLM2's tensor names to the Llama parameters in each (for `wqkv` three, in the order q, k, v)."""
    sources: dict[str, list[str]] = {}
    for target, _ in network.named_parameters():
        source = target
        for llama, internlm2 in _LLAMA_TO_INTERNLM2.items():
            source = source.replace(llama, internlm2)
        sources.setdefault(source, []).append(target)
    return sources


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and values of each tensor in a shard."""
    if file.suffix != ".safetensors":
        try:
            yield from torch.load(file, map_location="cpu", mmap=True, weights_only=True).items()
        except (pickle.UnpicklingError, RuntimeError) as error:
            problem = f"it is not a plain file of tensors ({type(error).__name__}), and was not read any further"
            raise UserError(file, problem, "use a checkpoint in safetensors") from error
        return
    try:
        with safe_open(file, framework="pt") as shard:
            names = list(shard.keys())
        for name in names:
            # One mapping per tensor: pages that were read stay resident until the mapping is closed, so that with one
            # mapping per shard a single-file checkpoint would be in memory twice.
            with safe_open(file, framework="pt") as shard:
                yield name, shard.get_tensor(name)
    except SafetensorError as error:
        raise UserError(file, f"it is not a readable safetensors file ({error})", "download it again") from error


def split_wqkv(wqkv: torch.Tensor, config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split InternLM2's `attention.wqkv` (weight or bias) into Llama's q, k and v.

    Args:
        wqkv: rows in the layout (kv heads, queries per kv head + 2, head_dim). Each kv group consists of its query
            heads, its key and its value.
        config: configuration with the number of heads.

    Returns:
        q with heads * head_dim rows, k and v with kv heads * head_dim rows each.
    """
    kv_heads = config.num_key_value_heads
    assert kv_heads is not None  # `LlamaConfig` fills in both
    assert config.head_dim is not None
    queries = config.num_attention_heads // kv_heads
    grouped = wqkv.view(kv_heads, queries + 2, config.head_dim, *wqkv.shape[1:])
    return grouped[:, :-2].flatten(0, 2), grouped[:, -2].flatten(0, 1), grouped[:, -1].flatten(0, 1)


def convert(src: str | os.PathLike[str], dst: str | os.PathLike[str], *, allow_pickle: bool = False) -> Path:
    """Write an InternLM2 reward checkpoint as a native folder that transformers, TRL and vLLM load without remote code.

    Args:
        src: hub id, or folder in the hub's layout.
        dst: folder that does not exist yet. It appears only when it is complete. Weights keep their dtype.
        allow_pickle: True to read `pytorch_model*.bin` too, with torch's weights-only unpickler.

    Returns:
        The path of the written folder.

    Raises:
        UserError: `dst` exists, or the checkpoint cannot be loaded (see `load`).
    """
    target = Path(dst)
    if target.exists():
        raise UserError(target, "it exists already", "name a folder that does not exist yet")
    model, tokenizer = load(src, allow_pickle=allow_pickle)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as parts:
        place = Path(parts) / "model"  # the folder around it is its owner's alone
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
        give_default_mode(place)
        place.rename(target)
    return target
