"""The memory of a GPU that is in use, by the driver."""

import time

from serin.machine.hardware import Nvml

LEFT_BYTES = 64 << 20  # the driver's own tables grow a little
_RETURNED_S = 60.0  # the kernel frees a killed process's memory a moment after its end
_LOOK_S = 0.1


def free_bytes(device: str) -> int:
    nvml = Nvml.open()
    assert nvml is not None, "no driver"
    free = nvml.free_bytes(device)
    assert free is not None, "the driver does not tell the free memory"
    return free


def until_returned(device: str, free_before: int, *, but_bytes: int = 0) -> None:
    """Waits until the GPU has as much free memory as before, but for `but_bytes` and what the driver keeps;
    AssertionError names what is left."""
    nvml = Nvml.open()
    assert nvml is not None, "no driver"
    deadline = time.monotonic() + _RETURNED_S
    while True:
        left = free_before - free_bytes(device) - but_bytes
        if left < LEFT_BYTES:
            print(f"{left >> 20} MB are not returned")
            return
        by_process = nvml.process_bytes(device)
        assert time.monotonic() < deadline, f"{left >> 20} MB are left on {device}, held by {by_process}"
        time.sleep(_LOOK_S)
