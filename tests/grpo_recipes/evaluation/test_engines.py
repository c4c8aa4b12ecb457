"""Engines of an evaluation: group decoding as in training, the comparison with the model, and stop strings."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM
from trl import GRPOConfig

from grpo_recipes import cli
from grpo_recipes.checks.tokenizer import ChatTemplate
from grpo_recipes.evaluation import comparison, engines, evaluate
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.vllm_engine import needs_merging
from grpo_recipes.generation import groups, kv_cache
from grpo_rewards.errors import UserError
from tests.support.exact_generation import exact_generation
from tests.support.quantized import needs_bitsandbytes, save_run, trained_policy
from tests.support.short_runs import log_probabilities
from tests.support.tiny import CHATML, byte_tokenizer, chat_tokenizer, policy, save_policy

PROMPTS = [prompt for prompt in ("1 =", "33 + 4 =", "b", "a longer prompt") for _ in range(6)]
STOP = ("b", "W", "zz", "=7")
TEMPLATE = ChatTemplate(Path("chat_template.jinja"), "text", None)


@pytest.fixture
def logged_sentences(caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that returns the sentences logged by the engine."""
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records if record.name == engines.__name__]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that collects the sizes of the batches decoded in groups."""
    sizes: list[int] = []
    run = groups.Batch.run
    monkeypatch.setattr(groups.Batch, "run", lambda self: sizes.append(self.size) or run(self))
    return sizes


@pytest.fixture
def same_stream() -> Iterator[None]:
    with exact_generation():
        yield


def stock(model: Any, prompts: list[str], settings: Settings, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the completions of transformers' own loop."""
    with monkeypatch.context() as patched:
        patched.setattr(Transformers, "_use_stock_loop", lambda *_: None)
        patched.setattr(engines, "unfit", lambda _: "in a test")
        engine = Transformers(model, byte_tokenizer())
        engine.stock_because = "in a test"
        return engine(prompts, settings)


