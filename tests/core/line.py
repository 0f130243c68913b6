"""A pool that serves one request a second, so that waits can be computed by hand."""

from schedsvc import _core as core

from .support import SECOND, admit, make


class Line:
    """Runs a pool for two requests at a time, of which one ends every second."""

    def __init__(self, *flows: tuple[str, int], **more: int) -> None:
        hour = {"queue_ttl_ns": 3600 * SECOND, "lease_ttl_ns": 3600 * SECOND}
        self.s = make(*flows, capacity=40, **(hour | more))
        self.now_ns = 0
        self.turn_ns = SECOND  # in which one ends
        self.serial = 0
        self.running: list[core.Decision] = []

    def ask(self, flow: int = 0, count: int = 1) -> None:
        for _ in range(count):
            self.serial += 1
            admit(self.s, self.now_ns, f"r{self.serial}", flow=flow, tag=self.serial)
        self.running += self.s.poll(self.now_ns)

    def tick(self, turns: int = 1) -> list[int]:
        """Let one end each turn; return those that are granted instead."""
        granted = []
        for _ in range(turns):
            self.now_ns += self.turn_ns
            if self.running:
                self.s.complete(self.now_ns, self.running.pop(0).lease_id, 1, output_tokens=10)
            decisions = [d for d in self.s.poll(self.now_ns) if d.outcome == core.GRANTED]
            self.running += decisions
            granted += [d.tag for d in decisions]
        return granted

    def expected_s(self, flow: int = 0) -> float:
        row = self.s.flow_stats(self.now_ns, flow)
        return float(row["wait_expected_ms"]) / 1_000
