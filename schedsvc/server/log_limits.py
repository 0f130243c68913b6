"""Limits the lines that a peer may cause in the log: some at once, then one a second."""

from collections import OrderedDict

from schedsvc.service.gcra import SECOND_NS, Bucket

__all__ = ["PeerLimits", "host_of"]

#: Lines of one peer at once, and of all of them together.
_BURST, _BURST_OF_ALL = 100, 1_000
#: Lines of all peers together, in a second.
_RATE_OF_ALL = 20
_COST_OF_ALL_NS = SECOND_NS // _RATE_OF_ALL
#: Peers with an allowance of their own; further ones share one.
_PEERS_MAX = 1_024


class PeerLimits:
    """Keeps a bucket for each peer, and one for all of them together."""

    def __init__(self) -> None:
        #: Lines that were left out.
        self.suppressed = 0
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()
        self._left_out: dict[str, int] = {}
        self._all = Bucket(_BURST_OF_ALL * SECOND_NS // _RATE_OF_ALL)

    def admit(self, peer: str, now_ns: int) -> int:
        """Ask for one line of a peer. O(1).

        Returns -1 if it is left out, else how many of this peer were since the line before.
        """
        key = self._key(host_of(peer), now_ns)
        bucket = self._buckets.get(key) or Bucket(_BURST * SECOND_NS)
        if bucket.wait_ns(now_ns, SECOND_NS) or self._all.wait_ns(now_ns, _COST_OF_ALL_NS):
            self.suppressed += 1
            if key in self._buckets:  # nothing is kept of peers that have had no line yet
                self._left_out[key] = self._left_out.get(key, 0) + 1
            return -1
        bucket.take(now_ns, SECOND_NS)
        self._all.take(now_ns, _COST_OF_ALL_NS)
        self._buckets[key] = bucket
        self._buckets.move_to_end(key)
        return self._left_out.pop(key, 0)

    def _key(self, host: str, now_ns: int) -> str:
        if host in self._buckets or len(self._buckets) < _PEERS_MAX:
            return host
        oldest = next(iter(self._buckets))
        if self._buckets[oldest].due_ns > now_ns:
            return ""
        # Its bucket is full: forgetting it changes nothing.
        del self._buckets[oldest]
        self._left_out.pop(oldest, None)
        return host


def host_of(peer: str) -> str:
    """Return gRPC's name of a peer without the port: each connection has another one."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
