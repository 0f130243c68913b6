"""`schedsvc-proxy --upstream URL`: the gate in a process of its own, before any server."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import MutableMapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from schedsvc_vllm.gate import Gate
from schedsvc_vllm.h2c import without_h2c
from schedsvc_vllm.launcher import EXIT_USAGE, LaunchError, options_text, split
from schedsvc_vllm.settings import Settings, SettingsError

EXIT_FAILED = 1
EXTRA = "pip install 'schedsvc-vllm[proxy]'"


def parser() -> argparse.ArgumentParser:
    """Describe the command's own options."""
    made = argparse.ArgumentParser(
        prog="schedsvc-proxy",
        description="A reverse proxy with the schedsvc gate in it, for servers that cannot load "
        "the gate themselves.",
        epilog="Each --schedsvc- option is also a variable: --schedsvc-pool is SCHEDSVC_POOL.\n\n"
        + options_text()
        + "\n\nexample:\n  schedsvc-proxy --upstream http://127.0.0.1:8000 --port 9000 \\\n"
        "      --schedsvc-target unix:/run/schedsvc/schedsvc.sock \\\n"
        "      --schedsvc-tenant-headers x-tenant-id",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--upstream", required=True, metavar="URL", help="the server behind it")
    made.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    made.add_argument("--port", type=int, default=9000, help="port; 0 takes any (9000)")
    made.add_argument("--uds", metavar="PATH", help="listen on this Unix socket instead")
    made.add_argument(
        "--wait-s", type=float, default=600.0, help="how long to wait for the upstream (600)"
    )
    made.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return made


def prepare(
    arguments: Sequence[str], environment: MutableMapping[str, str]
) -> tuple[argparse.Namespace, Settings]:
    """Read the command line. Raises LaunchError or SettingsError; exits as argparse does."""
    rest, own = split(arguments)
    environment.update(own)
    options = parser().parse_args(rest)
    url = urlsplit(options.upstream)
    if url.scheme not in ("http", "https") or not url.netloc or url.query or url.fragment:
        raise LaunchError(f"--upstream {options.upstream}: must be http://HOST:PORT of the server")
    if url.path.strip("/"):
        raise LaunchError(
            f"--upstream {options.upstream}: give the server's root, without {url.path}"
        )
    if not 0 <= options.port <= 65_535:
        raise LaunchError(f"--port {options.port}: must be from 0 to 65535")
    if options.wait_s < 0:
        raise LaunchError(f"--wait-s {options.wait_s:g}: must not be negative")
    return options, Settings.from_environment(environment)


def build(options: argparse.Namespace, settings: Settings) -> Gate:
    """Put the gate before the upstream. Raises LaunchError where the extra is not installed."""
    try:
        proxy: Any = importlib.import_module("schedsvc_vllm.proxy")
    except ModuleNotFoundError as error:
        raise LaunchError(f"{error.name} is not installed: {EXTRA}") from None
    upstream = proxy.Upstream(
        options.upstream,
        wait_s=options.wait_s,
        body_bytes_max=settings.body_bytes_max,
        bodies_bytes_max=settings.bodies_bytes_max,
    )
    return Gate(upstream, settings)


def http_protocol() -> Any:
    """Make uvicorn's HTTP/1.1 that does not trip over the offer of another protocol."""
    base: Any = importlib.import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol

    class WithoutOffers(base):  # type: ignore[misc] # known only where uvicorn is
        def data_received(self, data: bytes) -> None:
            super().data_received(without_h2c(data))

    return WithoutOffers


def serve(gate: Gate, options: argparse.Namespace) -> bool:
    """Serve until a signal; True where the start succeeded."""
    try:
        uvicorn: Any = importlib.import_module("uvicorn")
    except ModuleNotFoundError:
        raise LaunchError(f"uvicorn is not installed: {EXTRA}") from None
    config = uvicorn.Config(
        gate,
        host=options.host,
        port=options.port,
        uds=options.uds,
        log_level=options.log_level,
        access_log=False,
        http=http_protocol(),
        lifespan="on",
    )
    server = uvicorn.Server(config)
    upstream: Any = gate.app
    upstream.stopping = lambda: bool(server.should_exit)
    server.run()
    return bool(server.started)


def main() -> None:
    """Run the proxy; exit status 2 where the command line or a setting is wrong."""
    try:
        options, settings = prepare(sys.argv[1:], dict(os.environ))
        logging.basicConfig(
            level=options.log_level.upper(), format="%(levelname)s: %(name)s: %(message)s"
        )
        started = serve(build(options, settings), options)
    except (LaunchError, SettingsError) as error:
        sys.stderr.write(f"schedsvc-proxy: {error}\n")
        sys.exit(EXIT_USAGE)
    sys.exit(0 if started else EXIT_FAILED)
