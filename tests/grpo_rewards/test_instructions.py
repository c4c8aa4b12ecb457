"""The reward for IFEval's instructions: pay, traps, the reference implementation, and bounds."""

import json
import math
import pickle
import random
import re
import string
import subprocess
import sys

import pytest

from grpo_rewards.ifeval import KINDS, Instructions, count_capital_words, count_sentences
from tests.support.growth import growth


def score(text, *instructions, **arguments):
    ids = [name for name, _ in instructions]
    columns = {}
    (result,) = Instructions(**arguments)(
        completions=[text],
        instruction_id_list=[ids],
        kwargs=[[given for _, given in instructions]],
        log_extra=columns.__setitem__,
    )
    return result, columns["verdict"][0]


NO_COMMA = ("punctuation:no_comma", {})
LOWER = ("change_case:english_lowercase", {})
QUOTED = ("startend:quotation", {})


def test_the_pay_is_an_argument():
    assert score("a, b", NO_COMMA, LOWER, pay=4)[0] == 2.0
    reward = Instructions(pay=4)
    assert (reward.highest_pay, reward.kind, reward.__name__) == (4.0, "correctness", "instructions")
    assert pickle.loads(pickle.dumps(reward)) == reward
    assert score("a</think>b, c", NO_COMMA, prefilled="think")[0] == 0.0
    assert score("a, b</think>c", NO_COMMA, prefilled="think")[0] == 1.0
    with pytest.raises(ValueError, match="loose"):
        Instructions(rule="loose")


# A completion that follows the instruction, one that only seems to, and the reason why it does not.
AT_LEAST_3 = {"relation": "at least"}
TRAPS = [
    ("keywords:existence", {"keywords": ["a.c"]}, "x a.c", "abc", "a keyword is no regular expression"),
    ("keywords:existence", {"keywords": ["cat", "dog"]}, "Cat dog", "cat cat", "one keyword of two"),
    ("keywords:frequency", {"keyword": "na", "frequency": 2, **AT_LEAST_3}, "nana", "ana", "once, not twice"),
    ("keywords:frequency", {"keyword": "aa", "frequency": 2, **AT_LEAST_3}, "aaaa", "aaa", "overlapping occurrences"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a", "a a",
     "less than is strict"),
    ("keywords:forbidden_words", {"forbidden_words": ["art"]}, "party", "Art.", "another case"),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 2, "let_relation": "at least"}, "eE", "É e",
     "accents"),
    ("length_constraints:number_words", {"num_words": 3, **AT_LEAST_3}, "a b c", "a, - * !", "punctuation is no word"),
    ("length_constraints:number_words", {"num_words": 3.0, **AT_LEAST_3}, "one-two three", "one two", "a float"),
    ("length_constraints:number_sentences", {"num_sentences": 2, **AT_LEAST_3}, "A b. C d.", "Mr. Smith", "titles"),
    ("length_constraints:number_sentences", {"num_sentences": 2, **AT_LEAST_3}, "Is it? Yes.", "3.5 or 4.5.",
     "decimals"),
    ("length_constraints:number_sentences", {"num_sentences": 2, **AT_LEAST_3}, "A b!\nC", "Wait... what",
     "an ellipsis"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", "a\n\nb",
     "a blank line is no divider"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na***b", "a *** *** b", "a blank paragraph"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 1}, "a", "***", "dividers alone"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
     "a\n\n'So, b", "a\n\nsofa", "a longer word"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "b"},
     "a\n\nb c\n\n", "a\n\n\n\nb", "a blank paragraph is the second"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "Don"},
     "'\"don't go", "\"'don't", "an apostrophe within a quotation mark"),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "so"},
     "So", "so\n\nso", "too many paragraphs"),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a [b]", "nested brackets"),
    ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[]", "[a\nb]", "across lines"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "x p. s. y", "PS y", "without periods"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "p.p.s", "p.s.", "the other postscript"),
    ("detectable_content:postscript", {"postscript_marker": "P.S"}, "P.S y", "pass", "a marker is no expression"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "- a", "- a\n* b", "one too many"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "  * a", "**a**", "bold is no bullet"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "*\n* a", "*", "an asterisk with nothing behind it"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "My answer is no", "without its period"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "*a*", "* *", "a blank highlight"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "**a**", "*a\nb*", "across lines"),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2}, "Section 1 Section2",
     "Section 1 Section B", "a letter"),
    ("detectable_format:multiple_sections", {"section_spliter": "S.", "num_sections": 1}, "S. 1", "Sx 1", "no regex"),
    ("detectable_format:json_format", {}, "```json\n{}\n```", "{} and more", "JSON and more"),
    ("detectable_format:json_format", {}, "[1]", "NaN", "NaN is not JSON"),
    ("detectable_format:json_format", {}, '"a"', '{"a": 1, "a": 2}', "a double key"),
    ("detectable_format:title", {}, "<<a>>", "<< >>", "a blank title"),
    ("detectable_format:title", {}, "<<<a>>>", "<<a\n>>", "a title in two lines"),
    ("combination:two_responses", {}, "a******b", "a****** a", "the same twice"),
    ("combination:two_responses", {}, "******a******b", "a******b******c", "three"),
    ("combination:two_responses", {}, "a ****** b", "a ***** b", "five asterisks"),
    ("combination:two_responses", {}, "a\n******\nb\n******", "a****** ******b", "a blank response between two"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say hi"}, "say HI. hi", "Sure! Say hi", "words before it"),
    ("startend:end_checker", {"end_phrase": "The end."}, "It is the END.", "The end. Bye", "words after it"),
    ("startend:end_checker", {"end_phrase": "The end."}, '"It is the end."', "The end", "without its period"),
    ("startend:quotation", {}, '"a"', '"', "one mark for both"),
    ("startend:quotation", {}, ' "a" ', "'a'", "single marks"),
    ("startend:quotation", {}, '""', "“a”", "curly marks"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "A-B DO",
     "A-B 12 --", "digits"),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, "NASA's", "DON'T",
     "a clitic is a word of its own"),
    ("change_case:english_capital", {}, "NO 1.", "12.", "no letter at all"),
    ("change_case:english_capital", {}, "ÉTÉ", "STRAßE", "ß is a small letter"),
    ("change_case:english_lowercase", {}, "no 1.", "nO", "one capital"),
    ("punctuation:no_comma", {}, "a; b", "1,000", "a comma in a number"),
    ("punctuation:no_comma", {}, "a، b", ",", "a comma alone"),
]  # fmt: skip


