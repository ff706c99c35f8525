"""Joins two bridges by a pair of TAP devices that delay and lose frames: `slow_link.py BRIDGE BRIDGE NAME MS LOSS`.

For kernels without netem. It needs nothing but the standard library, prints "ready" and runs until it is killed; the
devices disappear with it.
"""

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_FRAME_BYTES = 65536


def open_tap(name: str, bridge: str) -> int:
    """A TAP device that is a port of `bridge`, as a file descriptor of frames."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "master", bridge, "up"], check=True)
    return device


def forward(one: int, other: int, *, delay_s: float, loss: float) -> None:
    """Moves frames both ways. The delay is constant, so frames stay in order."""
    lots = random.Random(1)
    waiting: deque[tuple[float, int, bytes]] = deque()
    facing = {one: other, other: one}
    while True:
        pause = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        readable, _, _ = select.select([one, other], [], [], pause)
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, target, frame = waiting.popleft()
            _write(target, frame)
        for source in readable:
            frame = os.read(source, _FRAME_BYTES)
            if lots.random() >= loss:
                waiting.append((now + delay_s, facing[source], frame))


def _write(target: int, frame: bytes) -> None:
    with suppress(OSError):  # its queue is full or its bridge is down: a frame that is lost
        os.write(target, frame)


if __name__ == "__main__":
    near, far, name, delay_ms, loss_share = sys.argv[1:]
    ends = open_tap(f"{name}-n", near), open_tap(f"{name}-f", far)
    print("ready", flush=True)
    forward(*ends, delay_s=float(delay_ms) / 1000, loss=float(loss_share))
