"""Measures the output that final counts state above what their requests asked for."""


class Overstated:
    """Holds how far such output put each flow and each group ahead at once, at most.

    No promise counted it while its request ran. So the end of the request puts the flow ahead by
    this much more than by all that runs. A pool grants the flow nothing then before the others have
    caught up. So only what a pool charged since its last grant to the flow counts.
    """

    def __init__(self) -> None:
        self._since: dict[str, dict[str, int]] = {}  # by name and pool, since its last grant there
        self._most: dict[str, int] = {}

    def add(self, name: str, pool: str, more: int) -> None:
        """Count weighted micro-tokens that a final count stated above the request's limit."""
        since = self._since.setdefault(name, {})
        since[pool] = since.get(pool, 0) + more
        self._most[name] = max(self._most.get(name, 0), sum(since.values()))

    def granted(self, name: str, pool: str) -> None:
        """Note that a pool found the flow or the group behind the others."""
        self._since.get(name, {}).pop(pool, None)

    def most(self) -> dict[str, int]:
        """Return the most that each was ahead by this at one time."""
        return dict(self._most)
