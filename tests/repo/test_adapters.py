"""The table of adapters (tests/tools/adapters.py): no kind of the installed PEFT is wrong without a word."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest

from tests.support.grids import only
from tests.tools import adapters

TABLE = Path(__file__).resolve().parents[2] / "docs" / "adapter-layouts.md"

SAMPLE = ["LORA, aLoRA", "LILY", "SHADOW", "PVERA"]
"""A kind of each outcome; the others by night."""


@pytest.mark.parametrize("name", only([], adapters.KINDS, slow=SAMPLE))
def test_no_adapter_is_wrong_without_a_word(name: str) -> None:
    row = adapters.examine(name)
    assert not row.wrong, str(row)


@pytest.mark.slow
def test_every_adapter_of_peft_is_in_the_table() -> None:
    assert adapters.missing() == set()


def test_the_table_has_every_adapter() -> None:
    text = TABLE.read_text(encoding="utf-8")
    if f"peft {peft.__version__}," not in text:
        pytest.skip("the table is of another version of peft: run `make models`")
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rows[1:] == list(adapters.KINDS)
