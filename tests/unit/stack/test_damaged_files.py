"""A part of the walk over damaged files; tests/soak/damaged_files.py has all of it. One model's file harms no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.soak.damaged_files import DAMAGES, Walk

NAMED = (
    ("releases/delays-v1/release.json", "half"),
    ("stack.json", "half"),
    ("captures/delays/counters.json", "half"),
    ("rollouts/delays/journal.jsonl", "half"),
    ("rollouts/delays/journal.jsonl", "folder"),  # rollouts/delays.copy and rollouts/delays-copy
    ("console/session-key", "half"),
    ("store/models/delays/aliases.json", "unreadable"),
)


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SERIN_HOME", "SERIN_INVENTORY"):
            patch.setenv(name, "")
        patch.delenv("SERIN_STORE", raising=False)
        yield Walk.build(tmp_path_factory.mktemp("walk"))


@pytest.mark.parametrize(("file", "damage"), NAMED)
def test_everything_that_reads_a_home_names_the_damaged_file_or_does_without_it(
    walk: Walk, file: str, damage: str
) -> None:
    walk.wrong.clear()
    walk.check(Path(file), damage)
    assert walk.wrong == []


def test_the_controller_decides_about_the_other_model_whatever_file_is_damaged(walk: Walk) -> None:
    walk.wrong.clear()
    files = [file for file in walk.files() if "versions" not in file.parts]
    for place, file in enumerate(files):
        walk.check(file, list(DAMAGES)[place % len(DAMAGES)], whole=False)
    assert walk.wrong == []
