"""Formula answers read as a whole: what math-verify skips or misreads earns nothing, and time is bounded per call."""

import math
import time
from fractions import Fraction

import pytest

from grpo_rewards.math import answers, formulas
from grpo_rewards.math.arithmetic import value_of
from grpo_rewards.math.correctness import MathCorrectness

FORMULAS = ["R", "x+1", "\\sqrt{2}", "\\frac{\\pi}{2}", "(1,2)", "\\{1,2\\}", "[1,3)", "y = 2x", "2\\sqrt{3}"]
# Text behind or around a formula that math-verify drops.
DROPPED = [
    "{} \\text{{ is wrong}}", "{} \\text{{maybe}}", "{} \\text{{(?)}}", "{} \\ldots", "({})'",
    "{} \\text{{ is not right}}", "{} \\text{{ (not sure)}}", "\\text{{not }} {}", "{} \\mathrm{{ no}}",
    "{} \\quad \\text{{oder}}", "{} \\textbf{{ nope}}", "{} \\mbox{{ falsch}}", "{} \\dots", "{} ...", "{}, \\cdots",
    "{}^{{\\prime}}", "{}''", "{} ?", "{} 不对", "{} \\lnot", "\\sout{{{}}}", "\\cancel{{{}}}", "\\neg {}", "{} }}",
]  # fmt: skip


def pays(gold, *texts):
    return MathCorrectness(extract="boxed")(
        completions=[f"\\boxed{{{text}}}" for text in texts], answer=[gold] * len(texts)
    )


@pytest.mark.parametrize("gold", FORMULAS)
def test_words_and_marks_around_a_formula_are_not_dropped(gold):
    texts = [dress.format(gold) for dress in DROPPED if dress.count("}}") == dress.count("{{")]
    paid = [text for text, pay in zip(texts, pays(gold, *texts), strict=True) if pay]
    assert paid == []


