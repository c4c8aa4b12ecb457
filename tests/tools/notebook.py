"""Run notebooks/one_gpu.ipynb on a CPU with a tiny model, and store its outputs in it: `make notebook`, some minutes.

The model has 0.4 million parameters. It is first fine-tuned on worked solutions of such problems as the notebook's
table holds, some of them in the layout that the recipe requests, as the quickstart's model is (`quickstart.py`).
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import set_seed

from grpo_recipes.process.messages import fewer_library_messages
from grpo_recipes.quickstart import WarmStart, build_policy, build_tokenizer, fine_tune
from grpo_recipes.recipe.dataset import SYSTEM_PROMPTS
from grpo_rewards.terminal import say
from tests.support.notebook import NOTEBOOK, Kernel, Output, code_of, text_of

PARAMETERS = 'MODEL, STEPS, LENGTH, RATE = "tiny", 150, 48, 1e-3'
"""Parameters for a run of minutes on a CPU. The introduction of the notebook names these values."""

SOLUTIONS = 12_000
TAGGED = 0.4
"""Share of the solutions in the layout that the recipe requests."""

UNSTORED = ("importlib", "IFrame")
"""Words of the cells whose outputs are not stored: an installation, and a page that only a run has."""

PLAIN = {"NO_COLOR": "1", "COLUMNS": "100"}
"""Variables that let a command print without colours, as wide as a notebook shows it."""

HIDDEN = re.compile(r"^.*(?:real_accelerator|it/s|s/it|batch/s|\?batch|tokens computed).*\n?", re.MULTILINE)
"""Progress bars, a line of DeepSpeed about the machine, and the one line on efficiency that each step has."""


def main() -> int:
    """Run every cell and write the notebook with the outputs. Returns 1 if a command of a cell fails."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_tiny_model(folder / "tiny")
        kernel = Kernel(folder, **PLAIN)
        try:
            number = 0
            for cell in notebook["cells"]:
                if cell["cell_type"] != "code":
                    continue
                number += 1
                outputs = kernel.run(code_of(cell, PARAMETERS))
                say(text_of(outputs))
                if "Traceback" in text_of(outputs):
                    return 1
                is_stored = not any(word in "".join(cell["source"]) for word in UNSTORED)
                cell["execution_count"] = number
                cell["outputs"] = stored(outputs, number, folder) if is_stored else []
        finally:
            kernel.close()
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def save_tiny_model(folder: Path) -> None:
    """Fine-tune a tiny model on worked solutions of problems like the notebook's, and save it with its tokenizer."""
    settings = WarmStart(demonstrations=SOLUTIONS)
    draw = random.Random(1)
    conversations = [conversation(draw) for _ in range(settings.demonstrations)]
    set_seed(settings.seed)
    tokenizer = build_tokenizer(conversations, settings.vocab_size)
    policy = build_policy(tokenizer, settings)
    with fewer_library_messages(), tempfile.TemporaryDirectory() as unused:
        fine_tune(policy, tokenizer, conversations, settings, Path(unused))
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def conversation(draw: random.Random) -> dict[str, Any]:
    """Return a problem of the notebook's kind as a prompt of its recipe, with a worked solution."""
    pens, price, spent = draw.randint(2, 12), draw.randint(2, 9), draw.randint(1, 20)
    question = (
        f"Ann buys {pens} pens for {price} coins each and a book for {spent} coins. How many coins does she spend?"
    )
    steps = f"{pens}*{price}={pens * price}\n{pens * price}+{spent}={pens * price + spent}"
    tagged = f"<reasoning>\n{steps}\n</reasoning>\n<answer>\n{pens * price + spent}\n</answer>"
    plain = f"{steps}\nThe answer is {pens * price + spent}."
    prompt = [{"role": "system", "content": SYSTEM_PROMPTS["reasoning"]}, {"role": "user", "content": question}]
    solution = tagged if draw.random() < TAGGED else plain
    return {"prompt": prompt, "completion": [{"role": "assistant", "content": solution}]}


def stored(outputs: list[Output], number: int, folder: Path) -> list[Output]:
    """Return outputs as the notebook keeps them: standard output as the terminal ended up, and results."""
    printed = "".join(one["text"] for one in outputs if one.get("name") == "stdout").replace("\r\n", "\n")
    lines = [line.rpartition("\r")[2].rstrip() for line in printed.split("\n")]
    text = HIDDEN.sub("", "\n".join(lines)).replace(f"{folder}/", "").strip("\n")
    kept: list[Output] = []
    if text:
        source = (text + "\n").splitlines(keepends=True)
        kept.append({"name": "stdout", "output_type": "stream", "text": source})
    for one in outputs:
        if one["output_type"] == "execute_result":
            data = {kind: str(value).splitlines(keepends=True) for kind, value in one["data"].items()}
            kept.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return kept


if __name__ == "__main__":
    sys.exit(main())
