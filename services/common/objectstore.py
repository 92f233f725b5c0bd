"""The object store: bytes and directories, always with their SHA-256.

A directory is written shards first, then `manifest.json` with the digest of every file; the
digest of the manifest names the whole. Readers check every digest.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.deleteobjects import DeleteObject
from minio.error import MinioException, S3Error

from bapo_core.errors import BapoError, TransientError
from services.common.settings import ObjectStoreSettings

Result = TypeVar("Result")

MANIFEST = "manifest.json"
LARGEST_PART = 256 << 20
FILE_PART = 64 << 20
"""Files are sent in parts of this size, so that no more of them is in memory."""
RETRIES = 10
"""With their pauses 45 seconds: a server that is moved to another machine is back by then."""
REPEATS = 2
"""Of a transfer whose connection broke in the middle, where repeating a request is not enough."""
TRANSFERS = 4
"""Files of a directory under way at a time."""


class ObjectStoreError(BapoError):
    """The object store refused, failed, or returned other bytes than were stored."""


class BinarySource(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Content(Protocol):
    """Bytes to store; they may be read more than once."""

    @property
    def size(self) -> int: ...

    def open(self) -> AbstractContextManager[BinarySource]: ...


@dataclass(frozen=True, slots=True)
class FileContent:
    path: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def open(self) -> AbstractContextManager[BinarySource]:
        return self.path.open("rb")


@dataclass(frozen=True, slots=True)
class BytesContent:
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def open(self) -> AbstractContextManager[BinarySource]:
        return io.BytesIO(self.data)


@dataclass(frozen=True, slots=True)
class StoredObject:
    key: str
    modified: datetime


class ObjectStoreUnavailable(ObjectStoreError, TransientError):
    """The object store does not answer; the same call may succeed when it is back."""


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _damaged(where: str, digest: str) -> ObjectStoreError:
    return ObjectStoreError(
        f"{where}: the stored bytes do not have the digest {digest[:12]}... that was recorded; the "
        "object was damaged or replaced"
    )


class CheckedStream(io.RawIOBase):
    """Bytes on their way, hashed as they pass."""

    def __init__(self, source: BinarySource, where: str, digest: str) -> None:
        self._source, self._where, self._digest = source, where, digest
        self._hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        self._hash.update(data)
        buffer[: len(data)] = data
        return len(data)

    def check(self) -> None:
        """Reads what is left; `ObjectStoreError` unless all the bytes have the digest."""
        while self.read(1 << 20):
            continue
        if self._hash.hexdigest() != self._digest:
            raise _damaged(self._where, self._digest)


class ObjectStore:
    """One bucket of an S3 server."""

    def __init__(self, settings: ObjectStoreSettings, *, retries: int = RETRIES) -> None:
        """`retries` of what may pass by itself: a server that is busy or restarting."""
        self.settings = settings
        self._repeats = min(REPEATS, retries)
        url = urlsplit(settings.endpoint)
        self._client = Minio(
            endpoint=url.netloc,
            access_key=settings.access_key.get_secret_value(),
            secret_key=settings.secret_key.get_secret_value(),
            secure=url.scheme == "https",
            region="us-east-1",
            http_client=urllib3.PoolManager(
                timeout=urllib3.Timeout(connect=5, read=60),
                retries=urllib3.Retry(
                    total=retries, backoff_factor=0.2, backoff_max=8, status_forcelist=[500, 503]
                ),
                maxsize=16,
            ),
        )

    def _failed(self, doing: str, key: str, error: Exception) -> ObjectStoreError:
        code = getattr(error, "code", None) or type(error).__name__
        # A server that answers 500 however often has a reason, a full disk for example.
        refused = isinstance(error, MinioException) or isinstance(
            getattr(error, "reason", None), urllib3.exceptions.ResponseError
        )
        return (ObjectStoreError if refused else ObjectStoreUnavailable)(
            f"object store {self.settings.endpoint}: cannot {doing} "
            f"{self.settings.bucket}/{key}: {code}; check that it runs, has space, and accepts "
            "the credentials"
        )

    def _repeated(self, transfer: Callable[[], Result]) -> Result:
        for _ in range(self._repeats):
            try:
                return transfer()
            except ObjectStoreUnavailable as error:
                if isinstance(error.__cause__, urllib3.exceptions.MaxRetryError):
                    raise  # it has waited long enough
        return transfer()

    def check(self) -> None:
        """`ObjectStoreError` unless the bucket can be reached now."""
        try:
            found = self._client.bucket_exists(bucket_name=self.settings.bucket)
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failed("reach", "", error) from error
        if not found:
            raise ObjectStoreError(
                f"object store {self.settings.endpoint}: there is no bucket {self.settings.bucket}"
            )

    def ensure_bucket(self) -> None:
        try:
            if not self._client.bucket_exists(bucket_name=self.settings.bucket):
                self._client.make_bucket(bucket_name=self.settings.bucket)
        except S3Error as error:
            if error.code != "BucketAlreadyOwnedByYou":
                raise self._failed("create", "", error) from error
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failed("create", "", error) from error

    def put(self, key: str, data: bytes) -> None:
        """Stores `data`."""
        try:
            self._client.put_object(
                bucket_name=self.settings.bucket,
                object_name=key,
                data=io.BytesIO(data),
                length=len(data),
                # One request up to this size; several make it half as fast.
                part_size=LARGEST_PART,
            )
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failed("write", key, error) from error

    def get(self, key: str, digest: str) -> bytes:
        """The bytes of `key`; an error unless their digest is `digest`."""
        data = self._repeated(lambda: self._get(key))
        if digest_of(data) != digest:
            raise _damaged(f"{self.settings.bucket}/{key}", digest)
        return data

    def _get(self, key: str) -> bytes:
        try:
            response = self._client.get_object(bucket_name=self.settings.bucket, object_name=key)
            try:
                return bytes(response.read())
            finally:
                response.close()
                response.release_conn()
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failed("read", key, error) from error

    @contextmanager
    def stream(self, key: str, digest: str) -> Iterator[CheckedStream]:
        """A file of the bytes of `key`, read as they come; its `check` says if they were right."""
        try:
            response = self._client.get_object(bucket_name=self.settings.bucket, object_name=key)
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failed("read", key, error) from error
        try:
            yield CheckedStream(response, f"{self.settings.bucket}/{key}", digest)
        finally:
            response.close()
            response.release_conn()

    def keys(self, prefix: str) -> list[str]:
        return [item.key for item in self.listing(prefix)]

    def listing(self, prefix: str) -> list[StoredObject]:
        """Every object whose key begins with `prefix`."""
        try:
            found = self._client.list_objects(
                bucket_name=self.settings.bucket, prefix=prefix, recursive=True
            )
            return [
                StoredObject(str(item.object_name), item.last_modified)
                for item in found
                if not item.is_dir
            ]
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failed("list", prefix, error) from error

    def delete(self, keys: Iterable[str]) -> None:
        doomed = [DeleteObject(key) for key in keys]
        try:
            errors = list(
                self._client.remove_objects(
                    bucket_name=self.settings.bucket, delete_object_list=doomed
                )
            )
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failed("delete", "...", error) from error
        if errors:
            raise ObjectStoreError(f"object store: cannot delete {errors[0].name}: {errors[0]}")

    def put_content(self, key: str, content: Content) -> str:
        """Stores what is read from `content` as it is sent; returns the digest of it."""
        return self._repeated(lambda: self._put_content(key, content))

    def _put_content(self, key: str, content: Content) -> str:
        with content.open() as opened:
            source = _Hashing(opened)
            try:
                self._client.put_object(
                    bucket_name=self.settings.bucket,
                    object_name=key,
                    data=source,  # type: ignore[arg-type]
                    length=content.size,
                    part_size=FILE_PART,
                )
            except (MinioException, urllib3.exceptions.HTTPError) as error:
                raise self._failed("write", key, error) from error
        return source.hash.hexdigest()

    def get_file(self, key: str, digest: str, target: Path) -> None:
        """Fetches `key` into `target`, which then is whole and has the digest.

        A target that is right already is left alone. What an interrupted fetch has left beside it
        is continued, not fetched again.
        """
        self._repeated(lambda: self._get_file(key, digest, target))

    def _get_file(self, key: str, digest: str, target: Path) -> None:
        if target.exists():
            if _file_digest(target) == digest:
                return
            target.unlink()
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".part")
        with partial.open("a+b") as file:
            file.seek(0)
            hashed = hashlib.file_digest(file, "sha256")
            try:
                self._append(key, file, hashed)
            except (MinioException, urllib3.exceptions.HTTPError) as error:
                raise self._failed("read", key, error) from error
        if hashed.hexdigest() != digest:
            partial.unlink()
            raise _damaged(f"{self.settings.bucket}/{key}", digest)
        partial.rename(target)

    def _append(self, key: str, file: BinaryIO, hashed: hashlib._Hash) -> None:
        """The bytes of `key` that `file` does not have yet."""
        offset = file.tell()
        if offset and offset >= (self._size(key) or 0):
            return  # all there; or too much, which the digest tells
        response = self._client.get_object(
            bucket_name=self.settings.bucket, object_name=key, offset=offset
        )
        try:
            for data in response.stream(1 << 20):
                file.write(data)
                hashed.update(data)
        finally:
            response.close()
            response.release_conn()

    def _size(self, key: str) -> int | None:
        return self._client.stat_object(bucket_name=self.settings.bucket, object_name=key).size

    def put_directory(self, prefix: str, directory: Path) -> str:
        """Stores every file of `directory` under `prefix`, manifest last; returns its digest."""
        return self.put_files(prefix, files_of(directory))

    def put_files(self, prefix: str, files: Mapping[str, Content]) -> str:
        """Stores a directory of these files (name → content); returns its manifest's digest."""
        return self.put_manifest(prefix, self.put_contents(prefix, files))

    def put_contents(self, prefix: str, files: Mapping[str, Content]) -> dict[str, str]:
        """Stores files that a manifest is to name; returns their digests."""
        names = sorted(files)
        with ThreadPoolExecutor(TRANSFERS) as pool:
            keys = [f"{prefix}/{name}" for name in names]
            digests = pool.map(self.put_content, keys, [files[name] for name in names])
            return dict(zip(names, digests, strict=True))

    def put_manifest(self, prefix: str, listing: Mapping[str, str]) -> str:
        """Makes a directory of files that are there (name → digest); returns its own digest."""
        manifest = json.dumps({"files": listing}, sort_keys=True).encode()
        self.put(f"{prefix}/{MANIFEST}", manifest)
        return digest_of(manifest)

    def get_directory(
        self,
        prefix: str,
        digest: str,
        directory: Path,
        *,
        wanted: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Fetches what `put_files` stored into `directory`, or those of its names that are
        `wanted`, checking every digest."""
        directory.mkdir(parents=True, exist_ok=True)
        files = json.loads(self.get(f"{prefix}/{MANIFEST}", digest))["files"]
        with ThreadPoolExecutor(TRANSFERS) as pool:
            fetched = [
                pool.submit(self.get_file, f"{prefix}/{name}", file_digest, directory / name)
                for name, file_digest in files.items()
                if wanted(name)
            ]
            for each in fetched:
                each.result()


def files_of(directory: Path) -> dict[str, Content]:
    """Every file below `directory`, by its path there."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): FileContent(path) for path in paths}


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Hashing:
    """Bytes that are hashed as they are read."""

    def __init__(self, source: BinarySource) -> None:
        self._source = source
        self.hash = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self.hash.update(data)
        return data
