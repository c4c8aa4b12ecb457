"""Bad input of `grpo-rewards`, and of rewards in a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.bad_input import Case, check

# grpo-rewards.
SCORED = {"rows.jsonl": '{"completion": "<answer>18</answer>", "answer": "18"}\n' * 8}


UNSCORABLE = {"rows.jsonl": '{"completion": "<answer>18</answer>", "answer": ""}\n' * 3}


INTERNLM2 = json.dumps(
    {
        "architectures": ["InternLM2ForRewardModel"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    }
)  # fmt: skip


JUDGE = {"name": "judge", "kwargs": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "attempts": 1}}
RUBRIC = {"name": "judge", "kwargs": {**JUDGE["kwargs"], "template": "By {rubric}: {completion}"}}  # type: ignore[dict-item]
TRAIN = "train --config {recipe}"
SCORE = "grpo-rewards score rows.jsonl --reward "
CONVERT = "grpo-rewards convert-internlm2 "
REWARDS: list[Case] = [
    Case(TRAIN, ("recipe.yaml: `rewards`", "`judge`", "http://127.0.0.1:9/v1"), changes={"rewards": [JUDGE]}),
    Case(TRAIN, ("recipe.yaml: `rewards`", "`judge`", "http://127.0.0.1:9/v1"),
         changes={"rewards": [{"name": "gate", "only_if": "well_formed", "reward": JUDGE}]}),
    Case(TRAIN, ("recipe.yaml: `rewards`", "judge", "`rubric`"), changes={"rewards": [RUBRIC]}),
    Case(TRAIN, ("recipe.yaml: `rewards`", "instructions", "`instruction_id_list`"),
         changes={"rewards": ["instructions"]}),
    Case(TRAIN, ("recipe.yaml: `rewards`", "json_schema", "`schema`"), changes={"rewards": ["json_schema"]}),
    Case(SCORE + "gsm8k_correctness", ("8 rows, 0 unscorable", "mean 2.0000"), 0, SCORED),
    Case(SCORE + "tag_count --gold-column answer", ("8 rows",), 0, SCORED),
    Case(SCORE + "tag_count --gold-column nope", ("`nope`",), files=SCORED),
    Case(SCORE + "gsm8k_correctness", ("gsm8k_correctness", "3 rows", "`answer`", "row 1"), 1, UNSCORABLE),
    Case(SCORE + "own_import.reward", ("`own_import`", "ZeroDivisionError"),
         files={**SCORED, "own_import.py": "1 / 0"}),
    Case(SCORE + "own_syntax.reward", ("`own_syntax`", "SyntaxError"),
         files={**SCORED, "own_syntax.py": "def reward(:"}),
    Case(SCORE + "''", ("rewards",), files=SCORED),
    Case(SCORE + "'{name: gsm8k_correctness, kwargs: {extract: boxed}}'",
         ("`extract: boxed`", "`extract: answer_tag`", "8 of 8"), 0, SCORED),
    Case(SCORE + "group_length", ("num_generations",), files=SCORED),
    Case(SCORE + "tag_count --out there.jsonl", ("there.jsonl",), files={**SCORED, "there.jsonl/file": ""}),
    Case("grpo-rewards score . --reward tag_count", (".",)),
    Case(SCORE + "tag_count", ("rows.jsonl", "row 1"), files={"rows.jsonl": b"\xff\xfe\x00junk\n"}),
    Case(SCORE + "tag_count", ("rows.jsonl",), files={"rows.jsonl": ""}),
    Case(SCORE + "tag_count", ("row 1", "list"), files={"rows.jsonl": '[{"completion": "18"}]\n'}),
    Case(SCORE + "tag_count", ("row 1", "`completion`", "`text`"), files={"rows.jsonl": '{"text": "18"}\n'}),
    Case("grpo-rewards check rows.jsonl", ("8 golds, 8 earn",), 0, SCORED),
    Case("grpo-rewards check rows.jsonl", ("3 golds in `answer`",), 1, UNSCORABLE),
    Case("grpo-rewards check rows.jsonl --reward '{name: gsm8k_correctness, kwargs: {gold_column: x}}'",
         ("row 1", "`x`"), files=SCORED),
    Case(CONVERT + "absent out", ("'absent'",)),
    Case(CONVERT + "empty out", ("empty", "config.json"), files={"empty/file": ""}),
    Case(CONVERT + "odd out", ("odd/config.json",), files={"odd/config.json": "{"}),
    Case(CONVERT + "odd out", ("odd/config.json",), files={"odd/config.json": "[]"}),
    Case(CONVERT + "odd out", ("config.json", "vocab_size"),
         files={"odd/config.json": '{"architectures": ["InternLM2ForRewardModel"]}'}),
    Case(CONVERT + "odd out", ("config.json", "hidden_size"),
         files={"odd/config.json": INTERNLM2.replace("16", '"x"')}),
    Case(CONVERT + "odd out", ("config.json", "float3"),
         files={"odd/config.json": INTERNLM2.replace("{", '{"dtype": "float3", ')}),
    Case(CONVERT + "odd out", ("odd", "model.safetensors"), files={"odd/config.json": INTERNLM2}),
    Case(CONVERT + "odd out", ("odd", "tokenizer"),
         files={"odd/config.json": INTERNLM2, "odd/model.safetensors": "", "odd/tokenizer.json": "{}"}),
    Case(CONVERT + "{model} out", ("InternLM2ForRewardModel",)),
    Case(CONVERT + "{model} there", ("there",), files={"there/file": ""}),
]  # fmt: skip


def test_bad_input_ends_with_one_message(tmp_path: Path, tiny_model: Path) -> None:
    for number, case in enumerate(REWARDS):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            check(case, folder, tiny_model, patch)
