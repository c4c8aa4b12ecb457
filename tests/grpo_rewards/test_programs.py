"""The reward `unit_tests`: right programs earn their share, hostile ones nothing, whatever they reach."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import time
import types
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from grpo_rewards import programs, unit_tests
from grpo_rewards.programs import UnitTests
from grpo_rewards.sandbox import run as sandbox
from tests.grpo_rewards.test_sandbox import no_trace  # noqa: F401
from tests.support.errors import refused

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

ADD = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert abs(add(0.1, 0.2) - 0.3) < 1e-9"]
SUMS = [{"input": "1 2\n", "output": "3\n"}, {"input": "-1 1\n", "output": "0"}]
QUICK = UnitTests(seconds=1)


def fenced(program: str, label: str = "python") -> str:
    return f"Here it is.\n```{label}\n{program}\n```\nDone."


def scored(reward: UnitTests, completions: list[str], tests: Any) -> tuple[list[float | None], dict[str, Any]]:
    """Return the scores, and everything that the reward logs."""
    logged: dict[str, Any] = {}
    log = logged.__setitem__
    rows = [tests] * len(completions)
    scores = reward(completions=completions, tests=rows, log_extra=log, log_metric=log, log_reason=log)
    return scores, logged


def test_each_program_earns_the_share_of_tests_that_it_passes() -> None:
    completions = [
        fenced("def add(a, b):\n    return a + b"), fenced("def add(a, b):\n    return abs(a + b) if a < 1 else 3"),
        fenced("def add(a, b):\n    return 3"), fenced("def add(a, b):\n    raise KeyError"), fenced("def add(a, b)"),
        "I can't.", fenced("def add(a, b):\n    return a + b"),
    ]  # fmt: skip
    scores, logged = scored(unit_tests, completions, ADD)
    assert scores == pytest.approx([1, 1, 1 / 3, 0, 0, 0, 1])
    assert "1 of 3" in logged["verdict"][2]
    assert ADD[1] in logged["verdict"][2], "the first test that fails is named"
    assert "KeyError" in logged["verdict"][3]
    assert logged["rewards/unit_tests/passed"] == pytest.approx(3 / 7)
    assert logged["rewards/unit_tests/programs"] == 5, "equal programs of a row run once"
    logged, third = {}, pytest.approx(1 / 3)
    forms = ["\n".join(ADD), json.dumps(ADD), tuple(ADD)]
    assert unit_tests(completions=completions[2:3] * 3, tests=forms, log_metric=logged.__setitem__) == [third] * 3
    assert logged["rewards/unit_tests/programs"] == 2, "a list and its JSON are the same tests"


def test_the_output_of_each_pair_is_compared_but_for_trailing_space() -> None:
    completions = [fenced("print(sum(map(int, input().split())), end=' \\n\\n')"), fenced("print(3)")]
    assert scored(unit_tests, completions, SUMS)[0] == [1.0, 0.5]
    for expected, printed, holds in (
        ("0.333333", "0.3333333333333333", True), ("0.333333", "0.33333", False), ("0.333333", "0.333334", False),
        ("x 0.30000000000000004\n2", "x 0.3\n2  \n\n", True), ("1e5 0.100000", "100000 0.1", False),
        ("0.100000", "1e-1", True), ("0.00000001", "0", False), ("100000", "100001", False), ("3.0", "3", False),
        ("3.00000", "3.0000001", False), ("3", " 3", False), ("1 2", "1  2", False),
        ("a\nb", "b\na", False), ("a\n\nb", "a\nb", False),
        ("0.100000", "nan", False), ("0.100000", "1e99999999", False), ("0.100000", "9" * 100_000, False),
        ("0.333333", "0.3333325", True), ("0.333333", "0.33333349", True), ("0.333333", "0.3333336", False),
    ):  # fmt: skip
        assert programs.Pair("", expected).holds(printed) is holds, (expected, printed[:20])


def test_the_program_is_the_last_closed_fence_that_is_marked() -> None:
    two = fenced("answer = 2")
    right = [
        fenced("answer = 1") + two, two + fenced("answer = 1", "text"), fenced("answer = 2", "py"),
        fenced("answer = 2", ""), fenced("answer = 1", "") + fenced("answer = 2", ""), fenced("answer = 2", "Python3"),
        two + "It prints:" + fenced("answer = 1", ""), two + "\n```python\nanswer = 1",
        "1. So:\n\n   ```python\n   if True:\n       answer = 2\n   ```\n",
    ]  # fmt: skip
    wrong = [f"<think>{two}</think>nothing", fenced("answer = 2", "javascript"), "answer = 2"]
    scores, logged = scored(unit_tests, [*right, *wrong], ["assert answer == 2"])
    assert scores == [1.0] * len(right) + [0.0] * len(wrong), logged["verdict"]
    assert UnitTests().unparsed_note(wrong)
    assert UnitTests().unparsed_note([*wrong, two]) is None


# --- Tests as code sets have them ---

IO = {"inputs": ["1 2\n", ["-1 1", ""]], "outputs": ["3\n", ["0"]]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [-1, 1]], "outputs": [[3], 0]}
CHECK = """
METADATA = {'author': 'jt', 'dataset': 'test'}

