"""Which requests are recorded: lots, drawn by the request's id. The gateway's filter computes the same."""

from __future__ import annotations

import struct

_MASK = 0xFFFFFFFF


def is_drawn(request_id: str | bytes, share: float) -> bool:
    """Returns whether the request with this id is recorded: its lot, murmur3-32 with seed 0, is below share * 2^32.

    So equal ids have equal lots everywhere, and a larger share draws every id that a smaller one draws.
    """
    return share >= 1 or lot(request_id) < share * 2.0**32


def lot(request_id: str | bytes) -> int:
    """Returns murmur3-32 (seed 0) of the id's UTF-8 bytes. `serin.columns.hashing.hash_strings` does whole arrays."""
    data = request_id.encode() if isinstance(request_id, str) else bytes(request_id)
    state, words = 0, len(data) // 4
    for word in struct.unpack_from(f"<{words}I", data):
        word = (word * 0xCC9E2D51) & _MASK
        state ^= (((word << 15) | (word >> 17)) * 0x1B873593) & _MASK
        state = (((state << 13) | (state >> 19)) * 5 + 0xE6546B64) & _MASK
    word = (int.from_bytes(data[4 * words :], "little") * 0xCC9E2D51) & _MASK
    state ^= ((((word << 15) | (word >> 17)) * 0x1B873593) & _MASK) ^ len(data)
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK
    return state ^ (state >> 16)
