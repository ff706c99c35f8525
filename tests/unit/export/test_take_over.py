"""Versions between stores and beside each other: import, diff, publishers at once, publishers that die."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import onnx
import pyarrow as pa
import pytest

from serin.errors import BundleBroken
from serin.export.take_over import import_bundle
from serin.formats.bundle import read_golden, read_manifest, verify_bundle
from serin.formats.bundle_diff import diff_bundles
from serin.scoring.predict import Scorer
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.unit.export.small_dataset import make_trained


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("trained")
    return make_trained(folder, "binary").export(folder, {"run": "r1"})


def test_an_imported_version_answers_as_the_one_it_came_from_and_knows_it(
    bundle: Bundle, tmp_path: Path
) -> None:
    store = Store(str(tmp_path))
    store.reserve_version("flights")
    taken = import_bundle(Path(bundle.path), store)
    assert (taken.model, taken.version) == ("flights", 2)
    manifest = verify_bundle(Path(taken.path))
    assert manifest.lineage["imported"] == {"release": "flights-v1", "manifest": bundle.digest}
    assert manifest.lineage["dataset"] == read_manifest(Path(bundle.path)).lineage["dataset"]
    properties = {p.key: p.value for p in onnx.load(Path(taken.path, "model.onnx")).metadata_props}
    assert (properties["name"], properties["version"], properties["variant"]) == ("flights", "2", "fp32")
    golden = read_golden(Path(taken.path))
    rows = pa.table({name: values[:, 0] for name, values in golden.inputs.items()})
    np.testing.assert_array_equal(Scorer(taken.path).answers(rows)["score"], golden.outputs["score"])


def test_a_bundle_that_was_touched_is_not_imported_and_takes_no_number(
    bundle: Bundle, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", bundle.path, copy], check=True)
    (copy / "card.md").write_text("# better than it is\n")
    store = Store(str(tmp_path / "store"))
    with pytest.raises(BundleBroken, match=r"card\.md was changed"):
        import_bundle(copy, store)
    assert store.reserve_version("flights") == 1


def test_a_diff_names_what_changed_and_nothing_else(bundle: Bundle, tmp_path: Path) -> None:
    assert diff_bundles(Path(bundle.path), Path(bundle.path)) == []
    taken = import_bundle(Path(bundle.path), Store(str(tmp_path)), name="other-flights")
    found = {
        (one.part, one.what): (one.left, one.right)
        for one in diff_bundles(Path(bundle.path), Path(taken.path))
    }
    assert {part for part, _ in found} == {"lineage", "files"}
    assert found["lineage", "imported.release"] == (None, "flights-v1")
    document = json.loads(Path(taken.path, "schema.json").read_text())
    document["inputs"] = document["inputs"][1:]
    Path(taken.path, "schema.json").write_text(json.dumps(document))
    found = {(one.part, one.what): one.right for one in diff_bundles(Path(bundle.path), Path(taken.path))}
    assert found["inputs", "carrier"] is None


PUBLISHER = textwrap.dedent("""
    import os, sys
    from pathlib import Path
    from serin.formats.bundle import write_manifest
    from serin.store.places import LocalPlaces
    from serin.store.objects import FolderObjects
    from serin.store.store import Store
    root, moment, count = sys.argv[1], int(sys.argv[2]), 0
    def deadly(real):
        def step(*arguments, **options):
            global count
            count += 1
            if count == moment:
                os.kill(os.getpid(), 9)
            return real(*arguments, **options)
        return step
    os.fsync = deadly(os.fsync)
    LocalPlaces.publish = deadly(LocalPlaces.publish)
    for name in ("create", "put", "replace"):
        setattr(FolderObjects, name, deadly(getattr(FolderObjects, name)))
    os.link, Path.rename, Path.replace = deadly(os.link), deadly(Path.rename), deadly(Path.replace)
    store = Store(root)
    version = store.reserve_version("flights")
    with store.workspace() as work:
        (work / "card.md").write_text(f"version {version}")
        (work / "lookups").mkdir()
        (work / "lookups" / "planes.parquet").write_bytes(os.urandom(1000))
        write_manifest(work, name="flights", model_version=version, spec_digest="", lineage={}, metrics={})
        store.publish_bundle("flights", version, work)
    store.set_alias("flights", "live", version)
    print(version)
""")


def publish(root: str, moment: int) -> subprocess.Popen[str]:
    """A process that publishes a version and makes it live; killed at its step number `moment`, 0: never."""
    return subprocess.Popen(
        [sys.executable, "-c", PUBLISHER, root, str(moment)], stdout=subprocess.PIPE, text=True
    )


def test_a_publisher_killed_at_any_step_leaves_the_old_or_the_new_and_no_number_twice(tmp_path: Path) -> None:
    root, outcomes = str(tmp_path / "store"), []
    publish(root, 0).communicate(timeout=60)
    before = 1
    for moment in range(1, 30):
        with publish(root, moment) as publisher:
            publisher.communicate(timeout=60)
        store = Store(root)
        versions, live = store.versions("flights"), store.aliases("flights")["live"]
        numbers = sorted(int(path.name) for path in Path(root, "models/flights/numbers").glob("[0-9]*"))
        assert numbers == list(range(1, len(numbers) + 1)), "a number was lost or given out twice"
        assert live in (before, numbers[-1]), "the alias points at neither the old nor the new"
        for version in versions:
            card = Path(store.bundle("flights", version).path, "card.md").read_text()
            assert verify_bundle(Path(store.bundle("flights", version).path)).model_version == version
            assert card == f"version {version}"
        outcomes.append((numbers[-1] in versions and live != before, live == numbers[-1]))
        before = live
        if publisher.returncode == 0:
            break
        assert publisher.returncode == -9
    else:
        pytest.fail("the publisher was never left to finish")
    assert not outcomes[0][0]
    assert outcomes[-1] == (True, True)


def test_publishers_at_once_get_a_version_each(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    publishers = [publish(root, 0) for _ in range(4)]
    given = sorted(int(each.communicate(timeout=60)[0]) for each in publishers)
    assert given == [1, 2, 3, 4]
    store = Store(root)
    assert store.versions("flights") == given
    for version in given:
        assert verify_bundle(Path(store.bundle("flights", version).path)).model_version == version
    assert store.aliases("flights")["live"] in given