MISREAD = {
    "\\sqrt2": ["\\sqrt3 = \\sqrt2", "1 = \\sqrt2", "2\\sqrt2 = \\sqrt2", "x = \\sqrt3 = \\sqrt2", "\\sqrt2 = 1",
                "x = \\sqrt3, x = \\sqrt2", "\\approx \\sqrt2", "\\sqrt2, \\sqrt3"],
    "2x": ["3x = y = 2x", "x = 2x", "4x = 2x"],
    "y = 2x": ["x = 2x", "y = 3x = 2x", "z = x = 2x"],
    "\\frac{\\pi}{2}": ["1\\frac12\\pi", "1\\frac{1}{2}\\pi", "1 1/2 \\pi", "\\pi = \\frac{\\pi}{2}"],
    "\\frac32 x": ["3\\frac12 x", "3\\frac{1}{2}x", "3\\dfrac12 x"],
    "2516_8": ["2516_7", "2516", "2516_{16}", "2516_{\\text{seven}}"],
    "101_2": ["101_3", "5_{10}", "101"],
    "(1,3)": ["\\{1,3\\}", "[1,3]", "(1,3]", "1,3", "\\langle 1,3 \\rangle", "(1,3),(1,3)"],
    "\\{1,3\\}": ["(1,3)", "[1,3]", "\\{1\\},\\{3\\}", "\\{\\{1,3\\}\\}"],
    "\\{1,2\\}": ["\\{1\\},\\{2\\}", "(1,2)", "\\{(1,2)\\}"],
    "\\{1,2,3\\}": ["\\{\\{1,2\\},3\\}", "\\{1,2\\},3"],
    "(1,2),(3,4)": ["(1,2,3,4)", "\\{1,2\\},\\{3,4\\}"],
    "x": ["x'", "x''", "x^\\prime"],
    "x'": ["x", "x''"],
    "f'(x)": ["f(x)", "f''(x)"],
    "5\\sqrt2 \\text{ m}": ["5\\sqrt2 \\text{ ft}", "5\\sqrt2 \\text{ m}^2", "5\\sqrt2 \\text{ cm}"],
    "\\sin(30^\\circ)": ["\\sin(30)"],
    "10^\\circ": ["10 rad", "10 \\text{ radians}", "10%", "10 m"],
    "5 \\text{ meters}": ["5 \\text{ feet}", "5 ft", "5 cm", "5 \\text{ square meters}"],
    "5 \\text{ m/s}": ["5 \\text{ km/h}", "5 m/h"],
    "12 \\text{ cm}^2": ["12 cm", "12 \\text{ cm}^3", "12 \\text{ m}^2"],
    "2xy": ["2", "2zw"],
    "\\frac{1}{2}ab": ["\\frac12", "0.5"],
    "\\sqrt{2}": ["1.4142135623730951", "1.41421356237309504880"],
    "\\frac{\\pi}{3}": ["1.0471975511966", "\\frac{\\pi}{3}^\\circ", "60"],
    "2^{10}": ["2^{10}_7", "1023", "20", "210", "1024x"],
    "x=5": ["(x=5)'", "x=5''", "x=5 \\text{ nicht}", "\\text{about }x=5", "x=5 \\text{不对}"],
    "5 \\text{ cm}": ["5 \\text{ cm/s}", "5 °", "5 \\text{ inches}", "(5 \\text{ cm})'"],
    "30^\\circ": ["30°C", "30'", "30 rad"],
    "\\$5": ["5\\%", "5 cents", "5 meters"],
    "2\\pm\\sqrt3": ["2+\\sqrt3", "\\pm2+\\sqrt3", "2", "2\\pm\\sqrt3 i"],
    "\\lfloor x \\rfloor": ["\\lceil x \\rceil", "x", "|x|"],
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}": ["(1,2)", "\\begin{pmatrix}1&2\\end{pmatrix}"],
}  # fmt: skip


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("gold", MISREAD)
def test_a_formula_that_only_looks_equal_earns_nothing(gold):
    texts = MISREAD[gold]
    assert dict(zip(texts, pays(gold, *texts), strict=True)) == dict.fromkeys(texts, 0.0)


EQUAL = {
    "2^{10}": ["1024", "1,024", "2^{10}", "1024.0", "4^5"],
    "5!": ["120", "120.", "$120$"],
    "\\sqrt{16}": ["4", "x = 4", "\\frac{8}{2}"],
    "\\binom{5}{2}": ["10", "\\frac{20}{2}"],
    "\\frac{6!}{3!}": ["120"],
    "\\log_2 8": ["3"],
    "2^{-3}": ["0.125", "\\frac18", "1/8"],
    "\\frac{3\\pi}{2}": ["1\\frac12\\pi", "1.5\\pi", "\\dfrac{3}{2}\\pi", "x = \\frac{3\\pi}{2}"],
    "1\\frac12\\pi": ["\\frac{3\\pi}{2}", "1\\frac{1}{2}\\pi"],
    "\\sqrt2": ["x = \\sqrt2", "x = \\frac{\\sqrt8}{2} = \\sqrt2", "\\sqrt2 \\text{ cm}", "\\sin\\theta = \\sqrt2",
                "\\text{Area} = \\sqrt2", "\\sqrt 2.", "√2", "sqrt(2)"],
    "2x": ["f(x) = 2x", "f'(x) = 2x", "\\frac{dy}{dx} = 2x", "y = x + x = 2x"],
    "y = 2x": ["2x", "y = x + x", "y=2x"],
    "1,2": ["2, 1", "\\{1,2\\}", "1 \\text{ and } 2"],
    "\\{1,2\\}": ["1, 2", "\\{2,1\\}", "\\left\\{1,2\\right\\}"],
    "x=1 \\text{ or } x=2": ["x=1, x=2", "x=2 \\text{ or } x=1"],
    "[1,3) \\cup (4,5]": ["(4,5] \\cup [1,3)", "x \\in [1,3) \\cup (4,5]"],
    "5\\sqrt2 \\text{ m}": ["5\\sqrt2 \\text{ meters}", "5\\sqrt2", "\\sqrt{50} \\text{ m}"],
    "12 \\text{ cm}^2": ["12", "12 cm^2", "12 \\text{ square centimeters}", "12 \\text{ sq. cm}"],
    "10^\\circ": ["10", "10°", "10 degrees"],
    "5 \\text{ meters}": ["5", "5 m", "5 metres", "5 meter"],
    "2516_8": ["2516_{8}", "2516_8"],
    "(A)": ["\\text{(A)}", "(A)"],
    "2xy": ["2yx", "2 x y"],
    "\\emptyset": ["\\{\\}", "\\varnothing"],
    "x^2+y^2=4": ["x^2+y^2-4=0", "4=x^2+y^2"],
}  # fmt: skip


