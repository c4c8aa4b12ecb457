"""Engines of an evaluation: group decoding as in training, the comparison with the model, stop strings, and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from grpo_recipes.evaluation.engines import Transformers, token_ids
from grpo_recipes.evaluation.settings import Settings
from tests.support.exact_generation import exact_generation
from tests.support.tiny import CHATML, byte_tokenizer, chat_tokenizer, policy

PROMPTS = [prompt for prompt in ("1 =", "33 + 4 =", "b", "a longer prompt") for _ in range(6)]
STOP = ("b", "W", "zz", "=7")


@pytest.fixture
def same_stream() -> Iterator[None]:
    with exact_generation():
        yield


def engine_of(model: Any, *, stock: bool = False) -> Transformers:
    """Return the engine of a model, or the one that generates by transformers' own loop."""
    engine = Transformers(model, byte_tokenizer())
    if stock:
        engine.groups.doubt = "a test"
    return engine


def ending() -> Any:
    """Return a policy that ends its completions at many lengths."""
    model = policy()
    model.generation_config.eos_token_id = list(range(1, 60))
    return model


class Forwards:
    """Number of rows of each forward of a model, with a cache and without one."""

    def __init__(self, model: Any) -> None:
        self.cached: list[int] = []
        self.compared: list[int] = []
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        rows = self.compared if kwargs.get("use_cache") is False else self.cached
        rows.append(len(kwargs["input_ids"]))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.usefixtures("same_stream")
def test_group_decoding_gives_the_completions_of_transformers_own_loop(temperature: float, caplog: Any) -> None:
    model, settings = ending(), Settings(temperature=temperature, max_new_tokens=12, batch_size=16)
    forwards, engine = Forwards(model), engine_of(model)
    completions = engine(PROMPTS, settings)
    assert forwards.cached[0] == 3, "each of the three distinct prompts runs once"
    assert forwards.compared == [1] * 16, "of the first batch"
    assert (engine.groups.doubt, caplog.messages) == ("", [])
    forwards.cached.clear()
    assert completions == engine_of(model, stock=True)(PROMPTS, settings)
    assert forwards.cached[0] == 16
    assert len(set(map(len, completions))) > 3


def test_32_rows_of_the_first_batch_are_compared() -> None:
    model = ending()
    forwards, engine = Forwards(model), engine_of(model)
    for _ in range(2):
        engine((PROMPTS * 3)[:64], Settings(max_new_tokens=4, batch_size=64))
    assert forwards.compared == [1] * 32


@pytest.mark.parametrize(("scale", "is_wrong"), [(1e-6, False), (1e-3, True)])
def test_one_token_under_another_log_probability_is_a_mismatch(scale: float, is_wrong: bool) -> None:
    """In float32 the largest difference decides."""
    model, count = ending(), iter(range(10_000))

    def damage(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("use_cache") is not False and next(count) == 2:
            output.logits[0] *= 1 + scale

    model.register_forward_hook(damage, with_kwargs=True)
    engine = engine_of(model)
    engine(PROMPTS, Settings(max_new_tokens=8))
    assert bool(engine.groups.doubt) == is_wrong


def test_a_model_that_group_decoding_declines_uses_transformers_own_loop(caplog: Any) -> None:
    model, reason = policy(), "prefill_chunk_size"
    model.generation_config.prefill_chunk_size = 2
    settings = Settings(max_new_tokens=3, batch_size=8)
    expected = engine_of(model, stock=True)(PROMPTS, settings)
    engine = engine_of(model)
    assert [engine(PROMPTS, settings) for _ in range(2)] == [expected] * 2
    (sentence,) = caplog.messages
    assert reason in sentence
    assert reason in str(engine.groups.doubt)


def test_a_model_in_training_is_evaluated_without_dropout_and_goes_on_training(monkeypatch: Any) -> None:
    model, settings = policy(attention_dropout=0.9), Settings(max_new_tokens=8)
    expected = engine_of(model.eval())(PROMPTS, settings)
    assert engine_of(model.train())(PROMPTS, settings) == expected
    assert model.training

    def interrupted(**_: Any) -> None:
        assert not model.training
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine_of(model)(PROMPTS, settings)
    assert model.training


@pytest.mark.parametrize(("stock", "pad_is_eos"), [(False, True), (True, False)])
def test_a_completion_ends_at_its_first_stop_string(stock: bool, pad_is_eos: bool) -> None:
    engine = engine_of(policy(), stock=stock)
    if pad_is_eos:
        engine.tokenizer.pad_token = engine.tokenizer.eos_token
    completions = engine(PROMPTS * 4, Settings(temperature=1.0, max_new_tokens=20, batch_size=96, stop=STOP))
    assert bool(engine.groups.doubt) == stock
    assert sum(text.endswith(STOP) for text in completions) > 5
    for text in completions:
        assert not any(stop in text[:-1] for stop in STOP), "cut at the first one"


def test_a_completion_keeps_its_end_token_and_no_padding_and_has_the_length_of_its_room() -> None:
    engine = engine_of(ending())
    ids = token_ids(PROMPTS, engine.tokenizer, Settings())
    made = engine.generate(ids, Settings(max_new_tokens=10))
    ends = set(range(1, 60))
    assert {len(tokens) for tokens in made} > {1}
    for tokens in made:
        assert not ends & set(tokens[:-1])
        assert tokens[-1] in ends or len(tokens) == 10
    room = [10, 1, 3, 7] * 6
    expected = [tokens[:most] for tokens, most in zip(made, room, strict=True)]
    assert engine.generate(ids, Settings(max_new_tokens=2), room) == expected


def test_the_sampling_of_greedy_decoding_names_no_filter() -> None:
    engine = engine_of(policy())
    lengths = {"max_new_tokens": 3, "eos_token_id": [1], "pad_token_id": 0, "stop": ["b"]}
    found = engine.sampling(Settings(max_new_tokens=3, stop=("b",)))
    assert found == {"do_sample": False, "repetition_penalty": 1.0, **lengths}
    assert engine.positions == engine.model.config.max_position_embeddings
    for config in ({}, {"max_position_embeddings": None}):
        assert Transformers(SimpleNamespace(config=SimpleNamespace(**config)), None).positions == float("inf")


# ---- prompts

THINKING = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def test_prompts_are_rendered_with_the_arguments_of_the_recipe() -> None:
    tokenizer = chat_tokenizer(THINKING)
    prompts = [[{"role": "user", "content": text}] for text in ("1 + 1", "2")]
    settings = Settings(chat_template_kwargs={"enable_thinking": False})
    for ids, prompt in zip(token_ids(prompts, tokenizer, settings), prompts, strict=True):
        rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(ids) == f"{rendered}<think></think>"


def test_only_prompts_of_text_get_the_tokenizers_special_tokens() -> None:
    """A chat template has written those of a conversation already."""
    tokenizer = chat_tokenizer()
    begin = TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", 257)])
    tokenizer.backend_tokenizer.post_processor = begin
    texts = ["1", "22"]
    assert token_ids(texts, tokenizer, Settings()) == [tokenizer(text)["input_ids"] for text in texts]
    assert token_ids(["1"], tokenizer, Settings())[0][0] == 257
    assert token_ids([[{"role": "user", "content": "1"}]], tokenizer, Settings())[0][0] == 256
