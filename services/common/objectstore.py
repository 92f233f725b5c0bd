"""Client of the object store: stores bytes and directories, and checks their SHA-256 on reading.

A directory is written files first, then `manifest.json` with the digest of every file, so that
the digest of the manifest identifies the whole directory. Readers check every digest, and that no
file of the manifest would lie outside the directory: whoever can write to the bucket can write a
manifest, and a digest says nothing about who made it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import urlsplit

import urllib3
from minio import Minio
from minio.credentials.credentials import Credentials
from minio.credentials.providers import IamAwsProvider, Provider, StaticProvider
from minio.deleteobjects import DeleteError, DeleteObject
from minio.error import MinioException, S3Error
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from bapo_core.errors import BapoError, ConfigError, TransientError
from services.common.files import open_exclusively
from services.common.http_options import check_certificates
from services.common.proxies import proxy_for
from services.common.redaction import redact
from services.common.settings import ObjectStoreSettings

Result = TypeVar("Result")
log = logging.getLogger(__name__)

S3_SCHEME = "s3://"
"""Scheme of the address of an object, `s3://bucket/key`."""
PROBES = "probes"
"""Prefix of the objects of `ObjectStore.try_operations`."""
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 16 << 20
"""Bytes of a manifest, which has at most some 320 for each file."""
_DIGEST = re.compile("[0-9a-f]{64}")
LONGEST_NAME = 250
"""Bytes of one part of a file's name. A partial file has five more, and a file system 255."""
LARGEST_PART = 256 << 20
"""Bytes up to which an object is sent in one request; several requests halve the throughput."""
FILE_PART = 64 << 20
"""Bytes of one part of a file, which bounds what is held in memory."""
RETRIES = 10
"""Retries of a request. With their pauses they take 45 seconds, within which a server that moves to
another machine answers again."""
CONNECT_WITHIN_S = 5.0
"""Seconds within which a connection must be made."""
ANSWER_WITHIN_S = 60.0
"""Seconds that the server may take to read or to send more bytes. A server that waits for its disk
reads nothing for many seconds."""
IDENTITY_RETRIES = 2
"""Retries of a request for a cloud identity; the request that needs it is repeated as well."""
REPEATS = 2
"""Repetitions of a transfer whose connection breaks in mid-body, which retries do not cover."""
BATCH_DELETE_MISSING = ("NotImplemented", "MethodNotAllowed", "InvalidArgument")
"""Errors of servers that cannot delete several objects with one request, as Google's cannot."""
TRANSFERS = 4
"""Objects that are transferred at the same time, such as the files of a directory."""


class ObjectStoreError(BapoError):
    """The object store refused, failed, or returned other bytes than were stored."""


class BinarySource(Protocol):
    """A source of bytes, such as an open file."""

    def read(self, size: int, /) -> bytes: ...


class Content(Protocol):
    """Bytes to store. `open` may be called several times, because a transfer may be repeated."""

    @property
    def size(self) -> int: ...

    def open(self) -> AbstractContextManager[BinarySource]: ...


@dataclass(frozen=True, slots=True)
class FileContent:
    """The bytes of a file."""

    path: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def open(self) -> AbstractContextManager[BinarySource]:
        return self.path.open("rb")


@dataclass(frozen=True, slots=True)
class BytesContent:
    """Bytes in memory."""

    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)

    def open(self) -> AbstractContextManager[BinarySource]:
        return io.BytesIO(self.data)


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An entry of a listing."""

    key: str
    modified: datetime
    """Time of the last write, by the server's clock."""
    etag: str
    """Changes with the content."""


class ObjectStoreUnavailable(ObjectStoreError, TransientError):
    """The object store does not answer; the same call may succeed when it is back."""