@pytest.mark.parametrize("gold", EQUAL)
def test_an_equal_formula_is_paid(gold):
    texts = EQUAL[gold]
    assert dict(zip(texts, pays(gold, *texts), strict=True)) == dict.fromkeys(texts, 1.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12 + 1", 13), ("2 + 3 * 4", 14), ("(2+3)(4)", 20), ("-3^2", -9), ("2^{2^{2}}", 16), ("2^10", 1024),
        ("\\sqrt[3]{27}", 3), ("8^{\\frac{2}{3}}", 4), ("|-5|", 5), ("7 \\div 2 * 2", 7), ("3 x 6", 18),
        ("1\\frac12", 1.5),
        ("1 8", None), ("x+1", None), ("\\sqrt2", None), ("1/0", None), ("2^2^2", None), ("5!!", None), ("--3", None),
        ("(1,3)", None), ("(2,100)", None), ("", None), ("9^{9^{9}}", None), ("10^{999999}", None), ("(" * 90, None),
        ("100000!", None), ("3\\frac32", None), ("1 +", None),
        ("2\\sqrt{9}", 6), ("3\\binom{4}{2}", 18), ("2(3)(4)", 24), ("\\sqrt9", 3), ("\\sqrt{\\frac{9}{4}}", 1.5),
        ("\\sqrt{-4}", None), ("\\sqrt[20]{1}", 1), ("\\sqrt[21]{1}", None), ("\\sqrt[1]{5}", None),
        ("\\sqrt{8}", None),
        ("\\sqrt{15}", None), ("\\sqrt{17}", None), ("\\sqrt{0}", 0), ("\\binom{5}{0}", 1), ("\\binom{5}{5}", 1),
        ("\\binom{5}{6}", None), ("\\binom{1.5}{1}", None), ("\\binom{5}{-1}", None), ("0!", 1), ("3!", 6),
        ("1.5!", None),
        ("\\log_2 8", 3), ("\\log_2 1", 0), ("\\log_2 7", None), ("\\log_2 0", None), ("\\log_1 1", None),
        ("\\log_{10} 1000", 3), ("2^{-2}", 0.25), ("0^0", None), ("0^1", 0), ("2^1.5", None), ("4^{0.5}", 2),
        ("4^{\\frac{-1}{2}}", 0.5), ("\\frac12", 0.5), ("\\frac123", None), ("\\frac{-1}2", -0.5),
        ("\\frac-12", -0.5), ("\\frac1-2", -0.5),
        ("\\frac1{16}", 0.0625),
        ("2\\frac12", 2.5), ("2\\frac{0}{5}", None), ("2\\frac{5}{5}", None), ("1.5\\frac12", None),
        ("1,000 + 1", 1001),
        ("1{,}000 + 1", 1001), ("|2-5|", 3), ("|2", None), ("[1+2]", 3), ("[1+2)", None), ("{1+2}", 3), ("()", None),
        ("+-3", None), ("-3", -3), ("+3", 3), ("5-+3", 2), ("2-3-4", -5), ("12/3/2", 2), ("2*-3", -6), ("0/5", 0),
        ("10 8", None), ("2 + 10 8", None), ("2(3,000)", None), ("2[3,000]", None), ("++3", None), ("-+3", None),
        ("\\sqrt[1.5]{4}", None), ("\\log_2 {1.6}", None), ("\\log_{2.5} {5}", None), ("\\log_5 {125}", 3),
        ("\\binom{5}{1.5}", None), ("\\binom{6}{2}", 15), ("2^{-1}(3)", 1.5), ("9^{1.5}", 27), ("\\sqrt{2}3", None),
        ("3 3", None), ("3)", None), ("|1-|2-5||", 2), ("\\frac{3}{4}2", None), ("\\frac{3}{4}(2)", 1.5),
        ("2|3|", None), ("2{3}", None), ("4\\div2(2)", 4), ("-2^2(3)", -12), ("(-8)^{\\frac13}", None), ("1.50", 1.5),
    ],
)  # fmt: skip
def test_arithmetic_has_its_exact_value(text, value):
    assert value_of(text) == value


