"""Writes a bundle as the model repository of one Triton process, once, completely or not at all."""

from __future__ import annotations

import logging
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import text_format
from pydantic import ValidationError
from tritonclient.grpc import model_config_pb2

from serin.errors import BackendRefused, BundleBroken, StoreUnreachable, TuningFailed
from serin.formats.bundle import (
    CORE,
    GOLDEN,
    PLAN,
    REPOSITORY,
    Manifest,
    read_golden,
    read_manifest,
    verify_bundle,
)
from serin.formats.gate import read_runtime
from serin.formats.schema import FILE as SCHEMA
from serin.formats.schema import read_schema, write_schema
from serin.machine.durable import write_whole
from serin.machine.hardware import core_count
from serin.serving.triton.backends import Choice, Server, choose_backend, names_gpus
from serin.serving.triton.model_config import MODEL_CODE, Settings
from serin.serving.triton.submodels import build_parts, contents_of
from serin.spec.names import valid_model_name
from serin.spec.serving import ReplicaRange, ServingSpec
from serin.spec.stored import stored_section
from serin.store.artifacts import Bundle, Release
from serin.store.published import SERVER
from serin.store.store import Store

logger = logging.getLogger(__name__)

_BACKEND_OF_PLATFORM = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "tensorflow_savedmodel": "tensorflow",
    "tensorflow_graphdef": "tensorflow",
}
FILE = "serving.yaml"
FORMAT, VERSION = "serin.tuned", 1
KEYS = ("instances", "threads", "queue_delay", "max_batch_rows")
DEVICE = "device"  # cpu, or auto: a GPU for what was exported for one, if one is here


