"""Keeps the wheel's Triton alive when clients cancel gRPC calls: a small library that is loaded before its own.

Triton 2.51 exits when a gRPC call is cancelled at the moment it is answered (measured: one cancelled call in a few
hundred), and anyone who may call can cancel. grpc_shield.cc says how the gateway's cancellations are kept from it
without keeping their memory. A connection that is closed with calls under way cancels them all the same: the gateway
does not do that, so Triton's port must be reachable from this machine alone. The library is compiled where Triton is
installed; without a compiler there is none, and a Triton that exited is started again.
"""

from __future__ import annotations

from pathlib import Path

from serin.serving.compiler import build_library, build_mark

SOURCE = Path(__file__).with_name("grpc_shield.cc")


def shield_place(triton: Path) -> Path:
    """Where it is, or would be, in Triton's environment. Another source is another library."""
    return triton / "serin-shield" / f"{build_mark([SOURCE])[:16]}.so"


def build_shield(library: Path) -> None:
    """TritonInstallFailed when there is no compiler."""
    build_library(SOURCE, library, what="the shield")


def shield_variables(library: Path, grpc_port: int) -> dict[str, str]:
    """For the environment of a Triton that answers gRPC calls at this port."""
    return {"LD_PRELOAD": str(library), "SERIN_GRPC_PORT": str(grpc_port)}
