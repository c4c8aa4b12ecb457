"""Sloppy rewards, as people write them, each with one fault that an audit must find."""

import json
import math
import random
import re


def text_of(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def tagged(text):
    match = re.search(r"<answer>\s*(.*?)\s*</answer>", text, re.DOTALL)
    return match.group(1) if match else None


def last_tagged(text):
    """Return the last answer outside the thinking, as a careful reward does."""
    outside = text.rpartition("</think>")[2].partition("<think>")[0]
    return (re.findall(r"<answer>\s*(.*?)\s*</answer>", outside, re.DOTALL) or [None])[-1]


def number(text):
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def numbers(text):
    return [float(found) for found in re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))]


def each(score):
    """Return a reward that scores every text and gold by itself."""

    def reward(prompts, completions, answer, **columns):
        return [float(score(text_of(one), gold)) for one, gold in zip(completions, answer, strict=True)]

    return reward


def careful(prompts, completions, answer, **columns):
    return [float(last_tagged(text_of(one)) == gold) for one, gold in zip(completions, answer, strict=True)]


def evaluated(text, gold):
    try:
        return eval(tagged(text)) == number(gold)
    except Exception:
        return False


def is_json(text, gold):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def not_a_number(text, gold):
    answer = last_tagged(text)
    return math.nan if answer is None else answer == gold


last_number = each(lambda text, gold: numbers(text)[-1:] == [number(gold)])
contains = each(lambda text, gold: gold in text)
evaluates = each(evaluated)
floats = each(lambda text, gold: float(tagged(text).replace(",", "")) == number(gold))
any_json = each(is_json)
format_only = each(
    lambda text, gold: re.search(r"<think>.*</think>\s*<answer>.*</answer>", text, re.DOTALL) is not None
)
any_tag = each(lambda text, gold: "<" in text and ">" in text)
not_finite = each(not_a_number)
folded_substring = each(lambda text, gold: gold.lower() in (last_tagged(text) or "").lower())
length = each(lambda text, gold: min(len(text) / 2000, 1))
in_thinking = each(lambda text, gold: number(gold) in numbers(text.partition("</think>")[0]))
first_match = each(lambda text, gold: tagged(text) == gold)


def depends_on_batch(prompts, completions, answer, **columns):
    scores = careful(prompts, completions, answer)
    return [score - sum(scores) / len(scores) for score in scores]


# Siblings of the above.


def is_near(text, gold):
    answer = number(last_tagged(text))
    return answer is not None and abs(answer - number(gold)) < 1


sorted_characters = each(lambda text, gold: sorted(last_tagged(text) or "") == sorted(gold))
near = each(is_near)
custom_tag = each(lambda text, gold: (re.findall(r"<final>(.*?)</final>", text) or [""])[0] == gold)


def draws(prompts, completions, answer, **columns):
    return [random.random() for _ in completions]


def returns_none(prompts, completions, answer, **columns):
    return None


def none_for_wrong(prompts, completions, answer, **columns):
    return [score or None for score in careful(prompts, completions, answer)]


def empties_completions(prompts, completions, answer, **columns):
    scores = careful(prompts, completions, answer)
    completions.clear()
    return scores


def takes_no_columns(prompts, completions, answer):
    return careful(prompts, completions, answer)


def prints(prompts, completions, answer, **columns):
    print("\x1b[2Jscoring")
    return careful(prompts, completions, answer)


def messages_only(prompts, completions, answer, **columns):
    return careful(prompts, [completion[0]["content"] for completion in completions], answer)


def with_penalty(prompts, completions, answer, **columns):
    return [2 * score - 1 for score in careful(prompts, completions, answer)]


def countdown(prompts, completions, nums, target, **columns):
    """Verify that the last answer tag makes the target of the numbers: it compares with no gold."""
    scores = []
    for completion, numbers, goal in zip(completions, nums, target, strict=True):
        answer = last_tagged(text_of(completion)) or ""
        is_formula = re.fullmatch(r"\d+( [-+] \d+)*", answer) is not None
        is_complete = sorted(map(int, re.findall(r"\d+", answer))) == sorted(numbers)
        scores.append(float(is_formula and is_complete and eval(answer) == goal))
    return scores


def unscored(completions, **columns):
    """Return None for every completion."""
    return [None] * len(completions)
