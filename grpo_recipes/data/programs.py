"""Small programming tasks, each a function of this file: the preset `programs`.

The docstring of a function is the task, its source the solution, and its values for a few arguments are the tests. A
solution needs nothing but Python itself. Every fifth task belongs to the test split.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

_TEST_SHARE = 5  # one task in five belongs to the test split


def double(number: int) -> int:
    """Return twice a number."""
    return 2 * number


def is_even(number: int) -> bool:
    """Return True if a number is even, and False otherwise."""
    return number % 2 == 0


def larger(a: int, b: int) -> int:
    """Return the larger of two numbers."""
    return a if a > b else b


def last_item(items: list) -> Any:
    """Return the last item of a list, or None if the list is empty."""
    return items[-1] if items else None


def count_vowels(text: str) -> int:
    """Return how many letters of a text are among a, e, i, o and u, in either case."""
    return sum(letter in "aeiou" for letter in text.lower())


def reverse_words(text: str) -> str:
    """Return the words of a text in reverse order, with one space between them."""
    return " ".join(reversed(text.split()))


def digit_sum(number: int) -> int:
    """Return the sum of the decimal digits of a non-negative number."""
    return sum(map(int, str(number)))


def factorial(number: int) -> int:
    """Return the product of all numbers from 1 to a number; 1 for 0."""
    product = 1
    for factor in range(2, number + 1):
        product *= factor
    return product


def fibonacci(index: int) -> int:
    """Return a Fibonacci number by its index, where the numbers of index 0 and 1 are 0 and 1."""
    now, following = 0, 1
    for _ in range(index):
        now, following = following, now + following
    return now


def is_prime(number: int) -> bool:
    """Return True if a number is prime, and False otherwise."""
    return number > 1 and all(number % divisor for divisor in range(2, number))


def is_palindrome(text: str) -> bool:
    """Return True if the letters and digits of a text, in lower case, read the same in both directions."""
    letters = [letter for letter in text.lower() if letter.isalnum()]
    return letters == letters[::-1]


def unique(items: list) -> list:
    """Return the different items of a list in the order of their first occurrence."""
    return list(dict.fromkeys(items))


def second_largest(numbers: list) -> int:
    """Return the second largest of the different numbers in a list."""
    return sorted(set(numbers))[-2]


def running_sums(numbers: list) -> list:
    """Return a list with, at each place, the sum of the numbers up to that place."""
    total, sums = 0, []
    for number in numbers:
        total += number
        sums.append(total)
    return sums


def mean(numbers: list) -> float:
    """Return the mean of a list of numbers, or 0.0 if the list is empty."""
    return sum(numbers) / len(numbers) if numbers else 0.0


def word_counts(text: str) -> dict:
    """Return a dictionary from each word of a text, in lower case, to the number of times that it occurs."""
    counts: dict[str, int] = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def flatten(lists: list) -> list:
    """Return the items of the inner lists of a list as one list."""
    return [item for inner in lists for item in inner]


def common_items(first: list, second: list) -> list:
    """Return the items that two lists share, sorted and without repetition."""
    return sorted(set(first) & set(second))


def to_celsius(fahrenheit: float) -> float:
    """Return a temperature in degrees Celsius that is given in degrees Fahrenheit."""
    return (fahrenheit - 32) * 5 / 9


def greatest_common_divisor(a: int, b: int) -> int:
    """Return the greatest common divisor of two positive numbers."""
    while b:
        a, b = b, a % b
    return a


def to_binary(number: int) -> str:
    """Return the binary digits of a non-negative number as text, without a prefix."""
    return format(number, "b")


def caesar(text: str, shift: int) -> str:
    """Return a text of lower-case letters and spaces with each letter shifted along the alphabet, from z on to a."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    places = shift % 26
    return text.translate(str.maketrans(letters, letters[places:] + letters[:places]))


def run_lengths(text: str) -> list:
    """Return a list of pairs (letter, length), one for each run of equal letters in a text."""
    runs: list[tuple[str, int]] = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1] = (letter, runs[-1][1] + 1)
        else:
            runs.append((letter, 1))
    return runs


def is_balanced(text: str) -> bool:
    """Return True if every bracket in a text, of the kinds () and [], is closed in the right order."""
    opened: list[str] = []
    for sign in text:
        if sign in "([":
            opened.append(sign)
        elif sign in ")]" and (not opened or opened.pop() + sign not in ("()", "[]")):
            return False
    return not opened


def chunks(items: list, size: int) -> list:
    """Return the items of a list as lists of a size, of which the last may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def transpose(rows: list) -> list:
    """Return the columns of a table, which is given as a list of rows of equal length."""
    return [list(column) for column in zip(*rows, strict=True)]


def invert(mapping: dict) -> dict:
    """Return a dictionary with the keys and the values of another one exchanged."""
    return {value: key for key, value in mapping.items()}


def longest_word(text: str) -> str:
    """Return the longest word of a text, the first one of equals."""
    return max(text.split(), key=len)


def are_anagrams(first: str, second: str) -> bool:
    """Return True if two words consist of the same letters, in any order and case."""
    return sorted(first.lower()) == sorted(second.lower())


def clamp(number: int, low: int, high: int) -> int:
    """Return the number nearest to a number that is at least `low` and at most `high`."""
    return min(max(number, low), high)


def divisors(number: int) -> list:
    """Return all positive divisors of a positive number in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def collatz_steps(number: int) -> int:
    """Return how many steps lead from a number to 1 if an even number is halved and an odd one becomes 3 n + 1."""
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def merge_sorted(first: list, second: list) -> list:
    """Return the items of two sorted lists as one sorted list."""
    return sorted(first + second)


