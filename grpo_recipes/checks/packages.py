"""What a recipe needs installed beside the packages that grpo-recipes brings: trackers of `report_to`, and vLLM."""

from __future__ import annotations

import os
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.integrations import integration_utils as trackers
from trl.import_utils import is_vllm_available

from grpo_recipes.recipe.specs import not_a_choice
from grpo_rewards.errors import UserError

# The package behind a tracker's name, where it is not the name itself: `is_<package>_available` tells.
TRACKER_PACKAGES = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}


LOCK_SECONDS = 30.0
"""Seconds for which a build lock may exist without a compiler: torch takes the lock before it starts the compiler."""


def missing(config: Any) -> list[str]:
    """What the recipe asks for and this machine does not have, a sentence each. `config` is `recipe.config`."""
    return [*_missing_trackers(config.report_to), *(_missing_vllm() if config.use_vllm else [])]


def _missing_trackers(report_to: str | list[str] | None) -> list[str]:
    names = [report_to] if isinstance(report_to, str) else report_to or []
    sentences = []
    for name in names:
        if name in ("all", "none"):
            continue
        if name not in trackers.INTEGRATION_TO_CALLBACK:
            known = [*trackers.INTEGRATION_TO_CALLBACK, "all", "none"]
            sentences.append(str(not_a_choice("report_to", name, known)))
            continue
        package = TRACKER_PACKAGES.get(name, name)
        if not getattr(trackers, f"is_{package}_available")():
            sentences.append(
                f"`report_to: {name}` needs the package {package}, which is not installed here: install it, or set "
                "`report_to: none`"
            )
    return sentences


def _missing_vllm() -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        available = is_vllm_available()
    if not available:
        return [
            "`use_vllm` needs vLLM, which is not installed here: `pip install 'grpo-recipes[vllm]'`, or set "
            "`use_vllm: false`"
        ]
    # TRL only warns of a version that it does not take, and it alone knows which these are: "TRL currently supports vLLM
    # versions from A to B. You have version C installed. We recommend ..."
    said = [str(warning.message).partition(". We recommend")[0] for warning in caught]
    return [f"`use_vllm`: {text.replace('. You have', ', and you have')}: install one of those" for text in said]


def check_build_locks(patience: float = LOCK_SECONDS) -> None:
    """Raise `UserError` if a build of a torch extension was killed and left its lock.

    torch takes the lock (`torch.utils.file_baton`) before it starts a compiler in the same folder, and waits without end
    for the lock of another process. A lock without a compiler for `patience` seconds counts as left behind. Only Linux
    tells where processes work: elsewhere every lock that exists for so long counts.
    """
    deadline = time.monotonic() + patience
    while stale := [lock for lock in _extensions_folder().glob("*/lock") if not _has_compiler(lock.parent)]:
        if time.monotonic() >= deadline:
            with suppress(FileNotFoundError):  # it has just been removed
                age = time.time() - stale[0].stat().st_mtime
                raise UserError(
                    f"{stale[0]}: a build of DeepSpeed's extensions was killed and left this lock, {age:.0f} s old, on which "
                    "every later run waits for ever: remove that file (unless another machine that shares the folder is "
                    "building just now)"
                )
        time.sleep(min(1.0, patience))


def _extensions_folder() -> Path:
    """Return the folder in which torch builds extensions: `TORCH_EXTENSIONS_DIR`, or its own default."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("deepspeed_shm_comm", verbose=False)).parent


def _has_compiler(folder: Path) -> bool:
    """Return True if a process of this machine works in `folder`, as the compiler of an extension does."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if os.readlink(link) == str(folder):
                return True
    return False
