"""Loading of models and adapters whose weights are complete, wherever a library loads them.

`from_pretrained` fills a missing tensor with random numbers and only logs it. TRL loads the policy and reward models
itself, so its calls are checked too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from grpo_recipes.generation.models import method_replaced
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.loading import check_loaded, log_unexpected, without_load_report

_MISSING_IN_ADAPTER = "Found missing adapter keys"
"""Start of the warning of PEFT, which then keeps the values of a new adapter."""


@contextmanager
def complete_weights() -> Iterator[None]:
    """Raise `UserError` if a model or adapter that is loaded inside this block lacks a tensor, or has another shape."""
    load_model, load_adapter = vars(PreTrainedModel)["from_pretrained"], vars(PeftModel)["from_pretrained"]

    def model(
        cls: type[PreTrainedModel], name: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        # transformers raises for another shape without naming the tensor in the error.
        kwargs["ignore_mismatched_sizes"] = True
        loaded, report = load_model.__get__(None, cls)(name, *args, output_loading_info=True, **kwargs)
        check_loaded(str(name), report)
        return (loaded, report) if output_loading_info else loaded

    def adapter(cls: type[PeftModel], base: Any, name: Any, *args: Any, **kwargs: Any) -> PeftModel:
        unexpected: list[str] = []
        load = PeftModel.load_adapter

        def load_and_record(self: PeftModel, *args: Any, **kwargs: Any) -> Any:
            result = load(self, *args, **kwargs)
            unexpected.extend(result.unexpected_keys)
            return result

        try:
            with warnings.catch_warnings(), method_replaced(PeftModel, "load_adapter", load_and_record):
                warnings.filterwarnings("error", message=_MISSING_IN_ADAPTER)
                loaded = load_adapter.__get__(None, cls)(base, name, *args, **kwargs)
        except (RuntimeError, UserWarning) as error:
            problem = f"the adapter can't be loaded ({one_line(error)})"
            raise UserError(name, problem, "copy or save it again, or name its own base") from error
        log_unexpected(str(name), unexpected)
        return loaded

    with (
        without_load_report(),
        method_replaced(PreTrainedModel, "from_pretrained", classmethod(model)),
        method_replaced(PeftModel, "from_pretrained", classmethod(adapter)),
    ):
        yield
