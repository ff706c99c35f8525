"""The limit: decodes the columns in use and writes as many bytes as the output has. Nothing that does the work is
faster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def run(request: dict[str, Any]) -> dict[str, Any]:
    for _ in range(request.get("limit_times", 1)):
        rows = decode_and_write(request)
    return {"decoded_rows": rows}


def decode_and_write(request: dict[str, Any]) -> int:
    jobs = []
    for path, columns in request["decode"].items():
        schema = pq.read_schema(path)
        texts = [name for name in columns if _is_text(schema.field(name).type)]
        jobs += [(path, columns, texts, group) for group in range(pq.read_metadata(path).num_row_groups)]
    with ThreadPoolExecutor(request["threads"]) as pool:
        rows = sum(pool.map(_decode, jobs))
    folder = Path(request["out"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bytes").write_bytes(bytes(request["output_bytes"]))
    return rows


def _decode(job: tuple[str, list[str], list[str], int]) -> int:
    path, columns, texts, group = job
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        return int(file.read_row_group(group, columns=columns, use_threads=False).num_rows)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