def test_words_in_capitals_are_counted():
    assert count_capital_words("I saw NASA's U.S. PLAN: GO-TO, “YES”, 3D... ok") == 7
    assert count_capital_words("CANNOT GONNA IT'S don't") == 6


# --- an independent generator: completions that follow their instructions by construction

WORDS = "river stone garden quiet winter market bridge yellow candle forest".split()  # noqa: SIM905


def _words(rng, count):
    return [rng.choice(WORDS) for _ in range(count)]


def _sentences(rng, count):
    return [f"{' '.join(_words(rng, rng.randrange(3, 8))).capitalize()}{rng.choice('.!?')}" for _ in range(count)]


def _relation(rng, count):
    """Return a relation and a limit that `count` satisfies."""
    return rng.choice([("at least", rng.randrange(count + 1)), ("less than", count + rng.randrange(1, 4))])


def followed(rng, name):
    """Return the arguments of an instruction, and a text that follows it.

    The constraints are written a second time here, from their descriptions in the paper instead of from the code.
    """
    n = rng.randrange(1, 7)
    relation, limit = _relation(rng, n)
    words, sentences, prose = _words(rng, n), _sentences(rng, n), " ".join(_sentences(rng, rng.randrange(1, 5)))
    marker, mark, some = rng.choice(["P.S.", "P.P.S"]), rng.choice(["*", "**"]), rng.randrange(1, n + 1)
    an_object = json.dumps(dict.fromkeys(words, 1), indent=rng.choice([None, 2]))
    return {
        "keywords:existence": ({"keywords": ["owl", "Fig"]}, f"{prose} The fig and the OWL. {prose}"),
        "keywords:frequency": ({"keyword": "owl", "frequency": limit, "relation": relation}, prose + " Owl" * n),
        "keywords:forbidden_words": ({"forbidden_words": ["owl", "fig"]}, prose + " Figs fly."),
        "keywords:letter_frequency": (
            {"letter": "z", "let_frequency": limit, "let_relation": relation}, prose + rng.choice("zZ") * n),
        "length_constraints:number_sentences": (
            {"num_sentences": limit, "relation": relation}, rng.choice([" ", "\n"]).join(sentences)),
        "length_constraints:number_paragraphs": (
            {"num_paragraphs": n}, rng.choice(["\n***\n", "\n\n***\n\n", " *** "]).join(sentences)),
        "length_constraints:number_words": (
            {"num_words": limit, "relation": relation}, rng.choice([" ", ", ", "\n- "]).join(words)),
        "length_constraints:nth_paragraph_first_word": (
            {"num_paragraphs": n, "nth_paragraph": n, "first_word": "owl"},
            "\n\n".join([*sentences[1:], f"{rng.choice(['Owl', 'owl,', 'OWL!'])} {prose}"])),
        "detectable_content:number_placeholders": (
            {"num_placeholders": some}, prose + "".join(f" [{word}]" for word in words)),
        "detectable_content:postscript": ({"postscript_marker": marker}, f"{prose}\n\n{marker} {prose}"),
        "detectable_format:number_bullet_lists": (
            {"num_bullets": n}, f"{prose}\n\n" + "\n".join(f"{rng.choice('-*')} {line}" for line in sentences)),
        "detectable_format:constrained_response": (
            {}, rng.choice(["", prose + " "]) + f"My answer is {rng.choice(['yes', 'no', 'maybe'])}."),
        "detectable_format:number_highlighted_sections": (
            {"num_highlights": some}, prose + "".join(f" {mark}{word}{mark}" for word in words)),
        "detectable_format:multiple_sections": (
            {"section_spliter": "SECTION", "num_sections": some},
            "\n".join(f"SECTION {number}\n{line}" for number, line in enumerate(sentences, 1))),
        "detectable_format:json_format": (
            {}, rng.choice(["{}", "```json\n{}\n```", "```\n{}\n```"]).replace("{}", an_object)),
        "detectable_format:title": ({}, f"<<{' '.join(words)}>>\n\n{prose}"),
        "combination:two_responses": ({}, f"{prose}\n******\n{prose} More."),
        "combination:repeat_prompt": ({"prompt_to_repeat": prose}, f"{prose}\n\nYes."),
        "startend:end_checker": ({"end_phrase": "Any other questions?"}, f"{prose}\nAny other questions?"),
        "startend:quotation": ({}, f'"{prose}"'),
        "change_case:capital_word_frequency": (
            {"capital_frequency": limit, "capital_relation": relation},
            prose + "".join(f" {word.upper()}," for word in words)),
        "change_case:english_capital": ({}, prose.upper()), "change_case:english_lowercase": ({}, prose.lower()),
        "punctuation:no_comma": ({}, prose.replace(",", "")),
    }[name]  # fmt: skip


