"""A reproduction for docs/upstream/math-verify-equal-answers.md."""

from math_verify import LatexExtractionConfig, parse, verify

pairs = [
    (r"2+3=5", "1=1"),
    ("x^2+50=0", "x^2+51=0"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    ("1:2:3", "1:3:2"),
    (r"\pi r^2 h", r"\pi r^2"),
    ("A^T", "A"),
    (r"n \equiv 1 \mod 4", r"n \equiv 1 \mod 3"),
]
for pair in pairs:
    gold, answer = (parse(rf"\boxed{{{text}}}", extraction_config=[LatexExtractionConfig()]) for text in pair)
    print(*pair, verify(gold, answer))  # True for all
