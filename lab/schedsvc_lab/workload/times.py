"""Times as trace files write them."""

from datetime import datetime, timezone

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def timestamp_ns(text: str) -> int:
    """Return the ns since 1970 of `YYYY-MM-DD HH:MM:SS[.fraction][zone]`; the default is UTC.

    Takes fractions of any length (the Azure trace of 2023 has 7 digits) and drops the part below a
    nanosecond. Raises ValueError.
    """
    whole, dot, rest = text.strip().partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    if dot and not digits:
        raise ValueError("no digits after the decimal point")
    moment = datetime.fromisoformat(whole + rest[len(digits) :])
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * 10**9 + int((digits + "0" * 9)[:9])


class Since:
    """Turns moments into seconds after its first one."""

    def __init__(self) -> None:
        self._first_ns: int | None = None

    def __call__(self, now_ns: int) -> float:
        """Return the seconds after the first moment; negative before it."""
        if self._first_ns is None:
            self._first_ns = now_ns
        return (now_ns - self._first_ns) / 1e9