def build_repository(
    bundle: Bundle,
    folder: Path,
    *,
    server: Server | None = None,
    serving: ServingSpec | None = None,
    gpus: tuple[int, ...] = (),
    gpu_bytes: int | None = None,
    release: Release | None = None,
) -> Path:
    """Writes the repository of `bundle` to `folder` and returns it. An existing one is left unchanged.

        folder/<model>/config.pbtxt, and files for the warm-up
        folder/<model>/<version>/{schema.json, model.py, model.onnx, ...}
        folder/<model>_front, folder/<model>_core: the same, where the model is served in two parts

    `server`: the server that will read it (default: the wheel's Triton). `serving`: settings instead of those in the
    bundle's own spec. `gpus`: ids as the process will see them. `release`: by default the version's own; its baseline
    has another name.
    """
    if folder.is_dir():
        return folder
    source = Path(bundle.path)
    manifest = verify_bundle(source, digest=bundle.digest)
    server, serving = server or Server(), serving or serving_settings(bundle)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}")
    try:
        if (source / REPOSITORY).is_dir():
            check_own_repository(source, manifest, server, len(gpus))
            _take_as_it_is(bundle, manifest.lineage["repository"]["entry"], scratch)
        else:
            choice = choose_for(bundle, server=server, serving=serving, gpus=len(gpus))
            release = release or Release(model=bundle.model, version=bundle.version)
            settings = Settings(
                release=release,
                serving=serving,
                threads=serving.threads or read_runtime(source).threads,
                gpus=gpus if choice.place == "gpu" else (),
                gpu_bytes=gpu_bytes,
                engines=folder.with_name("engines"),
                golden=read_golden(source) if (source / GOLDEN).is_file() else None,
                tags={"backend": choice.backend},
            )
            _write_parts(bundle, choice, settings, scratch)
        _put_in_place(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _put_in_place(scratch: Path, folder: Path) -> None:
    for file in scratch.rglob("*.*"):
        file.chmod(0o444)
    scratch.rename(folder)


def choose_for(bundle: Bundle, *, server: Server, serving: ServingSpec, gpus: int) -> Choice:
    """Returns how `bundle` would be served; raises BackendRefused if that is impossible."""
    source = Path(bundle.path)
    own = serving_settings(bundle)
    contents = contents_of(source, read_manifest(source), read_schema(source), own)
    return choose_backend(contents, server, serving, gpus)


def check_own_repository(source: Path, manifest: Manifest, server: Server, gpus: int) -> bool:
    """Returns whether a team's own repository needs a GPU.

    Raises BackendRefused when this server or machine cannot run one of its models.
    """
    model = f"{manifest.name} version {manifest.model_version}"
    wants_gpu = False
    for path in _own_configs(source):
        config = _parse(path)
        backend = config.backend or _BACKEND_OF_PLATFORM.get(config.platform, config.platform)
        asks = _asks_for_gpu(config)
        wants_gpu = wants_gpu or asks
        if backend and backend != "ensemble" and backend not in server.backends:
            reason = f"the server has no {backend} backend; it has {', '.join(sorted(server.backends))}"
            instead = "serve it with a Triton that has one, named by SERIN_TRITON"
        elif asks and not gpus:
            reason = "it needs a GPU (KIND_GPU), but there is none here"
            instead = "serve it where there is one, or set KIND_CPU in the model"
        else:
            continue
        asked = f"its model {path.parent.name!r}"
        raise BackendRefused(model=model, asked=asked, reason=reason, instead=instead)
    return wants_gpu


def gpus_wanted(bundle: Bundle, serving: ServingSpec) -> int:
    """Returns the number of GPUs that a release of `bundle` takes where it can have them; 0: it runs on the CPU."""
    source = Path(bundle.path)
    if serving.device == "cpu":
        return 0
    if (source / REPOSITORY).is_dir():
        wants = any(_asks_for_gpu(_parse(path)) for path in _own_configs(source))
    else:
        wants = names_gpus(serving) or not {CORE, PLAN}.isdisjoint(read_manifest(source).files)
    return serving.gpus if wants else 0


def _own_configs(source: Path) -> list[Path]:
    return sorted((source / REPOSITORY).glob("*/config.pbtxt"))


def _parse(path: Path) -> Any:
    return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def _asks_for_gpu(config: Any) -> bool:
    kinds = [group.kind for group in config.instance_group]
    return model_config_pb2.ModelInstanceGroup.KIND_GPU in kinds


def _write_parts(bundle: Bundle, choice: Choice, settings: Settings, scratch: Path) -> None:
    source = Path(bundle.path)
    for part in build_parts(source, read_schema(source), choice, settings):
        model = scratch / part.name
        inside = model / str(bundle.version)
        inside.mkdir(parents=True)
        for name, content in part.files.items():
            if isinstance(content, Path):
                shutil.copyfile(content, inside / name)
            else:
                (inside / name).write_bytes(content)
        if part.schema is not None:
            shutil.copyfile(MODEL_CODE, inside / MODEL_CODE.name)
            write_schema(inside, part.schema)
        elif part.name == bundle.model:
            shutil.copyfile(source / SCHEMA, inside / SCHEMA)  # for people who inspect it
        for name, data in part.config.files.items():
            (model / name).parent.mkdir(exist_ok=True)
            (model / name).write_bytes(data)
        (model / "config.pbtxt").write_text(part.config.text, encoding="utf-8")


def _take_as_it_is(bundle: Bundle, entry: str, scratch: Path) -> None:
    """Copies a team's own repository. The model that clients call gets the bundle's name and number.

    Its newest version folder is served.
    """
    shutil.copytree(Path(bundle.path) / REPOSITORY, scratch)
    asked, target = scratch / entry, scratch / bundle.model
    if asked != target:
        if target.exists():
            raise BundleBroken(path=bundle.path, reason=f"two of its models would be called {bundle.model!r}")
        asked.rename(target)
    versions = [path for path in target.iterdir() if path.name.isdigit()]
    numbers = sorted(versions, key=lambda path: int(path.name))
    for older in numbers[:-1]:
        shutil.rmtree(older)
    if numbers:
        numbers[-1].rename(target / str(bundle.version))
    else:
        (target / str(bundle.version)).mkdir()  # empty: an ensemble has no files
    # For people who inspect it.
    shutil.copyfile(Path(bundle.path) / SCHEMA, target / str(bundle.version) / SCHEMA)
    config = _parse(target / "config.pbtxt")
    config.name = bundle.model
    config.version_policy.Clear()
    config.version_policy.specific.versions.append(bundle.version)
    (target / "config.pbtxt").write_text(str(text_format.MessageToString(config)))


def serving_settings(bundle: Bundle) -> ServingSpec:
    """Returns the serving settings: the bundle's spec, else what `serin tune` measured, else the defaults.

    An export writes the whole spec with every default: measured values take precedence over those, too.
    """
    own, tuned = stored_section(Path(bundle.path), "serving"), read_tuned(bundle)
    try:
        named, defaults = ServingSpec.model_validate(own), ServingSpec()
        measured = {key: tuned[key] for key in tuned if getattr(named, key) == getattr(defaults, key)}
        return ServingSpec.model_validate({**own, **measured})
    except ValidationError as error:
        path = f"{bundle.path}/spec.yaml"
        raise BundleBroken(path=path, reason=f"its serving section cannot be read: {error}") from error


def wanted_replicas(bundle: Bundle) -> int | ReplicaRange | None:
    """Returns how many replicas the bundle's spec asks for; None: one on each host, or its server runs elsewhere."""
    replicas = serving_settings(bundle).replicas
    return None if replicas == "all" or (Path(bundle.path) / SERVER).is_file() else replicas


# The values belong to machines with as many cores. A release uses those that its spec does not set, and none on another
# machine. In an object store, each number of cores has its own.
def tuned_file(bundle: Bundle) -> Path:
    """Returns the file in the store, or in this machine's copy of a remote store."""
    return Path(bundle.path).parents[1] / FILE


def share_tuned(store: Store, bundle: Bundle) -> None:
    """Uploads what was measured here for all hosts that share the store."""
    if not store.local:
        store.shared_files().put(_tuned_key(bundle.model), tuned_file(bundle).read_bytes())


def fetch_tuned(store: Store, bundle: Bundle) -> None:
    """Copies what a host with as many cores has measured. Without an answer, what is here is used."""
    if store.local:
        return
    try:
        stored = store.shared_files().read(_tuned_key(bundle.model))
    except StoreUnreachable as error:
        logger.warning("%s: whether it was tuned elsewhere is not known: %s", bundle.model, error)
        return
    if stored is not None:
        write_whole(tuned_file(bundle), stored.content)


def _tuned_key(model: str) -> str:
    return f"tuned/{valid_model_name(model)}/{core_count()}-cores.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one replica answers within the promised latency, as `serin tune` measured it. `in_flight`: requests at the
    same time, where it answers the most of them. `requests_per_s`: when they come whether or not others were answered.
    """

    in_flight: int
    requests_per_s: float


def measured_capacity(store: Store, bundle: Bundle) -> Capacity | None:
    """Returns the capacity of a replica. Of machines with different numbers of cores the least: a replica may run on
    any of them. None: nothing was measured."""
    if store.local:
        path = tuned_file(bundle)
        texts = [path.read_bytes()] if path.is_file() else []
    else:
        files = store.shared_files()
        found = (files.read(key) for key in files.keys(f"tuned/{valid_model_name(bundle.model)}/"))
        texts = [each.content for each in found if each is not None]
    measured = []
    for text in texts:
        try:
            known = _tuned_document(text)["capacity"]
            measured.append((int(known["in_flight"]), float(known["requests_per_s"])))
        except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("%s: what `serin tune` measured cannot be read: %s", bundle.model, error)
    if not measured:
        return None
    in_flight, requests_per_s = (min(values) for values in zip(*measured, strict=True))
    return Capacity(in_flight=int(in_flight), requests_per_s=requests_per_s)


def _tuned_document(text: str | bytes) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(text)
    if (document["format"], document["version"]) != (FORMAT, VERSION):
        raise ValueError(f"not a {FORMAT} version {VERSION} document")
    return document


def read_tuned(bundle: Bundle) -> dict[str, int | str]:
    """Returns the values for this machine; none when the model was not tuned here."""
    path = tuned_file(bundle)
    if not path.is_file():
        return {}
    try:
        document = _tuned_document(path.read_text(encoding="utf-8"))
        if document["machine"]["cores"] != core_count():
            return {}
        serving: dict[str, Any] = document["serving"]
        return {
            key: str(value) if key in ("queue_delay", DEVICE) else int(value)
            for key, value in serving.items()
            if key in (*KEYS, DEVICE)
        }
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        reason = f"{path} cannot be read ({why}); remove it, or run `serin tune {bundle.model}` again"
        raise TuningFailed(model=bundle.model, reason=reason) from error


def write_tuned(
    bundle: Bundle,
    heading: list[str],
    values: dict[str, tuple[int | str, str]],
    capacity: Capacity | None = None,
) -> Path:
    """Writes the file atomically. `values`: each with the comment that gives the reason."""
    lines = [f"# {line}".rstrip() for line in heading]
    lines += [f"format: {FORMAT}", f"version: {VERSION}", f"machine: {{cores: {core_count()}}}"]
    if capacity is not None:
        known = f"in_flight: {capacity.in_flight}, requests_per_s: {capacity.requests_per_s:.4g}"
        lines.append(f"capacity: {{{known}}}  # of one replica, for the autoscaler")
    lines.append("serving:")
    wide = max(len(f"{key}: {value}") for key, (value, _) in values.items())
    for key, (value, why) in values.items():
        lines.append(f"  {f'{key}: {value}':<{wide}}  # {why}")
    path = tuned_file(bundle)
    write_whole(path, "\n".join(lines) + "\n")
    return path
