"""What the README and the docs say is so."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify
from typer.main import get_command

from serin.cli import app
from serin.commands.suggest import MEANT
from serin.spec.load import load_spec
from serin.spec.yaml_file import read_yaml
from tests.architecture.sources import ROOT, repository_files
from tests.kit.commands import run

PAGES = [name for name in repository_files() if name.endswith(".md")]
RUN_ELSEWHERE = [
    "docs/how-to/call-a-model.md",  # behind a gateway, in tests/e2e/test_client.py
]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_the_tree_of_the_architecture_page_is_the_real_one() -> None:
    top, core = _tree()
    assert set(top) == _entries("")
    assert set(core) == _entries("serin/") - {"__init__.py"}


def test_the_tree_names_every_room_of_a_folder() -> None:
    top, core = _tree()
    named = {name: _rooms(text) for name, text in top.items() if name.endswith("/") and _rooms(text)}
    named |= {f"serin/{name}": _rooms(text) for name, text in core.items() if name.endswith("/")}
    real = {folder: {name for name in _entries(folder) if name.endswith("/")} for folder in named}
    assert named == real


def _tree() -> tuple[dict[str, str], dict[str, str]]:
    """What the page says of each entry of the root, and of each entry of serin/."""
    shown = next(block for block in blocks("docs/architecture.md", "text") if block.startswith("README.md"))
    top: dict[str, str] = {}
    core: dict[str, str] = {}
    for line in shown.splitlines():
        name, _, text = line.strip().partition(" ")
        (core if line.startswith("  ") else top)[name] = text.strip()
    return top, core


def _entries(folder: str) -> set[str]:
    inside = [name.removeprefix(folder) for name in repository_files() if name.startswith(folder)]
    return {f"{name.split('/')[0]}/" if "/" in name else name for name in inside}


def _rooms(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w./-])([\w.-]+/)(?=[\s,;:|)]|$)", text))


def test_the_readme_names_the_two_commands() -> None:
    commands = "\n".join(blocks("README.md", "bash"))
    assert "make demo" in commands
    assert "make test" in commands


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


def test_every_promise_of_the_readme_names_a_command_of_the_repository() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = text[text.index("| promise |") :].partition("\n\n")[0].splitlines()[2:]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows
    assert [row for row in rows if not _shown(row, targets)] == []


def _shown(row: str, targets: list[str]) -> bool:
    """Whether the last cell has commands, and each runs a target, a module, a test or a `serin` command that exists."""
    commands = re.findall(r"`([^`]+)`", row.split("|")[-2])
    return bool(commands) and all(_runs(shlex.split(command), targets) for command in commands)


def _runs(words: list[str], targets: list[str]) -> bool:
    if words[0] == "make":
        return words[1] in targets
    if words[0] == "serin":
        return _known(shlex.join(words))
    paths = words[1:] if words[0] == "pytest" else [words[2].replace(".", "/")]
    return all((ROOT / path).exists() or (ROOT / f"{path}.py").exists() for path in paths)


def test_the_start_page_explains_every_extra_that_users_install() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    table = text[text.index("| extra |") :].partition("\n\n")[0]
    explained = {
        name for row in table.splitlines()[2:] for name in re.findall(r"`([\w-]+)`", row.split("|")[1])
    }
    assert explained == project["optional-dependencies"].keys() - {"dev", "docs", "examples"}


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/")])
def test_every_link_inside_the_repository_leads_somewhere(page: str) -> None:
    """Links of docs/ are checked when the site is built (test_docs.py): some lead to generated pages."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [target for target in targets if not _leads_somewhere(page, target)] == []


def _leads_somewhere(page: str, target: str) -> bool:
    file, _, anchor = target.partition("#")
    found = (ROOT / page).parent / file if file else ROOT / page
    if not anchor or not found.is_file():
        return found.exists()
    headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
    return anchor in [slugify(heading, "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_is_shown_exists_with_its_options(page: str) -> None:
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    shown = re.findall(r"`(serin [^`]+)`", (ROOT / page).read_text(encoding="utf-8")) + lines
    unknown = [line for line in shown if line.startswith("serin ") and not _known(line)]
    assert unknown == []


def test_every_command_that_a_suggestion_names_exists() -> None:
    named = [line for text in MEANT.values() for line in re.findall(r"`(serin [^`]+)`", text)]
    assert len(named) >= len(MEANT)
    assert [line for line in named if not _known(line)] == []


def _known(line: str) -> bool:
    """Follows the words to a command, then looks for each option among its own."""
    words = shlex.split(line, comments=True)[1:]
    command = get_command(app)
    options = {option for parameter in command.params for option in parameter.opts}
    for word in words:
        children = getattr(command, "commands", {})
        if word.startswith("-"):
            if word.split("=")[0] not in options | {"--help", "-h"}:
                return False
        elif children:
            if word not in children:
                return False
            command = children[word]
            options |= {
                option
                for parameter in command.params
                for option in (*parameter.opts, *parameter.secondary_opts)
            }
    return True


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page not in RUN_ELSEWHERE]
)
def test_every_piece_of_python_that_is_shown_runs(page: str, tmp_path: Path) -> None:
    for block in blocks(page, "python"):
        run(sys.executable, "-c", block, cwd=tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_every_whole_spec_that_is_shown_is_a_good_one(page: str) -> None:
    for block in blocks(page, "yaml"):
        raw = read_yaml(block)
        if "name" in raw:
            load_spec(raw)


def test_every_example_s_spec_is_a_good_one() -> None:
    specs = [name for name in repository_files() if re.fullmatch(r"examples/[^/]+/spec\.yaml", name)]
    assert specs
    for name in specs:
        spec = load_spec(ROOT / name)
        files = [*spec.data.tables.values(), spec.model.script]
        assert all(Path(file).is_absolute() for file in files if file is not None)


def test_every_decision_is_listed() -> None:
    files = {Path(name).name for name in repository_files() if re.fullmatch(r"docs/adr/\d{4}-.*\.md", name)}
    assert files == set(
        re.findall(r"\((\d{4}-[^)]+\.md)\)", (ROOT / "docs/adr/README.md").read_text(encoding="utf-8"))
    )
