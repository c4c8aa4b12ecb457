"""math-verify in its server: verdicts, deadline, memory, threads, forks and killed processes."""

import asyncio
import ctypes
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rewards.math import answers, symbolic
from grpo_rewards.math.correctness import GSM8KCorrectness, MathCorrectness
from grpo_rewards.math.symbolic import equivalent
from tests.support.grids import only
from tests.support.interrupts import Interrupted, ends, interrupted_calls

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the server forks")

TOWER = "10^{10^{10}}"


def gone(pid: int) -> bool:
    """Return True if a process ends and is reaped within ten seconds."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def children(pid: int) -> list[int]:
    """Return the process IDs of the children of a process that are not reaped."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("x+1", "1+x", True),
        ("\\frac{\\sqrt{3}}{2}", "\\frac{3}{2\\sqrt{3}}", True),
        ("(1, 2)", "(1,2)", True),
        ("\\{1,2\\}", "\\{2,1\\}", True),
        ("2\\sqrt{2}", "\\sqrt{8}", True),
        ("x>3", "3<x", True),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", True),
        ("x+1", "x-1", False),
        ("(1, 2)", "(2, 1)", False),
        ("\\pi", "3.141593 \\cdot 1", False),
        ("x", "\ud800\x00", False),
        ("x", "", False),
        ("x", "\n", False),
        ("x", "\\binom{20000}{10000}", False),
    ],
)
def test_formulas_get_the_expected_verdict(gold, answer, equal):
    assert equivalent(gold, answer) is equal


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("answer", [TOWER, "9^{9^{9^9}}", "100000000!", "7^{100000000}", "{" * 5000])
def test_a_runaway_comparison_ends_as_none_and_the_next_one_works(answer):
    assert equivalent("x+1", answer, deadline=0.3) is None
    assert equivalent("x+1", "1+x") is True
    if Path("/proc/self/statm").exists():
        assert len(children(symbolic._server().pid)) == 1, "the child that was killed is reaped"


@pytest.mark.slow
def test_any_thread_and_a_running_event_loop_may_compare():
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(equivalent("x+1", TOWER, 0.3)))
    thread.start()
    thread.join()

    async def within_a_loop():
        return [equivalent("x+1", TOWER, 0.3), await asyncio.to_thread(equivalent, "x+1", "1+x")]

    assert outcomes + asyncio.run(within_a_loop()) == [None, None, True]


