"""Takes from a worker process what grading needs not: files, network, other processes (Linux).

Responses are hostile, and so may be what a grader makes of them. A worker has the user of the
verifier, so the kernel would let it read that user's files and the memory of that user's other
processes. `confine` gives these rights up, for the process and all that it starts, for good:

- Landlock (Linux 5.13): it reads the system's libraries, Python and installed packages, and writes
  to no file; the environment and memory of processes outside are closed, and, from Linux 6.12 on,
  it can signal none of them.
- seccomp: it opens no socket, neither of the network nor of this machine (Postgres listens on one).
- It loses the capabilities of root but for reading installed packages.

The standard library alone is imported, because a worker starts in a tenth of a second.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import stat
import struct
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import all_suffixes
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38

SYSTEM_FILES = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store"),
    # Of /etc only what libraries read: other files there may hold secrets.
    *(f"/etc/{name}" for name in ("ld.so.cache", "localtime", "timezone", "os-release", "fonts")),
    *(f"/etc/{name}" for name in ("passwd", "group", "nsswitch.conf", "mime.types")),
    *("/etc/alternatives", "/etc/ssl/certs", "/etc/ssl/openssl.cnf"),
    # Landlock closes the environment and memory of other processes in /proc.
    *("/proc", "/sys/devices/system", "/sys/fs/cgroup"),
    *("/dev/zero", "/dev/random", "/dev/urandom"),
)
"""Files and directories of the operating system that graders may read."""

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = (1 << bit for bit in range(4))
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE
_ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Number of Landlock's rights to files by its version; 16 from version 5 on."""
_NO_TCP = 0b11
_NO_SIGNALS_NOR_ABSTRACT_SOCKETS = 0b11

_DENIED_CALLS = {
    "x86_64": {
        "socket": 41,
        "ptrace": 101,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "io_uring_setup": 425,  # It makes sockets, too.
        "pidfd_getfd": 438,
    },
    "aarch64": {
        "socket": 198,
        "ptrace": 117,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "io_uring_setup": 425,
        "pidfd_getfd": 438,
    },
}
"""Numbers of the system calls that fail with EACCES, by the machine."""
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_CALLS = 0x40000000
"""x86_64 has a second set of calls from this number on, which reach the same functions."""


def confine(extra: Iterable[str] = (), hidden: str | None = None) -> list[str]:
    """Confines this process, which must have one thread; returns what the kernel cannot do.

    extra: further files and directories that may be read.
    hidden: a directory that cannot be read, even if it is in a directory of the import path.
    """
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    gaps = []
    paths = [*SYSTEM_FILES, *extra]
    try:
        _restrict_files(paths, list(_packages(Path(hidden) if hidden else None)))
    except OSError as error:
        gaps.append(f"files, and memory of other processes ({_reason('Landlock', error)})")
    _drop_capabilities()
    try:
        _deny_calls()
    except OSError as error:
        gaps.append(f"the network and sockets of this machine ({_reason('seccomp', error)})")
    return gaps


def _reason(feature: str, error: OSError) -> str:
    return f"{feature}: {error.strerror}"


# ---- files --------------------------------------------------------------------------------------


def _packages(hidden: Path | None) -> Iterator[str]:
    """Yields the files and directories from which Python imports.

    A directory of the import path into which nothing was installed may be somebody's project or
    home. What its hidden files hold (`.bapo`, `.git`, `.env`, `.ssh`) is nothing to import.
    """
    yield from (sys.prefix, sys.base_prefix, sys.exec_prefix)
    yield from _editable_packages()
    for entry in {Path(path or ".").resolve() for path in sys.path}:
        holds_hidden = hidden is not None and hidden.is_relative_to(entry)
        if not holds_hidden and (not entry.is_dir() or any(entry.glob("*.dist-info"))):
            yield str(entry)
        else:
            yield from map(str, _visible_below(entry, hidden))