@pytest.mark.parametrize(
    ("inside", "value", "outside"),
    [
        ("1" + "+1" * 98 + "+10", 109, "1" + "+1" * 100),  # 200 characters, and 201
        ("(" * 29 + "7" + ")" * 29, 7, "(" * 30 + "7" + ")" * 30),  # with the outermost, 30 sums in each other
        ("(1)+" * 39 + "(1)", 40, "(1)+" * 39 + "1)"),
        ("2^{1024}", 2**1024, "2^{1025}"), ("2^{-1024}", Fraction(1, 2**1024), "2^{-1025}"),
        ("1^{1024}", 1, "1^{1025}"),
        ("8^{1024}", 8**1024, "16^{1024}"), ("16^{819}", 16**819, "16^{820}"),  # 4 and 5 bits of the base
        ("8^{1024} * 8^{341}", 2**4095, "8^{1024} * 8^{341} * 2"), ("8^{1024} * 8^{341} - 1", 2**4095 - 1,
         "8^{1024} * 8^{341} + 8^{1024} * 8^{341}"),
        ("1/8^{1024} / 8^{341}", Fraction(1, 2**4095), "1/8^{1024} / 8^{342}"),
        ("8^{1024} (8^{341})", 2**4095, "8^{1024} (8^{342})"),
        ("300!", math.factorial(300), "301!"), ("\\binom{300}{1}", 300, "\\binom{301}{1}"),
        ("\\binom{300}{299}", 300, "\\binom{300}{301}"),
        ("\\sqrt[20]{1048576}", 2, "\\sqrt[20]{1048575}"), ("\\sqrt[2]{144}", 12, "\\sqrt[2]{145}"),
        ("\\sqrt[3]{\\frac{8}{27}}", Fraction(2, 3), "\\sqrt[3]{\\frac{8}{26}}"),
        ("\\sqrt{2^{40}}", 2**20, "\\sqrt{2^{41}}"), ("\\log_2 {1}", 0, "\\log_2 {0.5}"),
        ("\\log_3 {81}", 4, "\\log_{1.5} {1}"), ("\\log_2 1024", 10, "\\log_2 1023"),
        ("12{,}345 - 5", 12340, "12{,}34 - 5"), ("1,234,567", 1234567, "1,234,56"), (".5 + .5", 1, ". + 1"),
        ("5 - (-3)", 8, "5 - --3"), ("2 \\cdot 3 \\times 4 × 5 * 6", 720, "2 ** *3"), ("2**3", 8, "2***3"),
        ("8 ÷ 2 / 2", 2, "8 ÷ / 2"), ("\\left(1 + 2\\right)\\,(3)", 9, "\\lefty(1)"), ("|3 - 5| * 2", 4, "|3 - 5"),
    ],
)  # fmt: skip
def test_arithmetic_has_a_value_up_to_each_limit_and_none_beyond(inside, value, outside):
    assert value_of(inside) == value
    assert value_of(outside) is None


