"""The terms that a request sets for the scheduler: longest wait, deadline, class, session.

The gate reads these headers from any caller. Each can make only that caller's own request leave
earlier, or names a class. A class that the scheduler does not have, or that the tenant may not
name, counts as the tenant's own: SDKs name tiers that no configuration has. A session only divides
what the caller's own tenant gets. `SCHEDSVC_REQUEST_HEADERS` lists the headers that are read. A
header of another kind whose value cannot be used returns 400.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.asgi import Scope
from schedsvc_vllm.identity import once
from schedsvc_vllm.settings import DEADLINE, LLM_D_OBJECTIVE, LLM_D_TTFT, MAX_QUEUE, SESSION

MS_MAX = 86_400_000
_CLASS_BYTES_MAX = 64
_SESSION_BYTES_MAX = 256
_NUMBER = re.compile(rb"\d{1,9}(\.\d{0,9})?", re.ASCII)
_TIER = "service_tier"
_OWN = ""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one request, as AdmitRequest has them; 0 and "": the scheduler's default.

    `states_tier`: the request named a tier or a class, so its answer states the one that counted.
    """

    queue_ttl_ms: int = 0
    deadline_ms: int = 0
    request_class: str = ""
    states_tier: bool = False
    session: str = ""

    @property
    def wait_s_max(self) -> float:
        """The longest that the caller waits for its turn; infinity: it does not say."""
        limits = [ms for ms in (self.queue_ttl_ms, self.deadline_ms) if ms]
        return min(limits) / 1_000 if limits else math.inf

    def after(self, waited_s: float) -> Terms:
        """Return the terms of a request that has waited already: its limits count from then."""
        waited_ms = int(waited_s * 1_000)
        return replace(
            self,
            queue_ttl_ms=max(1, self.queue_ttl_ms - waited_ms) if self.queue_ttl_ms else 0,
            deadline_ms=max(1, self.deadline_ms - waited_ms) if self.deadline_ms else 0,
        )


_NONE = Terms()


class TermsReader:
    """Reads the terms of requests. `names`: the headers that are read."""

    def __init__(self, names: tuple[str, ...], *, class_from_service_tier: bool) -> None:
        self._names = frozenset(names)
        self._read = frozenset(name.encode() for name in names)
        self._class_from_tier = class_from_service_tier

    def read(self, scope: Scope, body: Mapping[str, Any]) -> Terms:
        """Return a request's terms. O(headers). Raises BadRequestError, which names the field."""
        has_tier = self._class_from_tier and _TIER in body
        if not has_tier and self._read.isdisjoint([name for name, _ in scope["headers"]]):
            return _NONE  # as nearly all requests
        # The least TTL: the scheduler grants at arrival what has room. 0 would be its default.
        wait_ms = self._milliseconds(scope, MAX_QUEUE, 0)
        deadline_ms = self._milliseconds(scope, DEADLINE, 1)
        if deadline_ms is None:
            # llm-d's routers write 0 for "no target".
            deadline_ms = self._milliseconds(scope, LLM_D_TTFT, 0)
        named = self._class(scope, body)
        return Terms(
            queue_ttl_ms=0 if wait_ms is None else max(1, wait_ms),
            deadline_ms=deadline_ms or 0,
            request_class=_OWN if named is None else named,
            states_tier=named is not None,
            session=self._session(scope),
        )

    def _session(self, scope: Scope) -> str:
        """Return the session that a request is a turn of; "": it names none, or it is not read."""
        value = once(scope, SESSION.encode()).strip() if SESSION in self._names else b""
        text = value.decode("latin-1")
        if not text.isprintable() or len(text.encode()) > _SESSION_BYTES_MAX:
            raise BadRequestError(
                f"{SESSION}: {text[:40]!r} is no session: send at most {_SESSION_BYTES_MAX}"
                " printable bytes, or leave the header out",
                SESSION,
            )
        return text

    def _milliseconds(self, scope: Scope, name: str, least: int) -> int | None:
        """Return a header's time, rounded up; None: it is not there, or not read."""
        value = once(scope, name.encode()).strip() if name in self._names else b""
        if not value:
            return None
        number = math.ceil(float(value)) if _NUMBER.fullmatch(value) else -1
        if not least <= number <= MS_MAX:
            text = value[:40].decode("latin-1")
            raise BadRequestError(
                f"{name}: {text!r} is not a number of milliseconds from {least} to {MS_MAX};"
                " send one, such as 500, or leave the header out",
                name,
            )
        return number

    def _class(self, scope: Scope, body: Mapping[str, Any]) -> str | None:
        """Return the priority class that a request names; None: it names no class and no tier."""
        if LLM_D_OBJECTIVE in self._names:
            value = once(scope, LLM_D_OBJECTIVE.encode()).strip()
            if value:
                return _class_name(value.decode("latin-1"))
        tier = body.get(_TIER) if self._class_from_tier else None
        if not isinstance(tier, str):
            return None
        return _OWN if tier in ("auto", "default") else _class_name(tier)


def _class_name(value: str) -> str:
    """Return a name that can be that of a class, else the tenant's own."""
    fits = value.isprintable() and len(value.encode("utf-8", "replace")) <= _CLASS_BYTES_MAX
    return value if fits else _OWN