def _visible_below(directory: Path, hidden: Path | None) -> Iterator[Path]:
    """Yields the children of a directory without its hidden files and without `hidden`."""
    try:
        children = list(directory.iterdir())
    except OSError:  # Nor can Python import from it.
        return
    for child in children:
        if child.name.startswith(".") or child == hidden:
            continue
        if hidden is not None and hidden.is_relative_to(child):
            yield from _visible_below(child, hidden)
        else:
            yield child


def _editable_packages() -> Iterator[str]:
    """Yields packages and modules that `pip install --editable` maps without the import path."""
    for name, finder in list(sys.modules.items()):
        if name.startswith("__editable__"):
            for package in getattr(finder, "MAPPING", {}).values():
                yield from (package, *(package + suffix for suffix in all_suffixes()))


def _restrict_files(readable: Iterable[str], importable: Iterable[str]) -> None:
    """Leaves this process the right to read some files, and to write to /dev/null.

    Raises `OSError` where the kernel has no Landlock.
    """
    version = _call(444, None, 0, 1)
    every_right = (1 << _ACCESS_BITS.get(version, 16)) - 1
    attributes = [struct.pack("Q", every_right)]
    if version >= 4:
        attributes.append(struct.pack("Q", _NO_TCP))
    if version >= 6:
        attributes.append(struct.pack("Q", _NO_SIGNALS_NOR_ABSTRACT_SOCKETS))
    ruleset = b"".join(attributes)
    descriptor = _call(444, ruleset, len(ruleset), 0)
    try:
        for path in (*readable, *importable):
            _allow(descriptor, path, _EXECUTE | _READ_FILE | _READ_DIR)
        # Python lists the directories of its import path.
        for path in sys.path:
            _allow(descriptor, path or ".", _READ_DIR)
        _allow(descriptor, "/dev/null", _READ_FILE | _WRITE_FILE)
        _call(446, descriptor, 0)
    finally:
        os.close(descriptor)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allows a kind of access to a file, or to all below a directory, if it exists."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            rights &= _ON_FILES
        if rights:
            _call(445, ruleset, 1, struct.pack("=Qi", rights, opened), 0)
    finally:
        os.close(opened)


# ---- system calls and capabilities --------------------------------------------------------------


def _deny_calls() -> None:
    """Makes system calls that reach other processes or the network fail with EACCES.

    Raises `OSError` where the kernel has no seccomp, and on other machines than x86_64 and aarch64.
    """
    machine = platform.machine()
    if machine not in _DENIED_CALLS:
        raise OSError(errno.ENOSYS, f"not supported on {machine}")
    numbers = sorted(_DENIED_CALLS[machine].values())
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    deny, allow = 0x00050000 | errno.EACCES, 0x7FFF0000
    checks = len(numbers)
    program = [
        (load, 0, 0, 4),  # the machine of the call
        (equal, 1, 0, _AUDIT_ARCH[machine]),
        (answer, 0, 0, deny),
        (load, 0, 0, 0),  # its number
        (at_least, checks + 1, 0, _X32_CALLS),
        *((equal, checks - index, 0, number) for index, number in enumerate(numbers)),
        (answer, 0, 0, allow),
        (answer, 0, 0, deny),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code)
    filter_program = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    if _libc.prctl(_PR_SET_SECCOMP, 2, filter_program, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _drop_capabilities() -> None:
    """Drops root's capabilities but CAP_DAC_READ_SEARCH: the packages may be another user's."""
    header = struct.pack("Ii", 0x20080522, 0)
    present = ctypes.create_string_buffer(24)
    if _libc.capget(header, present):
        return
    effective, permitted, _, *_ = struct.unpack("6I", present.raw)
    kept = (1 << 2) & permitted
    _libc.capset(header, struct.pack("6I", kept & effective, kept, 0, 0, 0, 0))


def _call(number: int, *arguments: object) -> int:
    """Calls the kernel. Raises `OSError`."""
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
