"""Builds the library that keeps the wheel's Triton alive when clients cancel gRPC calls; Triton loads it first.

Triton 2.51 exits when a gRPC call is cancelled at the moment it is answered (measured: one cancelled call in a few
hundred), and anyone who may call can cancel. sources/grpc_cancel_guard.cc says how the gateway's cancellations are kept
from it without keeping their memory. A connection that is closed with calls in flight still cancels them: the
gateway does not do that, so Triton's port must be reachable from this machine alone. Where it cannot be
built, a Triton that exited is started again.
"""

from __future__ import annotations

from pathlib import Path

from serin.serving.native.compiler import Compiler, build_library, build_mark

SOURCE = Path(__file__).parent / "sources" / "grpc_cancel_guard.cc"


def cancel_guard_path(folder: Path) -> Path:
    """Returns where the library is, or would be, in Triton's environment; another file for another source."""
    mark = build_mark([SOURCE, SOURCE.with_suffix(".map")])
    return folder / "serin-cancel-guard" / f"{mark[:16]}.so"


def build_cancel_guard(compiler: Compiler, library: Path) -> None:
    """Builds the library; raises TritonInstallFailed when it cannot be compiled."""
    build_library(compiler, SOURCE, library, what="the gRPC cancel guard")


def cancel_guard_variables(library: Path, grpc_port: int) -> dict[str, str]:
    """Returns the environment of a Triton that answers gRPC calls at this port."""
    return {"LD_PRELOAD": str(library), "SERIN_GRPC_PORT": str(grpc_port)}
