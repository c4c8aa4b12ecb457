"""Real, labelled solutions in every layout: every right solution is paid and no wrong one."""

import itertools
import json
from pathlib import Path

import pytest

from grpo_rewards.math.correctness import GSM8KCorrectness, MathCorrectness
from tests.support.word_problems import gsm8k_rows

LAYOUTS = {
    "a_line": "{body}\nA: {answer}",
    "hashes": "{body}\n#### {answer}",
    "answer_tag": "<think>\n{body}\n</think>\n<answer>\n{answer}\n</answer>",
    "boxed": "{body}\nSo it is $\\boxed{{{answer}}}$.",
    "sentence": "{body}\nThe answer is {answer}.",
}


@pytest.fixture(scope="session")
def solutions(gsm8k_dir: Path) -> list[tuple[str, str, str, bool]]:
    """Rows of (body, answer, gold solution, label). A text cut off before its answer line has the answer ""."""
    rows = []
    for line in (gsm8k_dir / "model_solutions_dev.jsonl").read_text(encoding="utf-8").splitlines():
        problem = json.loads(line)
        gold = problem.pop("ground_truth").replace("\nA: ", "\n#### ")
        for value in problem.values():
            if isinstance(value, dict):
                body, _, answer = value["solution"].rpartition("\nA:")
                rows.append((body or value["solution"], answer.strip() if body else "", gold, value["is_correct"]))
    return rows


CELLS = list(itertools.product([False, True], [False, True], [GSM8KCorrectness, MathCorrectness], LAYOUTS))
"""Cells of (True for a chat turn, True for `extract: auto`, reward, layout)."""


@pytest.mark.slow
def test_every_label_is_matched(solutions):
    for cell in CELLS:
        assert_every_label_is_met(solutions, *cell)


def test_every_label_of_made_up_solutions_is_matched():
    """Score answers with the magnitudes, signs and commas of GSM8K, below calculations with other numbers."""
    solutions = []
    for row in gsm8k_rows(25):
        body, _, answer = row["answer"].partition("\n#### ")
        wrong = f"{int(answer.replace(',', '')) + 1:,}"
        solutions += [(body, answer, row["answer"], True), (body, wrong, row["answer"], False)]
        solutions.append((body.rpartition("=")[0] + "is", "", row["answer"], False))
    for cell in CELLS:
        assert_every_label_is_met(solutions, *cell)


def assert_every_label_is_met(solutions, chat, auto, reward, layout):
    texts = [LAYOUTS[layout].format(body=body, answer=answer) if answer else body for body, answer, *_ in solutions]
    completions = [[{"role": "assistant", "content": text}] for text in texts] if chat else texts
    scorer = reward(extract="auto" if auto else layout)
    scores = scorer(prompts=texts, completions=completions, answer=[gold for *_, gold, _ in solutions])
    mistakes = [
        (answer, gold[-20:], label, score)
        for (_, answer, gold, label), score in zip(solutions, scores, strict=True)
        if score is None or (score > 0) != label
    ]
    assert mistakes == [], (chat, auto, reward, layout)


@pytest.mark.parametrize("split", ["test", pytest.param("train", marks=pytest.mark.slow)])
def test_every_gold_of_the_dataset_is_paid_in_full_against_itself(split, gsm8k_dir):
    lines = (gsm8k_dir / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    golds = [json.loads(line)["answer"] for line in lines]
    for extract in ("hashes", "auto"):
        assert set(GSM8KCorrectness(extract=extract)(completions=golds, answer=golds)) == {2.0}
