"""Imports a model that is registered in MLflow as a version: a graph of ONNX, or a version that Serin has registered.

Other kinds are refused before any of their files is fetched: they are pickles, which run code when they are opened.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml

from serin.errors import ExportFailed, SpecError
from serin.export.take_over import import_bundle
from serin.formats.external_data import external_tensors, place_of
from serin.machine import environment
from serin.machine.documents import UNFIT
from serin.machine.durable import make_private
from serin.machine.mlflow_client import Client, first_line, mlflow_uri, open_client
from serin.pipeline.run_stage import run_export, run_train
from serin.spec.load import load_spec
from serin.spec.names import valid_model_name
from serin.store.artifacts import Bundle
from serin.store.runs import hold_input
from serin.store.store import Store

PREFIX: Final = "models:/"
_URI: Final = re.compile(r"models:/(?P<name>[^/@]+)(?:/(?P<number>\d+)|@(?P<alias>[^/@]+))")
_DESCRIPTION: Final = "MLmodel"
_ADDED: Final = (_DESCRIPTION, "registered_model_meta")  # by MLflow, to the files of a bundle


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """What a graph does not say: the task, and what it answers. `golden`: request rows in an .npz file; None: those
    that were logged with the model as its input example."""

    task: str | None = None
    answer: str = "logits"
    golden: Path | None = None


def import_registered(uri: str, store: Store, how: How, *, name: str | None = None) -> Bundle:
    """Returns the version made of `models:/NAME/VERSION` or `models:/NAME@ALIAS`. Raises ExportFailed with the reason
    when it cannot be one."""
    server = mlflow_uri()
    if server is None:
        problem = "is in MLflow; set MLFLOW_TRACKING_URI to the address of its server"
        raise SpecError(where=uri, problems=[("", problem)])
    from mlflow.exceptions import MlflowException

    try:
        return _import(open_client(server), uri, store, how, name)
    except (MlflowException, OSError) as error:
        raise ExportFailed(what=uri, reason=f"MLflow at {server}: {first_line(error)}") from error


def _import(client: Client, uri: str, store: Store, how: How, name: str | None) -> Bundle:
    version = _find(client, uri)
    model = valid_model_name(name or re.sub(r"[^a-z0-9-]+", "-", version.name.lower()))
    with tempfile.TemporaryDirectory(prefix="serin-mlflow-") as scratch:
        fetched = _Fetched(client, version, Path(scratch))
        description = fetched.description()
        flavors = description.get("flavors", {})
        if "serin" in flavors:
            folder = fetched.file("")
            for added in _ADDED:
                (folder / added).unlink(missing_ok=True)
            return import_bundle(folder, store, name=name)
        if "onnx" not in flavors:
            raise ExportFailed(what=uri, reason=_refusal(flavors))
        return _run(uri, model, version, fetched, description, how)


def _find(client: Client, uri: str) -> Any:
    found = _URI.fullmatch(uri)
    if found is None:
        raise SpecError(where=uri, problems=[("", "is not models:/NAME/VERSION or models:/NAME@ALIAS")])
    if found["alias"]:
        return client.get_model_version_by_alias(found["name"], found["alias"])
    return client.get_model_version(found["name"], found["number"])


def _refusal(flavors: Mapping[str, Any]) -> str:
    kinds = ", ".join(sorted(set(flavors) - {"python_function"})) or "a Python function"
    return (
        f"it is not a graph of ONNX but {kinds}, whose files are pickles: opening one runs whatever code is in it. "
        "Convert the model and log it with mlflow.onnx.log_model"
    )


class _Fetched:
    """Files of a registered version, fetched when they are asked for."""

    def __init__(self, client: Client, version: Any, scratch: Path) -> None:
        self._uri = f"models:/{version.name}/{version.version}"
        self._server, self._scratch = client.tracking_uri, scratch

    def file(self, relative: str) -> Path:
        """Returns a file or a folder of the model; all of it for an empty name."""
        from mlflow.artifacts import download_artifacts

        if relative.startswith("/") or ".." in relative.split("/"):
            raise ExportFailed(what=self._uri, reason=f"{relative!r} is outside of the model")
        source = f"{self._uri}/{relative}" if relative else self._uri
        place = self._scratch / ("part" if relative else "whole")
        place.mkdir(exist_ok=True)
        return Path(download_artifacts(artifact_uri=source, dst_path=str(place), tracking_uri=self._server))

    def description(self) -> dict[str, Any]:
        content = self.file(_DESCRIPTION).read_text(encoding="utf-8")
        try:
            return dict(yaml.safe_load(content))
        except (yaml.YAMLError, *UNFIT) as error:
            raise ExportFailed(what=self._uri, reason=f"its {_DESCRIPTION} is damaged: {error}") from error


def _run(
    uri: str, model: str, version: Any, fetched: _Fetched, description: Mapping[str, Any], how: How
) -> Bundle:
    """Takes a graph through the stages, which measure it, check it and publish it."""
    if how.task is None:
        reason = "say what it predicts: --task binary, multiclass or regression"
        raise ExportFailed(what=uri, reason=reason)
    home = environment.home()
    folder = make_private(home / "imported") / f"mlflow-{model}-{version.version}"
    hold_input(home, folder)
    make_private(folder)
    graph, golden = folder / "model.onnx", folder / "golden.npz"
    copy_graph(fetched.file, str(description["flavors"]["onnx"].get("data", "model.onnx")), graph, uri)
    if how.golden is None:
        example = _example(uri, fetched, description, _inputs(graph))
        np.savez(golden, **example)  # type: ignore[arg-type]
    else:
        shutil.copyfile(how.golden, golden)
    section = {"onnx": str(graph), "task": how.task, "answer": how.answer, "golden": str(golden)}
    spec = load_spec({"name": model, "model": section})
    run_train(spec)
    return run_export(spec).value


def copy_graph(fetch: Callable[[str], Path], relative: str, target: Path, uri: str) -> None:
    """Copies a graph with all of its weights into one file. MLflow stores those from 1 KiB on in a file beside it.
    `fetch`: of a file in the model."""
    import onnx
    from google.protobuf.message import DecodeError
    from onnx.external_data_helper import load_external_data_for_model

    source, folder = fetch(relative), relative.rpartition("/")[0]
    try:
        model = onnx.load_model(str(source), load_external_data=False)
        locations = {place_of(tensor)["location"] for tensor in external_tensors(model)}
        if not locations:
            shutil.copyfile(source, target)
            return
        with tempfile.TemporaryDirectory(prefix="serin-weights-", dir=source.parent) as scratch:
            for location in sorted(locations):
                _fetch_weights(fetch, folder, location, Path(scratch), uri)
            load_external_data_for_model(model, scratch)
        onnx.save_model(model, str(target))
    except (DecodeError, onnx.checker.ValidationError, RuntimeError, *UNFIT) as error:
        reason = f"its graph cannot be read, or has more than the 2 GB of one file: {first_line(error)}"
        raise ExportFailed(what=uri, reason=reason) from error


def _fetch_weights(fetch: Callable[[str], Path], folder: str, location: str, scratch: Path, uri: str) -> None:
    found = None
    if not location.startswith("/") and not {"", ".", ".."} & set(location.split("/")):
        found = fetch(f"{folder}/{location}" if folder else location)
    if found is None or found.is_symlink() or not found.is_file():
        raise ExportFailed(what=uri, reason=f"its weights at {location!r} are outside of the model")
    (scratch / location).parent.mkdir(parents=True, exist_ok=True)
    shutil.move(found, scratch / location)


def _inputs(graph: Path) -> list[str]:
    import onnx

    model = onnx.load_model(str(graph), load_external_data=False)
    constants = {each.name for each in model.graph.initializer}
    return [each.name for each in model.graph.input if each.name not in constants]


def _example(
    uri: str, fetched: _Fetched, description: Mapping[str, Any], inputs: list[str]
) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the rows that were logged with the model, as arrays by the names of the graph's inputs."""
    place = (description.get("saved_input_example_info") or {}).get("serving_input_path")
    if place is None:
        reason = "it has no input example to check it with; log one with it, or give rows: --golden rows.npz"
        raise ExportFailed(what=uri, reason=reason)
    try:
        found = json.loads(fetched.file(str(place)).read_text(encoding="utf-8"))
        return _arrays(found, inputs)
    except UNFIT as error:
        reason = (
            f"its input example has no values for {', '.join(inputs)}: {error}; give rows: --golden rows.npz"
        )
        raise ExportFailed(what=uri, reason=reason) from error


def _arrays(example: Mapping[str, Any], inputs: list[str]) -> dict[str, np.ndarray[Any, Any]]:
    if "dataframe_split" in example:
        frame = example["dataframe_split"]
        columns = {name: [row[at] for row in frame["data"]] for at, name in enumerate(frame["columns"])}
        if len(inputs) == 1 and inputs[0] not in columns:
            return {inputs[0]: np.asarray(frame["data"])}
        return {name: np.asarray(columns[name]) for name in inputs}
    given = example["inputs"]
    if isinstance(given, dict):
        return {name: np.asarray(given[name]) for name in inputs}
    (name,) = inputs
    return {name: np.asarray(given)}
