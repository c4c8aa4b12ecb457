"""math-verify in its server: verdicts, deadline, memory, threads, forks, deaths."""

import asyncio
import multiprocessing
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

from grpo_rewards import answers, symbolic
from grpo_rewards.correctness import GSM8KCorrectness, MathCorrectness
from grpo_rewards.symbolic import equivalent

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the server forks")

TOWER = "10^{10^{10}}"


def gone(pid: int) -> bool:
    """Whether a process has ended and been reaped, within ten seconds."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


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
def test_verdicts(gold, answer, equal):
    assert equivalent(gold, answer) is equal


@pytest.mark.parametrize("answer", [TOWER, "9^{9^{9^9}}", "100000000!", "7^{100000000}", "{" * 5000])
def test_a_runaway_comparison_ends_as_none_and_the_next_one_works(answer):
    assert equivalent("x+1", answer, deadline=0.3) is None
    assert equivalent("x+1", "1+x") is True


def test_any_thread_and_a_running_event_loop():
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


def test_a_killed_server_is_restarted():
    assert equivalent("x+1", "1+x") is True
    killed = symbolic._server().pid
    os.kill(killed, signal.SIGKILL)
    assert equivalent("x+1", "1+x") is True
    assert symbolic._server().pid != killed
    assert gone(killed)


def test_a_server_killed_during_a_comparison_is_restarted():
    equivalent("x+1", "1+x")
    killer = threading.Timer(0.3, os.kill, (symbolic._server().pid, signal.SIGKILL))
    killer.start()
    assert equivalent("x+1", TOWER, 1.0) is None
    assert equivalent("x+1", "1+x") is True


def compare_in_fork(queue):
    queue.put((equivalent("x+1", "1+x"), symbolic._server().pid))


def test_a_fork_has_a_server_of_its_own():
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


@pytest.mark.parametrize("ending", ["", "raise SystemExit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_no_process_outlives_its_owner(ending):
    # Written as a user's script would be: at module level, without an `if __name__ == "__main__"` guard.
    script = textwrap.dedent(f"""
        import os, signal
        from grpo_rewards import math_correctness, symbolic
        scores = math_correctness(completions=["\\\\boxed{{1+x}}"], answer=["x+1"])
        print(scores, symbolic._server().pid, flush=True)
        {ending}
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    scores, pid = run.stdout.rsplit(" ", 1)
    assert scores == "[1.0]"
    assert gone(int(pid))
    assert run.stderr == ""


def test_rewards_stay_picklable_after_use():
    reward = MathCorrectness()
    assert reward(completions=["\\boxed{1+x}"], answer=["x+1"]) == [1.0]
    assert pickle.loads(pickle.dumps(reward)) == reward


def test_each_distinct_answer_is_compared_once_and_each_gold_read_once(monkeypatch):
    asked, read = [], []
    monkeypatch.setattr(answers, "equivalent", lambda *pair: asked.append(pair[:2]) or False)
    monkeypatch.setattr("grpo_rewards.correctness.read_gold", lambda gold: read.append(gold) or answers.read_gold(gold))
    texts = ["\\boxed{x+2}", "\\boxed{x+3}", "\\boxed{x+2}", "\\boxed{x+2}"]
    MathCorrectness()(completions=texts * 2, answer=["x+1"] * 4 + ["y+1"] * 4)
    assert read == ["x+1", "y+1"]
    assert asked == [("x+1", "x+2"), ("x+1", "x+3"), ("y+1", "x+2"), ("y+1", "x+3")]


def test_a_number_is_never_handed_to_the_server(monkeypatch):
    monkeypatch.setattr(answers, "equivalent", lambda *_: pytest.fail("a plain number needs no symbolic comparison"))
    texts = ["\\boxed{\\sqrt{324}}", "\\boxed{17 + 1}", "\\boxed{18.0}"]
    assert MathCorrectness()(completions=texts, answer=["18"] * 3) == [0.0, 0.0, 1.0]
    assert MathCorrectness()(completions=["\\boxed{18}"], answer=["\\sqrt{324}"]) == [0.0]


def test_a_pair_is_no_number_with_a_thousands_separator():
    texts = ["\\boxed{(2, 100)}", "\\boxed{\\left(2,100\\right)}", "\\boxed{2100}", "\\boxed{(2,101)}"]
    assert MathCorrectness()(completions=texts, answer=["(2,100)"] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_words_are_no_products_of_letters():
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


def test_a_missing_math_verify_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    symbolic.shut_down()
    with pytest.raises(RuntimeError, match="did not start"):
        equivalent("x", "y")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "answer", [TOWER, "\\gcd(7^{100000000},3^{100000000})", "7^{100000000}", "{" * 900, "100000000!"]
)
def test_memory_stays_under_300_mb(answer):
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
