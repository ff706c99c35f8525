"""Digests of long files as a tree: the SHA-256 over the SHA-256 of every 64 KiB, many of which are computed at once.

Of each stream of bytes the tree has the digests of its pieces, then its size as 8 little-endian bytes.
"""

from __future__ import annotations

import hashlib
import mmap
import os

from serin.machine.native.sha256_lanes import digests_of_pieces

PIECE_BYTES = 2**16
_MAPPED_BYTES = 2**26  # at once


class TreeDigest:
    """Over one or more streams of bytes, each ended by `end`."""

    def __init__(self) -> None:
        self._top = hashlib.sha256(b"serin.tree 1\n")
        self._size = 0

    def update(self, content: memoryview | bytes, *, expected_bytes: int | None = None) -> None:
        """Adds to the stream. All but its last part have whole pieces of 64 KiB."""
        assert self._size % PIECE_BYTES == 0, "something follows a piece that is not whole"
        self._size += len(content)
        self._top.update(digests_of_pieces(content, PIECE_BYTES, expected_bytes=expected_bytes))

    def end(self) -> None:
        self._top.update(self._size.to_bytes(8, "little"))
        self._size = 0

    def add_file(self, descriptor: int, *, expected_bytes: int | None = None) -> None:
        """A whole file as one stream."""
        size = os.fstat(descriptor).st_size
        for start in range(0, size, _MAPPED_BYTES):
            length = min(_MAPPED_BYTES, size - start)
            with (
                mmap.mmap(
                    descriptor,
                    length,
                    flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
                    prot=mmap.PROT_READ,
                    offset=start,
                ) as mapped,
                memoryview(mapped) as content,
            ):
                self.update(content, expected_bytes=max(size, expected_bytes or 0))
        self.end()

    def hexdigest(self) -> str:
        return self._top.hexdigest()