def test_threads_share_a_server():
    outcomes = {}
    compare = lambda n: outcomes.update({n: equivalent(f"x+{n}", f"{n % 5}+x")})  # noqa: E731
    threads = [threading.Thread(target=compare, args=(n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {n: n < 5 for n in range(10)}


def test_the_callers_timer_survives():
    def fail(*_):
        raise AssertionError("the caller's own alarm must not fire early")

    previous = signal.signal(signal.SIGALRM, fail)
    try:
        signal.setitimer(signal.ITIMER_REAL, 600)
        equivalent("x+1", TOWER, 0.3)
        assert 500 < signal.getitimer(signal.ITIMER_REAL)[0] <= 600
        assert signal.getsignal(signal.SIGALRM) is fail
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.slow
def test_a_killed_server_is_restarted():
    assert equivalent("x+1", "1+x") is True
    killed = symbolic._server().pid
    os.kill(killed, signal.SIGKILL)
    assert equivalent("x+1", "1+x") is True
    assert symbolic._server().pid != killed
    assert gone(killed)
    assert os.getpgid(symbolic._server().pid) != os.getpgid(0), "a terminal sends Ctrl-C to a group"


@pytest.mark.slow
def test_a_server_killed_during_a_comparison_is_restarted():
    equivalent("x+1", "1+x")
    killer = threading.Timer(0.3, os.kill, (symbolic._server().pid, signal.SIGKILL))
    killer.start()
    assert equivalent("x+1", TOWER, 1.0) is None
    assert equivalent("x+1", "1+x") is True


@pytest.fixture
def interrupt():
    """Return a function that makes a signal handler raise in the main thread after a number of seconds."""

    def raise_it(*_):
        raise Interrupted

    previous, timers = signal.signal(signal.SIGUSR1, raise_it), []

    def after(seconds):
        timers.append(threading.Timer(seconds, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)))
        timers[-1].start()

    yield after
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGUSR1, previous)


@pytest.mark.slow
def test_an_interrupted_comparison_leaves_no_verdict_behind(interrupt):
    equivalent("x+1", "1+x")
    before = symbolic._server().pid
    interrupt(0.1)
    with pytest.raises(Interrupted):
        equivalent("x+1", TOWER, deadline=0.5)
    assert gone(before)
    time.sleep(0.6)  # by now the interrupted comparison would have its reply
    assert [equivalent("x+1", "1+x"), equivalent("x+1", "x-1"), equivalent("x+1", "1+x")] == [True, False, True]


# A server without math-verify: equal texts are equal, and a gold `N ms` takes N milliseconds.
STUB = """
import json, os, sys, time
{starting}
os.write(1, b"[0, true]\\n")
for line in sys.stdin.buffer:
    request = json.loads(line)
    time.sleep(float(request["gold"].split(" ")[0]) / 1000)
    os.write(1, json.dumps([request["number"], request["gold"] == request["answer"]]).encode() + b"\\n")
"""


def stub(starting=""):
    return [sys.executable, "-I", "-S", "-c", STUB.format(starting=starting)]


def test_a_server_killed_while_it_starts_is_retried_once(tmp_path):
    dies = "open({0!r}, 'a').write('x')\nif len(open({0!r}).read()) <= {1}: os._exit(9)"
    once, twice = tmp_path / "once", tmp_path / "twice"
    server = symbolic.Server(stub(dies.format(str(once), 1)))
    assert server.compare("0 ms", "0 ms", 5.0) is True
    server.close()
    with pytest.raises(RuntimeError, match="did not start"):
        symbolic.Server(stub(dies.format(str(twice), 2))).compare("0 ms", "0 ms", 5.0)
    assert (once.read_text(), twice.read_text()) == ("xx", "xx")


def test_a_server_found_dead_does_not_count_as_a_failed_start(tmp_path):
    """Kill a server between two comparisons, and let its replacement die while it starts."""
    starts = tmp_path / "starts"
    second_dies = f"open({str(starts)!r}, 'a').write('x')\nif len(open({str(starts)!r}).read()) == 2: os._exit(9)"
    server = symbolic.Server(stub(second_dies))
    assert server.compare("0 ms", "0 ms", 5.0) is True
    os.kill(server.pid, signal.SIGKILL)
    assert server.compare("0 ms", "other", 5.0) is False
    assert starts.read_text() == "xxx"
    server.close()


def test_a_reply_with_another_number_is_ignored():
    """Check a reply that an interrupt left in the pipe at the only moment when the server could not be ended."""
    server = symbolic.Server(stub("time.sleep(0)"))
    assert server.compare("0 ms", "0 ms", 5.0) is True
    server._connection._process.stdin.write(b'{"number": 1, "gold": "0 ms", "answer": "0 ms"}\n')
    assert [server.compare("0 ms", other, 5.0) for other in ("1", "0 ms", "2")] == [False, True, False]
    closed = server.pid
    server.close()
    assert gone(closed)
    assert server.pid is None


def test_a_reply_after_the_deadline_is_not_waited_for(monkeypatch):
    server = symbolic.Server(stub())
    assert server.compare("0 ms", "0 ms", 5.0) is True
    with monkeypatch.context() as patch:
        patch.setattr(symbolic, "_GRACE_SECONDS", 0.1)
        assert server.compare("1000 ms", "1000 ms", 0.1) is None
    assert server.compare("0 ms", "0 ms", 5.0) is True
    server.close()


def test_a_start_takes_at_most_half_of_the_time():
    says_seconds = STUB.format(starting="time.sleep(0.3)").replace(
        'request["gold"] == request["answer"]', "request['seconds']"
    )
    server = symbolic.Server([sys.executable, "-I", "-S", "-c", says_seconds])
    assert server.compare("0 ms", "", 0.2) == 0.1
    assert 19 < server.compare("0 ms", "", 20.0) <= 20, "it runs already"
    server.close()


# The real server with a comparison without math-verify: `fresh` ends a child that has compared before.
SERVED = """
import os
from grpo_rewards.math import symbolic
def verify(gold, answer, compared=[]):
    compared.append(answer)
    if answer == "fresh" and len(compared) > 1 or answer == "dies": os._exit(1)
    return gold == answer
symbolic._WARM_UP, symbolic.COMPARISONS_PER_CHILD, symbolic.verify = (), 2, verify
symbolic.serve()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_child_is_limited_in_comparisons_memory_and_time():
    server, served = symbolic.Server([sys.executable, "-c", SERVED]), []
    for answer in ("a", "b", "a", "fresh", "a"):
        assert server.compare("a" if answer == "b" else answer, answer, 20.0) is (answer != "b")
        served += children(server.pid)
        open_files = len(os.listdir(f"/proc/{server.pid}/fd"))
        assert open_files == 5, "standard input, output and error, and the pipes to and from the child"
    first, again, _, third, last = served  # one at a time
    assert (first, third) == (again, last)
    assert len(set(served)) == 3, "replaced after two comparisons, and where it ended in the second"
    limits = {line[:17]: line[17:].split()[0] for line in Path(f"/proc/{third}/limits").read_text().splitlines()}
    size = int(Path(f"/proc/{third}/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    assert 100 << 20 < int(limits["Max address space"]) - size <= 160 << 20
    assert 20 <= int(limits["Max cpu time     "]) <= 22
    assert server.compare("dies", "dies", 20.0) is None
    assert server.compare("a", "a", 20.0) is True
    server.close()


def test_a_long_request_survives_a_signal_whose_handler_returns():
    server, text = symbolic.Server(stub("time.sleep(0)")), "0 ms " + "x" * 2_000_000
    assert server.compare(text, text, 5.0) is True
    previous = signal.signal(signal.SIGUSR1, lambda *_: None)
    stop = threading.Event()

    def knock():
        while not stop.wait(0.0005):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    knocking = threading.Thread(target=knock)
    knocking.start()
    try:
        assert [server.compare(text, other, 20.0) for other in (text, text + "y", text)] == [True, False, True]
    finally:
        stop.set()
        knocking.join()
        signal.signal(signal.SIGUSR1, previous)
        server.close()


def check_interrupts(functions, monkeypatch):
    """Interrupt a comparison before each opcode of `functions`: later ones end in each thread, with their own verdicts.

    Python may run a signal's handler between any two opcodes, also between taking a lock and the block under it.
    """
    monkeypatch.setattr(symbolic, "_GRACE_SECONDS", 0.1)
    server, moments = symbolic.Server(stub()), []

    def compared(answer):
        while (verdict := server.compare("0 ms", answer, 0.2)) is None:
            pass  # a slow machine
        return verdict

    for moment in interrupted_calls(lambda: compared("0 ms"), symbolic, functions):
        verdicts = []
        assert ends(lambda: verdicts.append(compared("other"))), f"interrupted before opcode {moment}"  # noqa: B023
        assert [*verdicts, compared("0 ms")] == [False, True]
        moments.append(moment)
    assert len(moments) > 10
    assert ends(server.close)


def test_an_interrupt_before_any_opcode_of_compare_leaves_no_lock_and_no_verdict(monkeypatch):
    check_interrupts({"compare"}, monkeypatch)


@pytest.mark.slow
def test_an_interrupt_before_any_opcode_of_the_client_leaves_no_lock_and_no_verdict(monkeypatch):
    helpers = {"_read_line", "_write_whole", "_pipe", "_close_pipes", "readable"}
    check_interrupts({*vars(symbolic.Server), *vars(symbolic._Connection), *helpers}, monkeypatch)


def test_a_signal_handler_may_compare_during_a_comparison():
    """The comparison of the handler has a connection of its own, since its thread can't wait for itself."""
    server, verdicts = symbolic.Server(stub()), []
    assert server.compare("0 ms", "0 ms", 20.0) is True
    handler = lambda *_: verdicts.append(server.compare("0 ms", "0 ms", 0.5))  # noqa: E731
    previous = signal.signal(signal.SIGUSR1, handler)
    thread = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
    thread.start()
    try:
        assert server.compare("400 ms", "400 ms", 20.0) is True
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, previous)
        server.close()
    assert verdicts == [True]


