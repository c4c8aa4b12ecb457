"""Formula answers read as a whole: what math-verify skips or misreads earns nothing, and arithmetic is exact."""

import math
from fractions import Fraction

import pytest

from grpo_rewards.math import formulas
from grpo_rewards.math.arithmetic import value_of
from grpo_rewards.math.comparison import RIGHT_VERDICTS, compare

FORMULAS = ["R", "x+1", "\\sqrt{2}", "\\frac{\\pi}{2}", "(1,2)", "\\{1,2\\}", "[1,3)", "y = 2x", "2\\sqrt{3}"]
# Text behind or around a formula that math-verify drops.
DROPPED = [
    "{} \\text{{ is wrong}}", "{} \\text{{maybe}}", "{} \\text{{(?)}}", "{} \\ldots", "({})'",
    "{} \\text{{ is not right}}", "{} \\text{{ (not sure)}}", "\\text{{not }} {}", "{} \\mathrm{{ no}}",
    "{} \\quad \\text{{oder}}", "{} \\textbf{{ nope}}", "{} \\mbox{{ falsch}}", "{} \\dots", "{} ...", "{}, \\cdots",
    "{}^{{\\prime}}", "{}''", "{} ?", "{} 不对", "{} \\lnot", "\\sout{{{}}}", "\\cancel{{{}}}", "\\neg {}", "{} }}",
]  # fmt: skip


def paid(table):
    """Return the (gold, answer) pairs of a table in which the answer counts as the gold."""
    pairs = [(gold, answer) for gold, answers in table.items() for answer in answers]
    return [pair for pair in pairs if compare(*pair, deadline=20.0) in RIGHT_VERDICTS]


def test_words_and_marks_around_a_formula_are_not_dropped():
    dresses = [dress for dress in DROPPED if dress.count("}}") == dress.count("{{")]
    assert paid({gold: [dress.format(gold) for dress in dresses] for gold in FORMULAS}) == []


MISREAD = {
    "\\sqrt2": ["\\sqrt3 = \\sqrt2", "1 = \\sqrt2", "2\\sqrt2 = \\sqrt2", "x = \\sqrt3 = \\sqrt2",
                "\\sqrt2 = 1", "x = \\sqrt3, x = \\sqrt2", "\\approx \\sqrt2", "\\sqrt2, \\sqrt3"],
    "2x": ["3x = y = 2x", "x = 2x", "4x = 2x"], "y = 2x": ["x = 2x", "y = 3x = 2x", "z = x = 2x"],
    "\\frac{\\pi}{2}": ["1\\frac12\\pi", "1\\frac{1}{2}\\pi", "1 1/2 \\pi", "\\pi = \\frac{\\pi}{2}"],
    "\\frac32 x": ["3\\frac12 x", "3\\frac{1}{2}x", "3\\dfrac12 x"],
    "2516_8": ["2516_7", "2516", "2516_{16}", "2516_{\\text{seven}}"], "101_2": ["101_3", "5_{10}", "101"],
    "(1,3)": ["\\{1,3\\}", "[1,3]", "(1,3]", "1,3", "\\langle 1,3 \\rangle", "(1,3),(1,3)"],
    "\\{1,3\\}": ["(1,3)", "[1,3]", "\\{1\\},\\{3\\}", "\\{\\{1,3\\}\\}"],
    "\\{1,2\\}": ["\\{1\\},\\{2\\}", "(1,2)", "\\{(1,2)\\}"], "\\{1,2,3\\}": ["\\{\\{1,2\\},3\\}", "\\{1,2\\},3"],
    "(1,2),(3,4)": ["(1,2,3,4)", "\\{1,2\\},\\{3,4\\}"], "x": ["x'", "x''", "x^\\prime"], "x'": ["x", "x''"],
    "f'(x)": ["f(x)", "f''(x)"],
    "5\\sqrt2 \\text{ m}": ["5\\sqrt2 \\text{ ft}", "5\\sqrt2 \\text{ m}^2", "5\\sqrt2 \\text{ cm}"],
    "\\sin(30^\\circ)": ["\\sin(30)"], "10^\\circ": ["10 rad", "10 \\text{ radians}", "10%", "10 m"],
    "5 \\text{ meters}": ["5 \\text{ feet}", "5 ft", "5 cm", "5 \\text{ square meters}"],
    "5 \\text{ m/s}": ["5 \\text{ km/h}", "5 m/h"],
    "12 \\text{ cm}^2": ["12 cm", "12 \\text{ cm}^3", "12 \\text{ m}^2"], "2xy": ["2", "2zw"],
    "\\frac{1}{2}ab": ["\\frac12", "0.5"], "\\sqrt{2}": ["1.4142135623730951", "1.41421356237309504880"],
    "\\frac{\\pi}{3}": ["1.0471975511966", "\\frac{\\pi}{3}^\\circ", "60"],
    "2^{10}": ["2^{10}_7", "1023", "20", "210", "1024x"],
    "x=5": ["(x=5)'", "x=5''", "x=5 \\text{ nicht}", "\\text{about }x=5", "x=5 \\text{不对}"],
    "5 \\text{ cm}": ["5 \\text{ cm/s}", "5 °", "5 \\text{ inches}", "(5 \\text{ cm})'"],
    "30^\\circ": ["30°C", "30'", "30 rad"], "\\$5": ["5\\%", "5 cents", "5 meters"],
    "2\\pm\\sqrt3": ["2+\\sqrt3", "\\pm2+\\sqrt3", "2", "2\\pm\\sqrt3 i"],
    "\\lfloor x \\rfloor": ["\\lceil x \\rceil", "x", "|x|"],
    "\\begin{pmatrix}1\\\\2\\end{pmatrix}": ["(1,2)", "\\begin{pmatrix}1&2\\end{pmatrix}"],
    # Brackets that do not close, words, marks and letters that only one side holds.
    "z": ["}z{", "z)", "(z", "\\{z", "z \\text{ red}", "z ?", "\\foo z", "z€", "z@", "zé", "sin z", "z \\ldots", ","],
    "y \\text{ red}": ["y \\text{ red}\\text{ red}"],
    "y \\text{ not}": ["y"], "y?": ["y"], "\\foo y": ["\\foo\\foo y"], "xy": ["xyz", "zw"], "not x": ["n o t x"],
    "2": ["\\text{Not it} = 2", "\\text{maybe} = 2", "1 and 2", "x=1,y=2"],
    # Equations whose other sides do not have the gold's value, and lists of them.
    "3x": ["a=b=c=d=3x", "z = 2x = 3x", "x+zw = 3x"], "x+1 = 2x": ["2x"], "x+1 = 2": ["x+1 = 3 = 2"],
    "(1,3]": ["3 > x \\ge 1"], "a\\pm b\\mp 1": ["a+b-1, a-b-1"],
    "z = 2x": ["y = 3x = 2x", "y = 2x = 2x"], "a=b=c": ["a=b=c=d"], "x = 1": ["\\text{Area} = 2"],
    "1,2": ["x=y=1, 2", "x+1=1, 2", "1,2'", "x=1=1,2"], "(1,2,3)": ["(1,2)"], "(1,000)": ["(1000)"],
    "(2,100)": ["2100", "(2,101)"], "101": ["101_2"],
    # Mixed numbers with two meanings, and units.
    "3\\frac{4}{2}": ["6"], "3\\frac{2}{2}": ["4", "\\sqrt{16}"], "5 km": ["5 km per hour", "5 miles"],
}  # fmt: skip


