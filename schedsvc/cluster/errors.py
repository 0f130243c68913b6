"""Names the ways in which an exchange with the store can fail."""

__all__ = ["StoreError", "StoreRefusedError", "Words", "WritesRefusedError"]

#: A command of the store with its arguments.
Words = tuple[str | bytes | int, ...]


class StoreError(Exception):
    """The store does not answer, or not as it should; the next try may succeed."""


class StoreRefusedError(StoreError):
    """The store cannot be used as it is; the message says what an operator has to change."""


class WritesRefusedError(StoreRefusedError):
    """The store answers and refuses writes, so it counts as away."""

    #: The refused command; empty: none was sent yet.
    words: Words = ()
