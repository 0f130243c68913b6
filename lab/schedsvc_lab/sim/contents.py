"""Prefix hashes and adapters of prompts in columns, for traces that have them."""

from array import array
from collections.abc import Iterable, Sequence

from schedsvc_lab.engine import Future, keys_of_hashes
from schedsvc_lab.workload import Record

_NO_ADAPTER = -1
_HASH_MASK = (1 << 64) - 1


class Contents:
    """Prefix hashes and adapters by place in the trace. 8 bytes for each hash."""

    __slots__ = ("_adapter", "_hash_tokens", "_hashes", "_starts", "adapters")

    def __init__(self) -> None:
        self.adapters: list[str] = []
        self._adapter = array("i")
        self._hashes = array("Q")
        self._starts = array("q", (0,))
        self._hash_tokens = array("i")

    @classmethod
    def of(cls, records: Iterable[Record | None]) -> "Contents":
        """Take over the contents of the records. O(hashes)."""
        contents = cls()
        for record in records:
            contents.append(record)
        return contents

    def append(self, record: Record | None) -> None:
        """Add the next request. O(hashes of it)."""
        adapter = None if record is None else record.adapter
        if adapter is not None and adapter not in self.adapters:
            self.adapters.append(adapter)
        self._adapter.append(_NO_ADAPTER if adapter is None else self.adapters.index(adapter))
        blocks = () if record is None or not record.block_tokens else record.blocks
        self._hashes.extend(block & _HASH_MASK for block in blocks)
        self._starts.append(len(self._hashes))
        self._hash_tokens.append(record.block_tokens or 0 if record is not None else 0)

    @property
    def has_prefixes(self) -> bool:
        """Whether any prompt has prefix hashes."""
        return len(self._hashes) > 0

    def adapter(self, place: int) -> str | None:
        """Return the adapter that a request needs."""
        adapter = self._adapter[place]
        return None if adapter == _NO_ADAPTER else self.adapters[adapter]

    def hashes(self, place: int, prompt_tokens: int) -> tuple[int, ...]:
        """Name a prompt's full pieces by their chained hashes, as a caller of Admit does."""
        start, tokens = self._starts[place], self._hash_tokens[place]
        full = prompt_tokens // tokens if tokens else 0
        return tuple(self._hashes[start : min(start + full, self._starts[place + 1])])

    def keys(
        self, place: int, prompt_tokens: int, block_size_tokens: int
    ) -> tuple[tuple[int, int], ...]:
        """Name the contents of each full block of a prompt. O(blocks)."""
        hashes = self._hashes[self._starts[place] : self._starts[place + 1]]
        if not hashes:
            return ()
        return keys_of_hashes(hashes, self._hash_tokens[place], prompt_tokens, block_size_tokens)

    def future(
        self, places: Sequence[int], prompt_tokens: Sequence[int], block_size_tokens: int
    ) -> Future:
        """Foresee the uses of every block; `places` are in order of arrival. O(blocks)."""
        return Future(
            (index, self._keys_with_adapter(place, prompt_tokens[index], block_size_tokens))
            for index, place in enumerate(places)
        )

    def _keys_with_adapter(
        self, place: int, prompt_tokens: int, block_size_tokens: int
    ) -> tuple[object, ...]:
        """Name blocks as the engine does: those of different adapters are never the same."""
        keys = self.keys(place, prompt_tokens, block_size_tokens)
        adapter = self.adapter(place)
        return keys if adapter is None else tuple((adapter, key) for key in keys)
