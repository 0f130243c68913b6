"""Connects what a leader saves with those that follow it, and what they followed with a store."""

from collections.abc import Callable

from schedsvc_client.v1 import follow_pb2 as pb

from schedsvc.records.state import OperatorRows, StateWriter, Store

__all__ = ["FollowedRows", "Resume", "adopting", "forgetting"]

#: Changes what a state file holds before a core is restored from it.
Resume = Callable[[Store], None]


class FollowedRows:
    """Holds the rows that a state writer takes over, as messages."""

    def __init__(self, keeper: StateWriter) -> None:
        self._keeper, self._places = keeper, keeper.places
        self.begin = keeper.begin_feed

    async def collect(self) -> None:
        """Take over what changed in the core. Raises Broken."""
        await self._keeper.collect()
        await self._places.collect()

    def places(self, number: int) -> tuple[int, list[pb.QueuedPlace]]:
        """Return the number of the last change of a place, and places after another. O(places)."""
        present_ns = self._places.now_ns()
        return self._places.number, [
            pb.QueuedPlace(
                number=place.place,
                key=place.key,
                waited_ns=present_ns - place.since_ns if place.key else 0,
            )
            for place in self._places.since(number)
        ]

    def since(self, number: int) -> tuple[int, list[pb.StateRow]]:
        """Return the number of the last change, and the rows after another one. O(rows)."""
        feed = self._keeper.feed
        present_ns = feed.wall_ns()
        return feed.number, [
            pb.StateRow(
                key=row.key,
                value=row.value or b"",
                age_ns=max(0, present_ns - row.at_ns),
                is_gone=row.value is None,
            )
            for row in feed.since(number)
        ]

    def operators(self) -> pb.OperatorState:
        """Return what operators have set. O(entries)."""
        hash_key, modes, entries = self._keeper.operators()
        return pb.OperatorState(hash_key=hash_key, modes=modes, tenants=entries)


def adopting(rows: dict[bytes, tuple[bytes, int]], operators: pb.OperatorState) -> Resume:
    """Replace what a state file holds by what was followed."""
    saved = [(key, value, at_ns) for key, (value, at_ns) in rows.items()]
    said = OperatorRows(operators.hash_key, operators.modes, dict(operators.tenants))
    return lambda store: store.adopt(saved, said)


def forgetting(store: Store) -> None:
    """Let a state file hold no rows of the core: they are older than the last leader's."""
    store.rows = []
