"""Reads service at other members of a cluster into the twin."""

from .twin_operator_actions import OperatorActions
from .twin_positions import ALL, POOL

Row = tuple[bytes, bytes, bytes, int, int]
REMOTE_MAX = 1 << 61


class RemoteService(OperatorActions):
    """Charges flows for their service elsewhere."""

    def set_shared(self, now_ns: int) -> None:
        self.enter(now_ns)
        self.positions.share()

    def set_remote_service(self, now_ns: int, rows: list[Row]) -> int:
        self.enter(now_ns)
        return sum(self._charge(*row) for row in rows)

    def _charge(
        self, tenant: bytes, cls: bytes, domain: bytes, charged: int, refunded: int
    ) -> bool:
        scope = self.limits["fairness_domain"]
        known = not domain or domain in self.quotas.names
        if scope == POOL or not self.pools or not known or tenant not in self.flow_names:
            return False
        base = self.flow_names.index(tenant)
        of_class = self.classes.find(cls)
        flows = [f for f in self.classes.siblings(base) if self.flows[f].cls == of_class]
        if not flows:
            return False
        [flow] = flows
        f, net = self.flows[flow], charged - refunded
        more = min(REMOTE_MAX, abs(net) * 1000 // f.weight_milli) * (1 if net >= 0 else -1)
        f.vtc = max(0, f.vtc + more)
        self.positions.charge(flow, b"" if scope == ALL else domain, more)
        return True
