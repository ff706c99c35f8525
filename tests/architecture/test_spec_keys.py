"""Every key of the spec is documented, read by something, and on the reference page."""

from __future__ import annotations

import ast

import pytest

from serin.spec.reference.markdown import spec_reference
from serin.spec.section import Section
from serin.spec.training import TrainingSpec
from tests.architecture.sources import ROOT, python_files, tree
from tests.architecture.spec_reads import all_sections, fields_read

SECTIONS = all_sections()


def test_every_section_and_key_has_a_docstring() -> None:
    bare = [name for name, section in SECTIONS.items() if not section.summary]
    bare += [
        f"{name}.{key}"
        for name, section in SECTIONS.items()
        for key, field in section.model_fields.items()
        if not field.description
    ]
    assert not bare, "write a docstring below the field: it is the key's documentation"


def test_help_shows_the_keys() -> None:
    assert "    epochs: The number of passes over the training split." in (TrainingSpec.__doc__ or "")


def test_every_key_is_read_by_something() -> None:
    read = fields_read((tree(name) for name in python_files("serin", "tasks", "flows")), SECTIONS)
    idle = [
        f"{name}.{key}"
        for name, section in SECTIONS.items()
        for key in section.model_fields
        if not any(
            (kind.__name__, key) in read
            for kind in SECTIONS.values()
            if issubclass(kind, _owner(section, key))
        )
    ]
    assert not idle, "nothing reads these keys: use them or delete them"


def _owner(section: type[Section], key: str) -> type[Section]:
    """The class that defines the key: what reads an inherited key reads it for all."""
    return next(
        kind for kind in reversed(section.__mro__) if issubclass(kind, Section) and key in kind.model_fields
    )


class IdleSpec(Section):
    """Has a key that is only checked and one that is read."""

    checked: int = 1
    used: int = 2


@pytest.mark.parametrize(
    "source",
    [
        "def build(idle: IdleSpec): return idle.used",
        "def find() -> IdleSpec: ...\nfound = find()\nprint(found.used)",
        "def all(many: list[IdleSpec]):\n    for one in many:\n        yield one.used",
        (
            "class IdleSpec:\n    @property\n    def twice(self): return 2 * self.used\n"
            "    @model_validator(mode='after')\n    def _check(self): assert self.checked"
        ),
    ],
)
def test_a_key_that_is_only_checked_counts_as_not_read(source: str) -> None:
    other = "def elsewhere(checks: Checks): return checks.checked"
    found = fields_read([ast.parse(source), ast.parse(other)], {"IdleSpec": IdleSpec})
    assert found == {("IdleSpec", "used")}


def test_the_reference_page_is_the_generated_one() -> None:
    page = (ROOT / "docs/reference/spec.md").read_text(encoding="utf-8")
    assert page == spec_reference(), "run `serin schema --markdown --out docs/reference/spec.md`"
