"""The object store's keys come from the cloud, as with EKS Pod Identity, or cannot be had."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from pydantic import SecretStr

from services.common.objectstore import ObjectStore, ObjectStoreUnavailable, digest_of
from services.common.settings import ObjectStoreSettings
from services.stack.stack import Endpoints
from tests.outside.servers import check_message

TOKEN = "token-of-the-service-account"


@dataclass
class Metadata:
    """A server of credentials at the address that AWS's agent would have."""

    url: str
    answer: bytes = b""
    status: int = 200
    tokens: list[str] = field(default_factory=list)


@pytest.fixture
def metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    """Yields a server of credentials that the environment names, as it does in a pod of EKS."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            running.tokens.append(self.headers["Authorization"])
            self.send_response(running.status)
            self.send_header("Content-Length", str(len(running.answer)))
            self.end_headers()
            self.wfile.write(running.answer)

        def log_message(self, format: str, *arguments: object) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running = Metadata(f"http://127.0.0.1:{server.server_address[1]}/v1/credentials")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    token = tmp_path / "token"
    token.write_text(TOKEN)
    for name in ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", running.url)
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
    yield running
    server.shutdown()
    server.server_close()


def by_identity(settings: ObjectStoreSettings) -> ObjectStore:
    changed = {"credentials": "identity", "access_key": SecretStr(""), "secret_key": SecretStr("")}
    return ObjectStore(settings.model_copy(update=changed), retries=0)


def test_the_agent_of_eks_pod_identity_gives_the_keys(stack: Endpoints, metadata: Metadata) -> None:
    keys = {
        "AccessKeyId": stack.s3_access_key,
        "SecretAccessKey": stack.s3_secret_key,
        "Token": "",
        "Expiration": "2099-01-01T00:00:00Z",
    }
    metadata.answer = json.dumps(keys).encode()
    store = by_identity(stack.object_store)
    store.put("by-identity", b"stored")
    assert store.get("by-identity", digest_of(b"stored")) == b"stored"
    assert metadata.tokens == [TOKEN]


@pytest.mark.parametrize(
    ("status", "answer"), [(403, b"denied"), (200, b"<html>"), (200, b'{"Code": "Failed"}')]
)
def test_an_identity_that_is_refused_is_named_with_its_address(
    status: int, answer: bytes, stack: Endpoints, metadata: Metadata
) -> None:
    metadata.status, metadata.answer = status, answer
    with pytest.raises(ObjectStoreUnavailable, match="cloud identity cannot be read") as caught:
        by_identity(stack.object_store).check()
    assert metadata.url in check_message(str(caught.value))


def test_an_address_that_does_not_answer_is_named(
    stack: Endpoints, metadata: Metadata, reserved_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{reserved_port}/v1/credentials"
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", url)
    with pytest.raises(
        ObjectStoreUnavailable, match=f"{url}.*a network policy lets pods reach it"
    ) as caught:
        by_identity(stack.object_store).check()
    check_message(str(caught.value))


def test_the_service_of_tokens_is_reached_through_the_proxy_of_the_environment(
    stack: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is outside of the cluster, unlike the agent and the metadata of the machine."""
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            asked.append(self.path)
            self.send_error(403)

        def log_message(self, format: str, *arguments: object) -> None:
            """Prints nothing."""

    token = tmp_path / "token"
    token.write_text(TOKEN)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/bapo")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    for name in ("no_proxy", "NO_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.server_address[1]}")
        with pytest.raises(
            ObjectStoreUnavailable, match=r"https://sts\.eu-west-1\.amazonaws\.com"
        ) as caught:
            by_identity(stack.object_store).check()
        check_message(str(caught.value))
        server.shutdown()
    assert set(asked) == {"sts.eu-west-1.amazonaws.com:443"}