def digest_of(data: bytes) -> str:
    """Returns the SHA-256 of `data`, 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


class _CloudIdentity(Provider):
    """Credentials of the cloud identity of the pod or machine (AWS).

    The library's own client waits for ever for an address that a network policy closes.
    """

    def __init__(self) -> None:
        address = _identity_address()
        if address.startswith("https://"):
            client = _connection_pool(address, IDENTITY_RETRIES)
        else:
            # No proxy reaches an address of the node itself.
            client = urllib3.PoolManager(
                timeout=urllib3.Timeout(connect=CONNECT_WITHIN_S, read=CONNECT_WITHIN_S),
                retries=urllib3.Retry(
                    total=IDENTITY_RETRIES,
                    backoff_factor=0.2,
                    status_forcelist=[500, 502, 503, 504],
                ),
            )
        self._provider = IamAwsProvider(http_client=client)

    def retrieve(self) -> Credentials:
        """Raises `ObjectStoreUnavailable` if the identity cannot be had."""
        try:
            return self._provider.retrieve()
        except (
            MinioException,
            urllib3.exceptions.HTTPError,
            ValueError,
            KeyError,
            OSError,
        ) as error:
            raise ObjectStoreUnavailable(
                f"the cloud identity cannot be read from {_identity_address()} "
                f"({type(error).__name__}); check that a network policy lets pods reach it, that "
                "the ServiceAccount or the machine has a role, and that instance metadata allows "
                "two hops"
            ) from error


def _identity_address() -> str:
    """Returns the address that AWS gives the identity at, as the environment says."""
    if os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        region = os.environ.get("AWS_REGION")
        return f"https://sts.{region}.amazonaws.com" if region else "https://sts.amazonaws.com"
    if path := os.environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        return f"http://169.254.170.2/{path.lstrip('/')}"
    return os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI") or "http://169.254.169.254"


def _credentials(settings: ObjectStoreSettings) -> Provider:
    if settings.credentials == "identity":
        return _CloudIdentity()
    return StaticProvider(
        settings.access_key.get_secret_value(), settings.secret_key.get_secret_value()
    )


class _HttpConnection(HTTPConnection):
    """Sends under the time-out of reading. urllib3 sends under that of connecting."""

    def send(self, data: Any) -> None:
        if self.sock is None:
            self.connect()
        sock: Any = self.sock
        sock.settimeout(ANSWER_WITHIN_S)
        super().send(data)


class _HttpsConnection(_HttpConnection, HTTPSConnection):
    """Sends as `_HttpConnection` does."""


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _HttpsConnection


def _connection_pool(endpoint: str, retries: int) -> urllib3.PoolManager:
    """Returns connections to the server, through the proxy that the environment names for it.

    Raises `ConfigError` for a proxy that does not speak HTTP.
    """
    options: dict[str, Any] = {
        "timeout": urllib3.Timeout(connect=CONNECT_WITHIN_S, read=ANSWER_WITHIN_S),
        "retries": urllib3.Retry(
            total=retries, backoff_factor=0.2, backoff_max=8, status_forcelist=[500, 503]
        ),
        "maxsize": 16,
    }
    if endpoint.startswith("https://"):
        check_certificates()
    proxy = proxy_for(endpoint)
    if proxy is None:
        pool = urllib3.PoolManager(**options)
    elif proxy.startswith(("http://", "https://")):
        pool = urllib3.ProxyManager(proxy, **options)
    else:
        raise ConfigError(
            f"the object store {endpoint} cannot be called through the proxy {redact(proxy)}, "
            "which is none for HTTP; set HTTPS_PROXY or HTTP_PROXY to one that is, or add the "
            "host to NO_PROXY"
        )
    pool.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
    return pool


def _region(region: str, host: str) -> str | None:
    """Returns the region that requests are signed for; None lets the client take it from the host.

    The client ignores the region in the host name of AWS if it is given another one. A server that
    is not AWS would be asked for its region with a request that its keys may not permit.
    """
    if region:
        return region
    return None if host.endswith((".amazonaws.com", ".amazonaws.com.cn")) else "us-east-1"


def _damaged(where: str, digest: str) -> ObjectStoreError:
    return ObjectStoreError(
        f"{where}: the stored bytes do not have the digest {digest[:12]}... that was recorded; the "
        "object was damaged or replaced"
    )


class CheckedStream(io.RawIOBase):
    """A readable stream that hashes its bytes as they are read."""

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
        """Reads the rest. Raises `ObjectStoreError` unless all bytes have the expected digest."""
        while self.read(1 << 20):
            continue
        if self._hash.hexdigest() != self._digest:
            raise _damaged(self._where, self._digest)


class ObjectStore:
    """Reads from and writes to one bucket of an S3 server.

    Every method may raise `ObjectStoreUnavailable` when the server does not answer after all
    retries, and `ObjectStoreError` when it refuses.
    """

    def __init__(self, settings: ObjectStoreSettings, *, retries: int = RETRIES) -> None:
        """Makes a client; nothing is sent yet.

        retries: how often a request is retried while the server is busy or does not answer.
        """
        self.settings = settings
        self._repeats = min(REPEATS, retries)
        url = urlsplit(settings.endpoint)
        self._client = Minio(
            endpoint=url.netloc,
            credentials=_credentials(settings),
            secure=url.scheme == "https",
            region=_region(settings.region, url.hostname or ""),
            http_client=_connection_pool(settings.endpoint, retries),
        )
        if settings.path_style == "always":
            self._client.disable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
        elif settings.path_style == "never":
            self._client.enable_virtual_style_endpoint()  # type: ignore[no-untyped-call]

    def _failure(self, action: str, key: str, error: Exception) -> ObjectStoreError:
        code = getattr(error, "code", None) or type(error).__name__
        if code == "NoSuchBucket":
            return self._without_bucket(f"cannot {action} {self.settings.bucket}/{key}: ")
        if code == "NoSuchKey":
            return ObjectStoreError(
                f"object store {self.settings.endpoint}: cannot {action} "
                f"{self.settings.bucket}/{key}: {code}; the object was deleted after it was "
                "stored, or the bucket was: restore it from a backup"
            )
        # A server that answers 500 to every retry has a lasting problem, such as a full disk.
        refused = isinstance(error, MinioException) or isinstance(
            getattr(error, "reason", None), urllib3.exceptions.ResponseError
        )
        return (ObjectStoreError if refused else ObjectStoreUnavailable)(
            f"object store {self.settings.endpoint}: cannot {action} "
            f"{self.settings.bucket}/{key}: {code}; check that it runs, has space, and accepts "
            "the credentials"
        )

    def _without_bucket(self, what: str = "") -> ObjectStoreError:
        """Returns the error of a bucket that does not exist. what: what failed, and a colon."""
        bucket = self.settings.bucket
        return ObjectStoreError(
            f"object store {self.settings.endpoint}: {what}there is no bucket {bucket}; check its "
            "name, or restore it from a backup: what was in it is gone"
        )

    def _repeat(self, transfer: Callable[[], Result]) -> Result:
        """Repeats a transfer whose connection breaks in mid-body."""
        for _ in range(self._repeats):
            try:
                return transfer()
            except ObjectStoreUnavailable as error:
                if isinstance(error.__cause__, urllib3.exceptions.MaxRetryError):
                    raise  # its own retries have taken long enough
        return transfer()

    def check(self) -> None:
        """Raises `ObjectStoreError` unless the bucket exists and the server answers."""
        try:
            exists = self._client.bucket_exists(bucket_name=self.settings.bucket)
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failure("reach", "", error) from error
        if not exists:
            raise self._without_bucket()

    def ensure_bucket(self) -> None:
        """Creates the bucket unless it exists."""
        try:
            if not self._client.bucket_exists(bucket_name=self.settings.bucket):
                self._client.make_bucket(bucket_name=self.settings.bucket)
        except S3Error as error:
            if error.code != "BucketAlreadyOwnedByYou":
                raise self._failure("create", "", error) from error
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failure("create", "", error) from error

    def put(self, key: str, data: bytes) -> None:
        """Stores `data` under `key`, replacing what is there."""
        try:
            self._client.put_object(
                bucket_name=self.settings.bucket,
                object_name=key,
                data=io.BytesIO(data),
                length=len(data),
                part_size=LARGEST_PART,
            )
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failure("write", key, error) from error

    def get(self, key: str, digest: str, *, largest: int | None = None) -> bytes:
        """Returns the bytes of `key`. Raises `ObjectStoreError` if they do not have the digest.

        largest: how many bytes objects of this kind have at most. Of a larger one no more are read.
        """
        data = self._repeat(lambda: self._get(key, largest))
        if digest_of(data) != digest:
            raise _damaged(f"{self.settings.bucket}/{key}", digest)
        return data

    def read(self, key: str) -> bytes:
        """Returns the bytes of `key`, of which no digest is known."""
        return self._repeat(lambda: self._get(key))

    def read_address(self, address: str) -> bytes:
        """Returns the bytes of `s3://bucket/key`, of any bucket that the credentials open.

        Raises `ObjectStoreError` for another kind of address, and when there is no such object.
        """
        store, key = self.locate(address)
        try:
            return store.read(key)
        except ObjectStoreError as error:
            code = getattr(error.__cause__, "code", "")
            if code not in ("NoSuchKey", "NoSuchBucket"):
                raise
            raise ObjectStoreError(
                f"{address}: object store {self.settings.endpoint} has no such object: {code}; "
                "check the bucket and the key"
            ) from error

    def locate(self, address: str) -> tuple[ObjectStore, str]:
        """Returns the store of the bucket of `s3://bucket/key`, with the same credentials; the key.

        Raises `ObjectStoreError` for another kind of address.
        """
        bucket, _, key = address.removeprefix(S3_SCHEME).partition("/")
        if not address.startswith(S3_SCHEME) or not bucket or not key:
            raise ObjectStoreError(f"{address!r} is no address; give s3://bucket/key")
        return ObjectStore(self.settings.model_copy(update={"bucket": bucket})), key

    def _get(self, key: str, largest: int | None = None) -> bytes:
        data = bytearray()
        try:
            response = self._client.get_object(bucket_name=self.settings.bucket, object_name=key)
            try:
                if largest is None:
                    return bytes(response.read())
                # A server may declare that bytes are compressed; a few would become many here.
                for piece in response.stream(1 << 20, decode_content=False):
                    data += piece
                    if len(data) > largest:
                        raise ObjectStoreError(
                            f"{self.settings.bucket}/{key}: has more than {largest} bytes, which "
                            "no object of its kind has: find out who has written to the bucket"
                        )
            finally:
                response.close()
                response.release_conn()
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failure("read", key, error) from error
        return bytes(data)

    @contextmanager
    def stream(self, key: str, digest: str) -> Iterator[CheckedStream]:
        """Opens `key` as a stream. Only its `check`, called after reading, verifies the digest."""
        try:
            response = self._client.get_object(bucket_name=self.settings.bucket, object_name=key)
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failure("read", key, error) from error
        try:
            yield CheckedStream(response, f"{self.settings.bucket}/{key}", digest)
        finally:
            response.close()
            response.release_conn()

    def keys(self, prefix: str) -> list[str]:
        """Returns every key that begins with `prefix`."""
        return [item.key for item in self.listing(prefix)]

    def listing(self, prefix: str) -> list[StoredObject]:
        """Returns every object whose key begins with `prefix`."""
        try:
            objects = self._client.list_objects(
                bucket_name=self.settings.bucket, prefix=prefix, recursive=True
            )
            return [
                StoredObject(str(item.object_name), item.last_modified, str(item.etag))
                for item in objects
                if not item.is_dir
            ]
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failure("list", prefix, error) from error

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects, one by one where the server has no request for several; keys without an
        object are ignored."""
        names = list(keys)
        try:
            errors = list(
                self._client.remove_objects(
                    bucket_name=self.settings.bucket,
                    delete_object_list=[DeleteObject(name) for name in names],
                )
            )
        except S3Error as error:
            if error.code not in BATCH_DELETE_MISSING:
                raise self._undeleted(names[0], error) from error
            self._delete_singly(names)
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failure("delete", names[0], error) from error
        else:
            if errors:
                raise self._undeleted(errors[0].name or names[0], errors[0])

    def _delete_singly(self, names: Sequence[str]) -> None:
        def remove(name: str) -> None:
            try:
                self._client.remove_object(bucket_name=self.settings.bucket, object_name=name)
            except S3Error as error:
                raise self._undeleted(name, error) from error
            except (MinioException, urllib3.exceptions.HTTPError) as error:
                raise self._failure("delete", name, error) from error

        with ThreadPoolExecutor(TRANSFERS) as pool:
            list(pool.map(remove, names))

    def _undeleted(self, key: str, error: S3Error | DeleteError) -> ObjectStoreError:
        """Returns the error of an object that the server does not delete."""
        if error.code == "AccessDenied":
            return ObjectStoreError(
                f"object store {self.settings.endpoint}: the keys may not delete "
                f"{self.settings.bucket}/{key}; give them s3:DeleteObject"
            )
        if isinstance(error, S3Error):
            return self._failure("delete", key, error)
        return ObjectStoreError(
            f"object store {self.settings.endpoint}: cannot delete {self.settings.bucket}/{key}: "
            f"{error.code}; see the log of the object store"
        )

    def try_operations(self) -> None:
        """Stores, reads, lists and deletes an object, as a run does.

        Raises `ObjectStoreError` for the first operation that the server refuses.
        """
        key = f"{PROBES}/{secrets.token_hex(8)}"
        self.put(key, b"probe")
        self.get(key, digest_of(b"probe"))
        if key not in self.keys(key):
            raise ObjectStoreError(
                f"object store {self.settings.endpoint}: {self.settings.bucket}/{key} was stored "
                "and is not listed; use a server whose listings have what was stored"
            )
        self.delete([key])

    def exists(self, key: str) -> bool:
        """Returns whether there is an object of this key."""
        try:
            self._size(key)
        except S3Error as error:
            if error.code in ("NoSuchKey", "NoSuchObject"):
                return False
            raise self._failure("find", key, error) from error
        except (MinioException, urllib3.exceptions.HTTPError) as error:
            raise self._failure("find", key, error) from error
        return True

    def put_content(self, key: str, content: Content) -> str:
        """Stores `content`, reading it as it is sent. Returns its SHA-256."""
        return self._repeat(lambda: self._put_content(key, content))

    def _put_content(self, key: str, content: Content) -> str:
        with content.open() as opened:
            source = _HashingSource(opened)
            try:
                self._client.put_object(
                    bucket_name=self.settings.bucket,
                    object_name=key,
                    data=source,  # type: ignore[arg-type]
                    length=content.size,
                    part_size=FILE_PART,
                )
            except (MinioException, urllib3.exceptions.HTTPError) as error:
                raise self._failure("write", key, error) from error
        return source.hash.hexdigest()

    def get_file(self, key: str, digest: str, target: Path) -> None:
        """Fetches `key` into the file `target`. Raises `ObjectStoreError` for another digest.

        A target that has the digest already is left as it is. An interrupted fetch is continued
        from its partial file.
        """
        self._repeat(lambda: self._get_file(key, digest, target))

    def download(self, key: str, target: Path) -> None:
        """Fetches `key`, of which no digest is known, into the file `target`."""

        def fetch() -> None:
            try:
                self._client.fget_object(
                    bucket_name=self.settings.bucket, object_name=key, file_path=str(target)
                )
            except (MinioException, urllib3.exceptions.HTTPError) as error:
                raise self._failure("read", key, error) from error

        self._repeat(fetch)

    def _get_file(self, key: str, digest: str, target: Path) -> None:
        if _has_digest(target, digest):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".part")
        with open_exclusively(partial) as file:
            if _has_digest(target, digest):  # Another process has fetched it meanwhile.
                partial.unlink()
                return
            hashed = hashlib.file_digest(file, "sha256")
            try:
                self._append(key, file, hashed)
            except (MinioException, urllib3.exceptions.HTTPError) as error:
                raise self._failure("read", key, error) from error
            if hashed.hexdigest() != digest:
                partial.unlink()
                raise _damaged(f"{self.settings.bucket}/{key}", digest)
            file.flush()
            partial.rename(target)

    def _append(self, key: str, file: BinaryIO, hashed: hashlib._Hash) -> None:
        """Appends to `file` the bytes of `key` that it does not have yet."""
        offset = file.tell()
        if offset and offset >= (self._size(key) or 0):
            return  # complete, or too long, which the digest shows
        response = self._client.get_object(
            bucket_name=self.settings.bucket, object_name=key, offset=offset
        )
        try:
            # One thread hashes what has arrived while this one waits for the next bytes.
            with ThreadPoolExecutor(1) as hasher:
                hashing: Future[None] | None = None
                for data in response.stream(1 << 20):
                    if hashing is not None:
                        hashing.result()
                    hashing = hasher.submit(hashed.update, data)
                    file.write(data)
        finally:
            response.close()
            response.release_conn()

    def _size(self, key: str) -> int | None:
        return self._client.stat_object(bucket_name=self.settings.bucket, object_name=key).size

    def put_files(self, prefix: str, files: Mapping[str, Content]) -> str:
        """Stores files by name under `prefix`, the manifest last. Returns the manifest's digest."""
        return self.put_manifest(prefix, self.put_contents(prefix, files))

    def put_contents(self, prefix: str, files: Mapping[str, Content]) -> dict[str, str]:
        """Stores files by name under `prefix`, without a manifest. Returns the digests by name.

        Raises `ObjectStoreError` for a name that `get_directory` would refuse.
        """
        names = sorted(files)
        for name in names:
            if reason := _refusal_of(name):
                raise ObjectStoreError(f"the file {name!r} cannot be stored: {reason}; rename it")
        with ThreadPoolExecutor(TRANSFERS) as pool:
            keys = [f"{prefix}/{name}" for name in names]
            digests = pool.map(self.put_content, keys, [files[name] for name in names])
            return dict(zip(names, digests, strict=True))

    def put_manifest(self, prefix: str, listing: Mapping[str, str]) -> str:
        """Writes the manifest of files that are stored already. Returns the digest of the manifest.

        listing: digest of each file by name.
        """
        manifest = json.dumps({"files": listing}, sort_keys=True).encode()
        if len(manifest) > LARGEST_MANIFEST:
            raise ObjectStoreError(
                f"{prefix} has {len(listing)} files, whose manifest is larger than "
                f"{LARGEST_MANIFEST} bytes; store fewer files"
            )
        self.put(f"{prefix}/{MANIFEST}", manifest)
        return digest_of(manifest)

    def get_directory(
        self,
        prefix: str,
        digest: str,
        directory: Path,
        *,
        include: Callable[[str], bool] = lambda _: True,
    ) -> None:
        """Fetches the files that `put_files` stored into `directory`.

        digest: digest of the manifest. include: selects files by name.
        Raises `ObjectStoreError` for a file or a manifest with another digest, and before the first
        transfer for a manifest that is not as `put_manifest` writes it, or that names a file
        outside `directory`.
        """
        key = f"{prefix}/{MANIFEST}"
        manifest = self.get(key, digest, largest=LARGEST_MANIFEST)
        files = _read_manifest(manifest, f"{self.settings.bucket}/{key}", directory)
        directory.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(TRANSFERS) as pool:
            transfers = [
                pool.submit(self.get_file, f"{prefix}/{name}", file_digest, directory / name)
                for name, file_digest in files.items()
                if include(name)
            ]
            for transfer in transfers:
                transfer.result()


