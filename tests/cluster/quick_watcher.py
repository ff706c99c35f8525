"""The watcher's process with short pauses between uploads: `python -m tests.cluster.quick_watcher`."""

from serin.watcher import share_duty, watcher

if __name__ == "__main__":
    share_duty.ROUND_S = 1.0  # type: ignore[misc]
    watcher.main()
