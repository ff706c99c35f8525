"""Takes the place of Prefect's engine: prints its pid, then ends with the code in PREFECT__TEST, or waits for a signal
if that is `wait`."""

import os
import signal
import sys

if __name__ == "__main__":
    asked = os.environ["PREFECT__TEST"]
    print(f"{os.environ['PREFECT__FLOW_RUN_ID']} {os.getpid()} {' '.join(sys.argv[1:])}", flush=True)
    if asked == "wait":
        signal.pause()
    sys.exit(int(asked))
