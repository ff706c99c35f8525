"""No result may be stale: whatever a stage's result may depend on changes the stage's key."""

import ast
import importlib
import importlib.metadata
import inspect
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from serin.spec.pipeline import PipelineSpec
from serin.store import stage_keys
from serin.store.stage_keys import STAGES
from tests.unit import key_walk
from tests.unit.key_walk import ALL, EFFECTS, NOT_DECIDING, NOT_IN, PACKAGE


@pytest.fixture
def versions() -> Iterator[None]:
    stage_keys.versions.cache_clear()
    yield
    stage_keys.versions.cache_clear()


def test_it_is_said_of_every_key_of_the_spec_what_it_may_change() -> None:
    keys = set(key_walk.leaves(PipelineSpec))
    assert keys - EFFECTS.keys() == set(), "add them to _EFFECTS in tests/unit/key_walk.py, with the stages"
    assert EFFECTS.keys() - keys == set(), "there is no such key any more"


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # some values are of another type than the key has
def test_every_key_of_the_spec_changes_the_keys_of_the_stages_it_may_change(tmp_path: Path) -> None:
    base = key_walk.whole_spec()
    before = key_walk.stage_keys_of(base, tmp_path)
    stale = []
    for path, spec in key_walk.spec_changes():
        after = key_walk.stage_keys_of(spec, tmp_path)
        found = {stage for stage in STAGES if before[stage] != after[stage]}
        if not found >= EFFECTS.get(path, ALL) and path != "features.steps.normalize":
            stale.append((path, sorted(found)))
    assert stale == []


@pytest.mark.parametrize("path", ["data.tables", "data.derived"])
def test_the_order_of_what_has_an_order_changes_the_keys(tmp_path: Path, path: str) -> None:
    spec = key_walk.whole_spec()
    name = path.partition(".")[2]
    turned = dict(reversed(getattr(spec.data, name).items()))
    other = spec.model_copy(update={"data": spec.data.model_copy(update={name: turned})})
    assert key_walk.changed_stages(spec, other, tmp_path) == ALL


def test_a_stage_gets_nothing_but_text_from_a_page() -> None:
    """So that a page cannot decide a result: its functions return text or nothing, its classes only hold values."""
    imported = {
        (node.module, alias.name)
        for stage in ("etl", "export", "training")
        for path in (PACKAGE / stage).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("serin.reports")
        for alias in node.names
    }
    assert imported
    for module, name in sorted(imported):
        found = getattr(importlib.import_module(module), name)
        if inspect.isfunction(found):
            assert get_type_hints(found)["return"] in (str, type(None)), f"{module}.{name}"
        elif inspect.isclass(found):
            assert found.__dataclass_params__.frozen, f"{module}.{name}"


@pytest.mark.parametrize("stage", STAGES)
def test_every_library_that_a_stage_uses_is_in_its_key_or_decides_nothing(stage: str) -> None:
    used = key_walk.computed_by(stage).libraries
    assert used & set(STAGES[stage].libraries)
    assert used - set(STAGES[stage].libraries) - NOT_DECIDING.keys() - NOT_IN[stage] == set()


@pytest.mark.parametrize("stage", STAGES)
def test_another_version_of_any_library_of_a_stage_changes_its_key(
    stage: str, monkeypatch: pytest.MonkeyPatch, versions: None
) -> None:
    del versions
    names = STAGES[stage].libraries
    called = [also for name in names for also in (name, *stage_keys._ALSO_CALLED.get(name, ()))]
    installed = dict.fromkeys(called, "1.0")
    monkeypatch.setattr(importlib.metadata, "version", installed.__getitem__)
    seen = {stage_keys.made_by(stage)}
    for count, name in enumerate(called, 1):
        installed[name] = "1.1"
        stage_keys.versions.cache_clear()
        seen.add(stage_keys.made_by(stage))
        assert len(seen) == count + 1, name
    monkeypatch.setattr("platform.python_version", lambda: "3.99.0")
    stage_keys.versions.cache_clear()
    assert stage_keys.made_by(stage) not in seen


def test_the_users_code_changes_the_keys_of_the_stages_that_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copyfile(Path(__file__).parents[1] / "fakes" / "own_operators.py", tmp_path / "walked_own.py")
    (tmp_path / "walked_net.py").write_text("import walked_deep\n")
    (tmp_path / "walked_deep.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = key_walk.whole_spec()
    model = spec.model.model_copy(update={"module": "walked_net:Net", "kind": "module"})
    spec = spec.model_copy(update={"model": model})
    before = key_walk.stage_keys_of(spec, tmp_path)
    (tmp_path / "walked_deep.py").write_text("#")
    after = key_walk.stage_keys_of(spec, tmp_path)
    assert {stage for stage in STAGES if before[stage] != after[stage]} == {"train", "export"}
    monkeypatch.setattr("serin.spec.features.FeatureSpec.operators", {"walked_own:Op": "another digest"})
    last = key_walk.stage_keys_of(spec, tmp_path)
    assert {stage for stage in STAGES if after[stage] != last[stage]} == ALL
    os.utime(tmp_path / "walked_deep.py")
    assert key_walk.stage_keys_of(spec, tmp_path) == last
