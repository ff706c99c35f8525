"""Network namespaces with their tools: hosts on this machine (tests/cluster/namespaces.py)."""

import subprocess
from pathlib import Path

from tests.cluster.part import Missing, apt_install


def install() -> None:
    apt_install("iproute2", "iptables", "util-linux")
    if not Path("/dev/net/tun").exists():
        raise Missing("the kernel has no /dev/net/tun, which slow links need")
    made = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "name", "br0", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise Missing(f"no network namespaces with bridges here: {made.stderr.strip()}")
