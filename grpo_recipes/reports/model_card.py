"""The model card of a run, `README.md` in its folder: what it began from, what it was trained on and for, and how well it does.

TRL's own card names no rewards and no recipe, and links a local base model as `None`. Everything here is read from the
run's files. Names on the hub are linked; of a path of this machine, which means nothing to a reader, only the last part is shown.
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
from grpo_recipes.reports.run import Run
from grpo_recipes.runs.files import ADAPTER, read_object, write_atomically
from grpo_recipes.runs.record import read_record
from grpo_rewards.redaction import redacted, redacted_arguments

HUB = "https://huggingface.co"
TRL = "https://github.com/huggingface/trl"

# Where the run lies, and what it resumed from, says nothing about what was trained.
LEFT_OUT = ("output_dir", "resume_from_checkpoint")

# A path from the root or from a home directory, wherever it stands in a value; no part of a URL, a tag or a fraction.
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
    sections = [_opening(folder, record), _accuracy(folder), _rewards(record), _recipe(record), _versions(record)]
    body = "\n\n".join(section for section in sections if section)
    card = ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{body}\n")
    write_atomically(folder / "README.md", str(card))


def _opening(folder: Path, record: Mapping[str, Any]) -> str:
    base, data = _base_model(record), _dataset(record)
    given = str(record["recipe"]["model_name_or_path"])
    through = f" (from the adapter `{_name(given)}`)" if given != base else ""
    problems = f"{record['train_prompts']:,} prompts of {_linked(data, record, 'datasets/')}"
    return (
        f"# {folder.resolve().name}\n\n"
        f"{_linked(base, record)}{through}, trained with GRPO on {problems} by grpo-recipes "
        f"{record['versions']['grpo-recipes']} with [TRL]({TRL})."
    )


def _accuracy(folder: Path) -> str:
    """The evaluations in the run's folder, held-out accuracy during training among them; nothing if there are none."""
    run = Run.read_evaluations(folder)
    rows = [
        f"| `evaluate`, {label} | {result['problems']} | {_estimate(result['strict'])} | {_estimate(result['lenient'])} |"
        for label, result in run.evaluations.items()
        if "strict" in result
    ]
    trained = run.held_out_accuracy()
    rows += [f"| in training, step {step} | | {_estimate(vars(estimate))} | |" for step, estimate in trained]
    if not rows:
        return ""
    head = "| held-out accuracy | problems | strict (95 % interval) | lenient (95 % interval) |\n|---|---|---|---|\n"
    return "## Accuracy\n\n" + head + "\n".join(rows)


def _estimate(result: Mapping[str, Any]) -> str:
    return f"{result['value']:.3f} ({result['low']:.3f} to {result['high']:.3f})"


def _rewards(record: Mapping[str, Any]) -> str:
    rows = [f"| `{reward['name']}` | {reward['weight']:g} |" for reward in record["rewards"]]
    return "## Rewards\n\n| reward | weight |\n|---|---|\n" + "\n".join(rows)


def _recipe(record: Mapping[str, Any]) -> str:
    recipe = {key: value for key, value in redacted(record["recipe"]).items() if key not in LEFT_OUT}
    text = yaml.safe_dump(_without_paths(recipe, record), sort_keys=False, allow_unicode=True)
    processes = record["world_size"]
    launcher = "python" if processes == 1 else f"accelerate launch --num_processes {processes}"
    command = shlex.join(_without_paths(redacted_arguments(record.get("arguments") or []), record))
    again = len(record.get("launches", [])[1:])
    resumed = f"\n\nResumed {again} time{'s' if again > 1 else ''}; this is the last launch." if again else ""
    return (
        f"## Recipe\n\n```bash\n{launcher} -m grpo_recipes.train {command}\n```{resumed}\n\n"
        f"As resolved from the file and the command line; every other key has TRL's default:\n\n```yaml\n{text}```"
    )


def _versions(record: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {version} |" for name, version in record["versions"].items()]
    return "## Versions\n\n| | |\n|---|---|\n" + "\n".join(rows)


def _base_model(record: Mapping[str, Any]) -> str:
    """The model that was trained, or the base of the adapter that was: as the recipe or the adapter names it."""
    given = str(record["recipe"]["model_name_or_path"])
    adapter = Path(record["directory"], given) / "adapter_config.json"
    if not adapter.is_file():
        return given
    return str(read_object(adapter, ADAPTER)["base_model_name_or_path"])


def _dataset(record: Mapping[str, Any]) -> str:
    """Where the rows came from: a path, the first of a mixture with how many more, or the home or name of a preset."""
    spec = record["recipe"]["dataset"]
    path, preset = spec.get("path"), PRESETS.get(spec.get("name"))
    if isinstance(path, list):
        return f"{path[0]['path']} and {len(path) - 1} more" if len(path) > 1 else str(path[0]["path"])
    return str(path or (preset.hub_id if preset is not None and preset.hub_id else spec["name"]))


def _linked(name: str, record: Mapping[str, Any], kind: str = "") -> str:
    return f"[{name}]({HUB}/{kind}{name})" if _is_hub_id(name, record) else f"`{_name(name)}`"


def _is_hub_id(name: str, record: Mapping[str, Any]) -> bool:
    """Whether a model or dataset is on the hub: neither a file or folder of this machine, nor made by a reader of ours."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name != record["recipe"]["dataset"].get("name") and not Path(record["directory"], name).exists()


def _name(path: str) -> str:
    return Path(path).resolve().name


def _without_paths(value: Any, record: Mapping[str, Any]) -> Any:
    """`value` with each path of this machine cut to its last part."""
    if isinstance(value, Mapping):
        return {key: _without_paths(entry, record) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_paths(entry, record) for entry in value]
    if not isinstance(value, str):
        return value
    option, equals, path = value.partition("=") if value.startswith("--") else ("", "", value)
    if "/" in path and Path(record["directory"], path).exists():
        path = _name(path)
    return option + equals + _PATH.sub(lambda found: _name(found[0]), path)