def test_completions_that_follow_by_construction_are_paid_in_full():
    rng = random.Random(3)
    for name in KINDS:
        for _ in range(15):
            arguments, text = followed(rng, name)
            thinking = rng.choice(["", "<think>\nHm, ok, [a], *b*.\n</think>\n"])
            nulls = dict.fromkeys(("num_words", "keywords", "end_phrase"))  # as IFEval's own data has them
            found = score(thinking + text, (name, {**nulls, **arguments}))
            assert found == (1.0, "follows all"), (name, arguments, text)


# --- the reference implementation

PIECES = [
    *"""the a apple art party NASA NASA's USA DON'T it's IT'S can't CANNOT Hello U.S. 3.5 1,000 A/B WELL-KNOWN I GONNA
    naïve P.S. p.p.s Section SECTION 1 Section1 DON’T""".split(),  # noqa: SIM905
    ". ", "! ", "? ", "...", ", ", ";", "\n", "\n\n", "\n\n\n\n", " *** ", "***", "\n***\n", "******", "\n- ", "\n* ",
    "\n*", "\n** bold", "*hi*", "**bold**", "* *", "[name]", "[ ]", "[[", "]]", "<<title>>", "<<", ">>", '"', "'", "“",
    "(", "```", "```json\n", '{"a": 1}', "[1, 2]", "My answer is yes.", "Any other questions?", "--", "—", "\t", "  ",
]  # fmt: skip


def a_text(rng):
    if rng.random() < 0.05:
        return rng.choice(['{"a": 1}', "```json\n[1]\n```", "```Json\n[]```", "5", '{"a": 1', '"a"'])
    text = "".join(rng.choice(PIECES) + rng.choice(["", " ", " "]) for _ in range(rng.choice([1, 3, 8, 20, 60])))
    text = rng.choice([str, str, str, str.upper, str.lower])(text)
    return rng.choice(["{}", "{}", "{}", '"{}"']).replace("{}", text)


