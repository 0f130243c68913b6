# cython: overflowcheck=True
"""Computes how long a step takes."""

from collections.abc import Sequence as Points

MANY_STEPS = 1 << 60
"""More steps than any run has."""


class StepCost:
    """Computes the duration of a step in ns from its work.

    A step that only computes prompts takes `step + prefill + prefill_token * prompt tokens`; one
    that only decodes takes `step + decode(sequences) + decode_kv_token * KV tokens read`, where
    decode is piecewise linear between the points (sequences, ns) and goes on with the last slope.
    A step that does both reads the weights once, so of the two fixed parts (prefill, and decode of
    no sequence) only the larger one is paid, and everything that grows with the work is added up.
    Blocks that are swapped between device and host, or copied, and adapters that are loaded take
    their time before the step.
    """

    def __init__(
        self,
        step_ns: int,
        prefill_ns: int,
        prefill_token_ns: int,
        decode_kv_token_ns: int,
        decode_table_ns: tuple[int, ...],
        swap_token_ns: int = 0,
        copy_token_ns: int = 0,
        adapter_load_ns: int = 0,
    ) -> None:
        self.step_ns = step_ns
        self.prefill_ns = prefill_ns
        self.prefill_token_ns = prefill_token_ns
        self.decode_kv_token_ns = decode_kv_token_ns
        self.decode_table_ns = decode_table_ns
        self.swap_token_ns = swap_token_ns
        self.copy_token_ns = copy_token_ns
        self.adapter_load_ns = adapter_load_ns

    @classmethod
    def build(
        cls,
        *,
        step_ns: int,
        prefill_ns: int,
        prefill_token_ns: int,
        decode_kv_token_ns: int,
        decode_points: Points[tuple[int, int]],
        sequences_max: int,
        swap_token_ns: int = 0,
        copy_token_ns: int = 0,
        adapter_load_ns: int = 0,
    ) -> "StepCost":
        """Tabulate the decode cost of 0..sequences_max sequences. O(sequences_max)."""
        points = tuple(decode_points)
        table = tuple(_interpolate(points, n) for n in range(sequences_max + 1))
        return cls(
            step_ns,
            prefill_ns,
            prefill_token_ns,
            decode_kv_token_ns,
            table,
            swap_token_ns,
            copy_token_ns,
            adapter_load_ns,
        )

    def swap_ns(self, tokens: int) -> int:
        """Return how long blocks of `tokens` tokens take to the host or back. O(1)."""
        return self.swap_token_ns * tokens

    def copy_ns(self, tokens: int) -> int:
        """Return how long a copy of `tokens` tokens within the device takes. O(1)."""
        return self.copy_token_ns * tokens

    def duration_ns(self, prompt_tokens: int, decodes: int, kv_tokens: int) -> int:
        """Return the duration of one step. O(1).

        It computes `prompt_tokens` of prompts, and one token of each of `decodes` sequences, which
        together read `kv_tokens` of the cache.
        """
        table = self.decode_table_ns
        if prompt_tokens == 0:
            return self.step_ns + table[decodes] + self.decode_kv_token_ns * kv_tokens
        prefill = self.prefill_ns + self.prefill_token_ns * prompt_tokens
        if decodes == 0:
            return self.step_ns + prefill
        shared = min(self.prefill_ns, table[0])
        decode = table[decodes] + self.decode_kv_token_ns * kv_tokens
        return self.step_ns + prefill + decode - shared

    def decode_run_ns(self, steps: int, decodes: int, kv_tokens: int) -> int:
        """Return the duration of many decode steps, whose first reads `kv_tokens`. O(1)."""
        reads = steps * kv_tokens + decodes * (steps * (steps - 1) // 2)
        fixed = self.step_ns + self.decode_table_ns[decodes]
        return steps * fixed + self.decode_kv_token_ns * reads

    def decode_steps_done(self, elapsed_ns: int, decodes: int, kv_tokens: int) -> int:
        """Count the steps of such a run that end within a time. O(1).

        The greatest n with `decode_run_ns(n, ...) <= elapsed_ns`, a quadratic in n; MANY_STEPS if
        steps take no time.
        """
        if elapsed_ns < 0:
            return 0
        # 2 * decode_run_ns(n) = square * n**2 + linear * n
        square = self.decode_kv_token_ns * decodes
        fixed = self.step_ns + self.decode_table_ns[decodes]
        first_ns = fixed + self.decode_kv_token_ns * kv_tokens
        if not square:
            return elapsed_ns // first_ns if first_ns else MANY_STEPS
        half = 0.5 * square
        linear = first_ns - half
        steps = int(((linear * linear + 4.0 * half * elapsed_ns) ** 0.5 - linear) / square)
        # The root of a rounded number may be off.
        while self.decode_run_ns(steps, decodes, kv_tokens) > elapsed_ns:
            steps -= 1
        while self.decode_run_ns(steps + 1, decodes, kv_tokens) <= elapsed_ns:
            steps += 1
        return steps

    def decode_steps_until(self, duration_ns: int, decodes: int, kv_tokens: int) -> int:
        """Count the steps of such a run that begin before a time. O(1)."""
        if duration_ns <= 0:
            return 0
        return self.decode_steps_done(duration_ns - 1, decodes, kv_tokens) + 1


def _interpolate(points: tuple[tuple[int, int], ...], sequences: int) -> int:
    """Read the cost off the segment that the sequences lie in, or off the last one."""
    if len(points) == 1:
        return points[0][1]
    right = 1
    while right < len(points) - 1 and points[right][0] < sequences:
        right += 1
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (sequences - x0) // (x1 - x0)
