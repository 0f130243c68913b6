"""Finds requests by the ids that people know, and the id under which the scheduler knows one."""

import re

__all__ = ["known_ids"]

# Engines put these before the request's id in the body of an answer, or of an engine's log.
_BODY_ID = re.compile(
    r"(?:(?:chat)?cmpl|generate-tokens|embd|pooling|classify|score|rerank|trans(?:crib|lat)e)-(.+)"
)


def known_ids(request_id: str) -> tuple[str, ...]:
    """Return the ids to look for, in this order: as given, and without the engine's prefix."""
    body_id = _BODY_ID.fullmatch(request_id)
    return (request_id, *(body_id.groups() if body_id else ()))
