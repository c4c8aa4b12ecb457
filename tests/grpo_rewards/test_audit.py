"""The command `grpo-rewards audit`: it finds the fault of each sloppy reward, and none in ours."""

import json

import pytest

from grpo_rewards.audit.audit import Caller, auditor_of
from grpo_rewards.audit.wrong_completions import KINDS, Case, CompletionLayout, question_of
from grpo_rewards.cli import main
from grpo_rewards.registry import build_rewards
from tests.support.errors import refused
from tests.support.word_problems import gsm8k_rows

SLOPPY = "tests.support.sloppy_rewards"
NUMBERS = [
    {"question": "How many apples has she?", "answer": "18"},
    {"question": "How many dollars has she gained?", "answer": "-42"},
    {"question": "What does it weigh?", "answer": "2.5"},
    {"question": "How many steps are there?", "answer": "1365"},
]
WORDS = ["Paris", "the Danube", "Isaac Newton", "photosynthesis", "New York City"]
TEXTS = [{"question": f"What is it, in case {number}?", "answer": word} for number, word in enumerate(WORDS)]
OPTIONS = [["Paris", "Rome", "Berlin", "Madrid"], ["a cat", "a dog", "a horse", "a cow"], ["7", "8", "9", "10"]]
CHOICES = [
    {"question": f"Which one, in case {number}?", "choices": options, "answer": "CAB"[number]}
    for number, options in enumerate(OPTIONS)
]
FORMULAS = [
    {"problem": f"Simplify expression {number}.", "solution": f"It is \\boxed{{{formula}}}."}
    for number, formula in enumerate([r"\frac{\sqrt{3}}{4}", "x^2+1", r"(1,2)"])
]


def audited(reward, rows, **options):
    name = reward if isinstance(reward, dict) or reward.endswith("correctness") else f"{SLOPPY}.{reward}"
    return auditor_of([name], list(enumerate(rows, 1)), "rows.jsonl", **options).audit()


def paid_kinds(audit):
    return {kind.name for verdict in audit.verdicts for kind in verdict.kinds if kind.paid}


def is_paid(kind, audit):
    """Return True if a kind whose name begins so is paid."""
    return any(name.startswith(kind) for name in paid_kinds(audit))


def broken_checks(audit):
    return {broken.check for broken in audit.broken if broken.is_serious}


SLOPPY_KINDS = {
    "last_number": {"denied or taken", "several values", "gold in the"},
    "contains": {"inside a longer", "several values"}, "evaluates": {"code"},
    "any_json": {"JSON with another", "values that break", "another answer"},
    "format_only": {"format without", "no answer", "another answer"}, "any_tag": {"format without", "gold in the"},
    "folded_substring": {"inside a longer", "several values", "denied or taken"}, "length": {"keywords and padding"},
    "in_thinking": {"gold in the"}, "first_match": {"several values"},
    "near": {"another number"}, "sorted_characters": {"cut short"},
}  # fmt: skip


def test_a_sloppy_reward_is_found_by_the_kinds_that_it_pays():
    for reward, kinds in SLOPPY_KINDS.items():
        audit = audited(reward, NUMBERS[:2], most=1)
        assert audit.found, reward
        assert {kind for kind in kinds if not is_paid(kind, audit)} == set(), reward


def test_a_broken_contract_is_named():
    for reward, check in (
        ("floats", "raises"), ("not_finite", "finite"), ("depends_on_batch", "other rows"), ("draws", "deterministic"),
        ("returns_none", "count"), ("none_for_wrong", "none"), ("empties_completions", "arguments"),
        ("takes_no_columns", "columns"),
    ):  # fmt: skip
        audit = audited(reward, NUMBERS[:2], most=1)
        assert audit.found, reward
        assert check in broken_checks(audit), reward


def test_a_careful_reward_passes_in_either_shape_and_scale():
    for reward in ("careful", "messages_only", "with_penalty"):
        audit = audited(reward, NUMBERS[:3], most=2)
        assert (audit.found, paid_kinds(audit), broken_checks(audit)) == (False, set(), set()), reward
        assert audit.verdicts[0].unpaid == []


