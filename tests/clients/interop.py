"""Ordinary HTTP clients at the gate and at the proxy, each as its own documentation uses it.

    python -m tests.clients.interop

Each client asks for a whole answer, reads a stream, leaves a stream after its first event, and is
refused over a quota. What it saw is compared with the scheduler's books. A client that is not
installed here is skipped and named. The exit status is 1 where anything differs.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx2
import openai
from schedsvc_client.sync import Scheduler

from .test_end_to_end import CAPACITY_TOKENS, CONFIG, CONTEXT_TOKENS
from .test_vllm_proxy_emulator import Proxied

TOKENS, LONG = 8, 1_900
#: At the gate and at the proxy: "limited" may run one request at once, and is refused another.
TENANTS = [
    {"name": "asks", "weight": 1},
    {"name": "leaves", "weight": 1},
    {"name": "limited", "weight": 1, "quota": {"concurrency": 1, "over": "refuse"}},
]


@dataclass
class Seen:
    """What a client saw. Of a stream `text` is its events; of one that it left, the first."""

    status: int
    text: str
    retry_after: str = ""


Client = Callable[[str, str, dict[str, Any], bool], Seen]
"""(URL of the server, tenant, body, whether it leaves after the first event)"""


def with_openai(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> Seen:
    extra = {"emulated_output_tokens": body["emulated_output_tokens"]}
    asked = {name: value for name, value in body.items() if name not in (*extra, "stream")}
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="any", max_retries=0, default_headers={"x-tenant-id": tenant}
    ) as client:
        try:
            if not body.get("stream"):
                done = client.completions.create(**asked, extra_body=extra)
                return Seen(200, done.to_json())
            stream = client.completions.create(**asked, extra_body=extra, stream=True)
            events = []
            for event in stream:
                events.append(event.to_json(indent=None))
                if leaves:
                    stream.close()
                    return Seen(200, events[0])
            lines = [f"data: {event}" for event in [*events, "[DONE]"]]
            return Seen(200, "\n\n".join(lines) + "\n\n")
        except openai.APIStatusError as error:
            return Seen(
                error.status_code, error.response.text, error.response.headers["retry-after"]
            )


def with_aiohttp(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> Seen:
    async def ask() -> Seen:
        async with (
            aiohttp.ClientSession(url, headers={"x-tenant-id": tenant}) as session,
            session.post("/v1/completions", json=body) as response,
        ):
            after = response.headers.get("retry-after", "")
            if leaves:
                return Seen(response.status, (await response.content.readuntil(b"\n\n")).decode())
            return Seen(response.status, await response.text(), after)

    return asyncio.run(ask())


def with_httpx(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> Seen:
    with (
        httpx2.Client(timeout=60) as client,
        client.stream(
            "POST", f"{url}/v1/completions", json=body, headers={"x-tenant-id": tenant}
        ) as response,
    ):
        if leaves:
            return Seen(response.status_code, next(response.iter_lines()))
        text = response.read().decode()
        return Seen(response.status_code, text, response.headers.get("retry-after", ""))


def with_http_client(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> Seen:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    headers = {"x-tenant-id": tenant, "content-type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if leaves:
            return Seen(answer.status, answer.readline().decode())
        after = answer.getheader("retry-after") or ""
        return Seen(answer.status, answer.read().decode(), after)
    finally:
        connection.close()


def with_curl(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> Seen:
    command = ["curl", "-sSN", "-D", "-", f"{url}/v1/completions", "-H", f"x-tenant-id: {tenant}"]
    command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        head = []
        while line := process.stdout.readline().strip():
            head.append(line.decode())
        status = int(head[0].split()[1])
        after = [
            line.partition(": ")[2] for line in head if line.lower().startswith("retry-after:")
        ]
        if leaves:
            first = process.stdout.readline().decode()
            process.kill()
            return Seen(status, first)
        return Seen(status, process.stdout.read().decode(), "".join(after))


NODE = """
const [url, tenant, body, leaves] = process.argv.slice(2);
const leaving = new AbortController();
const headers = {'x-tenant-id': tenant, 'content-type': 'application/json'};
const response = await fetch(url + '/v1/completions',
  {method: 'POST', body, headers, signal: leaving.signal});
