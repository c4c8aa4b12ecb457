"""Accuracy of a model with known completions, and how completions are sampled."""

from pathlib import Path
from types import SimpleNamespace

import datasets
import pandas as pd
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_recipes.evaluation.accuracy import strict_rewards
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.estimates import describe, mean_share
from grpo_recipes.evaluation.evaluate import evaluate_into
from grpo_recipes.evaluation.settings import Settings
from grpo_rewards.terminal import rendered
from tests.support.errors import refused

SAMPLED = Settings(temperature=1.0)

# A model with scripted completions


CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer with one token per character, and tokens for padding and end of text."""
    backend = Tokenizer(
        models.WordLevel({c: n for n, c in enumerate(["<pad>", "<end>", *CHARACTERS])}, unk_token="<pad>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    result = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    result.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    return result


class Scripted:
    """Model that completes each prompt from a script and records the calls."""

    def __init__(self, tokenizer, script):
        self.tokenizer, self.script = tokenizer, script
        self.device, self.training, self.calls = torch.device("cpu"), True, []
        self.generation_config = SimpleNamespace(eos_token_id=None)

    def eval(self):
        self.training = False

    def train(self, mode=True):
        self.training = mode

    def generate(self, input_ids, attention_mask, **options):
        assert not self.training
        assert attention_mask[:, -1].all(), "padding on the right"
        self.calls.append(SimpleNamespace(rows=len(input_ids), **options))
        prompts = self.tokenizer.batch_decode(input_ids, skip_special_tokens=True)
        output = [self.script[prompt] for prompt in prompts]
        new = self.tokenizer(
            [text + "<end>" for text in output], padding=True, padding_side="right", return_tensors="pt"
        )
        return torch.cat([input_ids, new["input_ids"]], dim=1)


COMPLETIONS = {  # completion: (strict, lenient) against the gold 18
    "<think>9 + 9</think><answer>18</answer>": (1, 1),
    "<think>\n9 + 9\n</think>\n<answer>\n18.0\n</answer>": (1, 1),
    "<think>9 + 9</think><answer>17</answer>": (0, 0),
    "9 + 9 = 18\nThe answer is 18.": (0, 1),
    "<think>9 + 9</think><answer>18</answer> So 18.": (0, 1),
    "#### 18": (0, 1),
    "The answer is 81.": (0, 0),
    "<think>18</think>": (0, 0),
    "": (0, 0),
}


def scripted_run(tokenizer, prompts, script, folder, columns=None, **settings):
    model = Scripted(tokenizer, script)
    columns = {"answer": ["18"] * len(prompts)} if columns is None else columns
    dataset = datasets.Dataset.from_dict({"prompt": prompts, **columns})
    return evaluate_into(folder, Transformers(model, tokenizer), dataset, Settings(**settings), {}), model


@pytest.mark.parametrize("conversational", [True, False])
def test_strict_and_lenient_on_known_completions(tokenizer, conversational, tmp_path: Path):
    names = [f"problem {'x' * n}" for n in range(len(COMPLETIONS))]
    prompts = [[{"role": "user", "content": name}] for name in names] if conversational else names
    script = dict(zip([f"{name}>" for name in names] if conversational else names, COMPLETIONS, strict=True))
    summary, model = scripted_run(tokenizer, prompts, script, tmp_path / "e", batch_size=4)
    assert summary["problems"] == 9
    for name, right in (("strict", 2), ("lenient", 5)):
        assert summary[name] == mean_share([1.0] * right + [0.0] * (9 - right)).as_dict()
    assert [call.rows for call in model.calls] == [4, 4, 1]
    assert model.training


TAGGED = "<think>9 + 9</think><answer>18</answer>"
ON_LINES = "<think>\n9 + 9\n</think>\n<answer>\n18\n</answer>"
BOXED, HASHES = r"9 + 9 = \boxed{18}", "9 + 9 = 18\n#### 18"
BOXES = {"name": "gsm8k_correctness", "kwargs": {"extract": "boxed"}}
TO_THE_CHARACTER = {"name": "gsm8k_correctness", "kwargs": {"pay_exact": 1.0, "pay_equal": 0.0}}

STRICT = [  # rewards of a recipe; strictly right completions; others
    ([BOXES], [BOXED, rf"<think>x</think>{BOXED}"], [TAGGED, HASHES, r"\boxed{17}"]),
    (["math_correctness"], [TAGGED, BOXED, HASHES], ["<answer>17</answer>"]),
    ([BOXES, "my_pkg.style"], [BOXED], [TAGGED]),
    (["gsm8k_correctness"], [TAGGED, "<answer>18</answer>", "<answer>18.0</answer> Done."], [BOXED]),
    ([TO_THE_CHARACTER], ["<answer>18</answer>"], ["<answer>18.0</answer>"]),
    (["gsm8k_correctness", "well_formed"], [TAGGED, ON_LINES], ["<answer>18</answer>", f"{TAGGED} Done."]),
    (["gsm8k_correctness", {"name": "well_formed", "weight": 0}], ["<answer>18</answer>"], [BOXED]),
    (["gsm8k_correctness", "tag_structure"], [ON_LINES], [TAGGED]),
    (["gsm8k_correctness", "tag_presence"], [TAGGED, f"{TAGGED} {TAGGED}"], ["<answer>18</answer>"]),
    (["gsm8k_correctness", "tag_count"], [TAGGED], [f"{TAGGED} {TAGGED}"]),
    ([{"name": "sum", "rewards": [BOXES, "tag_count"]}], [TAGGED + BOXED], [BOXED, TAGGED]),
    ([{"name": "gate", "reward": BOXES, "only_if": "tag_count"}], [TAGGED + BOXED], [BOXED, TAGGED]),
    (["tag_structure"], [ON_LINES], [TAGGED, BOXED]),
    (["my_pkg.correct", "group_length"], [TAGGED], [BOXED, f"{TAGGED} Done."]),
    (
        [
            {"name": "gsm8k_correctness", "kwargs": {"prefilled": "think"}},
            {"name": "well_formed", "kwargs": {"prefilled": "think"}},
        ],
        ["9 + 9</think><answer>18</answer>"],
        [TAGGED, "<answer>18</answer>"],
    ),
    (["trl.rewards.accuracy_reward", "trl.rewards.think_format_reward"], [f"<think>x</think>{BOXED}"], [BOXED]),
    ([{"name": "gsm8k_correctness", "kwargs": {"tags": ["r", "a"]}}], ["<a>18</a>"], [TAGGED]),
]


@pytest.mark.parametrize(("rewards", "right", "wrong"), STRICT)
def test_strict_accuracy_requires_what_the_recipe_requires(
    tokenizer, tmp_path: Path, rewards: list, right: list, wrong: list
):
    script = {f"p{n}": completion for n, completion in enumerate([*right, *wrong])}
    strict = strict_rewards(rewards, ("think", "answer"))
    scripted_run(tokenizer, list(script), script, tmp_path / "e", strict=strict)
    table = pd.read_parquet(tmp_path / "e" / "completions.parquet")
    assert table["strict"].tolist() == [True] * len(right) + [False] * len(wrong)
    assert (table["lenient"] | ~table["strict"]).all()


CITIES = {"choices": ["Rome", "Paris"], "answer": "B"}
AGE = {"schema": '{"required": ["age"], "properties": {"age": {"type": "integer"}}}'}
QUIET = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
TESTS = {"tests": ["assert x == 1", "assert x < 3"]}
DECLARED = [  # rewards of a recipe; columns of a row; strictly right completions; others
    (["choice_correctness"], CITIES, ["The answer is B.", "<answer>Paris</answer>"], ["A", "A or B", ""]),
    (["choice_correctness", "well_formed"], CITIES, ["<think>a</think><answer>B</answer>"], ["B"]),
    ([{"name": "choice_correctness", "kwargs": {"pay_wrong": -1, "gold_column": "key"}, "alias": "c"}],
     {**CITIES, "key": "A"}, ["A"], ["B"]),
    (["choice_correctness"], {**CITIES, "answer": 1}, ["B"], ["A"]),
    (["string_match"], {"answer": "the Danube"}, ["<answer>danube</answer>"], ["danube", "<answer>Rhine</answer>"]),
    ([{"name": "string_match", "kwargs": {"match": "f1"}}], {"answer": "red cat"}, ["<answer>Red cat.</answer>"],
     ["<answer>red cats</answer>", "<answer>the red big cat</answer>"]),
    ([{"name": "json_schema", "kwargs": {"pay": 3}}], AGE, ['{"age": 3}'], ['{"age": "3"}', "{}", "3"]),
    (["instructions", "repetition"], QUIET, ['"a"'], ['"a, b"', "a"]),
    pytest.param(["unit_tests"], TESTS, ["```python\nx = 1\n```", "```\nx = 1.0\n```"],
                 ["x = 1", "```python\nx = 2\n```"], marks=pytest.mark.slow),
    ([{"name": "gate", "reward": "choice_correctness", "only_if": "tag_count"}], CITIES,
     ["<think>a</think><answer>B</answer>"], ["B", "<think>a</think><answer>A</answer>"]),
]  # fmt: skip


@pytest.mark.parametrize(("rewards", "row", "right", "wrong"), DECLARED)
def test_strict_accuracy_uses_the_kind_that_a_reward_declares(tokenizer, tmp_path: Path, rewards, row, right, wrong):
    script = {f"p{n}": completion for n, completion in enumerate([*right, *wrong])}
    columns = {name: [value] * len(script) for name, value in row.items()}
    strict = strict_rewards(rewards, ("think", "answer"))
    assert "GSM8KCorrectness" not in {type(reward).__name__ for reward in strict}
    summary, _ = scripted_run(tokenizer, list(script), script, tmp_path / "e", columns, strict=strict)
    table = pd.read_parquet(tmp_path / "e" / "completions.parquet")
    assert table["strict"].tolist() == [True] * len(right) + [False] * len(wrong)
    assert (table["lenient"] | ~table["strict"]).all()
    strict_line = next(line for line in rendered(describe(summary), 300).splitlines() if "strict: " in line)
    assert all(reward["name"] in strict_line for reward in summary["settings"]["strict"])


def test_every_accepted_gold_is_right(tokenizer, tmp_path: Path):
    output = {
        "p0": TAGGED,
        "p1": "The answer is eighteen.",
        "p2": "<think>x</think><answer>eighteen</answer>",
        "p3": "17",
    }
    columns = {"answer": [["18", "eighteen"]] * 4}
    summary, _ = scripted_run(tokenizer, list(output), output, tmp_path / "e", columns)
    table = pd.read_parquet(tmp_path / "e" / "completions.parquet")
    assert table[["strict", "lenient"]].values.tolist() == [[1, 1], [0, 1], [1, 1], [0, 0]]
    assert table["gold"].tolist() == ["18 or eighteen"] * 4
    assert summary["strict"]["value"] == 0.5


def test_the_named_choice_is_the_stated_answer(tokenizer, tmp_path: Path):
    output = {"p0": "It's Paris.", "p1": "The answer is (a)"}
    columns = {name: [value] * 2 for name, value in CITIES.items()}
    scripted_run(
        tokenizer,
        list(output),
        output,
        tmp_path / "e",
        columns,
        strict=strict_rewards(["choice_correctness"], ("a", "b")),
    )
    assert pd.read_parquet(tmp_path / "e" / "completions.parquet")["answer"].tolist() == ["B", "A"]


def test_a_row_that_cannot_be_scored_is_named(tokenizer, tmp_path: Path):
    columns = {"answer": ["B", "C"], "choices": [CITIES["choices"]] * 2}
    strict = strict_rewards(["choice_correctness"], ("think", "answer"))
    with refused("row 2", "`choice_correctness`"):
        scripted_run(tokenizer, ["p0", "p1"], {}, tmp_path / "e", columns, strict=strict)
    with refused("row 2", "answer_tag"):
        golds = {"answer": ["18", "the first of the 2 said 17 and the other 18"]}
        scripted_run(tokenizer, ["p0", "p1"], {}, tmp_path / "e", golds)
    with refused("rows"):
        scripted_run(tokenizer, [], {}, tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_the_stated_answer_is_where_the_recipes_reward_looks(tokenizer, tmp_path: Path):
    output = r"<answer>17</answer>, no: \boxed{18}"
    for folder, rewards, stated in (("boxed", [BOXES], "18"), ("tagged", ["gsm8k_correctness"], "17")):
        strict = strict_rewards(rewards, ("think", "answer"))
        scripted_run(tokenizer, ["p"], {"p": output}, tmp_path / folder, strict=strict)
        table = pd.read_parquet(tmp_path / folder / "completions.parquet")
        assert table[["answer", "lenient"]].values.tolist() == [[stated, stated == "18"]]


def test_amounts_names_and_order_of_rewards_do_not_matter():
    tags = ("think", "answer")
    one = strict_rewards(["gsm8k_correctness", "well_formed"], tags)
    renamed = {"name": "gsm8k_correctness", "alias": "right", "weight": 3, "kwargs": {"pay_exact": 1, "pay_equal": 1}}
    assert (
        strict_rewards([{"name": "well_formed", "kwargs": {"pay": 5}}, renamed], tags)
        == one
        == strict_rewards([], tags)
    )
    assert one == Settings().strict
    assert strict_rewards([BOXES], tags) != strict_rewards(["gsm8k_correctness"], tags)
    overridden = strict_rewards([BOXES, "well_formed"], ("r", "a"), override_tags=True)
    assert {reward.tags for reward in overridden} == {("r", "a")}


# A real model


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    # Instruct models are published with decoding settings that are not the policy.
    model.generation_config.update(top_k=1, top_p=0.5, repetition_penalty=1.5, temperature=0.1, do_sample=True)
    return model


def sampled(model, tokenizer, monkeypatch, **settings):
    seen = []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **inputs: seen.append(generate(**inputs)) or seen[-1])
    settings = Settings(**{"temperature": 1.0, "max_new_tokens": 6, **settings})
    Transformers(model, tokenizer)(["one", "three"] * 8, settings)
    monkeypatch.undo()
    return seen[0]


def test_a_seed_reproduces_the_samples_and_leaves_the_global_state_alone(model, tokenizer, monkeypatch):
    state = torch.get_rng_state()
    first = sampled(model, tokenizer, monkeypatch, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert torch.equal(sampled(model, tokenizer, monkeypatch, seed=3), first)
    assert not torch.equal(sampled(model, tokenizer, monkeypatch, seed=4), first)


def test_the_models_generation_config_does_not_change_the_sampling(model, tokenizer, monkeypatch):
    tokens = sampled(model, tokenizer, monkeypatch, temperature=1.0)
    assert len({tuple(row) for row in tokens[::2].tolist()}) > 1, "top_k 1 would repeat one completion"


@pytest.mark.parametrize(("declared", "expected"), [(None, [1]), (1, [1]), (7, [1, 7]), ([9, 7], [1, 7, 9])])
def test_a_completion_ends_at_the_end_tokens_of_training(tokenizer, declared, expected):
    model = Scripted(tokenizer, {"p": "#### 18"})
    model.generation_config.eos_token_id = declared
    Transformers(model, tokenizer)(["p"], SAMPLED)
    assert model.calls[0].eos_token_id == expected


def test_temperature_zero_is_greedy(model, tokenizer, monkeypatch):
    tokens = sampled(model, tokenizer, monkeypatch, temperature=0)
    prompt = tokenizer(["three"], return_tensors="pt")["input_ids"]
    for _ in range(6):
        prompt = torch.cat([prompt, model(prompt).logits[:, -1:].argmax(-1)], dim=1)
    assert tokens[1].tolist() == prompt[0].tolist()