def check(candidate):
    assert True, "This prints if this assert fails 1 (good for debugging!)"
    wanted = [0]
    # Check some simple cases
    assert candidate(1, 2) == 3, "message"
    assert [candidate(-1, 1)] == wanted
    assert abs(candidate(0.1, 0.2) - 3 / 10) < 1e-9
"""
PRINT_SUM, SUM = "print(sum(map(int, input().split())))", "def add(a, b): return a + b"
PRODUCT = "def add(a, b): return a * b"
SOLUTION = "class Solution:\n    def add(self, a, b): return a {} b"
OF_SETS = {
    "APPS": ({"tests": json.dumps(IO)}, PRINT_SUM, "print(3)"),
    "APPS without a function": ({"tests": {**IO, "fn_name": None}}, PRINT_SUM, None),
    "TACO with a function": ({"tests": json.dumps(CALLS)}, SUM, PRODUCT),
    "a class Solution": ({"tests": CALLS}, SOLUTION.format("+"), None),
    "HumanEval": ({"tests": CHECK, "entry_point": "add"}, SUM, "def add(*numbers): return []"),
    "HumanEval with its call": ({"tests": CHECK + "\ncheck(add)"}, SUM, None),
    "LeetCode": ({"tests": CHECK, "entry_point": "Solution().add"}, SOLUTION.format("+"), None),
    "MBPP": (
        {"tests": ["assert (height(root)) == 2 ", "assert isclose(area(1), math.pi, rel_tol=0.001)"],
         "test_setup_code": "root = Node(1); \r\nroot.left = Node(2)", "test_imports": ["import math"]},
        "class Node:\n  def __init__(self, x): self.left = None\n"
        "def height(n): return 1 + height(n.left) if n else 0\ndef area(r): return 3.14159 * r * r",
        "class Node:\n  def __init__(self, x): self.left = None\ndef height(n): return 1\ndef area(r): return 3 * r",
    ),
}  # fmt: skip


def test_tests_are_read_as_code_sets_have_them() -> None:
    for name, (columns, right, wrong) in OF_SETS.items():
        programs = [fenced(right)] if wrong is None else [fenced(right), fenced(wrong)]
        rows = {column: [value] * len(programs) for column, value in columns.items()}
        logged: dict[str, Any] = {}
        scores = unit_tests(completions=programs, log_extra=logged.__setitem__, **rows)
        assert scores[0] == 1.0, (name, logged["verdict"])
        assert None not in scores
        assert max(scores[1:], default=0) < 1, name
        assert UnitTests().validate(len(programs), rows) == [True] * len(programs)


def test_the_values_of_a_function_are_those_of_json() -> None:
    # The first item alone is not the value of a list of several, unlike in the evaluation of APPS.
    tests = {"fn_name": "f", "inputs": [[{"1": [2]}], ["x"], [[]], [{"a": 1}], [0], [1]],
             "outputs": [[{"1": "2"}], [[1, [2]]], [[3]], {"b": [4]}, [1, 2], [1, 2]]}  # fmt: skip
    program = "def f(x):\n    if x == {1: [2]}: return {1: '2'}\n    if x == 'x': return 1, (2,)\n"
    program += "    if x in (0, 1): return (1, 2) if x else 1\n    return "
    completions = [fenced(program + "[3] if x == [] else {'b': (4,)}"), fenced(program + "3 if x == [] else {'b': 4}")]
    assert scored(unit_tests, completions, tests)[0] == pytest.approx([5 / 6, 3 / 6])


# Each passes where the tests run in the program's own process, and states nothing right.
CHEATS = {
    "an early exit": "import sys\nsys.exit(0)",
    "an early exit of the process": "import os\nos._exit(0)",
    "an exit in the call": "import os\ndef add(a, b): os._exit(0)",
    "a sentinel": "import sys\nfor s in ('PASSED', 'ok', '1.0', 'true', '{\"passed\": true}'):\n"
    "  print(s)\n  print(s, file=sys.stderr)\nsys.exit(0)",
    "another check": "def check(candidate): return True\ndef candidate(*a): return True\nadd = candidate",
    "another check in builtins": "import builtins\nbuiltins.check = builtins.candidate = lambda *a: True\n"
    "builtins.AssertionError = SystemExit\ndef add(a, b): raise AssertionError",
    "another AssertionError": "class AssertionError(BaseException):\n  def __init__(self, *a): raise SystemExit(0)\n"
    "def add(a, b): raise AssertionError",
    "an equal of everything": "class Any:\n  def __eq__(self, other): return True\n"
    "  __ne__ = __lt__ = __le__ = __gt__ = __sub__ = __rsub__ = __abs__ = __bool__ = __float__ = __eq__\n"
    "def add(a, b): return Any()",
    "a list that equals everything": "class Any(list):\n  def __eq__(self, other): return True\n"
    "def add(a, b): return Any([9])",
    "the names of the tests": "def add(a, b):\n  import sys\n  seen = {**globals()}\n  frame = sys._getframe()\n"
    "  while frame:\n    seen |= frame.f_globals | frame.f_locals\n    frame = frame.f_back\n"
    "  for name in ('wanted', 'expected', 'METADATA', 'tests'):\n    if name in seen: return seen[name][0]\n",
    "replaced functions": "import builtins, math\nmath.isclose = math.fabs = lambda *a, **k: True\n"
    "builtins.abs = builtins.all = builtins.eval = lambda *a, **k: True\ndef add(a, b): return 9",
}  # fmt: skip
CHEATED = {
    "assertions": {"tests": [*ADD, "wanted = [4]", "assert [add(2, 2)] == wanted"], "test_setup_code": "import math"},
    "check": {"tests": CHECK, "entry_point": "add"},
    "calls": {"tests": CALLS},
    "pairs": {"tests": IO},
}


@pytest.mark.slow
def test_no_cheat_passes_a_test_of_any_form() -> None:
    cases = list(itertools.product(CHEATS, CHEATED.values()))
    columns: dict[str, list[Any]] = {}
    for column in ("tests", "entry_point", "test_setup_code"):
        columns[column] = [row.get(column) for _, row in cases]
    completions = [fenced(CHEATS[name]) for name, _ in cases]
    scores = QUICK(completions=completions, **columns)
    assert {name for (name, _), score in zip(cases, scores, strict=True) if score != 0.0} == set()


# --- Hostile programs: each defines `add` or prints, and passes no test of `ADD` or `SUMS`. ---

ANY = "class Any:\n  def __eq__(self, other): return True\n  __lt__ = __le__ = __sub__ = __rsub__ = __abs__ = __eq__\n"
SEARCH = """
import gc, inspect, os, sys
def found(hint=None):
    pieces = [repr(sys.argv), repr(dict(os.environ)), repr(gc.get_objects())]
    frame = inspect.currentframe()
    while frame:
        pieces += [repr(frame.f_locals), repr(frame.f_globals)]
        frame = frame.f_back
    for path in (".", "/tmp", "/proc/self/fd", "/proc/self", "/proc/1"):
        try: names = os.listdir(path)
        except OSError: continue
        for name in names:
            if os.path.isfile(f"{path}/{name}"):
                try: pieces.append(open(f"{path}/{name}", errors="replace").read(10**6))
                except OSError: pass
    for number in range(64):
        try: pieces.append(os.pread(number, 10**6, 0).decode(errors="replace"))
        except OSError: pass
    mark = "needle" + "-"
    for text in pieces:
        if mark in text:
            return mark + text.split(mark)[1][:4]
    return "nothing in %d" % len(pieces)
