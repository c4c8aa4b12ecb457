"""Datasets by name: what a recipe's `dataset` key may say, and the rows that it stands for.

`load` turns a `DatasetSpec` into the two columns that training and evaluation need, `prompt` and `answer` (the final answer
alone), beside the other columns of the rows, which a reward may ask for. A dataset is read by the function that `_READERS`
holds under its name: `gsm8k` (a hub id, a `save_to_disk` folder or a JSONL file), `rlaif` (the same, in MiniMind's schema),
`arithmetic` (word problems made here, no network) or `scored` (recorded responses with their rewards, for
`grpo_recipes.training.offline`; its columns are those of `_read_scored`).
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeGuard, TypeVar

import datasets
import pyarrow as pa

from grpo_recipes.recipe.arithmetic import DEFAULT_ARITHMETIC_SIZE, arithmetic_problems
from grpo_recipes.recipe.hub import cache_only_if_hub_is_silent, is_missing
from grpo_recipes.recipe.specs import DatasetName, DatasetSpec, OfflineSpec, PromptStyle
from grpo_rewards.errors import UserError

GSM8K_HUB_ID = "openai/gsm8k"
GSM8K_HUB_CONFIG = "main"
RLAIF_PLACEHOLDER = "空"
"""What MiniMind's RLAIF files write where the assistant's last turn is to be generated ("empty")."""

PROMPT_STYLES: Mapping[PromptStyle, str | None] = MappingProxyType(
    {
        # "GRPO from scratch": SYSTEM_PROMPT, stripped as its build_prompt does.
        "reasoning": "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>",
        # "Full-vocabulary KL": format_dataset.
        "think": (
            "Solve the math problem step-by-step, providing reasoning in <think> tags "
            "and the final answer in <answer> tags."
        ),
        # MiniMind: the system turn of its training prompts.
        "minimind": "你是 MiniMind，是一个有用的人工智能助手。",
        "none": None,
    }
)
"""The source documents' system prompts by name; `none` sends the question alone."""

TAKEN_COLUMNS = (
    *("prompt", "prompts", "completion", "completions", "completion_ids", "answer"),
    *("trainer_state", "log_extra", "log_metric", "environment", "environments", "image", "images"),
)
"""Names that a row's own columns can't have: the trainer fills them, or reads more into them than a reward's column."""


class DatasetUnreachable(UserError):
    """A dataset on the hub that does not answer and has no copy in the local cache."""


@dataclass(frozen=True)
class _Source:
    """Where rows come from, and which keys of the recipe said so."""

    path: str | None
    split: str
    path_key: str
    split_key: str


def load(spec: DatasetSpec, *, evaluation: bool = False) -> datasets.Dataset:
    """Read the rows of a spec: the training split, or the held-out one.

    Returns:
        A dataset with the columns `prompt` (a list of messages, or a string), `answer` (the final answer alone) and those
        of the rows that neither was made of; for `scored` the columns `prompt`, `responses`, `rewards` and, where recorded,
        `logprobs`.

    Raises:
        DatasetUnreachable: the hub does not answer and the local cache has no copy.
        UserError: nothing to read, a row that can't be used, or no row left.
    """
    source = _held_out_source(spec) if evaluation else _training_source(spec)
    dataset = _READERS[spec.name](spec, source)
    if len(dataset) == 0:
        raise UserError(
            f"`dataset.{source.split_key}`: {source.split!r} of {source.path or spec.name} is empty: choose other rows"
        )
    return dataset


def check_responses(dataset: datasets.Dataset, spec: OfflineSpec, num_generations: int) -> None:
    """Raise `UserError` if prompts have fewer recorded responses than a group has members."""
    if spec.compares_whole_batch:
        return
    short = sum(len(responses) < num_generations for responses in dataset["responses"])
    if short:
        raise UserError(
            f"`offline.baseline: group` compares {num_generations} responses to one prompt (`num_generations`), and {short} of "
            f"{len(dataset)} prompts have fewer: lower `num_generations`, leave those prompts out, or set `offline.baseline: "
            "batch`"
        )


