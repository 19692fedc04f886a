"""Start a node process in the prefill role: `python -m prefill_node MODEL`."""

from serving_core.process.extras import end_without_base
from serving_core.process.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()
    end_without_base()
    from serving_node.process import node_command

    node_command("prefill")()
