"""Versions in MLflow: each is logged as a model and registered, and the aliases `champion` and `candidate` follow the
rollouts.

The store has all of it in any case, and nothing here decides anything. An MLflow that does not answer is reported; a
version stays published, and `follow` registers it later. All of it may be repeated.

`python -m serin.export.registry PARENT_PID` is a process of the watcher: MLflow takes seconds to import.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from serin.errors import NotFound
from serin.formats.bundle import read_manifest
from serin.formats.schema import DType, InputColumn, OutputTensor, read_schema
from serin.machine import environment
from serin.machine.mlflow_client import Client, first_line, mlflow_uri, open_client
from serin.machine.parent_death import die_with_parent
from serin.store.artifacts import Bundle, Checkpoint
from serin.store.store import Store

logger = logging.getLogger(__name__)

Aliases = Mapping[str, int | None]  # by MLflow's name of the alias, the version of the store
CHAMPION, CANDIDATE = "champion", "candidate"
_GRAPH: Final = "model.onnx"
_MANIFEST, _RELEASE = "serin.manifest", "serin.release"
_DTYPES: Final[Mapping[DType, str]] = {
    "BYTES": "object", "BOOL": "bool", "FP16": "float16", "FP32": "float32", "FP64": "float64", "INT8": "int8",
    "INT16": "int16", "INT32": "int32", "INT64": "int64", "UINT8": "uint8", "UINT16": "uint16", "UINT32": "uint32",
    "UINT64": "uint64",
}  # fmt: skip


def track_bundle(bundle: Bundle, checkpoint: Checkpoint) -> None:
    """Logs the version to the run of its training if that was tracked, else to a separate run, and registers it."""
    uri = mlflow_uri()
    if uri is None:
        return
    from mlflow.exceptions import MlflowException  # here, because it takes seconds to import

    try:
        number = registered(open_client(uri), bundle, Path(checkpoint.path).parent)
    except (MlflowException, OSError) as error:  # requests' errors are OSErrors
        text = f"MLflow did not accept the version: {first_line(error)}"
        logger.info(f"{text}; it is published nevertheless, in {bundle.path}")
    else:
        logger.info(
            f"{bundle.model} version {bundle.version} is version {number} of {bundle.model} in MLflow"
        )


def follow(client: Client, store: Store, model: str, wanted: Aliases) -> None:
    """Makes the aliases of a registered model what they should be. A version that is not registered yet is registered
    first; one without a graph here, as of servers elsewhere, is left out."""
    numbers = {
        alias: None if version is None else _number(client, store, model, version)
        for alias, version in wanted.items()
    }
    known = _aliases(client, model)
    for alias, number in numbers.items():
        if number is None and alias in known:
            client.delete_registered_model_alias(model, alias)
        elif number is not None and known.get(alias) != number:
            client.set_registered_model_alias(model, alias, number)


def _number(client: Client, store: Store, model: str, version: int) -> str | None:
    """Returns MLflow's number of a version."""
    try:
        bundle = store.bundle(model, version)
    except NotFound:  # removed from the store
        return None
    folder = Path(bundle.path)
    if not (folder / _GRAPH).is_file():
        return None
    training = read_manifest(folder).lineage.get("training")
    return registered(client, bundle, environment.home() / "runs" / str(training))


def _aliases(client: Client, model: str) -> dict[str, str]:
    from mlflow.exceptions import MlflowException

    try:
        found = client.get_registered_model(model).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return {}
    return {alias: str(number) for alias, number in found.items()}


def registered(client: Client, bundle: Bundle, training: Path) -> str:
    """Returns MLflow's number of the version, which is logged and registered first where it is not. `training`: the
    folder of its training, which has the id of its run."""
    for known in client.search_model_versions(f"name='{bundle.model}'", max_results=1000):
        if known.tags.get(_MANIFEST) == bundle.digest:
            return str(known.version)
    return _register(client, bundle, _log(client, bundle, training))


