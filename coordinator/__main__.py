"""`python -m coordinator MODEL`: one coordinator process."""

import os

from serving_core.interrupts import end_at_once

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported; what matters is in our own log lines

if __name__ == "__main__":
    end_at_once()
    from coordinator.process import main

    main()