def ending() -> Any:
    """Return a policy that ends its completions at many lengths."""
    model = policy()
    model.generation_config.eos_token_id = list(range(1, 60))
    return model


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.usefixtures("same_stream")
def test_group_decoding_gives_the_completions_of_transformers_own_loop(
    temperature: float, decoded: list[int], logged_sentences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = ending(), Settings(temperature=temperature, max_new_tokens=20, batch_size=16)
    completions = Transformers(model, byte_tokenizer())(PROMPTS, settings)
    assert decoded == [16, 8]
    assert logged_sentences() == []
    assert completions == stock(model, PROMPTS, settings, monkeypatch)
    assert len(decoded) == 2, "the other ones were not"
    assert len(set(map(len, completions))) > 3


def test_only_rows_of_the_first_batch_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, checked = ending(), []
    differences = engines.differences

    def compared(*given: Any) -> torch.Tensor:
        checked.append((len(given[1]), given[4]))
        return differences(*given)

    monkeypatch.setattr(engines, "differences", compared)
    for temperature in (0.5, 0.0):
        engine = Transformers(model, byte_tokenizer())
        for _ in range(2):
            engine((PROMPTS * 3)[:64], Settings(temperature=temperature, max_new_tokens=4, batch_size=64))
    assert checked == [(32, 0.5), (32, 1.0)], "greedy decoding divides no logit"
    Transformers(model, byte_tokenizer())(PROMPTS, Settings(max_new_tokens=4))
    assert checked[2:] == [(24, 1.0)], "all of a small batch"


def moved_nothing(self: Any, holes: list[int], movers: list[int], count: int) -> None:
    """Break the cache: drop the last rows instead of the finished ones."""
    self.buffers = [buffer[:count] for buffer in self.buffers]
    self.show(self.start, self.stop)


def test_a_mismatch_switches_to_transformers_own_loop(
    decoded: list[int], logged_sentences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = ending(), Settings(max_new_tokens=20, batch_size=12)
    expected = stock(model, PROMPTS, settings, monkeypatch)
    monkeypatch.setattr(kv_cache.Buffer, "keep", moved_nothing)
    assert Transformers(model, byte_tokenizer())(PROMPTS, settings) == expected
    assert decoded == [12], "the first batch, which was then made again"
    (sentence,) = logged_sentences()
    assert "own loop: group decoding picks tokens under other log-probabilities than the model's (by " in sentence


def test_a_model_without_group_decoding_uses_transformers_own_loop(logged_sentences: Any, decoded: list[int]) -> None:
    model = policy(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    engine = Transformers(model, byte_tokenizer())
    for _ in range(2):
        assert len(engine(PROMPTS, Settings(max_new_tokens=3, batch_size=8))) == len(PROMPTS)
    assert decoded == []
    (sentence,) = logged_sentences()
    assert "a rotary table of type dynamic" in sentence


def test_a_batch_that_group_decoding_declines_is_made_by_transformers_own_loop(
    logged_sentences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = ending(), Settings(max_new_tokens=8, batch_size=8)
    expected = stock(model, PROMPTS, settings, monkeypatch)
    monkeypatch.setattr(groups, "reason_to_decline", lambda *_, **__: "a reason")
    assert Transformers(model, byte_tokenizer())(PROMPTS, settings) == expected
    assert logged_sentences() == ["completions are generated by transformers' own loop: a reason"]


def test_a_model_in_training_is_evaluated_without_dropout_and_goes_on_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, settings = policy(attention_dropout=0.9), Settings(max_new_tokens=8)
    expected = Transformers(model.eval(), byte_tokenizer())(PROMPTS, settings)
    assert not model.training
    assert Transformers(model.train(), byte_tokenizer())(PROMPTS, settings) == expected
    assert model.training

    def interrupted(**_: Any) -> None:
        assert not model.training
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Transformers(model, byte_tokenizer())(PROMPTS, settings)
    assert model.training


# ---- stop strings


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(("in_groups", "pad_is_eos"), list(product([True, False], [True, False])))
def test_a_completion_ends_at_its_first_stop_string(
    in_groups: bool, pad_is_eos: bool, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer()
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    if not in_groups:
        monkeypatch.setattr(engines, "unfit", lambda _: "in a test")
    settings = Settings(temperature=1.0, max_new_tokens=24, batch_size=48, stop=STOP)
    completions = Transformers(policy(), tokenizer)(PROMPTS * 4, settings)
    assert bool(decoded) is in_groups
    stopped = [text for text in completions if text.endswith(STOP)]
    assert len(stopped) > 10
    assert any(len(text) > 1 for text in stopped)
    for text in completions:
        assert not any(stop in text[:-1] for stop in STOP), "cut at the first one"


def test_an_evaluation_uses_the_stop_strings_of_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    def complete(prompts: list[Any], settings: Settings) -> list[str]:
        seen.append(settings)
        return ["<think>x</think><answer>1</answer>"] * len(prompts)

    complete.sampling = lambda settings: {}
    monkeypatch.setattr(evaluate, "load_engine", lambda *_: complete)
    monkeypatch.setattr(evaluate, "load_tokenizer", lambda *_: chat_tokenizer())
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "model_name_or_path: m\ndataset: {name: arithmetic}\nrewards: gsm8k_correctness\n"
        "generation_kwargs: {stop: ['</answer>']}\n"
    )
    monkeypatch.setattr(engines, "is_missing", lambda _: False)
    monkeypatch.setattr(evaluate, "weights_fingerprint", lambda _: {})
    command = ["evaluate", "owner/m", "--recipe", str(recipe), "--limit", "2", "--output", str(tmp_path / "e")]
    assert cli.main(command) == 0
    assert seen[0].stop == ("</answer>",)
    assert '"</answer>"' in (tmp_path / "e" / "evaluation.json").read_text()


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
    assert engines.token_ids(["1", "22"], tokenizer, Settings()) == [
        tokenizer(text)["input_ids"] for text in ["1", "22"]
    ]
    assert engines.token_ids(["1"], tokenizer, Settings())[0][0] == 257
    assert engines.token_ids([[{"role": "user", "content": "1"}]], tokenizer, Settings())[0][0] == 256


def test_an_evaluation_renders_prompts_as_its_recipe_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    model = save_policy(tmp_path / "m")
    chat_tokenizer(THINKING).save_pretrained(model)
    seen: list[str] = []
    generate = LlamaForCausalLM.generate

    def spy(model: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        seen.append(chat_tokenizer().decode(input_ids[0]))
        return generate(model, input_ids, **options)

    monkeypatch.setattr(LlamaForCausalLM, "generate", spy)
    text = "model_name_or_path: m\ndataset: {name: arithmetic, system_prompt: none}\nrewards: gsm8k_correctness\n"
    recipe = tmp_path / "r.yaml"
    options = ["--limit", "1", "--max_new_tokens", "4", "--output", str(tmp_path / "e"), "--recipe", str(recipe)]
    recipe.write_text(text + "chat_template_kwargs: {enable_thinking: false}\n")
    assert cli.main(["evaluate", str(model), *options]) == 0
    assert seen
    assert all(prompt.endswith("<|im_start|>assistant\n<think></think>") for prompt in seen)
    recipe.write_text(text)
    assert cli.main(["evaluate", str(model), *options]) == 2
    assert "holds another evaluation: settings.chat_template_kwargs was" in capsys.readouterr().err


@pytest.mark.slow
@needs_bitsandbytes
def test_an_adapter_is_evaluated_on_the_base_in_4_bits_that_it_was_trained_on(tmp_path: Path) -> None:
    checkpoint = save_run(tmp_path)
    model = engines.load_model(str(checkpoint))
    text = "3 + 4 = 7"
    torch.testing.assert_close(log_probabilities(model, text), log_probabilities(trained_policy(tmp_path), text))
    assert needs_merging(str(checkpoint)) == "a base that was quantized for training"


@pytest.mark.slow
@needs_bitsandbytes
def test_an_evaluation_records_how_the_base_is_quantized(tmp_path: Path) -> None:
    checkpoint = save_run(tmp_path)
    options = {"dataset": "arithmetic", "limit": 2, "max_new_tokens": 2, "prompt_format": "text"}
    plain = evaluate.evaluate_model(tmp_path / "base", output=tmp_path / "a", **options)
    assert "quantization" not in plain["made_with"]
    evaluate.evaluate_model(checkpoint, output=tmp_path / "b", **options)
    made_with = json.loads((tmp_path / "b" / "evaluation.json").read_text())["made_with"]
    assert made_with["dtype"] == "bfloat16"
    assert made_with["quantization"] == "4 bits (nf4)"
    (warning,) = comparison.compare(tmp_path / "a", tmp_path / "b")["warnings"]
    assert "quantization not recorded and 4 bits (nf4)" in warning


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


@pytest.mark.parametrize("key", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_a_sampling_key_that_is_no_number_is_refused(key: str) -> None:
    for recipe in ({key: "high"}, {"generation_kwargs": {key: [1]}}):
        with pytest.raises(UserError, match=f"`{key}` is "):
            engines.training_sampling(recipe)


@pytest.mark.parametrize(
    ("declared", "ends"), [(None, [7]), (7, [7]), (3, [3, 7]), (0, [0, 7]), ([9, 7, 9], [7, 9]), ([], [7])], ids=str
)
def test_a_completion_ends_at_any_token_that_model_or_tokenizer_declare(declared: Any, ends: list[int]) -> None:
    model = SimpleNamespace(eos_token_id=declared)
    assert engines.end_tokens(model, SimpleNamespace(eos_token_id=7)) == ends
    assert 7 in ends
    without = engines.end_tokens(model, SimpleNamespace(eos_token_id=None))
    assert without == sorted(set(declared if isinstance(declared, list) else [declared]) - {None})


def test_chat_template_arguments_are_a_mapping_or_nothing() -> None:
    assert engines.template_kwargs_of({}) is None
    assert engines.template_kwargs_of({"chat_template_kwargs": {}}) is None
    assert engines.template_kwargs_of({"chat_template_kwargs": {"thinking": False}}) == {"thinking": False}
    with pytest.raises(UserError, match="`chat_template_kwargs` is "):
        engines.template_kwargs_of({"chat_template_kwargs": ["thinking"]})


@pytest.mark.parametrize(("answers", "local_only"), [(True, False), (False, True)])
def test_a_hub_that_does_not_answer_is_not_asked_for_a_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool, local_only: bool
) -> None:
    """A folder needs no hub."""
    asked: dict[str, dict[str, object]] = {}

    def read(name: str, **options: object) -> None:
        asked[name] = options
        raise OSError

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", read)
    monkeypatch.setattr(engines, "hub_answers", lambda: answers)
    assert [engines.checkpoint_dtype(name) for name in ("org/model", str(tmp_path))] == [None, None]
    assert asked == {
        "org/model": {"local_files_only": local_only, "trust_remote_code": False},
        str(tmp_path): {"local_files_only": True, "trust_remote_code": False},
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {}),
        ({"load_in_8bit": True}, {"quantization": "8 bits"}),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"quantization": "4 bits (nf4)"}),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
            {"quantization": "4 bits (fp4)"},
        ),
    ],
)
def test_the_record_of_an_evaluation_tells_how_the_base_is_quantized(
    config: dict[str, Any] | None, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = transformers.BitsAndBytesConfig(**config) if config else None
    monkeypatch.setattr(engines, "trained_quantization", lambda folder: found)
    assert engines.quantization_of(str(tmp_path)) == {}, "no adapter"
    (tmp_path / "adapter_config.json").write_text("{}")
    assert engines.quantization_of(str(tmp_path)) == expected


def test_a_record_that_describes_no_model_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record: list[Any] = [None]
    monkeypatch.setattr(engines, "record_of_model", lambda folder: record[0])
    monkeypatch.setattr(engines, "missing_quantization", lambda recipe: [])
    assert engines.trained_quantization(tmp_path) is None
    record[0] = {"recipe": {"model_name_or_path": "m", "max_steps": 3}}
    assert engines.trained_quantization(tmp_path) is None, "the base was not quantized"
    record[0] = {"recipe": {"load_in_4bit": True, "bnb_4bit_quant_type": 7}}
    with pytest.raises(UserError, match="its run.json describes no model .*: restore the file"):
        engines.trained_quantization(tmp_path)
    for error in (AttributeError("a"), TypeError("a"), ValueError("a")):
        monkeypatch.setattr(engines, "get_quantization_config", Mock(side_effect=error))
        with pytest.raises(UserError, match=r"its run.json describes no model \(a\): restore the file"):
            engines.trained_quantization(tmp_path)
    monkeypatch.setattr(engines, "missing_quantization", lambda recipe: ["bitsandbytes is missing"])
    with pytest.raises(UserError, match="was trained on a quantized base: bitsandbytes is missing"):
        engines.trained_quantization(tmp_path)


def test_a_tokenizer_pads_with_its_end_token_if_it_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []
    for pad, end, expected in (("<pad>", "<end>", "<pad>"), (None, "<end>", "<end>")):
        tokenizer = SimpleNamespace(pad_token=pad, eos_token=end)
        monkeypatch.setattr(engines, "saved_tokenizer", lambda *words, found=tokenizer: given.append(words) or found)
        assert engines.load_tokenizer("m", TEMPLATE).pad_token == expected
    assert given == [("m", TEMPLATE)] * 2
    monkeypatch.setattr(engines, "saved_tokenizer", lambda *given: SimpleNamespace(pad_token=None, eos_token=None))
    with pytest.raises(UserError, match="m: its tokenizer has neither a `pad_token` nor an `eos_token`: set one in"):
        engines.load_tokenizer("m")


@pytest.mark.parametrize(
    ("error", "says"), [(OSError("no such\nfile"), "no such file"), (RuntimeError(), "RuntimeError")], ids=str
)
def test_a_model_or_tokenizer_that_can_not_be_loaded_is_named_with_the_reason(
    error: Exception, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, dict[str, object]]] = []

    def fails(name: str, **options: object) -> None:
        seen.append((name, options))
        raise error

    for loader in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM, peft.AutoPeftModelForCausalLM):
        monkeypatch.setattr(loader, "from_pretrained", fails)
    monkeypatch.setattr(engines, "trained_quantization", lambda folder: ("quantized as", folder))
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for folder in (model, adapter):
        folder.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "x"}')
    for folder in (model, adapter):
        with pytest.raises(UserError) as raised:
            engines.load_model(str(folder))
        assert str(raised.value) == f"{folder}: the model can't be loaded: {says}"
    with pytest.raises(UserError) as raised:
        engines.saved_tokenizer(str(model))
    assert str(raised.value) == f"{model}: its tokenizer can't be loaded: {says}"
    plain = {"dtype": "auto", "use_safetensors": True, "trust_remote_code": False}
    assert seen == [
        (str(model), {**plain}),
        (str(adapter), {**plain, "quantization_config": ("quantized as", adapter)}),
        (str(model), {"trust_remote_code": False}),
    ]