def test_printing_is_noted_and_does_not_fail():
    audit = audited("prints", NUMBERS[:2])
    assert [(broken.check, broken.is_serious) for broken in audit.broken] == [("prints", False)]
    assert not audit.found


def test_a_tag_of_the_rewards_own_is_found_in_its_source():
    (verdict,) = audited("custom_tag", NUMBERS[:2]).verdicts
    assert "final" in verdict.called
    assert verdict.unpaid == []


OWN = [
    ({"name": "gsm8k_correctness"}, gsm8k_rows(8)),
    ({"name": "gsm8k_correctness", "kwargs": {"tags": ["reasoning", "answer"]}}, NUMBERS),
    ({"name": "gsm8k_correctness", "kwargs": {"extract": "boxed"}}, NUMBERS), ({"name": "string_match"}, TEXTS),
    ({"name": "choice_correctness", "kwargs": {"extract": "sentence"}}, CHOICES),
    ({"name": "math_correctness", "kwargs": {"gold_column": "solution", "extract": "boxed"}}, FORMULAS),
]  # fmt: skip


def test_no_fault_is_found_in_our_rewards():
    for spec, rows in OWN:
        audit = audited(spec, rows, most=1)
        found = {kind.name: kind.completion for verdict in audit.verdicts for kind in verdict.kinds if kind.paid}
        assert (found, audit.broken, audit.found) == ({}, [], False), spec
        assert audit.verdicts[0].unpaid == []
        assert len(audit.verdicts[0].kinds) >= 10


def test_the_form_of_a_gold_decides_what_equals_it():
    for columns, form, right, wrong in (
        ({"answer": "18"}, "number", ["18", "$18.00", "18 apples"], ["17", "1 8", "17 or 18", "181"]),
        ({"answer": "She has 18.\n#### 1,800"}, "number", ["1800"], ["18"]),
        ({"answer": 2.5}, "number", ["2.50", "5/2"], ["2", "25"]),
        ({"answer": "b) Rome", "choices": ["Paris", "Rome"]}, "choice", ["B", "Rome", "(b)"], ["A", "Paris", "A or B"]),
        ({"answer": 1, "choices": ["Paris", "Rome"]}, "choice", ["B", "Rome"], ["A"]),
        ({"answer": "C"}, "choice", ["C", "c"], ["D"]),
        ({"answer": ["the Danube", "Donau"]}, "text", ["danube", "Donau."], ["Rhine", "not the Danube"]),
        ({"answer": {"text": ["Ann"]}}, "text", ["ann"], ["Anna"]),
        ({"answer": {"name": "Ann"}}, "object", ['{"name": "Ann"}'], ['{"name": "Bob"}', "{}"]),
    ):
        question = question_of(1, columns, "answer", None, None)
        assert question.form == form
        assert [question.is_right(text) for text in right + wrong] == [True] * len(right) + [False] * len(wrong)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


REWARD_FILE = """
def score(prompts, completions, solution, **columns):
    return [float(gold in completion) for completion, gold in zip(completions, solution)]
"""


@pytest.fixture
def audit_own(tmp_path, capsys):
    """Return the outcome of the command for a sloppy reward in a file: its exit code and its output."""
    (tmp_path / "rewards.py").write_text(REWARD_FILE)
    rows = [{"question": row["question"], "solution": row["answer"]} for row in NUMBERS]
    path = write(tmp_path / "rows.jsonl", rows)

    def call(*words):
        code = main(["audit", path, "--reward", f"{tmp_path}/rewards.py:score", *(words or ["--rows", "2"])])
        return code, capsys.readouterr().out

    return call


def test_the_command_names_a_fault_and_an_example_and_exits_with_1(audit_own):
    code, output = audit_own()
    assert code == 1
    assert "inside a longer" in output
    assert "2 rows" in output
    assert "\x1b" not in output
    assert "\u202e" not in output


