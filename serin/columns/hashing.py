"""murmur3-32, seed 0, over whole arrays: the hash of codes and splits (the same as ONNX Runtime's MurmurHash3)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from serin.columns.column import array_module

UInt32 = npt.NDArray[np.uint32]
_C1, _C2, _C3, _N = np.uint32(0xCC9E2D51), np.uint32(0x1B873593), np.uint32(5), np.uint32(0xE6546B64)
_BLOCK = 2**14  # values that stay in the processor's cache from one operation to the next


def hash_ints(values: npt.NDArray[np.int64]) -> UInt32:
    """The hash of each value's eight little-endian bytes."""
    xp = array_module(values)
    if xp is np and len(values) > _BLOCK:
        hashes = np.empty(len(values), np.uint32)
        for start in range(0, len(values), _BLOCK):
            hashes[start : start + _BLOCK] = hash_ints(values[start : start + _BLOCK])
        return hashes
    words = xp.ascontiguousarray(values, dtype=np.int64).view(np.uint32)  # the lower half of each value first
    state = _add_block(_rotate(_scramble(words[0::2]), 13) * _C3 + _N, words[1::2])
    return _finish(state, np.uint32(8))


def hash_strings(texts: pa.Array) -> UInt32:
    """The hash of each string's UTF-8 bytes; a null counts as empty. Loops over the words of the longest."""
    plain = texts.cast(pa.large_binary()).fill_null(b"")
    if len(plain) == 0:
        return np.empty(0, np.uint32)
    _, offset_buffer, data = plain.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[plain.offset : plain.offset + len(plain) + 1]
    length = np.diff(offsets)
    content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    padded = np.concatenate([content, np.zeros(4, np.uint8)])
    state = np.zeros(len(plain), np.uint32)
    for word in range(int(length.max()) // 4):
        active = np.flatnonzero(length >= 4 * (word + 1))
        state[active] = _add_block(state[active], _word(padded, offsets[active] + 4 * word))
    rest = length % 4
    tail = _word(padded, offsets[:-1] + length - rest)
    tail &= ((np.uint64(1) << (8 * rest).astype(np.uint64)) - np.uint64(1)).astype(np.uint32)
    return _finish(state ^ _scramble(tail), length.astype(np.uint32))


def _word(content: npt.NDArray[np.uint8], at: npt.NDArray[np.int64]) -> UInt32:
    word = content[at].astype(np.uint32)
    for byte in (1, 2, 3):
        word |= content[at + byte].astype(np.uint32) << np.uint32(8 * byte)
    return word


def _rotate(values: UInt32, by: int) -> UInt32:
    return (values << np.uint32(by)) | (values >> np.uint32(32 - by))


def _scramble(block: UInt32) -> UInt32:
    return _rotate(block * _C1, 15) * _C2


def _add_block(state: UInt32, block: UInt32) -> UInt32:
    return _rotate(state ^ _scramble(block), 13) * _C3 + _N


def _finish(state: UInt32, length: UInt32 | np.uint32) -> UInt32:
    state = state ^ length
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return state ^ (state >> np.uint32(16))
