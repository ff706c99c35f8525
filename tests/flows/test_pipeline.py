"""The whole pipeline in this process, up to a published version; rolling it out is for e2e/."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.artifacts import Artifact

from flows.pipeline import pipeline
from serin.commands.models import show_model
from serin.errors import ColumnMissing, SpecError
from serin.formats.bundle import verify_bundle
from serin.formats.reason import Reason, read_reason
from serin.store.artifacts import Release
from serin.store.store import Store
from tests.fakes.small_pipeline import NAME, small_spec, write_spec

FIRST = Release(model=NAME, version=1)


def run(spec: Any, **parameters: Any) -> Release:
    return asyncio.run(pipeline(spec, serve=False, **parameters))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> Iterator[Path]:
    """A folder with a spec whose pipeline has run once."""
    path = tmp_path_factory.mktemp("pipeline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SERIN_HOME", str(path / "home"))
        assert run(str(write_spec(path, small_spec(path / "data")))) == FIRST
        yield path


def test_a_version_is_published_and_whole(folder: Path) -> None:
    bundle = Store.open().bundle(NAME, 1)
    assert verify_bundle(Path(bundle.path)).lineage["training"].startswith("train-")
    assert bundle.metrics["test_auc"] > 0.8


@pytest.mark.parametrize(
    ("page", "words"),
    [("data", "| train | 2,391 |"), ("training", "| epoch | steps done | loss |"), ("gate", "bit for bit")],
)
def test_every_stage_leaves_a_page(folder: Path, page: str, words: str) -> None:
    artifact = Artifact.get(f"{NAME}-{page}")
    assert artifact is not None
    assert words in artifact.data
    assert "| seconds |" in artifact.data


def test_running_it_again_does_nothing_twice(folder: Path) -> None:
    trainings = sorted((folder / "home" / "runs").iterdir())
    assert run(str(folder / "spec.yaml")) == FIRST
    assert sorted((folder / "home" / "runs").iterdir()) == trainings
    assert Store.open().versions(NAME) == [1]


def test_the_spec_may_come_as_an_object(folder: Path) -> None:
    assert run(small_spec(folder / "data")) == FIRST


def test_another_monitoring_is_another_version_because_it_is_read_from_there(folder: Path) -> None:
    newest = Store.open().versions(NAME)[-1]
    other = small_spec(folder / "data", rollout={"steps": [100]}, monitoring={"retrain": ["data"]})
    assert run(other) == Release(model=NAME, version=newest + 1)
    assert run(other) == Release(model=NAME, version=newest + 1)


def test_a_wrong_spec_fails_with_every_problem_named(folder: Path) -> None:
    wrong = small_spec(folder / "data", training={"epoch": 2}, serving={"p99_ms": -1})
    with pytest.raises(SpecError, match=r"(?s)training\.epoch.*serving\.p99_ms"):
        run(wrong)


def test_a_spec_that_does_not_fit_its_table_fails_once_and_names_the_column(folder: Path) -> None:
    spec = small_spec(folder / "data")
    spec["features"][0]["columns"] = ["weigth", "distance"]
    with pytest.raises(ColumnMissing, match="did you mean 'weight'"):
        run(spec)


def test_a_relative_path_is_taken_from_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run("spec.yaml") == FIRST


def test_a_fresh_export_is_a_new_version_that_says_why_it_was_trained(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = Store.open().versions(NAME)[-1]
    reason = Reason(kind="drift", text="weight drifted since 2026-11-09 04:10 UTC", noticed=1.8e9)
    release = run(str(folder / "spec.yaml"), fresh=("export",), reason=reason.to_json())
    assert release == Release(model=NAME, version=newest + 1)
    bundle = Path(Store.open().bundle(NAME, release.version).path)
    assert read_reason(verify_bundle(bundle).lineage) == reason
    card = (bundle / "card.md").read_text()
    assert "Trained again because of drift: weight drifted since 2026-11-09 04:10 UTC." in card
    capsys.readouterr()
    show_model(NAME, str(release.version))
    assert "  reason   drift: weight drifted since 2026-11-09 04:10 UTC\n" in capsys.readouterr().out
