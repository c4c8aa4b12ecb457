"""math-verify in its server: verdicts, deadline, memory, threads, forks and killed processes."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from grpo_rewards.math import symbolic
from grpo_rewards.math.correctness import MathCorrectness
from grpo_rewards.math.symbolic import equivalent
from tests.support.interrupts import Interrupted, ends, interrupted_calls

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the server forks")

TOWER = "10^{10^{10}}"


def gone(pid: int) -> bool:
    """Return True if a process ends and is reaped within ten seconds."""
    for _ in range(1000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def children(pid: int) -> list[int]:
    """Return the process IDs of the children of a process that are not reaped."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def test_formulas_get_the_expected_verdict():
    equal = [
        ("x+1", "1+x"), ("\\frac{\\sqrt{3}}{2}", "\\frac{3}{2\\sqrt{3}}"), ("(1, 2)", "(1,2)"), ("x>3", "3<x"),
        ("\\{1,2\\}", "\\{2,1\\}"), ("2\\sqrt{2}", "\\sqrt{8}"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ]  # fmt: skip
    others = [
        ("x+1", "x-1"), ("(1, 2)", "(2, 1)"), ("\\pi", "3.141593 \\cdot 1"), ("x", "\ud800\x00"), ("x", ""),
        ("x", "\n"), ("x", "\\binom{20000}{10000}"),
    ]  # fmt: skip
    assert [pair for pair in equal if equivalent(*pair) is not True] == []
    assert [pair for pair in others if equivalent(*pair) is not False] == []


def test_a_runaway_comparison_ends_as_none_and_the_next_one_works():
    for answer in (TOWER, "{" * 5000):
        assert equivalent("x+1", answer, deadline=0.15) is None
        assert equivalent("x+1", "1+x") is True
        if Path("/proc/self/statm").exists():
            assert len(children(symbolic._server().pid)) == 1, "the child that was killed is reaped"


def test_threads_share_a_server():
    outcomes = {}
    compare = lambda n: outcomes.update({n: equivalent(f"x+{n}", f"{n % 5}+x")})  # noqa: E731
    threads = [threading.Thread(target=compare, args=(n,)) for n in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == {n: n < 5 for n in range(10)}


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


def test_an_interrupted_comparison_leaves_no_verdict_behind(interrupt):
    server = symbolic.SymbolicServer(stub())
    assert server.compare("0 ms", "0 ms", 5.0) is True
    before = server.pid
    interrupt(0.02)
    with pytest.raises(Interrupted):
        server.compare("80 ms", "80 ms", 5.0)
    assert gone(before)
    time.sleep(0.1)  # by now the interrupted comparison would have its reply
    assert [server.compare("0 ms", answer, 5.0) for answer in ("other", "0 ms", "other")] == [False, True, False]
    server.close()


def test_a_comparison_that_kills_two_servers_has_no_verdict(tmp_path):
    starts = tmp_path / "starts"
    server = symbolic.SymbolicServer(stub(f"open({str(starts)!r}, 'a').write('x')"))
    assert server.compare("a gold without a time", "x", 5.0) is None
    assert starts.read_text() == "xx"
    assert server.compare("0 ms", "0 ms", 5.0) is True
    assert server.compare("a gold without a time", "x", 5.0) is None, "one that ran before may have died of its past"
    assert starts.read_text() == "x" * 5
    server.close()


def test_a_server_killed_while_it_starts_is_retried_once(tmp_path):
    dies = "open({0!r}, 'a').write('x')\nif len(open({0!r}).read()) <= {1}: os._exit(9)"
    once, twice = tmp_path / "once", tmp_path / "twice"
    server = symbolic.SymbolicServer(stub(dies.format(str(once), 1)))
    assert server.compare("0 ms", "0 ms", 5.0) is True
    server.close()
    with pytest.raises(RuntimeError):
        symbolic.SymbolicServer(stub(dies.format(str(twice), 2))).compare("0 ms", "0 ms", 5.0)
    assert (once.read_text(), twice.read_text()) == ("xx", "xx")


def test_a_server_found_dead_does_not_count_as_a_failed_start(tmp_path):
    """Kill a server between two comparisons, and let its replacement die while it starts."""
    starts = tmp_path / "starts"
    second_dies = f"open({str(starts)!r}, 'a').write('x')\nif len(open({str(starts)!r}).read()) == 2: os._exit(9)"
    server = symbolic.SymbolicServer(stub(second_dies))
    assert server.compare("0 ms", "0 ms", 5.0) is True
    killed = server.pid
    os.kill(killed, signal.SIGKILL)
    assert server.compare("0 ms", "other", 5.0) is False
    assert gone(killed)
    assert os.getpgid(server.pid) != os.getpgid(0), "a terminal sends Ctrl-C to a group"
    assert starts.read_text() == "xxx"
    server.close()


def test_a_reply_with_another_number_is_ignored():
    """Check a reply that an interrupt left in the pipe at the only moment when the server could not be ended."""
    server = symbolic.SymbolicServer(stub("time.sleep(0)"))
    assert server.compare("0 ms", "0 ms", 5.0) is True
    server._connection._process.stdin.write(b'{"number": 1, "gold": "0 ms", "answer": "0 ms"}\n')
    assert [server.compare("0 ms", other, 5.0) for other in ("1", "0 ms", "2")] == [False, True, False]
    closed = server.pid
    server.close()
    assert gone(closed)
    assert server.pid is None


@pytest.fixture
def short_grace(monkeypatch):
    """Wait shortly for a reply after the deadline."""
    monkeypatch.setattr(symbolic, "_GRACE_SECONDS", 0.1)


def test_a_reply_after_the_deadline_is_not_waited_for(short_grace):
    server = symbolic.SymbolicServer(stub())
    assert server.compare("0 ms", "0 ms", 5.0) is True
    start = time.monotonic()
    assert server.compare("60000 ms", "60000 ms", 0.1) is None
    assert time.monotonic() - start < 30
    assert server.compare("0 ms", "0 ms", 5.0) is True
    server.close()


def test_a_start_takes_at_most_half_of_the_time():
    says_seconds = STUB.format(starting="time.sleep(0.1)").replace(
        'request["gold"] == request["answer"]', "request['seconds']"
    )
    server = symbolic.SymbolicServer([sys.executable, "-I", "-S", "-c", says_seconds])
    assert server.compare("0 ms", "", 0.1) == 0.05
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
    server, served = symbolic.SymbolicServer([sys.executable, "-c", SERVED]), []
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
    server, text = symbolic.SymbolicServer(stub("time.sleep(0)")), "0 ms " + "x" * 500_000
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


@pytest.mark.slow
def test_an_interrupt_before_any_opcode_leaves_no_lock_and_no_verdict(short_grace):
    """Interrupt a comparison before each opcode: later ones end in each thread, with their own verdicts.

    Python may run a signal's handler between any two opcodes, also between taking a lock and the block under it.
    """
    server, moments = symbolic.SymbolicServer(stub()), []
    helpers = {"_read_line", "_pipe", "_close_pipes", "readable"}
    functions = {*vars(symbolic.SymbolicServer), *vars(symbolic._Connection), *helpers}

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


def test_a_fork_leaves_the_parents_server_alone():
    equivalent("x+1", "1+x")
    before = symbolic._server().pid
    child = os.fork()
    if child == 0:
        try:
            symbolic._servers[os.getppid()].close()
            symbolic._server()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert equivalent("x+1", "1+x") is True
    assert symbolic._server().pid == before


@pytest.mark.slow
def test_no_process_outlives_its_owner():
    # A user's script: code at module level, without an `if __name__ == "__main__"` guard.
    script = textwrap.dedent("""
        import os, signal
        from grpo_rewards import math_correctness
        from grpo_rewards.math import symbolic
        scores = math_correctness(completions=["\\\\boxed{1+x}"], answer=["x+1"])
        before = symbolic._server().pid
        signal.signal(signal.SIGINT, lambda *_: None)
        os.killpg(0, signal.SIGINT)  # as Ctrl-C does, which is for the trainer alone
        scores += math_correctness(completions=["\\\\boxed{1+x}"], answer=["x+2"])
        print(scores, symbolic._server().pid == before, before, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
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
