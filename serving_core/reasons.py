"""Define the reasons of failed requests, as sent from node to coordinator and from coordinator to client
(ErrorInfo.reason).
"""

BAD_PARAM = "BAD_PARAM"
PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
MALFORMED_REQUEST = "MALFORMED_REQUEST"
MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
NODE_NOT_FOUND = "NODE_NOT_FOUND"
NO_OTHER_NODE = "NO_OTHER_NODE"  # the command would leave the fleet without a node for prefill or decode
DRAIN_ENDED = "DRAIN_ENDED"  # the drained node gets work again, so the wait for it to become empty ends
DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
QUEUE_FULL = "QUEUE_FULL"  # a queue has reached its limit, or no decode credit came in time
WOULD_BE_LATE = "WOULD_BE_LATE"  # the SLO could not be met; retry_after_s in the metadata tells when it could be
NO_PREFILL_WORKER = "NO_PREFILL_WORKER"
NO_DECODE_WORKER = "NO_DECODE_WORKER"
ABORTED = "ABORTED"  # by its id, where the partial output cannot be returned
DRAINING = "DRAINING"
WORKER_LOST = "WORKER_LOST"
TRANSFER_FAILED = "TRANSFER_FAILED"  # between nodes: the KV did not arrive in time; public as WORKER_LOST
# Inside a decode node: the prefill node ended its attempt, and reports the reason itself
TRANSFER_ABORTED = "TRANSFER_ABORTED"
TRANSFER_REVOKED = "TRANSFER_REVOKED"  # inside a prefill node: the decode node has revoked its credit for now
KV_CHECKSUM_MISMATCH = "KV_CHECKSUM_MISMATCH"
PAIRING_MISMATCH = "PAIRING_MISMATCH"
NAME_TAKEN = "NAME_TAKEN"  # inside the fleet: another process is attached under the node's name
ENGINE_ERROR = "ENGINE_ERROR"
STEP_FAILED = "STEP_FAILED"  # inside the fleet: a step gave no result for the request; public as ENGINE_ERROR
SLOW_READER = "SLOW_READER"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
UNAUTHENTICATED = "UNAUTHENTICATED"