def limit_prompts(dataset: datasets.Dataset, spec: DatasetSpec, tokenizer: Any) -> tuple[datasets.Dataset, int]:
    """Apply `max_prompt_tokens` (TRL 1.16 has no such option) and count the prompts that it touched.

    A prompt is measured as the trainer will feed it: messages through the chat template with the generation prompt,
    text with the tokenizer's special tokens. `cut_left` drops the oldest turns of a conversation behind its system prompt,
    then leading tokens of the last user message, or of the text.

    Returns:
        The dataset and how many prompts were dropped or cut; the very same dataset when there is no limit.

    Raises:
        UserError: every prompt is too long, or what surrounds the question exceeds the limit by itself.
    """
    limit = spec.max_prompt_tokens
    if limit is None:
        return dataset, 0
    lengths = [_prompt_length(prompt, tokenizer) for prompt in dataset["prompt"]]
    kept = [row for row, length in enumerate(lengths) if length <= limit]
    touched = len(lengths) - len(kept)
    if spec.overlong_prompts == "drop":
        if not kept:
            raise UserError(
                f"`dataset.max_prompt_tokens`: all {len(lengths)} prompts are longer than {limit} tokens "
                f"(the shortest has {min(lengths)}): raise the limit"
            )
        return dataset.select(kept), touched
    prompts = [
        _cut_left(prompt, limit, tokenizer) if length > limit else prompt
        for prompt, length in zip(dataset["prompt"], lengths, strict=True)
    ]
    return datasets.Dataset.from_dict({**dataset.to_dict(), "prompt": prompts}, features=dataset.features), touched


# Readers


def _read_table(spec: DatasetSpec, source: _Source) -> datasets.Dataset:
    path = Path(source.path).expanduser() if source.path else None
    schema = _SCHEMAS[spec.name]
    if path is not None and path.suffix == ".jsonl":
        lines = _json_lines(path, source, schema.columns)
        rows = _sliced({_ANY_SPLIT: [_checked_row(row, where, schema) for where, row in lines]}, spec, source)
    elif path is not None and path.is_dir():
        rows = _sliced(_saved_splits(path, source, schema), spec, source)
    elif path is not None and path.exists():
        raise UserError(f"`dataset.{source.path_key}`: {path} is not a .jsonl file: convert it, or name its folder")
    else:
        rows = _table_rows(_hub_table(spec, source), f"{source.path or GSM8K_HUB_ID}, {source.split}", schema)
    return _as_dataset(rows, spec)


def _read_arithmetic(spec: DatasetSpec, source: _Source) -> datasets.Dataset:
    size = DEFAULT_ARITHMETIC_SIZE if spec.size is None else spec.size
    rows: list[_Row] = [
        (*_question_row(problem, "arithmetic"), {})
        for split, start, stop in _slices({"train": size, "test": size}, source)
        for problem in arithmetic_problems(split, stop, spec.seed)[start:]
    ]
    return _as_dataset(rows, spec)


def _read_scored(spec: DatasetSpec, source: _Source) -> datasets.Dataset:
    """Recorded responses with their rewards, one row for each distinct prompt, in the order of the file.

    Columns: `prompt` (text), `responses` (texts), `rewards` (finite numbers) and, if the file has them, `logprobs` (for
    each response one log-probability a token, the end-of-sequence token's last).
    """
    path = Path(source.path or "").expanduser()
    prompts: dict[str, dict[str, Any]] = {}
    for where, line in _json_lines(path, source, ("prompt", "response", "reward")):
        recorded = _scored_row(line, where)
        row = prompts.setdefault(recorded["prompt"], {"prompt": recorded["prompt"], **{key: [] for key in _RECORDED}})
        for key in _RECORDED:
            row[key].extend(recorded[key])
    rows = _sliced({_ANY_SPLIT: list(prompts.values())}, spec, source)
    if any(row["logprobs"] for row in rows):
        if any(len(row["logprobs"]) < len(row["responses"]) for row in rows):
            raise UserError(f"`dataset`: some responses of {path} have logprobs and some have none: give all or none")
        return datasets.Dataset.from_list(rows)
    return datasets.Dataset.from_list([{key: row[key] for key in ("prompt", "responses", "rewards")} for row in rows])


