"""Accuracy of a policy on held-out problems: `evaluate_into(folder, ...)`, which `grpo-recipes evaluate` calls.

*Strict* accuracy asks for what the recipe's own rewards ask for (`grpo_recipes.results.strict`), layout and answer together;
*lenient* accuracy accepts any recognised final answer. Their difference tells a model that learnt to calculate from one
that learnt a layout.

`evaluate_into` leaves `completions.parquet`, every completion with its verdict, and `evaluation.json`, the shares with
their 95 % intervals. It writes a part for each batch, so that a killed evaluation goes on where it stopped.
"""

import hashlib
import json
import math
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from datasets import Dataset
from tqdm.auto import tqdm

from grpo_recipes.results.estimates import mcnemar, mean_share, paired_difference, pass_at_k
from grpo_recipes.results.strict import Asked, asked_by, is_right, stated_answer
from grpo_recipes.runs.files import ANY_OBJECT, EVALUATED, EVALUATION, read_object, read_table
from grpo_rewards.answers import Judge, answer_number, read_gold
from grpo_rewards.errors import UserError

_GREEDY = {"do_sample": False, "repetition_penalty": 1.0, "temperature": None, "top_k": None, "top_p": None}
_RIGHT = frozenset({"exact", "equal", "symbolic"})


@dataclass(frozen=True)
class Verdict:
    """What became of one completion: the final answer it states, and whether it is right."""

    answer: str | None
    strict: bool
    lenient: bool


def judge_completions(completions: Sequence[str], answers: Sequence[str], settings: "Settings") -> list[Verdict]:
    """Hold each completion against the gold of its own problem; `answers` are golds as `read_gold` takes them."""
    judge, verdicts = Judge(), []
    rows = zip(completions, answers, is_right(settings.strict, completions, answers), strict=True)
    for completion, answer, strictly in rows:
        gold = read_gold(answer)
        assert gold is not None  # `_answers` has read it
        stated = stated_answer(settings.strict, completion, settings.tags)
        verdicts.append(Verdict(stated, strictly, strictly or judge.verdict(gold, stated) in _RIGHT))
    return verdicts


