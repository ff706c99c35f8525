"""The last step of an export: the files that every bundle has, its manifest, and one rename into the store."""

from __future__ import annotations

import importlib.util
import json
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from serin.errors import ExtraMissing
from serin.export.gate.gate import library_versions
from serin.formats.bundle import write_manifest
from serin.formats.champion import ChampionReport
from serin.formats.gate import GATE, GateReport
from serin.formats.schema import Schema, write_schema
from serin.machine import environment
from serin.machine.documents import write_facts
from serin.machine.stopping import check_stopped
from serin.spec.pipeline import PipelineSpec
from serin.store.artifacts import Bundle, Checkpoint, Release
from serin.store.store import Store
from serin.store.trust import sign_if_configured


def publish_version(
    spec: PipelineSpec,
    release: Release,
    checkpoint: Checkpoint,
    *,
    store: Store,
    lineage: Mapping[str, Any],
    schema: Schema,
    report: GateReport,
    champion: ChampionReport,
    card: str,
    fill: Callable[[Path], None],
) -> Bundle:
    """Publishes a version, whole or not at all. `fill` writes the graphs, the golden rows and what else the kind of
    model needs into a folder."""
    with store.workspace() as work:
        fill(work)
        (work / "spec.yaml").write_text(spec.to_yaml(), encoding="utf-8")
        write_schema(work, schema)
        write_facts(work / "metrics.json", {"format": "serin.metrics", **checkpoint.metrics})
        write_facts(work / GATE, report.to_json(library_versions()))
        write_facts(work / "champion.json", champion.to_json())
        (work / "card.md").write_text(card, encoding="utf-8")
        bundle = seal_bundle(
            store, release, work, spec_digest=spec.digest(), lineage=lineage, metrics=checkpoint.metrics
        )
    logger.info(f"published {release.name}")
    track_bundle(bundle, checkpoint)
    return bundle


def seal_bundle(
    store: Store,
    release: Release,
    work: Path,
    *,
    spec_digest: str,
    lineage: Mapping[str, Any],
    metrics: Mapping[str, float],
) -> Bundle:
    """Writes the manifest of the files in `work`, signs it where that is configured, and moves them into the store."""
    write_manifest(
        work,
        name=release.model,
        model_version=release.version,
        spec_digest=spec_digest,
        lineage=lineage,
        metrics=metrics,
    )
    check_stopped()
    sign_if_configured(store, release.model, release.version, work)
    return store.publish_bundle(release.model, release.version, work)


# The store has all of it in any case: an MLflow that does not answer is reported, and the version stays published.
def track_bundle(bundle: Bundle, checkpoint: Checkpoint) -> None:
    """Logs the version to the run of its training if that was tracked, else to a separate run."""
    uri = environment.text("MLFLOW_TRACKING_URI")
    if uri is None:
        return
    if importlib.util.find_spec("mlflow") is None:
        raise ExtraMissing(package="mlflow-skinny", extra="mlflow")
    from mlflow.exceptions import MlflowException  # here, because it takes seconds to import
    from mlflow.tracking import MlflowClient

    try:
        run = _log(MlflowClient(tracking_uri=uri), bundle, checkpoint)
    except (MlflowException, OSError) as error:  # requests' errors are OSErrors
        first = next(iter(str(error).splitlines()), type(error).__name__)
        logger.info(
            f"MLflow did not accept the version: {first}; it is published nevertheless, in {bundle.path}"
        )
    else:
        logger.info(f"{bundle.model} version {bundle.version} is logged as a model of MLflow run {run}")


def _log(client: Any, bundle: Bundle, checkpoint: Checkpoint) -> str:
    run = _run_of(client, bundle, checkpoint)
    where = f"{bundle.model}-v{bundle.version}"
    folder = Path(bundle.path)
    client.log_artifacts(run, str(folder), where)
    with tempfile.TemporaryDirectory(prefix="serin-mlflow-") as scratch:
        description = Path(scratch, "MLmodel")
        description.write_text(yaml.safe_dump(_description(run, where, bundle), sort_keys=False))
        client.log_artifact(run, str(description), where)
    gate = json.loads((folder / "gate.json").read_text(encoding="utf-8"))
    numbers = {f"model.{name}": value for name, value in bundle.metrics.items()}
    for one in gate.get("variants", ()):
        for key in ("bytes", "mix_us", "drop"):
            if one.get(key) is not None:
                numbers[f"variant.{one['name']}.{key}"] = one[key]
    for name, value in numbers.items():
        client.log_metric(run, name, float(value), step=bundle.version)
    client.set_tag(run, "serin.release", where)
    client.set_tag(run, "serin.manifest", bundle.digest)
    client.set_tag(run, "serin.variant", gate.get("chosen", ""))
    return run


def _run_of(client: Any, bundle: Bundle, checkpoint: Checkpoint) -> str:
    file = Path(checkpoint.path).parent / "mlflow.json"
    if file.is_file():
        return str(json.loads(file.read_text(encoding="utf-8"))["run"])
    name = environment.mlflow_experiment()
    experiment = client.get_experiment_by_name(name)
    known = experiment.experiment_id if experiment else client.create_experiment(name)
    run = client.create_run(known, run_name=f"{bundle.model}-v{bundle.version}")
    client.set_terminated(run.info.run_id)
    return str(run.info.run_id)


def _description(run: str, where: str, bundle: Bundle) -> dict[str, Any]:
    """Returns MLflow's own file about a model, which `mlflow.onnx.load_model` reads."""
    import mlflow
    import onnx

    return {
        "artifact_path": where,
        "flavors": {
            "onnx": {
                "onnx_version": onnx.__version__,
                "data": "model.onnx",
                "providers": ["CPUExecutionProvider"],
            },
            "serin": {"release": where, "manifest_sha256": bundle.digest},
        },
        "mlflow_version": mlflow.__version__,
        "run_id": run,
    }


logger = logging.getLogger(__name__)
