"""Engines of an evaluation: group decoding as in training, the comparison with the model, stop strings, and loading."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from trl import GRPOConfig

from grpo_recipes.checks.tokenizer import ChatTemplate
from grpo_recipes.evaluation import comparison, engines, evaluate
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.vllm_engine import needs_merging
from tests.support.errors import refused
from tests.support.exact_generation import exact_generation
from tests.support.quantized import needs_bitsandbytes, save_run, trained_policy
from tests.support.short_runs import log_probabilities
from tests.support.tiny import CHATML, byte_tokenizer, chat_tokenizer, policy, save_policy

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


def test_a_mismatch_switches_to_transformers_own_loop(caplog: Any) -> None:
    """Forwards of fewer rows than the batch, which only group decoding has, compute other logits."""
    model, settings = ending(), Settings(max_new_tokens=8, batch_size=12)

    def damage(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get("use_cache") is not False and len(output.logits) < 12:
            output.logits = output.logits.roll(1, -1)

    model.register_forward_hook(damage, with_kwargs=True)
    expected, engine = engine_of(model, stock=True)(PROMPTS, settings), engine_of(model)
    assert engine(PROMPTS, settings) == expected, "the first batch is made again"
    assert engine.groups.doubt in caplog.text
    assert len(caplog.messages) == 1, "announced once"


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
    ids = engines.token_ids(PROMPTS, engine.tokenizer, Settings())
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
    for ids, prompt in zip(engines.token_ids(prompts, tokenizer, settings), prompts, strict=True):
        rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(ids) == f"{rendered}<think></think>"


def test_only_prompts_of_text_get_the_tokenizers_special_tokens() -> None:
    """A chat template has written those of a conversation already."""
    tokenizer = chat_tokenizer()
    begin = TemplateProcessing(single="<|im_end|> $A", special_tokens=[("<|im_end|>", 257)])
    tokenizer.backend_tokenizer.post_processor = begin
    texts = ["1", "22"]
    assert engines.token_ids(texts, tokenizer, Settings()) == [tokenizer(text)["input_ids"] for text in texts]
    assert engines.token_ids(["1"], tokenizer, Settings())[0][0] == 257
    assert engines.token_ids([[{"role": "user", "content": "1"}]], tokenizer, Settings())[0][0] == 256


# ---- settings of training


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "min_p": 0.05}, None),
        ({"top_k": -1}, {"top_k": 0}),  # vLLM's "off"
        ({"top_k": None, "min_p": None}, {}),
        ({"temperature": None, "top_p": 0.5, "min_p": 0.0}, {"top_p": 0.5, "min_p": 0.0}),
        ({"temperature": 0.7, "generation_kwargs": {"temperature": 0.5}}, {"temperature": 0.5}),  # TRL's rule
        ({"generation_kwargs": {"min_p": 0.1, "do_sample": True}}, {"min_p": 0.1}),
    ],
)
def test_the_sampling_of_training_is_that_of_its_recipe_with_trls_defaults(
    recipe: dict[str, Any], changes: dict[str, Any] | None
) -> None:
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    trl = GRPOConfig("unused", report_to="none", use_cpu=True, bf16=False)
    assert {name: getattr(trl, name) for name in defaults} == defaults
    assert engines.training_sampling(recipe) == {**defaults, **(recipe if changes is None else changes)}


def test_keys_of_sampling_and_of_the_chat_template_are_checked() -> None:
    for recipe in ({"top_p": "high"}, {"generation_kwargs": {"top_p": [1]}}):
        with refused("`top_p`"):
            engines.training_sampling(recipe)
    assert engines.template_kwargs_of({}) is engines.template_kwargs_of({"chat_template_kwargs": {}}) is None
    assert engines.template_kwargs_of({"chat_template_kwargs": {"thinking": False}}) == {"thinking": False}
    with refused("`chat_template_kwargs`", "['thinking']"):
        engines.template_kwargs_of({"chat_template_kwargs": ["thinking"]})


# ---- tokenizers


def test_a_tokenizer_pads_with_its_end_token_if_it_has_no_other(tmp_path: Path) -> None:
    for pad, end, expected in (("<pad>", "<eos>", "<pad>"), (None, "<eos>", "<eos>"), (None, None, None)):
        tokenizer = byte_tokenizer()
        tokenizer.pad_token, tokenizer.eos_token = pad, end
        tokenizer.save_pretrained(tmp_path)
        with nullcontext() if expected else refused(tmp_path, "pad_token", "eos_token"):
            assert engines.load_tokenizer(str(tmp_path)).pad_token == expected
    chat_tokenizer().save_pretrained(tmp_path)
    template = ChatTemplate(Path("chat_template.jinja"), "text", None)
    assert engines.load_tokenizer(str(tmp_path), template).chat_template == "text"


# ---- models


def test_a_model_is_loaded_without_code_of_its_own_and_without_pickles(tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[dict[str, object]] = []

    def fails(name: str, **options: object) -> None:
        seen.append(options)
        raise OSError("no such\nfile")

    for loader in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM, peft.AutoPeftModelForCausalLM):
        monkeypatch.setattr(loader, "from_pretrained", fails)
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for folder in (model, adapter):
        folder.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    for folder in (model, adapter):
        with refused(folder, "no such file"):
            engines.load_model(str(folder))
    with refused(model, "no such file"):
        engines.saved_tokenizer(str(model))
    assert all(options["trust_remote_code"] is False for options in seen)
    assert [options.get("use_safetensors") for options in seen] == [True, True, None]


def test_a_model_keeps_the_dtype_of_its_files_and_has_finite_weights(tmp_path: Path) -> None:
    model = policy().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert engines.load_model(str(tmp_path)).dtype == torch.bfloat16
    model.lm_head.weight.data[3, 4] = float("nan")
    model.save_pretrained(tmp_path)
    with refused(tmp_path, "1", "lm_head.weight"):
        engines.load_model(str(tmp_path))


def test_an_adapters_base_keeps_its_layout_in_4_bits(tmp_path: Path, monkeypatch: Any) -> None:
    model = torch.nn.Linear(2, 2)
    model.support_avx512bf16_for_cpu = True
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(peft.AutoPeftModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    assert not engines.load_model(str(tmp_path)).support_avx512bf16_for_cpu


def test_folders_of_models_are_checked_before_they_are_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    with refused("runs/none"):
        engines.check_model("./runs/none")
    empty = tmp_path / "empty"
    empty.mkdir()
    with refused(empty):
        engines.check_model(str(empty))
    for step in (2, 10):
        (empty / f"checkpoint-{step}").mkdir()
    with refused(empty, empty / "checkpoint-10"):
        engines.check_model(str(empty))
    base, adapter = save_policy(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    save_file({"a": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    monkeypatch.chdir(tmp_path)

    def check(named: str | None) -> None:
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
        engines.check_model_folder(adapter)

    for named in ("base", "owner/model", "", None):
        check(named)
    with refused(adapter, tmp_path / "gone", "`base_model_name_or_path`"):
        check(str(tmp_path / "gone"))
    (base / "model.safetensors").write_bytes(b"damaged")
    with refused("base/model.safetensors"):
        check("base")
    with refused(base / "model.safetensors"):
        engines.check_model(str(base))
    (adapter / "adapter_model.safetensors").write_bytes(b"damaged")
    with refused(adapter):
        check(None)


def test_a_model_without_published_settings_has_those_of_its_configuration(tmp_path: Path) -> None:
    folder, adapter = save_policy(tmp_path / "m", eos_token_id=7), tmp_path / "adapter"
    adapter.mkdir()
    config = {"base_model_name_or_path": str(folder), "peft_type": "LORA"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert engines.published_config(str(adapter)).eos_token_id == 9
    (folder / "generation_config.json").unlink()
    for name in (folder, adapter):
        assert engines.published_config(str(name)).eos_token_id == 7


def test_the_dtype_of_a_model_is_that_of_its_file_or_unknown(tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "m")
    assert engines.checkpoint_dtype(str(folder)) == "float32"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: one for key, one in config.items() if "dtype" not in key}))
    assert engines.checkpoint_dtype(str(folder)) is None
    assert engines.checkpoint_dtype(str(tmp_path)) is None


@pytest.mark.parametrize("answers", [True, False])
def test_a_hub_that_does_not_answer_is_not_asked_for_a_dtype(monkeypatch: Any, answers: bool) -> None:
    """The dtype of a model of images and text is that of its text."""

    def read(name: str, **options: object) -> Any:
        assert options == {"local_files_only": not answers, "trust_remote_code": False}
        return SimpleNamespace(dtype=torch.float16, get_text_config=lambda: SimpleNamespace(dtype=torch.bfloat16))

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", read)
    monkeypatch.setattr(engines, "hub_answers", lambda: answers)
    assert engines.checkpoint_dtype("org/model") == "bfloat16"


# ---- quantized bases


@needs_bitsandbytes
def test_the_base_of_an_adapter_is_quantized_as_its_run_did(tmp_path: Path) -> None:
    def record(**recipe: Any) -> None:
        (tmp_path / "run.json").write_text(json.dumps({"recipe": {"model_name_or_path": "m", **recipe}}))

    record(load_in_8bit=True)
    assert engines.quantization_of(str(tmp_path)) == {}, "no adapter"
    (tmp_path / "adapter_config.json").write_text("{}")
    assert engines.quantization_of(str(tmp_path)) == {"quantization": "8 bits"}
    record(max_steps=3)
    assert engines.trained_quantization(tmp_path) is None
    for kind in ("nf4", "fp4"):
        record(load_in_4bit=True, bnb_4bit_quant_type=kind, use_bnb_nested_quant=True)
        (shown,) = engines.quantization_of(str(tmp_path)).values()
        assert shown.startswith("4 bits")
        assert kind in shown
        found = engines.trained_quantization(tmp_path)
        assert (found.load_in_4bit, found.bnb_4bit_use_double_quant) == (True, True)
    record(load_in_4bit=True, bnb_4bit_quant_type=7)
    with refused(tmp_path, "run.json"):
        engines.trained_quantization(tmp_path)


@pytest.mark.slow
@needs_bitsandbytes
def test_an_adapter_is_evaluated_on_the_base_in_4_bits_that_it_was_trained_on(tmp_path: Path) -> None:
    checkpoint = save_run(tmp_path)
    model = engines.load_model(str(checkpoint))
    text = "3 + 4 = 7"
    torch.testing.assert_close(log_probabilities(model, text), log_probabilities(trained_policy(tmp_path), text))
    assert needs_merging(str(checkpoint))
    options = {"dataset": "arithmetic", "split": "test[:2]", "max_new_tokens": 2, "prompt_format": "text"}
    plain = evaluate.evaluate_model(tmp_path / "base", output=tmp_path / "a", **options)
    assert "quantization" not in plain["made_with"]
    evaluate.evaluate_model(checkpoint, output=tmp_path / "b", **options)
    made_with = json.loads((tmp_path / "b" / "evaluation.json").read_text())["made_with"]
    assert made_with["dtype"] == "bfloat16"
    assert "nf4" in made_with["quantization"]
    (warning,) = comparison.compare(tmp_path / "a", tmp_path / "b")["warnings"]
    assert f"quantization not recorded and {made_with['quantization']}" in warning
