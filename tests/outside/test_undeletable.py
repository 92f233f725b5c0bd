"""Object stores that delete one object at a time, or nothing: runs go on, and the log says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from services.common import layout
from services.common.errors import ServiceError
from services.common.objectstore import PROBES, ObjectStore, ObjectStoreError
from services.common.settings import ObjectStoreSettings
from services.stack.stack import Endpoints
from tests.integration.support.driver import Driver, small_config
from tests.outside.servers import await_true, buffer_service, check_message

ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>no</Message></Error>'


@contextmanager
def limited(
    upstream: ObjectStoreSettings, refused: dict[str, str]
) -> Iterator[ObjectStoreSettings]:
    """Yields a real object store that refuses some requests.

    refused: code of the error by kind of request, `batch` or `single`.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            kind = "batch" if "?delete" in self.path else "single"
            deletes = self.command == "DELETE" or kind == "batch"
            if deletes and kind in refused:
                status = 403 if refused[kind] == "AccessDenied" else 501
                body = ERROR.format(code=refused[kind]).encode()
                self.answer(status, {"content-type": "application/xml"}, body)
                return
            with httpx.Client(trust_env=False, timeout=60) as client:
                # The signature covers the name of the host that the client has called.
                answer = client.request(
                    self.command,
                    upstream.endpoint + self.path,
                    headers=list(self.headers.items()),
                    content=body,
                )
            self.answer(answer.status_code, dict(answer.headers), answer.content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response(status)
            hop = ("transfer-encoding", "connection", "date", "server")
            headers = {name: value for name, value in headers.items() if name not in hop}
            if self.command != "HEAD":
                headers["content-length"] = str(len(body))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Prints nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        yield upstream.model_copy(update={"endpoint": endpoint})
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


DENIED = {"batch": "AccessDenied", "single": "AccessDenied"}


@pytest.mark.parametrize("code", ["NotImplemented", "MethodNotAllowed", "InvalidArgument"])
def test_objects_are_deleted_one_by_one_where_there_is_no_request_for_several(
    stack: Endpoints, code: str
) -> None:
    with limited(stack.object_store, {"batch": code}) as settings:
        store = ObjectStore(settings, retries=0)
        for number in range(3):
            store.put(f"singly/{number}", b"x")
        store.delete(store.keys("singly/"))
        assert store.keys("singly/") == []
        store.try_operations()


def test_keys_that_may_not_delete_are_told_so(stack: Endpoints) -> None:
    with limited(stack.object_store, DENIED) as settings:
        store = ObjectStore(settings, retries=0)
        with pytest.raises(
            ObjectStoreError, match=r"the keys may not delete .*s3:DeleteObject"
        ) as caught:
            store.try_operations()
        check_message(str(caught.value))
    open_store = ObjectStore(stack.object_store)
    open_store.delete(open_store.keys(f"{PROBES}/"))


def test_a_run_goes_on_where_nothing_can_be_deleted(stack: Endpoints, tmp_path: Path) -> None:
    """The third checkpoint makes the first one superfluous."""
    with (
        limited(stack.object_store, DENIED) as settings,
        buffer_service(stack, tmp_path, object_store=settings) as service,
    ):
        await_true(
            lambda: "the keys may not delete" in service.log.read_text(),
            "the service warns when it starts",
        )
        driver = Driver(service.endpoints, small_config("undeletable"))
        store = ObjectStore(stack.object_store)
        kept = []
        for step in (2, 4, 6, 8):
            driver.run_step(step - 1)
            driver.run_step(step)
            prefix = layout.checkpoint("undeletable", step, attempt=1)
            digest = store.put_manifest(prefix, {})
            driver.client.record_checkpoint(step, digest)
            kept.append(prefix)
        checkpoints = {view.step for view in driver.client.checkpoints()}
        assert 2 not in checkpoints
        await_true(
            lambda: "is no longer needed and cannot be deleted" in service.log.read_text(),
            "the service says what is left",
        )
        left = [key for key in driver.client.collect_garbage().orphans if kept[0] in key]
        assert left


def test_a_deletion_that_was_refused_is_completed_once_the_keys_may_delete(
    stack: Endpoints, tmp_path: Path
) -> None:
    refused = dict(DENIED)
    with (
        limited(stack.object_store, refused) as settings,
        buffer_service(stack, tmp_path, object_store=settings) as service,
    ):
        driver = Driver(service.endpoints, small_config("refused-deletion"))
        driver.run_step(1)
        driver.client.stop()
        with pytest.raises(
            ServiceError, match=r"may not delete .* give them s3:DeleteObject; then"
        ) as caught:
            driver.client.delete_run()
        check_message(str(caught.value))
        assert driver.client.run_state().status == "deleting"
        store = ObjectStore(stack.object_store)
        assert store.keys("runs/refused-deletion/")
        refused.clear()
        driver.client.delete_run()
        assert store.keys("runs/refused-deletion/") == []
        with pytest.raises(ServiceError, match="there is no run"):
            driver.client.run_state()
