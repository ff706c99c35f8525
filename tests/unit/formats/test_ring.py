"""Rings in memory: what is written is read once, in order, and a writer that has ended is noticed."""

from dataclasses import replace
from pathlib import Path

import pytest

from serin.errors import RingBroken
from serin.formats.serving.ring import Entries, Ring, remove_drained, ring_files
from serin.machine.in_memory import memory_folder, remove_sockets
from tests.kit.rings import BOOT, Exchange, RingWriter


def exchange(number: int, size: int = 100) -> Exchange:
    return Exchange(
        request=bytes([number % 256]) * size, answer=b"{}", t=float(number), release=f"taxis-v{number}"
    )


def releases(found: list[Entries]) -> list[str]:
    """The release of each entry, oldest first."""
    return [name for _, name in sorted((start, each.release) for each in found for start in each.start)]


def numbers(ring: Ring) -> list[int]:
    return [int(name.removeprefix("taxis-v")) for name in releases(ring.read(ring.tail)[0])]


def test_a_ring_is_read_around_its_end_as_often_as_it_is_filled(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, capacity=4096)
    ring = Ring(writer.path)
    seen = []
    for number in range(1, 200):
        assert writer.write(exchange(number, size=number * 7 % 900))
        seen += numbers(ring)
        ring.release(ring.read(ring.tail)[1])
    assert seen == list(range(1, 200))
    assert (ring.drawn, ring.dropped, ring.fill) == (199, 0, 0.0)
    ring.close()


def test_entries_come_by_release_and_each_of_them_has_its_values(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, capacity=8192)
    sent = [replace(exchange(number % 3), share=number / 8, encoding=number % 2) for number in range(9)]
    for each in sent:
        writer.write(each)
    ring = Ring(writer.path)
    found, position = ring.read(ring.tail)
    assert position == ring.head
    assert {each.release: each.share.tolist() for each in found} == {
        f"taxis-v{number}": [each.share for each in sent[number::3]] for number in range(3)
    }
    assert [each.encoding.tolist() for each in found] == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    first = found[0].where(found[0].start > 0)
    assert (len(first), first.share.tolist()) == (2, [3 / 8, 6 / 8])
    some, behind = ring.read(ring.tail, int(found[1].end[0]))
    assert (releases(some), behind) == (["taxis-v0", "taxis-v1"], found[1].end[0])
    ring.close()


def test_what_has_no_room_is_counted_and_said_by_release_when_there_is_room(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, capacity=4096)
    ring = Ring(writer.path)
    written = [writer.write(exchange(1, size=800)) for _ in range(7)]
    assert written == [True] * 4 + [False] * 3
    assert (ring.drawn, ring.dropped) == (7, 3)
    assert ring.fill > 0.9
    before = ring.read(ring.tail)[0]  # a small entry may still have had room
    ring.release(ring.head)
    writer.write(exchange(2))
    after = ring.read(ring.tail)[0]
    assert set(releases(after)) == {"taxis-v1", "taxis-v2"}
    assert sum(each.lost.sum() for each in (*before, *after)) == 3
    ring.close()


def test_rings_are_removed_when_they_are_drained_and_their_writer_has_ended(tmp_path: Path) -> None:
    lives, empty, full = (RingWriter(tmp_path, f"{BOOT}-{number}") for number in range(3))
    assert ring_files(tmp_path) == [lives.path, empty.path, full.path]
    full.write(exchange(1))
    for writer in (empty, full):
        writer.end()
    assert remove_drained(tmp_path) == 2
    assert ring_files(tmp_path) == [lives.path, full.path]
    found = Ring(full.path)
    assert found.is_abandoned()
    assert numbers(found) == [1]
    found.close()


@pytest.mark.parametrize("content", [b"", b"SerinRg1", b"x" * 9000, b"SerinRg1" + b"\xff" * 8 + bytes(5000)])
def test_a_file_that_is_not_a_ring_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.ring"
    path.write_bytes(content)
    with pytest.raises(RingBroken, match=r"a\.ring"):
        Ring(path)


@pytest.mark.parametrize("damage", [bytes(8), b"\x07", b"\xf0\xff\xff\x7f"])
def test_an_entry_that_cannot_be_one_is_not_read(tmp_path: Path, damage: bytes) -> None:
    writer = RingWriter(tmp_path)
    writer.write(exchange(1))
    second = writer.head
    writer.write(exchange(2))
    writer.damage(second, damage)
    ring = Ring(writer.path)
    found, position = ring.read(ring.tail)
    assert (releases(found), position) == (["taxis-v1"], second)
    with pytest.raises(RingBroken, match="an entry of"):
        ring.read(position)
    ring.close()


def test_the_folder_in_memory_outlives_the_stack_while_a_ring_holds_requests(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path)
    writer.write(exchange(1))
    writer.end()
    assert remove_drained(tmp_path) == 1
    remove_sockets(tmp_path)
    ring = Ring(writer.path)
    assert numbers(ring) == [1]
    ring.release(ring.head)
    ring.close()
    assert remove_drained(tmp_path) == 0
    remove_sockets(tmp_path)
    assert memory_folder(tmp_path) is None
