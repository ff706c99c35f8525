"""What a release records of its requests, as its bundle's spec asks (monitoring.capture.share)."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from serin.formats.schema import OutputTensor, Schema
from serin.formats.serving import spool_blocks
from serin.formats.serving.spool_blocks import DEFAULT_LIMIT_BYTES, encode_header
from serin.spec.stored import stored_capture
from serin.store.artifacts import Bundle, Release

FORMAT_CODE = Path(spool_blocks.__file__)  # the Python backend gets a copy

_READ = ("share", "mask", "drop")  # the other keys are the recorder's
_BYTES = {"FP32": 4, "INT64": 8, "INT8": 1, "BYTES": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """`header`: the first line of each file, without the line break. `hidden`: inputs that are recorded as null."""

    share: float
    header: str
    outputs: tuple[OutputTensor, ...]
    hidden: tuple[str, ...] = ()
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def native_lines(self) -> list[str]:
        """Returns the lines of native.txt (columns.h)."""
        lines = [f"record {self.share!r} {self.limit_bytes} {(self.header + chr(10)).encode().hex()}"]
        for output in self.outputs:
            width = math.prod(output.dims)
            lines.append(f"recorded {_BYTES[output.dtype] * width} {width}")
        return [*lines, *(f"hidden {name.encode().hex()}" for name in self.hidden)]

    def parameters(self) -> dict[str, str]:
        """Returns the parameters of the Python backend's model."""
        return {
            "record_share": repr(self.share),
            "record_limit_bytes": str(self.limit_bytes),
            "record_header": self.header,
            "record_hidden": json.dumps(self.hidden),
        }


def recording_of(bundle: Bundle, release: Release, schema: Schema) -> Recording | None:
    """Returns what the bundle's spec asks for; None when it asks for nothing."""
    asked = stored_capture(Path(bundle.path), _READ)
    if not asked.share:
        return None
    hidden = {*asked.mask, *asked.drop}
    header = encode_header(
        model=bundle.model,
        release=release.name,
        share=asked.share,
        inputs=[(column.name, column.kind, column.dims) for column in schema.inputs],
        outputs=[(output.name, output.dtype, output.dims) for output in schema.outputs],
        null_texts={column.name: column.null_texts for column in schema.inputs if column.null_texts},
    )
    return Recording(
        share=asked.share,
        header=header.decode().rstrip("\n"),
        outputs=schema.outputs,
        hidden=tuple(column.name for column in schema.inputs if column.name in hidden),
    )


def recorded_share(bundle: Bundle) -> float:
    """Returns the share of requests that the bundle's spec asks to record."""
    return stored_capture(Path(bundle.path), _READ).share
