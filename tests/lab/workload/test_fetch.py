"""Downloads from a local server: whole, resumed, changed, broken, with and without a checksum."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedsvc.cli import main
from schedsvc_lab.workload import FORMS
from schedsvc_lab.workload import fetch as fetch_module
from schedsvc_lab.workload.fetch import FetchError, Source, fetch, sources

CONTENT = bytes(range(256)) * 9_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Publisher(ThreadingHTTPServer):
    """Serves one file as a test chooses."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = CONTENT
        self.etag: str | None = '"one"'
        self.cuts: list[int] = []
        self.statuses: list[int] = []
        self.linked: str | None = None
        self.ranges: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/files/trace.csv"

    def source(self, sha256: str | None = None) -> Source:
        return Source("trace", self.url, sha256=sha256)


class Handler(BaseHTTPRequestHandler):
    server: Publisher

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        if server.linked is not None and self.path.startswith("/files"):
            self.send_response(302)
            self.send_header("X-Linked-ETag", f'"{server.linked}"')
            self.send_header("Location", "/elsewhere/trace")
            self.end_headers()
            return
        wanted = self.headers.get("Range")
        server.ranges.append(wanted)
        if server.statuses:
            self.send_error(server.statuses.pop(0))
            return
        start, content = 0, server.content
        if wanted and self.headers.get("If-Range") == server.etag:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        if server.etag is not None:
            self.send_header("ETag", server.etag)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = server.cuts.pop(0) if server.cuts else len(content)
        self.wfile.write(content[start:end])


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Publisher]:
    monkeypatch.setattr(fetch_module, "_PAUSE_S", 0.0)
    with Publisher() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_and_its_checksum(tmp_path: Path, publisher: Publisher) -> None:
    seen: list[tuple[int, int | None]] = []
    fetched = fetch(publisher.source(DIGEST), tmp_path, lambda *at: seen.append(at))
    assert fetched.path == tmp_path / "trace.csv"
    assert fetched.path.read_bytes() == CONTENT
    assert (fetched.sha256, fetched.size_bytes) == (DIGEST, len(CONTENT))
    assert fetched.checked == "the published file"
    assert (len(CONTENT), len(CONTENT)) in seen
    assert names(tmp_path) == {"trace.csv"}
    # A file that is here is checked, and not fetched again.
    assert fetch(publisher.source(DIGEST), tmp_path).sha256 == DIGEST
    assert len(publisher.ranges) == 1


def test_a_broken_connection_is_resumed(tmp_path: Path, publisher: Publisher) -> None:
    publisher.cuts = [100_000, 300_000, 300_001]
    assert fetch(publisher.source(DIGEST), tmp_path).path.read_bytes() == CONTENT
    assert publisher.ranges == [None, "bytes=100000-", "bytes=300000-", "bytes=300001-"]


def test_a_later_call_goes_on(tmp_path: Path, publisher: Publisher) -> None:
    publisher.cuts = [500_000]
    publisher.statuses = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch_module, "TRIES", 1)
        publisher.cuts = [500_000, 500_000]
        with pytest.raises(FetchError, match="500,000 bytes are kept in"):
            fetch(publisher.source(DIGEST), tmp_path)
    assert names(tmp_path) == {"trace.csv.partial", "trace.csv.partial.json"}
    fetch(publisher.source(DIGEST), tmp_path)
    assert publisher.ranges[-1] == "bytes=500000-"
    assert names(tmp_path) == {"trace.csv"}


def test_a_file_that_changed_is_started_over(tmp_path: Path, publisher: Publisher) -> None:
    (tmp_path / "trace.csv.partial").write_bytes(b"old" * 1000)
    (tmp_path / "trace.csv.partial.json").write_text('{"validator": "\\"zero\\""}')
    assert fetch(publisher.source(DIGEST), tmp_path).path.read_bytes() == CONTENT


@pytest.mark.parametrize("state", [None, "", "[]", '{"validator": 3}'])
def test_without_a_validator_it_is_started_over(
    tmp_path: Path, publisher: Publisher, state: str | None
) -> None:
    (tmp_path / "trace.csv.partial").write_bytes(b"old")
    if state is not None:
        (tmp_path / "trace.csv.partial.json").write_text(state)
    assert fetch(publisher.source(DIGEST), tmp_path).path.read_bytes() == CONTENT
    assert publisher.ranges == [None]


def test_a_partial_file_that_is_whole_already(tmp_path: Path, publisher: Publisher) -> None:
    (tmp_path / "trace.csv.partial").write_bytes(CONTENT)
    (tmp_path / "trace.csv.partial.json").write_text('{"validator": "\\"one\\""}')
    assert fetch(publisher.source(DIGEST), tmp_path).path.read_bytes() == CONTENT


