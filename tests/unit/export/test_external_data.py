"""Graphs that refer to the file of the trained weights: as they answer, as they are published, served and refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from serin.errors import BundleBroken
from serin.export.convert.network import blend_graphs
from serin.export.convert.torch2onnx import torch2onnx
from serin.export.take_over import import_bundle
from serin.formats import external_data
from serin.formats.bundle import verify_bundle
from serin.formats.external_data import read_graph, references, write_graph
from serin.formats.gate import GATE
from serin.formats.trained import WEIGHTS
from serin.formats.weights import write_weights
from serin.models.build import build_model, load_model
from serin.models.shape import TableShape
from serin.scoring.explain.explainer import Explainer
from serin.scoring.predict import Scorer
from serin.scoring.session import open_session
from serin.serving.triton.backends import Server
from serin.serving.triton.gpu_memory import estimate_need
from serin.serving.triton.repository import build_repository, choose_for
from serin.spec.model import ModelSpec
from serin.spec.serving import ServingSpec
from serin.store.artifacts import Bundle
from serin.store.store import Store
from tests.unit.export.small_dataset import Trained, flights, make_trained

SHAPE = TableShape(numeric=3, sizes=(40, 70), outputs=1)
MODULE = str(Path(__file__).with_name("own_table.py")) + ":Table"


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_data, "LIMIT_BYTES", 1000)
    monkeypatch.setattr(external_data, "_LEAST_BYTES", 400)


def written(folder: Path, spec: ModelSpec) -> torch.nn.Module:
    folder.mkdir()
    torch.manual_seed(5)
    network = build_model(spec, SHAPE)
    shape = {"numeric": SHAPE.numeric, "sizes": SHAPE.sizes, "outputs": SHAPE.outputs}
    write_weights(folder, network.state_dict(), {"model": spec, "shape": shape, "task": "binary"})
    return load_model(folder)


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec(kind="mlp", hidden=(16,), numeric_scaling="robust", numeric_embedding="periodic"),
        ModelSpec(kind="dcn", hidden=(16,)),
        ModelSpec(kind="tabm", hidden=(16,), members=3),
        ModelSpec(kind="ft_transformer", embedding=16, heads=4, blocks=1),
        ModelSpec(kind="mlp", hidden=(16,), ensemble_size=2),
        ModelSpec(module=MODULE),
    ],
    ids=lambda spec: spec.kind if spec.ensemble_size == 1 else "ensemble",
)
def test_a_graph_that_refers_to_its_weights_answers_as_the_one_that_has_them(
    tmp_path: Path, spec: ModelSpec
) -> None:
    network = written(tmp_path / "result", spec)
    whole = torch2onnx(network, SHAPE)
    referring = torch2onnx(network, SHAPE, weights=tmp_path / "result" / WEIGHTS)
    assert not references(whole)
    large = {name for name, tensor in network.state_dict().items() if tensor.nbytes >= 400}
    assert {tensor.name for tensor in references(referring)} == large

    (tmp_path / "copy").mkdir()
    write_graph(referring, tmp_path / "copy" / "model.onnx")
    shutil.rmtree(tmp_path / "result")
    random = np.random.default_rng(1)
    cat = np.stack([random.integers(0, size, 9) for size in SHAPE.sizes], axis=1)
    feed = {"num": random.normal(size=(9, 3)).astype(np.float32), "cat": cat}
    (wanted,) = open_session(whole).run(["logits"], feed)
    for source in (tmp_path / "copy" / "model.onnx", read_graph(tmp_path / "copy" / "model.onnx")):
        (found,) = open_session(source).run(["logits"], feed)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_blend_brings_the_files_of_all_its_members(tmp_path: Path) -> None:
    members = []
    for name, units in (("one", 16), ("two", 24)):
        network = written(tmp_path / name, ModelSpec(kind="mlp", hidden=(units,)))
        members.append((torch2onnx(network, SHAPE, weights=tmp_path / name / WEIGHTS), 0.5))
    blend = blend_graphs(members)
    (tmp_path / "out").mkdir()
    write_graph(blend, tmp_path / "out" / "model.onnx")
    feed = {"num": np.zeros((2, 3), np.float32), "cat": np.ones((2, 2), np.int64)}
    (wanted,) = open_session(blend).run(["logits"], feed)
    (found,) = open_session(tmp_path / "out" / "model.onnx").run(["logits"], feed)
    np.testing.assert_array_equal(found, wanted)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"1-{WEIGHTS}", "model.onnx", WEIGHTS
    ]  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Bundle, Store]:
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(external_data, "LIMIT_BYTES", 1000)
        patch.setattr(external_data, "_LEAST_BYTES", 400)
        names = ["fp32", "fp16", "int8", "int8_dynamic", "int8_embeddings", "tensorrt"]
        trained = make_trained(
            folder,
            "binary",
            model={"kind": "dcn", "hidden": [16]},
            export={"target": "gpu", "variants": names},
        )
        store = Store(str(folder / "store"))
        return trained, trained.export(store), store


def test_a_bundle_has_the_weights_once_and_answers_as_the_trainer(
    published: tuple[Trained, Bundle, Store],
) -> None:
    trained, bundle, _ = published
    files = verify_bundle(Path(bundle.path)).files
    assert [name for name in files if name.endswith(WEIGHTS)] == [WEIGHTS]
    assert files[WEIGHTS].size == (Path(trained.checkpoint.path) / WEIGHTS).stat().st_size
    for name in ("model.onnx", "core.onnx"):
        assert references(read_graph(Path(bundle.path, name)))
    wanted = 1 / (1 + np.exp(-trained.logits(flights(50))))
    np.testing.assert_allclose(Scorer(bundle.path).answers(flights(50))["score"], wanted, atol=1e-5)
    explained = Explainer(bundle.path).explain(flights(50).slice(0, 5))
    assert explained.score == pytest.approx(wanted[:5], abs=1e-5)


def test_variants_that_need_the_weights_in_the_graph_are_refused_by_name(
    published: tuple[Trained, Bundle, Store],
) -> None:

    variants = json.loads(Path(published[1].path, GATE).read_text())["variants"]
    assert {one["name"]: one["status"] for one in variants if one["name"] != "fp32"} == dict.fromkeys(
        ["fp16", "int8", "int8_dynamic", "int8_embeddings", "tensorrt"], "unavailable"
    )
    assert all("in a file beside the graph" in one["reason"] for one in variants if one["name"] != "fp32")
    size = Path(published[1].path, WEIGHTS).stat().st_size
    assert next(one["bytes"] for one in variants if one["name"] == "fp32") > 0.7 * size


@pytest.mark.parametrize(
    ("backends", "settings", "gpus", "folders"),
    [
        ({"python"}, {"device": "cpu"}, (), {"flights"}),
        ({"onnxruntime", "python"}, {"device": "cpu", "backend": "onnxruntime"}, (), {"flights"}),
        ({"serin_onnx", "python"}, {"device": "cpu", "backend": "onnx_native"}, (), {"flights"}),
        ({"serin_onnx", "python"}, {"device": "gpu", "backend": "onnx_native"}, (0,), {"flights"}),
        ({"onnxruntime", "python"}, {"device": "gpu", "backend": "ensemble"}, (0,), {"flights_core"}),
    ],
)
def test_a_repository_has_the_weights_beside_the_graph_that_needs_them(
    published: tuple[Trained, Bundle, Store],
    tmp_path: Path,
    backends: set[str],
    settings: dict[str, str],
    gpus: tuple[int, ...],
    folders: set[str],
) -> None:
    _, bundle, _ = published
    server = Server(backends=frozenset(backends), accelerators=frozenset({"cuda"}))
    serving = ServingSpec.model_validate(settings)
    made = build_repository(bundle, tmp_path / "made", server=server, serving=serving, gpus=gpus)
    found = list(made.rglob(WEIGHTS))
    assert {path.parents[1].name for path in found} == folders
    for path in found:
        graphs = [one for one in path.parent.glob("*.onnx") if references(read_graph(one))]
        assert len(graphs) == 1
        open_session(graphs[0])
    if gpus:
        choice = choose_for(bundle, server=server, serving=serving, gpus=1)
        need = estimate_need(Path(bundle.path), choice, ServingSpec())
        assert need.arena_bytes >= (Path(bundle.path) / WEIGHTS).stat().st_size


def test_a_bundle_with_such_weights_is_imported_under_another_name(
    published: tuple[Trained, Bundle, Store], tmp_path: Path
) -> None:
    _, bundle, _ = published
    taken = import_bundle(Path(bundle.path), Store(str(tmp_path / "other")), name="planes")
    rows = flights(20)
    np.testing.assert_array_equal(
        Scorer(taken.path).answers(rows)["score"], Scorer(bundle.path).answers(rows)["score"]
    )


def truncate(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (Path.unlink, f"{WEIGHTS} is missing"),
        (truncate, f"{WEIGHTS} was changed after it was sealed"),
        (flip, f"{WEIGHTS} was changed after it was sealed"),
    ],
)
def test_weights_that_are_missing_or_changed_are_refused(
    published: tuple[Trained, Bundle, Store], tmp_path: Path, harm: Callable[[Path], object], words: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(published[1].path, copy)
    harm(copy / WEIGHTS)
    with pytest.raises(BundleBroken, match=words):
        Scorer(copy)
