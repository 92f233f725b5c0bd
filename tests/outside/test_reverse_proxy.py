"""nginx in front of the buffer service, with TLS and a path: pages, routes and commands work.

A proxy either leaves the path in requests, as an Ingress of Kubernetes does, or removes it, as
ingress-nginx's `rewrite-target` does, with which the page may have an address without a slash.
"""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.common.process import ChildProcess
from services.stack.stack import Endpoints
from services.stack.supervisor import reserve_ports
from tests.integration.support.driver import Driver, small_config
from tests.outside.servers import BufferService, await_true, buffer_service, check_message

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PREFIX = "/team/bapo"
RUN = "behind-a-proxy"
LOCATIONS = {
    "kept": f"location {PREFIX} {{ proxy_pass {{upstream}}; }}",
    # As ingress-nginx writes its rule for `path: /team/bapo(/|$)(.*)` and `rewrite-target: /$2`.
    "removed": f'location ~* "^{PREFIX}(/|$)(.*)" '
    f'{{ rewrite "(?i){PREFIX}(/|$)(.*)" /$2 break; proxy_pass {{upstream}}; }}',
}
pytestmark = pytest.mark.outside


@dataclass(frozen=True)
class Proxy:
    """nginx in front of a buffer service."""

    url: str
    """Address of the service behind the proxy, without a slash at its end."""
    certificate: Path
    service: BufferService

    def get(self, path: str) -> httpx.Response:
        """Sends one request with the administrator's token, following no redirect."""
        context = ssl.create_default_context(cafile=self.certificate)
        headers = {"Authorization": f"Bearer {self.service.endpoints.token}"}
        with httpx.Client(verify=context, trust_env=False, headers=headers) as client:
            return client.get(f"{self.url}{path}")


def write_certificate(directory: Path) -> tuple[Path, Path]:
    """Writes a self-signed certificate for 127.0.0.1. Returns its file and the file of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bapo")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = directory / "certificate.pem", directory / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


@contextmanager
def nginx(service: BufferService, location: str, directory: Path) -> Iterator[Proxy]:
    """Runs nginx with TLS and one location in front of the service."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin")
    if program is None:
        pytest.skip("needs nginx: apt-get install nginx")
    directory.mkdir()
    certificate, key = write_certificate(directory)
    with reserve_ports(1) as (port,):
        config = directory / "nginx.conf"
        user = "user root;" if os.geteuid() == 0 else ""
        paths = " ".join(
            f"{kind}_temp_path {directory}/{kind};"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        config.write_text(
            f"{user} daemon off; master_process off; pid {directory}/pid; error_log stderr;\n"
            f"events {{}}\nhttp {{ access_log off; {paths}\n"
            f"server {{ listen 127.0.0.1:{port} ssl;\n"
            f"ssl_certificate {certificate}; ssl_certificate_key {key};\n"
            "proxy_set_header Host $http_host; proxy_set_header X-Forwarded-Proto $scheme;\n"
            f"{location.replace('{upstream}', service.url)} }} }}\n"
        )
        # Its compiled-in log is open to root alone.
        command = [program, "-e", "stderr", "-c", str(config)]
        process = ChildProcess(command, log=directory / "log")
        proxy = Proxy(f"https://127.0.0.1:{port}{PREFIX}", certificate, service)

        def answers() -> bool:
            assert process.exit_code is None, process.last_error()
            with suppress(httpx.TransportError):
                return proxy.get("/health").is_success
            return False

        try:
            await_true(answers, "nginx starts")
            yield proxy
        finally:
            process.stop()


@pytest.fixture(
    scope="module",
    params=[("kept", True), ("removed", True), ("removed", False)],
    ids=["path kept", "path removed", "path removed, service not told"],
)
def proxy(
    request: pytest.FixtureRequest, stack: Endpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    """Yields a proxy in front of a service that has one run, and knows the path or does not."""
    location, told = request.param
    directory = tmp_path_factory.mktemp("proxy")
    variables = {"BAPO_ROOT_PATH": PREFIX} if told else {}
    with buffer_service(stack, directory, variables=variables) as service:
        if not any(run.name == RUN for run in service.client().runs()):
            Driver(service.endpoints, small_config(RUN))
        with nginx(service, LOCATIONS[location], directory / "nginx") as server:
            yield server


def test_no_answer_leads_away_from_the_proxy(proxy: Proxy) -> None:
    """A redirect to `http://` lost the path and, in some clients, the token."""
    for path in ("/v1/runs/", "/dashboard", "/docs/", "/openapi.json/"):
        answer = proxy.get(path)
        assert (answer.status_code, "location" in answer.headers) == (404, False)
        assert check_message(answer.json()["detail"]).startswith("there is no ")
    assert "none but / ends with a slash" in proxy.get("/v1/runs/").json()["detail"]


def test_routes_are_called_below_the_path(proxy: Proxy) -> None:
    assert RUN in [run["name"] for run in proxy.get("/v1/runs").json()["items"]]
    document = proxy.get("/openapi.json").json()
    told = proxy.get("/").text.find(f'"{PREFIX}/dashboard/app.js"') != -1
    assert document.get("servers") == ([{"url": PREFIX}] if told else None)


def test_commands_are_given_the_address_with_the_path(proxy: Proxy, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"problem": "1+1", "answer": "2"}\n')
    upload = ("dataset", "upload", str(rows), "--task", "math", "--name", "proxied")
    for arguments, expected in ((("runs",), RUN), (upload, "proxied")):
        done = subprocess.run(
            [sys.executable, "-m", "services.cli", *arguments],
            env={
                **os.environ,
                "BAPO_BUFFER_URL": proxy.url,
                "BAPO_TOKEN": proxy.service.endpoints.token,
                "SSL_CERT_FILE": str(proxy.certificate),
            },
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout + done.stderr


@pytest.mark.parametrize("end", ["", "/"])
def test_the_pages_work_below_the_path(proxy: Proxy, browser: Browser, end: str) -> None:
    from playwright.sync_api import expect

    context = browser.new_context(ignore_https_errors=True)
    try:
        page = context.new_page()
        page.goto(f"{proxy.url}{end}#token={proxy.service.endpoints.token}&/runs")
        if not end and proxy.get("/").text.count(PREFIX) == 0:
            # Neither the browser nor the service can know the path.
            expect(page.get_by_text("End the address with a slash")).to_be_visible()
        else:
            expect(page.get_by_text("End the address with a slash")).not_to_be_visible()
            expect(page.get_by_role("link", name=RUN)).to_be_visible()
            page.get_by_role("link", name=RUN).click()
            expect(page.get_by_role("heading", name=RUN)).to_be_visible()
        page.goto(f"{proxy.url}/docs")
        expect(page.locator("summary", has_text="GET /v1/runs").first).to_be_visible()
    finally:
        context.close()
