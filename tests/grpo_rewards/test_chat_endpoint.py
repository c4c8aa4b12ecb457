"""The client of chat endpoints without a server: waits between attempts, statuses, and replies."""

import email.message
import json
import threading
from types import SimpleNamespace

import pytest

from grpo_rewards import chat_endpoint
from grpo_rewards.chat_endpoint import ChatEndpoint, EndpointError
from tests.support.chat_server import serving

ENDPOINT = ChatEndpoint("http://127.0.0.1:9/v1", "sk-very-secret", timeout=5.0, attempts=9)


def refused(status, content=b"", reason="Reason", **headers):
    """Return the error of a response."""
    message = email.message.Message()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return ENDPOINT._refused(SimpleNamespace(status=status, reason=reason, headers=message), content)


@pytest.fixture
def waits(monkeypatch):
    """Record the waits between attempts. Every attempt fails and asks for a wait of `asked` seconds."""
    found = SimpleNamespace(slept=[], asked=0.0, posts=0)

    def post(self, body):
        found.posts += 1
        raise EndpointError("down", wait=found.asked)

    monkeypatch.setattr(ChatEndpoint, "_post", post)
    monkeypatch.setattr(chat_endpoint, "time", SimpleNamespace(sleep=found.slept.append))
    return found


@pytest.mark.parametrize(("end", "factor"), [(max, 1.0), (min, 0.5)])
def test_each_wait_is_twice_the_one_before_up_to_half_a_minute(waits, monkeypatch, end, factor):
    monkeypatch.setattr(chat_endpoint, "_JITTER", SimpleNamespace(uniform=lambda *bounds: end(bounds)))
    with pytest.raises(EndpointError, match="down"):
        ENDPOINT.ask(b"")
    assert waits.slept == [min(30.0, factor * wait) for wait in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)]
    assert waits.posts == 9


def test_a_longer_wait_that_the_endpoint_asks_for_counts(waits):
    waits.asked = 5.0
    with pytest.raises(EndpointError):
        ENDPOINT.ask(b"", attempts=3)
    assert waits.slept == [5.0, 5.0]


def test_attempts_end_as_soon_as_the_caller_asks_no_more(waits):
    allowed = [True, True, False]
    with pytest.raises(EndpointError, match="down"):
        ENDPOINT.ask(b"", may_ask=lambda: allowed.pop(0))
    assert waits.posts == 2
    with pytest.raises(EndpointError, match="no request was made"):
        ENDPOINT.ask(b"", may_ask=lambda: False)
    assert waits.posts == 2


def test_a_status_says_if_the_request_may_succeed_later_and_if_others_fail_alike():
    errors = {status: refused(status) for status in range(201, 600)}
    assert [status for status, error in errors.items() if error.retry] == [408, 409, 425, 429, *range(500, 600)]
    assert [status for status, error in errors.items() if error.for_all] == [401, 403, 404, 405]


def test_a_refusal_quotes_the_beginning_of_the_reply_without_the_key():
    assert str(refused(400, b" no\n such \xff field ")) == "HTTP 400 Reason: no such \ufffd field"
    assert str(refused(400, b"the key sk-very-secret is wrong")) == "HTTP 400 Reason: the key … is wrong"
    assert str(refused(404)) == "HTTP 404 Reason"
    assert str(refused(404, reason="")) == "HTTP 404"
    assert str(refused(500, b"x" * 300)) == f"HTTP 500 Reason: {'x' * 200}"
    assert str(refused(500, b" " * 1999 + b"abc")) == "HTTP 500 Reason: a"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7.0), (" 1.5 ", 1.5), ("999999", 999999.0), ("1000000", 0.0), ("0.123456", 0.123456), ("-1", 0.0),
     ("1e3", 0.0), ("", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)  # fmt: skip
def test_retry_after_is_read_in_seconds(header, seconds):
    assert refused(429, Retry_After=header).wait == seconds
    assert refused(429).wait == 0.0


def reply(**fields):
    choices = [{"message": {"content": "first"}}, {"message": {"content": "second"}}]
    return chat_endpoint._read_reply(json.dumps({"choices": choices, **fields}).encode())


def test_a_reply_is_the_text_of_the_first_choice():
    assert reply() == "first"


def test_the_key_is_not_shown():
    assert repr(ENDPOINT) == "ChatEndpoint(base_url='http://127.0.0.1:9/v1', timeout=5.0, attempts=9)"


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000/v1"), ("https://h.example/v1", None), ("http://h", None),
        ("http://h:1/v1", None), ("http://h:0/v1", ""), ("http://h:99999/v1", ""), ("ftp://h/v1", ""), ("h:80/v1", ""),
        ("http:///v1", ""), ("http://h/v 1", ""), ("http://h/v1?x", ""), ("http://h/#x", ""), ("http://[::1/v1", ""),
        ("http://[::1]:8000/v1", None), ("http://h/v1\x00", ""), ("http://h/v1\n", ""), (7, ""), (None, ""),
    ],
)  # fmt: skip
def test_a_base_url_is_one_of_http_with_a_host(url, kept):
    if kept == "":
        with pytest.raises(ValueError, match="^base_url must be such as http://127.0.0.1:8000/v1, not "):
            chat_endpoint.checked_base_url(url)
    else:
        assert chat_endpoint.checked_base_url(url) == (kept or url)


def test_a_user_in_a_base_url_is_refused_without_naming_it():
    with pytest.raises(ValueError, match="must not hold a user or password") as caught:
        chat_endpoint.checked_base_url("http://user:s3cret@h/v1")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [(TimeoutError("timed out"), "no reply within 5 s"), (OSError("no route"), "OSError: no route"),
     (ConnectionRefusedError(111, "refused"), "ConnectionRefusedError: [Errno 111] refused")],
)  # fmt: skip
@pytest.mark.parametrize("is_late", [False, True])
def test_a_failure_to_connect_is_a_time_out_or_named(error, message, is_late, monkeypatch):
    def connect(self):
        raise error

    monkeypatch.setattr("http.client.HTTPConnection.connect", connect)
    if is_late:
        monkeypatch.setattr(chat_endpoint, "threading", SimpleNamespace(Event=threading.Event, Timer=EarlyTimer))
    with pytest.raises(EndpointError) as caught:
        ChatEndpoint("http://127.0.0.1:9/v1", None, 5.0, 1).ask(b"{}")
    assert str(caught.value) == ("no reply within 5 s" if is_late else message)


class EarlyTimer:
    """Timer whose time is over as soon as it starts: a name server or a handshake took all of it."""

    def __init__(self, seconds, function, arguments):
        self.start = lambda: function(*arguments)

    def cancel(self):
        """Do nothing: the time is over."""


def test_no_request_is_sent_once_the_time_is_over(monkeypatch):
    threads = SimpleNamespace(Event=threading.Event, Timer=EarlyTimer)
    monkeypatch.setattr(chat_endpoint, "threading", threads)
    with serving(lambda request, handler: (200, b"{}")) as server:
        with pytest.raises(EndpointError, match="^no reply within 5 s$"):
            ChatEndpoint(server.url, None, 5.0, 1).ask(b"{}")
        assert server.requests == []
