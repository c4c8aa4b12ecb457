"""Identity of a run: the data, weights and code that its steps read besides the checkpoint.

A resume compares identities, so that it notices what has changed behind an unchanged path.

| part | identified by |
|---|---|
| dataset | a checksum of each column, in row order |
| weights | `identify_weights` of each file in a folder, or the commit on the hub |
| configuration, tokenizer | a checksum of each file in the folder of the weights, as far as a step reads it |
| chat template of the recipe | a checksum of its text and its `response_template` |
| rewards, tools and environments of the user | a checksum of the source file that defines each |
| packages | their versions |

These are not compared: streamed rows; files that a column names by their path; transforms made with `set_transform`;
bytes such as images, except for their length and both ends; a change of weights behind the first 4 KiB of a tensor that
keeps the size of its file; a tokenizer from another folder than the model; modules that the source file of a reward or
a tool imports.

A resume with changed data or weights is refused. Changed code and versions are logged.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
from pyarrow import compute, types

from grpo_recipes.runs.checkpoints import checksum, read_manifest
from grpo_recipes.runs.files import RunError, read_object
from grpo_recipes.runs.record import versions
from grpo_recipes.runs.weights import ADAPTER_CONFIG, identify_weights, weight_files
from grpo_rewards.built import BoundReward
from grpo_rewards.composed import leaves
from grpo_rewards.errors import UserError
from grpo_rewards.files import JSON_BYTES
from grpo_rewards.registry import BuiltReward

NOT_IDENTIFIED = "not identified"
SLICE_ROWS = 10_000
END_BYTES = 4096
"""Number of bytes at either end of a value of bytes that are a part of the identity."""

VERSIONED_PACKAGES = ("grpo_rewards", "grpo_recipes", "trl", "transformers", "torch")
"""Packages whose rewards are identified by the version of the package."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
COUNTED_ENTRIES: Mapping[str, Callable[[str], bool]] = {
    "config.json": lambda key: key not in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"),
    # The recipe replaces the sampling settings.
    "generation_config.json": lambda key: key.endswith("_token_id"),
    # The base is identified by its own weights, and may have moved.
    ADAPTER_CONFIG: lambda key: key not in ("base_model_name_or_path", "revision"),
}
"""JSON files of a model, each with the condition on keys whose entries change what the model computes."""

Weights = Mapping[str, str]
"""Identity of each file of a model by name, or the commit on the hub as `commit`. Empty if it is not known."""


@dataclass(frozen=True)
class Source:
    """Origin of weights: a folder, or a repository on the hub."""

    name: str
    commit: str | None = None
    """Commit on the hub, if it is known."""


@dataclass(frozen=True)
class Identity:
    """Checksums of what a launch reads beside its checkpoint: rows, weights, reward code, versions."""

    content: Mapping[str, Any]
    """Identity as in manifests and `run.json`. It holds no path, because either file may be pushed to the hub."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Folders and names that the weights are loaded from, by role, for messages."""


@dataclass(frozen=True)
class Comparison:
    """Differences between the identity in a checkpoint and that of the launch that resumes it, each as a clause."""

    refused: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)


def identify(
    dataset: Any,
    rewards: Sequence[BuiltReward],
    sources: Mapping[str, Source],
    tools: Mapping[str, Callable[..., Any]] | None = None,
    chat_template: str | None = None,
) -> Identity:
    """Return the identity of a launch.

    Args:
        dataset: training rows, as the trainer reads them.
        rewards: rewards of the run, composed ones included.
        sources: origin of the weights of the policy, its base, its reference and the reward models, by role.
        tools: tools and environments of the run, by name.
        chat_template: checksum of the chat template that replaces the model's, or None if none does.
    """
    from datasets import Dataset  # takes seconds, and most readers of a run's files need no dataset

    is_table = isinstance(dataset, Dataset)
    content = {
        "rows": len(dataset) if is_table else None,
        "columns": column_digests(dataset) if is_table else {},
        "weights": {role: weights_of(source) for role, source in sources.items()},
        "rewards": _digests((name, one.unbound) for name, one in _named(rewards)),
        "tools": _digests((tools or {}).items()),
        "chat_template": chat_template,
        "versions": versions(),
    }
    return Identity(content, {role: source.name for role, source in sources.items()})