@dataclass(frozen=True)
class Settings:
    """How completions are made and judged.

    Attributes:
        tags: the names of the reasoning tag and the answer tag.
        samples: completions a problem.
        temperature: what the logits are divided by before sampling, with no other filter; 0 for greedy decoding.
        max_new_tokens: the longest completion, in tokens.
        batch_size: how many completions are made at once; with sampling, part of what a seed reproduces.
        seed: of the sampling. The global random state is left as it was.
        strict: the rewards that a strictly right completion must earn in full; empty for the default with `tags`.

    Raises:
        EvaluationError: a number below 1, a temperature below 0, or several samples of greedy decoding.
    """

    tags: tuple[str, str] = ("think", "answer")
    samples: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 256
    batch_size: int = 64
    seed: int = 0
    strict: tuple[Asked, ...] = ()

    def __post_init__(self) -> None:
        if not self.strict:
            object.__setattr__(self, "strict", asked_by((), self.tags))
        for name in ("samples", "batch_size", "max_new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise EvaluationError(f"--{name} is {value}: set it to at least 1")
        if not 0 <= self.temperature < math.inf:
            raise EvaluationError(f"--temperature is {self.temperature:g}: set it to 0 for greedy decoding, or above 0")
        if self.samples > 1 and self.temperature <= 0:
            raise EvaluationError(f"{self.samples} greedy samples are one and the same: set --temperature above 0")


class EvaluationError(UserError):
    """An evaluation that can't be made, or compared, as asked; one sentence with the fix."""


Complete = Callable[[list[Any], Settings], list[str]]
"""Completes each prompt once, in order, by the temperature, length and seed of the settings."""


def evaluate_into(
    folder: Path, complete: Complete, dataset: Dataset, settings: Settings, described: dict[str, Any]
) -> dict[str, Any]:
    """Evaluate into a folder, or go on with the same evaluation there; one that is finished is only read.

    Args:
        folder: receives `evaluation.json` and `completions.parquet`.
        complete: the policy; called once for each batch, whose seed is `settings.seed` and the batch's number.
        dataset: columns `prompt` and `answer`.
        settings: how to sample and judge.
        described: what else says which evaluation this is (the model, its weights, the dataset), ready for JSON.

    Returns:
        What `evaluation.json` holds.

    Raises:
        EvaluationError: the folder holds another evaluation.
        RunError: a file of the folder is damaged.
        ValueError: the dataset is empty, or an answer can't be read as a gold.
    """
    answers = _answers(dataset)
    rows = {"problems": len(answers), "rows": _rows_fingerprint(dataset)}
    asked = json.loads(json.dumps({**described, **rows, "settings": asdict(settings)}))
    parts = folder / "parts"
    if _is_finished(folder, asked):
        return read_object(folder / "evaluation.json", EVALUATION)
    parts.mkdir(parents=True, exist_ok=True)
    _write(folder / "asked.json", json.dumps(asked))
    size = max(1, settings.batch_size // settings.samples)
    batches = [range(start, min(start + size, len(answers))) for start in range(0, len(answers), size)]
    for number, problems in enumerate(tqdm(batches, desc="evaluating", unit="batch")):
        part = parts / f"{number:06d}.parquet"
        if not part.is_file():
            batch_settings = replace(settings, seed=settings.seed * 1_000_003 + number)
            table = _completed(problems, complete, dataset, answers, batch_settings)
            _write(part, table)
    again = "remove the file: the same command makes it again"
    made = (read_table(parts / f"{number:06d}.parquet", EVALUATED, again) for number in range(len(batches)))
    table = pd.concat(made, ignore_index=True)
    summary = {**asked, **summarise(table)}
    _write(folder / "completions.parquet", table)
    _write(folder / "evaluation.json", json.dumps(summary, indent=2) + "\n")
    shutil.rmtree(parts)
    (folder / "asked.json").unlink()
    return summary


def summarise(table: pd.DataFrame) -> dict[str, Any]:
    """The shares of an evaluation, each with its 95 % interval, from its completions (columns of `completions.parquet`).

    `strict` and `lenient` are mean shares over problems; `pass_at` the chance that one of k completions is strictly right;
    `majority` the share of problems whose commonest stated answer is right, the first stated winning a tie.
    """
    problems = [rows for _, rows in table.groupby("problem", sort=True)]
    samples = len(problems[0])
    shares = {name: mean_share([rows[name].mean() for rows in problems]) for name in ("strict", "lenient")}
    summary: dict[str, Any] = {name: share.as_dict() for name, share in shares.items()}
    if samples > 1:
        sizes = sorted({2**power for power in range(samples.bit_length())} | {samples})
        summary["pass_at"] = {
            str(k): mean_share([pass_at_k(samples, int(rows["strict"].sum()), k) for rows in problems]).as_dict()
            for k in sizes
        }
        summary["majority"] = mean_share([float(_majority(rows)) for rows in problems]).as_dict()
    return summary


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Two finished evaluations of the same problems: the paired difference second - first, and McNemar's test.

    With several samples a problem the difference is of shares, and the test of majority votes.

    Raises:
        EvaluationError: a folder has no finished evaluation, or they are not on the same problems, or not judged alike.
        RunError: a file of theirs is damaged.
    """
    records = [_read_record(folder) for folder in (first, second)]
    if records[0]["settings"].get("strict") != records[1]["settings"].get("strict"):
        raise EvaluationError(
            f"{first} and {second} mean different things by strict (`settings.strict` of their evaluation.json): evaluate both "
            "with the same --recipe"
        )
    tables = [_read_completions(folder) for folder in (first, second)]
    prompts = [table.groupby("problem")["prompt"].first() for table in tables]
    if not prompts[0].equals(prompts[1]):
        raise EvaluationError(f"{first} and {second} are not on the same problems: evaluate both with the same options")
    groups = [[rows for _, rows in table.groupby("problem", sort=True)] for table in tables]
    result: dict[str, Any] = {"problems": len(prompts[0])}
    for name in ("strict", "lenient"):
        shares = [[float(rows[name].mean()) for rows in problems] for problems in groups]
        result[name] = {
            "first": mean_share(shares[0]).as_dict(),
            "second": mean_share(shares[1]).as_dict(),
            "difference": paired_difference(*shares).as_dict(),
        }
    votes = [[_vote(rows) for rows in problems] for problems in groups]
    only = [sum(one and not other for one, other in zip(*pair, strict=True)) for pair in (votes, votes[::-1])]
    result["mcnemar"] = {"only_first": only[0], "only_second": only[1], "p": mcnemar(*only)}
    return result


def transformers_engine(model: Any, tokenizer: Any) -> Complete:
    """Completions by transformers: continuous batching on a GPU, padded batches on a CPU.

    Continuous batching schedules prompts as others finish; with sampling its draws may therefore differ between two runs.
    """
    complete = _complete_continuously if model.device.type == "cuda" else _complete

    def engine(prompts: list[Any], settings: Settings) -> list[str]:
        return complete(
            model,
            tokenizer,
            prompts,
            settings.temperature,
            settings.max_new_tokens,
            settings.batch_size,
            settings.seed,
        )

    return engine


def vllm_engine(name: str, tokenizer: Any) -> Complete:
    """Completions by vLLM. Raises `EvaluationError` if it isn't installed."""
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise EvaluationError("vLLM is not installed: leave --vllm out, or install the extra `vllm`") from error
    llm = LLM(model=name, trust_remote_code=False, generation_config="vllm")  # not the model's own sampling habits

    def engine(prompts: list[Any], settings: Settings) -> list[str]:
        # A seed is a request's own in vLLM: copies of a prompt that share one would all get the same completion.
        seeds = random.Random(settings.seed).sample(range(2**31), len(prompts))
        sampling = [
            SamplingParams(temperature=settings.temperature, max_tokens=settings.max_new_tokens, seed=seed)
            for seed in seeds
        ]
        inputs = [{"prompt_token_ids": ids} for ids in _token_ids(prompts, tokenizer)]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    return engine


def _completed(
    problems: range, complete: Complete, dataset: Dataset, answers: list[str], settings: Settings
) -> pd.DataFrame:
    """One row for each completion of some problems."""
    places = [problem for problem in problems for _ in range(settings.samples)]
    prompts = [dataset[place]["prompt"] for place in places]
    completions = complete(prompts, settings)
    golds = [answers[place] for place in places]
    verdicts = judge_completions(completions, golds, settings)
    return pd.DataFrame(
        {
            "problem": places,
            "sample": [sample for _ in problems for sample in range(settings.samples)],
            "prompt": [
                prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False) for prompt in prompts
            ],
            "gold": golds,
            "completion": completions,
            "answer": [verdict.answer for verdict in verdicts],
            "strict": [verdict.strict for verdict in verdicts],
            "lenient": [verdict.lenient for verdict in verdicts],
        }
    ).astype({"answer": "string"})


def _answers(dataset: Dataset) -> list[str]:
    answers = list(dataset["answer"])
    if not answers or any(read_gold(answer) is None for answer in answers):
        raise ValueError("nothing to evaluate on: the dataset is empty, or one of its answers states no final answer")
    return answers


def _rows_fingerprint(dataset: Dataset) -> str:
    """A hash of the prompts and answers, in order: a path and a split don't say which rows they name today."""
    digest = hashlib.sha256()
    for row in dataset.select_columns(["prompt", "answer"]):
        digest.update(json.dumps([row["prompt"], row["answer"]], sort_keys=True).encode() + b"\n")
    return f"sha256 {digest.hexdigest()}"


def _majority(rows: pd.DataFrame) -> bool:
    """Whether the commonest stated answer is right; numbers count as equal whatever their form."""
    stated = [(_canonical(answer), right) for answer, right in zip(rows["answer"], rows["lenient"], strict=True)]
    votes = Counter(answer for answer, _ in stated if answer is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(right for answer, right in stated if answer == winner)


def _vote(rows: pd.DataFrame) -> bool:
    return bool(rows["strict"].iloc[0]) if len(rows) == 1 else _majority(rows)


def _canonical(answer: Any) -> Any:
    if answer is None or pd.isna(answer):
        return None
    number = answer_number(answer)
    return answer.strip().casefold() if number is None else number


def _is_finished(folder: Path, asked: dict[str, Any]) -> bool:
    """Whether a folder holds this very evaluation, finished. Raises `EvaluationError` if it holds another."""
    for name in ("evaluation.json", "asked.json"):
        path = folder / name
        if path.is_file():
            shape = EVALUATION if name == "evaluation.json" else ANY_OBJECT
            found = read_object(path, shape, "remove the folder, or give another --output")
            if difference := _difference(found, asked):
                raise EvaluationError(
                    f"{folder} holds another evaluation: {difference}; remove the folder, or give another --output"
                )
            return name == "evaluation.json"
    if folder.exists() and any(folder.iterdir()):
        raise EvaluationError(f"{folder} holds files that are no evaluation: give another --output")
    return False


def _difference(found: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> str | None:
    """The first thing in which the evaluation that was found differs from the one asked for; None if nothing does."""
    changed = {
        "weights": "the model's weights have changed since",
        "rows": "the problems have changed since",
        "strict": "what strict asks for (`settings.strict`) has changed since",
    }
    for key, value in asked.items():
        other = found.get(key)
        if other == value:
            continue
        if key in ("model", "path") and _is_one_path(other, value):
            continue
        if key == "model" and not prefix and found.get("weights") == asked.get("weights") is not None:
            continue  # a copy of it
        if other is None and not prefix:
            return f"it does not record `{prefix}{key}`"
        if isinstance(value, dict) and isinstance(other, dict):
            # A key that only the folder's has differs as well.
            return _difference(other, {**dict.fromkeys(other), **value}, f"{prefix}{key}.")
        return changed.get(key, f"{prefix}{key} was {other!r} and is now {value!r}")
    return None


def _is_one_path(first: Any, second: Any) -> bool:
    """Whether two names, as typed, are of one file or folder that is there."""
    paths = [Path(name) for name in (first, second) if isinstance(name, str)]
    return len(paths) == 2 and all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / "evaluation.json", EVALUATION)
    except FileNotFoundError as error:
        raise EvaluationError(
            f"{folder} has no finished evaluation: run `grpo-recipes evaluate` with it as --output"
        ) from error


def _read_completions(folder: Path) -> pd.DataFrame:
    table = read_table(folder / "completions.parquet", EVALUATED, "evaluate anew, into another --output")
    if not len(table):
        raise EvaluationError(f"{folder / 'completions.parquet'}: it holds no completions; evaluate anew")
    return table


def _write(path: Path, content: pd.DataFrame | str) -> None:
    """Write a file whole or not at all: under another name first, then renamed."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    if isinstance(content, str):
        unfinished.write_text(content, encoding="utf-8")
    else:
        content.to_parquet(unfinished, index=False)
    os.replace(unfinished, path)


@torch.no_grad()
def _complete_continuously(
    model: Any, tokenizer: Any, prompts: Any, temperature: float, max_new_tokens: int, batch_size: int, seed: int
) -> list[str]:
    """The same as `_complete` by transformers' continuous batching, which pads nothing and refills what has finished.

    Raises `EvaluationError` if a completion failed or is missing: `generate_batch` only logs that (transformers 5.23).
    """
    from transformers import GenerationConfig

    choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else _GREEDY
    ends = {"eos_token_id": _end_tokens(model, tokenizer), "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        outputs = model.generate_batch(
            inputs=_token_ids(prompts, tokenizer),
            generation_config=GenerationConfig(**choice, **ends, max_new_tokens=max_new_tokens),
        )
    _check_all_completed(list(outputs.values()), len(prompts))
    requests = sorted(outputs.values(), key=lambda output: int(output.request_id.rpartition("_")[2]))
    return tokenizer.batch_decode([request.generated_tokens for request in requests], skip_special_tokens=True)


def _check_all_completed(outputs: list[Any], expected: int) -> None:
    errors = [output.error for output in outputs if output.error is not None]
    failed = expected - len(outputs) + len(errors)
    if failed:
        reason = " ".join(str(errors[0]).split()) if errors else "generation stopped before they were made"
        raise EvaluationError(
            f"{failed} of {expected} completions failed ({reason}): run the same command again, which keeps the batches that "
            "are done, or set a smaller --batch_size or --max_new_tokens in another --output"
        )


@torch.no_grad()
def _complete(
    model: Any, tokenizer: Any, prompts: Any, temperature: float, max_new_tokens: int, batch_size: int, seed: int
) -> list[str]:
    # A model's generation_config.json may filter or penalise tokens; what is measured is the policy itself.
    unfiltered = {"top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    choice = {"do_sample": True, "temperature": temperature, **unfiltered} if temperature > 0 else _GREEDY
    gpus = [model.device] if model.device.type == "cuda" else []
    ends = {"eos_token_id": _end_tokens(model, tokenizer), "pad_token_id": tokenizer.pad_token_id}
    was_training = model.training
    model.eval()
    completions: list[str] = []
    try:
        with torch.random.fork_rng(devices=gpus):
            torch.manual_seed(seed)
            for batch in _batches(list(prompts), batch_size):
                inputs = _tokenize(batch, tokenizer).to(model.device)
                tokens = model.generate(**inputs, **choice, **ends, max_new_tokens=max_new_tokens)
                new_tokens = tokens[:, inputs["input_ids"].shape[1] :]
                completions += tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
    finally:
        model.train(was_training)
    return completions


def _end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """What ends a completion in TRL's training: the tokenizer's end of text, and every one that the model declares."""
    declared = model.generation_config.eos_token_id
    ids = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    return sorted({token for token in ids if token is not None})


def _batches(prompts: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]


def _tokenize(prompts: list[Any], tokenizer: Any) -> Any:
    texts, is_text = _texts(prompts, tokenizer)
    # A chat template writes the special tokens itself.
    return tokenizer(texts, add_special_tokens=is_text, padding=True, padding_side="left", return_tensors="pt")


def _token_ids(prompts: list[Any], tokenizer: Any) -> list[list[int]]:
    texts, is_text = _texts(prompts, tokenizer)
    return tokenizer(texts, add_special_tokens=is_text)["input_ids"]


def _texts(prompts: list[Any], tokenizer: Any) -> tuple[list[str], bool]:
    if isinstance(prompts[0], str):
        return prompts, True
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False), False
