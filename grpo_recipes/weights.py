"""Whether a folder holds a model, or an adapter, that can be loaded: `check_weights(folder)`, before anything loads it.

What loads a model says of a file that was cut off "incomplete metadata", of a missing one that a hub can't be reached, or
nothing. Only headers are read here, so that a large model costs no more than a small one.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from grpo_recipes.result_files import ADAPTER, ANY_OBJECT, TEXT, RunError, read_object

RESTORE = "copy or download the folder again"
READ_WHOLE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def check_weights(folder: Path) -> None:
    """Raise `RunError`, naming the file, what is wrong with it and what to do, if a local folder can't be loaded from.

    An adapter's base is checked too, where it is a folder.
    """
    is_adapter = (folder / "adapter_config.json").is_file()
    if not is_adapter and not (folder / "config.json").is_file():
        raise RunError(f"{folder}: it holds no model (no config.json and no adapter_config.json){_instead(folder)}")
    for name in READ_WHOLE:
        if (folder / name).is_file():
            read_object(folder / name, ANY_OBJECT, RESTORE)
    wanted = ["adapter_model.safetensors", "adapter_model.bin"] if is_adapter else _shards(folder)
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing and (not is_adapter or len(missing) == len(wanted)):
        raise RunError(f"{folder}: the weight file {missing[0]} is missing{_instead(folder)}; {RESTORE}")
    for file in sorted(folder.glob("*.safetensors")):
        _check_safetensors(file)
    if is_adapter:
        base = read_object(folder / "adapter_config.json", ADAPTER, RESTORE)["base_model_name_or_path"]
        if base is not None and Path(base).is_dir():
            check_weights(Path(base))
        elif base is not None and Path(base).is_absolute():
            raise RunError(
                f"{folder}: it is an adapter, and its base {base} is missing: set `base_model_name_or_path` in its "
                "adapter_config.json"
            )


def _shards(folder: Path) -> list[str]:
    """The weight files that a model consists of."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    return sorted(set(read_object(index, {"weight_map": {"*": TEXT}}, RESTORE)["weight_map"].values()))


def _check_safetensors(file: Path) -> None:
    # A file's header says where each tensor lies; opening holds that against the file's length.
    try:
        with safe_open(file, framework="numpy") as content:
            is_empty = not content.keys()
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        raise RunError(
            f"{file}: its {size} bytes can't be read as safetensors ({' '.join(str(error).split())}), as when a copy or a save "
            f"was cut off: {RESTORE}, or name another checkpoint"
        ) from error
    if is_empty:
        raise RunError(f"{file}: it holds no tensors: {RESTORE}, or name another checkpoint")


def _instead(folder: Path) -> str:
    """The checkpoints of a run that has not finished, as a hint."""
    steps = [path for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    newest = max(steps, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
    return f"; its newest checkpoint is {newest}" if newest else ""