def _digests(code: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return the checksum of the source file of each function or class that its package's version does not identify."""
    digests = {name: source_digest(one) for name, one in code}
    return {name: digest for name, digest in digests.items() if digest is not None}


def compare(checkpoint: Path, launch: Identity) -> str | None:
    """Compare the identity in a checkpoint's manifest with that of this launch.

    Returns:
        A line on the differences that do not prevent a resume, or None if there are none.

    Raises:
        UserError: data or weights have changed.
    """
    manifest = read_manifest(checkpoint)
    found = differences(manifest.identity if manifest is not None else None, launch)
    if found.refused:
        fix = "train on the data and weights of the run, or start another run from it as its `model_name_or_path`"
        raise UserError(checkpoint, f"since it was saved, {', and '.join(found.refused)}", fix)
    return f"since {checkpoint} was saved: {'; '.join(found.logged)}" if found.logged else None


def differences(before: Mapping[str, Any] | None, launch: Identity) -> Comparison:
    """Compare an identity with that of a launch. None is the identity of another trainer's checkpoint."""
    if before is None:
        sentence = "data, weights and rewards are not compared, because the checkpoint does not identify them"
        return Comparison(logged=[sentence])
    now, found = launch.content, Comparison()
    _compare_code("reward", before["rewards"], now["rewards"], found)
    _compare_code("tool", before.get("tools", {}), now.get("tools", {}), found)
    _compare_data(before, now, found)
    _compare_weights(before["weights"], launch, found)
    if before.get("chat_template") != now["chat_template"]:
        found.refused.append("the chat template of the recipe has changed")
    for name, version in now["versions"].items():
        if (was := before["versions"].get(name, version)) != version:
            found.logged.append(f"{name} was {was} and is {version}")
    return found


def _compare_code(kind: str, before: Mapping[str, str], now: Mapping[str, str], found: Comparison) -> None:
    """Compare the source files of the rewards, or of the tools, of two launches."""
    if before.keys() != now.keys():
        found.logged.append(f"the {kind}s from source files were {_quoted(before)} and are {_quoted(now)}")
    unknown = []
    for name, digest in now.items():
        if NOT_IDENTIFIED in (before.get(name), digest):
            unknown.append(name)
        elif before.get(name, digest) != digest:
            found.logged.append(f"the source file of the {kind} `{name}` has changed")
    if unknown:
        found.logged.append(f"the code of {_quoted(unknown)} is not compared, because it has no source file")


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _compare_data(before: Mapping[str, Any], now: Mapping[str, Any], found: Comparison) -> None:
    if before["rows"] is None or now["rows"] is None:
        found.logged.append("the dataset is not compared, because it is streamed")
        return
    if before["rows"] != now["rows"]:
        found.refused.append(f"the dataset had {before['rows']:,} rows and has {now['rows']:,}")
        return
    old, new = before["columns"], now["columns"]
    for name in old.keys() & new.keys():
        if old[name] != new[name]:
            found.refused.append(f"the column `{name}` of the dataset has changed")
    # Changed code of a reward may read other columns, and changed code is only logged.
    clauses = found.refused if before["rewards"] == now["rewards"] else found.logged
    for name in sorted(old.keys() ^ new.keys()):
        clauses.append(f"the column `{name}` of the dataset {'is new' if name in new else 'is missing'}")
    found.refused.sort()


def _compare_weights(before: Mapping[str, Weights], launch: Identity, found: Comparison) -> None:
    for role in before:
        if role not in launch.places:
            found.logged.append(f"the weights of the {role} are no longer read")
    for role, weights in launch.content["weights"].items():
        was, place = before.get(role, {}), launch.places[role]
        if not was or not weights or ("commit" in was) != ("commit" in weights):
            found.logged.append(f"the weights of the {role} are not compared, because they are not identified")
            continue
        changed = sorted(name for name in was.keys() | weights.keys() if was.get(name) != weights.get(name))
        if changed == ["commit"]:
            commits = f"{was['commit']} and are now {weights['commit']}"
            found.refused.append(f"the weights of the {role} were {place} at the commit {commits}")
        elif changed:
            weight_names = [name for name in changed if name not in (*TOKENIZER_FILES, *COUNTED_ENTRIES)]
            kind, first = ("weights", weight_names[0]) if weight_names else ("files", changed[0])
            found.refused.append(f"the {kind} of the {role} have changed ({Path(place) / first})")


def column_digests(dataset: Any) -> dict[str, str]:
    """Return an XXH3 checksum of the values of each column, in row order.

    Values are hashed, not Arrow's buffers, because Arrow may cut equal tables into other chunks or store text
    otherwise. Slices of rows keep the memory small.
    """
    digests = {name: xxhash.xxh3_128() for name in dataset.column_names}
    rows = dataset.with_format("arrow")
    for start in range(0, len(rows), SLICE_ROWS):
        table = rows[start : start + SLICE_ROWS]
        for name, digest in digests.items():
            for part in _parts(table[name].combine_chunks()):
                digest.update(json.dumps(part, default=str).encode() + b"\n")
    return {name: digest.hexdigest() for name, digest in digests.items()}


def _parts(values: pa.Array) -> Iterator[Any]:
    """Yield the values of an array as lists of Python values. The fields of nested values follow one another."""
    if isinstance(values, pa.ChunkedArray):  # very long texts stay in several chunks
        for chunk in values.chunks:
            yield from _parts(chunk)
    elif isinstance(values, pa.ExtensionArray):
        yield from _parts(values.storage)
    elif types.is_struct(values.type):
        yield values.is_valid().to_pylist()
        for named, part in zip(values.type, values.flatten(), strict=True):
            yield named.name
            yield from _parts(part)
    elif types.is_list(values.type) or types.is_large_list(values.type):
        yield compute.list_value_length(values).to_pylist()
        yield from _parts(values.flatten())
    elif types.is_binary(values.type) or types.is_large_binary(values.type):
        # Hashing all bytes of images would take as long as reading the dataset.
        yield compute.binary_length(values).to_pylist()
        for end in (compute.binary_slice(values, 0, END_BYTES), compute.binary_slice(values, -END_BYTES)):
            yield [None if value is None else xxhash.xxh3_128(value).hexdigest() for value in end.to_pylist()]
    else:
        yield values.to_pylist()


def weights_of(source: Source) -> dict[str, str]:
    """Return the identity of the weights of a model or an adapter, of which only parts are read."""
    folder = Path(source.name)
    if not source.name or not folder.is_dir():
        return {} if source.commit is None else {"commit": source.commit}
    try:
        files = {str(file.relative_to(folder)): identify_weights(file) for file in weight_files(folder)}
        return files | _beside_weights(folder)
    except (RunError, OSError):  # loading the weights reports what is wrong with them
        return {}


def _beside_weights(folder: Path) -> dict[str, str]:
    """Return a checksum of each other file of a model that affects what the model reads and computes."""
    found = {}
    for name in TOKENIZER_FILES:
        file = folder / name
        if file.is_file():
            # A file that is too large is hashed in parts. Loading the tokenizer, which comes later, reports it.
            found[name] = checksum(file) if file.stat().st_size <= JSON_BYTES else identify_weights(file)
    for name, counts in COUNTED_ENTRIES.items():
        if (folder / name).is_file():
            content = read_object(folder / name, {})
            counted = {key: content[key] for key in content if counts(key)}
            found[name] = xxhash.xxh3_128_hexdigest(json.dumps(counted, sort_keys=True).encode())
    return found


def reward_models(
    rewards: Sequence[BuiltReward], hub_commit: Callable[[str, str | None], str | None]
) -> dict[str, Source]:
    """Return the origin of each reward model, by role.

    Args:
        rewards: rewards of the run.
        hub_commit: function that returns the commit of a name and a revision on the hub, or None if it is not known.
    """
    sources = {}
    for name, one in _named(rewards):
        reward: Any = one.unbound
        role, model = f"reward model `{name}`", one.declared.model_source
        if model is not None:
            sources[role] = Source(model, hub_commit(model, one.declared.model_revision))
        elif hasattr(reward, "config") and hasattr(reward, "state_dict"):  # TRL takes models for rewards too
            sources[role] = loaded_source(reward)
    return sources


def loaded_source(model: Any) -> Source:
    """Return the origin of a model that `from_pretrained` has loaded. The name is empty for any other model."""
    config = model.config
    return Source(getattr(config, "_name_or_path", "") or "", getattr(config, "_commit_hash", None))


def source_digest(reward: Any) -> str | None:
    """Return a checksum of the source file of a reward, or `NOT_IDENTIFIED` without one.

    The result is None for a reward that is identified by the version of its package.
    """
    code = _code(reward)
    if str(getattr(code, "__module__", "")).partition(".")[0] in VERSIONED_PACKAGES:
        return None
    try:
        file = inspect.getsourcefile(code)
    except TypeError:  # defined by exec, or in C
        file = None
    if file is None or not Path(file).is_file():  # typed into an interpreter or a notebook
        return NOT_IDENTIFIED
    return checksum(Path(file))


def _code(reward: Any) -> Any:
    """Return the function or class of a reward, without bound arguments and decorators."""
    while True:
        if isinstance(reward, BoundReward):
            reward = reward.function
        elif isinstance(reward, functools.partial):
            reward = reward.func
        elif inspect.ismethod(reward):
            reward = reward.__func__
        # Decorators leave the function here. `functools.cache` returns an object of a class in another file.
        elif "__wrapped__" in getattr(reward, "__dict__", {}):
            reward = reward.__wrapped__
        else:
            break
    is_code = inspect.isfunction(reward) or inspect.isclass(reward) or inspect.isbuiltin(reward)
    return reward if is_code else type(reward)


def _named(rewards: Sequence[BuiltReward]) -> Iterator[tuple[str, BuiltReward]]:
    """Yield the single rewards that `rewards` are made of, each with a unique name."""
    seen: Counter[str] = Counter()
    for reward in rewards:
        for one in leaves([reward]):
            name = reward.name if one.name == reward.name else f"{reward.name}/{one.name}"
            seen[name] += 1
            yield (name if seen[name] == 1 else f"{name} {seen[name]}"), one
