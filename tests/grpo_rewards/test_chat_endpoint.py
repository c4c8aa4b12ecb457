"""The client of chat endpoints: waits between attempts, statuses, replies and time-outs, against a local server."""

import random
import threading
import time

import pytest

from grpo_rewards.chat_endpoint import ChatEndpoint, EndpointError, checked_base_url
from tests.support.chat_server import completion, serving

KEY = "sk-very-secret"


@pytest.fixture
def waits(monkeypatch):
    """Record the waits between attempts, each as long as it may be."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(random.SystemRandom, "uniform", lambda self, low, high: high)
    return slept


def failed(server, **options):
    """Return the error of a request to a server."""
    with pytest.raises(EndpointError) as caught:
        ChatEndpoint(server.url, KEY, timeout=5.0, attempts=9).ask(b"{}", **options)
    return caught.value


def test_each_wait_is_twice_the_one_before_up_to_half_a_minute(waits, monkeypatch):
    with serving(lambda request, handler: (500, b"down")) as server:
        failed(server)
        assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
        assert len(server.requests) == 9
        monkeypatch.setattr(random.SystemRandom, "uniform", lambda self, low, high: low)
        waits.clear()
        failed(server, attempts=4)
        assert waits == [0.25, 0.5, 1.0]


def test_a_longer_wait_that_the_endpoint_asks_for_counts(waits):
    asked = {
        "7": 7.0, " 1.5 ": 1.5, "86400": 30.0, "1000000": 0.5, "-1": 0.5, "1e3": 0.5, "": 0.5, "0.1": 0.5,
        "Wed, 21 Oct 2015 07:28:00 GMT": 0.5,
    }  # fmt: skip
    for header, seconds in asked.items():
        with serving(lambda request, handler, header=header: (429, b"", ("Retry-After", header))) as server:
            failed(server, attempts=2)
        assert waits.pop() == seconds, header


def test_attempts_end_as_soon_as_the_caller_asks_no_more(waits):
    with serving(lambda request, handler: (500, b"")) as server:
        allowed = [True, True, False]
        failed(server, may_ask=lambda: allowed.pop(0))
        assert len(server.requests) == 2
        failed(server, may_ask=lambda: False)
        assert len(server.requests) == 2


def test_a_status_tells_whether_the_request_may_succeed_later_and_whether_others_fail_alike():
    retried, alike = set(), set()
    statuses = [201, 301, 307, 400, 401, 403, 404, 405, 408, 409, 410, 413, 422, 425, 429, 451, 500, 503, 599]
    for status in statuses:
        with serving(lambda request, handler, status=status: (status, b"")) as server:
            error = failed(server, attempts=1)
        retried |= {status} if error.retry else set()
        alike |= {status} if error.for_all else set()
    assert retried == {408, 409, 425, 429, 500, 503, 599}
    assert alike == {401, 403, 404, 405}


def test_a_refusal_quotes_the_beginning_of_the_reply_without_the_key():
    replies = {b" no\n such \xff field ": "no such \ufffd field", f"the key {KEY} is".encode(): "the key … is"}
    replies |= {b"x" * 300: "x" * 200, b"": "Bad Request"}
    for reply, shown in replies.items():
        with serving(lambda request, handler, reply=reply: (400, reply)) as server:
            message = str(failed(server))
        assert "400" in message
        assert message.endswith(shown)
        assert "x" * 201 not in message


def test_a_reply_is_the_text_of_the_first_choice_and_the_key_is_sent_but_not_shown():
    two = {"choices": [completion(text)["choices"][0] for text in ("first", "second")]}
    with serving(lambda request, handler: (200, two)) as server:
        endpoint = ChatEndpoint(server.url, KEY, 5.0, 1)
        assert endpoint.ask(b'{"a": 1}') == "first"
        (path, headers), request = server.headers[0], server.requests[0]
    assert (path, headers["Authorization"], request) == ("/v1/chat/completions", f"Bearer {KEY}", {"a": 1})
    assert KEY not in repr(endpoint)


def test_a_base_url_is_one_of_http_with_a_host():
    assert checked_base_url("http://127.0.0.1:8000/v1/") == "http://127.0.0.1:8000/v1"
    for url in ("https://h.example/v1", "http://h", "http://h:1/v1", "http://[::1]:8000/v1"):
        assert checked_base_url(url) == url
    for url in (
        "http://h:0/v1", "http://h:99999/v1", "ftp://h/v1", "h:80/v1", "http:///v1", "http://h/v 1", "http://h/v1?x",
        "http://h/#x", "http://[::1/v1", "http://h/v1\x00", "http://h/v1\n", 7, None,
    ):  # fmt: skip
        with pytest.raises(ValueError, match="base_url"):
            checked_base_url(url)
    with pytest.raises(ValueError, match="api_key_env") as caught:
        checked_base_url("http://user:s3cret@h/v1")
    assert "s3cret" not in str(caught.value)


class EarlyTimer:
    """Timer whose time is over as soon as it starts: a name server or a handshake took all of it."""

    def __init__(self, seconds, function, arguments):
        self.start = lambda: function(*arguments)

    def cancel(self):
        """Do nothing: the time is over."""


@pytest.mark.parametrize("error", [TimeoutError("timed out"), OSError("no route"), ConnectionRefusedError(111, "no")])
def test_a_failure_to_connect_is_a_time_out_or_named(error, monkeypatch):
    def connect(self):
        raise error

    monkeypatch.setattr("http.client.HTTPConnection.connect", connect)
    messages = []
    for timer in (threading.Timer, EarlyTimer):
        monkeypatch.setattr(threading, "Timer", timer)
        with pytest.raises(EndpointError) as caught:
            ChatEndpoint("http://127.0.0.1:9/v1", None, 5.0, 1).ask(b"{}")
        messages.append("5 s" in str(caught.value))
    assert messages == [isinstance(error, TimeoutError), True]


def test_no_request_is_sent_once_the_time_is_over(monkeypatch):
    monkeypatch.setattr(threading, "Timer", EarlyTimer)
    with serving(lambda request, handler: (200, b"{}")) as server:
        with pytest.raises(EndpointError, match="5 s"):
            ChatEndpoint(server.url, None, 5.0, 1).ask(b"{}")
        assert server.requests == []