@pytest.mark.parametrize(
    ("gold", "answer", "pairs"),
    [
        # Brackets that do not close, and words.
        ("x", "}x{", None), ("x", "x)", None), ("x", "(x", None), ("x", "\\{x", None), ("x", "(x]", [("x", "(x]")]),
        ("x", "\\text{Area} = 2", [("x", "2")]), ("x", "\\text{maybe} = 2", None), ("x = 1", "\\text{Area} = 2", None),
        ("x \\text{ red}", "x", [("x", "x")]), ("x \\text{ not}", "x", None), ("x", "x \\text{ red}", None),
        ("x \\text{ red}", "x \\text{ red}", [("x", "x")]), ("x \\text{ 1a}", "x", None), ("x", "x ?", None),
        # Equations: a name in front may be left out, and every other side must equal the gold.
        ("2x", "y = 2x", [("2x", "2x")]), ("2x", "y = x + x = 2x", [("2x", "x + x"), ("2x", "2x")]),
        ("2x", "x = 2x", None), ("2x", "a=b=c=2x", [("2x", "b"), ("2x", "c"), ("2x", "2x")]),
        ("2x", "a=b=c=d=2x", None),
        ("y = 2x", "2x", [("2x", "2x")]), ("y = 2x", "z = 2x", [("y = 2x", "z = 2x")]),
        ("y = 2x", "y = x + x", [("2x", "x + x")]), ("y = 2x", "z = x + x = 2x", None), ("x+1 = 2x", "2x", None),
        ("y = 2x", "y = x + x = 2x", [("2x", "x + x"), ("2x", "2x")]), ("a = b = c", "c", [("a = b = c", "c")]),
        ("a = b = c", "a = b", [("a = b = c", "a = b")]), ("x+1 = 2", "x+1 = 3 = 2", None),
        ("x <= 2", "x \\le 2", [("x <= 2", "x \\le 2")]), ("x != 2", "x != 2", [("x != 2", "x != 2")]),
        # Lists, tuples, sets and intervals.
        ("1,2", "2,1", [("1,2", "2,1")]), ("1,2", "x=1, x=2", [("1, 2", "1, 2")]), ("1,2", "x=y=1, 2", None),
        ("1,2", "x+1=1, 2", None), ("x+1=1, 2", "x+1=1, 2", [("x+1=1, 2", "x+1=1, 2")]), ("1,2", "1,2'", None),
        ("1", "1 and 2", None), ("(1,2)", "[1,2]", None), ("(1,2)", "1,2", None), ("\\{1,2\\}", "1,2",
         [("\\{1,2\\}", "1,2")]), ("1 < x < 2", "(1,2)", [("(1,2)", "(1,2)")]), ("(1,2,3)", "(1,2)", None),
        ("1,000", "1000", [("1,000", "1000")]), ("(1,000)", "(1000)", None),
        # Bases, primes, letters and marks.
        ("101_2", "101_{2}", []), ("101_2", "101_3", None), ("x'", "x'", [("x'", "x'")]), ("x'", "x", None),
        ("x", "\\foo x", None), ("\\foo x", "\\foo x", [("\\foo x", "\\foo x")]), ("x", "x€", None),
        ("x€", "x€", [("x€", "x€")]), ("xy", "yx", [("xy", "yx")]), ("xy", "xyz", None), ("xy", "zw", None),
        # Units and mixed numbers.
        ("5^\\circ", "5", [("5", "5")]), ("5", "5^\\circ", None), ("5 \\text{ m}", "5 \\text{ ft}", None),
        ("5 \\text{ m}", "5", [("5", "5")]), ("5", "5 \\text{ m}", [("5", "5")]), ("5 km", "5 miles", None),
        ("5 km.", "5 km", [("5", "5")]), ("km", "km", [("km", "km")]),
        ("1\\frac{1}{2}", "\\frac32", [("(1+\\frac{1}{2})", "\\frac32")]), ("3\\frac{4}{2}", "6", None),
        ("3\\frac{4}{2}", "3 \\frac{4}{2}", [("3\\frac{4}{2}", "3 \\frac{4}{2}")]), ("3\\frac{2}{2}", "4", None),
        ("3\\frac{0}{2}", "3", None), ("5", "5 \\text{ km per h}", [("5", "5")]), ("5 KM", "5 km", [("5", "5")]),
        ("5 \\text{ m}", "5 \\text{ m}^2", None), ("5 km per hour", "5 km", [("5", "5")]),
        ("5 km", "5 km per hour", None),
        ("30°", "30 deg", [("30", "30")]),
        ("z = 2x", "y = 2x = 2x", None), ("y = 2x", "z = 2x = 2x", None), ("\\sin(30°)", "\\sin(30)", None),
        # Characters, words and commands that only one side holds.
        ("x \\text{ not}", "x \\text{ not}", [("x", "x")]), ("2", "\\text{Not it} = 2", None),
        ("2x", "x+zw = 2x", None), ("a=b=c", "a=b=c=d", None),
        ("x", "x@", None), ("x", "xé", None), ("n o t x", "not x", None), ("x", "sin x", [("x", "\\sin x")]),
        ("XY", "yx", [("XY", "yx")]), ("x \\ldots", "x", None), ("x?", "x", None), ("x?", "x?", [("x?", "x?")]),
        ("x", "\\alpha x", [("x", "\\alpha x")]), ("\\foo x", "x", [("\\foo x", "x")]),
        ("\\foo x", "\\foo\\foo x", None),
        ("x \\text{ red}", "x \\text{ red}\\text{ red}", None),
        ("x \\text{ red}\\text{ red}", "x \\text{ red}", [("x", "x")]),
        # Names in words, the sides of equations and lists of them.
        ("2x", "area = 2x", [("2x", "2x")]), ("2x", "Area of it = 2x", [("2x", "2x")]), ("2", "\\text{Sum} == 2", None),
        ("2", "\\text{not it} = 2", None), ("x = 1", "x = y = 1", [("1", "y"), ("1", "1")]), ("x = 1", "1 = x",
         [("x = 1", "1 = x")]), ("x' = 1", "1", [("1", "1")]), ("1", "x' = 1", [("1", "1")]), ("x'", "y' = x", None),
        ("x'", "y = x'", [("x'", "x'")]), ("a", "a=b=c=a", [("a", "a"), ("a", "b"), ("a", "c"), ("a", "a")]),
        ("a", "b=c=d=e=a", None), ("a=b=c", "a=b=c", [("a", "a"), ("b", "b"), ("c", "c")]), ("1", "x=1,y=2", None),
        ("1,2", "x=1,y=2", [("1,2", "x=1,y=2")]), ("1,2", "x=1=1,2", None), ("x", "", [("x", "")]), ("x", ",", None),
        ("1,2,3", "\\{1,2\\}", None), ("\\{1\\}", "1", None), ("2", "(2)", [("2", "(2)")]), ("101", "101_2", None),
        ("\\frac{1}{2}_3", "\\frac12_3", []), ("x \\le 2", "(-\\infty,2]", [("(-\\infty,2]", "(-\\infty,2]")]),
    ],
)  # fmt: skip
def test_an_answer_is_compared_side_by_side_or_can_not_be_the_gold(gold, answer, pairs):
    assert formulas.comparisons(gold, answer) == pairs