"""
HOSTILE = {
    "an equal of everything": ANY + "def add(a, b): return Any()\nprint(Any())",
    "a number that equals everything": "class Any(int):\n"
    "  def __eq__(self, other): return True\ndef add(a, b): return Any(9)",
    "replaced builtins": "import builtins, math\n"
    "for name in ('abs', 'len', 'int', 'eval', 'exec', 'print', 'repr', 'isinstance', 'map', 'type', 'bool'):\n"
    "  setattr(builtins, name, lambda *a, **k: True)\ndef add(a, b): return None",
    "a replaced json": "import json\njson.dumps = lambda *a, **k: 'true'\ndef add(a, b): return None",
    "a replaced os.write": "import os\nwrite = os.write\n"
    "os.write = lambda f, d: write(f, b'true\\n')\ndef add(a, b): return None",
    "os._exit(0)": "import os\ndef add(a, b): os._exit(0)\nos._exit(0)",
    "sys.exit(0) in a call": "import sys\ndef add(a, b): sys.exit(0)",
    "an exit handler": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): raise SystemExit(0)",
    "writing the verdict's descriptor": "import os\nfor f in range(1, 64):\n"
    "  for text in (b'true\\n', b'{\"passed\": 3}\\n', b'[1, 1, 1]\\n', b'PASSED\\n', b'\\x00'):\n"
    "    try: os.write(f, text)\n    except OSError: pass\nos._exit(0)",
    "closing every descriptor": "import os\nos.closerange(0, 64)\ndef add(a, b): return a + b + 1",
    "a forged class": "class int(int): pass\ndef add(a, b):\n  x = int(3)\n  return [x]",
    "an exception that pretends": "class AssertionError(Exception): pass\ndef add(a, b): raise AssertionError('ok')",
    "NUL bytes": "def add(a, b): return a + b\0",
    "a lone surrogate": "# \ud800\ndef add(a, b): return a + b",
    "a fork that answers twice": "import os\ndef add(a, b):\n  os.fork()\n  return 'x'",
    "a fork bomb": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
    "10 GB": "x = bytearray(10 * 2**30)\ndef add(a, b): return a + b",
    "10 GB in a call": "def add(a, b): return [0] * (10 * 2**30)",
    "endless output": "while True: print('3')",
    "an endless value": "def add(a, b):\n  x = []\n  x.append(x)\n  return x",
    "a huge value": "def add(a, b): return list(range(10**5))",
    "a deep value": "def add(a, b):\n  x = []\n  for n in range(900): x = [x]\n  return x",
    "an endless loop": "while True: pass",
    "a daemon": "import os, time\nif not os.fork():\n  os.setsid()\n  time.sleep(1000)",
    "a signal to the parents": "import os\nfor pid in (os.getppid(), 1):\n"
    "  try: os.kill(pid, 9)\n  except OSError: pass",
    "a class that lies by __class__": "class A:\n  __class__ = int\n  def __pos__(self): return 3\n"
    "def add(a, b): return A()",
    "a class without a name": "class M(type):\n  @property\n  def __name__(cls): raise SystemExit\n"
    "class E(BaseException, metaclass=M): pass\ndef add(a, b): raise E",
    "a name that steers the terminal": "def add(a, b): raise type('\\x1b[2J', (Exception,), {})\nadd(1, 2)",
    "a generator": "def add(a, b): yield a + b",
    "a huge integer": "def add(a, b): return 1 << 40_000",
    "numbers beyond every float": "import os\nfor f in range(1, 64):\n"
    "  try: os.write(f, b'[\"f\", ' + b'9' * 320 + b']\\n[\"c\", 1e999]\\n')\n  except OSError: pass\nos._exit(0)",
    "no UTF-8": "import os\nfor f in range(1, 64):\n"
    "  try: os.write(f, b'\\xff\\n\"\\xed\\xa0\\x80\"\\n')\n  except OSError: pass",
    "equal hashes": "import itertools\n"
    "def add(a, b): return set(itertools.islice(itertools.product((-1, -2), repeat=10), 400))",
    "a timer that interrupts the harness": "import signal\nsignal.signal(signal.SIGALRM, lambda *_: 1 / 0)\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\ndef add(a, b):\n  while True: pass",
    "no signal but SIGKILL": "import signal\nfor n in {*range(1, 32)} - {9, 19}: signal.signal(n, signal.SIG_IGN)\n"
    "while True: pass",
    "its own stop": "import os, signal\nos.kill(0, signal.SIGSTOP)",
    "threads that go on writing": "import os, threading, time\ndef write():\n  while True:\n    for f in range(1, 9):\n"
    "      try: os.write(f, b'true\\n')\n      except OSError: pass\n"
    "threading.Thread(target=write).start()\ndef add(a, b): time.sleep(0.1)",
    "a fork in __del__": "import os, time\nclass A:\n  def __del__(self):\n    if not os.fork(): time.sleep(1000)\n"
    "x = A()\ndef add(a, b):\n  global x\n  x = A()",
    "another module named json": "import sys, types\nsys.modules['json'] = forged = types.ModuleType('json')\n"
    "forged.dumps = lambda value: 'true'\nframe = sys._getframe()\nwhile frame:\n"
    "  frame.f_globals['json'] = forged\n  frame = frame.f_back\ndef add(a, b): return None",
    "a replaced encoding": "import sys\nsys._getframe(1).f_globals['encode'] = lambda value: True\n"
    "def add(a, b): return None",
    "the text of its call": "import sys\ndef add(a, b):\n  names = sys._getframe(2).f_locals\n"
    "  return names.get('call', '').split('==')[-1]",
    "memory of earlier calls": "seen = []\ndef add(a, b):\n  seen.append((a, b))\n  return seen",
    "a crash": "import ctypes\nctypes.string_at(0)",
    "a flood of errors": "import os\nwhile True: os.write(2, b'x' * 65536)",
    "an endless regular expression": "import re\nre.match('(a+)+$', 'a' * 100 + 'b')",
    "constants that multiply": "x = ((('a' * 4000) * 4000) * 4000) * 4000\ndef add(a, b): return a + b",
    "another encoding": "# coding: rot13\nqrs nqq(n, o): erghea n + o",
    "a name of other letters": "def \u0430dd(a, b): return a + b",
    "a pipe that nobody writes to": "import os\nos.mkfifo('f')\nopen('f').read()",
}  # fmt: skip


# It lies about its value, forges a verdict, ends the process, and exceeds limits.
QUICK_HOSTILE = (
    "replaced builtins", "an equal of everything", "os._exit(0)", "writing the verdict's descriptor", "a daemon",
    "a replaced encoding",
)  # fmt: skip


@pytest.mark.parametrize("names", [QUICK_HOSTILE, pytest.param(HOSTILE, marks=pytest.mark.slow)], ids=["few", "all"])
def test_a_hostile_program_earns_nothing_and_leaves_nothing(names: Collection[str], no_trace: None) -> None:  # noqa: F811
    """Run hostile programs. `no_trace` sees whether a process or a file is left."""
    cases = [(name, ADD) for name in names]
    cases += [(name, SUMS) for name in names if "def add" not in HOSTILE[name]]  # others print nothing
    completions, logged = [fenced(HOSTILE[name]) for name, _ in cases], {}
    scores = QUICK(completions=completions, tests=[tests for _, tests in cases], log_extra=logged.__setitem__)
    assert {name for (name, _), score in zip(cases, scores, strict=True) if score != 0.0} == set()
    assert "\x1b" not in "".join(logged["verdict"])


# A module in which functions of several styles stand beside each other.
STYLES = """
import asyncio, sys
from collections import Counter, defaultdict
from functools import lru_cache
from typing import List, Optional
sys.setrecursionlimit(10**6)
def first(xs: List[int]) -> Optional[int]: return xs[0] if xs else None
class Solution:
    def isValid(self, s: str) -> bool: return s.count("(") == s.count(")")
