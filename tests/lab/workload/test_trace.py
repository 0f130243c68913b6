from pathlib import Path

import pytest

from schedsvc_lab.workload import TraceError, TraceRequest, read_trace, rescale
from schedsvc_lab.workload.times import timestamp_ns

SHARED = Path(__file__).parents[3].parent / "shared" / "data" / "traces"
LMSYS = "arrival_s,client,prompt_tokens,output_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_reads_the_lmsys_form_by_column_name(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "client,note,output_tokens,arrival_s,prompt_tokens\nhog,x,7,0.5,3\n\nquiet,,1,1.25,2\n",
    )
    assert list(read_trace(path)) == [
        TraceRequest(0.5, "hog", 3, 7),
        TraceRequest(1.25, "quiet", 2, 1),
    ]


def test_reads_the_azure_form_with_seven_digit_fractions(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        AZURE + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
    )
    assert list(read_trace(path, tenant="azure")) == [
        TraceRequest(0.0, "azure", 374, 44),
        TraceRequest(4.314579, "azure", 396, 109),
    ]


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("1970-01-01 00:00:01", 10**9),
        ("1970-01-01 00:00:01.5", 1_500_000_000),
        ("1970-01-01T00:00:01.1234567+00:00", 1_123_456_700),
        ("1970-01-01 01:00:00+01:00", 0),
        ("1970-01-01 00:00:00.1234567891", 123_456_789),
    ],
)
def test_timestamp_forms(text: str, ns: int) -> None:
    assert timestamp_ns(text) == ns


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.csv:1:header: the file begins with no header and no JSON; is it empty?"),
        ("arrival_s,client,prompt_tokens\n", "trace.csv:1:header: column missing: output_tokens."),
        (LMSYS, "trace.csv:1:row: the trace holds no request"),
        (LMSYS + "0,a,1,1\nx,a,1,1\n", "trace.csv:3:arrival_s: not a number of seconds: 'x'"),
        (LMSYS + "nan,a,1,1\n", "trace.csv:2:arrival_s: must be a finite number"),
        (LMSYS + "-1,a,1,1\n", "trace.csv:2:arrival_s: must be a finite number"),
        (LMSYS + "0,,1,1\n", "trace.csv:2:client: is empty"),
        (LMSYS + "0,a,1.5,1\n", "trace.csv:2:prompt_tokens: not a whole number: '1.5'"),
        (LMSYS + "0,a,0,1\n", "trace.csv:2:prompt_tokens: must be from 1 to 2147483647, is 0"),
        (LMSYS + "0,a,1,2147483648\n", "trace.csv:2:output_tokens: must be from 1 to 2147483647"),
        (LMSYS + "0,a,1\n", "trace.csv:2:output_tokens: missing: the row has 3 of 4 columns"),
        (LMSYS + "1,a,1,1\n0.5,a,1,1\n", "trace.csv:3:arrival_s: arrives before the row above it"),
        (AZURE + "yesterday,1,1\n", "trace.csv:2:TIMESTAMP: not a time: 'yesterday'"),
        (AZURE + "2023-11-16 18:15:46.,1,1\n", "trace.csv:2:TIMESTAMP: not a time"),
        (AZURE + "2023-11-16 18:15:46,1,\n", "trace.csv:2:GeneratedTokens: not a whole number"),
        ((LMSYS + "0,").encode() + b"\xff,1,1\n", "trace.csv:2:3: not UTF-8"),
    ],
)
def test_errors_name_file_line_column_and_reason(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"{path.parent}/{message}")


def test_is_lazy(tmp_path: Path) -> None:
    path = write(tmp_path, LMSYS + "0,a,1,1\nbroken\n")
    requests = read_trace(path)
    assert next(requests).tenant == "a"
    with pytest.raises(TraceError):
        next(requests)


def test_rescale_keeps_density_and_cuts() -> None:
    trace = [TraceRequest(float(second), "a", 1, 1) for second in range(10)]
    fast = list(rescale(trace, rate_scale=2.0, duration_s=3.0))
    assert [request.arrival_s for request in fast] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]


@pytest.mark.parametrize(
    ("name", "count", "tenants"),
    [("lmsys_arena_vtc.csv", 1_500, 27), ("AzureLLMInferenceTrace_conv.csv", 19_366, 1)],
)
def test_reads_the_published_traces(name: str, count: int, tenants: int) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"the published traces are not on this machine: {path}")
    requests = list(read_trace(path))
    assert len(requests) == count
    assert len({request.tenant for request in requests}) == tenants