_READERS: Mapping[DatasetName, Callable[[DatasetSpec, _Source], datasets.Dataset]] = MappingProxyType(
    {"gsm8k": _read_table, "rlaif": _read_table, "arithmetic": _read_arithmetic, "scored": _read_scored}
)
# What is read of a row: the turns that lead to the completion, the last of them the user's, and the final answer ("" if
# there is none). A row is these two, and its other columns.
_Message = dict[str, str]
_Read = tuple[list[_Message], str]
_Row = tuple[list[_Message], str, dict[str, Any]]
# What is recorded of a prompt: its responses, their rewards, and their log-probabilities (none, or a list for each response).
_RECORDED = ("responses", "rewards", "logprobs")
_AnyRow = TypeVar("_AnyRow")
_ANY_SPLIT = ""


def _question_row(row: Mapping[str, Any], where: str) -> _Read:
    """GSM8K's schema: a question, and worked steps that end in `#### N`."""
    for column, essence in (("question", str.strip), ("answer", final_answer)):
        if not isinstance(row[column], str) or not essence(row[column]):
            raise UserError(f"`dataset`: {where} has the {column} {row[column]!r}: it must be text that is not empty")
    return [{"role": "user", "content": row["question"].strip()}], final_answer(row["answer"])


def _conversation_row(row: Mapping[str, Any], where: str) -> _Read:
    """MiniMind's RLAIF schema: the turns of a conversation, the assistant's last one left to be generated."""
    turns = row["conversations"]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"`dataset`: {where} has the conversations {turns!r}: they must be a list of messages")
    messages = [_message(turn, where) for turn in turns]
    reference = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise UserError(f"`dataset`: {where} has no user turn before the one to generate: correct or remove the row")
    return messages, "" if reference.strip() == RLAIF_PLACEHOLDER else reference.strip()


def _message(turn: Any, where: str) -> _Message:
    role, content = (turn.get("role"), turn.get("content")) if isinstance(turn, Mapping) else (None, None)
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise UserError(
            f"`dataset`: {where} has the turn {turn!r}: a turn needs the role system, user or assistant, and text as content"
        )
    return {"role": role, "content": content}


@dataclass(frozen=True)
class _Schema:
    """The columns that a dataset is made of, and how to read one row of them; `where` names the row in an error."""

    columns: tuple[str, ...]
    read: Callable[[Mapping[str, Any], str], _Read]


_SCHEMAS: Mapping[str, _Schema] = MappingProxyType(
    {
        "gsm8k": _Schema(("question", "answer"), _question_row),
        "rlaif": _Schema(("conversations",), _conversation_row),
    }
)


def _training_source(spec: DatasetSpec) -> _Source:
    return _Source(spec.path, spec.split, "path", "split")


def _held_out_source(spec: DatasetSpec) -> _Source:
    if spec.eval_path is None and spec.eval_split is None:
        raise UserError(
            "`dataset.eval_split`: missing, so there is nothing to evaluate on: name a split, or turn eval_strategy off"
        )
    path_key = "path" if spec.eval_path is None else "eval_path"
    split_key = "split" if spec.eval_split is None else "eval_split"
    return _Source(getattr(spec, path_key), getattr(spec, split_key), path_key, split_key)