def test_json_has_every_kind_with_its_best_completion(audit_own):
    code, output = audit_own("--json")
    result = json.loads(output)
    (verdict,) = result["verdicts"]
    assert (code, result["found"], verdict["name"], result["broken"]) == (1, True, "score", [])
    (best,) = (kind for kind in verdict["kinds"] if kind["name"].startswith("inside a longer"))
    assert best["share"] == 1
    assert NUMBERS[best["row"] - 1]["answer"] in best["completion"]


def test_the_same_seed_gives_the_same_audit(audit_own):
    outputs = [audit_own("--json", "--rows", "1", "--seed", seed) for seed in ("3", "3", "4")]
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_recipe_is_judged_by_its_correctness_reward(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rewards:\n  - gsm8k_correctness\n  - {name: tag_count, weight: 10}\n")
    path = write(tmp_path / "rows.jsonl", NUMBERS)
    assert main(["audit", path, "--reward", str(recipe), "--rows", "2"]) == 0
    output = capsys.readouterr().out
    assert "gsm8k_correctness\n" in output
    assert "tag_count" not in output


def test_a_declared_kind_decides_what_is_judged():
    rows = list(enumerate(NUMBERS[:2], 1))
    sloppy = {"name": f"{SLOPPY}.contains", "alias": "sloppy", "kind": "correctness"}
    beside = {"name": f"{SLOPPY}.any_tag", "alias": "beside", "kind": "format"}
    assert [verdict.name for verdict in auditor_of([sloppy, beside], rows, "f").audit().verdicts] == ["sloppy"]
    alone = auditor_of([beside], rows, "f").audit()
    assert (alone.found, alone.verdicts) == (False, [])
    assert auditor_of([f"{SLOPPY}.any_tag"], rows, "f").audit().found
    with refused("`reward`, `two`", "`kind: correctness`"):
        auditor_of([f"{SLOPPY}.any_tag", {"name": f"{SLOPPY}.contains", "alias": "two"}], rows, "f").audit()


def test_a_reward_that_calls_a_model_is_not_audited():
    judge = {"name": "judge", "kwargs": {"base_url": "http://localhost/v1", "model": "m", "num_generations": 4}}
    with refused("reward `judge`"):
        auditor_of([judge], list(enumerate(NUMBERS, 1)), "f").audit()


def test_a_solution_is_reduced_to_its_answer_if_the_reward_needs_that():
    audit = audited("careful", gsm8k_rows(3), most=1)
    assert "golds are reduced" in audit.verdicts[0].called
    assert not audit.found


def test_a_reward_that_pays_no_right_answer_is_found():
    spec = {"name": "gsm8k_correctness", "kwargs": {"extract": "boxed"}}
    audit = audited(spec, NUMBERS[:2], layout="<a>{answer}</a>")
    assert audit.found
    assert audit.verdicts[0].unpaid == [1, 2]


def test_a_reward_that_scores_no_right_answer_is_named():
    with refused("reward `unscored`", 2):
        audited("unscored", NUMBERS[:2])


def test_a_wrong_call_is_one_sentence(tmp_path, capsys):
    for message, *options in (("`nope`", "gsm8k_correctness", "--gold_column", "nope"), ("`tests`", "unit_tests")):
        assert main(["audit", write(tmp_path / "rows.jsonl", NUMBERS), "--reward", *options]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


COUNTDOWN = [
    {"nums": [20, 5], "target": 15, "right": "<think>\nMinus.\n</think>\n<answer>20 - 5</answer>", "formula": "20 - 5"},
    {"nums": [7, 2, 4], "target": 9, "right": [{"role": "assistant", "content": "<answer>7 - 2 + 4</answer>"}],
     "formula": "7 - 2 + 4"},
    {"nums": [30, 6], "target": 36, "right": "It is:\n<answer>\n30 + 6\n</answer>", "formula": "30 + 6"},
]  # fmt: skip


@pytest.mark.parametrize("right", ["right", "formula"])
def test_a_reward_that_verifies_is_given_a_right_completion(right):
    found = audited({"name": f"{SLOPPY}.countdown", "kind": "correctness"}, COUNTDOWN, right=right)
    (verdict,) = found.verdicts
    assert (verdict.right, verdict.wrong, verdict.unpaid) == (1.0, 0.0, [])
    assert not found.found, paid_kinds(found)
    assert len(verdict.kinds) >= 10


def test_a_reward_that_verifies_is_not_told_of_another_layout_alone(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in COUNTDOWN))
    reward = f"{{name: {SLOPPY}.countdown, kind: correctness}}"
    assert main(["audit", str(path), "--reward", reward]) == 1
    assert "--right COLUMN" in capsys.readouterr().out
    assert main(["audit", str(path), "--reward", reward, "--right", "right"]) == 0
    assert main(["audit", str(path), "--reward", reward, "--right", "none"]) == 2
    assert "`none`" in capsys.readouterr().err
    assert main(["audit", str(path), "--reward", reward, "--right", "nums"]) == 2
    assert "`nums`" in capsys.readouterr().err


def test_a_right_completion_is_read_where_it_states_its_answer():
    for completion, answer in (
        ("<think>a</think>\n<final>\n3 + 4\n</final>\n", "3 + 4"), ("So \\boxed{3 + 4}.", "3 + 4"), ("3 + 4", "3 + 4"),
        ("Here:\n```python\nx = 1\n```\n", "x = 1"), ("<answer>a < b</answer>", "a < b"),
    ):  # fmt: skip
        question = question_of(1, {"right": completion}, "right", None, "right")
        assert question is not None
        assert question.golds == (answer,)


CITIES = {"answer": "B", "choices": ["Paris", "Rome", "Oslo"]}


def test_a_kind_changes_the_answer_in_its_way():
    for kind, columns, texts in (
        ("another answer", {"answer": "18"}, ["7", "19"]),
        ("another answer", {"answer": {"a": 1}}, ["7", '{"a": "something else"}', "{}"]),
        ("another number", {"answer": "-2.5"}, ["-1.5", "-3.5", "-2.1", "-2.9", "-1.6", "2.5", "-25", "-0.25", "0"]),
        ("another number", {"answer": "0"}, ["1", "-1", "0.4", "-0.4", "0.9"]),
        ("another number", {"answer": "Rome"}, []),
        ("inside a longer", {"answer": "-18"}, ["-187", "-718", "-3184", "-0.181"]),
        ("inside a longer", {"answer": "x^2+1"}, ["x^2+1+1", "1+x^2+1"]),
        ("inside a longer", {"answer": "x<2"}, []),
        ("cut short", {"answer": "123"}, ["12", "23", "1", "3", "321", "231", "213", "1 2 3", "1, 2, 3"]),
        ("cut short", {"answer": "7"}, []),
        ("several values", {"answer": "18"}, ["18 or 7", "7 or 18", "18]\n[7"]),
        ("several values", CITIES, ["B or A", "A, C, B"]),
        ("denied or taken", {"answer": "18"}, ["not 18", "18. Wait, no: 7"]),
        ("no answer", {"answer": "0", "question": "Why?"}, ["", "unknown", "Why?"]),
    ):
        question = question_of(1, columns, "answer", None, None)
        right, *others = next(iter(question.ways().values()))
        (make,) = (make for name, make in KINDS.items() if name.startswith(kind))
        found = make(Case(question, CompletionLayout("[{answer}]"), right, others or ["7"]))
        assert {f"[{text}]" for text in texts} <= set(found), kind
        assert texts or not found
        assert f"[{right}]" not in found


def test_a_conversation_reaches_the_reward_as_a_trainer_passes_it():
    (reward,) = build_rewards([f"{SLOPPY}.careful"])
    prompt = [{"role": "system", "content": "Count."}, {"role": "user", "content": "Why?"}]
    question = question_of(1, {"answer": "So.\n#### 7", "prompt": prompt}, "answer", None, None)
    batch = Caller(reward, ["answer", "prompt"], "messages", ["answer"]).batch([(question, "It is 7.")])
    assert batch["prompts"] == [prompt]
    assert batch["completions"] == [[{"role": "assistant", "content": "It is 7."}]]
    assert (batch["answer"], batch["completion_ids"]) == (["7"], [[0, 1, 2]])
    assert Caller(reward, ["answer", "prompt"], "text").batch([(question, "")])["prompts"] == ["Why?"]
