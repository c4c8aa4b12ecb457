"""Redaction: secrets by key and by shape, harmless text, and linear time."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rewards.redaction import (
    HIDDEN,
    hidden_places,
    is_secret,
    redacted,
    redacted_arguments,
    scrubbed,
    secret_values,
)
from grpo_rewards.terminal import say, say_error, show

# Texts, each with the part that must be hidden.
SHAPES = [
    ("http://bob:plainpass99@host/v1", "plainpass99"), ("https://bob:p@ss@h", "p@ss"),
    ("http://bob:pa/ssWORD1@h", "pa/ssWORD1"), ("postgresql+psycopg2://bob:1234ab@h:5432/db", "1234ab"),
    ('{"url": "http://bob:hunter22@h:80/x", "mail": "a@b.c"}', "hunter22"),
    ("https://proxy.org/http://bob:hunter22@h", "hunter22"), ("https://justatoken@github.com/x.git", "justatoken"),
    *((token, token) for token in (
        "hf_abcdefghijklmnopqrst", "sk-proj-abcdefghijklmnopqrst", "sk-ant-api03-abcdefghijklmnopqrst",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789", "github_pat_abcdefghijklmnopqrstuv", "AKIAABCDEFGHIJKLMNOP",
        "AIzaSyA-abcdefghijklmnopqrstuvwxyz01234",
    )),
]  # fmt: skip

HARMLESS = [
    "a@b", "Write to me@example.com or a.b@c.org: which is shorter?", "git@github.com:owner/name.git",
    "ssh://git@github.com/owner/name", r"C:\Users\me\rows.jsonl", r"C:\a@b:c", "https://medium.com/@someone/a-title",
    "https://host:8000/v1", "http://127.0.0.1:8000/v1 and a@b.c", "abfss://container@account.dfs.core.windows.net/rows",
    '{"url":"http://h:80/x","mail":"a@b.c"}', "Basic arithmetic problems", "bearer of responsibilities",
    "https://h/p?page=2&max_tokens=5&pass_at_1=0.5", "what? key=3", "x = y ? a : b; key=2", "task-oriented", "sk-learn",
    "the hf_ prefix", '{"url":"http://h:80","mail":"a@b.c"}', "AKIA",
    "s3://bucket/rows-*.parquet", "1 @ 2 :// 3", "a: b@c", "<think>", "```python\nx[::2]\n```", "",
]  # fmt: skip


def test_a_secret_is_recognised_by_its_shape_anywhere_in_a_text() -> None:
    for text, secret in SHAPES:
        hidden = redacted({"x": [f"before {text} behind"]})["x"][0]
        assert secret not in hidden
        assert hidden.startswith("before ")
        assert secret not in scrubbed(f"{text}.")
        assert secret not in "".join(redacted_arguments(["--run_name", text, f"--x={text}", f"--y=[{text!r}]"]))
    for text in HARMLESS:
        assert redacted(text) == text
        assert secret_values(text) == set()


SECRET_KEYS = (
    ["pwd", "pass", "password", "passwd", "db_pass", "dbpassword", "api_key_2", "apiKey", "APIKey", "apikey",
     "secret_key", "aws_secret_access_key", "aws_access_key_id", "AWS_SESSION_TOKEN", "api_keys", "token_1",
     "X-Api-Key", "client_secret", "HFToken", "http.auth", "ssh key", "AZURE_STORAGE_KEY", "SSH_PRIVATE_KEY",
     "signing_key", "passphrase", "authorization", "credentials", "cookies"]
)  # fmt: skip
OTHER_KEYS: list[tuple[str, Any]] = (
    [(key, "x9") for key in (
        "passed", "pass_at_1", "pass_rate", "passes", "bypass", "forward_pass", "max_tokens", "eos_token", "pad_token",
        "num_tokens", "tokenizer", "tokens", "stop_tokens", "decoder_start_token", "keys", "key", "keyboard", "author",
        "api_key_env", "token_path", "key_2", "2", "", "cookiecutter", "secretary",
    )] + [("pass", 1.0), ("pass", 3), ("token", 5), ("token", True), ("api_key", None), ("passes", [1])]
)  # fmt: skip


def test_the_words_of_a_key_make_its_value_a_secret() -> None:
    for key in SECRET_KEYS:
        assert redacted({key: "x9"}) == {key: HIDDEN}
        assert redacted_arguments([f"--{key}", "x9"]) == [f"--{key}", HIDDEN]
    for other, value in OTHER_KEYS:
        assert redacted({other: value}) == {other: value}


def test_the_rest_of_a_text_stays_as_it_was() -> None:
    for text, shown in (
        ("http://bob:hunter22@h/x and http://eve:hunter33@h", "http://<hidden>@h/x and http://<hidden>@h"),
        ("a hf_abcdefghijklmnopqrst b sk-abcdefghijklmnopqrst c", "a <hidden> b <hidden> c"),
        ("ssh://git:secret9@h git+ssh://git@h", "ssh://<hidden>@h git+ssh://git@h"),
        ("wasb://c@a abfs://c:secret9@a https://c@a", "wasb://c@a abfs://<hidden>@a https://<hidden>@a"),
        ("http://<hidden>@h", "http://<hidden>@h"),
    ):
        assert redacted(text) == shown


def test_secrets_are_collected_with_the_password_of_a_url_alone() -> None:
    recipe = {"url": "http://bob:hunter22@h", "api_key": "abcdef", "pwd": "short", "n": [{"token": {"a": "nested1"}}]}
    assert secret_values(recipe) == {"bob:hunter22", "hunter22", "abcdef", "nested1"}
    assert scrubbed("an abcdef, a longer abcdefgh", {"abcdef", "abcdefgh", "an"}) == f"an {HIDDEN}, a longer {HIDDEN}"


def test_a_value_that_is_yaml_is_shown_without_its_secrets() -> None:
    given = ["--reward={name: judge, kwargs: {api_key: x9, url: 'é'}}", "--x=[http://bob:hunter22@h, 2]", "--y={a: 1}",
             "--z={a: [", "--judge.api_key", "x9", "--a.b=1"]  # fmt: skip
    assert redacted_arguments(given) == [
        "--reward={name: judge, kwargs: {api_key: <hidden>, url: é}}", "--x=['http://<hidden>@h', 2]", "--y={a: 1}",
        "--z={a: [", "--judge.api_key", "<hidden>", "--a.b=1",
    ]  # fmt: skip


def test_the_value_after_an_option_is_read_by_the_options_name() -> None:
    words = ["--api_key=x9", "word", "--api_key", "x9", "word", "--flag"]
    assert redacted_arguments(words) == [f"--api_key={HIDDEN}", "word", "--api_key", HIDDEN, "word", "--flag"]


def test_a_secret_is_scrubbed_in_each_spelling() -> None:
    for secret in ['first"second\\third', "erste\u00e4zweite\u2028dritte", "tab\tand\nline"]:
        spaced, quoted = " ".join(secret.split()), quote(secret, safe="")
        for spelling in (secret, spaced, repr(secret), json.dumps(secret), quoted, quote_plus(secret)):
            shown = scrubbed(f"cannot use {spelling} here", {secret})
            assert HIDDEN in shown, spelling
            assert not any(part in shown for part in ("first", "second", "third", "zweite", "dritte", "and"))


PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEAcanary\nQ29kZQ==\n-----END RSA PRIVATE KEY-----"


def test_an_error_that_quotes_a_part_of_a_secret_is_scrubbed() -> None:
    recipe = {"base_url": "http://bob:plain%20pass99@h", "kwargs": {"api_key": "two  words'9", "pwd": PEM}}
    known = secret_values(recipe)
    quoted = [
        "no: plain%20pass99", "no: plain pass99", f"no: {'two words'}'9", f"no: {recipe['kwargs']!r}", json.dumps(PEM),
    ]  # fmt: skip
    for text in quoted:
        shown = scrubbed(text, known)
        assert HIDDEN in shown
        assert not any(part in shown for part in ("pass99", "words", "MIIE"))


def test_printed_text_contains_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    say("http://bob:plainpass99@h")
    say_error("http://bob:plainpass99@h")
    show("http://bob:plainpass99@h")
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("http://<hidden>@h") == 3


# Pieces of the shapes, so that many of the generated texts almost have one.
PIECES = st.sampled_from(
    ["://", ":", "@", "/", '"', " ", "\n", "<", "http", "s3", "hf_", "sk-", "AIza", ".", "-", "_", HIDDEN, "git", "é",
     "abcdefghijklmnopqrst", "0123456789abcdefghij"]
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(PIECES, max_size=25).map("".join))
def test_any_text_can_be_redacted_and_a_second_pass_changes_nothing(text: str) -> None:
    once = redacted({"x": [text, 3]})
    assert redacted(once) == once
    assert isinstance(secret_values({"x": [text, None]}), set)


def test_a_secret_inside_a_key_is_hidden() -> None:
    url = "http://bob:plainpass99@h"
    hidden = redacted({"servers": {url: 2, 3: "x"}})
    assert hidden == {"servers": {"http://<hidden>@h": 2, 3: "x"}}
    assert list(hidden_places(hidden)) == ["servers.http://<hidden>@h"]
    assert "plainpass99" in secret_values({url: 2})


@pytest.mark.parametrize("piece", ["://", "aA", "hf_"])
def test_the_time_is_linear_in_the_text(piece: str) -> None:
    text = (piece * 1_000_000)[:1_000_000]
    before = time.process_time()
    redacted(text)
    is_secret(text, "x")
    assert time.process_time() - before < 1.0