def _json_lines(path: Path, source: _Source, columns: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of a JSONL file, each with its place in the file."""
    if path.exists() and not path.is_file():  # reading a pipe or a device may never end
        raise UserError(f"`dataset.{source.path_key}`: {path} is no ordinary file: name a .jsonl file")
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else f"can't be read ({error.strerror})"
        raise UserError(f"`dataset.{source.path_key}`: {path} {reason}: correct the path or the file") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield where, _json_object(line, where, columns)


def _json_object(line: str, where: str, columns: Sequence[str]) -> Mapping[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"`dataset`: {where} is not JSON ({error}): correct or remove the line") from error
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise UserError(f"`dataset`: {where} has half of a surrogate pair: correct or remove the line") from error
    if not isinstance(value, dict):
        raise UserError(
            f"`dataset`: {where} is not a JSON object: write one object with {' and '.join(columns)} a line"
        )
    return value


def _saved_splits(path: Path, source: _Source, schema: _Schema) -> dict[str, list[_Row]]:
    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"`dataset.{source.path_key}`: the folder {path} was not written by save_to_disk: write it so or name a file"
        ) from error
    if isinstance(saved, datasets.Dataset):
        return {_ANY_SPLIT: _table_rows(saved, str(path), schema)}
    return {split: _table_rows(table, f"{path}, {split}", schema) for split, table in saved.items()}


def _hub_table(spec: DatasetSpec, source: _Source) -> datasets.Dataset:
    hub_id = source.path or GSM8K_HUB_ID
    if is_missing(hub_id):
        raise UserError(f"`dataset.{source.path_key}`: there is no file or folder {hub_id}: correct the path")
    config = spec.config or (GSM8K_HUB_CONFIG if hub_id == GSM8K_HUB_ID else None)
    try:
        with cache_only_if_hub_is_silent():
            return datasets.load_dataset(hub_id, config, split=source.split)
    except ConnectionError as error:
        raise DatasetUnreachable(
            f"`dataset.{source.path_key}`: {hub_id!r} is no file or folder here, the Hugging Face Hub can't be reached "
            "and its cache has no copy: connect, or give a local .jsonl file or save_to_disk folder"
        ) from error
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise UserError(
            f"`dataset.{source.path_key}`: {hub_id!r} can't be loaded from the Hugging Face Hub ({_one_line(error)}): "
            "correct the path, the config or the split"
        ) from error


def _table_rows(table: datasets.Dataset, where: str, schema: _Schema) -> list[_Row]:
    missing = [column for column in schema.columns if column not in table.column_names]
    if missing:
        raise UserError(
            f"`dataset`: {where} has no column {missing[0]!r} (it has {', '.join(table.column_names)}): rename its columns"
        )
    return [_checked_row(row, f"{where}, row {number}", schema) for number, row in enumerate(table)]


def _checked_row(row: Mapping[str, Any], where: str, schema: _Schema) -> _Row:
    for column in schema.columns:
        if column not in row:
            raise UserError(f"`dataset`: {where} has no {column!r}: every row needs {' and '.join(schema.columns)}")
    others = {column: value for column, value in row.items() if column not in schema.columns}
    for column in TAKEN_COLUMNS:
        if column in others:
            raise UserError(
                f"`dataset`: {where} has a column {column!r}, a name that the trainer takes for itself: rename it or leave it out"
            )
    return *schema.read(row, where), others


def _scored_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One line of recorded responses: `{prompt, response, reward}`, or `{prompt, responses, rewards}` with lists."""
    if ("response" in row) == ("responses" in row):
        raise UserError(f"`dataset`: {where} must have either response and reward, or responses and rewards")
    if "response" in row:
        given = {"responses": row["response"], "rewards": row.get("reward"), "logprobs": row.get("logprobs")}
        row = {"prompt": row.get("prompt"), **{key: None if value is None else [value] for key, value in given.items()}}
    prompt, responses, rewards, log_probs = (row.get(column) for column in ("prompt", *_RECORDED))
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f"`dataset`: {where} has the prompt {prompt!r}: it must be text that is not empty")
    if not responses or not _is_list_of(responses, lambda text: isinstance(text, str)):
        raise UserError(f"`dataset`: {where} has a response that is no text: correct or remove the line")
    if not _is_list_of(rewards, _is_finite) or len(rewards) != len(responses):
        raise UserError(
            f"`dataset`: {where} has the reward {rewards!r}: every response needs one finite number as its reward"
        )
    if log_probs is not None and (
        not _is_list_of(log_probs, lambda values: _is_list_of(values, _is_finite) and max(values, default=0) <= 0)
        or len(log_probs) != len(responses)
    ):
        raise UserError(
            f"`dataset`: {where} has logprobs that are not one list of numbers of at most 0 for each response: correct them"
        )
    rewards = [float(reward) for reward in rewards]
    return {"prompt": prompt, "responses": responses, "rewards": rewards, "logprobs": log_probs or []}


def _is_list_of(values: Any, is_right: Callable[[Any], bool]) -> TypeGuard[list]:
    return isinstance(values, list) and all(is_right(value) for value in values)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


# Splits


def _sliced(splits: Mapping[str, list[_AnyRow]], spec: DatasetSpec, source: _Source) -> list[_AnyRow]:
    """Take the rows that `source.split` names; a lone split without a name answers to any."""
    if _ANY_SPLIT in splits:
        rows = splits[_ANY_SPLIT]
        if source.path_key == "path" and source.split_key == "eval_split":
            _refuse_rows_trained_on(len(rows), spec, source)
        splits = dict.fromkeys(_split_names(source.split), rows)
    lengths = {split: len(rows) for split, rows in splits.items()}
    return [row for split, start, stop in _slices(lengths, source) for row in splits[split][start:stop]]


