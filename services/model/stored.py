"""Stores and fetches initial models in the object store, for processes that share no disk.

Such a model is named `store://models/<content>#<manifest digest>`, which stands in a run's
configuration as its `model.path`: every process that has the configuration can fetch the model and
verify it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory

from bapo_core.errors import BapoError
from services.common import layout
from services.common.errors import first_line
from services.common.layout import MODEL_SCHEME
from services.common.objectstore import TRANSFERS, ObjectStore, ObjectStoreError, files_of

HUB = "hf://"
"""Scheme of the addresses of models and data sets of the Hugging Face hub."""
WEIGHTS = ".safetensors"
COMMIT = re.compile("[0-9a-f]{40}")
"""The name of a commit of the hub."""
_FETCHED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Files of a model that are fetched from the hub or a bucket. No pickles: loading one runs its
code."""


def store_model(store: ObjectStore, directory: Path) -> str:
    """Stores a model directory and returns its `store://` name, which follows from its content.

    Raises `BapoError` when a file changes meanwhile.
    """
    files = files_of(directory)
    digests = {}
    for name in sorted(files):
        with (directory / name).open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    content = hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]
    prefix = layout.model(content)
    if not store.keys(f"{prefix}/manifest.json"):
        stored = store.put_contents(prefix, files)
        if stored != digests:
            raise BapoError(f"{directory} changed while it was stored; try again")
    return f"{MODEL_SCHEME}{prefix}#{store.put_manifest(prefix, digests)}"


def fetch_model(path: str, store: ObjectStore, directory: Path, *, weights: bool = True) -> Path:
    """Fetches a stored model into `directory`, which is returned.

    path: `store://models/<content>#<manifest digest>`.
    weights: False fetches the configuration and the tokenizer only.

    Raises `BapoError` when `path` has no digest, and `ObjectStoreError` when the content differs
    from it or cannot be read.
    """
    prefix, _, digest = path.removeprefix(MODEL_SCHEME).partition("#")
    if not digest:
        raise BapoError(f"model.path {path!r}: expected store://models/<content>#<digest>")
    store.get_directory(
        prefix, digest, directory, include=lambda name: weights or not name.endswith(WEIGHTS)
    )
    return directory


def model_on_disk(path: str, override: Path | None = None) -> Path | None:
    """Returns the directory of a run's initial model on this machine.

    path: the run's `model.path`.
    override: the directory on this machine, where it differs (`BAPO_MODEL`).

    Returns None for a model in the object store, which must be fetched.
    """
    if override is not None:
        return override
    return None if path.startswith(MODEL_SCHEME) else Path(path)


def fetch_from_hub(path: str, directory: Path) -> Path:
    """Fetches a model of the Hugging Face hub into `directory`, which is returned.

    path: `hf://organisation/name`, or `hf://organisation/name@revision`.

    Raises `BapoError` when the hub does not have it or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    name, _, revision = path.removeprefix(HUB).partition("@")
    with _explain_hub_errors(path):
        fetched = snapshot_download(
            name, revision=revision or None, local_dir=directory, allow_patterns=_FETCHED
        )
    return Path(fetched)


def pin_hub_model(path: str) -> str:
    """Returns the `hf://organisation/name@commit` that a path to the hub leads to at present.

    Raises `BapoError` when the hub does not have it or cannot be reached.
    """
    from huggingface_hub import HfApi

    name, _, revision = path.removeprefix(HUB).partition("@")
    if COMMIT.fullmatch(revision):
        return path
    with _explain_hub_errors(path):
        commit = HfApi().model_info(name, revision=revision or None).sha
    return f"{HUB}{name}@{commit}"


@contextmanager
def _explain_hub_errors(path: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

    kinds = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, httpx.HTTPError)
    try:
        yield
    except kinds as error:
        raise BapoError(
            f"model.path {path}: {first_line(error)}; check the name, the network, and HF_TOKEN "
            "for a model behind a licence, or download it yourself and set model.path to its "
            "directory"
        ) from error


def fetch_from_bucket(address: str, store: ObjectStore, directory: Path, content: str = "") -> Path:
    """Fetches a model from a bucket, and returns its directory, `directory`/<content>.

    address: `s3://bucket/prefix` of the objects of a Hugging Face directory, in any bucket that the
        credentials of `store` open.

    content: digest of the ETags that the model must have; empty for any.

    A model that was fetched before is not fetched again unless one of its objects has changed.
    Raises `BapoError` when there is no model, when it has other content, or when it changes while
    it is fetched.
    """
    bucket, prefix = store.locate(address)
    prefix = prefix.rstrip("/") + "/"
    etags = _model_files(bucket, prefix)
    if "config.json" not in etags:
        raise BapoError(
            f"model.path {address}: object store {store.settings.endpoint} has no model there (no "
            "config.json); give s3://bucket/prefix of a Hugging Face directory"
        )
    state = json.dumps([bucket.settings.bucket, prefix, sorted(etags.items())])
    found = hashlib.sha256(state.encode()).hexdigest()[:16]
    if content not in ("", found):
        raise BapoError(
            f"model.path {address}: the model has changed since the run began (its content was "
            f"{content}, and is {found} now); restore its objects, or start another run"
        )
    fetched = directory / found
    if fetched.exists():
        return fetched
    directory.mkdir(parents=True, exist_ok=True)
    # Another process may fetch the same model at the same time, into a directory of its own.
    with TemporaryDirectory(dir=directory, ignore_cleanup_errors=True) as temporary:
        partial = Path(temporary) / "model"
        partial.mkdir()
        with ThreadPoolExecutor(TRANSFERS) as pool:
            keys = [prefix + name for name in etags]
            list(pool.map(bucket.download, keys, [partial / name for name in etags]))
        if _model_files(bucket, prefix) != etags:
            raise BapoError(f"model.path {address}: the model changed while it was fetched")
        try:
            partial.rename(fetched)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    return fetched


def _model_files(bucket: ObjectStore, prefix: str) -> dict[str, str]:
    """Returns the ETags of the files of a model by name; none if there is no such bucket."""
    try:
        listing = bucket.listing(prefix)
    except ObjectStoreError as error:
        if getattr(error.__cause__, "code", "") != "NoSuchBucket":
            raise
        return {}
    etags = {item.key.removeprefix(prefix): item.etag for item in listing}
    return {
        name: etag
        for name, etag in etags.items()
        if "/" not in name and any(fnmatch(name, pattern) for pattern in _FETCHED)
    }
