"""A stand-in of the Hugging Face hub: the routes with which clients read data sets and models."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Repository:
    """A data set or a model: its branches, and the files of each commit."""

    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    """The token without which it is gated."""

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Adds a commit to a branch; returns its name of 40 hexadecimal digits."""
        name = hashlib.sha1(repr([len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[name] = files
        self.branches[branch] = name
        return name


@dataclass
class Hub:
    """The repositories by name, and the requests of their clients."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Method, path and range of each request."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Yields a hub that answers at its `url`."""
    hub = Hub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Hub

    def log_message(self, *arguments: Any) -> None:
        """Writes no log."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        requested = f"{self.command} {self.path} {self.headers.get('Range', '')}"
        self.served.requests.append(requested.strip())
        url = urlsplit(self.path)
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        is_api = parts[0] == "api"
        rest = parts[is_api:]
        if rest[0] in ("datasets", "models"):  # Files of models have no prefix.
            rest = rest[1:]
        repository = self.served.repositories.get("/".join(rest[:2]))
        if repository is None:
            self._refuse(404, "RepoNotFound", "Repository not found")
            return
        action, revision, *path = [*rest[2:], "revision", "main"][: max(2, len(rest) - 2)]
        is_open = repository.token is None or action == "revision"
        if not is_open and self.headers.get("Authorization") != f"Bearer {repository.token}":
            self._refuse(403, "GatedRepo", "Access to this data set is restricted")
            return
        commit = repository.branches.get(revision, revision)
        files = repository.commits.get(commit)
        if files is None:
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
        elif action == "resolve":
            self._send_file(files.get("/".join(path)), commit)
        elif action == "tree":
            self._send_tree(files, "/".join(path), "recursive=true" in url.query.lower())
        elif action == "paths-info":
            names = parse_qs(body.decode()).get("paths", [])
            self._send_json([_entry(name, files[name]) for name in names if name in files])
        else:
            gated = "auto" if repository.token else False
            siblings = [{"rfilename": name} for name in files]
            self._send_json(
                {"id": "/".join(rest[:2]), "sha": commit, "gated": gated, "siblings": siblings}
            )

    do_HEAD = do_POST = do_GET

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message}
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send_file(self, data: bytes | None, commit: str) -> None:
        if data is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        wanted = self.headers.get("Range")
        if wanted is None:
            self._send(200, data, headers)
            return
        first, last = wanted.removeprefix("bytes=").split("-")
        part = data[int(first) : int(last) + 1 if last else None]
        end = int(first) + len(part) - 1
        self._send(206, part, {**headers, "Content-Range": f"bytes {first}-{end}/{len(data)}"})

    def _send_tree(self, files: dict[str, bytes], folder: str, recursive: bool) -> None:
        prefix = f"{folder}/" if folder else ""
        below = {name: data for name, data in files.items() if name.startswith(prefix)}
        if folder and not below:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        entries = {}
        for name, data in below.items():
            first, *deeper = name.removeprefix(prefix).split("/")
            is_file = recursive or not deeper
            path = name if is_file else prefix + first
            entries[path] = _entry(path, data if is_file else None)
        self._send_json(list(entries.values()))


def _entry(path: str, data: bytes | None) -> dict[str, Any]:
    """Returns the entry of a file in a listing, or of a directory if it has no data."""
    digest = hashlib.sha1(data or b"").hexdigest()
    kind = "directory" if data is None else "file"
    return {"type": kind, "oid": digest, "size": len(data or b""), "path": path}
