"""A client of OpenAI-compatible chat endpoints: one request, a deadline that holds, and retries. Standard library only.

`http.client` rather than `urllib`, which follows a redirect with the key in its headers, and rather than a package: what
a judge needs is one POST. A time-out of a socket is one of each read, which a server that sends a byte now and then never
meets; here a timer shuts the socket when the request's whole time is over.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from grpo_rewards.errors import one_line

MAX_REPLY_BYTES = 4 * 2**20
LONGEST_WAIT = 30.0
_RETRIED = frozenset({408, 409, 425, 429})
# What is wrong with one request is wrong with all of them.
_WRONG_FOR_ALL = frozenset({401, 403, 404, 405})
# Not the global generator: how often a judge was asked again must not change what is sampled.
_JITTER = random.SystemRandom()


class EndpointError(Exception):
    """A request without a usable reply: one sentence.

    Attributes:
        retry: whether the same request may go through later.
        wait: how many seconds the endpoint asks to wait before that.
        for_all: whether any other request would fail likewise.
    """

    def __init__(self, message: str, *, retry: bool = True, wait: float = 0.0, for_all: bool = False) -> None:
        super().__init__(message)
        self.retry, self.wait, self.for_all = retry, wait, for_all


class Reply(NamedTuple):
    """What the endpoint's model wrote, and the tokens that it counted (0 where it says nothing)."""

    content: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


def checked_base_url(url: Any) -> str:
    """Return a base URL such as `http://127.0.0.1:8000/v1` without a final slash, or raise ValueError."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        valid = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or re.search(r"[\s\x00-\x1f?#]", url):
        raise ValueError(f"base_url must be such as http://127.0.0.1:8000/v1, not {url!r}")
    if "@" in url:
        raise ValueError(
            "base_url must not hold a user or password: name the key's environment variable in api_key_env"
        )
    return url.rstrip("/")


@dataclass(frozen=True)
class ChatEndpoint:
    """Where to ask, and how patiently.

    Args:
        base_url: up to and without `/chat/completions`.
        api_key: sent as a bearer token; None for an endpoint that takes none. Never shown.
        timeout: seconds for one request, from connecting to the reply's last byte.
        attempts: how often one request is made, at least once.
        first_wait: seconds before the second attempt; doubled for each further one, up to LONGEST_WAIT.
    """

    base_url: str
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 60.0
    attempts: int = 4
    first_wait: float = 0.5

    def ask(self, body: bytes, *, attempts: int | None = None, may_ask: Callable[[], bool] = lambda: True) -> Reply:
        """Return the reply to one request, asked again after a failure that may pass.

        Args:
            body: the request, as JSON.
            attempts: instead of the endpoint's.
            may_ask: called before every attempt; false ends them.

        Raises:
            EndpointError: the last attempt's.
        """
        failure = EndpointError("not asked")
        for attempt in range(attempts or self.attempts):
            if attempt:
                wait = self.first_wait * 2 ** (attempt - 1) * _JITTER.uniform(0.5, 1.0)
                time.sleep(min(max(failure.wait, wait), LONGEST_WAIT))
            if not may_ask():
                break
            try:
                return _read_reply(self._post(body))
            except EndpointError as error:
                failure = error
                if not error.retry:
                    break
        raise failure

    def _post(self, body: bytes) -> bytes:
        """Return the body of a successful response."""
        parts = urlsplit(self.base_url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout)
        expired, opened = threading.Event(), list[socket.socket]()
        timer = threading.Timer(self.timeout, _shut, (connection, opened, expired))
        timer.daemon = True
        timer.start()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.connect()
            opened.append(connection.sock)  # the connection forgets it while a response without a length is read
            if expired.is_set():
                raise TimeoutError
            connection.request("POST", f"{parts.path}/chat/completions", body, headers)
            response = connection.getresponse()
            content = response.read(MAX_REPLY_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            if expired.is_set() or isinstance(error, TimeoutError):
                raise EndpointError(f"no reply within {self.timeout:g} s") from error
            raise EndpointError(f"{type(error).__name__}: {error}") from error
        finally:
            timer.cancel()
            connection.close()
        # A response without a length ends where the timer cut it.
        if expired.is_set():
            raise EndpointError(f"no reply within {self.timeout:g} s")
        if len(content) > MAX_REPLY_BYTES:
            raise EndpointError(f"a reply of more than {MAX_REPLY_BYTES} bytes", retry=False)
        if response.status != 200:
            raise self._refused(response, content)
        return content

    def _refused(self, response: http.client.HTTPResponse, content: bytes) -> EndpointError:
        excerpt = one_line(content[:2000].decode("utf-8", "replace"))[:200]
        if self.api_key:
            excerpt = excerpt.replace(self.api_key, "…")
        return EndpointError(
            f"HTTP {response.status} {response.reason}: {excerpt}".rstrip(": "),
            retry=response.status in _RETRIED or response.status >= 500,
            wait=_seconds(response.headers.get("Retry-After")),
            for_all=response.status in _WRONG_FOR_ALL,
        )


def _shut(connection: http.client.HTTPConnection, opened: list[socket.socket], expired: threading.Event) -> None:
    expired.set()
    for sock in opened or [connection.sock]:
        # The plain socket's own, also under TLS: the reader in the other thread then sees the end. One that is not
        # connected yet has a time-out, and one that is closed already needs nothing.
        with contextlib.suppress(OSError):
            if sock is not None:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _seconds(header: str | None) -> float:
    """Read a Retry-After in seconds; a date, which few endpoints send, counts as none."""
    return float(header) if header and re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,6})?", header.strip()) else 0.0


def _read_reply(content: bytes) -> Reply:
    try:
        read = json.loads(content)
        text = read["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise EndpointError("the reply is no chat completion") from error
    if not isinstance(text, str):
        raise EndpointError("the reply holds no text")
    usage = read.get("usage") if isinstance(read.get("usage"), Mapping) else {}
    return Reply(text, _tokens(usage.get("prompt_tokens")), _tokens(usage.get("completion_tokens")))


def _tokens(value: Any) -> int:
    return value if type(value) is int and value >= 0 else 0
