"""Says why there are no recorded requests of a model: a wrong name, a spec that records none, or none came yet."""

from __future__ import annotations

from pathlib import Path

from serin.errors import MonitoringError, NotFound, NotRecorded
from serin.machine import environment
from serin.monitoring.capture.all_hosts import AllHosts, SharedRecords
from serin.monitoring.capture.counters import models_captured
from serin.rollout.run.status import model_status
from serin.spec.stored import stored_capture
from serin.store.published import SERVER
from serin.store.store import Store
from serin.watcher.captures import all_hosts


def check_model(model: str) -> None:
    """NotFound for a name that no model has: neither published, nor served, nor recorded."""
    known = known_models()
    if model not in known and model_status(environment.home(), model) is None:
        raise NotFound(kind="model", name=model, known=known)


def known_models() -> list[str]:
    """The models that are published or have records."""
    return sorted({*Store.open().models(), *models_captured(environment.home())})


def not_recorded(model: str) -> MonitoringError:
    """The error for a model without records. NotFound for a name that no model has."""
    check_model(model)
    return NotRecorded(model=model, reason=why_not_recorded(model))


def records_of(model: str, version: int | None, shared: SharedRecords | None) -> AllHosts:
    """The records of a model. NotFound, or NotRecorded, when there are none."""
    found = all_hosts(environment.home(), shared, model)
    if not found.versions and model not in models_captured(environment.home()):
        raise not_recorded(model)
    if version is not None and version not in found.versions:
        known = [str(each) for each in found.versions]
        raise NotFound(kind=f"recorded version of {model!r}:", name=str(version), known=known)
    return found


def again_with_it(bundle: Path) -> str:
    """How a version gets another spec."""
    if (bundle / SERVER).is_file():
        return "give it to `serin rollout start --stable URL --candidate URL --spec FILE`"
    return "run the pipeline again"


def why_not_recorded(model: str) -> str:
    """Why a model has no records, and what to do about it."""
    store, status = Store.open(), model_status(environment.home(), model)
    version = (status.live if status else None) or store.aliases(model).get("live")
    if version is None or version not in store.versions(model):
        return "no version of it is served; `serin rollout start` rolls one out"
    folder = Path(store.bundle(model, version).path)
    share = stored_capture(folder).share
    if not share:
        return f"the spec of version {version} has no monitoring.capture.share; set it and {again_with_it(folder)}"
    recorded = "every request" if share >= 1 else f"{100 * share:.3g}% of the requests"
    return f"version {version} records {recorded}, but none came yet; records appear some seconds after the answer"
