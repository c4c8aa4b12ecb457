"""Settings that a command makes before it imports other libraries."""

from __future__ import annotations

import logging
import os

NOTHING_SENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",  # also TRL's, and the list of agents that huggingface_hub asks for
    "VLLM_NO_USAGE_STATS": "1",
    "DISABLE_SAFETENSORS_CONVERSION": "1",  # transformers asks a hub service to convert a model of the old format
}
"""Environment variables that keep libraries from sending what a command does not need."""

_IMPORT_MESSAGES = {
    "DeepSpeed": "Setting accelerator to CPU",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}
"""Start of a warning at the import of a library, by the library's logger."""


def prepare_libraries() -> None:
    """Switch off usage statistics unless the user has set their variables, and call `hide_import_messages`.

    To be called before any import of huggingface_hub, which reads its variable when it is imported.
    """
    for name, value in NOTHING_SENT.items():
        os.environ.setdefault(name, value)
    hide_import_messages()


def hide_import_messages() -> None:
    """Hide what DeepSpeed and bitsandbytes log about a CPU when another library imports them."""
    for name in _IMPORT_MESSAGES:  # the import sets DeepSpeed's level anew, and leaves its filters
        logging.getLogger(name).addFilter(_is_no_import_message)


def _is_no_import_message(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_IMPORT_MESSAGES[record.name])
