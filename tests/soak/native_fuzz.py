"""Requests that no Triton would let pass, for the backend of our own, under AddressSanitizer and UBSan.

    python -m tests.soak.native_fuzz [--rounds 20000] [--seed 1] [--sanitizer thread] [--spool full] [--split]

`--split`: a front and a core, whose device the host plays, in batches of at most eight rows and pieces of two.

The sanitizers see reads beyond an input, leaks and overflows; the program sees requests that are answered twice or not
at all. Needs g++ or clang++ with its sanitizers, and Triton's environment (`serin install triton`).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from serin.formats.serving.spool import read_spool
from serin.formats.serving.spool_blocks import LONGEST_ID_BYTES, encode_header, is_drawn
from serin.machine.native.compiler import machine_compiler
from serin.serving.native.onnx_backend import NATIVE, Split, native_settings
from serin.serving.triton.installation import find_triton
from serin.serving.triton.process import SPOOL_VARIABLE
from serin.serving.triton.recording import Recording
from tests.e2e.test_onnx_backend import choking_graph
from tests.unit.serving.bundles import INNER, MODEL, SCHEMA, choking_front, core

SANITIZERS = {"address": "address,undefined", "thread": "thread"}
INSTANCES = 3
SPLIT = Split(inner=INNER, max_rows=8, workers=3, piece_rows=2, provider="cpu")
LIMITS = {"good": 1 << 28, "full": 20_000, "missing": 1 << 28}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20_000, help="batches of 1 to 6 requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sanitizer", choices=sorted(SANITIZERS), default="address")
    parser.add_argument(
        "--spool", choices=sorted(LIMITS), default="good", help="the folder of recorded requests"
    )
    parser.add_argument("--split", action="store_true", help="the model in two parts, as for a GPU")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serin-fuzz-") as scratch:
        folder = Path(scratch)
        for name in ("lib", "1"):
            (folder / name).mkdir()
        library = (find_triton().backends / NATIVE / "libonnxruntime.so").resolve(strict=True)
        (folder / "lib" / "libonnxruntime.so").symlink_to(library)
        graphs = {"front.onnx": choking_front(), "core.onnx": core(0.0).SerializeToString()}
        for name, data in (graphs if asked.split else {"model.onnx": choking_graph()}).items():
            (folder / "1" / name).write_bytes(data)
        (folder / "1" / "native.txt").write_bytes(
            native_settings(
                SCHEMA,
                threads=1,
                max_string_bytes=100,
                recording=_recording(LIMITS[asked.spool]).native_lines(),
                split=SPLIT if asked.split else None,
            )
        )
        program = folder / "fuzz"
        source = Path(__file__).with_suffix(".cc")
        compiler = machine_compiler()
        assert compiler is not None, "no C++ compiler is on PATH"
        flags = (
            "-std=c++17",
            "-g",
            "-O1",
            f"-fsanitize={SANITIZERS[asked.sanitizer]}",
            "-fno-sanitize-recover=all",
        )
        subprocess.run([*compiler.command, *flags, "-o", program, source, "-ldl", "-pthread"], check=True)
        command = [program, folder, str(asked.rounds), str(asked.seed), str(INSTANCES)]
        with (folder / "log.txt").open("w") as log:  # ONNX Runtime says every time that it choked
            spool = folder / ("gone/spool" if asked.spool == "missing" else "spool") / "delays-v1"
            variables = {**os.environ, SPOOL_VARIABLE: str(spool), "TSAN_OPTIONS": _tsan_options(folder)}
            done = subprocess.run(command, env=variables, stderr=log, text=True, stdout=subprocess.PIPE)
        print(done.stdout)
        if not done.returncode:
            print(_recorded(spool, lossy=asked.spool != "good"))
        if done.returncode:
            print((folder / "log.txt").read_text()[-8000:], file=sys.stderr)
        return done.returncode


def _tsan_options(folder: Path) -> str:
    """ONNX Runtime is not compiled with the sanitizer, which then cannot see its locks."""
    suppressed = folder / "suppressed.txt"
    suppressed.write_text("race:libonnxruntime\nmutex:libonnxruntime\n")
    return f"halt_on_error=1:suppressions={suppressed}"


def _recording(limit_bytes: int) -> Recording:
    header = encode_header(
        model=MODEL,
        release=f"{MODEL}-v1",
        share=0.9,
        inputs=[(column.name, column.kind, column.dims) for column in SCHEMA.inputs],
        outputs=[(output.name, output.dtype, output.dims) for output in SCHEMA.outputs],
    )
    text = header.decode().rstrip("\n")
    return Recording(
        share=0.9, header=text, outputs=SCHEMA.outputs, hidden=("carrier", "night"), limit_bytes=limit_bytes
    )


def _recorded(spool: Path, *, lossy: bool) -> str:
    """What was recorded, every file of which is sound."""
    paths = sorted(spool.glob("*/*"))
    assert sum(path.stat().st_size for path in paths) <= LIMITS["good"]
    files = [read_spool(path) for path in paths]
    assert not any(file.torn_bytes for file in files)
    blocks = [block for file in files for block in file.blocks]
    requests = sum(block.requests for block in blocks)
    if lossy:
        return f"{requests} requests recorded in {len(files)} files"
    last = blocks[-1]
    assert all(
        is_drawn(id_, 0.9) for block in blocks for id_ in block.ids.to_list() if len(id_) < LONGEST_ID_BYTES
    )
    assert requests == last.sent > last.dropped == 0, (requests, last)
    return f"{requests} requests recorded in {len(files)} files, {last.dropped} dropped"


if __name__ == "__main__":
    sys.exit(main())