def some_arguments(rng, name, text):
    """Return arguments that a random text may or may not satisfy."""
    arguments, _ = followed(rng, name)
    words = re.findall(r"\w+", text) or ["x"]
    near = {"num_words": len(words) + rng.randrange(2), "first_word": rng.choice(words),
            "capital_frequency": max(1, sum(map(str.isupper, text.split())) + rng.randrange(-1, 2)),
            "keyword": rng.choice(words), "prompt_to_repeat": text[:9].strip() or "x",
            "end_phrase": text[-9:].strip().strip('"').strip() or "x"}  # fmt: skip
    arguments |= {key: value for key, value in near.items() if key in arguments and rng.random() < 0.7}
    return {key: value or 1 for key, value in arguments.items()}  # the reference takes 0 for missing


REFERENCE = """
import json, sys, types
folder, rows = sys.argv[1:]
sys.path.insert(0, folder)
# The tasks' package imports all of the harness; only these files are needed. Sentences would need a download.
for name in ("lm_eval", "lm_eval.tasks", "lm_eval.tasks.ifeval"):
    module = types.ModuleType(name)
    module.__path__ = [folder + "/" + name.replace(".", "/")]
    sys.modules[name] = module
import nltk
nltk.data.find = lambda *args, **kwargs: "found"
from lm_eval.tasks.ifeval import instructions, utils
word_tokenize = nltk.word_tokenize
nltk.word_tokenize = lambda text: word_tokenize(text, preserve_line=True)
instructions.langdetect.detect = lambda text: "en"
verdicts = []
for text, name, arguments in json.load(open(rows)):
    example = utils.InputExample(0, [name], "a prompt", [arguments])
    verdicts.append(utils.test_instruction_following_strict(example, text).follow_all_instructions)
print(json.dumps(verdicts))
"""