let text = '';
const decoder = new TextDecoder();
for await (const piece of response.body) {
  text += decoder.decode(piece, {stream: true});
  if (leaves === 'true' && text.includes('\\n\\n')) break;
}
leaving.abort();
const after = response.headers.get('retry-after') ?? '';
console.log(JSON.stringify({status: response.status, text, after}));
process.exit(0);
"""

JAVA = """
import java.io.*;
import java.net.URI;
import java.net.http.*;
import java.nio.charset.StandardCharsets;

public class Ask {
  public static void main(String[] a) throws Exception {
    var request = HttpRequest.newBuilder(URI.create(a[0] + "/v1/completions"))
        .header("x-tenant-id", a[1]).header("content-type", "application/json")
        .POST(HttpRequest.BodyPublishers.ofString(a[2])).build();
    // What uvicorn alone serves, as vLLM does, reads no body behind the offer of HTTP/2.
    var version = a[4].equals("1.1") ? HttpClient.Version.HTTP_1_1 : HttpClient.Version.HTTP_2;
    var response = HttpClient.newBuilder().version(version).build()
        .send(request, HttpResponse.BodyHandlers.ofInputStream());
    try (var in = response.body()) {
      String text;
      if (a[3].equals("true")) {
        text = new BufferedReader(new InputStreamReader(in, StandardCharsets.UTF_8)).readLine();
      } else {
        text = new String(in.readAllBytes(), StandardCharsets.UTF_8);
      }
      System.out.println(response.statusCode());
      System.out.println(response.headers().firstValue("retry-after").orElse(""));
      System.out.print(text);
    }
    System.out.flush();
    Runtime.getRuntime().halt(0);
  }
}
"""


def in_node(folder: Path) -> Client:
    script = folder / "ask.mjs"
    script.write_text(NODE)

    def ask(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> Seen:
        told = run("node", str(script), url, tenant, json.dumps(body), str(leaves).lower())
        seen = json.loads(told)
        return Seen(seen["status"], seen["text"], seen["after"])

    return ask


def in_java(folder: Path, version: str) -> Client:
    (folder / "Ask.java").write_text(JAVA)
    run("javac", "-d", str(folder), str(folder / "Ask.java"))

    def ask(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> Seen:
        command = ("java", "-Xshare:auto", "-cp", str(folder), "Ask")
        told = run(*command, url, tenant, json.dumps(body), str(leaves).lower(), version)
        status, after, text = told.split("\n", 2)
        return Seen(int(status), text, after)

    return ask


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def clients(folder: Path, server: str) -> tuple[dict[str, Client], list[str]]:
    """Return the clients that are installed, and the names of the others."""
    java = partial(in_java, version="1.1" if server == "gate" else "2")
    found: dict[str, Client] = {
        "OpenAI SDK (Python)": with_openai,
        "aiohttp": with_aiohttp,
        "httpx": with_httpx,
        "http.client": with_http_client,
    }
    missing = []
    for name, programs, make in (
        ("curl", ("curl",), lambda _: with_curl),
        ("fetch (Node)", ("node",), in_node),
        ("HttpClient (Java)", ("java", "javac"), java),
    ):
        if all(map(shutil.which, programs)):
            found[name] = make(folder)
        else:
            missing.append(name)
    return found, missing


class Stand(Proxied):
    """A scheduler, an engine with the gate, and another behind the proxy."""

    def start_all(self) -> dict[str, str]:
        config = CONFIG | {"listeners": [{"unix": f"{self.folder}/s"}], "tenants": TENANTS}
        (self.folder / "c.yaml").write_text(json.dumps(config))
        self.start("scheduler", "serve", "--config", str(self.folder / "c.yaml"))
        sizes = ("--kv-tokens", str(CAPACITY_TOKENS), "--max-model-len", str(CONTEXT_TOKENS))
        emulate = ("emulate", "--profile", "tiny-cpu", "--port", "0", "--block-size", "16", *sizes)
        self.start(
            "gated",
            *(*emulate, "--middleware", "schedsvc_vllm.gate.Gate"),
            SCHEDSVC_TARGET=self.target,
            SCHEDSVC_TENANT_HEADERS="x-tenant-id",
            SCHEDSVC_POOL="gated",
        )
        gated = json.loads((self.folder / "gated.ready").read_text())["base_url"]
        self.wait_until_connected(gated)
        self.start_engine()
        self.start_proxy()
        return {"gate": gated, "proxy": self.proxy_url}

    def flow(self, tenant: str) -> Any:
        """Wait until nothing runs, and return a tenant's books."""
        with Scheduler(self.target) as scheduler:
            deadline_s = time.monotonic() + 30
            while (stats := scheduler.stats()).totals.live_leases:
                assert time.monotonic() < deadline_s, stats.totals
                time.sleep(0.01)
        return next(flow for flow in stats.flows if flow.tenant == tenant)