def count(s):
    d = defaultdict(int)
    for c in s: d[c] += 1; assert d[c]
    return Counter(s)
@lru_cache(maxsize=None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
def typed(f):
    def checked(x):
        if not isinstance(x, f.__annotations__["x"]): raise TypeError
        return f(x)
    return checked
@typed
def add(x: int): return x + 1
def squares(n):
    for i in range(n): yield i * i
async def go(x): return x + 1
def wait(x): return asyncio.run(go(x))
"""
ASSERTED = {
    STYLES: [
        "assert first([2, 1]) == 2", "assert first([]) is None", "assert first([]) == None",
        "assert Solution().isValid('()') == True", "assert not Solution().isValid('(')",
        "assert count('aab') == {'a': 2, 'b': 1}", "assert fib(90) == 2880067194370816120", "assert add(1) == 2",
        "assert list(squares(3)) == [0, 1, 4]", "assert max(squares(3)) == 4", "assert len(set(squares(3))) == 3",
        "assert wait(1) == 2"],
    "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Node:\n    value: int\n"
    "    next: Node | None = None\ndef f(s):\r\n\treturn s[::-1] + '\u00df'\r\n"
    "def inc(x):\n    return x + 1\n\n# Test\nprint(inc(1))\nassert inc(3) == 4\n\nif __name__ == '__main__':\n"
    "    print(inc(int(input())))": [
        "assert Node(1, Node(2)).next.value == 2", "assert f('a\u00f1') == '\u00f1a\u00df'", "assert inc(1) == 2"],
}  # fmt: skip
PRINTED = [
    "import sys\nit = iter(sys.stdin.buffer.read().split())\nn = int(next(it))\n"
    "sys.stdout.write(str(sum(int(next(it)) for _ in range(n))) + '\\n')\nsys.exit(0)",
    "n, *xs = map(int, open(0).read().split())\nprint(sum(xs), end='')",
    "try:\n    while True:\n        input()\n        print(sum(map(int, input().split())), flush=True)\n"
    "except EOFError:\n    pass",
    "import sys, threading\ndef main():\n    input()\n    print(sum(map(int, input().split())))\n"
    "threading.stack_size(2**26)\nthread = threading.Thread(target=main)\nif __name__ == '__main__':\n"
    "    thread.start()\n    thread.join()",
]


def test_right_programs_in_many_styles_are_paid_in_full() -> None:
    completions = [*map(fenced, ASSERTED), *map(fenced, PRINTED)]
    pairs = [{"input": "3\n1 2 3\n", "output": "6\n"}]
    logged: dict[str, Any] = {}
    tests = [*ASSERTED.values(), *[pairs] * len(PRINTED)]
    scores = unit_tests(completions=completions, tests=tests, log_extra=logged.__setitem__)
    assert scores == [1.0] * len(completions), logged["verdict"]


@pytest.mark.slow
def test_expected_values_are_nowhere_to_be_found(no_trace: None) -> None:  # noqa: F811
    assertions = ["assert found() == 'needle-8152'", "assert found() in ('needle-8153',)"]
    pairs = [{"input": "", "output": "needle-8154"}]
    search = fenced(SEARCH + "print(found())")
    for tests in (assertions, pairs):
        assert scored(unit_tests, [search], tests)[0] == [0.0]
    # The search works: it finds what a test shows to the program.
    assert scored(unit_tests, [search], ["assert found() == 'needle-8155' or found('needle-8155') == 1"])[0] == [1.0]


@pytest.mark.slow
def test_values_with_equal_hashes_take_no_time_outside() -> None:
    program = "def add(a, b): return {n * (2**61 - 1) for n in range(10**9, 10**9 + 4000)}"
    scores, logged = scored(QUICK, [fenced(program)], ["assert add(1, 2) == {3}"])
    assert scores == [0.0]
    assert re.search("more than|time", logged["verdict"][0])


UNUSABLE = [
    "assert f(1) == g(1)", "", "[]", "[1]", '[{"input": "1"}]', '["assert f() == 1", {"input": "", "output": ""}]',
    "[" * 100_000, "#" * 100_001, "[" + " " * 1_000_000, '{"inputs": ["1"], "outputs": []}',
    '{"inputs": "1", "outputs": "2"}', '{"inputs": [1], "outputs": ["2"]}',
    '{"inputs": ["1"], "outputs": ["2"], "fn_name": "f"}', '{"inputs": [[1]], "outputs": [2], "fn_name": "f()"}',
    f'{{"inputs": {"[" * 900 + "]" * 900}, "outputs": [2], "fn_name": "f"}}', "assert True", '["assert f() == 1"',
    "def check(candidate):\n    assert candidate(1) == 2", "null",
]  # fmt: skip


def test_rows_whose_tests_cannot_be_used_are_none_without_a_run() -> None:
    logged: dict[str, Any] = {}
    completions = [fenced("f = 1")] * len(UNUSABLE)
    log = logged.__setitem__
    assert unit_tests(completions=completions, tests=UNUSABLE, log_extra=log, log_metric=log) == [None] * len(UNUSABLE)
    assert logged["rewards/unit_tests/programs"] == 0
    assert logged["rewards/unit_tests/unscorable"] == len(UNUSABLE)
    assert "entry_point" in logged["verdict"][-2]
    assert unit_tests.validate(4, {"tests": [ADD, ["assert 1"], [{"assert f() == 1"}], {1: object()}]}) == [
        True, False, False, False,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="`unit_tests`.*`tests`"):
        unit_tests(completions=["x"])
    rows = [("row 1", ADD), ("row 2", [*ADD, "assert add(1, 2) == add(2, 1)"]), ("row 3", ["assert f() == g()"])]
    note = unit_tests.gold_note(rows)
    assert note is not None
    assert re.search(r"^1 .*row 2.*`add\(1, 2\) == add\(2, 1\)`", note)
    assert unit_tests.gold_note(rows[:1]) is None


def test_isolation_is_announced_and_strict_refuses_a_weak_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    line = unit_tests.prepare()
    assert line is not None
    assert all(name in line for name in sandbox.active_mechanisms())
    monkeypatch.setattr(programs, "active_mechanisms", lambda: ())
    programs.checked_isolation.cache_clear()
    with refused("`isolation: strict`"):
        UnitTests(isolation="strict").prepare()
    with refused("`isolation: strict`"):
        UnitTests(isolation="strict")(completions=[fenced("x = 1")], tests=[["assert x == 1"]])
    caplog.clear()
    for _ in range(2):
        unit_tests.prepare()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    programs.checked_isolation.cache_clear()


def test_arguments_and_defaults() -> None:
    for key, value in (("rule", "any"), ("isolation", "none"), ("seconds", 0), ("memory_mb", 63), ("pay", "x")):
        with pytest.raises(ValueError, match=key):
            UnitTests(**{key: value})  # type: ignore[arg-type]
    reward = UnitTests(memory_mb=64, rule="share", isolation="best")
    page = Path(__file__).resolve().parents[2].joinpath("docs/rewards.md").read_text(encoding="utf-8")
    assert f"`seconds` ({reward.seconds})" in " ".join(page.split())
    assert (reward, UnitTests().memory_mb) == (UnitTests(memory_mb=64), 512)
    assert (reward.gold_column, reward.solution_column, reward.columns_read) == ("tests", "solution", ("tests",))
    assert (UnitTests(pay=-1).highest_pay, UnitTests(pay=2).highest_pay) == (0.0, 2.0)
    assert UnitTests(pay=-1).with_unit_pay() is None
    assert UnitTests(pay=2, name="mine", prefix="p", rule="share").with_unit_pay() == UnitTests(rule="all")


# --- Verdicts on runs that are made up, without a sandbox


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let programs end as `runs.ends` says: how, exit code, CPU seconds, seconds on the clock, output.

    `runs.limits` are the limits of each run: CPU seconds, seconds on the clock, MiB.
    """
    made = types.SimpleNamespace(ends=[], limits=[])

    def run(program: str, given: str, of: Any) -> sandbox.Outcome:
        made.limits.append((of.cpu_seconds, of.wall_seconds, of.memory_bytes >> 20))
        if not made.ends:
            time.sleep(0.02)
            raise sandbox.SandboxError("no room")
        ended, code, cpu, wall, output = made.ends.pop(0)
        return sandbox.Outcome(ended, code, cpu, wall, output.encode(), b"")

    monkeypatch.setattr(programs, "run", run)
    return made


PAIRS = [{"input": "", "output": f"{number}"} for number in (1, 2, 3)]


def timed(runs: Any, *ends: tuple[str, int, float, float, str], tests: Any = PAIRS, **options: Any) -> Any:
    """Return the score of a program, its verdict, and the number of those that ran out of time."""
    runs.ends[:], runs.limits[:] = ends, []
    scores, logged = scored(UnitTests(seconds=4, memory_mb=100, **options), ["```python\n```"], tests)
    return scores[0], logged["verdict"][0], logged["rewards/unit_tests/timeouts"]


def test_the_pairs_of_a_row_share_its_time(runs: Any) -> None:
    ends = [("exited", 0, 1.5, 2.0, "1"), ("exited", 0, 0.75, 3.0, "2"), ("exited", 0, 0.1, 0.1, "3")]
    assert timed(runs, *ends)[::2] == (1.0, 0)
    assert runs.limits == [(4, 12.0, 100), (3, 10.0, 100), (2, 7.0, 100)], "CPU seconds are rounded up"
    for ends, passed, pair, late in (
        ([("exited", 0, 4.0, 1.0, "1")], 1, 2, 1), ([("exited", 0, 1.0, 999.0, "1")], 1, 2, 1),
        ([("exited", 0, 3.5, 1.0, "1"), ("exited", 0, 0.5, 1.0, "2")], 2, 3, 1),
        ([("exited", 0, 1.0, 1.0, "1"), ("exited", 0, 1.0, 1.0, "2"), ("exited", 0, 2.0, 1.0, "3")], 3, 0, 0),
        ([("timeout", -9, 4.0, 4.0, "")], 0, 1, 1),
        ([("output", -9, 1.0, 1.0, "9"), ("timeout", -9, 3.0, 3.0, "")], 0, 1, 1),
        ([("exited", 1, 1.0, 1.0, "1"), ("exited", 0, 1.0, 1.0, "2"), ("exited", 0, 1.0, 1.0, "3")], 2, 1, 0),
        ([("killed", -9, 1.0, 1.0, "1"), ("exited", 0, 1.0, 1.0, "x"), ("exited", 0, 1.0, 1.0, "3")], 1, 1, 0),
    ):  # fmt: skip
        score, verdict, timeouts = timed(runs, *ends)
        assert (score, timeouts, len(runs.limits)) == (pytest.approx(passed / 3), late, len(ends))
        assert f"pair {pair} " in verdict or not pair
    ends = [("exited", 0, 1.0, 1.0, "1"), ("exited", 0, 1.0, 1.0, "x")]
    assert timed(runs, *ends, rule="all")[0] == 0.0, "the rule `all` stops at the first failure"
    assert timed(runs, ends[0], rule="all", pay=2.0, tests=PAIRS[:1])[0] == 2.0
    assert timed(runs, *ends, ends[1], pay=2.0)[0] == pytest.approx(2 / 3)


def test_a_value_that_is_cut_off_is_none(runs: Any) -> None:
    """The last line of an output that was stopped may be the beginning of another value: `3` of `37`."""
    tests = ["assert f(1) == 1", "assert f(2) == 3"]
    assert timed(runs, ("output", -9, 1.0, 1.0, "1\n3"), tests=tests)[0] == 0.5
    assert timed(runs, ("exited", 0, 1.0, 1.0, "1\n3\n"), tests=tests)[0] == 1.0
    assert timed(runs, ("timeout", -9, 1.0, 1.0, "1\n"), tests=tests)[::2] == (0.5, 1)
    _, verdict, _ = timed(runs, ("exited", 0, 1.0, 1.0, '["!", "\\u001b[2J"]\n'), tests=tests)
    assert "\x1b" not in verdict, "the name of an error is the program's own"
    outputs = ("exited", 0, 0.1, 0.1, "1\n" * 99 + "2\n")
    assert timed(runs, outputs, tests="assert f() == 1\n" * 300)[0] == 0.99, "the first hundred tests count"


def test_the_processes_of_a_launch_share_the_processors(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error, programs that wait are not started."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for ranks, share in (("8", 2), ("1", 16), ("64", 1), ("0", 16), ("x", 16), ("3", 5)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert programs._processors() == share
    with pytest.raises(sandbox.SandboxError, match="no room"):
        unit_tests(completions=[fenced(f"x = {number}") for number in range(99)], tests=[ADD] * 99)
    assert share <= len(runs.limits) < 99
