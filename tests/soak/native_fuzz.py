"""Requests that no Triton would let pass, for the backend of our own, under AddressSanitizer and UBSan.

    python -m tests.soak.native_fuzz [--rounds 20000] [--seed 1]

The sanitizers see reads beyond an input, leaks and overflows; the program sees requests that are answered twice or not
at all. Needs g++ or clang++ with its sanitizers, and Triton's environment (`serin install triton`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from serin.formats.serving.spool import encode_header, is_drawn, read_spool
from serin.formats.serving.spool_blocks import LONGEST_ID_BYTES
from serin.serving.native.compiler import machine_compiler
from serin.serving.native.onnx_backend import NATIVE, native_settings
from serin.serving.triton.installation import find_triton
from serin.serving.triton.recording import SPOOL_VARIABLE, Recording
from tests.e2e.test_onnx_backend import choking_graph
from tests.unit.serving.bundles import MODEL, SCHEMA

SANITIZED = ("-std=c++17", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20_000, help="batches of 1 to 6 requests")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serin-fuzz-") as scratch:
        folder = Path(scratch)
        for name in ("lib", "1"):
            (folder / name).mkdir()
        library = (find_triton().backends / NATIVE / "libonnxruntime.so").resolve(strict=True)
        (folder / "lib" / "libonnxruntime.so").symlink_to(library)
        (folder / "1" / "model.onnx").write_bytes(choking_graph())
        (folder / "1" / "native.txt").write_bytes(
            native_settings(SCHEMA, threads=1, max_string_bytes=100, recording=_recording().native_lines())
        )
        program = folder / "fuzz"
        source = Path(__file__).with_suffix(".cc")
        compiler = machine_compiler()
        assert compiler is not None, "no C++ compiler is on PATH"
        subprocess.run([*compiler.command, *SANITIZED, "-o", program, source, "-ldl", "-pthread"], check=True)
        command = [program, folder, str(asked.rounds), str(asked.seed)]
        with (folder / "log.txt").open("w") as log:  # ONNX Runtime says every time that it choked
            variables = {**os.environ, SPOOL_VARIABLE: str(folder / "spool" / "delays-v1")}
            done = subprocess.run(command, env=variables, stderr=log, text=True, stdout=subprocess.PIPE)
        print(done.stdout)
        print(_recorded(folder / "spool"))
        if done.returncode:
            print((folder / "log.txt").read_text()[-8000:], file=sys.stderr)
        return done.returncode


def _recording() -> Recording:
    header = encode_header(
        model=MODEL,
        release=f"{MODEL}-v1",
        share=0.9,
        inputs=[(column.name, column.kind, column.dims) for column in SCHEMA.inputs],
        outputs=[(output.name, output.dtype, output.dims) for output in SCHEMA.outputs],
    )
    return Recording(share=0.9, header=header.decode().rstrip("\n"), outputs=SCHEMA.outputs)


def _recorded(spool: Path) -> str:
    """What was recorded, every file of which is sound."""
    files = [read_spool(path) for path in sorted(spool.glob("*/*/*"))]
    assert not any(file.torn_bytes for file in files)
    blocks = [block for file in files for block in file.blocks]
    requests, last = sum(block.requests for block in blocks), blocks[-1]
    assert all(
        is_drawn(id_, 0.9) for block in blocks for id_ in block.ids.to_list() if len(id_) < LONGEST_ID_BYTES
    )
    assert requests == last.sent > last.dropped == 0, (requests, last)
    return f"{requests} requests recorded in {len(files)} files, {last.dropped} dropped"


if __name__ == "__main__":
    sys.exit(main())
