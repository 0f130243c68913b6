"""Records what servers meet: unknown tenants, wrong keys, refusals, gaps, files that end anywhere.

A core is driven by messages, in virtual time, and leaves a recording on the disk.
"""

from random import Random

from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc._core import CANCELLED, COMPLETED, GRANTED, CallerError
from schedsvc.config import Config
from schedsvc.records.recording.start import Recording

SECOND, HOUR = 10**9, 3_600 * 10**9
STEP_NS = 20_000_000  # the engine gives each running request a token in it
LISTED = ("batch", "chat", "eval")
STRANGERS = ("stranger", "other", "zoë", "a/b c", "n" * 256, "x.y:z", "0")


def drawn_config(rnd):
    """Draw the data of a configuration file."""
    data = {
        "listeners": [{"tcp": "127.0.0.1:0"}],
        "unknown_tenants": rnd.choice(("own", "share", "refuse")),
        "scheduler": {"queue_ttl_ms": rnd.choice((6_000, 30_000))},
        "tenants": [{"name": name} for name in LISTED[: rnd.randint(0, 3)]],
        "pools": [
            {"name": f"gpu-{at}", "capacity_tokens": rnd.choice((4_096, 8_000)), "max_running": 8}
            for at in range(rnd.choice((0, 1, 1, 2)))
        ],
    }
    if rnd.random() < 0.5:
        data["scheduler"]["flow_queue_max"] = 3
    if rnd.random() < 0.4:
        data["classes"] = [{"name": "low", "rank": 5}]
        for tenant in data["tenants"][:1]:
            tenant["class"] = "low"
    if rnd.random() < 0.4:
        data["groups"] = [{"name": "lab", "quota": {"tokens_per_minute": 20_000}}]
        for tenant in data["tenants"][:2]:
            tenant["group"] = "lab"
    if rnd.random() < 0.3:
        for tenant in data["tenants"][-1:]:
            tenant["quota"] = {"requests_per_minute": 30, "over": "refuse"}
    if rnd.random() < 0.2:
        data["mode"] = "dry_run"
    return data


class OddServer:
    """Drives a recorded core; what it does is drawn from a seed."""

    def __init__(self, seed, path):
        self.random = Random(seed)
        self.data = drawn_config(self.random)
        self.path = path
        self._recording = Recording(Config.model_validate({**self.data, "record": str(path)}), 0)
        self._recording.begin()
        self._core, self._now_ns = self._recording.core, 1
        self._running, self._waiting = {}, {}

    def run(self, steps):
        """Take the steps, then leave what runs, and close or cut the file."""
        rnd = self.random
        reports = rnd.random() < 0.8
        for number in range(steps):
            if rnd.random() < 0.6:
                self._ask(number)
            self._now_ns += rnd.choice((SECOND // 10, SECOND // 2, SECOND))
            if rnd.random() < 0.02:
                self._now_ns += rnd.choice((HOUR, 30 * SECOND))
            self._poll()
            for lease in list(self._running):
                self._work(lease, reports)
        self._recording.close()
        whole = self.path.read_bytes()
        way = rnd.random()
        if way < 0.12:
            self.path.write_bytes(whole[: rnd.randrange(len(whole))])
        elif way < 0.2:
            at = rnd.randrange(len(whole))
            self.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])

    def _ask(self, number):
        rnd = self.random
        prompts = rnd.choice((1, 1, 1, 3))
        sizes = [rnd.choice((1, 30, 200, 900)) for _ in range(prompts)]
        if rnd.random() < 0.03:
            sizes = [10_000_000]
        named = {"tenant": rnd.choice((*LISTED, *LISTED, *STRANGERS))}
        if rnd.random() < 0.1:
            named = {"api_key_sha256": rnd.randbytes(32)}
        message = pb.AdmitRequest(
            request_id=f"r{number}", input_tokens=sizes, max_output_tokens=rnd.choice((16, 400)),
            reports_progress=True, request_class=rnd.choice(("", "", "low")), **named,
        )  # fmt: skip
        if rnd.random() < 0.05:
            message.pools.append("elsewhere")
        try:
            answer = self._core.admit_wire(self._now_ns, 0, message.SerializeToString())
        except CallerError:
            return  # a class that nothing knows
        if isinstance(answer, int):
            self._waiting[answer] = message
            return
        response = pb.AdmitResponse.FromString(answer)
        if response.outcome == GRANTED:
            self._begin(response.grant.lease_id, response.grant.pool_epoch, message)

    def _begin(self, lease, epoch, message):
        self._running[lease] = [epoch, self._now_ns, sum(message.input_tokens), message]

    def _poll(self):
        for decision in self._core.poll(self._now_ns):
            message = self._waiting.pop(decision.handle, None)
            if decision.outcome == GRANTED:
                self._begin(decision.lease_id, decision.pool_epoch, message)
            else:
                self._running.pop(decision.lease_id, None)
        for handle in list(self._waiting):
            if self.random.random() < 0.02:
                self._core.cancel(self._now_ns, handle)
                del self._waiting[handle]

    def _work(self, lease, reports):
        epoch, began_ns, prompt, message = self._running[lease]
        output = min((self._now_ns - began_ns) // STEP_NS, message.max_output_tokens)
        way = self.random.random()
        if output == message.max_output_tokens or way < 0.05:
            outcome = CANCELLED if way < 0.05 else COMPLETED
            usage = (prompt, 0, output) if way < 0.9 else ()
            self._core.complete(self._now_ns, lease, epoch, outcome, *usage)
            del self._running[lease]
        elif way < 0.06:
            del self._running[lease]  # it is never heard of again
        elif reports:
            self._core.progress(self._now_ns, lease, epoch, prompt, 0, output)


def record_odd(seed, path, steps=150):
    """Record, and return the data of the server's configuration file."""
    server = OddServer(seed, path)
    server.run(steps)
    return server.data