def test_a_weak_etag_names_no_version(tmp_path: Path, publisher: Publisher) -> None:
    publisher.etag = 'W/"one"'
    publisher.cuts = [1_000]
    assert fetch(publisher.source(DIGEST), tmp_path).path.read_bytes() == CONTENT
    assert publisher.ranges == [None, None]


def test_a_wrong_checksum_sets_the_file_aside(tmp_path: Path, publisher: Publisher) -> None:
    with pytest.raises(FetchError, match="but the published file has 0000"):
        fetch(publisher.source("0" * 64), tmp_path)
    assert names(tmp_path) == {"trace.csv.bad"}


def test_the_servers_own_checksum(tmp_path: Path, publisher: Publisher) -> None:
    publisher.linked = DIGEST
    assert fetch(publisher.source(), tmp_path / "a").checked == "what the server states"
    publisher.linked = "1" * 64
    with pytest.raises(FetchError, match="what the server states has 1111"):
        fetch(publisher.source(), tmp_path / "b")


def test_the_first_download_is_noted(tmp_path: Path, publisher: Publisher) -> None:
    assert fetch(publisher.source(), tmp_path).checked.startswith("nothing")
    assert (tmp_path / "trace.csv.sha256").read_text() == f"{DIGEST}  trace.csv\n"
    assert fetch(publisher.source(), tmp_path).checked == "the first download"
    (tmp_path / "trace.csv").write_bytes(b"spoilt")
    with pytest.raises(FetchError, match="the first download has"):
        fetch(publisher.source(), tmp_path)


def test_server_errors_are_tried_again_and_refusals_are_not(
    tmp_path: Path, publisher: Publisher
) -> None:
    publisher.statuses = [503, 500]
    assert fetch(publisher.source(DIGEST), tmp_path / "a").sha256 == DIGEST
    publisher.ranges.clear()
    publisher.statuses = [404]
    with pytest.raises(FetchError, match="the server answers 404"):
        fetch(publisher.source(DIGEST), tmp_path / "b")
    assert len(publisher.ranges) == 1
    publisher.statuses = [503] * 10
    with pytest.raises(FetchError, match="the server answers 503"):
        fetch(publisher.source(DIGEST), tmp_path / "c")


def test_no_scheduler_there(tmp_path: Path, publisher: Publisher) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch_module, "TRIES", 2)
        with pytest.raises(FetchError, match=r"127\.0\.0\.1:9.*refused"):
            fetch(Source("x", "http://127.0.0.1:9/x.csv"), tmp_path)


def test_the_list_of_names() -> None:
    known = sources()
    assert {"azure-2023-conv", "mooncake-conversation", "burstgpt-3", "qwen-a"} <= set(known)
    for source in known.values():
        assert source.url.startswith("https://")
        assert source.form in FORMS
        assert source.about
        assert source.sha256 is None or len(source.sha256) == 64


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("azure-2023-conv", "AzureLLMInferenceTrace_conv.csv"),
        ("mooncake-conversation", "mooncake_conversation_trace.jsonl"),
    ],
)
def test_checksums_are_those_of_the_files_here(name: str, file: str) -> None:
    path = Path(__file__).parents[3].parent / "shared/data/traces" / file
    if not path.exists():
        pytest.skip(f"{file} is not here; schedsvc/../shared/data holds it")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sources()[name].sha256


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["workload", "fetch", *arguments])
    return result.exit_code, result.output


def test_the_command(tmp_path: Path, publisher: Publisher) -> None:
    status, output = run("--url", publisher.url, "--out", str(tmp_path), "--json")
    assert status == 0, output
    assert json.loads(output)["sha256"] == DIGEST
    status, output = run("--url", publisher.url, "--out", str(tmp_path), "--sha256", DIGEST)
    assert status == 0
    assert "compared with the published file" in output
    status, output = run("--list")
    assert "mooncake-conversation" in output
    status, output = run("--list", "--json")
    assert set(json.loads(output)) == set(sources())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a NAME or --url; known names: azure-2023-conv"),
        (("no-such",), "'no-such' is unknown; known names: azure-2023-conv"),
        (("--url", "ftp://x/y"), "--url"),
        (("--url", "http://127.0.0.1:9/x", "--sha256", "12"), "--sha256"),
        (("azure-2023-conv", "--url", "http://x/y"), "give a NAME or --url"),
    ],
)
def test_wrong_input(arguments: tuple[str, ...], message: str) -> None:
    status, output = run(*arguments)
    assert status != 0
    assert message in output
