"""Measure the CPU time that hostile bodies cost the API server's event loop in the gate.

The gate may add a quarter of the time of `json.loads` for the same body, or 20 ms.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.body_limits import check_bytes, check_elements
from schedsvc_vllm.estimate import TokenRatios
from schedsvc_vllm.request_sizing import Sizes, parse_json, size_call
from schedsvc_vllm.routes import route_of

from bench.harness import json_option, verdict

ADDED_MS = 20.0
PATH = "/v1/chat/completions"


def chat(*messages: str, more: str = "") -> bytes:
    """Write a chat request of these messages."""
    return f'{{"stream":true,{more}"messages":[{",".join(messages)}]}}'.encode()


def said(*parts: str) -> str:
    """Write a message of these parts."""
    return f'{{"role":"user","content":[{",".join(parts)}]}}'


def image(size: int) -> str:
    """Write a part with an image of `size` bytes."""
    return f'{{"type":"image_url","image_url":{{"url":"data:image/png;base64,{"x" * size}"}}}}'


SHAPES: dict[str, Callable[[], bytes]] = {
    "2,000,000 messages": lambda: chat(*['{"role":"user"}'] * 2_000_000),
    "16,000 messages": lambda: chat(*['{"role":"user"}'] * 16_000),
    "10,000 messages with text": lambda: chat(*['{"role":"user","content":"hi"}'] * 10_000),
    "1,000,000 parts": lambda: chat(said(*['{"type":"text","text":"a"}'] * 1_000_000)),
    "10,000 parts": lambda: chat(said(*['{"type":"text","text":"a"}'] * 10_000)),
    "10,000 tool calls": lambda: chat(said(*['{"type":"tool_use","id":1}'] * 10_000)),
    "130,000 texts": lambda: chat(said(*['"a"'] * 130_000)),
    "3,000,000 tools": lambda: chat(said('"x"'), more=f'"tools":[{",".join(["{}"] * 3_000_000)}],'),
    "30,000 tools": lambda: chat(said('"x"'), more=f'"tools":[{",".join(["{}"] * 30_000)}],'),
    "an image of 30 MB": lambda: chat(said(image(30_000_000))),
    "a text of 2 MB": lambda: chat(f'{{"role":"user","content":"{"x y " * 500_000}"}}'),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU times of one body."""

    shape: str
    context_tokens: int
    parse_ms: float
    added_ms: float
    answer: str

    @property
    def allowed_ms(self) -> float:
        """Return the most that the gate may add."""
        return max(ADDED_MS, self.parse_ms / 4)


def costs(context_tokens: int, rounds: int = 3) -> Iterator[Cost]:
    """Measure every shape; the least of some rounds counts, since noise only adds."""
    for shape, make in SHAPES.items():
        raw = make()
        found = [_cost(raw, context_tokens) for _ in range(rounds)]
        parse_ms, added_ms = (min(column) for column in list(zip(*found, strict=True))[:2])
        yield Cost(shape, context_tokens, parse_ms, added_ms, found[0][2])


def _cost(raw: bytes, context_tokens: int) -> tuple[float, float, str]:
    began = time.process_time()
    json.loads(raw)
    parse_s = time.process_time() - began
    parsed_s = 0.0

    def parse(data: bytes) -> Any:
        nonlocal parsed_s
        parsing = time.process_time()
        body = parse_json(data)
        parsed_s = time.process_time() - parsing
        return body

    began = time.process_time()
    answer = answer_of(raw, context_tokens, parse)
    added_s = time.process_time() - began - parsed_s
    return parse_s * 1e3, added_s * 1e3, answer


def answer_of(raw: bytes, context_tokens: int, parse: Callable[[bytes], Any] = parse_json) -> str:
    """Read a body as the gate does; return "taken", or the status with which it is refused."""
    try:
        check_bytes(raw, context_tokens)
        body = parse(raw)
        check_elements(body)
        size_call(
            route_of(PATH, body), raw, body, sizes=Sizes(context_tokens, 100_000), count=None,
            ratios=TokenRatios(), tenant="t", reads_answer=True,
        )  # fmt: skip
    except BadRequestError as error:
        return str(error.status)
    return "taken"


@click.command(epilog="Example: python -m bench.bodies --context 131072")
@click.option(
    "--context",
    default=8_192,
    show_default=True,
    type=click.IntRange(min=1),
    help="The model's context, in tokens.",
)
@json_option
def main(context: int, as_json: bool) -> None:
    """Show the cost of each body; exit with status 1 if one exceeds its limit."""
    found = list(costs(context))
    rows = [asdict(cost) | {"allowed_ms": cost.allowed_ms} for cost in found]
    holds = all(cost.added_ms <= cost.allowed_ms for cost in found)
    verdict({"bodies": rows, "holds": holds}, as_json, _show)


def _show(report: dict[str, Any]) -> None:
    table = Table("body", "json.loads", "gate adds", "may add", "answer")
    for row in report["bodies"]:
        times = (f"{row[name]:,.1f} ms" for name in ("parse_ms", "added_ms", "allowed_ms"))
        table.add_row(row["shape"], *times, row["answer"])
    Console().print(table)


if __name__ == "__main__":
    main(prog_name="python -m bench.bodies")