def is_leap_year(year: int) -> bool:
    """Return True if a year of the Gregorian calendar is a leap year, and False otherwise."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def capitalized(text: str) -> str:
    """Return a text with the first letter of each word in upper case and all others in lower case."""
    return " ".join(word[0].upper() + word[1:].lower() for word in text.split())


def missing_number(numbers: list) -> int:
    """Return the one number from 0 to the length of a list that the list, which repeats none, does not have."""
    return sum(range(len(numbers) + 1)) - sum(numbers)


def rotated(items: list, places: int) -> list:
    """Return a list that is not empty with its items moved to the right by some places, from the end to the front."""
    places %= len(items)
    return items[-places:] + items[:-places] if places else list(items)


def hamming_distance(first: str, second: str) -> int:
    """Return at how many places two texts of one length differ."""
    return sum(a != b for a, b in zip(first, second, strict=True))


def pascal_row(index: int) -> list:
    """Return a row of Pascal's triangle by its index, where row 0 is [1]."""
    row = [1]
    for _ in range(index):
        row = [1, *[row[place] + row[place + 1] for place in range(len(row) - 1)], 1]
    return row


def power_mod(base: int, exponent: int, modulus: int) -> int:
    """Return the remainder of a number to a non-negative power, divided by a modulus."""
    return pow(base, exponent, modulus)


TASKS: Mapping[Callable[..., Any], tuple[tuple[Any, ...], ...]] = {
    double: ((0,), (3,), (-7,)),
    is_even: ((0,), (3,), (-4,)),
    larger: ((1, 2), (2, 1), (-3, -3)),
    last_item: (([1, 2, 3],), (["a"],), ([],)),
    count_vowels: (("banana",), ("AEIOU xyz",), ("",)),
    reverse_words: (("one two three",), ("  a   b ",), ("",)),
    digit_sum: ((0,), (7,), (98765,)),
    factorial: ((0,), (1,), (10,)),
    fibonacci: ((0,), (1,), (30,)),
    is_prime: ((1,), (2,), (91,), (97,)),
    is_palindrome: (("A man, a plan, a canal: Panama",), ("abca",), ("",)),
    unique: (([3, 1, 3, 2, 1],), (["b", "a", "b"],), ([],)),
    second_largest: (([3, 1, 2],), ([5, 5, 4],), ([-1, -2],)),
    running_sums: (([1, 2, 3],), ([-1, 1],), ([],)),
    mean: (([1, 2],), ([0.1, 0.2],), ([],)),
    word_counts: (("a b A",), ("one",), ("",)),
    flatten: (([[1, 2], [], [3]],), ([],)),
    common_items: (([3, 1, 2, 3], [3, 2, 4]), ([1], [2])),
    to_celsius: ((32,), (212,), (-40,), (98.6,)),
    greatest_common_divisor: ((12, 18), (7, 13), (5, 5)),
    to_binary: ((0,), (5,), (255,)),
    caesar: (("abc", 1), ("xyz a", 3), ("hello world", -1)),
    run_lengths: (("aaabcc",), ("x",), ("",)),
    is_balanced: (("([a]b)",), ("([)]",), ("((",), ("",)),
    chunks: (([1, 2, 3, 4, 5], 2), ([1], 3), ([], 2)),
    transpose: (([[1, 2], [3, 4], [5, 6]],), ([[1]],)),
    invert: (({"a": 1, "b": 2},), ({},)),
    longest_word: (("a list of words",), ("x yy zz",)),
    are_anagrams: (("Listen", "Silent"), ("aab", "abb")),
    clamp: ((5, 0, 3), (-5, 0, 3), (2, 0, 3)),
    divisors: ((1,), (12,), (13,)),
    collatz_steps: ((1,), (6,), (27,)),
    merge_sorted: (([1, 4], [2, 3, 5]), ([], [1])),
    is_leap_year: ((1900,), (2000,), (2024,), (2025,)),
    capitalized: (("hello WORLD",), ("a",), ("",)),
    missing_number: (([0, 1, 3],), ([1],), ([],)),
    rotated: (([1, 2, 3, 4], 1), ([1, 2, 3], 5), (["a"], 0)),
    hamming_distance: (("karolin", "kathrin"), ("", "")),
    pascal_row: ((0,), (1,), (5,)),
    power_mod: ((2, 10, 1000), (3, 0, 7), (7, 1000, 13)),
}
"""Tasks, with the arguments of their tests."""


def programming_tasks(split: str) -> list[dict[str, Any]]:
    """Return the tasks of a split: `question`, `tests` (assertions) and `solution` (a program).

    Args:
        split: `train` or `test`.
    """
    tasks = []
    for number, (function, calls) in enumerate(TASKS.items(), 1):
        if (number % _TEST_SHARE == 0) == (split == "test"):
            tasks.append(_task(function, calls))
    return tasks


def _task(function: Callable[..., Any], calls: tuple[tuple[Any, ...], ...]) -> dict[str, Any]:
    name, parameters = function.__name__, ", ".join(inspect.signature(function).parameters)
    purpose = str(inspect.getdoc(function))
    tests = [_test(f"{name}({', '.join(map(repr, arguments))})", function(*arguments)) for arguments in calls]
    return {
        "question": f"Write a Python function `{name}({parameters})`. {purpose.replace('Return', 'It returns', 1)}",
        "tests": tests,
        "solution": f"from __future__ import annotations\n\nfrom typing import Any\n\n\n{inspect.getsource(function)}",
    }


def _test(call: str, value: Any) -> str:
    return f"assert abs({call} - {value!r}) < 1e-9" if isinstance(value, float) else f"assert {call} == {value!r}"
