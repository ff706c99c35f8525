"""The compiled SHA-256 of many messages at once gives hashlib's digests, and is used only where it can be built."""

import hashlib
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from serin.machine.native import sha256_lanes
from serin.machine.native.compiler import machine_compiler
from serin.machine.native.sha256_lanes import Lanes, build_library, digests_of_pieces
from serin.store import file_digests
from serin.store.file_digests import PIECE_BYTES, TreeDigest

KINDS = ("avx512", "avx2")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The library for each kind of vectors that this processor has."""
    if machine_compiler() is None:
        pytest.skip("no C++ compiler is on PATH")
    folder = tmp_path_factory.mktemp("native")
    libraries = {kind: folder / f"{kind}.so" for kind in sha256_lanes.supported_vectors()}
    assert all(build_library(kind, library) for kind, library in libraries.items())
    return libraries


@pytest.fixture(params=KINDS)
def lanes(request: pytest.FixtureRequest, built: dict[str, Path]) -> Lanes:
    if request.param not in built:
        pytest.skip(f"this processor has no {request.param}")
    return Lanes(built[request.param])


def by_hashlib(messages: list[bytes]) -> bytes:
    return b"".join(hashlib.sha256(message).digest() for message in messages)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 100])
def test_any_number_of_pieces_of_all_lengths_around_block_borders_have_their_digests(
    lanes: Lanes, count: int
) -> None:
    for piece in (*range(1, 260), 1000, 70_003):
        for rest in {0, 1, piece // 2, piece - 1}:  # the last piece is shorter
            content = random.Random(3).randbytes(count * piece + rest)
            pieces = [content[at : at + piece] for at in range(0, len(content), piece)]
            assert lanes.digests_of_pieces(np.frombuffer(content, np.uint8), piece) == by_hashlib(pieces)


def test_the_library_is_built_beside_the_first_long_content_and_used_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not sha256_lanes.supported_vectors() or machine_compiler() is None:
        pytest.skip("nothing to build here: no vectors of a known kind, or no C++ compiler")
    monkeypatch.setenv("SERIN_HOME", str(tmp_path))
    monkeypatch.setattr(sha256_lanes, "_vectors", lambda: "avx2")  # also on a processor with SHA instructions
    monkeypatch.setattr(sha256_lanes, "_loaded", {})
    monkeypatch.setattr(sha256_lanes, "WORTH_BUILDING_BYTES", 1000)
    content = random.Random(4).randbytes(5000)
    expected = by_hashlib([content[at : at + 70] for at in range(0, 5000, 70)])
    assert digests_of_pieces(content[:140], 70) == expected[:64]
    assert sha256_lanes._loaded == {}, "little content is not worth a compiler"
    assert digests_of_pieces(content, 70) == expected
    for thread in threading.enumerate():
        if thread.name == "build-sha256":
            thread.join(120)
    assert digests_of_pieces(content, 70) == expected
    assert [type(found) for found in sha256_lanes._loaded.values()] == [Lanes]


@pytest.mark.parametrize(
    ("flags", "vectors"),
    [
        ({"avx2"}, "avx2"),
        ({"avx2", "sha_ni"}, None),
        ({"avx2", "sha_ni", "avx512f"}, None),
        ({"avx2", "avx512f", "avx512bw"}, "avx512"),
        ({"avx2", "avx512f", "avx512bw", "sha_ni"}, "avx512"),
        (set(), None),
    ],
)
def test_lanes_are_used_where_they_are_faster_than_the_instructions_of_hashlib(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], vectors: str | None
) -> None:
    monkeypatch.setattr(sha256_lanes, "_processor_flags", lambda: frozenset(flags))
    assert sha256_lanes._vectors.__wrapped__() == vectors


def test_a_library_that_cannot_be_loaded_or_computes_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERIN_HOME", str(tmp_path))
    monkeypatch.setattr(sha256_lanes, "_vectors", lambda: "avx2")
    monkeypatch.setattr(sha256_lanes, "_loaded", {})
    library = sha256_lanes.library_path("avx2")
    library.parent.mkdir()
    library.write_bytes(b"not a library")
    assert digests_of_pieces(b"abc", 2) == by_hashlib([b"ab", b"c"])
    assert list(sha256_lanes._loaded.values()) == [None]


def test_a_tree_is_the_same_for_a_file_and_for_its_bytes_in_several_updates(tmp_path: Path) -> None:
    content = random.Random(5).randbytes(5 * PIECE_BYTES + 17)
    path = tmp_path / "file"
    path.write_bytes(content)
    of_file, of_updates, of_other = TreeDigest(), TreeDigest(), TreeDigest()
    descriptor = os.open(path, os.O_RDONLY)
    of_file.add_file(descriptor)
    os.close(descriptor)
    for begin, end in ((0, 2), (2, 3), (3, 6)):
        of_updates.update(content[begin * PIECE_BYTES : end * PIECE_BYTES])
    of_updates.end()
    pieces = [content[at : at + PIECE_BYTES] for at in range(0, len(content), PIECE_BYTES)]
    plain = hashlib.sha256(b"serin.tree 1\n" + by_hashlib(pieces) + len(content).to_bytes(8, "little"))
    assert of_file.hexdigest() == of_updates.hexdigest() == plain.hexdigest()
    of_other.update(content[:-1])
    of_other.end()
    assert of_other.hexdigest() != plain.hexdigest()


@pytest.mark.parametrize("size", [0, 1, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 1, 9 * PIECE_BYTES + 17])
def test_a_tree_is_the_same_when_threads_share_the_blocks_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(random.Random(6).randbytes(size))
    alone, shared, in_blocks = TreeDigest(), TreeDigest(), TreeDigest()
    with path.open("rb") as file, ThreadPoolExecutor(3) as threads:
        alone.add_file(file.fileno())
        monkeypatch.setattr(file_digests, "_BLOCK_BYTES", 2 * PIECE_BYTES)
        shared.add_file(file.fileno(), each=threads.map)
        in_blocks.add_file(file.fileno())
    assert shared.hexdigest() == in_blocks.hexdigest() == alone.hexdigest()


def test_a_tree_tells_where_one_stream_ends_and_the_next_begins(tmp_path: Path) -> None:
    found = set()
    for sizes in ((0, 2), (1, 1), (2, 0), (2,)):
        tree = TreeDigest()
        for size in sizes:
            tree.update(bytes(size * PIECE_BYTES))
            tree.end()
        found.add(tree.hexdigest())
    assert len(found) == 4


def test_a_file_is_digested_while_something_else_holds_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profiler or a debugger holds the frames that it looks at, and with them what they have mapped."""
    (tmp_path / "file").write_bytes(bytes(3 * PIECE_BYTES))
    held: list[object] = []

    def digest_and_hold(content: memoryview, piece: int, **rest: int) -> bytes:
        held.append(np.frombuffer(content, np.uint8))
        return digests_of_pieces(content, piece, **rest)

    trees = [TreeDigest(), TreeDigest()]
    for tree in trees:
        with (tmp_path / "file").open("rb") as stream:
            tree.add_file(stream.fileno())
        monkeypatch.setattr(file_digests, "digests_of_pieces", digest_and_hold)
    assert held
    assert trees[0].hexdigest() == trees[1].hexdigest()