DISTURBANCES = st.tuples(st.sampled_from(["interrupt", "kill"]), st.integers(0, 3), st.floats(0, 0.02))
# Concurrent comparisons: for each thread (the main thread first) its time, and True if the answer is right.
ROUNDS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=4),
        st.lists(DISTURBANCES, max_size=3, unique_by=lambda disturbance: disturbance[0] == "kill" or disturbance[1]),
    ),
    min_size=1,
    max_size=5,
)


class Caller(threading.Thread):
    """One comparison in its own thread; `verdict` is None if it was interrupted."""

    def __init__(self, server, milliseconds, right):
        super().__init__()
        self.arguments, self.expected = (f"{milliseconds} ms", f"{milliseconds} ms" if right else "other", 20.0), right
        self.server, self.verdict, self.interrupted = server, None, False

    def run(self):
        try:
            self.verdict = self.server.compare(*self.arguments)
        except Interrupted:
            self.interrupted = True

    def interrupt(self):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(Interrupted))


def disturb(server, callers, kind, who, main):
    """Kill the server, or interrupt a caller: the main thread by a signal, another thread as a debugger would."""
    process = server._connection._process
    if kind == "kill":
        if process is not None:
            process.kill()
    elif who == 0:
        if not main.is_set():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
    elif who < len(callers) and callers[who].is_alive():
        callers[who].interrupt()


