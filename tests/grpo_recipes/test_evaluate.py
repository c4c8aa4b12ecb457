"""Accuracy on a model whose completions are known, and its interval against the equation that defines it."""

import math
from types import SimpleNamespace

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from grpo_recipes.evaluate import Accuracy, evaluate, wilson_interval

# The two-sided 95 % point of the standard normal distribution, from tables.
Z = 1.959963984540054


def score_root(successes, n, inside, outside):
    """Bisect for the p from which the share is Z standard errors of p away: the equation behind the interval."""

    def excess(p):
        return abs(successes / n - p) - Z * math.sqrt(p * (1 - p) / n)

    for _ in range(200):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if excess(middle) > 0 else (middle, outside)
    return inside


@given(st.integers(1, 5_000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_interval_solves_the_score_equation(case):
    successes, n = case
    low, high = wilson_interval(successes, n)
    share = successes / n
    assert 0 <= low <= share <= high <= 1
    if 0 < successes < n:
        assert low == pytest.approx(score_root(successes, n, share, 0.0), abs=1e-9)
        assert high == pytest.approx(score_root(successes, n, share, 1.0), abs=1e-9)


def test_the_interval_at_the_ends_is_one_sided():
    # At 0 of n the equation reads p = Z^2 (1 - p) / n.
    assert wilson_interval(0, 10) == (0.0, pytest.approx(Z**2 / (10 + Z**2)))
    assert wilson_interval(10, 10) == (pytest.approx(10 / (10 + Z**2)), 1.0)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_no_interval_without_trials(successes, n):
    with pytest.raises(ValueError, match="0 <= successes <= n"):
        wilson_interval(successes, n)


# A model that says what it is told


CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n"]


@pytest.fixture(scope="module")
def tokenizer():
    """One token a character; padding and end of text beside them."""
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
    """Answers a prompt with the completion that its script holds for it, and remembers how it was asked."""

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
        said = [self.script[prompt] for prompt in prompts]
        new = self.tokenizer([text + "<end>" for text in said], padding=True, padding_side="right", return_tensors="pt")
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


def scripted_run(tokenizer, prompts, script, **options):
    model = Scripted(tokenizer, script)
    dataset = datasets.Dataset.from_dict({"prompt": prompts, "answer": ["18"] * len(prompts)})
    return evaluate(model, tokenizer, dataset, **options), model


@pytest.mark.parametrize("conversational", [True, False])
def test_strict_and_lenient_on_known_completions(tokenizer, conversational):
    names = [f"problem {'x' * n}" for n in range(len(COMPLETIONS))]
    prompts = [[{"role": "user", "content": name}] for name in names] if conversational else names
    script = dict(zip([f"{name}>" for name in names] if conversational else names, COMPLETIONS, strict=True))
    accuracy, model = scripted_run(tokenizer, prompts, script, batch_size=4)
    assert accuracy == Accuracy(2 / 9, *wilson_interval(2, 9), n=9, lenient=5 / 9)
    assert [call.rows for call in model.calls] == [4, 4, 1]
    assert model.training


def test_other_tags(tokenizer):
    script = {"p": "<reasoning>9 + 9</reasoning><answer>18</answer>"}
    assert scripted_run(tokenizer, ["p"], script, tags=("reasoning", "answer"))[0].accuracy == 1
    assert scripted_run(tokenizer, ["p"], script)[0].accuracy == 0


def test_the_numbers_are_plain_json(tokenizer):
    accuracy, _ = scripted_run(tokenizer, ["p"], {"p": "#### 18"})
    low, high = wilson_interval(0, 1)
    assert accuracy.as_dict() == {"accuracy": 0.0, "low": low, "high": high, "n": 1, "lenient": 1.0}


@pytest.mark.parametrize("answers", [[], ["18", "nobody could say what it is in the end"]])
def test_golds_that_state_nothing_are_refused(tokenizer, answers):
    dataset = datasets.Dataset.from_dict({"prompt": ["p"] * len(answers), "answer": answers})
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        evaluate(Scripted(tokenizer, {}), tokenizer, dataset)


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
    # What instruct models ship: decoding habits that are not the policy.
    model.generation_config.update(top_k=1, top_p=0.5, repetition_penalty=1.5, temperature=0.1, do_sample=True)
    return model


def sampled(model, tokenizer, monkeypatch, **options):
    seen = []
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda **inputs: seen.append(generate(**inputs)) or seen[-1])
    dataset = datasets.Dataset.from_dict({"prompt": ["one", "three"] * 8, "answer": ["1", "3"] * 8})
    evaluate(model, tokenizer, dataset, max_new_tokens=6, **options)
    monkeypatch.undo()
    return seen[0]


def test_a_seed_reproduces_the_samples_and_leaves_the_global_state_alone(model, tokenizer, monkeypatch):
    state = torch.get_rng_state()
    first = sampled(model, tokenizer, monkeypatch, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert torch.equal(sampled(model, tokenizer, monkeypatch, seed=3), first)
    assert not torch.equal(sampled(model, tokenizer, monkeypatch, seed=4), first)


def test_sampling_is_the_policys_whatever_its_generation_config_says(model, tokenizer, monkeypatch):
    tokens = sampled(model, tokenizer, monkeypatch, temperature=1.0)
    assert len({tuple(row) for row in tokens[::2].tolist()}) > 1, "top_k 1 would repeat one completion"


@pytest.mark.parametrize(("declared", "expected"), [(None, [1]), (1, [1]), (7, [1, 7]), ([9, 7], [1, 7, 9])])
def test_a_completion_ends_where_it_ends_in_training(tokenizer, declared, expected):
    model = Scripted(tokenizer, {"p": "#### 18"})
    model.generation_config.eos_token_id = declared
    evaluate(model, tokenizer, datasets.Dataset.from_dict({"prompt": ["p"], "answer": ["18"]}))
    assert model.calls[0].eos_token_id == expected


def test_temperature_zero_is_greedy(model, tokenizer, monkeypatch):
    tokens = sampled(model, tokenizer, monkeypatch, temperature=0)
    prompt = tokenizer(["three"], return_tensors="pt")["input_ids"]
    for _ in range(6):
        prompt = torch.cat([prompt, model(prompt).logits[:, -1:].argmax(-1)], dim=1)
    assert tokens[1].tolist() == prompt[0].tolist()
