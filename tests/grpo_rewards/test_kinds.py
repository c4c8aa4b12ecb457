"""Golds of public data sets that are not one formula, and equations and values that math-verify takes for equal."""

import pytest

from grpo_rewards.math.answers import compare

WRONG = {
    "2+3=5": ["2+3=6", "1=1", "6"],
    "25=5^2": ["36=6^2"],
    r"20\%=0.2": [r"30\%=0.3"],
    "(x+1)^2 = x^2+2x+1": ["(x+2)^2=x^2+4x+4"],
    r"\cos (\pi)=-1, \sin (\pi)=0": [r"\cos (\pi)=0, \sin (\pi)=-1"],
    "x^{2}+50=0": ["x^{2}+51=0", "1=1", "0=1"],
    r"I=\frac{V}{R}": ["1=1", "0=1", r"I=\frac{R}{V}"],
    r"\frac{1}{2^{99}}": [r"\frac{1}{2^{98}}"],
    r"\sqrt{2^{200}+1}": ["2^{100}"],
    r"\ln(10^{30}+1)": [r"\ln(10^{30})"],
    r"x+\frac{1}{2^{100}}": [r"x+\frac{1}{2^{101}}"],
    r"\begin{pmatrix} 4 \\ 6 \end{pmatrix}": [r"\begin{pmatrix} 6 \\ 4 \end{pmatrix}"],
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": [r"\begin{bmatrix} 1 & 3 \\ 2 & 4 \end{bmatrix}"],
    "1:2:3": ["1:3:2", "1:6"],
    "5-7": ["-2"],
    "1914-1918": ["1939-1943"],
    "2020-05-07": ["2020-07-05"],
    r"2 \times 3,3 \times 3,4 \times 2": [r"3 \times 2,3 \times 3,4 \times 2"],
    "3 hours 20 minutes": ["2 hours 30 minutes", "320"],
    r"2 \text{ kg } 500 \text{ g}": [r"5 \text{ kg } 200 \text{ g}"],
    "(a) 5 (b) 4": ["(a) 4 (b) 5"],
    "5' 10\"": ["10' 5\""],
    "3 R 2": ["2 R 3"],
    "f(1)=2, f(2)=1": ["f(1)=1, f(2)=2"],
    "(1 2)(3 4)": ["(1 3)(2 4)"],
    "A^T": ["A"],
    r"n \equiv 1 \mod 4": [r"n \equiv 1 \mod 3"],
    r"\operatorname{Var}(X)": ["X"],
    r"\angle ABC": [r"\angle ACB"],
    r"\frac{\partial f}{\partial x}": [r"\frac{\partial f}{\partial y}"],
    "|z|^2": ["z^2"],
    "f^{-1}(x)": [r"\frac{1}{f(x)}"],
    "b > a > c": ["b > d > c"],
    "IV": ["VI"],
    "T, F, T": ["T, T, F"],
    "-1,-1,1,1": ["-1,1,1,1"],
    "x<2 or x>3": ["x<2 and x>3"],
    r"\cos (e) \approx-0.912": [r"\cos (e) \approx+0.912"],
    r"\sqrt{2} \approx 1.41": [r"\sqrt{2} \approx 2.41", r"\sqrt{3} \approx 1.41"],
    r"x = \ln 5 \approx 1.609": [r"x = \ln 5 \approx 3"],
    r"\pi r^2 h": [r"\pi r^2"],
    r"\frac{1}{2} b h": [r"\frac{1}{2} q h"],
}
"""Golds, and answers that are other values or other statements."""

RIGHT = {
    r"\sqrt{2} \approx 1.41": [r"\sqrt{2}", r"\sqrt2 \approx 1.414"],
    "2^{10}=1024": ["1024", "2^{10}=1024"],
    r"\binom{10}{3}=120": ["120"],
    r"\frac12+\frac13=\frac56": [r"\frac56"],
    "y = 2x+1": ["2x - y + 1 = 0", "y=1+2x"],
    r"\frac{x^2}{4}+\frac{y^2}{9}=1": ["9x^2+4y^2=36"],
    "x^2=-4": ["x^2+4=0"],
    "1:2:3": ["1 : 2 : 3"],
    "5-7": ["5 - 7"],
    "3 hours 20 minutes": ["3 hours and 20 minutes", r"3\text{ h } 20\text{ min}", "20 minutes and 3 hours"],
    "A^T": ["A^{T}"],
    "A^{-1}": ["A^{-1}"],
    r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}": [r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)"],
    "-1,-1,1,1": ["-1, -1, 1, 1"],
    "x<2 or x>3": [r"x<2 \text{ or } x>3"],
    r"\sqrt{2}+\sqrt{3}": [r"\sqrt{5+2\sqrt{6}}"],
    r"\pi r^2 h": [r"\pi h r^2"],
}
"""Golds, and answers that say the same."""


@pytest.mark.parametrize(("gold", "answer"), [(gold, answer) for gold in WRONG for answer in WRONG[gold]])
def test_another_statement_is_not_the_gold(gold: str, answer: str) -> None:
    assert compare(gold, answer) in ("wrong", "timeout")


@pytest.mark.parametrize(("gold", "answer"), [(gold, answer) for gold in RIGHT for answer in RIGHT[gold]])
def test_the_same_statement_is_the_gold(gold: str, answer: str) -> None:
    assert compare(gold, answer) in ("exact", "equal", "symbolic")
