"""How many lines a peer may cause in the log: some at once, then one a second."""

from collections import OrderedDict

__all__ = ["PeerLimits", "host_of"]

_SECOND_NS = 1_000_000_000
#: Lines of one peer at once, and of all of them together.
_BURST, _BURST_OF_ALL = 100, 1_000
#: Lines of all peers together, in a second.
_RATE_OF_ALL = 20
#: Peers with an allowance of their own; further ones share one.
_PEERS_MAX = 1_024


class PeerLimits:
    """Token buckets, each kept as the time at which it is full again (GCRA)."""

    def __init__(self) -> None:
        #: Lines that were left out.
        self.suppressed = 0
        self._due_ns: OrderedDict[str, int] = OrderedDict()
        self._left_out: dict[str, int] = {}
        self._all_due_ns = 0

    def admit(self, peer: str, now_ns: int) -> int:
        """Ask for one line of a peer. O(1).

        Returns -1 if it is left out, else how many of this peer were since the line before.
        """
        key = self._key(host_of(peer), now_ns)
        due_ns = max(self._due_ns.get(key, 0), now_ns) + _SECOND_NS
        all_due_ns = max(self._all_due_ns, now_ns) + _SECOND_NS // _RATE_OF_ALL
        if (
            due_ns - now_ns > _BURST * _SECOND_NS
            or all_due_ns - now_ns > _BURST_OF_ALL * _SECOND_NS // _RATE_OF_ALL
        ):
            self.suppressed += 1
            if key in self._due_ns:  # nothing is kept of peers that have had no line yet
                self._left_out[key] = self._left_out.get(key, 0) + 1
            return -1
        self._due_ns[key], self._all_due_ns = due_ns, all_due_ns
        self._due_ns.move_to_end(key)
        return self._left_out.pop(key, 0)

    def _key(self, host: str, now_ns: int) -> str:
        if host in self._due_ns or len(self._due_ns) < _PEERS_MAX:
            return host
        oldest = next(iter(self._due_ns))
        if self._due_ns[oldest] > now_ns:
            return ""
        # Its bucket is full: forgetting it changes nothing.
        del self._due_ns[oldest]
        self._left_out.pop(oldest, None)
        return host


def host_of(peer: str) -> str:
    """Return gRPC's name of a peer without the port: each connection has another one."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