def _read_manifest(data: bytes, where: str, directory: Path) -> dict[str, str]:
    """Returns the digests of the files of a manifest, by name.

    directory: where the files are going to be. Raises `ObjectStoreError` for a manifest of another
    shape, and for one with a file that would lie elsewhere.
    """
    remedy = "bapo writes no such manifest: find out who has written to the bucket"
    try:
        files: dict[str, str] = json.loads(data)["files"]
        well_formed = isinstance(files, dict) and all(
            isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in files.values()
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        well_formed = False
    if not well_formed:
        raise ObjectStoreError(
            f"{where}: is no manifest, which has the SHA-256 of each file by its name; {remedy}"
        )
    root = directory.resolve()
    for name in files:
        reason = _refusal_of(name)
        if reason is None and not (root / name).resolve().is_relative_to(root):
            reason = "a symbolic link leads it out of the directory"
        if reason is None and any(str(parent) in files for parent in PurePosixPath(name).parents):
            reason = "another file has the name of its directory"
        if reason is not None:
            raise ObjectStoreError(f"{where}: refuses the file {name!r:.200}: {reason}; {remedy}")
    return files


def _refusal_of(name: str) -> str | None:
    """Returns why no file below a directory may have this relative name; None if one may."""
    parts = name.split("/")
    if not name.isprintable() or "\\" in name:
        return "it has a backslash or a character that cannot be printed"
    if any(part in ("", ".", "..") for part in parts):
        return "it is not a path below a directory"
    if any(len(part.encode()) > LONGEST_NAME for part in parts):
        return f"a part of it is longer than {LONGEST_NAME} bytes"
    return None


def files_of(directory: Path) -> dict[str, Content]:
    """Returns every file below `directory`, by its path relative to it."""
    paths = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): FileContent(path) for path in paths}


def _has_digest(path: Path, digest: str) -> bool:
    """Returns whether there is a file with this SHA-256."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == digest
    except FileNotFoundError:
        return False


class _HashingSource:
    """Hashes the bytes of a source as they are read."""

    def __init__(self, source: BinarySource) -> None:
        self._source = source
        self.hash = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._source.read(size)
        self.hash.update(data)
        return data


def discard(store: ObjectStore, prefixes: Iterable[str]) -> None:
    """Deletes all objects below prefixes that nothing needs any more; a failure is only logged,
    because what is left is garbage that takes space and `bapo gc` lists."""
    for prefix in prefixes:
        try:
            store.delete(store.keys(f"{prefix}/"))
        except ObjectStoreError as error:
            log.warning(
                "%s is no longer needed and cannot be deleted; `bapo gc` lists it: %s",
                *(prefix, error),
            )
