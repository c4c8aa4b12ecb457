"""Prompts as the model receives them: rendered, measured in tokens, and limited."""

import datasets
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from grpo_recipes.data.rendering import PromptTools, limit_prompts, rendered
from grpo_recipes.recipe.dataset import DatasetSpec
from tests.support.errors import refused
from tests.support.tiny import byte_tokenizer


@pytest.fixture(scope="module")
def word_tokenizer():
    """Return a tokenizer with one token per word after [BOS], and a chat template with [SYS], [USR] and [GEN]."""
    words = ["[UNK]", "[BOS]", "[SYS]", "[USR]", "[GEN]", *(f"w{n}" for n in range(20))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="[BOS]", unk_token="[UNK]")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[SYS] ' if m['role'] == 'system' else '[USR] ' }}{{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}[GEN]{% endif %}"
    )
    return tokenizer


def words(count):
    return " ".join(f"w{n}" for n in range(count))


def conversation(count):
    return [{"role": "system", "content": "w0 w1"}, {"role": "user", "content": words(count)}]


def as_dataset(prompts):
    return datasets.Dataset.from_dict({"prompt": prompts, "answer": [str(n) for n in range(len(prompts))]})


def test_without_a_limit_the_dataset_is_unchanged(word_tokenizer):
    dataset = as_dataset([words(9)])
    assert limit_prompts(dataset, DatasetSpec("gsm8k"), word_tokenizer) == (dataset, 0)


def test_longer_messages_are_dropped_and_counted(word_tokenizer):
    # [SYS] w0 w1 [USR] <question> [GEN] = question + 5
    dataset = as_dataset([conversation(5), conversation(6), conversation(15)])
    kept, dropped = limit_prompts(dataset, DatasetSpec("gsm8k", max_prompt_tokens=11), word_tokenizer)
    assert (kept["answer"][:], dropped) == (["0", "1"], 1)


def test_longer_messages_are_cut_from_the_left_of_the_question(word_tokenizer, monkeypatch):
    monkeypatch.setattr("grpo_recipes.data.rendering.BATCH", 2)
    spec = DatasetSpec("gsm8k", max_prompt_tokens=9, overlong_prompts="cut_left")
    lengths = [3, 6, 4, 9, 2]
    dataset = as_dataset([conversation(length) for length in lengths])
    kept, cut = limit_prompts(dataset, spec, word_tokenizer)
    assert cut == 2
    assert kept.features == dataset.features
    contents = [words(length).split()[-4:] for length in lengths]
    assert [prompt[0] for prompt in kept["prompt"]] == [conversation(1)[0]] * 5
    assert [prompt[1]["content"].split() for prompt in kept["prompt"]] == contents
    assert kept["answer"][:] == list("01234")


def test_a_character_that_a_cut_splits_is_left_out():
    tokenizer = byte_tokenizer()
    spec = DatasetSpec("gsm8k", prompt_format="text", max_prompt_tokens=4, overlong_prompts="cut_left")
    kept, _ = limit_prompts(as_dataset(["a\u20acbc"]), spec, tokenizer)  # the euro sign has three bytes
    assert kept["prompt"][:] == ["bc"]


def test_a_prompt_is_rendered_as_the_model_receives_it(word_tokenizer):
    assert rendered("w1 w2", word_tokenizer, {}) == "w1 w2"
    assert rendered(conversation(2), word_tokenizer, {}) == "[SYS] w0 w1 [USR] w0 w1 [GEN]"
    other = {"chat_template": "{{ messages|length }}{{ x }}", "x": "!"}
    assert rendered(conversation(2), word_tokenizer, other) == "2!"
    given = {"chat_template": "{% for m in messages %}w1 w2 {% endfor %}{{ x }}", "x": "w3"}
    spec = DatasetSpec("gsm8k", max_prompt_tokens=5)
    assert limit_prompts(as_dataset([conversation(9)]), spec, word_tokenizer, given)[1] == 0
    spec = DatasetSpec("gsm8k", max_prompt_tokens=4)
    with refused("", "5"):
        limit_prompts(as_dataset([conversation(9)]), spec, word_tokenizer, given)


def test_the_tools_of_a_prompt_are_those_of_its_environment():
    one, two = {"name": "one"}, {"name": "two"}
    assert PromptTools({None: [one]}).template_kwargs() == {"tools": [one]}
    assert PromptTools({None: [one]}).template_kwargs("a") == {"tools": [one]}
    by_name = PromptTools({"a": [two], "b": []}, "template")
    assert by_name.template_kwargs("a") == {"tools": [two], "chat_template": "template"}
    assert by_name.template_kwargs("b") == {"tools": None, "chat_template": "template"}


def test_longer_text_keeps_its_last_tokens(word_tokenizer):
    spec = DatasetSpec("gsm8k", prompt_format="text", max_prompt_tokens=4, overlong_prompts="cut_left")
    kept, cut = limit_prompts(as_dataset([words(3), words(10)]), spec, word_tokenizer)
    assert (kept["prompt"][:], cut) == ([words(3), "w7 w8 w9"], 1)  # [BOS] is the fourth token


def test_a_limit_that_leaves_no_prompt_is_refused(word_tokenizer):
    for policy, figures in (("drop", (2, 4, 8)), ("cut_left", (4,))):
        spec = DatasetSpec("gsm8k", max_prompt_tokens=4, overlong_prompts=policy)
        with refused("`dataset.max_prompt_tokens`", *figures):
            limit_prompts(as_dataset([conversation(3), conversation(4)]), spec, word_tokenizer)


def test_the_oldest_turns_are_dropped_up_to_a_later_question(word_tokenizer):
    roles = ("system", "user", "assistant", "user")
    turns = [{"role": role, "content": f"w{n}"} for n, role in enumerate(roles)]
    for limit, kept in ((9, turns), (8, [turns[0], turns[3]]), (5, [turns[0], turns[3]])):
        spec = DatasetSpec("gsm8k", max_prompt_tokens=limit, overlong_prompts="cut_left")
        made, cut = limit_prompts(as_dataset([turns]), spec, word_tokenizer)
        assert (made[0]["prompt"], cut) == (kept, kept is not turns)
