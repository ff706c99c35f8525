"""oauth2-mock-server: an OpenID provider with client credentials, from npm."""

from __future__ import annotations

import secrets
import shutil
import subprocess

from tests.cluster.part import FOLDER, Missing, making

VERSION = "9.3.0"
PLACE = FOLDER / f"oauth2-mock-server-{VERSION}"
PROGRAM = PLACE / "node_modules" / ".bin" / "oauth2-mock-server"


def install() -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Missing("node and npm are not installed")
    if PROGRAM.exists():
        return
    making(f"oauth2-mock-server {VERSION}")
    scratch = FOLDER / f"openid-{secrets.token_hex(4)}"
    scratch.mkdir(parents=True)
    try:
        command = ["npm", "install", "--prefix", str(scratch), "--no-save", f"oauth2-mock-server@{VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Missing(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
        if not PLACE.exists():
            scratch.rename(PLACE)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
