"""A JSON array is read item by item, whatever chunk its text is cut into."""

import io
import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from schedsvc_lab.workload import TraceReader, json_array
from schedsvc_lab.workload.json_array import ArrayReader, Malformed


def items(text: str) -> list[object]:
    return [item for _, item in ArrayReader(io.StringIO(text))]


def some_value(source: random.Random, depth: int = 0) -> object:
    kind = source.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return source.choice([None, True, False, -1.5e-7, 10**20, 0, -12])
    if kind in {1, 2, 3}:
        return "".join(source.choice('a"\\\n,[]{}é😀 ') for _ in range(source.randrange(12)))
    inside = [some_value(source, depth + 1) for _ in range(source.randrange(4))]
    return inside if kind == 4 else {str(at): item for at, item in enumerate(inside)}


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64])
def test_the_same_as_json_at_every_cut(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(json_array, "CHUNK_CHARS", chunk)
    source = random.Random(chunk)
    for seed in range(150):
        wanted = [some_value(source) for _ in range(source.randrange(5))]
        text = json.dumps(wanted, indent=source.choice([None, 1]), ensure_ascii=seed % 2 == 0)
        assert items(f" \n{text}\n ") == wanted, text


def test_lines_are_those_of_the_items() -> None:
    text = '[\n1,\n\n {"a":\n2}, 3\n,4]'
    assert [line for line, _ in ArrayReader(io.StringIO(text))] == [2, 4, 5, 6]


@pytest.mark.parametrize("chunk", [1, 5, 1 << 18])
@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        ("[1,\n 2 3]", (2, 4), "expected , or ]"),
        ("[1,\n]", (2, 1), "Expecting value"),
        ("[1", (1, 3), "the file ends within the array"),
        ("[", (1, 2), "the file ends within the array"),
        ('[{"a" 1}, {"b": 2}, {"c": 3}, {"d": 4}]', (1, 7), "Expecting ':' delimiter"),
        ("[1] 2", (1, 5), "text after the end of the array"),
        ("x", (1, 1), "expected ["),
    ],
)
def test_errors_have_a_place(
    monkeypatch: pytest.MonkeyPatch, chunk: int, text: str, place: tuple[int, int], reason: str
) -> None:
    monkeypatch.setattr(json_array, "CHUNK_CHARS", chunk)
    with pytest.raises(Malformed) as caught:
        items(text)
    assert ((caught.value.line, caught.value.column), str(caught.value)) == (place, reason)


def test_an_item_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_array, "ITEM_CHARS_MAX", 1 << 19)
    with pytest.raises(Malformed, match="an item has more than 524,288 characters"):
        items('["' + "x" * (1 << 21))


def conversations(size_bytes: int) -> Iterator[str]:
    """Yield a ShareGPT array of about this size, piece by piece."""
    talk = [
        {"from": role, "value": f"{role} says é " * 40} for role in ("human", "gpt", "human", "gpt")
    ]
    yield "[\n"
    written = 0
    while written < size_bytes:
        text = json.dumps({"id": str(written), "conversations": talk}, ensure_ascii=False)
        yield text if written == 0 else ",\n" + text
        written += len(text.encode())
    yield "]\n"


def test_memory_does_not_grow_with_the_array(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    peaks = []
    for size_bytes in (4 << 20, 16 << 20):
        with path.open("w") as file:
            file.writelines(conversations(size_bytes))
        tracemalloc.start()
        try:
            count = sum(1 for _ in TraceReader(path))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert count > size_bytes / 2_000
    assert max(peaks) < 6 << 20
    assert peaks[1] < peaks[0] + (1 << 19)


@pytest.mark.slow
def test_600_megabytes_in_300(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    with path.open("w") as file:
        file.writelines(conversations(600 * 10**6))
    assert path.stat().st_size >= 600 * 10**6
    out = tmp_path / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "schedsvc",
        "workload",
        "convert",
        "--trace",
        path,
        "--out",
        out,
    ]
    # A process between has no other children whose memory would count.
    measure = (
        "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=2);"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    measured = subprocess.run(
        [sys.executable, "-c", measure, *command], check=True, stdout=subprocess.PIPE, timeout=280
    )
    assert int(measured.stdout) <= 300 * 1024  # KiB
    assert out.stat().st_size > 600 * 10**6
