"""Digests of files as trees of SHA-256."""

import hashlib
import os
import random
from pathlib import Path

from serin.store.file_digests import PIECE_BYTES, TreeDigest


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
    digests = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
    plain = hashlib.sha256(b"serin.tree 1\n" + digests + len(content).to_bytes(8, "little"))
    assert of_file.hexdigest() == of_updates.hexdigest() == plain.hexdigest()
    of_other.update(content[:-1])
    of_other.end()
    assert of_other.hexdigest() != plain.hexdigest()


def test_a_tree_tells_where_one_stream_ends_and_the_next_begins(tmp_path: Path) -> None:
    found = set()
    for sizes in ((0, 2), (1, 1), (2, 0), (2,)):
        tree = TreeDigest()
        for size in sizes:
            tree.update(bytes(size * PIECE_BYTES))
            tree.end()
        found.add(tree.hexdigest())
    assert len(found) == 4