@pytest.mark.parametrize(
    ("inside", "beyond"),
    [
        ("(" * 24 + "x" + ")" * 24, "(" * 25 + "x" + ")" * 25), ("{x}" * 192, "{x}" * 193), ("1" * 200, "1" * 201),
        ("x^{9999}", "x^{10000}"), ("x^-9999", "x^-10000"), ("x^{99!}", "x^{100!}"), ("9999!", "10000!"),
        ("x!!", "x!!!"), ("x^{x^x}", "x^{x^{x^x}}"), ("x^x+x^x+x^x", "x^x x^x x^x"), ("(x^x)^x", "x^{x}^{x}^{x}"),
        ("x^{x^{x}+x^{x}}", "x^{x^{x}x^{x}}"),
    ],
)  # fmt: skip
def test_a_formula_is_compared_up_to_each_limit_of_its_size(inside, beyond):
    formulas.comparisons("x", inside)
    with pytest.raises(formulas.TooComplex):
        formulas.comparisons("x", beyond)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("\\{1,2\\}", {("{}", 1): 1}), ("(1,2]", {("(]", 1): 1}), ("1,2", {("", 1): 1}), ("\\{1\\}", {("{}", 0): 1}),
        ("(1)", {}), ("\\{(1,2),(3,4)\\}", {("()", 1): 2, ("{}", 1): 1}), ("1,234", {}), ("(1,234)", {("()", 1): 1}),
        ("a;b", {("", 1): 1}), ("1 and 2", {("", 1): 1}), ("{1,2}", {}), (")1,2", {("", 1): 1}),
        ("(1,2,3)", {("()", 2): 1}), ("[1,2,3]", {("[]", 2): 1}),
    ],
)  # fmt: skip
def test_groups_with_commas_are_counted_by_their_brackets(text, groups):
    assert formulas._brackets(text) == groups


