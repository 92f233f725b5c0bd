"""Reads from an Arrow IPC stream how much memory it takes, before anything is decompressed.

A buffer that is compressed begins with its length without compression. The metadata of each message
say where its buffers are (Arrow's format, `Message.fbs`, as FlatBuffers). pyarrow reads them only
together with the data: 51 KB could become 1.5 GB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

CONTINUATION = 0xFFFFFFFF
SCHEMA, RECORD_BATCH = 1, 3
"""Types of messages, of the union `MessageHeader`."""
NOT_COMPRESSED = -1


class UnreadableStream(ValueError):
    """The bytes are no Arrow IPC stream, or one with messages that are not read here."""


def memory_of(data: bytes) -> int:
    """Returns the bytes that the columns of a stream take in memory.

    Raises `UnreadableStream` unless all messages are a schema and record batches.
    """
    try:
        return sum(_memory_of_messages(data))
    except (struct.error, IndexError) as error:
        raise UnreadableStream(f"its metadata are damaged: {error}") from error


def _memory_of_messages(data: bytes) -> Iterator[int]:
    position = 0
    while position < len(data):
        (marker,) = struct.unpack_from("<I", data, position)
        if marker != CONTINUATION:
            raise UnreadableStream(f"no message begins at byte {position}")
        (metadata_length,) = struct.unpack_from("<i", data, position + 4)
        if metadata_length == 0:  # the end of the stream
            return
        begin = position + 8
        body = begin + metadata_length
        if metadata_length < 0 or body > len(data):
            raise UnreadableStream(f"the message at byte {position} is cut off")
        message = _Table.root(data, begin)
        kind, body_length = message.number(1, "<B"), message.number(3, "<q")
        if body_length < 0 or body + body_length > len(data):
            raise UnreadableStream(f"the body of the message at byte {position} is cut off")
        if kind == RECORD_BATCH:
            yield _memory_of_batch(data, message.table(2), body, body_length)
        elif kind != SCHEMA:
            raise UnreadableStream(f"the message at byte {position} is no record batch")
        position = body + body_length


def _memory_of_batch(data: bytes, batch: _Table, body: int, body_length: int) -> int:
    compressed = batch.has(3)
    size = 0
    for offset, length in batch.structs(2, "<qq"):
        if offset < 0 or length < 0 or offset + length > body_length:
            raise UnreadableStream("a buffer is outside its message")
        if compressed and length > 0:
            (decompressed,) = struct.unpack_from("<q", data, body + offset)
            if decompressed < NOT_COMPRESSED:
                raise UnreadableStream("a buffer has a negative length")
            size += length if decompressed == NOT_COMPRESSED else decompressed
        else:
            size += length
    return size


class _Table:
    """A table of FlatBuffers: its fields are found by the offsets in its virtual table."""

    def __init__(self, data: bytes, position: int) -> None:
        if not 0 <= position < len(data):
            raise UnreadableStream("a table is outside its message")
        self._data, self._position = data, position
        (back,) = struct.unpack_from("<i", data, position)
        self._fields = position - back
        if not 0 <= self._fields < len(data):
            raise UnreadableStream("a table is outside its message")
        (self._fields_size,) = struct.unpack_from("<H", data, self._fields)

    @classmethod
    def root(cls, data: bytes, position: int) -> _Table:
        (offset,) = struct.unpack_from("<I", data, position)
        return cls(data, position + offset)

    def has(self, field: int) -> bool:
        return self._offset(field) != 0

    def number(self, field: int, form: str) -> int:
        """Returns a number; 0, its default value, if it is absent."""
        offset = self._offset(field)
        if offset == 0:
            return 0
        value: int = struct.unpack_from(form, self._data, self._position + offset)[0]
        return value

    def table(self, field: int) -> _Table:
        if not self.has(field):
            raise UnreadableStream("a message has no header")
        return _Table(self._data, self._follow(field))

    def structs(self, field: int, form: str) -> Iterator[tuple[int, ...]]:
        """Yields the structs of a vector."""
        if not self.has(field):
            return
        begin = self._follow(field)
        (count,) = struct.unpack_from("<I", self._data, begin)
        end = begin + 4 + count * struct.calcsize(form)
        if end > len(self._data):
            raise UnreadableStream("a vector is outside its message")
        yield from struct.iter_unpack(form, memoryview(self._data)[begin + 4 : end])

    def _offset(self, field: int) -> int:
        slot = 4 + 2 * field
        if slot + 2 > self._fields_size:
            return 0
        offset: int = struct.unpack_from("<H", self._data, self._fields + slot)[0]
        return offset

    def _follow(self, field: int) -> int:
        position = self._position + self._offset(field)
        (offset,) = struct.unpack_from("<I", self._data, position)
        return position + int(offset)
