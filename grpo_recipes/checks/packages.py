"""What a recipe needs installed beside the packages that grpo-recipes brings: trackers of `report_to`, and vLLM."""

from __future__ import annotations

import warnings
from typing import Any

from transformers.integrations import integration_utils as trackers
from trl.import_utils import is_vllm_available

from grpo_recipes.recipe.specs import not_a_choice

# The package behind a tracker's name, where it is not the name itself: `is_<package>_available` tells.
TRACKER_PACKAGES = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}


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
