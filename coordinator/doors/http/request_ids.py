"""The ids of the requests that one call becomes. Pure."""

from coordinator.doors.validation import MAX_REQUEST_ID_CHARS, bad


def ids_of(request_id: str, count: int) -> list[str]:
    """The call's own where there is one request, else with a number behind it. Raises RequestError where that makes it
    too long."""
    if count == 1:
        return [request_id]
    ids = [f"{request_id}-{index}" for index in range(count)]
    limit = MAX_REQUEST_ID_CHARS - len(ids[-1]) + len(request_id)
    if limit < len(request_id) <= MAX_REQUEST_ID_CHARS:
        raise bad("request_id", f"has {len(request_id)} characters, the limit for {count} requests is {limit}")
    return ids