def body(output_tokens: int, **fields: Any) -> dict[str, Any]:
    exact = {"emulated_output_tokens": output_tokens}
    return {"model": "emulated", "prompt": [5] * 20, "max_tokens": output_tokens} | exact | fields


def check(stand: Stand, url: str, ask: Client) -> None:
    """Let one client do all. Raises AssertionError where the books differ."""
    before = stand.flow("asks")
    seen = ask(url, "asks", body(TOKENS), False)
    assert seen.status == 200, seen
    usage = json.loads(seen.text)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (20, TOKENS)
    seen = ask(url, "asks", body(TOKENS, stream=True), False)
    assert seen.status == 200, seen
    assert seen.text.endswith("data: [DONE]\n\n"), seen
    assert "prompt_tokens" not in seen.text, seen
    after = stand.flow("asks")
    assert after.completed - before.completed == 2
    assert after.output_tokens - before.output_tokens == 2 * TOKENS
    assert after.input_tokens - before.input_tokens == 40

    before = stand.flow("leaves")
    seen = ask(url, "leaves", body(LONG, stream=True), True)
    assert (seen.status, '"choices"' in seen.text) == (200, True), seen
    after = stand.flow("leaves")
    assert after.cancelled - before.cancelled == 1
    assert 0 < after.output_tokens - before.output_tokens < LONG

    with hogging(url):
        seen = ask(url, "limited", body(TOKENS), False)
    assert seen.status == 429, seen
    assert json.loads(seen.text)["error"]["code"] == "rate_limit_exceeded"
    assert int(seen.retry_after) >= 1
    stand.flow("limited")


class hogging:
    """While the block runs, one request of "limited" does."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)

    def __enter__(self) -> None:
        headers = {"x-tenant-id": "limited", "content-type": "application/json"}
        text = json.dumps(body(LONG, stream=True))
        self._connection.request("POST", "/v1/completions", text, headers)
        answer = self._connection.getresponse()
        assert answer.status == 200
        assert answer.readline()

    def __exit__(self, *_: object) -> None:
        self._connection.close()


def main() -> int:
    """Let every client that is here do all at the gate and at the proxy."""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    failures = 0
    folder = Path(tempfile.mkdtemp(prefix="interop-"))
    stand = Stand(folder)
    try:
        servers = stand.start_all()
        missing: list[str] = []
        for server, url in servers.items():
            found, missing = clients(folder, server)
            for name, ask in found.items():
                try:
                    check(stand, url, ask)
                    print(f"{name} at the {server}: as the books say", flush=True)
                except AssertionError as error:
                    failures += 1
                    print(f"{name} at the {server}: {error}", file=sys.stderr, flush=True)
        for name in missing:
            print(f"{name}: not installed here, skipped")
    finally:
        stand.stop()
        shutil.rmtree(folder)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