def test_a_formula_that_only_looks_equal_earns_nothing():
    assert paid(MISREAD) == []


EQUAL = {
    "2^{10}": ["1024", "1,024", "2^{10}", "1024.0", "4^5"], "5!": ["120", "120.", "$120$"],
    "\\sqrt{16}": ["4", "x = 4", "\\frac{8}{2}"], "\\binom{5}{2}": ["10", "\\frac{20}{2}"], "\\frac{6!}{3!}": ["120"],
    "\\log_2 8": ["3"], "2^{-3}": ["0.125", "\\frac18", "1/8"],
    "\\frac{3\\pi}{2}": ["1\\frac12\\pi", "1.5\\pi", "\\dfrac{3}{2}\\pi", "x = \\frac{3\\pi}{2}"],
    "1\\frac12\\pi": ["\\frac{3\\pi}{2}", "1\\frac{1}{2}\\pi"],
    "\\sqrt2": ["x = \\sqrt2", "x = \\frac{\\sqrt8}{2} = \\sqrt2", "\\sqrt2 \\text{ cm}",
                "\\sin\\theta = \\sqrt2", "\\text{Area} = \\sqrt2", "\\sqrt 2.", "√2", "sqrt(2)"],
    "2x": ["f(x) = 2x", "f'(x) = 2x", "\\frac{dy}{dx} = 2x", "y = x + x = 2x"], "y = 2x": ["2x", "y = x + x", "y=2x"],
    "1,2": ["2, 1", "\\{1,2\\}", "1 \\text{ and } 2"], "\\{1,2\\}": ["1, 2", "\\{2,1\\}", "\\left\\{1,2\\right\\}"],
    "x=1 \\text{ or } x=2": ["x=1, x=2", "x=2 \\text{ or } x=1"],
    "(2,100)": ["(2, 100)", "\\left(2,100\\right)"],
    "[1,3) \\cup (4,5]": ["(4,5] \\cup [1,3)", "x \\in [1,3) \\cup (4,5]"],
    "5\\sqrt2 \\text{ m}": ["5\\sqrt2 \\text{ meters}", "5\\sqrt2", "\\sqrt{50} \\text{ m}"],
    "12 \\text{ cm}^2": ["12", "12 cm^2", "12 \\text{ square centimeters}", "12 \\text{ sq. cm}"],
    "10^\\circ": ["10", "10°", "10 degrees"], "5 \\text{ meters}": ["5", "5 m", "5 metres", "5 meter"],
    "2516_8": ["2516_{8}", "2516_8"], "(A)": ["\\text{(A)}", "(A)"], "2xy": ["2yx", "2 x y"],
    "\\emptyset": ["\\{\\}", "\\varnothing"], "x^2+y^2=4": ["x^2+y^2-4=0", "4=x^2+y^2"],
    "x \\text{ red}": ["x \\text{ red}"],
    "[1,3)": ["3 > x \\ge 1", "1 \\le x < 3"], "a\\pm b\\mp 1": ["a+b-1, a-b+1"],
    "2z": ["a = z+z = 2z", "a = z+z = \\frac{4z}{2} = 2z", "area = 2z", "Area of it = 2z"],
    "x' = 1": ["1"],
    "a = b = c": ["a = b = c"], "x <= 2": ["x \\le 2", "(-\\infty,2]"], "1 < x < 2": ["(1,2)"], "1,000": ["1000"],
    "x€": ["x€"], "x?": ["x?"], "\\foo x": ["\\foo x"], "XY": ["yx"], "5 km.": ["5 km"], "5 KM": ["5 km"], "km": ["km"],
    "3\\frac{4}{2}": ["3 \\frac{4}{2}"], "30°": ["30 deg"], "x = 1": ["1 = x"], "x=1,x=2": ["1,2"],
    "x": ["(x)", "\\text{Area} = x"],
}  # fmt: skip


