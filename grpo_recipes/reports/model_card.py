"""Model card of a run, `README.md` in its folder: base model, data, rewards, recipe, versions and accuracy.

TRL's own card names no rewards and no recipe, and links a local base model as `None`. Everything here is read from the
run's files. Names on the hub are linked. An absolute path is cut to its last part.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

from grpo_recipes.data.presets import PRESETS
from grpo_recipes.evaluation.estimates import Estimate
from grpo_recipes.reports.run import Run
from grpo_recipes.runs.files import ADAPTER, read_object, write_atomically
from grpo_recipes.runs.record import read_record
from grpo_rewards.redaction import redacted, redacted_arguments

HUB = "https://huggingface.co"
TRL = "https://github.com/huggingface/trl"
OMITTED = ("output_dir", "resume_from_checkpoint")
"""Keys of the recipe that do not matter to what was trained."""

# A path from the root or from a home directory, anywhere in a value, but not a part of a URL, a tag or a fraction.
_PATH = re.compile(r"(?<![\w./:~<-])~?/[^\s,;'\"\]}]+")


def write_model_card(folder: Path) -> None:
    """Write the model card of the run in `folder`, which has a `run.json`. Raises `RunError` if that is damaged."""
    record = read_record(folder)
    assert record is not None, "a run writes it first"
    base, data = _base_model(record), _dataset(record)
    metadata = ModelCardData(
        base_model=base if _is_hub_id(base, record) else None,
        datasets=[data] if _is_hub_id(data, record) else None,
        library_name="peft" if (folder / "adapter_config.json").is_file() else "transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "grpo-recipes", "trl"],
    )
    opening = (
        f"# {folder.resolve().name}\n\n"
        f"{_linked(base, record)}, trained with GRPO on {record['train_prompts']:,} prompts of "
        f"{_linked(data, record, 'datasets/')} by grpo-recipes {record['versions']['grpo-recipes']} with [TRL]({TRL})."
    )
    rewards = [f"`{reward['name']}` | {reward['weight']:g}" for reward in record["rewards"]]
    versions = [f"{name} | {version}" for name, version in record["versions"].items()]
    sections = [
        opening,
        _accuracy(folder),
        _table("Rewards", "reward | weight", rewards),
        _recipe(record),
        _table("Versions", "|", versions),
    ]
    body = "\n\n".join(section for section in sections if section)
    write_atomically(folder / "README.md", str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}\n")))


def _table(title: str, head: str, rows: list[str]) -> str:
    """Return a section with a table, whose rows have their cells separated by `|`."""
    lines = [f"| {head} |", f"|{'---|' * (head.count('|') + 1)}", *(f"| {row} |" for row in rows)]
    return f"## {title}\n\n" + "\n".join(lines)


def _accuracy(folder: Path) -> str:
    """Return a section on the run's evaluations, or an empty text."""
    run = Run.read_evaluations(folder)
    rows = []
    for label, result in run.evaluations.items():
        if "strict" in result:
            strict, lenient = Estimate.from_dict(result["strict"]), Estimate.from_dict(result["lenient"])
            rows.append(f"{label} | {result['problems']} | {strict} | {lenient}")
    head = "evaluation | problems | strict (95 % interval) | lenient (95 % interval)"
    return _table("Accuracy", head, rows) if rows else ""


def _recipe(record: Mapping[str, Any]) -> str:
    """Return a section with the launch command and the resolved recipe."""
    recipe = {key: value for key, value in redacted(record["recipe"]).items() if key not in OMITTED}
    text = yaml.safe_dump(_without_paths(recipe), sort_keys=False, allow_unicode=True)
    processes = record["world_size"]
    launcher = "python" if processes == 1 else f"accelerate launch --num_processes {processes}"
    command = shlex.join(_without_paths(redacted_arguments(record.get("arguments") or [])))
    return (
        f"## Recipe\n\n```bash\n{launcher} -m grpo_recipes.train {command}\n```\n\n"
        f"Resolved from the file and the command line. Every other key has TRL's default:\n\n```yaml\n{text}```"
    )


def _base_model(record: Mapping[str, Any]) -> str:
    """Return the name of the trained model, or of the trained adapter's base."""
    given = str(record["recipe"]["model_name_or_path"])
    adapter = Path(record["directory"], given) / "adapter_config.json"
    if not adapter.is_file():
        return given
    return str(read_object(adapter, ADAPTER)["base_model_name_or_path"])


def _dataset(record: Mapping[str, Any]) -> str:
    """Return the source of the rows: a path, the first path of a mixture, or the hub name or name of a preset."""
    spec = record["recipe"]["dataset"]
    path, preset = spec.get("path"), PRESETS.get(spec.get("name"))
    if isinstance(path, list):
        return f"{path[0]['path']} and {len(path) - 1} more" if len(path) > 1 else str(path[0]["path"])
    return str(path or (preset.hub_id if preset is not None and preset.hub_id else spec["name"]))


def _linked(name: str, record: Mapping[str, Any], kind: str = "") -> str:
    return f"[{name}]({HUB}/{kind}{name})" if _is_hub_id(name, record) else f"`{_name(name)}`"


def _is_hub_id(name: str, record: Mapping[str, Any]) -> bool:
    """Return True if a model or dataset is on the hub, and neither a local path nor a generated dataset."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name != record["recipe"]["dataset"].get("name") and not Path(record["directory"], name).exists()


def _name(path: str) -> str:
    return Path(path).resolve().name


def _without_paths(value: Any) -> Any:
    """Return `value` with every path from the root or a home directory cut to its last part."""
    if isinstance(value, Mapping):
        return {key: _without_paths(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_paths(entry) for entry in value]
    if not isinstance(value, str):
        return value
    return _PATH.sub(lambda found: _name(found[0]), value)