def check_verdicts(rounds):
    server = symbolic.Server(stub())
    over = threading.Event()

    def raise_it(*_):
        if not over.is_set():
            raise Interrupted

    previous = signal.signal(signal.SIGUSR1, raise_it)
    try:
        for comparisons, disturbances in rounds:
            callers = [Caller(server, *comparison) for comparison in comparisons]
            over.set()
            for caller in callers[1:]:
                caller.start()
            timers = [
                threading.Timer(at, disturb, (server, callers, kind, who, over)) for kind, who, at in disturbances
            ]
            for timer in timers:
                timer.start()
            try:
                over.clear()
                callers[0].run()
                over.set()
            except Interrupted:  # after the comparison
                over.set()
            for thread in [*timers, *callers[1:]]:
                thread.join()
            for caller in callers:
                assert caller.interrupted or caller.verdict is caller.expected
        undisturbed = [server.compare("0 ms", answer, 20.0) for answer in ("0 ms", "other", "0 ms")]
        assert undisturbed == [True, False, True]
    finally:
        over.set()
        signal.signal(signal.SIGUSR1, previous)
        server.close()


test_verdicts_are_those_of_an_undisturbed_run = pytest.mark.slow(
    settings(max_examples=12, deadline=None)(given(ROUNDS)(check_verdicts))
)
test_verdicts_are_those_of_an_undisturbed_run_at_length = pytest.mark.nightly(
    settings(max_examples=400, deadline=None)(given(ROUNDS)(check_verdicts))
)


def compare_in_fork(queue):
    queue.put((equivalent("x+1", "1+x"), symbolic._server().pid))


@pytest.mark.slow
def test_a_fork_has_its_own_server():
    equivalent("x+1", "1+x")
    queue = multiprocessing.get_context("fork").Queue()
    child = multiprocessing.get_context("fork").Process(target=compare_in_fork, args=(queue,))
    child.start()
    equal, pid = queue.get(timeout=60)
    child.join()
    assert equal is True
    assert pid != symbolic._server().pid
    assert gone(pid)
    assert equivalent("x+1", "x-1") is False


def test_a_fork_that_exits_leaves_the_parents_server_alone():
    equivalent("x+1", "1+x")
    before = symbolic._server().pid
    child = os.fork()
    if child == 0:
        try:
            symbolic._servers[os.getppid()].close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert equivalent("x+1", "1+x") is True
    assert symbolic._server().pid == before


ENDINGS = ["", "raise SystemExit(1)", "os.kill(os.getpid(), signal.SIGKILL)"]


