"""Sizes of a model from its configuration: the model is built on the meta device, without loading weights."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from trl import get_peft_config

from grpo_recipes.data.hub import hub_answers, is_missing
from grpo_recipes.generation.models import lists_of_layers
from grpo_recipes.recipe.recipe import Recipe, model_config
from grpo_recipes.runs.files import read_object
from grpo_recipes.runs.weights import check_descriptions
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import relative_to

_GIVE_CONFIG = "give the model's config.json with --model_config"


class MemoryUnknown(UserError):
    """Error for memory that can't be estimated. Its message names what is missing."""


class RefusedAdapter(UserError):
    """Error for an adapter that PEFT can't add to the model. Its message names the key and a value that would do."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model that determine its memory, as numbers of parameters.

    Attributes:
        parameters: All parameters.
        trained: Trained parameters.
        largest_module: Parameters of the largest module.
        largest_layer: Parameters of the largest decoder layer.
        in_layers: Parameters of all decoder layers.
        quantisable: Parameters quantized by loading in 4 or 8 bits: those of linear layers without the head.
        largest_matrix: Parameters of the largest of these linear layers.
    """

    parameters: int
    trained: int
    largest_module: int
    largest_layer: int
    in_layers: int
    quantisable: int = 0
    largest_matrix: int = 0

    @classmethod
    def built(cls, config: Any, peft_config: Any = None) -> tuple[ModelShape, nn.Module]:
        """Return the sizes of a model, and the model on the meta device, with an adapter or without."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            modules = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
            head, linear = model.get_output_embeddings(), [m for m in model.modules() if isinstance(m, nn.Linear)]
            matrices = [module.weight.numel() for module in linear if module is not head]
            layers = []
            for module, name in lists_of_layers(model.base_model, config.get_text_config().num_hidden_layers):
                layers += [sum(p.numel() for p in layer.parameters()) for layer in getattr(module, name)]
            if peft_config is not None:
                model = _with_adapter(model, peft_config)
        shape = cls(
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            largest_module=max(modules),
            largest_layer=max(layers, default=0),
            in_layers=sum(layers),
            quantisable=sum(matrices),
            largest_matrix=max(matrices, default=0),
        )
        return shape, model


def _with_adapter(model: Any, peft_config: Any) -> Any:
    """Return `model` with a new adapter. Raise `RefusedAdapter` if PEFT can't add it."""
    from peft import get_peft_model
    from peft.utils.error import NoMatchingPeftModuleError

    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wanted = peft_config.target_modules
    try:
        return get_peft_model(model, peft_config)
    except NoMatchingPeftModuleError as error:
        names = wanted if isinstance(wanted, str) else ", ".join(sorted(wanted or ["PEFT's default"]))
        fix = f"name some of {', '.join(sorted(linear))}, or `all-linear`"
        if wanted in linear:  # TRL turns a list of one name into a string, and PEFT reads a string as a pattern
            fix = f"a single name is a pattern for the whole path: write `.*{wanted}`"
        raise RefusedAdapter("`lora_target_modules`", f"{names} matches no module of the model", fix) from error
    except ValueError as error:
        problem = f"PEFT can't add the adapter ({one_line(error)})"
        raise RefusedAdapter("`lora_*`", problem, "correct the keys") from error


def load_model(model: str, peft_config: Any = None) -> tuple[ModelShape, nn.Module]:
    """Return the sizes of a model, and the model on the meta device, from its configuration.

    The configuration is a file, a folder, in the hub's cache, or on the hub.

    Raises:
        MemoryUnknown: There is no configuration, or transformers can't build a model from it.
        UserError: The file is damaged, or PEFT can't add the adapter.
    """
    from transformers import AutoConfig

    if is_missing(model):
        raise MemoryUnknown(model, f"there is no such folder{relative_to(model)}", _GIVE_CONFIG)
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
        raise MemoryUnknown(model, f"no configuration could be loaded ({one_line(error)})", _GIVE_CONFIG) from error


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
        raise recipe.error(error.place, error.problem, error.fix) from error


def check_adapter(recipe: Recipe) -> None:
    """Raise `RecipeError` if PEFT can't add the new adapter of a recipe, as far as the files here tell."""
    if recipe.model.get("use_peft"):
        with contextlib.suppress(MemoryUnknown):  # without a configuration, loading the model fails with the reason
            policy_model(recipe)