def test_a_model_keeps_the_dtype_of_its_files(tmp_path: Path) -> None:
    policy().to(torch.bfloat16).save_pretrained(tmp_path)
    assert engines.load_model(str(tmp_path)).dtype == torch.bfloat16


def test_an_adapters_base_keeps_its_layout_in_4_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = torch.nn.Module(), []
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr(engines, "trained_quantization", lambda folder: None)
    monkeypatch.setattr(engines, "keep_4bit_layout", kept.append)
    monkeypatch.setattr(peft.AutoPeftModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    assert engines.load_model(str(tmp_path)) is model
    assert kept == [model]


def test_an_engine_is_on_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(to=lambda device: f"on {device}")
    monkeypatch.setattr(engines, "load_model", lambda name: model)
    for has_gpu, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        engine = engines.load_engine("m", "tokenizer")
        assert (engine.model, engine.tokenizer) == (f"on {device}", "tokenizer")


def test_an_adapters_local_base_is_checked_as_the_adapter_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    names = ("check_descriptions", "check_weight_files")
    for name in names:
        monkeypatch.setattr(engines, name, lambda folder, name=name: calls.append((name, str(folder))))
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    for folder, file in ((base, "config.json"), (adapter, "adapter_config.json")):
        folder.mkdir()
        (folder / file).write_text("{}")
    monkeypatch.chdir(tmp_path)
    for named, checked in (
        (str(base), [adapter, base]),
        ("base", [adapter, Path("base")]),
        ("owner/model", [adapter]),
        ("", [adapter]),
        (None, [adapter]),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
        engines.check_model_folder(adapter)
        assert calls == [(name, str(folder)) for folder in checked for name in names]
        calls.clear()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(UserError, match="adapter is an adapter, and its base .*gone is missing: set `base_model_name"):
        engines.check_model_folder(adapter)


def test_a_folder_without_a_model_is_refused_with_its_newest_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model .*: name the folder of a model, an adapter or a finished run$"):
        engines.check_model_folder(tmp_path)
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    with pytest.raises(UserError, match=r"holds no model .*: its newest checkpoint is .*checkpoint-10; name that fold"):
        engines.check_model(str(tmp_path))


def test_a_damaged_weight_file_is_refused_with_a_fix(tmp_path: Path) -> None:
    folder = save_policy(tmp_path)
    engines.check_model(str(folder))
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=": copy or download the folder again, or name another checkpoint$"):
        engines.check_model(str(folder))


def test_a_model_without_published_settings_has_those_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_policy(tmp_path / "m", eos_token_id=7)
    (tmp_path / "adapter").mkdir()
    config = {"base_model_name_or_path": str(folder), "peft_type": "LORA"}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert engines.published_config(str(tmp_path / "adapter")).eos_token_id == 9
    (folder / "generation_config.json").unlink()
    read, seen = transformers.AutoConfig.from_pretrained, []
    monkeypatch.setattr(
        transformers.AutoConfig, "from_pretrained", lambda name, **options: seen.append(options) or read(name)
    )
    for name in ("m", "adapter"):
        assert engines.published_config(str(tmp_path / name)).eos_token_id == 7
    assert seen == [{"trust_remote_code": False}] * 2


def test_a_model_without_positions_reads_any_number_of_tokens() -> None:
    model = policy()
    assert Transformers(model, byte_tokenizer()).positions == model.config.max_position_embeddings
    for config in ({}, {"max_position_embeddings": None}):
        endless = SimpleNamespace(config=SimpleNamespace(**config))
        assert Transformers(endless, None).positions == float("inf")


def test_the_sampling_of_greedy_decoding_names_no_filter() -> None:
    engine = Transformers(policy(), byte_tokenizer())
    assert engine.sampling(Settings(max_new_tokens=3, stop=("b",))) == {
        "do_sample": False,
        "repetition_penalty": 1.0,
        "max_new_tokens": 3,
        "eos_token_id": [1],
        "pad_token_id": 0,
        "stop": ["b"],
    }


def test_each_completion_is_as_long_as_its_row_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    engine = Transformers(policy(), byte_tokenizer())

    def generated(prompts: list[list[int]], settings: Settings) -> list[list[int]]:
        lengths.append(settings.max_new_tokens)
        return [[1, 2, 3, 4, 5] for _ in prompts]

    monkeypatch.setattr(engine, "generate_padded", generated)
    settings = Settings(max_new_tokens=9, strict=None)
    assert engine.generate([[1], [2], [3]], settings, [2, 5, 4]) == [[1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4]]
    assert engine.generate([[1]], settings) == [[1, 2, 3, 4, 5]]
    assert lengths == [5, 9]
    with pytest.raises(ValueError, match="shorter"):
        engine.generate([[1], [2]], settings, [2])


def test_a_completion_keeps_its_end_token_and_no_padding() -> None:
    engine = Transformers(ending(), byte_tokenizer())
    made = engine.generate(engines.token_ids(PROMPTS, engine.tokenizer, Settings()), Settings(max_new_tokens=20))
    ends = set(range(1, 60))
    assert {len(tokens) for tokens in made} > {1}
    for tokens in made:
        assert not ends & set(tokens[:-1])
        assert tokens[-1] in ends or len(tokens) == 20


def test_the_dtype_of_a_model_is_that_of_its_file_or_unknown(tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "m")
    assert engines.checkpoint_dtype(str(folder)) == "float32"
    config = json.loads((folder / "config.json").read_text())
    for name in ("dtype", "torch_dtype"):
        config.pop(name, None)
    (folder / "config.json").write_text(json.dumps(config))
    assert engines.checkpoint_dtype(str(folder)) is None


@pytest.mark.parametrize(
    ("of_text", "of_all", "expected"),
    [
        (torch.bfloat16, torch.float32, "bfloat16"),
        (None, torch.float16, "float16"),
        (torch.float32, None, "float32"),
        (None, None, None),
    ],
)
def test_the_dtype_of_a_model_of_images_and_text_is_that_of_its_text(
    of_text: torch.dtype | None, of_all: torch.dtype | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(dtype=of_all, get_text_config=lambda: SimpleNamespace(dtype=of_text))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: config)
    monkeypatch.setattr(engines, "hub_answers", lambda: True)
    assert engines.checkpoint_dtype("owner/model") == expected


def test_a_folder_that_does_not_exist_is_named() -> None:
    with pytest.raises(UserError, match="^runs/none: the model can't be loaded: there is no such folder"):
        engines.check_model("./runs/none")


@pytest.mark.parametrize(("device", "seeded"), [("cuda:1", [torch.device("cuda:1")]), ("cpu", [])])
def test_the_random_state_of_the_models_gpu_is_restored(
    device: str, seeded: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    forked: list[list[torch.device]] = []
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext(forked.append(devices)))
    state = torch.get_rng_state()
    with engines.seeded(SimpleNamespace(device=torch.device(device)), 3):
        drawn = torch.rand(2)
    torch.set_rng_state(state)
    assert forked == [seeded]
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_one_token_of_the_first_batch_under_another_log_probability_is_a_mismatch(
    logged_sentences: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 the largest difference decides."""
    gaps = torch.zeros(1_000)
    monkeypatch.setattr(engines, "differences", lambda *_: gaps)
    for gap, sentences in ((5e-5, 0), (2e-4, 1)):
        gaps[7] = gap
        Transformers(ending(), byte_tokenizer())(PROMPTS, Settings(max_new_tokens=2))
        assert len(logged_sentences()) == sentences
    assert "the first batch" in logged_sentences()[0]


def test_a_turn_that_was_not_recorded_is_not_compared() -> None:
    engine = Transformers(policy(), byte_tokenizer())
    assert engine._mismatch({}, [], None) == ""
    assert engine._mismatch({}, [], SimpleNamespace(declined="too wide", log_probs=[0.0])) == ""
    assert engine._mismatch({}, [], SimpleNamespace(declined="", log_probs=None)) == ""
