"""Code that a user brings counts with everything local that it imports; installed packages count by version."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from serin.spec import code_digest
from serin.spec.code_digest import digest_of_file, digest_of_module
from serin.spec.model import ModelSpec
from serin.spec.training import TrainingSpec
from serin.store.artifacts import Dataset
from serin.training.launch.run_dir import training_key

DATASET = Dataset(path="", digest="d" * 64, rows={"train": 9})
NET = "import ours.layers\nfrom beside import width\nclass Net: ...\n"
FILES = {
    "net.py": NET,
    "beside.py": "from ours.deep import tail\nwidth = 8\n",
    "ours/__init__.py": "version = 1\n",
    "ours/layers.py": "def late():\n    from .conditional import value\n    return value\n",
    "ours/conditional.py": "try:\n    from ..ours import starred\nexcept ImportError:\n    starred = None\nvalue = 3\n",
    "ours/starred.py": "from ours.many import *\n",
    "ours/many/__init__.py": "__all__ = ['one']\n",
    "ours/many/one.py": "one = 1\n",
    "ours/deep/tail.py": "import importlib\nquoted = importlib.import_module('ours.quoted')\n",  # no __init__ there
    "ours/quoted.py": "value = 4\n",
    "unused.py": "value = 5\n",
}
STARRED = ("ours/many/__init__.py", "ours/many/one.py", "ours/starred.py")


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Code that is found from the working folder and from sys.path."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def keys_of_own_code(folder: Path) -> dict[str, str]:
    """A training's key for each way to bring code."""
    script = folder / "train.py"
    script.write_text("import net\n")
    models = {
        "module by name": ModelSpec(module="net:Net"),
        "module by file": ModelSpec(module=f"{folder / 'net.py'}:Net"),
        "script": ModelSpec(script=str(script)),
    }
    return {how: training_key(model, TrainingSpec(), DATASET) for how, model in models.items()}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_changed_byte_in_anything_that_is_imported_is_another_training(folder: Path, name: str) -> None:
    before = keys_of_own_code(folder)
    (folder / name).write_text(FILES[name] + "#\n")
    after = keys_of_own_code(folder)
    changed = {how for how in before if before[how] != after[how]}
    assert changed == (set() if name == "unused.py" else set(before))


def test_a_changed_operator_and_what_it_imports_make_another_dataset(folder: Path) -> None:
    operator = (
        "from ours.layers import late\nclass Op:\n    makes, reads = 'numeric', 'numbers'\n"
        "    transform = to_onnx = describe = to_json = from_json = late\n"
    )
    (folder / "own.py").write_text(operator)
    asked = "import sys; from serin.spec.steps.operators import fingerprint; print(fingerprint('own:Op'))"

    def mark() -> str:
        done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
        return done.stdout

    marks = [mark(), mark()]
    for name in ("own.py", "ours/conditional.py"):
        (folder / name).write_text((folder / name).read_text() + "#\n")
        marks.append(mark())
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3


def test_code_keeps_its_digest_in_another_folder_and_when_it_is_touched(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("elsewhere")
    write_files(other)
    before = digest_of_file(folder / "net.py")
    (folder / "net.py").touch()
    assert digest_of_file(folder / "net.py") == before
    assert code_digest.closure_of_files([other / "net.py"], [other]).digest() == before


def test_a_relative_import_is_named_below_the_root_of_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One root may be within another: `src` in the working folder, and what a package has of other places."""
    places = {"here": ".", "src": "src", "package": "imports"}
    digests, names = set(), set()
    for place, root in places.items():
        write_files(tmp_path / place / root)
        monkeypatch.chdir(tmp_path / place)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / place / root))
            closure = code_digest.closure_of_module("ours.layers")
        digests.add(closure.digest())
        names.add(tuple(sorted(closure.files)))
    assert names == {("ours/__init__.py", "ours/conditional.py", "ours/layers.py", *STARRED)}
    assert len(digests) == 1


def test_nothing_is_run_and_broken_code_has_a_digest(folder: Path) -> None:
    (folder / "loud.py").write_text("raise SystemExit('it was run')\n")
    (folder / "bad.py").write_text("import loud\ndef (:\n")
    assert digest_of_module("loud") != digest_of_module("bad")
    assert {"loud", "bad"} & sys.modules.keys() == set()


def test_a_module_that_appears_is_noticed(folder: Path) -> None:
    (folder / "hopeful.py").write_text("try:\n    import appears\nexcept ImportError: ...\n")
    before = digest_of_module("hopeful")
    (folder / "appears.py").write_text("")
    assert digest_of_module("hopeful") != before


def distribution(version: str, *, requires: list[str] | None = None, **texts: str) -> SimpleNamespace:
    name = {"Name": "some"}
    return SimpleNamespace(version=version, requires=requires, read_text=texts.get, metadata=name)


@pytest.mark.parametrize(
    "other",
    [
        {"some": distribution("1.1", requires=["other>=1"]), "other": distribution("2.0")},
        {"some": distribution("1.0", requires=["other>=1"]), "other": distribution("2.1")},
        {
            "some": distribution(
                "1.0", requires=["other>=1"], **{"direct_url.json": "{}", "RECORD": "some.py,sha256=1,1"}
            ),
            "other": distribution("2.0"),
        },
    ],
    ids=["its version", "a version it requires", "its content, when it came from no index"],
)
def test_an_installed_package_counts_by_version(
    folder: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, SimpleNamespace]
) -> None:
    (folder / "uses.py").write_text("import some\n")
    one = {"some": distribution("1.0", requires=["other>=1"]), "other": distribution("2.0")}

    def digest(installed: dict[str, SimpleNamespace]) -> str:
        find: Callable[[str], SimpleNamespace] = installed.__getitem__
        monkeypatch.setattr("importlib.metadata.distribution", find)
        code_digest._with_requirements.cache_clear()
        return digest_of_module("uses")

    before = digest(one)
    assert digest(one) == before
    assert digest(other) != before
    monkeypatch.undo()
    code_digest._with_requirements.cache_clear()


def test_a_package_installed_for_editing_counts_by_its_files(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finder knows where it lies; no folder of sys.path does."""
    import importlib.machinery
    import importlib.util

    place = tmp_path_factory.mktemp("checkout") / "edited"
    place.mkdir()
    (place / "__init__.py").write_text("")
    (place / "inner.py").write_text("one = 1\n")
    (folder / "uses.py").write_text("import edited.inner\n")
    real = importlib.util.find_spec

    def find(name: str) -> importlib.machinery.ModuleSpec | None:
        if name != "edited":
            return real(name)
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(place)]
        return spec

    monkeypatch.setattr(importlib.util, "find_spec", find)
    before = digest_of_module("uses")
    (place / "inner.py").write_text("one = 2\n")
    assert digest_of_module("uses") != before


def test_what_only_a_type_checker_imports_does_not_count(tmp_path: Path) -> None:
    guarded = "if typing.TYPE_CHECKING:\n    import types_only\nelse:\n    import other\n"
    (tmp_path / "net.py").write_text(f"{guarded}if not TYPE_CHECKING:\n    import real\n")
    for name in ("types_only", "other", "real"):
        (tmp_path / f"{name}.py").touch()
    found = code_digest.closure_of_files([tmp_path / "net.py"], [tmp_path])
    assert sorted(found.files) == ["net.py", "other.py", "real.py"]
