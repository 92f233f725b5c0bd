"""Secrets come without white space, are refused by name, and reach no log and no message."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bapo_core.errors import ConfigError
from services.buffer.settings import BufferSettings
from services.common.process import find_error, python_command
from services.common.redaction import redact, register_secret
from services.common.settings import BufferClientSettings
from services.stack.stack import Endpoints
from tests.outside.servers import check_message

TOKEN = "tok-4f9a2c7be1d05836"
PASSWORD = "p/ss w+rd-93ab"
ACCESS_KEY = "AKIA-5d1e77"
SECRET_KEY = "s3/cr3t+key==8c11"
OTHERS = ("b3RoZXItdG9rZW4tb2YtYS1jbG91ZA", "5167a7")
ENVIRONMENT = {
    "BAPO_PORT": "8700",
    "BAPO_TOKEN": TOKEN,
    "BAPO_DATABASE_URL": "postgresql://app:p%2Fss%20w%2Brd-93ab@db/bapo",
    "BAPO_S3_ENDPOINT": "http://s3:8333",
    "BAPO_S3_BUCKET": "bapo",
    "BAPO_S3_ACCESS_KEY": ACCESS_KEY,
    "BAPO_S3_SECRET_KEY": SECRET_KEY,
}


def run(module: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a module as a process with only these variables of bapo."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("BAPO_")}
    return subprocess.run(
        python_command(module),
        env={**inherited, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_no_exception_of_a_library_prints_a_secret() -> None:
    variables = {**ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2])}
    printed = run("tests.outside.raise_everything", **variables)
    assert printed.returncode == 0, printed.stderr[-2000:]
    assert int(printed.stdout) > 150
    assert "Illegal header value b'Bearer ***'" in printed.stderr
    assert "error: Illegal header value" in printed.stderr
    for secret in (TOKEN, PASSWORD, "p%2Fss%20w%2Brd-93ab", ACCESS_KEY, SECRET_KEY, *OTHERS):
        assert secret not in printed.stderr


@pytest.mark.parametrize("end", ["\n", "\r\n", " ", "\t\n"])
def test_white_space_around_a_secret_is_removed(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, f"{end}{value}{end}")
    settings = BufferSettings.load()
    assert settings.token.get_secret_value() == TOKEN
    assert settings.s3.secret_key.get_secret_value() == SECRET_KEY
    assert settings.s3.environment()["BAPO_S3_ENDPOINT"] == "http://s3:8333"
    assert settings.database_url.get_secret_value().endswith("@db/bapo")


@pytest.mark.parametrize("value", ["tok-4f9a2c7be1\nd05836", "tok-4f9a2c7be1\x1bd05836", "tök" * 9])
@pytest.mark.parametrize("name", ["BAPO_TOKEN", "BAPO_S3_ACCESS_KEY", "BAPO_S3_SECRET_KEY"])
def test_a_secret_that_no_header_can_hold_is_refused_by_name(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, valid in ENVIRONMENT.items():
        monkeypatch.setenv(variable, valid)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        BufferSettings.load()
    message = check_message(str(caught.value))
    assert f"{name}: holds a line break or another character" in message
    assert "--from-literal" in message
    assert value not in message


def test_white_space_alone_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAPO_BUFFER_URL", "http://buffer:8700")
    monkeypatch.setenv("BAPO_TOKEN", "\n")
    with pytest.raises(ConfigError, match="BAPO_TOKEN is not set") as caught:
        BufferClientSettings.load()
    check_message(str(caught.value))


@pytest.mark.parametrize(
    "url", ["bapo.example.com:8700", "buffer", "http://", "ftp://buffer", "http://buf\nfer:8700"]
)
def test_an_address_that_no_client_can_call_is_refused_by_name(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAPO_BUFFER_URL", url)
    monkeypatch.setenv("BAPO_TOKEN", TOKEN)
    with pytest.raises(ConfigError, match="BAPO_BUFFER_URL: ") as caught:
        BufferClientSettings.load()
    message = check_message(str(caught.value))
    assert "http://host:port" in message or "remove it" in message


@pytest.mark.parametrize(
    "endpoint",
    [
        "minio:9000",
        "s3://minio",
        "http://minio:9000/minio",
        "https://example.supabase.co/storage/v1/s3",
        "https://account.r2.example.com/bucket",
        "https://s3.example.com?region=eu",
    ],
)
def test_an_endpoint_that_is_no_host_is_refused_by_name(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (ENVIRONMENT | {"BAPO_S3_ENDPOINT": endpoint}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"BAPO_S3_ENDPOINT: .*http://host:port") as caught:
        BufferSettings.load()
    check_message(str(caught.value))


def test_a_collector_whose_secret_ends_with_a_newline_works(
    stack: Endpoints, tmp_path: Path
) -> None:
    """The collector reaches the service, which knows no such run; it took the newline for an
    outage of a minute, and logged the header."""
    variables = {
        **stack.process_environment(f"{stack.token}\n"),
        **stack.verifier_environment(),
        "BAPO_RUN": "no-such-run",
        "BAPO_SCRATCH": str(tmp_path),
    }
    printed = run("services.rollout.collector", **variables)
    assert printed.returncode == 1
    assert "no-such-run" in check_message(find_error(printed.stderr))
    assert stack.token not in printed.stderr


def test_redaction_knows_every_spelling_of_a_secret() -> None:
    register_secret('qu"te\\d-p/ss word')
    for spelling in ('qu"te\\d-p/ss word', 'qu\\"te\\\\d-p/ss word', "qu%22te%5Cd-p%2Fss%20word"):
        assert redact(f"before {spelling} after") == "before *** after"


def test_a_password_that_is_a_word_is_redacted_as_a_word() -> None:
    register_secret("postgresql://app:postgres@db/bapo")
    assert redact("postgresql+psycopg: password postgres") == "postgresql+psycopg: password ***"
