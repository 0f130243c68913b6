"""Asks as each client's own documentation says, and returns what the client saw: for interop.py."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import subprocess
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

ROOT = Path(__file__).parents[2]
SDKS = Path(__file__).parent / "sdks"
#: Made by `make .venv-interop/.installed`.
ENVIRONMENT = ROOT / ".venv-interop"
#: A whole answer, a stream, a stream that is left after its first event, a refusal that is retried.
WAYS = ("whole", "stream", "leave", "retry")
RETRIES = 8


@dataclass
class Seen:
    """Holds the client's view: tokens of input and output if it got them, and a stream's events."""

    status: int = 200
    usage: tuple[int, int] | None = None
    events: int = 0
    ended: bool = False  # a stream has ended with its last event
    code: str = ""
    after: str = ""


#: URL of the server, tenant, way, tokens of output.
Client = Callable[[str, str, str, int], Seen]
#: The same for clients that only send: URL, tenant, body, whether it leaves after the first event.
Sender = Callable[[str, str, dict[str, Any], bool], tuple[int, str, str]]


def body(output_tokens: int, **fields: Any) -> dict[str, Any]:
    """Return a completion whose output has exactly `output_tokens` tokens."""
    exact = {"emulated_output_tokens": output_tokens}
    return {"model": "emulated", "prompt": [5] * 20, "max_tokens": output_tokens} | exact | fields


def by_hand(send: Sender) -> Client:
    """Make a client of one that only sends: it reads the answer itself, and waits to retry."""

    def ask(url: str, tenant: str, way: str, tokens: int) -> Seen:
        is_stream = way in ("stream", "leave")
        asked = body(tokens, stream=True) if is_stream else body(tokens)
        for left in range(RETRIES, -1, -1):
            status, text, after = send(url, tenant, asked, way == "leave")
            if status != 429 or way != "retry" or not left:
                break
            time.sleep(int(after))
        seen = Seen(status, after=after)
        if status != 200:
            seen.code = json.loads(text)["error"]["code"]
        elif is_stream:
            assert "prompt_tokens" not in text, text  # it has not asked for usage
            seen.events = text.count('"choices"')
            seen.ended = text.endswith("data: [DONE]\n\n")
        else:
            usage = json.loads(text)["usage"]
            seen.usage = usage["prompt_tokens"], usage["completion_tokens"]
        return seen

    return ask


def with_openai(url: str, tenant: str, way: str, tokens: int) -> Seen:
    """Ask with OpenAI's SDK, which retries by itself."""
    asked = body(tokens)
    extra = {"emulated_output_tokens": asked.pop("emulated_output_tokens")}
    with openai.OpenAI(
        base_url=f"{url}/v1",
        api_key="any",
        max_retries=RETRIES if way == "retry" else 0,
        default_headers={"x-tenant-id": tenant},
    ) as client:
        try:
            if way in ("whole", "retry"):
                usage = client.completions.create(**asked, extra_body=extra).usage
                return Seen(usage=(usage.prompt_tokens, usage.completion_tokens))
            events = 0
            with client.completions.create(**asked, extra_body=extra, stream=True) as stream:
                for event in stream:
                    assert event.usage is None
                    events += 1
                    if way == "leave":
                        return Seen(events=events)
            return Seen(events=events, ended=True)
        except openai.APIStatusError as error:
            after = error.response.headers["retry-after"]
            return Seen(error.status_code, code=error.code or "", after=after)


def with_aiohttp(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> tuple[int, str, str]:
    async def ask() -> tuple[int, str, str]:
        async with (
            aiohttp.ClientSession(url, headers={"x-tenant-id": tenant}) as session,
            session.post("/v1/completions", json=body) as response,
        ):
            after = response.headers.get("retry-after", "")
            if leaves:
                first = await response.content.readuntil(b"\n\n")
                return response.status, first.decode(), after
            return response.status, await response.text(), after

    return asyncio.run(ask())


def with_httpx(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> tuple[int, str, str]:
    with (
        httpx2.Client(timeout=60) as client,
        client.stream(
            "POST", f"{url}/v1/completions", json=body, headers={"x-tenant-id": tenant}
        ) as response,
    ):
        after = response.headers.get("retry-after", "")
        text = next(response.iter_lines()) if leaves else response.read().decode()
        return response.status_code, text, after


def with_http_client(
    url: str, tenant: str, body: dict[str, Any], leaves: bool
) -> tuple[int, str, str]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    headers = {"x-tenant-id": tenant, "content-type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        after = answer.getheader("retry-after") or ""
        text = answer.readline() if leaves else answer.read()
        return answer.status, text.decode(), after
    finally:
        connection.close()


def with_curl(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> tuple[int, str, str]:
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
            return status, first, "".join(after)
        return status, process.stdout.read().decode(), "".join(after)


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

    def ask(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> tuple[int, str, str]:
        told = run("node", str(script), url, tenant, json.dumps(body), str(leaves).lower())
        seen = json.loads(told)
        return seen["status"], seen["text"], seen["after"]

    return by_hand(ask)


def in_java(folder: Path, version: str) -> Client:
    (folder / "Ask.java").write_text(JAVA)
    run("javac", "-d", str(folder), str(folder / "Ask.java"))

    def ask(url: str, tenant: str, body: dict[str, Any], leaves: bool) -> tuple[int, str, str]:
        command = ("java", "-Xshare:auto", "-cp", str(folder), "Ask")
        told = run(*command, url, tenant, json.dumps(body), str(leaves).lower(), version)
        status, after, text = told.split("\n", 2)
        return int(status), text, after

    return by_hand(ask)


def of_sdk(*command: str) -> Client:
    """Make a client of a program that asks by an SDK, and prints what that saw as JSON."""

    def ask(url: str, tenant: str, way: str, tokens: int) -> Seen:
        told = json.loads(run(*command, url, tenant, way, str(tokens)))
        usage = told.pop("usage", None)
        return Seen(**told, usage=tuple(usage) if usage else None)

    return ask


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def clients(folder: Path, server: str) -> tuple[dict[str, Client], list[str]]:
    """Return the clients that are installed, and for each other a sentence that says what lacks."""
    found: dict[str, Client] = {
        "OpenAI SDK (Python)": with_openai,
        "aiohttp": by_hand(with_aiohttp),
        "httpx": by_hand(with_httpx),
        "http.client": by_hand(with_http_client),
    }
    missing = []
    java = partial(in_java, version="1.1" if server == "gate" else "2")
    for name, programs, make in (
        ("curl", ("curl",), lambda _: by_hand(with_curl)),
        ("fetch (Node)", ("node",), in_node),
        ("HttpClient (Java)", ("java", "javac"), java),
    ):
        lacking = [program for program in programs if not shutil.which(program)]
        if lacking:
            missing.append(f"{name}: skipped; not installed here: {', '.join(lacking)}")
        else:
            found[name] = make(folder)
    python, node = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "node"
    for name, needed, command in (
        ("Anthropic SDK (Python)", python, (str(python), str(SDKS / "ask.py"), "anthropic")),
        ("LangChain", python, (str(python), str(SDKS / "ask.py"), "langchain")),
        ("OpenAI SDK (Node)", node / "node_modules" / "openai", ("node", str(node / "ask.mjs"))),
    ):
        if needed.exists():
            found[name] = of_sdk(*command)
        else:
            missing.append(f"{name}: skipped; `make test-interop` installs it")
    return found, missing