@pytest.mark.slow
@pytest.mark.parametrize("ending", only(ENDINGS[2:], ENDINGS))
def test_no_process_outlives_its_owner(ending):
    # A user's script: code at module level, without an `if __name__ == "__main__"` guard.
    script = textwrap.dedent(f"""
        import os, signal
        from grpo_rewards import math_correctness
        from grpo_rewards.math import symbolic
        scores = math_correctness(completions=["\\\\boxed{{1+x}}"], answer=["x+1"])
        before = symbolic._server().pid
        signal.signal(signal.SIGINT, lambda *_: None)
        os.killpg(0, signal.SIGINT)  # as Ctrl-C does, which is for the trainer alone
        scores += math_correctness(completions=["\\\\boxed{{1+x}}"], answer=["x+2"])
        print(scores, symbolic._server().pid == before, before, flush=True)
        {ending}
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, start_new_session=True
    )
    scores, pid = run.stdout.rsplit(" ", 1)
    assert scores == "[1.0, 0.0] True"
    assert gone(int(pid))
    assert run.stderr == ""


def test_rewards_can_be_pickled_after_use():
    reward = MathCorrectness()
    assert reward(completions=["\\boxed{1+x}"], answer=["x+1"]) == [1.0]
    assert pickle.loads(pickle.dumps(reward)) == reward


def test_each_distinct_answer_is_compared_once_and_each_gold_read_once(monkeypatch):
    asked, read = [], []
    monkeypatch.setattr(answers, "equivalent", lambda *pair: asked.append(pair[:2]) or False)
    monkeypatch.setattr(
        "grpo_rewards.math.correctness.read_golds",
        lambda golds, decimal: read.append(golds) or answers.read_golds(golds, decimal),
    )
    texts = ["\\boxed{x+2}", "\\boxed{x+3}", "\\boxed{x+2}", "\\boxed{x+2}"]
    MathCorrectness()(completions=texts * 2, answer=["x+1"] * 4 + ["y+1"] * 4)
    assert read == ["x+1", "y+1"]
    assert asked == [("x+1", "x+2"), ("x+1", "x+3"), ("y+1", "x+2"), ("y+1", "x+3")]


def test_a_list_of_golds_gets_one_deadline(monkeypatch):
    asked = []
    monkeypatch.setattr(answers, "equivalent", lambda *pair: asked.append(pair[:2]))
    pays = MathCorrectness()(completions=["\\boxed{x^{x^x}}"], answer=[["x+1", "x+2", "x+3"]])
    assert pays == [0.0]
    assert asked == [("x+1", "x^{x^x}")]


def test_a_number_never_reaches_the_server(monkeypatch):
    monkeypatch.setattr(answers, "equivalent", lambda *_: pytest.fail("a plain number needs no symbolic comparison"))
    texts = ["\\boxed{\\sqrt{324}}", "\\boxed{17 + 1}", "\\boxed{18.0}"]
    assert MathCorrectness()(completions=texts, answer=["18"] * 3) == [0.0, 0.0, 1.0]
    golds = ["\\sqrt{324}", "\\sqrt{325}", "\\sqrt{18}", "x"]
    assert MathCorrectness()(completions=["\\boxed{18}"] * 4, answer=golds) == [1.0, 0.0, 0.0, 0.0]


def test_a_pair_is_not_read_as_a_thousands_separator():
    texts = ["\\boxed{(2, 100)}", "\\boxed{\\left(2,100\\right)}", "\\boxed{2100}", "\\boxed{(2,101)}"]
    assert MathCorrectness()(completions=texts, answer=["(2,100)"] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_words_are_not_compared_as_products_of_letters():
    texts = ["\\boxed{\\text{tuesday}}", "\\boxed{Tuesyad}", "\\boxed{Tuesday}"]
    assert MathCorrectness()(completions=texts, answer=["Tuesday"] * 3) == [1.0, 0.0, 1.0]


def test_a_timeout_counts_as_wrong_and_is_logged():
    columns, metrics = {}, {}
    scores = MathCorrectness(deadline=0.3)(
        completions=[f"\\boxed{{{TOWER}}}", "\\boxed{1+x}", "\\boxed{3}", "none"],
        answer=["x+1"] * 4,
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert scores == [0.0, 1.0, 0.0, 0.0]
    assert columns["verdict"] == ["timeout", "symbolic", "wrong", "missing"]
    assert columns["extracted"] == [TOWER, "1+x", "3", None]
    assert columns["gold"] == ["x+1"] * 4
    name = "rewards/math_correctness"
    assert metrics == {f"{name}/parsed": 0.75, f"{name}/symbolic": 0.5, f"{name}/timeouts": 1.0}


@pytest.mark.slow
def test_a_missing_math_verify_is_named(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    symbolic.shut_down()
    with pytest.raises(RuntimeError, match="did not start"):
        equivalent("x", "y")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "answer", [TOWER, "\\gcd(7^{100000000},3^{100000000})", "7^{100000000}", "{" * 900, "100000000!"]
)
def test_memory_of_the_server_stays_under_300_mb(answer):
    equivalent("x+1", "1+x")
    server = symbolic._server().pid
    peak, stop = [0], threading.Event()

    def resident(pid):
        try:
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        except (FileNotFoundError, ProcessLookupError):
            return 0

    def watch():
        while not stop.is_set():
            try:
                children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
            except FileNotFoundError:
                children = []
            peak[0] = max(peak[0], resident(server) + sum(map(resident, children)))
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    GSM8KCorrectness(extract="boxed")(completions=[f"\\boxed{{{answer}}}"], answer=["x+1"])
    stop.set()
    watcher.join()
    assert peak[0] - resident(server) < 300e6


class FakeChild:
    """A child that replies with the verdicts of a list, and says when it is killed."""

    def __init__(self, name, verdicts, killed, compared=0):
        self.name, self.verdicts, self.killed, self.compared = name, list(verdicts), killed, compared
        self.ends = []

    def compare(self, request, end):
        self.compared += 1
        self.ends.append(end)
        return self.verdicts.pop(0)

    def kill(self):
        self.killed.append(self.name)


REQUEST = b'{"number": 1, "seconds": 10}'


@pytest.mark.parametrize(
    ("used", "first", "second", "verdict", "killed", "kept"),
    [
        (0, [True], [], True, [], "first"), (499, [False], [], False, [], "first"),
        (500, [], [True], True, ["first"], "second"),  # replaced after 500 comparisons
        (7, [None], [False], False, ["first"], "second"),  # its memory was full of earlier comparisons
        (7, [None], [None], None, ["first", "second"], None), (0, [None], [], None, ["first"], None),
        (None, [], [True], True, [], "second"), (None, [], [None], None, ["second"], None),
    ],
)  # fmt: skip
def test_a_child_that_fails_after_some_use_is_replaced_once(monkeypatch, used, first, second, verdict, killed, kept):
    seen = []
    fresh = FakeChild("second", second, seen)
    monkeypatch.setattr(symbolic, "Child", lambda: fresh)
    child = None if used is None else FakeChild("first", first, seen, used)
    found, left = symbolic._compare_in_child(REQUEST, child)
    assert (found, seen, left and left.name) == (verdict, killed, kept)


def test_a_comparison_has_95_percent_of_its_seconds_and_no_second_child_after_them(monkeypatch):
    seen = []
    child = FakeChild("first", [None], seen, 7)
    clock = iter([100.0, 109.5])
    monkeypatch.setattr(symbolic.time, "monotonic", lambda: next(clock))
    assert symbolic._compare_in_child(REQUEST, child) == (None, None)
    assert (child.ends, seen) == ([109.5], ["first"])


def test_a_child_gets_its_seconds_of_cpu_time_rounded_up(monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda *given: limits.append(given))
    monkeypatch.setattr(symbolic.time, "process_time", lambda: 2.25)
    symbolic.limit_cpu(1.5)
    assert limits == [(resource.RLIMIT_CPU, (4, resource.getrlimit(resource.RLIMIT_CPU)[1]))]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux")
def test_a_child_may_allocate_so_many_bytes_more_than_it_has(monkeypatch):
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda *given: limits.append(given))
    (size,) = (line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line)
    symbolic.limit_memory(10**12)
    ((kind, (soft, hard)),) = limits
    assert (kind, soft) == (resource.RLIMIT_AS, hard)
    assert soft == pytest.approx(10**12 + int(size) * 1024, abs=2**26)


def test_a_pipe_is_readable_once_it_has_data_or_has_ended():
    reading, writing = os.pipe()
    start = time.monotonic()
    assert not symbolic.readable(reading, 0.05)
    assert 0.04 < time.monotonic() - start < 30
    assert not symbolic.readable(reading, -1)
    symbolic._reply(writing, [1, True])
    assert symbolic.readable(reading, 5)
    assert os.read(reading, 100) == b"[1, true]\n"
    os.close(writing)
    assert symbolic.readable(reading, 5)
    os.close(reading)


def test_a_write_that_is_cut_short_goes_on():
    written = []

    class Pipe:
        def write(self, rest):
            written.append(bytes(rest[:3]))
            return len(written[-1])

    symbolic._write_whole(Pipe(), b"12345678")
    assert written == [b"123", b"456", b"78"]


def test_a_formula_that_the_parser_fails_on_is_not_equal_and_one_that_is_too_large_has_no_verdict(monkeypatch):
    outcomes = {"a": True, "b": False, "c": ValueError(), "d": RecursionError(), "e": MemoryError()}

    def verify(gold, answer):
        if isinstance(outcomes[answer], Exception):
            raise outcomes[answer]
        return outcomes[answer]

    monkeypatch.setattr(symbolic, "verify", verify)
    assert [symbolic._verify_whatever("x", answer) for answer in "abcd"] == [True, False, False, False]
    with pytest.raises(MemoryError):
        symbolic._verify_whatever("x", "e")


def test_a_server_of_another_process_is_forgotten_and_the_own_one_kept(monkeypatch):
    abandoned = []

    class Inherited:
        def abandon(self):
            abandoned.append(self)

    registered = []
    monkeypatch.setattr(symbolic.atexit, "register", registered.append)
    monkeypatch.setattr(symbolic, "_servers", {-1: Inherited(), -2: Inherited()})
    own = symbolic._server()
    assert (len(abandoned), symbolic._servers, registered) == (2, {os.getpid(): own}, [own.close])
    assert symbolic._server() is own
    assert len(registered) == 1


@pytest.mark.parametrize(
    ("runs", "starts", "replies", "verdict", "stops"),
    [
        (False, "yy", [True], True, 0), (False, "yy", ["died", False], False, 1),
        (False, "yy", ["died", "died"], None, 2),
        # A server that ran before may have died of an earlier comparison.
        (True, "yyy", ["died", "died", True], True, 2), (True, "yyy", ["died", "died", "died"], None, 3),
        (False, "yy", ["late"], None, 1), (False, "ny", [True], True, 1), (True, "yny", ["died", True], True, 2),
        (False, "nn", [], RuntimeError, 1), (True, "nnn", [], RuntimeError, 2),
    ],
)  # fmt: skip
def test_a_comparison_is_tried_until_two_servers_died_of_it(monkeypatch, runs, starts, replies, verdict, stops):
    connection = symbolic._Connection(None)
    connection._process = object() if runs else None
    stopped, left, coming = [], list(starts), list(replies)

    def started():
        if left.pop(0) == "n":
            raise symbolic._ServerDied
        return "process"

    def answered(process, request):
        reply = coming.pop(0)
        if reply == "died":
            raise symbolic._ServerDied
        if reply == "late":
            raise TimeoutError
        assert (process, request["gold"], request["answer"]) == ("process", "x", "y")
        assert request["seconds"] == pytest.approx(2.0, abs=0.9)
        return reply

    monkeypatch.setattr(connection, "_started", started)
    monkeypatch.setattr(connection, "_answered", answered)
    monkeypatch.setattr(connection, "stop", lambda: stopped.append(1))
    if verdict is RuntimeError:
        with pytest.raises(RuntimeError, match="did not start"):
            connection.compared("x", "y", 2.0)
    else:
        assert connection.compared("x", "y", 2.0) is verdict
    assert len(stopped) == stops
    assert coming == []


def test_starting_a_server_costs_at_most_half_of_a_comparisons_seconds(monkeypatch):
    connection = symbolic._Connection(None)
    given = []
    monkeypatch.setattr(connection, "_started", lambda: "process")
    monkeypatch.setattr(connection, "_answered", lambda process, request: given.append(request["seconds"]) or True)
    for took in (0.5, 1.5):
        clock = iter([10.0, 10.0 + took])
        monkeypatch.setattr(symbolic.time, "monotonic", lambda clock=clock: next(clock))
        connection.compared("x", "y", 2.0)
    assert given == [1.5, 1.0]


def connected(command):
    """Return a connection to a process that runs already."""
    connection = symbolic._Connection(None)
    connection._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    return connection, connection._process


def test_a_server_ends_by_itself_or_is_killed_once_its_pipes_are_closed():
    connection, process = connected(["cat"])
    connection.stop(patience=10.0)
    assert (process.returncode, process.stdin.closed, process.stdout.closed) == (0, True, True)
    assert connection.pid is None
    connection, process = connected(["sleep", "60"])
    connection.stop()
    assert process.returncode == -signal.SIGKILL
    connection.stop()  # nothing is left to stop


def test_a_forgotten_server_loses_its_pipes_and_is_not_waited_for():
    connection, process = connected(["cat"])
    connection.abandon()
    assert (process.returncode, process.stdin.closed, process.stdout.closed) == (0, True, True)
    assert connection.pid is None
    assert os.waitpid(process.pid, 0) == (process.pid, 0), "it ended by itself, and nobody else reaped it"
