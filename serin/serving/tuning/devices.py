"""Lists the devices on which a bundle can be served here, for a tuner that chooses between them."""

from __future__ import annotations

from pathlib import Path

from serin.errors import BackendRefused
from serin.machine.hardware import inventory
from serin.serving.triton.backends import Place, Server
from serin.serving.triton.installation import find_triton
from serin.serving.triton.repository import choose_for, serving_settings
from serin.spec.yaml_file import read_yaml
from serin.store.artifacts import Bundle


def devices_for(bundle: Bundle) -> tuple[Place, ...]:
    """Returns the devices, the one in use first. A second only if the spec leaves the choice and this Triton supports
    it."""
    gpus = len(inventory())
    return possible_devices(bundle, find_triton().describe(gpus=bool(gpus)), gpus)


def possible_devices(bundle: Bundle, server: Server, gpus: int) -> tuple[Place, ...]:
    serving = serving_settings(bundle)
    now = choose_for(bundle, server=server, serving=serving, gpus=gpus).place
    path = Path(bundle.path) / "spec.yaml"
    spec = read_yaml(path.read_text(encoding="utf-8")) if path.exists() else {}
    named = (spec.get("serving") or {}).get("device", "auto")  # not the choice of an earlier tuning
    if named != "auto" or serving.gpus > 1 or serving.backend == "tensorrt_plan":
        return (now,)
    found = []
    for asked in ("auto", "cpu"):  # auto is a GPU only for a model that was exported for one
        try:
            other = serving.model_copy(update={"device": asked})
            found.append(choose_for(bundle, server=server, serving=other, gpus=gpus).place)
        except BackendRefused:
            continue
    return tuple(dict.fromkeys((now, *found)))