def _refuse_rows_trained_on(length: int, spec: DatasetSpec, source: _Source) -> None:
    """Keep a file with one split from being both trained and evaluated on, whatever names its split is given."""

    def rows_of(part: _Source) -> set[int]:
        slices = _slices(dict.fromkeys(_split_names(part.split), length), part)
        return {row for _, start, stop in slices for row in range(start, stop)}

    if shared := len(rows_of(source) & rows_of(_training_source(spec))):
        raise UserError(
            f"`dataset.eval_split`: {shared} rows of {source.path} would be both trained and evaluated on: it holds "
            "one split: name the held-out file in eval_path, or give split and eval_split slices that do not overlap"
        )


def _split_names(split: str) -> list[str]:
    return [part.partition("[")[0].partition("(")[0].strip() for part in split.split("+")]


def _slices(lengths: Mapping[str, int], source: _Source) -> list[tuple[str, int, int]]:
    try:
        parts = datasets.ReadInstruction.from_spec(source.split).to_absolute(dict(lengths))
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"`dataset.{source.split_key}`: {source.split!r} can't be read ({_one_line(error)}): "
            "write for example train or train[:5%]"
        ) from error
    return [(part.splitname, part.from_, part.to) for part in parts]


# Prompts


def _as_dataset(rows: Sequence[_Row], spec: DatasetSpec) -> datasets.Dataset:
    made = {"prompt": [_prompt(turns, spec) for turns, _, _ in rows], "answer": [answer for _, answer, _ in rows]}
    names = dict.fromkeys(name for _, _, others in rows for name in others)
    columns = {name: [others.get(name) for _, _, others in rows] for name in names}
    try:
        return datasets.Dataset.from_dict(made | columns)
    except _NO_COLUMN:
        for name, values in columns.items():
            _check_column(name, values)
        raise


_NO_COLUMN = (pa.ArrowException, OverflowError, TypeError)


def _check_column(name: str, values: list[Any]) -> None:
    """Raise `UserError` for values that no table can hold together."""
    try:
        datasets.Dataset.from_dict({name: values})
    except _NO_COLUMN as error:
        raise UserError(
            f"`dataset`: the column {name!r} has values of several types ({_one_line(error)}): give all one type, or leave it out"
        ) from error


def _prompt(turns: list[_Message], spec: DatasetSpec) -> list[_Message] | str:
    system = PROMPT_STYLES[spec.prompt_style]
    messages = list(turns)
    if system is not None and turns[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if spec.prompt_format == "text":
        return "\n".join(message["content"] for message in messages)
    return messages


def final_answer(answer: str) -> str:
    """The text after the last `####` of a GSM8K answer, stripped; an answer without the mark is final as it stands."""
    return answer.rpartition("####")[2].strip()


def _prompt_length(prompt: Any, tokenizer: Any) -> int:
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise UserError(
            "`dataset.prompt_format`: conversational prompts need a tokenizer with a chat template, and this one has "
            "none: use an instruct model, or prompt_format: text"
        )
    rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(rendered["input_ids"])


def _cut_left(prompt: Any, limit: int, tokenizer: Any) -> Any:
    """Drop earlier turns, then leading tokens of the question, until the rendered prompt has at most `limit` tokens."""
    while (excess := _prompt_length(prompt, tokenizer) - limit) > 0:
        if not isinstance(prompt, str) and (later := _without_oldest_turns(prompt)) is not None:
            prompt = later
            continue
        content = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        kept = tokenizer(content, add_special_tokens=False)["input_ids"][excess:]
        if not kept:
            raise UserError(
                f"`dataset.max_prompt_tokens`: {limit} leaves no room for the question beside the system prompt and the "
                "chat template: raise the limit"
            )
        # A cut inside a character decodes to U+FFFD, which the model never meets otherwise.
        content = tokenizer.decode(kept).lstrip("\ufffd")
        prompt = content if isinstance(prompt, str) else [*prompt[:-1], {**prompt[-1], "content": content}]
    return prompt


def _without_oldest_turns(messages: list[_Message]) -> list[_Message] | None:
    """The conversation from its second user turn on, behind its system prompt; None if there is one user turn alone."""
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if len(users) < 2:
        return None
    return [*(message for message in messages[:1] if message["role"] == "system"), *messages[users[1] :]]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
