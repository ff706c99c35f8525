"""Requests that no Triton would let pass, for the backend of our own, under AddressSanitizer and UBSan.

    python -m tests.soak.native_fuzz [--rounds 20000] [--seed 1] [--sanitizer thread] [--split]

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

from serin.serving.native.compiler import machine_compiler
from serin.serving.native.onnx_backend import NATIVE, Split, native_settings
from serin.serving.triton.installation import find_triton
from tests.e2e.test_onnx_backend import choking_graph
from tests.unit.serving.bundles import INNER, SCHEMA, choking_front, core

SANITIZERS = {"address": "address,undefined", "thread": "thread"}
INSTANCES = 3
SPLIT = Split(inner=INNER, max_rows=8, workers=3, piece_rows=2, provider="cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20_000, help="batches of 1 to 6 requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sanitizer", choices=sorted(SANITIZERS), default="address")
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
            variables = {**os.environ, "TSAN_OPTIONS": _tsan_options(folder)}
            done = subprocess.run(command, env=variables, stderr=log, text=True, stdout=subprocess.PIPE)
        print(done.stdout)
        if done.returncode:
            print((folder / "log.txt").read_text()[-8000:], file=sys.stderr)
        return done.returncode


def _tsan_options(folder: Path) -> str:
    """ONNX Runtime is not compiled with the sanitizer, which then cannot see its locks."""
    suppressed = folder / "suppressed.txt"
    suppressed.write_text("race:libonnxruntime\nmutex:libonnxruntime\n")
    return f"halt_on_error=1:suppressions={suppressed}"


if __name__ == "__main__":
    sys.exit(main())
