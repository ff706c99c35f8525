"""A real MLflow server: versions are registered there, aliases follow rollouts, and ONNX models come from there."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

from serin.errors import ExportFailed, NameInvalid, SpecError
from serin.export.registry import CANDIDATE, CHAMPION, follow, track_bundle
from serin.formats.bundle import read_golden
from serin.machine.ports import free_ports
from serin.pipeline.import_registered import How, import_registered
from serin.rollout.decide.plan import Plan
from serin.scoring.session import open_session
from serin.store.artifacts import Bundle
from serin.store.store import Store
from serin.watcher import registry_duty
from serin.watcher.registry_duty import RegistryDuty
from tests.fakes.onnx_graphs import linear
from tests.fakes.rollout import FakeVersions
from tests.kit.commands import serin_main
from tests.kit.mlflow_server import mlflow_server
from tests.kit.waiting import until
from tests.logs import heard
from tests.unit.export.small_dataset import Trained, make_trained
from tests.unit.rollout.conftest import Scene

PLAN = Plan(steps=(50.0, 100.0), step_s=1.0, min_requests=1, bake_s=1.0, drain_s=1.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_trained(tmp_path_factory.mktemp("trained"), "binary")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


@pytest.fixture
def client(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    return MlflowClient(tracking_uri=server)


@pytest.fixture
def store(home: Path) -> Store:
    return Store.open()


def export(trained: Trained, store: Store, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """A version that MLflow has not heard of."""
    with monkeypatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        return trained.export(store, {"run": "r", "dataset": "?"})


def forget(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.delete_registered_model(name)
    except MlflowException:
        return


def aliases(client: Any, model: str) -> dict[str, str]:
    return {name: str(number) for name, number in client.get_registered_model(model).aliases.items()}


def test_a_published_version_is_registered_with_its_signature_metrics_and_graph(
    client: Any, trained: Trained, store: Store, tmp_path: Path
) -> None:
    forget(client, "flights")
    said: list[str] = []
    with heard(said.append):
        bundle = trained.export(store, {"run": "r", "dataset": "?"})
    assert said[-1] == "flights version 1 is version 1 of flights in MLflow"
    found = client.get_model_version("flights", "1")
    assert found.tags["serin.manifest"] == bundle.digest
    assert found.tags["metric.valid_auc"] == "0.5"
    assert client.get_run(found.run_id).data.metrics["model.valid_auc"] == 0.5

    import mlflow
    from mlflow.models import Model, get_model_info

    mlflow.set_tracking_uri(client.tracking_uri)
    signature = get_model_info("models:/flights/1").signature
    assert [each.name for each in signature.outputs.inputs] == ["score"]
    assert {each.name: str(each.type) for each in signature.inputs.inputs}["carrier"] == "object"
    folder = Path(mlflow.artifacts.download_artifacts("models:/flights/1", dst_path=str(tmp_path)))
    graph = folder / Model.load(str(folder)).flavors["onnx"]["data"]
    golden = read_golden(Path(bundle.path))
    scores = open_session(onnx.load(graph)).run(["score"], golden.inputs)[0]
    np.testing.assert_array_equal(scores, golden.outputs["score"])
    track_bundle(bundle, trained.checkpoint)
    assert len(client.search_model_versions("name='flights'")) == 1, "registered once"


def test_aliases_are_set_moved_and_removed_and_versions_registered_late(
    client: Any, trained: Trained, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(client, "flights")
    bundles = [export(trained, store, monkeypatch) for _ in range(2)]
    follow(client, store, "flights", {CHAMPION: None, CANDIDATE: 1})
    first = client.get_model_version_by_alias("flights", "candidate")
    assert first.tags["serin.manifest"] == bundles[0].digest
    follow(client, store, "flights", {CHAMPION: 1, CANDIDATE: 2})
    second = client.get_model_version_by_alias("flights", "candidate")
    assert second.tags["serin.manifest"] == bundles[1].digest
    assert aliases(client, "flights") == {"champion": first.version, "candidate": second.version}
    for _ in range(2):
        follow(client, store, "flights", {CHAMPION: 2, CANDIDATE: None})
        assert aliases(client, "flights") == {"champion": second.version}
    follow(client, store, "flights", {CHAMPION: 7, CANDIDATE: None})
    assert aliases(client, "flights") == {}, "version 7 is not in the store"
    follow(client, store, "unknown", {CHAMPION: None, CANDIDATE: None})
    assert len(client.search_model_versions("name='flights'")) == 2


@pytest.mark.timeout(1200)
def test_aliases_follow_a_rollout_and_catch_up_with_a_server_that_was_away(
    home: Path, tmp_path: Path, trained: Trained, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    (port,) = free_ports(1)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for _ in range(2):
        trained.export(store, {"run": "r", "dataset": "?"})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    scene = Scene(home, versions=FakeVersions({"flights": [1, 2]}))
    scene.promote_first(model="flights")
    monkeypatch.setattr(registry_duty, "_FIRST_S", 0.5)
    monkeypatch.setattr(registry_duty, "_LONGEST_S", 2.0)
    duty, failed = RegistryDuty(home), list[str]()
    monkeypatch.setattr(registry_duty.log, "warning", lambda text, *given: failed.append(text % given))
    slowest = 0.0

    def turn() -> None:
        nonlocal slowest
        began = time.perf_counter()
        duty.tick(time.time())
        slowest = max(slowest, time.perf_counter() - began)

    def failed_twice() -> bool:
        turn()
        return len(failed) >= 2

    until(failed_twice, "two attempts without a server", every_s=0.1, within_s=300)
    assert "MLflow's aliases are set later" in failed[0]
    scene.command("start", 2, model="flights", plan=PLAN)
    scene.tick()
    with mlflow_server(tmp_path / "mlflow", port):
        from mlflow.tracking import MlflowClient

        client = MlflowClient(tracking_uri=f"http://127.0.0.1:{port}")

        def names() -> dict[str, str]:
            turn()
            from mlflow.exceptions import MlflowException

            try:
                numbers = aliases(client, "flights")
            except MlflowException:
                return {}
            return {
                alias: client.get_model_version("flights", number).tags["serin.release"]
                for alias, number in numbers.items()
            }

        wanted = {"champion": "flights-v1", "candidate": "flights-v2"}
        until(lambda: names() == wanted, "both aliases", every_s=0.1, within_s=300, said=lambda: failed)
        scene.command("abort", model="flights", why="a test")
        for _ in range(20):
            scene.tick()
        until(
            lambda: names() == {"champion": "flights-v1"},
            "no candidate",
            every_s=0.1,
            within_s=300,
            said=lambda: failed,
        )
    duty.close()
    scene.kill()
    print(f"the slowest tick of the duty took {1000 * slowest:.0f} ms")
    assert slowest < 5.0, "a server that is away holds up the watcher"


def log_onnx(client: Any, name: str, *, example: bool = True) -> str:
    """Logs and registers a graph as any other program would: files, MLmodel, a registered version."""
    model = linear(np.array([[1.0], [2.0], [-1.0]], np.float32))
    files: dict[str, bytes] = {"model.onnx": model.SerializeToString()}
    flavors = {"onnx": {"data": "model.onnx"}, "python_function": {"loader_module": "mlflow.onnx"}}
    description: dict[str, Any] = {"flavors": flavors}
    if example:
        files["serving_input_example.json"] = json.dumps({"inputs": [[1, 2, 3], [0, 0, 1]]}).encode()
        description["saved_input_example_info"] = {"serving_input_path": "serving_input_example.json"}
    return register(client, name, files, description)


def register(client: Any, name: str, files: dict[str, bytes], description: dict[str, Any]) -> str:
    run = client.create_run("0")
    with tempfile.TemporaryDirectory() as scratch:
        for file, content in {**files, "MLmodel": yaml.safe_dump(description).encode()}.items():
            (Path(scratch) / file).write_bytes(content)
        client.log_artifacts(run.info.run_id, scratch, "m")
    forget(client, name)
    client.create_registered_model(name)
    return str(client.create_model_version(name, f"{run.info.artifact_uri}/m", run.info.run_id).version)


def test_an_onnx_model_of_mlflow_becomes_a_version_that_answers_as_it_does(
    client: Any, home: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    number = log_onnx(client, "Sentiment_Model")
    client.set_registered_model_alias("Sentiment_Model", "ready", number)
    assert serin_main("models", "import", "models:/Sentiment_Model@ready", "--task", "binary") == 0
    assert "sentiment-model version 1 in" in capsys.readouterr().out
    bundle = store.bundle("sentiment-model", 1)
    session = open_session(onnx.load(Path(bundle.path) / "model.onnx"))
    scores = session.run(["score"], {"x": np.array([[1, 2, 3], [0, 0, 1]], np.float32)})[0]
    np.testing.assert_allclose(scores[:, 0], 1 / (1 + np.exp([-2.0, 1.0])), rtol=1e-5)
    again = import_registered(
        f"models:/Sentiment_Model/{number}", store, How(task="regression"), name="other"
    )
    assert (again.model, again.version) == ("other", 1)
    assert client.get_model_version_by_alias("Sentiment_Model", "ready").version == number


@pytest.mark.filterwarnings("ignore:.*Any type hint is inferred")
def test_a_model_whose_weights_mlflow_stores_in_another_file_becomes_a_version(
    client: Any, home: Path, store: Store, tmp_path: Path
) -> None:
    """By default it does so with tensors from 1 KiB on."""
    import mlflow.onnx

    weights = np.linspace(-1.0, 1.0, 512, dtype=np.float32).reshape(512, 1)
    rows = np.random.default_rng(1).normal(size=(3, 512)).astype(np.float32)
    mlflow.onnx.save_model(linear(weights), str(tmp_path / "m"))
    names = {path.name for path in (tmp_path / "m").iterdir()}
    assert any(name.endswith(".data") for name in names)
    run = client.create_run("0")
    client.log_artifacts(run.info.run_id, str(tmp_path / "m"), "m")
    forget(client, "wide")
    client.create_registered_model("wide")
    number = client.create_model_version("wide", f"{run.info.artifact_uri}/m", run.info.run_id).version
    np.savez(tmp_path / "rows.npz", x=rows)
    how = How(task="regression", golden=tmp_path / "rows.npz")
    bundle = import_registered(f"models:/wide/{number}", store, how)
    session = open_session(onnx.load(Path(bundle.path) / "model.onnx"))
    np.testing.assert_allclose(session.run(None, {"x": rows})[0][:, 0], (rows @ weights)[:, 0], rtol=1e-4)


@pytest.mark.parametrize(
    ("how", "reason"),
    [(How(), "--task binary, multiclass or regression"), (How(task="binary"), "--golden rows.npz")],
)
def test_what_a_graph_does_not_say_is_asked_for(
    client: Any, home: Path, store: Store, how: How, reason: str
) -> None:
    number = log_onnx(client, "bare", example=False)
    with pytest.raises(ExportFailed, match=reason):
        import_registered(f"models:/bare/{number}", store, how)
    assert store.models() == []


def test_a_pickle_is_refused_before_any_of_it_is_fetched(
    client: Any, home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    flavors = {
        "sklearn": {"pickled_model": "model.pkl"},
        "python_function": {"loader_module": "mlflow.sklearn"},
    }
    number = register(client, "forest", {"model.pkl": b"cos\nsystem\n"}, {"flavors": flavors})
    fetched: list[str] = []
    import mlflow.artifacts

    download = mlflow.artifacts.download_artifacts

    def watched(**given: Any) -> str:
        fetched.append(given["artifact_uri"])
        return str(download(**given))

    monkeypatch.setattr(mlflow.artifacts, "download_artifacts", watched)
    with pytest.raises(ExportFailed, match="sklearn, whose files are pickles"):
        import_registered(f"models:/forest/{number}", store, How(task="binary"))
    assert fetched == [f"models:/forest/{number}/MLmodel"]
    assert store.models() == []


def test_a_version_that_serin_registered_comes_back_as_it_was(
    client: Any, trained: Trained, store: Store, tmp_path: Path
) -> None:
    forget(client, "flights")
    bundle = trained.export(store, {"run": "r", "dataset": "?"})
    other = Store(str(tmp_path / "other"))
    found = import_registered("models:/flights/1", other, How(), name="copied")
    assert (found.model, found.version) == ("copied", 1)
    ours, theirs = read_golden(Path(bundle.path)), read_golden(Path(found.path))
    np.testing.assert_array_equal(ours.outputs["score"], theirs.outputs["score"])


def test_what_is_not_there_is_said(
    client: Any, home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ExportFailed, match="MLflow at http"):
        import_registered("models:/nothing/1", store, How(task="binary"))
    with pytest.raises(SpecError, match="models:/NAME/VERSION"):
        import_registered("models:/nothing", store, How(task="binary"))
    number = log_onnx(client, "1strange")
    with pytest.raises(NameInvalid):
        import_registered(f"models:/1strange/{number}", store, How(task="binary"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(SpecError, match="MLFLOW_TRACKING_URI"):
        import_registered("models:/nothing/1", store, How(task="binary"))
