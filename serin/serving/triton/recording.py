"""What a release records of its requests, as its bundle's spec asks (monitoring.capture.share)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serin.errors import BundleBroken
from serin.formats.schema import OutputTensor, Schema
from serin.formats.serving import spool_blocks
from serin.formats.serving.spool_blocks import DEFAULT_LIMIT_BYTES, encode_header
from serin.spec.load import read_yaml
from serin.spec.monitoring import CaptureSpec
from serin.store.artifacts import Bundle, Release

SPOOL_VARIABLE = (
    "SERIN_SPOOL"  # of Triton's process: the release's spool folder; without it nothing is recorded
)
FORMAT_CODE = Path(spool_blocks.__file__)  # the Python backend gets a copy

_BYTES = {"FP32": 4, "INT64": 8, "INT8": 1, "BYTES": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """`header`: the first line of each file, without the line break."""

    share: float
    header: str
    outputs: tuple[OutputTensor, ...]
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def native_lines(self) -> list[str]:
        """Returns the lines of native.txt (columns.h)."""
        lines = [f"record {self.share!r} {self.limit_bytes} {(self.header + chr(10)).encode().hex()}"]
        for output in self.outputs:
            width = math.prod(output.dims)
            lines.append(f"recorded {_BYTES[output.dtype] * width} {width}")
        return lines

    def parameters(self) -> dict[str, str]:
        """Returns the parameters of the Python backend's model."""
        return {
            "record_share": repr(self.share),
            "record_limit_bytes": str(self.limit_bytes),
            "record_header": self.header,
        }


def recording_of(bundle: Bundle, release: Release, schema: Schema) -> Recording | None:
    """Returns what the bundle's spec asks for; None when it asks for nothing."""
    share = recorded_share(bundle)
    if not share:
        return None
    header = encode_header(
        model=bundle.model,
        release=release.name,
        share=share,
        inputs=[(column.name, column.kind, column.dims) for column in schema.inputs],
        outputs=[(output.name, output.dtype, output.dims) for output in schema.outputs],
    )
    return Recording(share=share, header=header.decode().rstrip("\n"), outputs=schema.outputs)


def recorded_share(bundle: Bundle) -> float:
    """Returns the share of requests that the bundle's spec asks to record."""
    path = Path(bundle.path) / "spec.yaml"
    if not path.exists():
        return 0.0
    try:
        document: Any = read_yaml(path.read_text(encoding="utf-8"))
        asked = (document.get("monitoring") or {}).get("capture") or {}
        return CaptureSpec.model_validate({"share": asked.get("share", 0.0)}).share
    except (OSError, yaml.YAMLError, ValueError, AttributeError) as error:
        raise BundleBroken(
            path=str(path), reason=f"its section monitoring cannot be read: {error}"
        ) from error
