"""One request as the gateway logged it. A plain value; reading the log is request_log's job."""

from __future__ import annotations

from typing import NamedTuple

# gRPC codes that are the server's fault: UNKNOWN, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNIMPLEMENTED, INTERNAL,
# UNAVAILABLE, DATA_LOSS. CANCELLED and the others (a bad argument, a missing model) are the client's.
SERVER_FAULTS = frozenset({2, 4, 8, 12, 13, 14, 15})

_NO_REFUSAL = (0, 1)  # OK, CANCELLED

# Envoy's flags for a client that went away before it had its answer.
CLIENT_GONE = frozenset({"DC", "DR"})

CLIENT_ID_BYTES = 128  # of a client's own id; the rest of a longer one is cut off


class Request(NamedTuple):
    """What is counted of a line of the request log, which has more for people."""

    t: float  # arrival, seconds
    model: str
    epoch: int  # of the weights, from the route's name
    arm: str  # stable, baseline, candidate, pinned
    release: str
    code: int  # HTTP status; 0 when none was sent
    grpc: int | None
    us: float | None  # request fully received to response sent; None when no response was sent
    attempts: int
    flags: str
    id: str  # made by the gateway
    ms: float | None = None  # arrival to the end of the stream
    received_ms: float | None = None  # arrival to the last byte of the request; None: it did not come

    @property
    def failed(self) -> bool:
        """True when the arm's release failed, even if a retry elsewhere saved the client."""
        if self.attempts > 1 or self.code >= 500 or self.grpc in SERVER_FAULTS:
            return True
        return self.code == 0 and not self.cancelled

    @property
    def refused(self) -> bool:
        """True when the release says that the client is wrong. Another release may be of another opinion."""
        if self.failed:
            return False
        return 400 <= self.code < 500 or self.grpc not in (None, *_NO_REFUSAL)

    @property
    def cancelled(self) -> bool:
        """True when the client went away first: no failure of the release."""
        return not CLIENT_GONE.isdisjoint(self.flags.split(","))

    @property
    def waited_us(self) -> float | None:
        """How long a client that went away had waited for an answer to a complete request. None: it did not go away,
        or nobody knows."""
        if self.us is not None or self.ms is None or not self.cancelled:
            return None
        return 0.0 if self.received_ms is None else max(self.ms - self.received_ms, 0.0) * 1000