def test_an_equal_formula_is_paid():
    right = paid(EQUAL)
    assert [(gold, text) for gold, texts in EQUAL.items() for text in texts if (gold, text) not in right] == []


def test_arithmetic_has_its_exact_value():
    table = [
        ("-3^2", -9), ("12/3/2", 2), ("5-+3", 2), ("\\sqrt{15}", None), ("\\sqrt{17}", None),
        ("2 + 3 * 4", 14), ("(2+3)(4)", 20), ("|-5|", 5), ("7 \\div 2 * 2", 7), ("3 x 6", 18), ("1\\frac12", 1.5),
        ("1 8", None), ("x+1", None), ("\\sqrt2", None), ("1/0", None), ("5!!", None), ("(1,3)", None),
        ("9^{9^{9}}", None), ("(" * 90, None), ("100000!", None), ("3\\frac32", None), ("1 +", None),
        ("2\\sqrt{9}", 6), ("2(3)(4)", 24), ("\\sqrt9", 3), ("\\sqrt[1]{5}", None), ("\\sqrt{8}", None),
        ("\\binom{5}{0}", 1), ("\\binom{5}{5}", 1), ("\\binom{5}{6}", None), ("\\binom{5}{-1}", None), ("0!", 1),
        ("1.5!", None), ("\\log_2 1", 0), ("\\log_2 7", None), ("\\log_2 0", None), ("0^0", None), ("2^1.5", None),
        ("4^{0.5}", 2), ("4^{\\frac{-1}{2}}", 0.5), ("2\\frac12", 2.5), ("1.5\\frac12", None), ("|2-5|", 3),
        ("|2", None), ("[1+2)", None), ("()", None), ("2-3-4", -5), ("2*-3", -6), ("0/5", 0), ("2[3,000]", None),
        ("\\sqrt[1.5]{4}", None), ("\\log_2 {1.6}", None), ("\\log_5 {125}", 3), ("2^{-1}(3)", 1.5), ("3 3", None),
        ("3)", None), ("\\frac{3}{4}(2)", 1.5), ("4\\div2(2)", 4), ("-2^2(3)", -12), ("(-8)^{\\frac13}", None),
    ]  # fmt: skip
    assert [(text, value, value_of(text)) for text, value in table if value_of(text) != value] == []


def test_arithmetic_has_a_value_up_to_each_limit_and_none_beyond():
    table = [
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
    ]  # fmt: skip
    assert [row for row in table if value_of(row[0]) != row[1] or value_of(row[2]) is not None] == []


def test_a_formula_is_compared_up_to_each_limit_of_its_size():
    for inside, beyond in (
        ("(" * 24 + "x" + ")" * 24, "(" * 25 + "x" + ")" * 25), ("{x}" * 192, "{x}" * 193), ("1" * 200, "1" * 201),
        ("x^{9999}", "x^{10000}"), ("x^-9999", "x^-10000"), ("x^{99!}", "x^{100!}"), ("9999!", "10000!"),
        ("x!!", "x!!!"), ("x^{x^x}", "x^{x^{x^x}}"), ("x^x+x^x+x^x", "x^x x^x x^x"), ("(x^x)^x", "x^{x}^{x}^{x}"),
        ("x^{x^{x}+x^{x}}", "x^{x^{x}x^{x}}"),
    ):  # fmt: skip
        formulas.comparisons("x", inside)
        with pytest.raises(formulas.TooComplex):
            formulas.comparisons("x", beyond)