@pytest.mark.parametrize(
    ("text", "body", "units", "words"),
    [
        ("5\\text{ cm}^2", "5", "cm^2", ()), ("5\\text{ km}/\\text{h}", "5", "km h", ()),
        ("\\text{cm}", "cm", "", ()), ("5\\text{ red}\\text{ cm}", "5", "cm", ("red",)), ("5 cm", "5", "cm", ()),
        ("5 cm^2", "5", "cm^2", ()), ("5 x", "5 x", "", ()), ("5 m", "5 m", "", ()), ("12 sq. ft", "12", "sq. ft", ()),
        ("5°", "5", "°", ()), ("\\sin x", "\\sin x", "", ()), ("ab cm", "ab", "cm", ()), ("\\text{a}", "a", "", ()),
        ("\\text{(A)}", "(A)", "", ()), ("\\text{Sin}x", "\\sin x", "", ()),
        ("x\\text{is  wrong.}", "x", "", ("is wrong",)),
        ("x\\text{1?}", "x", "", ("1?",)), ("x\\text{foo} \\text{bar}", "x", "", ("foo", "bar")),
        ("√9", "\\sqrt{9}", "", ()),
        ("\\dfrac12", "\\frac12", "", ()), ("1 1/2", "(1+\\frac{1}{2})", "", ()),
        ("x^\\prime", "x'", "", ()), ("2 1\\frac12", "2 1\\frac12", "", ()),
        ("x_1 \\frac12", "x_1 \\frac12", "", ()), ("\\text{ }x", "x", "", ()), ("5\\text{ km}x", "5 km x", "", ()),
        ("\\text{or}", "\\text{or}", "", ()), ("5\\text{ km per h}", "5", "km per h", ()),
        ("5 km per hour", "5", "km per hour", ()), ("5 KM", "5", "KM", ()), ("5\\text{ km.}", "5", "km.", ()),
        ("x\\text{A}", "xA", "", ()), ("x\\text{AB}", "x", "", ("ab",)), ("5 ft/s", "5 ft/s", "", ()),
        ("5 kg.", "5", "kg.", ()),
        ("1\\frac12+2\\frac13", "(1+\\frac{1}{2})+(2+\\frac{1}{3})", "", ()), ("\\text{5 cm}", "5", "cm", ()),
        ("5 of km", "5 of", "km", ()), ("5\\text{ kg}\\text{ m}", "5", "kg  m", ()),
    ],
)  # fmt: skip
def test_a_formula_is_read_as_its_body_its_units_and_its_words(text, body, units, words):
    read = formulas._read(text)
    assert (read.body, read.units.strip(), read.words) == (body, units, words)


