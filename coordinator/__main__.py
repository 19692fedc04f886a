"""`python -m coordinator MODEL`: one coordinator process."""

from serving_core.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()
    from coordinator.process import main

    main()