@pytest.mark.nightly
def test_the_verdicts_equal_those_of_lm_evaluation_harness(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target"]
    target = str(tmp_path / "packages")
    subprocess.run([*install, target, "nltk", "langdetect", "immutabledict", "packaging"], check=True)
    subprocess.run([*install, target, "--no-deps", "lm_eval==0.4.13"], check=True)
    rng = random.Random(11)
    rows = []
    for name in set(KINDS) - {"length_constraints:number_sentences"}:
        rows += [(text, name, some_arguments(rng, name, text)) for text in (a_text(rng) for _ in range(400))]
        by_construction = (followed(rng, name) for _ in range(20))
        rows += [(text, name, arguments) for arguments, text in by_construction if all(arguments.values())]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, target, str(tmp_path / "rows.json")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    verdicts = json.loads(done.stdout.splitlines()[-1])
    ours = [bool(score(text, (name, arguments))[0]) for text, name, arguments in rows]
    different = [row for row, mine, theirs in zip(rows, ours, verdicts, strict=True) if mine != theirs]
    # NLTK's tokenizer splits off a clitic in the last word of a sentence only if it knows the sentence's end.
    assert {name for _, name, _ in different} <= {"change_case:capital_word_frequency"}, different[:3]
    assert len(different) <= 10
    assert min(sum(v for v, row in zip(verdicts, rows, strict=True) if row[1] == name) for name in KINDS
               if name != "length_constraints:number_sentences") >= 5  # fmt: skip


EVERY_KIND = [(name, followed(random.Random(1), name)[0]) for name in KINDS]

THREE = {
    "keywords:frequency": ("Cat scatter CAT", {"keyword": "cat"}, "frequency", "relation"),
    "keywords:letter_frequency": ("A banan", {"letter": "a"}, "let_frequency", "let_relation"),
    "length_constraints:number_sentences": ("One. Two! Three?", {}, "num_sentences", "relation"),
    "length_constraints:number_words": ("one two-three", {}, "num_words", "relation"),
    "change_case:capital_word_frequency": ("ONE Two THREE I", {}, "capital_frequency", "capital_relation"),
}


def test_the_columns_that_are_read_are_those_of_ifevals_data_or_the_given_ones():
    assert Instructions().columns_read == ("instruction_id_list", "kwargs")
    assert Instructions(ids_column="ids", kwargs_column="given").columns_read == ("ids", "given")
    scores = Instructions(ids_column="ids", kwargs_column="given")(
        completions=["a"], ids=[["punctuation:no_comma"]], given=[[{}]]
    )
    assert scores == [1.0]


# --- Tables


def test_a_completion_earns_the_pay_of_the_table():
    for text, rule, pay, broken in (
        ('"a b"', "share", 1.0, []), ('"a b"', "strict", 1.0, []), ('"A b"', "share", 2 / 3, [LOWER]),
        ('"A b"', "strict", 0.0, [LOWER]), ("A, b", "share", 0.0, [NO_COMMA, LOWER, QUOTED]),
        (" \n", "share", 0.0, [NO_COMMA, LOWER, QUOTED]), ("<think>A, b</think>\n'a'", "share", 2 / 3, [QUOTED]),
        ('<think>"a"', "share", 0.0, [NO_COMMA, LOWER, QUOTED]),
    ):  # fmt: skip
        found, verdict = score(text, NO_COMMA, LOWER, QUOTED, rule=rule)
        assert found == pytest.approx(pay)
        assert [one for one in (NO_COMMA, LOWER, QUOTED) if one[0] in verdict] == broken


WORDS_3 = "length_constraints:number_words"
LETTERS = "keywords:letter_frequency"
UNREADABLE = [
    (None, None), ([], []), (["punctuation:no_comma"], []), ("punctuation:no_comma", [{}]),
    (["language:response_language"], [{"language": "de"}]), (["punctuation:no_comma", "keywords:exists"], [{}, {}]),
    ([7], [{}]), (["keywords:existence"], [{}]), (["keywords:existence"], [{"keywords": "cat"}]),
    (["keywords:existence"], [{"keywords": ["a", ""]}]), (["keywords:existence"], [{"keywords": ("a", 3)}]),
    ([WORDS_3], [{"num_words": 3}]), ([WORDS_3], [{"num_words": -1, "relation": "at least"}]),
    ([WORDS_3], [{"num_words": True, "relation": "at least"}]),
    ([WORDS_3], [{"num_words": math.nan, "relation": "at least"}]),
    ([WORDS_3], [{"num_words": math.inf, "relation": "at least"}]),
    ([WORDS_3], [{"num_words": 3, "relation": "more than"}]),
    ([LETTERS], [{"letter": "ab", "let_frequency": 1, "let_relation": "at least"}]),
    ([LETTERS], [{"letter": "a", "let_frequency": 0.5, "let_relation": "at least"}]),
    ([LETTERS], [{"letter": "a", "let_frequency": "1", "let_relation": "at least"}]),
    (["startend:end_checker"], [None]), (["startend:end_checker"], [{"end_phrase": "  "}]),
    (["length_constraints:nth_paragraph_first_word"], [{"num_paragraphs": 0, "nth_paragraph": 0, "first_word": "a"}]),
]  # fmt: skip


def test_a_row_that_cannot_be_checked_is_none():
    # The reference draws a missing argument at random.
    for ids, arguments in UNREADABLE:
        metrics = {}
        scores = Instructions()(
            completions=["a", "a"], instruction_id_list=[ids, ["punctuation:no_comma"]], kwargs=[arguments, [{}]],
            log_metric=metrics.__setitem__,
        )  # fmt: skip
        assert scores == [None, 1.0], ids
        assert metrics == {"rewards/instructions/unscorable": 1.0, "rewards/instructions/follows_all": 1.0}
    for name, arguments in (
        ("keywords:existence", {"keywords": [" a ", "b"]}), ("startend:end_checker", {"end_phrase": " a b "}),
        (LETTERS, {"letter": " A ", "let_frequency": 0.0, "let_relation": "at least"}),
    ):  # fmt: skip
        assert score("a b", (name, arguments))[0] == 1.0
    with pytest.raises(ValueError, match="`kwargs`.*instruction_id_list"):
        Instructions()(completions=["a"], instruction_id_list=[["punctuation:no_comma"]])


def test_a_trap_breaks_its_instruction():
    for name, arguments, good, bad, trap in TRAPS:
        assert (score(good, (name, arguments))[0], score(bad, (name, arguments))[0]) == (1.0, 0.0), trap
    assert {name for name, *_ in TRAPS} == set(KINDS)
    for label in ("", "json", "Json", "JSON"):
        assert score(f"\n```{label}\n[1, 2]\n```\n", ("detectable_format:json_format", {}))[0] == 1.0
    for letter in [*string.ascii_letters, "!", "#"]:
        assert (
            score(letter * 2, (LETTERS, {"letter": letter, "let_frequency": 2, "let_relation": "at least"}))[0] == 1.0
        )


def test_a_number_is_compared_as_the_relation_says():
    for name, (text, fixed, count, relation) in THREE.items():
        for limit, at_least, less_than in ((2, True, False), (3, True, False), (4, False, True)):
            assert score(text, (name, {**fixed, count: limit, relation: "at least"}))[0] == at_least, name
            assert score(text, (name, {**fixed, count: limit, relation: "less than"}))[0] == less_than, name


MARKS = [
    ("length_constraints:number_paragraphs", "a\n***\nb *** c", "num_paragraphs", {}, [3]),
    ("length_constraints:number_paragraphs", "*** a *** b *** c\n***", "num_paragraphs", {}, [3]),
    ("length_constraints:number_paragraphs", "a ****** b", "num_paragraphs", {}, []),
    ("detectable_format:number_bullet_lists", "- a\n * b\n-c\n**d**\ne - f", "num_bullets", {}, [3]),
    ("detectable_format:number_bullet_lists", "- a\n*\n- c\n*", "num_bullets", {}, [3]),
    ("detectable_content:number_placeholders", "[a] [b]\n[[c]\n[d\ne]", "num_placeholders", {}, [0, 1, 2, 3]),
    ("detectable_format:number_highlighted_sections", "*a* * * *b*\n*c\nd*", "num_highlights", {}, [0, 1, 2]),
    ("detectable_format:multiple_sections", "SECTION 1 SECTION2 Section 3", "num_sections",
     {"section_spliter": "SECTION"}, [0, 1, 2]),
]  # fmt: skip
FIRST_WORDS = [
    ("One a.\n\ntwo, b", 1, "ONE", True), ("One a.\n\ntwo, b", 2, "Two", True), ("One a.\n\ntwo, b", 3, "two", False),
    ('One\n\n\'"Two" is', 2, "two", True), ("One\n\n\n\ntwo", 2, "two", False),  # the blank one is the second
    ("One\n\ntwo\n\nthree", 2, "two", False), ("One\n\n  two", 2, "two", True),
    ("One\n\n \t\n\ntwo", 1, "one", True),  # one of spaces is blank too
]  # fmt: skip
SENTENCES = [
    ("", 0), ("a", 1), ("Dr. Who came. He left.", 2), ("J. Doe came. I. She left.", 3), ("It is 3.5 m. long", 1),
    ('He said "never." Then left', 2), ("(Yes!) Really", 2), ("See p. 3... and so on", 2),
    ("e.g. This and i.e. That", 1), ("Wait... Then go", 2), ("a.m. Now", 1), ("end. (next", 1), ("end. (Next", 2),
    # NLTK too puts a mark that stands alone at the end of the sentence before it.
    ('What? " And', 2), ('He left. ” And so on', 2), ('" What?', 1), ('So it is. "', 1), ('Is it? " ) He left', 2),
    ('"', 1), ('Mr. " Lee', 1), ('end. ( "Next" )', 2), ("I. She left.", 2), ("Why?! Yes", 2), (" \n", 0),
    ("by Ann. 3 left", 2), ("Look at that. iPhones sell.", 1), ("Look at that. (eBay sells.", 1),
    ("Dr. Ann Lee, e.g., paid $3.50. She left (quickly). “Why?” No. 5 knew!", 4),
    ("J. R. Smith said: “ Yes. ”", 1), ("One line\nwithout a period\n- and a list", 1),
]  # fmt: skip


def test_marks_first_words_and_sentences_are_counted():
    for name, text, key, fixed, held in MARKS:
        assert [count for count in range(6) if score(text, (name, {**fixed, key: count}))[0]] == held, text
    for text, nth, word, holds in FIRST_WORDS:
        arguments = {"num_paragraphs": 2, "nth_paragraph": nth, "first_word": word}
        assert score(text, ("length_constraints:nth_paragraph_first_word", arguments))[0] == holds, text
    for text, count in SENTENCES:
        assert count_sentences(text) == count, text


def test_the_cost_of_an_adversarial_text_is_linear():
    reward = lambda text: score(text, *EVERY_KIND)  # noqa: E731
    assert growth(reward, lambda length: '"' * length, 20_000) < 9  # 4 is linear, 16 quadratic