HOSTILE = {
    "open brackets": lambda n: "(" * (40 + n),
    "nested brackets": lambda n: "(" * (30 + n) + "x" + ")" * (30 + n),
    "a tower": lambda n: "^".join(["x"] * (4 + n)),
    "a tower in braces": lambda n: "x^{" * (3 + n) + "x" + "}" * (3 + n),
    "a large power": lambda n: f"7^{{{10**8 + n}}}",
    "a large factorial": lambda n: f"{10**5 + n}!",
    "nested roots": lambda n: "\\sqrt{" * (30 + n) + "x" + "}" * (30 + n),
}


def test_hostile_formulas_never_reach_math_verify(monkeypatch):
    monkeypatch.setattr(answers, "equivalent", lambda *pair: pytest.fail(f"{pair} is too large to compare"))
    columns = {}
    texts = [f"\\boxed{{{make(n)}}}" for make in HOSTILE.values() for n in range(16)]
    scores = MathCorrectness()(completions=texts, answer=["x+1"] * len(texts), log_extra=columns.__setitem__)
    assert set(scores) == {0.0}
    closed = [text for text in columns["extracted"] if text is not None]
    assert columns["verdict"].count("timeout") == len(closed)


def test_a_call_has_a_budget_and_simple_answers_come_first(monkeypatch):
    asked, now = [], [0.0]

    def slow(gold, answer, deadline):
        asked.append(answer)
        now[0] += deadline if "^" in answer else 0.001
        return None if "^" in answer else True

    monkeypatch.setattr(answers, "equivalent", slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    columns = {}
    texts = [f"\\boxed{{x^{{{n}}}+y}}" for n in range(100, 200)] + ["\\boxed{y+x}"] * 5 + ["\\boxed{x + y}"]
    scores = MathCorrectness()(completions=texts, answer=["x+y"] * len(texts), log_extra=columns.__setitem__)
    assert scores == [0.0] * 100 + [1.0] * 6
    assert columns["verdict"][:100] == ["timeout"] * 100
    assert now[0] <= 4 * 2.0 + 0.03 * len(texts) + 2.0
    assert "y+x" in asked[:2]


@pytest.mark.parametrize(
    ("text", "sides"),
    [
        ("a=b", ["a", "b"]), ("a<=b", ["a<=b"]), ("a>=b", ["a>=b"]), ("a!=b", ["a!=b"]), ("a:=b", ["a:=b"]),
        ("a=>b", ["a=>b"]), ("a=<b", ["a=<b"]), ("(a=b)", ["(a=b)"]), ("f(x=1)=2", ["f(x=1)", "2"]),
        ("a] = b", ["a] = b"]), ("a = b = c", ["a", "b", "c"]), ("=", ["", ""]),
    ],
)  # fmt: skip
def test_an_equation_is_split_outside_its_brackets(text, sides):
    assert formulas.split_outside(text, "=") == sides


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("a, ,b", ["a", "b"]),
        ("a and b", ["a", "b"]),
        ("1,2 or 3", ["1", "2", "3"]),
        (", a", ["a"]),
        ("(1,2)", ["(1,2)"]),
    ],
)
def test_the_items_of_a_list_without_brackets(text, items):
    assert formulas._items(text) == items


@pytest.mark.parametrize(
    ("text", "powers"),
    [("x", 0), ("x^2", 1), ("x^{x^x}", 2), ("x^(x^x)", 2), ("x^x^x", 2), ("x^x-x^x", 1), ("x^x=x^x", 1), ("x^x x^x", 2),
     ("x^{x^{x}+x^{x}}", 2), ("x^{x^{x}-x^{x}}", 3), ("x^{a}^{b}", 2), ("(x^x)+x^x", 1), ("}x^x", 1)],
)  # fmt: skip
def test_powers_on_top_of_each_other_are_counted(text, powers):
    assert formulas._tower(text) == powers
