"""Rewards side by side, in one run: speed, cost against length, and texts made to break them.

    python benchmarks/rewards.py [--rounds 7] [--solutions model_solutions.jsonl]

The peers are TRL's `accuracy_reward`, math-verify on the complete text, and the rule of the source document with its
number pattern. Each gets the layout that it expects. Rounds are interleaved in shuffled order, figures are medians, and
ratios compare medians of the same run. `--solutions` takes the texts of GSM8K's released model solutions instead of
made-up ones. Rewards for other tasks are compared with the rule that their benchmarks or peers publish, or with the
peer itself if it is installed (lm_eval, verifiers, open_r1). The judges query a server on 127.0.0.1 that answers at
once.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.util
import json
import os
import platform
import random
import re
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Sequence
from functools import cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import Any

from grpo_rewards.choices import ChoiceCorrectness
from grpo_rewards.completions import completion_text
from grpo_rewards.ifeval import Instructions
from grpo_rewards.judge import JudgeScore
from grpo_rewards.math.correctness import GSM8KCorrectness, MathCorrectness
from grpo_rewards.ngrams import Repetition
from grpo_rewards.schema import JsonSchema
from grpo_rewards.strings import StringMatch

Scorer = Callable[[list, list[str]], list]
ROWS, GROUP = 1024, 4


def trl_accuracy(completions: list, golds: list[str]) -> list:
    r"""Score with TRL's reward. Its gold must be LaTeX to parse reliably, so it gets the number in `\boxed`."""
    from trl.rewards import accuracy_reward

    return accuracy_reward(completions, solution=[f"$\\boxed{{{gold}}}$" for gold in golds])


def math_verify_whole_text(completions: list, golds: list[str]) -> list:
    """Score with math-verify's defaults on the complete text."""
    from math_verify import parse, verify

    return [
        float(verify(parse(gold), parse(completion[0]["content"])))
        for completion, gold in zip(completions, golds, strict=True)
    ]


_DOCUMENT_NUMBER = re.compile(r"(?:^|\s|=)\s*(-?\d*\.?\d+)\s*$")


def _document_number(text: str) -> float | None:
    match = _DOCUMENT_NUMBER.search(text.replace("$", "").replace("%", ""))
    return float(match.group(1)) if match else None


def source_document_rule(completions: list, golds: list[str]) -> list:
    """Score by the rule of "GRPO from scratch": last answer block, equal as a string (2) or as a float (1.5)."""
    rewards = []
    for completion, gold in zip(completions, golds, strict=True):
        blocks = completion[0]["content"].split("<answer>")
        answer = None
        if len(blocks) > 1 and "</answer>" in blocks[-1]:
            answer = blocks[-1].split("</answer>")[0].strip()
            answer = None if answer == "..." else answer
        if answer == gold:
            rewards.append(2.0)
            continue
        number = _document_number(str(answer))
        rewards.append(1.5 if number is not None and number == _document_number(str(gold)) else 0.0)
    return rewards


def source_document(completions: list, golds: list[str]) -> list:
    """Score as the document does, which also counts the words of every completion."""
    rewards = source_document_rule(completions, golds)
    _ = [len(completion[0]["content"].split()) for completion in completions]
    return rewards


def ours(reward: Callable[..., list]) -> Scorer:
    """Return one of our rewards with the signature of the others."""
    return lambda completions, golds: reward(prompts=golds, completions=completions, answer=golds)


TAGGED = "<think>\n{body}\n</think>\n<answer>\n{answer}\n</answer>"
BOXED = "<think>\n{body}\n</think>\nThe answer is $\\boxed{{{answer}}}$."
SCORERS: dict[str, tuple[Scorer, str]] = {
    "gsm8k_correctness": (ours(GSM8KCorrectness()), TAGGED),
    "gsm8k_correctness, extract: auto": (ours(GSM8KCorrectness(extract="auto")), TAGGED),
    "math_correctness": (ours(MathCorrectness()), BOXED),
    "source document": (source_document, TAGGED),
    "source document, without word count": (source_document_rule, TAGGED),
    "TRL accuracy_reward": (trl_accuracy, BOXED),
    "math-verify, whole text": (math_verify_whole_text, BOXED),
}
BASE = "gsm8k_correctness"


