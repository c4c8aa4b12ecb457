"""Redaction: secrets by key and by shape, harmless text, and linear time."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
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

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEAcanary\nQ29kZQ==\n-----END RSA PRIVATE KEY-----"

# Texts, each with the part that must be hidden.
SHAPES = [
    ("http://bob:plainpass99@host/v1", "plainpass99"),
    ("http://bob:pa/ssWORD1@h", "pa/ssWORD1"),
    ("s3://KEY:sec/ret@bucket/rows.jsonl", "sec/ret"),
    ("https://bob:p@ss@h", "p@ss"),
    ("https://bob:p?a#s@s@h/x", "p?a#s@s"),
    ("postgresql+psycopg2://bob:12/34ab@h:5432/db", "12/34ab"),
    ("http://bob:pa://ss@h", "pa://ss"),
    ('http://bob:pa"ss@h', 'pa"ss'),
    ('{"url": "http://bob:hunter22@h:80/x", "mail": "a@b.c"}', "hunter22"),
    (r"http:\/\/bob:hunter22@h", "hunter22"),
    ("https://proxy.org/http://bob:hunter22@h", "hunter22"),
    ("https://justatoken@github.com/x.git", "justatoken"),
    ("https://h/p?sp=r&sig=a%2Bb%3D&se=2", "a%2Bb%3D"),
    ("https://h/p?access_token=abc12&page=2", "abc12"),
    ("https://h/p?page=2&api_key=abc12", "abc12"),
    ("https://h/p?X-Amz-Signature=0fe1&X-Amz-Date=2026", "0fe1"),
    ("https://h/p?X-Amz-Credential=AK%2F2026", "AK%2F2026"),
    ("https://h/p?X-Amz-Security-Token=FwoG%2F", "FwoG%2F"),
    ("https://h/p?X-Goog-Signature=7b", "7b"),
    ("https://h/p?token=abc12", "abc12"),
    ("https://h/p?key=abc12", "abc12"),
    ("https://h/p?code=abc12#x", "abc12"),
    ("https://h/cb#access_token=abc12", "abc12"),
    ("/p?sig=abc12", "abc12"),
    *((token, token) for token in (
        "hf_abcdefghijklmnopqrst", "sk-proj-abcdefghijklmnopqrst", "sk-ant-api03-abcdefghijklmnopqrst",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789", "github_pat_abcdefghijklmnopqrstuv", "glpat-abcdefghijklmnopqrst",
        "xoxb-1234567890-abcdef", "AKIAABCDEFGHIJKLMNOP", "AIzaSyA-abcdefghijklmnopqrstuvwxyz01234",
        "gsk_abcdefghijklmnopqrst", "nvapi-abcdefghijklmnopqrst_-x", "xai-abcdefghijklmnopqrstuvwxyz",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
    )),
    ("Authorization: Bearer abcdefghij", "abcdefghij"),
    ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    ("DefaultEndpointsProtocol=https;AccountKey=abcdefgh==;x=y", "abcdefgh=="),
    (PEM, "MIIEowIBAAKCAQEAcanary"),
    (json.dumps({"private": PEM, "x": 1}), "Q29kZQ=="),
    (json.dumps(json.dumps([PEM])), "MIIEowIBAAKCAQEAcanary"),
    (PEM[:60], "MIIEowIBAAKCAQEAcanary"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----", "b3BlbnNzaC1rZXk"),
    ("-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: x\n\nlQOYBF\n-----END PGP PRIVATE KEY BLOCK-----", "lQOYBF"),
]  # fmt: skip

HARMLESS = [
    "a@b", "Write to me@example.com or a.b@c.org: which is shorter?", "git@github.com:owner/name.git",
    "ssh://git@github.com/owner/name", r"C:\Users\me\rows.jsonl", r"C:\a@b:c", "https://medium.com/@someone/a-title",
    "https://host:8000/v1", "http://127.0.0.1:8000/v1 and a@b.c", "abfss://container@account.dfs.core.windows.net/rows",
    '{"url":"http://h:80/x","mail":"a@b.c"}', "Basic arithmetic problems", "bearer of responsibilities",
    "https://h/p?page=2&max_tokens=5&pass_at_1=0.5", "what? key=3", "x = y ? a : b; key=2", "task-oriented", "sk-learn",
    "-----BEGIN CERTIFICATE-----\nMIID\n-----END CERTIFICATE-----", "the hf_ prefix", "eyJ", "xai-interpretability",
    "s3://bucket/rows-*.parquet", "1 @ 2 :// 3", "a: b@c", "<think>", "```python\nx[::2]\n```", "",
]  # fmt: skip


@pytest.mark.parametrize(("text", "secret"), SHAPES)
def test_a_secret_is_recognised_by_its_shape_anywhere_in_a_text(text: str, secret: str) -> None:
    hidden = redacted({"x": [f"before {text} behind"]})["x"][0]
    assert secret not in hidden
    assert hidden.startswith("before ")
    assert secret not in scrubbed(f"{text}.")
    assert secret not in "".join(redacted_arguments(["--run_name", text, f"--x={text}", f"--y=[{text!r}]"]))


@pytest.mark.parametrize("text", HARMLESS)
def test_text_without_a_secret_is_unchanged(text: str) -> None:
    assert redacted(text) is text
    assert secret_values(text) == set()


@pytest.mark.parametrize(
    "key",
    ["pwd", "pass", "PASS", "password", "passwd", "db_pass", "dbpassword", "api_key_2", "api_key2", "apiKey", "APIKey",
     "apikey", "secret_key", "aws_secret_access_key", "aws_access_key_id", "AWS_SESSION_TOKEN", "api_keys", "token_1",
     "password_old", "X-Api-Key", "client_secret", "HFToken", "http.auth", "webhook_secret", "ssh key"],
)  # fmt: skip
def test_the_words_of_a_key_make_its_value_a_secret(key: str) -> None:
    assert redacted({key: "x9"}) == {key: HIDDEN}
    assert redacted_arguments([f"--{key}", "x9"]) == [f"--{key}", HIDDEN]


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, "x9") for key in (
        "passed", "pass_at_1", "pass_rate", "passes", "bypass", "forward_pass", "max_tokens", "eos_token", "pad_token",
        "num_tokens", "tokenizer", "tokens", "stop_tokens", "decoder_start_token", "keys", "key", "keyboard", "author",
        "api_key_env", "token_path", "key_2", "2", "", "cookiecutter", "secretary",
    )] + [("pass", 1.0), ("pass", 3), ("token", 5), ("token", True), ("api_key", None), ("passes", [1])],
)  # fmt: skip
def test_a_key_that_only_resembles_a_secret_is_kept(key: str, value: Any) -> None:
    assert redacted({key: value}) == {key: value}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://bob:hunter22@h/x and http://eve:hunter33@h", "http://<hidden>@h/x and http://<hidden>@h"),
        ("a hf_abcdefghijklmnopqrst b sk-abcdefghijklmnopqrst c", "a <hidden> b <hidden> c"),
        ('{"url": "http://bob:hunter22@h:80/x", "to": "a@b.c"}', '{"url": "http://<hidden>@h:80/x", "to": "a@b.c"}'),
        ("https://proxy.org/http://bob:hunter22@h", "https://proxy.org/http://<hidden>@h"),
        ("https://h/p?sig=a%2Bb&x=1&token=abc12#y", "https://h/p?sig=<hidden>&x=1&token=<hidden>#y"),
        ("https://h/p?a=1;sig=2;token=3", "https://h/p?a=1;sig=2;token=<hidden>"),
        ("https://h/p?api_key_2=3&token2=4&2=5", "https://h/p?api_key_2=<hidden>&token2=<hidden>&2=5"),
        ("Authorization: Basic dXNlcjpwYXNz, ok", "Authorization: Basic <hidden>, ok"),
        ("AccountKey=abcdefgh==;x=y SharedAccessKey=abcdefgh;z", "AccountKey=<hidden>;x=y SharedAccessKey=<hidden>;z"),
        ("Bearer abcdef; Bearer abcde; bearer abcdefghijklmno1; bearer abcdefghijklmnop",
         "Bearer <hidden>; Bearer abcde; bearer <hidden>; bearer abcdefghijklmnop"),
        (f"x\n{PEM}\ny\n{PEM}\nz", "x\n<hidden>\ny\n<hidden>\nz"),
        (f"{PEM} then {PEM[:60]} é", "<hidden> then <hidden>é"),
        ("http://user:80@h", "http://<hidden>@h"),
        ("ssh://git:secret9@h git+ssh://git@h", "ssh://<hidden>@h git+ssh://git@h"),
        ("wasb://c@a abfs://c:secret9@a https://c@a", "wasb://c@a abfs://<hidden>@a https://<hidden>@a"),
        ("abfs://c@a wasbs://c@a ABFSS://c@a xabfs://c@a", "abfs://c@a wasbs://c@a ABFSS://c@a xabfs://<hidden>@a"),
        ("https://a@b@h/x", "https://<hidden>@h/x"),
        (PEM + PEM, "<hidden><hidden>"),
        ("http://<hidden>@h", "http://<hidden>@h"),
    ],
)  # fmt: skip
def test_the_rest_of_a_text_stays_as_it_was(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    ("prefix", "length"),
    [
        *((prefix, 16) for prefix in ("hf_", "api_org_", "gsk_", "sk-", "sk_live_", "pk_test_", "pk-", "rk_", "rk-",
                                      "glpat-", "gldt-", "glrt-", "glsa_", "AIza", "ya29.", "GOCSPX-", "nvapi-",
                                      "tgp_v1_", "AKIA", "ASIA")),
        *((prefix, 20) for prefix in ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "xai-", "pplx-", "r8_",
                                      "rpa_", "npm_", "dop_v1_", "shpat_", "dckr_pat_", "whsec_", "wandb_v1_", "pypi-",
                                      "hvs.", "lsv2_")),
        *((prefix, 10) for prefix in ("xoxa-", "xoxb-", "xoxp-", "xoxs-", "xoxr-", "xoxe-", "xoxc-", "xoxo-", "xapp-")),
        ("dapi", 32), ("SG.0123456789abcdef.", 16),
    ],
)  # fmt: skip
def test_the_tokens_of_a_service_are_known_by_their_prefix(prefix: str, length: int) -> None:
    """The services publish the prefixes so that scanners find leaked tokens."""
    token = prefix + ("0123456789ABCDEF" if prefix in ("AKIA", "ASIA") else "0123456789abcdef" * 2)[:length]
    assert redacted(f"in {token}, and") == "in <hidden>, and"
    assert redacted(token[:-1]) == token[:-1] or prefix in ("sk_live_", "pk_test_"), "a shorter word is no token"
    assert redacted(f"x{token}") == f"x{token}", "a token begins a word"


@pytest.mark.parametrize(
    "key",
    ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_KEY", "GOOGLE_API_KEY", "SSH_PRIVATE_KEY", "sshKey",
     "encryptionKey", "signing_key", "masterKey", "Ocp-Apim-Subscription-Key", "deploy_key", "sharedKey", "hmac_key",
     "account_key", "auth_key", "passphrase", "passcode", "authorization", "credentials", "bearer", "cookies", "jwt",
     "apitoken", "authtoken", "accesstoken", "hubtoken", "accesskey", "secretkey", "privatekey", "secrets",
     "token_old",
     "password_new", "api_key_prod", "api_key_production", "token_dev", "token_staging", "token_backup", "key_token",
     "secret_primary", "secret_secondary", "secret_value", "DB_PASSWD", "dbpasswd", "auth", "apikey",
     "hftoken", "token"],
)  # fmt: skip
def test_the_usual_names_of_secrets_are_known(key: str) -> None:
    assert is_secret(key, "x9")


@pytest.mark.parametrize(
    "key",
    ["eos_token", "bos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token", "stop_token",
     "start_token", "begin_token", "end_token", "image_token", "video_token", "audio_token", "vision_token",
     "boi_token", "eoi_token", "additional_special_tokens", "extra_tokens", "additional_tokens", "added_tokens",
     "bad_tokens", "suppress_tokens", "think_token", "thinking_tokens", "reasoning_tokens", "answer_tokens",
     "new_tokens",
     "prompt_tokens", "completion_tokens", "generated_tokens", "input_tokens", "output_tokens", "total_tokens",
     "cached_tokens", "text_tokens", "tool_tokens", "max_tokens", "min_tokens", "num_tokens", "per_token",
     "max_audit_tokens", "min_audit_tokens", "num_audit_tokens", "forward_pass", "backward_pass", "first_pass",
     "second_pass", "third_pass", "last_pass", "single_pass", "one_pass", "two_pass", "full_pass", "multi_pass",
     "per_pass", "by_pass"],
)  # fmt: skip
def test_the_keys_of_tokenizers_and_of_usage_are_no_secrets(key: str) -> None:
    assert not is_secret(key, "x9")


@pytest.mark.parametrize("key", ["sig", "signature", "key", "code", "credential", "hmac", "sas"])
def test_some_keys_are_secrets_in_the_query_of_a_url_only(key: str) -> None:
    assert redacted(f"https://h/p?{key}=x9&{key}=y8") == f"https://h/p?{key}=<hidden>&{key}=<hidden>"
    assert (
        redacted(f"https://h/p?a=1;{key}=x9") == f"https://h/p?a=1;{key}={'<hidden>' if key == 'credential' else 'x9'}"
    )


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


@pytest.mark.parametrize("secret", ['first"second\\third', "erste\u00e4zweite\u2028dritte", "tab\tand\nline"])
def test_a_secret_is_scrubbed_in_each_spelling(secret: str) -> None:
    spellings = (secret, " ".join(secret.split()), repr(secret), json.dumps(secret), quote(secret, safe=""),
                 quote_plus(secret))  # fmt: skip
    for spelling in spellings:
        shown = scrubbed(f"cannot use {spelling} here", {secret})
        assert HIDDEN in shown, spelling
        assert not any(part in shown for part in ("first", "second", "third", "zweite", "dritte", "and"))


def test_an_error_that_quotes_a_part_of_a_secret_is_scrubbed() -> None:
    recipe = {"base_url": "http://bob:plain%20pass99@h", "kwargs": {"api_key": "two  words'9", "pwd": PEM}}
    known = secret_values(recipe)
    quoted = [
        "no: plain%20pass99",
        "no: plain pass99",
        f"no: {'two words'}'9",
        f"no: {recipe['kwargs']!r}",
        json.dumps(PEM),
    ]
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
    ["://", ":", "@", "/", "\\", '"', "'", " ", "\n", "<", ">", "?", "&", ";", "#", "=", "sig", "key", "token", "http",
     "s3", "hf_", "sk-", "AIza", "eyJ", ".", "-", "_", "abcdefghijklmnopqrst", "0123456789abcdefghij", "Bearer ",
     "Basic ", "dXNlcjpwYXNz", "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "-----", "BEGIN ", HIDDEN,
     "git",
     "8000", "é", "\x1b"]
)  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=25).map("".join))


@given(TEXTS)
def test_a_second_pass_changes_nothing(text: str) -> None:
    once = redacted(text)
    assert redacted(once) == once
    assert scrubbed(once) == once


@given(st.text(st.characters(blacklist_characters="@=-_."), max_size=60))
def test_words_without_the_characters_of_a_secret_are_unchanged(text: str) -> None:
    assert redacted(text) == text or "earer " in text or "asic " in text


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=4),
                            st.dictionaries(st.one_of(TEXTS, st.integers()), inner, max_size=4)),
    max_leaves=10,
)  # fmt: skip


@given(JSON)
def test_any_value_can_be_redacted_and_a_second_pass_changes_nothing(value: Any) -> None:
    once = redacted(value)
    assert redacted(once) == once
    assert isinstance(secret_values(value), set)


def test_a_secret_inside_a_key_is_hidden() -> None:
    url = "http://bob:plainpass99@h"
    hidden = redacted({"servers": {url: 2, 3: "x"}})
    assert hidden == {"servers": {"http://<hidden>@h": 2, 3: "x"}}
    assert list(hidden_places(hidden)) == ["servers.http://<hidden>@h"]
    assert "plainpass99" in secret_values({url: 2})


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    "piece",
    ["@", ":", "-----BEGIN", "-----BEGIN PRIVATE KEY-----", "-----END ", "://", "://a:b", 'http://x:y"', "://a@",
     ":\\/\\/", "eyJaaaaaaaa-", "eyJaaaaaaaa.", "SG.aaaaaaaaaaaaaaaa", "?a=", "&key=", "sk-", "hf_", "Bearer ",
     "bearer x", "Basic aa", "Basic YTpi", '"', "\\", "a ", "A", "aA", "1"],
)  # fmt: skip
def test_the_time_is_linear_in_the_text_whatever_it_contains(piece: str) -> None:
    text = (piece * 1_000_000)[:1_000_000]
    before = time.process_time()
    redacted(text)
    is_secret(text, "x")
    assert time.process_time() - before < 1.0, piece
