"""Why a request failed, in the words that travel: node to coordinator and coordinator to client (ErrorInfo.reason)."""

BAD_PARAM = "BAD_PARAM"
PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
MALFORMED_REQUEST = "MALFORMED_REQUEST"
MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
NODE_NOT_FOUND = "NODE_NOT_FOUND"
NO_OTHER_NODE = "NO_OTHER_NODE"  # what is asked of a node would leave the fleet without a reader or a writer
DRAIN_ENDED = "DRAIN_ENDED"  # who waited for a node to be empty waits in vain: it is given work again
DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
QUEUE_FULL = "QUEUE_FULL"  # a queue has reached its limit, or no decode credit came in time
WOULD_BE_LATE = "WOULD_BE_LATE"  # limits on time could not be kept; retry_after_s in the metadata says when they could
NO_PREFILL_WORKER = "NO_PREFILL_WORKER"
NO_DECODE_WORKER = "NO_DECODE_WORKER"
ABORTED = "ABORTED"  # by its id, where what there is of an answer cannot stand for it
DRAINING = "DRAINING"
WORKER_LOST = "WORKER_LOST"
TRANSFER_FAILED = "TRANSFER_FAILED"  # between nodes: the KV did not arrive in time; public as WORKER_LOST
TRANSFER_ABORTED = "TRANSFER_ABORTED"  # inside a decode node: the prefill node ended its attempt, and says why itself
TRANSFER_REVOKED = "TRANSFER_REVOKED"  # inside a prefill node: the decode node has taken its blocks back for now
KV_CHECKSUM_MISMATCH = "KV_CHECKSUM_MISMATCH"
PAIRING_MISMATCH = "PAIRING_MISMATCH"
NAME_TAKEN = "NAME_TAKEN"  # inside the fleet: another process is attached under the node's name
ENGINE_ERROR = "ENGINE_ERROR"
STEP_FAILED = "STEP_FAILED"  # inside the fleet: a step of a node gave nothing for the request; public as ENGINE_ERROR
SLOW_READER = "SLOW_READER"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
UNAUTHENTICATED = "UNAUTHENTICATED"