def _register(client: Client, bundle: Bundle, run: str) -> str:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(bundle.model, tags={"serin": "true"})
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    where = _where(bundle)
    numbers = {f"metric.{name}": f"{value:.6g}" for name, value in bundle.metrics.items()}
    source = f"{client.get_run(run).info.artifact_uri}/{where}"
    tags = {_RELEASE: where, _MANIFEST: bundle.digest, **numbers}
    return str(client.create_model_version(bundle.model, source, run, tags=tags).version)


def _where(bundle: Bundle) -> str:
    return f"{bundle.model}-v{bundle.version}"


def _log(client: Client, bundle: Bundle, training: Path) -> str:
    """Returns the run that has the version as a model."""
    run, where, folder = _run_of(client, bundle, training), _where(bundle), Path(bundle.path)
    client.log_artifacts(run, str(folder), where)
    with tempfile.TemporaryDirectory(prefix="serin-mlflow-") as scratch:
        description = Path(scratch, "MLmodel")
        description.write_text(yaml.safe_dump(_description(run, where, bundle), sort_keys=False))
        client.log_artifact(run, str(description), where)
    gate = json.loads((folder / "gate.json").read_text()) if (folder / "gate.json").is_file() else {}
    numbers = {f"model.{name}": value for name, value in bundle.metrics.items()}
    for one in gate.get("variants", ()):
        for key in ("bytes", "mix_us", "drop"):
            if one.get(key) is not None:
                numbers[f"variant.{one['name']}.{key}"] = one[key]
    for name, value in numbers.items():
        client.log_metric(run, name, float(value), step=bundle.version)
    client.set_tag(run, _RELEASE, where)
    client.set_tag(run, _MANIFEST, bundle.digest)
    client.set_tag(run, "serin.variant", gate.get("chosen", ""))
    return run


def _run_of(client: Client, bundle: Bundle, training: Path) -> str:
    file = training / "mlflow.json"
    if file.is_file():
        return str(json.loads(file.read_text(encoding="utf-8"))["run"])
    name = environment.mlflow_experiment()
    experiment = client.get_experiment_by_name(name)
    known = experiment.experiment_id if experiment else client.create_experiment(name)
    before = client.search_runs([known], f"tags.`{_RELEASE}` = '{_where(bundle)}'", max_results=1)
    if before:  # an attempt that ended before it had registered the version
        return str(before[0].info.run_id)
    run = client.create_run(known, run_name=_where(bundle), tags={_RELEASE: _where(bundle)})
    client.set_terminated(run.info.run_id)
    return str(run.info.run_id)


def _description(run: str, where: str, bundle: Bundle) -> dict[str, Any]:
    """Returns MLflow's own file about a model, which `mlflow.onnx.load_model` reads."""
    import mlflow
    import onnx

    schema = read_schema(Path(bundle.path))
    return {
        "artifact_path": where,
        "flavors": {
            "onnx": {
                "onnx_version": onnx.__version__,
                "data": _GRAPH,
                "providers": ["CPUExecutionProvider"],
            },
            "serin": {"release": where, "manifest_sha256": bundle.digest},
        },
        "mlflow_version": mlflow.__version__,
        "run_id": run,
        "signature": {
            "inputs": json.dumps([_tensor(column) for column in schema.inputs]),
            "outputs": json.dumps([_tensor(output) for output in schema.outputs]),
            "params": None,
        },
    }


def _tensor(tensor: InputColumn | OutputTensor) -> dict[str, Any]:
    shape = {"dtype": _DTYPES[tensor.dtype], "shape": [-1, *tensor.dims]}
    return {"name": tensor.name, "type": "tensor", "tensor-spec": shape}


def main() -> None:
    """Follows the aliases on the standard input, {model: {alias: version}}; says what MLflow has not accepted."""
    die_with_parent(int(sys.argv[1]))
    uri = mlflow_uri()
    if uri is None:
        return
    from mlflow.exceptions import MlflowException

    store, failed = Store.open(), []
    for model, wanted in json.load(sys.stdin).items():
        try:
            follow(open_client(uri), store, model, wanted)
        except (MlflowException, OSError) as error:
            failed.append(f"{model}: {first_line(error)}")
    if failed:
        sys.exit(failed[0])


if __name__ == "__main__":
    main()
