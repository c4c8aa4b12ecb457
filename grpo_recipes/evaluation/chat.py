"""`grpo-recipes chat`: a conversation with a trained model, with the prompts and the sampling of its training.

Each message becomes a prompt with the system prompt, the `prompt_template` and the chat template of the recipe. A model
that was trained on plain text sees one message at a time. An answer is printed while it is generated. Its control
characters are escaped, because a model's text must not control the terminal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer

from grpo_recipes.checks.tools import FACTORY, TOOLS
from grpo_recipes.data.load import load
from grpo_recipes.data.presets import Message, user_turn
from grpo_recipes.data.prompts import columns_of_prompt, phrased_text, prompt_of, system_text
from grpo_recipes.data.tables import listed
from grpo_recipes.evaluation.engines import generation_options, load_engine, seeded, token_ids
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.settings import (
    DEFAULT_NEW_TOKENS,
    Settings,
    chat_template_of,
    template_kwargs_of,
    training_sampling,
)
from grpo_recipes.generation.groups import decoding
from grpo_recipes.generation.models import base_model
from grpo_recipes.generation.stop_strings import Ends, StopStrings
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.recipe.trl_keys import stop_strings
from grpo_rewards.errors import UserError
from grpo_rewards.terminal import say


class Streamer(TextStreamer):
    """Streamer of transformers that prints an answer through `say`, and keeps it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a part of the answer, and a line feed after the last part."""
        self.text += text
        say(text, end="\n" if stream_end else "")


class Chat:
    """A conversation: its messages, and the model that answers them.

    Attributes:
        turns: Messages so far, without the system prompt.
    """

    def __init__(self, engine: Any, dataset: DatasetSpec, is_text: bool, settings: Settings, sampling: Any) -> None:
        self.model, self.tokenizer, self.published = engine.model.eval(), engine.tokenizer, engine.published
        self.dataset, self.is_text, self.settings, self.sampling = dataset, is_text, settings, sampling
        self.turns: list[Message] = []

    @torch.no_grad()
    def answer(self, text: str) -> str:
        """Print the answer to a message while it is generated, and return it.

        After Ctrl-C, the part of the answer that was printed stays in the conversation. A message that is refused does
        not stay.

        Raises:
            UserError: The conversation leaves no room in the model's context.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        turns = [*(() if self.is_text else self.turns), _worded(text, self.dataset)]
        prompt = prompt_of(turns, system_text(self.dataset), self.is_text)
        ids = torch.tensor(token_ids([prompt], self.tokenizer, self.settings), device=self.model.device)
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or float("inf")
        room = int(min(self.settings.max_new_tokens, context - ids.shape[1]))
        if room < 1:
            fix = "write a shorter message, or begin a new conversation with an empty line"
            raise UserError("prompt", f"it has {ids.shape[1]:,} tokens, and the model's context has {context:,}", fix)
        settings = replace(self.settings, max_new_tokens=room)
        options = generation_options(settings, self.model.generation_config, self.tokenizer)
        if self.settings.temperature > 0:
            options |= {**self.sampling, "temperature": self.settings.temperature}
        ends = [Ends(StopStrings(self.settings.stop, self.tokenizer))] if self.settings.stop else []
        published = self.published.aside(self.model, GenerationConfig(**options))
        streamer, mask = Streamer(self.tokenizer), torch.ones_like(ids)
        try:
            with published, decoding(base_model(self.model), None, ends):
                tokens = self.model.generate(input_ids=ids, attention_mask=mask, **options, streamer=streamer)
        except KeyboardInterrupt:
            streamer.end()
            raise
        finally:
            self.turns = [*turns, {"role": "assistant", "content": streamer.text}]
        if tokens.shape[1] == ids.shape[1] + room and tokens[0, -1] not in options["eos_token_id"]:
            say(f"(cut at {room} tokens: --max_new_tokens raises the limit)", to_stderr=True)
        return streamer.text


def chat(
    model: str,
    recipe: str | None = None,
    prompt: str | None = None,
    temperature: float | None = None,
    max_new_tokens: int | None = None,
    seed: int = 0,
) -> None:
    """Answer a prompt, or one line of standard input after another. None stands for the recipe's value.

    Raises:
        UserError: The model can't be loaded, or an option, the recipe or the prompt is wrong.
        KeyboardInterrupt: Ctrl-C stopped the answer to the prompt.
    """
    saved = SavedModel.checked(model)
    trained = saved.recipe(recipe)
    if key := next(filter(trained.get, (TOOLS, FACTORY)), None):
        raise UserError(f"`{key}`", "a conversation runs no tools", "use `grpo-recipes evaluate`")
    sampling = training_sampling(trained)
    limit = trained.get("max_completion_length") or DEFAULT_NEW_TOKENS
    settings = Settings(
        temperature=sampling["temperature"] if temperature is None else temperature,
        max_new_tokens=limit if max_new_tokens is None else max_new_tokens,
        seed=seed,
        strict=None,
        stop=stop_strings(trained.get("generation_kwargs")),
        chat_template_kwargs=template_kwargs_of(trained),
    )
    dataset = DatasetSpec.parse(trained.get("dataset") or {"path": "none"})
    is_text = None if dataset.prompt_format is None else dataset.prompt_format == "text"
    if is_text is None and trained.get("dataset"):  # the rows show the form of prompts
        is_text = isinstance(load(replace(dataset, pass_rate=None, eval_share=None))[0]["prompt"], str)
    if len(columns := columns_of_prompt(dataset) or ()) > 1:
        say(f"prompts have the columns {listed(columns)}: write them into a message, as in training", to_stderr=True)
    tokenizer = saved.padding_tokenizer(chat_template_of(trained, is_named=recipe is not None))
    if is_text is False and not tokenizer.chat_template:
        problem = "its tokenizer has no chat template, and the recipe's prompts are messages"
        raise UserError(model, problem, "name a recipe with a `chat_template_path`")
    engine = load_engine(saved, tokenizer)
    talk = Chat(engine, dataset, is_text or not tokenizer.chat_template, settings, sampling)
    with seeded(engine.model, seed):
        if prompt is None:
            converse(talk)
        else:
            talk.answer(prompt)


def converse(talk: Chat) -> None:
    """Answer one line of standard input after another, until its end, or Ctrl-C while no answer is generated."""
    lines = "is a prompt of its own" if talk.is_text else "continues the conversation, an empty line begins a new one"
    say(f"each line {lines}; Ctrl-C stops an answer, Ctrl-D leaves", to_stderr=True)
    while True:
        try:
            text = input()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if text.strip():
                talk.answer(text)
            else:
                talk.turns = []
        except UserError as error:
            say(error, to_stderr=True)
        except KeyboardInterrupt:
            say("(stopped)", to_stderr=True)


def _worded(text: str, dataset: DatasetSpec) -> Message:
    """Return the user's message with a text, worded as the dataset words its rows."""
    text = text.encode("utf-8", "replace").decode()  # a terminal in another encoding leaves lone surrogates
    return user_turn(phrased_text(dataset, text))[0]
