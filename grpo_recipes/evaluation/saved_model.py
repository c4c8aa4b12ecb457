"""Saved models and adapters: their files are checked once, and later steps get the checked model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from peft import AutoPeftModelForCausalLM, PeftConfig
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig
from trl import ModelConfig, get_quantization_config

from grpo_recipes.checks.packages import missing_quantization
from grpo_recipes.checks.tokenizer import ChatTemplate, read_tokenizer
from grpo_recipes.data.hub import hub_answers, hub_commit, is_missing
from grpo_recipes.generation.loading import complete_weights
from grpo_recipes.generation.models import describe_nonfinite, keep_4bit_layout
from grpo_recipes.runs import files, weights
from grpo_recipes.runs.identity import Source, weights_of
from grpo_recipes.runs.record import record_of_model
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import relative_to


@dataclass(frozen=True)
class SavedModel:
    """Model or adapter in a folder, or on the hub.

    Attributes:
        name: Folder, or name on the hub.
    """

    name: str

    @classmethod
    def checked(cls, name: str) -> SavedModel:
        """Return a model by its name. A name on the hub is not checked.

        Raises:
            UserError: The name is a path, and `in_folder` refuses it.
        """
        if is_missing(name) or Path(name).is_dir():
            cls.in_folder(Path(name))
        return cls(name)

    @classmethod
    def in_folder(cls, folder: Path) -> SavedModel:
        """Return the model in a local folder, after a check of its files.

        No model is loaded: only headers of weight files and JSON files are read, also those of an adapter's local base.

        Raises:
            UserError: There is no such folder, it holds no model, or one of its files is missing or damaged.
        """
        if not folder.is_dir():
            problem = f"the model can't be loaded: there is no such folder{relative_to(folder)}"
            raise UserError(folder, problem, "name the folder of a model or a run")
        model = cls(str(folder))
        weights.check_descriptions(folder)
        if not model.is_adapter and not (folder / "config.json").is_file():
            from transformers.trainer_utils import get_last_checkpoint  # takes seconds

            newest = get_last_checkpoint(folder)  # an unfinished run has models only in its checkpoints
            fix = "name the folder of a model, an adapter or a finished run"
            if newest:
                fix = f"its newest checkpoint is {newest}; name that folder"
            raise UserError(folder, "it holds no model (no config.json, no adapter_config.json)", fix)
        try:
            weights.check_weight_files(folder)
        except files.RunError as error:
            raise UserError(error.place, error.problem, f"{weights.AGAIN}, or name another checkpoint") from error
        if model.is_adapter:
            config = files.read_object(folder / weights.ADAPTER_CONFIG, files.ADAPTER, weights.AGAIN)
            base = config["base_model_name_or_path"]
            if base and Path(base).is_dir():
                cls.in_folder(Path(base))
            elif base and Path(base).is_absolute():
                fix = "set `base_model_name_or_path` in its adapter_config.json"
                raise UserError(folder, f"it is an adapter, and its base {base} is missing", fix)
        return model

    @property
    def folder(self) -> Path:
        """Path of the folder."""
        return Path(self.name)

    @property
    def is_adapter(self) -> bool:
        """True if the folder holds an adapter."""
        return (self.folder / weights.ADAPTER_CONFIG).is_file()

    @cached_property
    def adapter(self) -> PeftConfig | None:
        """Configuration of the adapter in the folder, or None if it holds none."""
        return weights.adapter_config(self.name) if self.is_adapter else None

    @cached_property
    def record(self) -> dict[str, Any] | None:
        """Contents of `run.json` of the run that made the model or checkpoint, or None."""
        return record_of_model(self.folder)

    def recipe(self, named: str | None = None) -> dict[str, Any]:
        """Return the keys of the named recipe, or of the run that made the model or checkpoint, or {}."""
        if named is not None:
            from grpo_recipes.recipe.recipe import parse_recipe

            recipe = parse_recipe(["--config", named])
            return {**vars(recipe.config), **recipe.as_dict()}
        return {} if self.record is None else {**self.record.get("config", {}), **self.record["recipe"]}

    @cached_property
    def quantization(self) -> BitsAndBytesConfig | None:
        """Quantization of an adapter's base in its training, or None if there was none, or no record of it.

        Raises:
            UserError: The base can't be quantized here.
        """
        if not self.is_adapter or self.record is None:
            return None
        recipe = self.record["recipe"]
        for error in missing_quantization(recipe):
            raise UserError(self.folder, f"its base was quantized by {error.place}, and {error.problem}", error.fix)
        keys = {field.name for field in fields(ModelConfig)}
        try:
            return get_quantization_config(ModelConfig(**{key: recipe[key] for key in recipe if key in keys}))
        except (AttributeError, TypeError, ValueError) as error:
            problem = f"its {files.RECORD} describes no model ({one_line(error)})"
            raise UserError(self.folder, problem, "restore the file") from error

    def describe_quantization(self) -> dict[str, str]:
        """Return how an adapter's base is quantized, for `made_with` of `evaluation.json`, or {} if it is not."""
        if (config := self.quantization) is None:
            return {}
        return {"quantization": "8 bits" if config.load_in_8bit else f"4 bits ({config.bnb_4bit_quant_type})"}

    def fingerprint(self) -> dict[str, Any]:
        """Return checksums of the model's files and of an adapter's base, or the commit on the hub, or {}.

        {} stands for files that can't be identified.
        """
        found: dict[str, Any] = {**weights_of(Source(self.name, hub_commit(self.name)))}
        if found and self.adapter is not None and self.adapter.base_model_name_or_path:
            found["base"] = SavedModel(self.adapter.base_model_name_or_path).fingerprint()
        return found

    @property
    def base_name(self) -> str:
        """Name of an adapter's base model, or the name of the model itself."""
        return self.name if self.adapter is None else str(self.adapter.base_model_name_or_path)

    @cached_property
    def dtype(self) -> str | None:
        """Dtype in which transformers loads the model or an adapter's base, such as `float32`, or None."""
        is_local = Path(self.base_name).exists() or not hub_answers()
        try:
            config = AutoConfig.from_pretrained(self.base_name, local_files_only=is_local, trust_remote_code=False)
        except Exception:  # loading the model reports the same error with its fix
            return None
        dtype = config.get_text_config().dtype or config.dtype
        return str(dtype).removeprefix("torch.") if dtype is not None else None

    def generation_config(self) -> GenerationConfig:
        """Return the published generation_config of the model or an adapter's base, without loading the model."""
        try:
            return GenerationConfig.from_pretrained(self.base_name)
        except OSError:  # without the file, transformers makes one from the model's configuration
            config = AutoConfig.from_pretrained(self.base_name, trust_remote_code=False)
            return GenerationConfig.from_model_config(config)

    def tokenizer(self, chat_template: ChatTemplate | None = None) -> Any:
        """Return the tokenizer as it was saved, with a recipe's chat template if there is one.

        Raises:
            UserError: The tokenizer can't be loaded.
        """
        return read_tokenizer(weights.tokenizer_source(self.name), chat_template, trust_remote_code=False)

    def padding_tokenizer(self, chat_template: ChatTemplate | None = None) -> Any:
        """Return the tokenizer like `tokenizer`. It pads with its end token if it has no padding token.

        Raises:
            UserError: See `tokenizer`, or the tokenizer has neither token.
        """
        tokenizer = self.tokenizer(chat_template)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if tokenizer.pad_token is None:
            problem = "its tokenizer has neither a `pad_token` nor an `eos_token`"
            raise UserError(self.name, problem, "set one in its tokenizer_config.json")
        return tokenizer

    def load(self) -> Any:
        """Return the model, or the adapter on its base, in the dtype of its files and in main memory.

        A base that was quantized for training is quantized again, and bitsandbytes puts it on the GPU if there is one.

        Raises:
            UserError: The model can't be loaded, or its weights are incomplete or not finite.
        """
        loader: Any = AutoPeftModelForCausalLM if self.is_adapter else AutoModelForCausalLM
        options = {"quantization_config": self.quantization} if self.is_adapter else {}
        fix = "name a model that can"
        model = _loaded(loader, self.name, self.name, "the model", fix, use_safetensors=True, **options)
        if self.is_adapter:
            keep_4bit_layout(model)
        if clause := describe_nonfinite(model):
            raise UserError(self.name, clause, "name an earlier checkpoint or another model")
        return model

    def load_base(self) -> Any:
        """Return the base of the adapter, quantized as for training.

        Raises:
            UserError: The base can't be loaded, or its weights are incomplete.
        """
        assert self.adapter is not None, "the caller knows that it is an adapter"
        options = {"revision": self.adapter.revision or "main", "quantization_config": self.quantization}
        subject, fix = f"its base {self.base_name}", "set `base_model_name_or_path` in its adapter_config.json"
        return _loaded(AutoModelForCausalLM, self.base_name, self.folder, subject, fix, **options)


def _loaded(loader: Any, name: str, place: object, subject: str, fix: str, **options: Any) -> Any:
    """Return what a class of transformers or PEFT loads, in the dtype of its files.

    Args:
        loader: Class with `from_pretrained`.
        name: Folder, or name on the hub.
        place: Place that an error names.
        subject: Noun phrase for what is loaded, in an error.
        fix: Fix that an error names.
        **options: Options of `from_pretrained`.

    Raises:
        UserError: It can't be loaded, or its weights are incomplete.
    """
    try:
        with complete_weights():
            return loader.from_pretrained(name, dtype="auto", trust_remote_code=False, **options)
    except UserError:
        raise
    except Exception as error:  # transformers raises any class for a damaged file
        raise UserError(place, f"{subject} can't be loaded ({one_line(error) or type(error).__name__})", fix) from error
