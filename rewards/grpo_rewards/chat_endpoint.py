"""Client of OpenAI-compatible chat endpoints, from the standard library: requests with a hard deadline and retries.

`http.client` rather than `urllib`, which sends the headers, and with them the key, to wherever a redirect points.
The time-out of a socket applies to each read, so that a server which sends a byte now and then never meets it. Here a
timer shuts the socket at the end of the request's total time.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

MAX_REPLY_BYTES = 4 * 2**20
FIRST_WAIT = 0.5
"""Seconds before the second attempt. Each further wait is twice as long, up to LONGEST_WAIT."""
LONGEST_WAIT = 30.0
_RETRIED = frozenset({408, 409, 425, 429})
_FAIL_ALIKE = frozenset({401, 403, 404, 405})
# A generator of its own: retries must not change the state that samples completions.
_JITTER = random.SystemRandom()


class EndpointError(Exception):
    """Request without a usable reply. The message is one sentence.

    Attributes:
        retry: True if the same request may succeed later.
        wait: Number of seconds that the endpoint asks to wait before that.
        for_all: True if every other request would fail alike.
    """

    def __init__(self, message: str, *, retry: bool = True, wait: float = 0.0, for_all: bool = False) -> None:
        super().__init__(message)
        self.retry, self.wait, self.for_all = retry, wait, for_all


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
    """Address of an endpoint, with its key and its limits.

    Args:
        base_url: URL without `/chat/completions`.
        api_key: bearer token, or None for an endpoint without one. It is never shown.
        timeout: seconds for one request, from connecting to the last byte of the reply.
        attempts: largest number of attempts for one request.
    """

    base_url: str
    api_key: str | None = field(repr=False)
    timeout: float
    attempts: int

    def ask(self, body: bytes, *, attempts: int | None = None, may_ask: Callable[[], bool] = lambda: True) -> str:
        """Return the text of the reply to one request, which is repeated after a failure that may pass.

        Args:
            body: request as JSON.
            attempts: replacement for the endpoint's number of attempts.
            may_ask: callable before every attempt. False ends the attempts.

        Raises:
            EndpointError: the error of the last attempt.
        """
        failure = EndpointError("no request was made")
        for attempt in range(attempts or self.attempts):
            if attempt:
                # Jitter spreads the retries of many requests that failed at the same time.
                wait = FIRST_WAIT * 2 ** (attempt - 1) * _JITTER.uniform(0.5, 1.0)
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
            # The connection drops its reference while it reads a response without a length.
            opened.append(connection.sock)
            if expired.is_set():
                raise TimeoutError
            connection.request("POST", f"{parts.path}/chat/completions", body, headers)
            response = connection.getresponse()
            content = response.read(MAX_REPLY_BYTES + 1)
            # A response without a length looks complete where the timer cut it.
            if expired.is_set():
                raise TimeoutError
        except (OSError, http.client.HTTPException) as error:
            if expired.is_set() or isinstance(error, TimeoutError):
                raise EndpointError(f"no reply within {self.timeout:g} s") from error
            raise EndpointError(f"{type(error).__name__}: {error}") from error
        finally:
            timer.cancel()
            connection.close()
        if len(content) > MAX_REPLY_BYTES:
            raise EndpointError(f"a reply of more than {MAX_REPLY_BYTES} bytes", retry=False)
        if response.status != 200:
            raise self._refused(response, content)
        return content

    def _refused(self, response: http.client.HTTPResponse, content: bytes) -> EndpointError:
        excerpt = " ".join(content[:2000].decode("utf-8", "replace").split())[:200]
        if self.api_key:
            excerpt = excerpt.replace(self.api_key, "…")
        # A date, which few endpoints send, is not read.
        asked = re.fullmatch(r"[0-9]{1,6}(?:\.[0-9]{1,6})?", response.headers.get("Retry-After", "").strip())
        return EndpointError(
            f"HTTP {response.status} {response.reason}: {excerpt}".rstrip(": "),
            retry=response.status in _RETRIED or response.status >= 500,
            wait=float(asked.group()) if asked else 0.0,
            for_all=response.status in _FAIL_ALIKE,
        )


def _shut(connection: http.client.HTTPConnection, opened: list[socket.socket], expired: threading.Event) -> None:
    expired.set()
    for sock in opened or [connection.sock]:
        # The method of the plain socket, also under TLS, so that the reading thread sees the end. A socket that is not
        # connected yet has a time-out of its own, and a closed one raises OSError.
        with contextlib.suppress(OSError):
            if sock is not None:
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _read_reply(content: bytes) -> str:
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise EndpointError("the reply is no chat completion") from error
    if not isinstance(text, str):
        raise EndpointError("the reply holds no text")
    return text
