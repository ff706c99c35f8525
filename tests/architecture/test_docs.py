"""The documentation site builds, its links lead somewhere, and every key of the spec is documented and read."""

import ast
import html
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import serin
from serin import errors
from serin.cli import app
from serin.spec.section import Section, key_descriptions
from serin.spec.training import TrainingSpec
from tests.architecture.sources import ROOT, python_files, repository_files, tree
from tests.architecture.spec_reads import all_sections, fields_read
from tests.kit.commands import run

# Written by hand. (test_sources.py checks the words.)
PROSE = [
    name
    for name in repository_files()
    if re.fullmatch(
        r"(README|SECURITY|CONTRIBUTING|examples/\w+/README|docs/(index|architecture|benchmarks|reference/glossary)"
        r"|docs/(adr|tutorial|how-to|log)/[^/]+)\.md",
        name,
    )
]
MAX_PROSE_LINE = 100


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once: --strict makes an error of every link, anchor or page of the navigation that leads nowhere."""
    out = tmp_path_factory.mktemp("site")
    build = sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", out
    run(*build, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return out


def shown(page: Path) -> str:
    """The text of a page, without its markup."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page.read_text(encoding="utf-8"))).split())


def test_every_page_of_the_repository_is_a_page_of_the_site(site: Path) -> None:
    pages = [
        Path(name).relative_to("docs") for name in repository_files() if re.fullmatch(r"docs/.*\.md", name)
    ]
    missing = [page for page in pages if not (site / page.with_suffix(".html")).exists()]
    assert [page for page in missing if page.name != "README.md"] == []


def test_every_command_and_option_is_in_the_reference(site: Path) -> None:
    text = shown(site / "reference/command.html")
    assert [name for name in _commands(get_command(app), "serin") if name not in text] == []


def _commands(command: Any, path: str) -> Iterator[str]:
    yield path
    yield from (
        option for parameter in command.params for option in parameter.opts if option.startswith("--")
    )
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from _commands(child, f"{path} {name}")


def test_every_error_is_in_the_reference(site: Path) -> None:
    text = shown(site / "reference/errors.html")
    kinds = [
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.SerinError)
    ]
    assert [name for name in kinds if name not in text] == []


def test_every_name_that_the_package_offers_is_in_the_reference(site: Path) -> None:
    text = shown(site / "reference/python.html").split()
    assert [name for name in serin.__all__ if not name.startswith("_") and name not in text] == []


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loads = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^>]*>")
    found = [
        f"{page.name}: {match[0]}"
        for page in site.rglob("*.html")
        for match in loads.finditer(page.read_text())
    ]
    found += [sheet.name for sheet in site.rglob("*.css") if re.search(r"url\(\"?https?:", sheet.read_text())]
    assert found == []


@pytest.mark.parametrize("page", PROSE)
def test_lines_of_prose_are_short(page: str) -> None:
    text = re.sub(
        r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    lines = [line for line in text.splitlines() if not line.startswith("|") and "](http" not in line]
    assert [line for line in lines if len(line) > MAX_PROSE_LINE] == []


_FILE = re.compile(
    r"(?<![\w/.<-])((?:examples|deployments|docker|tests|benchmarks|flows|tasks|triton_models|serin)/[\w./-]*"
    r"\.(?:py|yaml|md|json|env|conf|service|cc|Dockerfile|ipynb))\b"
)
_OF_THE_READER = {  # files that a page tells its reader to make, and those of an installed wheel
    "deployments/systemd/secrets.env",
    "serin/features/ops/max_abs.py",
    "serin/app/deployments/prefect.yaml",
}


@pytest.mark.parametrize("page", PROSE)
def test_a_page_names_only_files_that_exist(page: str) -> None:
    named = {*_FILE.findall((ROOT / page).read_text(encoding="utf-8"))} - _OF_THE_READER
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


SECTIONS = all_sections()


def test_every_section_and_key_has_a_docstring() -> None:
    bare = [name for name, section in SECTIONS.items() if not section.summary]
    bare += [
        f"{name}.{key}"
        for name, section in SECTIONS.items()
        for key in section.model_fields
        if key not in key_descriptions(section)
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
