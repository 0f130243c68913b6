"""The VTC paper's own server, first come, first served: what its measurements were taken with."""

from collections import deque

from schedsvc._core import GRANTED, InvariantError
from schedsvc.sim.front import Verdict
from schedsvc.sim.requests import NEVER, Requests


class PeakFront:
    """Admits in order of arrival while the peak of the running requests' memory fits.

    The memory test knows every output length, as that server does (its clients ignore the end of
    text): with requests sorted by what is left to produce, each one's end is a moment at which
    all that run longer still hold memory (Sheng et al., S-LoRA, arXiv 2311.03285). In one poll
    at most `batch_tokens_max` input tokens are admitted. A poll costs O(running log running) for
    each request that it considers.
    """

    listens = True

    def __init__(self, requests: Requests, capacity_tokens: int, batch_tokens_max: int) -> None:
        self._requests = requests
        self._capacity_tokens = capacity_tokens
        self._batch_tokens_max = batch_tokens_max
        self._queue: deque[int] = deque()
        self._produced: dict[int, int] = {}

    def arrive(self, now_ns: int, index: int) -> None:
        """Queue a request."""
        self._queue.append(index)

    def progress(self, now_ns: int, index: int, output_tokens: int) -> None:
        """Note how far a running request is."""
        self._produced[index] = output_tokens

    def complete(self, now_ns: int, index: int, *, served: bool = True) -> None:
        """Forget a request."""
        del self._produced[index]

    def poll(self, now_ns: int) -> list[Verdict]:
        """Admit what fits."""
        verdicts = []
        batch_tokens = 0
        while self._queue:
            index = self._queue[0]
            batch_tokens += self._requests.prompt_tokens[index]
            if batch_tokens > self._batch_tokens_max or not self._fits(index):
                break
            self._queue.popleft()
            self._produced[index] = 0
            verdicts.append(Verdict(index, GRANTED, 0))
        return verdicts

    def next_ns(self) -> int:
        """Nothing is due without an event."""
        return NEVER

    def reserved_tokens(self, now_ns: int) -> int | None:
        """Nothing is reserved; the future is foreseen."""
        return None

    def digest(self) -> int:
        """Say nothing: the world digests the order of the verdicts."""
        return 0

    def check(self, now_ns: int, *, ended: bool) -> None:
        """At the end nothing is open."""
        if ended and (self._queue or self._produced):
            raise InvariantError("requests are left in the peak form's queue")

    def _fits(self, index: int) -> bool:
        prompt, output = self._requests.prompt_tokens, self._requests.output_tokens
        futures = [(output[at] - done, prompt[at] + done) for at, done in self._produced.items()]
        futures.append((output[index], prompt[index]))
        futures.sort(reverse=True)
        held = 0
        for count, (left, now) in enumerate(futures, 1):
            held += now
            if held + left * count >= self._capacity_tokens:
                return False
        return True