def made_up_solutions(rng: random.Random) -> list[tuple[str, str, str]]:
    """Return (reasoning, answer, gold) rows with the shares of GSM8K's model solutions: 40 % right, 95 % integers."""
    rows = []
    for _ in range(ROWS // GROUP):
        gold = rng.randint(1, 5000)
        for _ in range(GROUP):
            answer = gold if rng.random() < 0.4 else rng.randint(1, 5000)
            text = f"{answer + 0.25}" if rng.random() < 0.05 else str(answer)
            steps = [f"She has {rng.randint(2, 99)} boxes of {rng.randint(2, 99)} pens each." for _ in range(7)]
            rows.append((" ".join(steps), text, str(gold)))
    return rows


def recorded_solutions(path: str, rng: random.Random) -> list[tuple[str, str, str]]:
    """Return rows from GSM8K's released model solutions, the four of a problem next to each other."""
    with open(path, encoding="utf-8") as lines:
        problems = rng.sample([json.loads(line) for line in lines], ROWS // GROUP)
    rows = []
    for problem in problems:
        gold = problem.pop("ground_truth").rpartition("A:")[2].strip()
        for solution in (value["solution"] for value in problem.values() if isinstance(value, dict)):
            body, _, answer = solution.rpartition("\nA:")
            rows.append((body, answer.strip(), gold))
    return rows


def completions_of(rows: Sequence[tuple[str, str, str]], layout: str) -> list:
    """Return TRL's conversational completions of the rows in a layout."""
    texts = (layout.format(body=body, answer=answer) for body, answer, _ in rows)
    return [[{"role": "assistant", "content": text}] for text in texts]


def median_seconds(
    calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return each call's median time over rounds in shuffled order, each measured call after an unmeasured one."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, rng = list(calls), random.Random(0)
    for _ in range(rounds):
        rng.shuffle(order)
        for name in order:
            gc.collect()
            calls[name]()  # so that no call pays for the garbage and the cold caches of another
            start = clock()
            calls[name]()
            times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def print_speed(rows: Sequence[tuple[str, str, str]], rounds: int) -> None:
    """Print completions per second, as a rate and against the first scorer."""
    golds = [gold for *_, gold in rows]
    calls = {name: partial(scorer, completions_of(rows, layout), golds) for name, (scorer, layout) in SCORERS.items()}
    seconds = median_seconds(calls, rounds)
    length = statistics.fmean(len(body) for body, *_ in rows)
    print(f"\nSpeed, {len(rows)} completions of about {length:.0f} characters, {rounds} rounds")
    print(f"{'scorer':36}{'completions/s':>14}{BASE + ' is faster by':>34}")
    for name, value in seconds.items():
        print(f"{name:36}{len(rows) / value:>14,.0f}{value / seconds[BASE]:>33.1f}x")


def print_length(rounds: int) -> None:
    """Print the cost of one completion of 16,000 characters against one of 250."""
    print("\nCPU time of one completion against its length")
    _print_lengths({name: (scorer, layout, "18") for name, (scorer, layout) in SCORERS.items()}, rounds)


def _print_lengths(scorers: dict[str, tuple[Scorer, str, str]], rounds: int) -> None:
    print(f"{'scorer':36}{'250 chars':>14}{'16,000 chars':>14}{'ratio':>8}")
    sentence = "She has 12 boxes of 30 pens each, so 360. "
    calls = {}
    for name, (scorer, layout, answer) in scorers.items():
        for length in (250, 16_000):
            body = (sentence * 400)[:length]
            batch = [[{"role": "assistant", "content": layout.format(body=body, answer=answer)}]] * 50
            calls[f"{name}/{length}"] = partial(scorer, batch, [answer] * 50)
    # All the work happens in this process. Its CPU time hardly depends on other processes.
    seconds = median_seconds(calls, rounds, time.process_time)
    for name in scorers:
        short, long = (seconds[f"{name}/{length}"] / 50 * 1e6 for length in (250, 16_000))
        print(f"{name:36}{short:>11.2f} µs{long:>11.2f} µs{long / short:>8.1f}")


_MMLU_PRO = (
    re.compile(r"answer is \(?([A-J])\)?"),
    re.compile(r".*[aA]nswer:\s*([A-J])"),
    re.compile(r"\b[A-J]\b(?!.*\b[A-J]\b)", re.DOTALL),
)


def mmlu_pro_rule(completions: list, golds: list[str]) -> list:
    """Score by MMLU-Pro's extraction: "answer is (X)", else "Answer: X", else the last capital letter."""
    rewards = []
    for completion, gold in zip(completions, golds, strict=True):
        matches = (pattern.search(completion[0]["content"]) for pattern in _MMLU_PRO)
        found = next((match for match in matches if match), None)
        rewards.append(float(found is not None and found.group(found.lastindex or 0) == gold))
    return rewards


def squad_script(completions: list, golds: list[str]) -> list:
    """Score by the exact match of SQuAD's script, from its description, on the text of the answer tag."""

    def normalised(text: str) -> str:
        text = "".join(character for character in text.lower() if character not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

    answers = (
        completion[0]["content"].rpartition("<answer>")[2].partition("</answer>")[0] for completion in completions
    )
    return [float(normalised(answer) == normalised(gold)) for answer, gold in zip(answers, golds, strict=True)]


def open_r1_repetition(completions: list, golds: list[str]) -> list:
    """Score by open-r1's repetition penalty, from its description: words between white space, lower-cased."""
    rewards = []
    for completion in completions:
        words = completion[0]["content"].lower().split()
        ngrams = [tuple(words[start : start + 3]) for start in range(len(words) - 2)]
        rewards.append(len(set(ngrams)) / len(ngrams) - 1 if ngrams else 0.0)
    return rewards


def with_token_ids(reward: Callable[..., list]) -> Scorer:
    """Return a reward on token ids, here the bytes of the text, which are more than its tokens."""
    return lambda completions, golds: reward(
        completions=completions, completion_ids=[completion_text(row).encode() for row in completions]
    )


def trl_repetition(**columns: list) -> list:
    """Score with TRL's repetition penalty."""
    from trl.rewards import get_repetition_penalty_reward

    return get_repetition_penalty_reward()(**columns)


AGE_SCHEMA = {
    "type": "object",
    "required": ["name", "age"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "additionalProperties": False,
}


def with_schema(completions: list, golds: list[str]) -> list:
    """Score with our reward and a schema in every row."""
    return JsonSchema()(completions=completions, schema=[AGE_SCHEMA] * len(completions))


def plain_jsonschema(completions: list, golds: list[str]) -> list:
    """Score like a short script: the text of the fence through `json.loads` and `jsonschema.validate`."""
    import jsonschema

    rewards = []
    for completion in completions:
        text = completion[0]["content"].rpartition("```json")[2].partition("```")[0]
        try:
            jsonschema.validate(json.loads(text), AGE_SCHEMA)
            rewards.append(1.0)
        except (ValueError, jsonschema.ValidationError):
            rewards.append(0.0)
    return rewards


# Five instruction types of IFEval, which the texts here follow.
INSTRUCTIONS: dict[str, dict] = {
    "keywords:existence": {"keywords": ["boxes", "pens"]},
    "length_constraints:number_words": {"num_words": 20, "relation": "at least"},
    "detectable_format:title": {},
    "keywords:forbidden_words": {"forbidden_words": ["apple", "pear"]},
    "startend:end_checker": {"end_phrase": "Done."},
}


def five_instructions(completions: list, golds: list[str]) -> list:
    """Score with our reward and the same instructions in every row."""
    rows = len(completions)
    return Instructions()(
        completions=completions,
        instruction_id_list=[list(INSTRUCTIONS)] * rows,
        kwargs=[list(INSTRUCTIONS.values())] * rows,
    )


@cache
def _lm_eval_ifeval() -> Any:
    """Return lm-evaluation-harness' checks, without the rest of the harness and without NLTK's data."""
    import nltk

    (folder,) = importlib.util.find_spec("lm_eval").submodule_search_locations  # type: ignore[union-attr,misc]
    for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ifeval"):
        sys.modules[name] = module = types.ModuleType(name)
        module.__path__ = [folder + name.removeprefix("lm_eval").replace(".", "/")]
    nltk.data.find = lambda *args, **kwargs: "found"
    return importlib.import_module("lm_eval.tasks.ifeval.utils")


def lm_eval_instructions(completions: list, golds: list[str]) -> list:
    """Score by lm-evaluation-harness' strict verdict, as the share of instructions followed."""
    utils = _lm_eval_ifeval()
    row = utils.InputExample(0, list(INSTRUCTIONS), "a prompt", list(INSTRUCTIONS.values()))
    rewards = []
    for completion in completions:
        followed = utils.test_instruction_following_strict(row, completion[0]["content"]).follow_instruction_list
        rewards.append(sum(followed) / len(followed))
    return rewards


SENTENCE = "<think>\n{body}\n</think>\nThe answer is ({answer})."
PLAIN = "{body} {answer}"
FENCED = "{body}\n```json\n{answer}\n```"
ANN = '{"name": "Ann", "age": 30}'
LONG_STRING = '```json\n{{"name": "{body}", "age": {answer}}}\n```'
TITLED = "<<Pens>>\n{body} {answer}"
# Scorer, layout and right answer by task. Peers follow ours.
TASKS: dict[str, tuple[Scorer, str, str]] = {
    "choice_correctness, tag": (ours(ChoiceCorrectness()), TAGGED, "B"),
    "choice_correctness, sentence": (ours(ChoiceCorrectness()), SENTENCE, "B"),
    "choice_correctness, no thinking": (
        ours(ChoiceCorrectness()),
        SENTENCE.removeprefix("<think>\n").replace("</think>", ""),
        "B",
    ),
    "MMLU-Pro's rule": (mmlu_pro_rule, SENTENCE, "B"),
    "string_match": (ours(StringMatch()), TAGGED, "the Danube"),
    "string_match, match: f1": (ours(StringMatch(match="f1")), TAGGED, "the Danube"),
    "SQuAD's script": (squad_script, TAGGED, "the Danube"),
    "repetition": (ours(Repetition()), PLAIN, ""),
    "TRL's repetition penalty": (with_token_ids(trl_repetition), PLAIN, ""),
    "open-r1's repetition penalty": (open_r1_repetition, PLAIN, ""),
    "json_schema, prose and a fence": (with_schema, FENCED, ANN),
    "json.loads and jsonschema, the same": (plain_jsonschema, FENCED, ANN),
    "json_schema, a long string in it": (with_schema, LONG_STRING, "30"),
    "json.loads and jsonschema, the same one": (plain_jsonschema, LONG_STRING, "30"),
    "instructions, five kinds": (five_instructions, TITLED, "Done."),
}
if importlib.util.find_spec("lm_eval") and importlib.util.find_spec("nltk"):
    TASKS["lm-evaluation-harness' IFEval"] = (lm_eval_instructions, TITLED, "Done.")


def print_tasks(rounds: int) -> None:
    """Print the cost of a short and a long completion for the rewards of other tasks."""
    print("\nOther tasks, CPU time of one completion against its length")
    _print_lengths(TASKS, rounds)


class _JudgesEndpoint(BaseHTTPRequestHandler):
    """Server that answers every chat completion at once, with a verdict that every judge can read."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer a chat completion."""
        self.rfile.read(int(self.headers["Content-Length"]))
        message = {"role": "assistant", "content": '{"reason": "yes", "score": 10}'}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "stub",
                 "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}  # fmt: skip
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


def verifiers_judge(url: str, completions: list[str]) -> None:
    """Score with verifiers' `JudgeRubric`, all completions at once."""
    import verifiers
    from openai import AsyncOpenAI

    async def judge() -> None:
        async with AsyncOpenAI(base_url=url, api_key="none") as client:
            rubric = verifiers.JudgeRubric(judge_client=client, judge_model="stub")
            await asyncio.gather(*(rubric.judge("p", completion, "10") for completion in completions))

    asyncio.run(judge())


def print_judges(rounds: int, rows: int = 64) -> None:
    """Print the cost of a judge without its model: prompts, requests, replies, and the cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _JudgesEndpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    print(
        f"\nA judge that answers at once: CPU time of one completion, {rows} different ones a call, the server's share "
        "included"
    )
    print(f"{'scorer':36}{'250 chars':>14}{'16,000 chars':>14}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as cache_folder:
        judges: dict[str, Callable[[list[str]], object]] = {
            "judge": lambda texts: JudgeScore(url, "stub", num_generations=1)(["p"] * rows, texts),
            "judge, replies in the cache": lambda texts: JudgeScore(url, "stub", num_generations=1, cache=cache_folder)(
                ["p"] * rows, texts
            ),
        }
        if _found("verifiers") and importlib.util.find_spec("openai"):
            judges["verifiers' JudgeRubric"] = partial(verifiers_judge, url)
        calls = {}
        for name, call in judges.items():
            for length in (250, 16_000):
                texts = [f"{row} {'She has 12 boxes of 30 pens each. ' * 500}"[:length] for row in range(rows)]
                calls[f"{name}/{length}"] = partial(call, texts)
        seconds = median_seconds(calls, rounds, time.process_time)
    server.shutdown()
    for name in judges:
        short, long = (seconds[f"{name}/{length}"] / rows * 1e6 for length in (250, 16_000))
        print(f"{name:36}{short:>11.2f} µs{long:>11.2f} µs{long / short:>8.1f}")


VERSIONED = ("trl", "math-verify", "sympy", "jsonschema", "google-re2")
PEERS = {"lm_eval": "IFEval", "verifiers": "a judge (before 0.4)", "open_r1": "its rewards"}


def print_missing_peers() -> None:
    """Print the peers that are not installed and therefore have no row."""
    for name, what in PEERS.items():
        if not _found(name):
            print(f"{name} ({what}): not installed")


def print_import_time(rounds: int) -> None:
    """Print the time of `import grpo_rewards` beside Python's own start, each in a new process."""
    codes = {"python": "pass", "import grpo_rewards": "import grpo_rewards"}
    run = partial(subprocess.run, check=True)
    calls = {name: partial(run, [sys.executable, "-c", code]) for name, code in codes.items()}
    seconds = median_seconds(calls, rounds, lambda: sum(os.times()[2:4]))
    print("\nA fresh process, CPU time")
    for name, value in seconds.items():
        print(f"{name:36}{1000 * value:>11.0f} ms")


ADVERSARIAL = {
    "10^{10^{10}}": "10^{10^{10}}",
    "9^{9^{9^9}}": "9^{9^{9^9}}",
    "7^{100000000}": "7^{100000000}",
    "1\\times10^{999999999}": "1\\times10^{999999999}",
    "100000000!": "100000000!",
    "\\binom{20000}{10000}": "\\binom{20000}{10000}",
    "gcd of powers": "\\gcd(7^{10000000},3^{10000000})",
    "5,000 braces": "{" * 5000 + "}" * 5000,
    "8,000 spaces": "1" + " " * 8000 + "x",
    "16,000 tags": "\n</think>\n<answer>\n" * 16_000,
    "1 MB of text": "18 " * 350_000,
    "NUL and a lone surrogate": "\x00\ud800",
}
TEXT_LIMIT_SECONDS = 6


def print_adversarial() -> None:
    """Print the time of each scorer on each text in a thread, where SIGALRM cannot interrupt it."""
    names = [BASE, "math_correctness", "source document", "TRL accuracy_reward", "math-verify, whole text"]
    print(f"\nOne adversarial answer in a worker thread (gold x+1; stopped after {TEXT_LIMIT_SECONDS} s)")
    print(f"{'text':26}" + "".join(f"{name:>25}" for name in names))
    for kind in ADVERSARIAL:
        print(f"{kind:26}" + "".join(f"{_adversarial_cell(name, kind):>25}" for name in names), flush=True)


def _adversarial_cell(name: str, kind: str) -> str:
    command = [sys.executable, __file__, "--cell", name, kind]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TEXT_LIMIT_SECONDS + 20)
    except subprocess.TimeoutExpired:
        return "hangs"
    return run.stdout.strip().splitlines()[-1] if run.returncode == 0 else "dies"


HOSTILE = {
    "nested parentheses": lambda n: "(" * (5 + n % 60) + "x" + ")" * (5 + n % 60) + f"+{n}",
    "open parentheses": lambda n: "(" * (20 + n),
    "towers of powers": lambda n: "^".join(["x"] * (3 + n % 20)) + f"+{n}",
    "powers of a sum": lambda n: f"(x+{n})^{{{900 + n}}}",
    "a long product": lambda n: "".join(f"(x+{factor}+{n})" for factor in range(60)),
    "limits": lambda n: f"\\lim_{{x\\to {n}}} \\frac{{\\sin(x^x)}}{{x!}}",
    "sines": lambda n: "+".join(f"\\sin({k}x+{n})\\cos({k + 1}x)" for k in range(25)),
}
HOSTILE_ROWS = 256


def print_hostile() -> None:
    """Print the time of one call of `math_correctness` with many different hostile formulas of one kind."""
    reward = MathCorrectness()
    reward(completions=["\\boxed{x+2}"], answer=["x+1"])  # starts the server
    print(f"\n{HOSTILE_ROWS} different hostile formulas in one call (gold x+1)")
    for kind, make in HOSTILE.items():
        texts = [f"\\boxed{{{make(number)}}}" for number in range(HOSTILE_ROWS)]
        metrics: dict[str, float] = {}
        start = time.perf_counter()
        reward(completions=texts, answer=["x+1"] * HOSTILE_ROWS, log_metric=metrics.__setitem__)
        seconds = time.perf_counter() - start
        print(f"{kind:36}{seconds:>11.1f} s{metrics['rewards/math_correctness/timeouts']:>8.0f} ran out", flush=True)


def print_audit(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print the time of an audit of 24 rows."""
    from grpo_rewards.audit.audit import auditor_of

    questions = [(number, {"question": body, "answer": gold}) for number, (body, _, gold) in enumerate(rows[:200], 1)]
    print("\nAn audit of 24 rows")
    for name in ("gsm8k_correctness", "math_correctness"):
        start = time.perf_counter()
        auditor_of([name], questions, "rows").audit()
        print(f"{name:36}{time.perf_counter() - start:>11.1f} s", flush=True)


def measure_cell(name: str, kind: str) -> None:
    """Print one cell of the adversarial table, in a process of its own, which can be killed if it hangs."""
    scorer, layout = SCORERS[name]
    # The first call pays for imports and for the start of our server.
    scorer(completions_of([("", "x-1", "")], layout), ["x+1"])
    batch, outcome = completions_of([("", ADVERSARIAL[kind], "")], layout), []

    def score() -> None:
        start = time.perf_counter()
        try:
            scorer(batch, ["x+1"])
            outcome.append(f"{1000 * (time.perf_counter() - start):,.1f} ms")
        except Exception as error:
            outcome.append(f"raises {type(error).__name__}")

    thread = threading.Thread(target=score, daemon=True)
    thread.start()
    thread.join(TEXT_LIMIT_SECONDS)
    print(outcome[0] if outcome else "hangs", flush=True)
    from grpo_rewards.math.symbolic import shut_down

    shut_down()
    os._exit(0)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--solutions", help="GSM8K's model solutions (JSONL)")
    parser.add_argument("--skip-adversarial", action="store_true")
    parser.add_argument("--cell", nargs=2, metavar=("SCORER", "TEXT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cell:
        return measure_cell(*arguments.cell)
    rng = random.Random(0)
    rows = recorded_solutions(arguments.solutions, rng) if arguments.solutions else made_up_solutions(rng)
    versions = ", ".join(f"{name} {version(name)}" for name in ("grpo-rewards", *VERSIONED, *PEERS) if _found(name))
    print(f"Python {platform.python_version()}, {platform.machine()}, {versions}")
    print_speed(rows, arguments.rounds)
    print_length(arguments.rounds)
    print_tasks(arguments.rounds)
    print_judges(arguments.rounds)
    print_import_time(arguments.rounds)
    print_missing_peers()
    if not arguments.skip_adversarial:
        print_adversarial()
        print_hostile()
    print_audit(rows)


def _found(name: str) -> bool:
    from importlib.metadata import PackageNotFoundError

    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
