"""Runs vLLM's own command with the gate in front: `schedsvc-vllm serve MODEL ...`.

It takes out its own options, checks them, puts them into the environment, adds the middleware, and
becomes `vllm` (exec): signals, exit status and output are vLLM's own.
"""

from __future__ import annotations

import difflib
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from schedsvc_vllm.fence_file import make_fence_file
from schedsvc_vllm.runtime import now_ns
from schedsvc_vllm.settings import Settings, SettingsError

MIDDLEWARE = "schedsvc_vllm.gate.Gate"
OPTION_PREFIX = "--schedsvc-"
#: The width of the help, and the column at which its texts begin.
_COLUMNS, _HELP_COLUMN = 80, 34
EXIT_USAGE = 2

# Each is also a variable: `--schedsvc-pool-epoch` is SCHEDSVC_POOL_EPOCH.
OPTIONS = {
    "target": "HOST:PORT or unix:/PATH of the scheduler; several with commas: leader and standbys",
    "token-file": "file with the bearer token for the scheduler, read again for each connection",
    "tls": "on or off; on where a file below is given",
    "tls-ca-file": "PEM of who signs the scheduler's certificate",
    "tls-cert-file": "PEM of this host's certificate",
    "tls-key-file": "PEM of its key",
    "client-id": "how the scheduler's logs call this server",
    "pool": "name of this engine's pool",
    "pool-capacity-tokens": "tokens of the KV cache; default: as vLLM says",
    "pool-block-size-tokens": "tokens of a KV block; default: as vLLM says",
    "pool-max-running": "most sequences at once; default: as vLLM says",
    "pool-max-model-tokens": "the model's context; default: as vLLM says",
    "pool-gates": "processes that offer the pool; default: --api-server-count, or 1",
    "pool-epoch": "grows with each start of the engine; default: the time of this start",
    "tenant-headers": "trusted headers that name the tenant, comma-separated; or llm-d",
    "header-set-by": "name of the proxy that overwrites the trusted headers",
    "jwt-issuer": "issuer whose JSON Web Tokens name the tenant (iss)",
    "jwt-audience": "audience that the tokens have to name (aud)",
    "jwt-jwks-file": "file with the issuer's key set; or give the URL",
    "jwt-jwks-url": "URL (https) of the issuer's key set",
    "jwt-tenant-claim": "the claim that names the tenant (sub)",
    "jwt-class-claim": "the claim that names the priority class (none)",
    "jwt-leeway": "seconds by which clocks may differ (30)",
    "jwt-refresh": "seconds between two fetches of the key set (300)",
    "jwt-keys-age-max": "seconds after which keys that cannot be fetched verify nothing (86400)",
    "certificate-tenants": "names of client certificates that stand for tenants, comma-separated:"
    " spiffe://DOMAIN/ns/*/sa/{tenant}, {tenant}.clients.example",
    "xfcc-set-by": "name of the proxy that ends TLS and overwrites x-forwarded-client-cert",
    "trust-api-key": "on or off: an API key's hash names the tenant",
    "trust-user-field": "on or off: safety_identifier and user of the body name the tenant",
    "class-from-service-tier": "on or off: service_tier of the body names the priority class",
    "request-headers": "headers in which a request states its wait, deadline and class; off: none",
    "trust-request-id": "on or off: x-request-id is unique, since a proxy sets it",
    "api-keys-file": "file with the API keys that callers may use, one on each line",
    "api-keys-from": "gate, or scheduler: keys that stand for its tenants may call (gate)",
    "known-keys-file": "file that keeps hashes of these keys over a restart; off: none",
    "operator-keys-file": "file with the keys that open endpoints such as /sleep and"
    " /v1/load_lora_adapter, one on each line; without it they return 501",
    "models-open": "on or off: whether /v1/models needs no credential (on)",
    "metrics-open": "on or off: whether /metrics needs no credential (off)",
    "response-key-file": "file with the secret of the ids of stored responses; without it they end"
    " with the process",
    "unreachable": "open or closed: what to do while the scheduler is away",
    "unreachable-after": "seconds without an answer until an open connection counts as that (3;"
    " 1.5 with several targets)",
    "failover-wait": "seconds that requests wait for the next leader, with several targets (5)",
    "fence": "file that the processes of one engine share; made by schedsvc-vllm if needed",
    "unreachable-concurrency-min": "requests that always run while it is away",
    "ungated": "paths that pass ungated; refuse: none; pass: all that the gate does not size;"
    " endpoints of operators stay closed",
    "beam-search": "serve or refuse: whether a request may ask for beam search (serve)",
    "output-limit": "tokens that the gate writes as max_tokens of a completion or chat without a"
    " limit, before a server that is not vLLM; context: it may fill the context (context)",
    "prefix-hashes": "auto or off: hash the blocks of prompts while the scheduler orders by them",
    "body-bytes-max": "largest body of a request",
    "bodies-bytes-max": "most bytes of all bodies together that are read, wait or run",
    "queue-comments": "seconds between comments in a stream whose request waits (none)",
    "idempotency-keys": "on or off: requests with the same idempotency-key run once",
    "cors-origins": "origins whose pages may read refusals (the engine's --allowed-origins)",
    "image-tokens": "tokens of an image whose size is unknown (1024)",
    "image-patch-pixels": "side of the square of pixels that is a token; default: as vLLM says",
    "image-tokens-min": "fewest tokens of an image; default: as vLLM reports, else 4",
    "image-tokens-max": "most tokens of an image; default: as vLLM reports, 16384 or more",
    "histogram-tenants-max": "tenants with a histogram of their own on /metrics (50)",
    "send-stall": "seconds until a client that reads nothing of its answer is cut off",
}


class LaunchError(ValueError):
    """The command line cannot be used; the message says which part and what to do."""


def prepare(arguments: Sequence[str], environment: MutableMapping[str, str]) -> list[str]:
    """Return vLLM's own arguments; the gate's settings go into `environment`.

    Raises LaunchError or SettingsError.
    """
    rest, own = split(arguments)
    environment.update(own)
    if rest[:1] != ["serve"]:
        raise LaunchError("only `schedsvc-vllm serve MODEL ...` is there; see --help")
    _check_front_end(rest, environment)
    # All processes of one start report the same epoch, and a later start a higher one.
    environment.setdefault("SCHEDSVC_POOL_EPOCH", str(now_ns()))
    if servers := api_servers(rest):
        environment.setdefault("SCHEDSVC_POOL_GATES", servers)
    if "," in environment.get("SCHEDSVC_TARGET", ""):
        environment.setdefault("SCHEDSVC_FENCE", make_fence_file())
    Settings.from_environment(environment)
    return [*rest, "--middleware", MIDDLEWARE]


def api_servers(arguments: Sequence[str]) -> str:
    """Return how many API processes vLLM's arguments ask for, as text; empty if they do not."""
    found = ""
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=True):
        option, is_joined, value = argument.partition("=")
        if option in ("--api-server-count", "--api_server_count", "-asc"):
            found = value if is_joined else after
    return found if found.isascii() and found.isdigit() and int(found) else ""


def split(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Part vLLM's arguments from ours, which become variables. Raises LaunchError."""
    rest: list[str] = []
    own: dict[str, str] = {}
    waiting = iter(arguments)
    for argument in waiting:
        if not argument.startswith(OPTION_PREFIX):
            rest.append(argument)
            continue
        option, is_joined, value = argument.partition("=")
        name = option.removeprefix(OPTION_PREFIX)
        if name not in OPTIONS:
            raise LaunchError(_unknown(name, option))
        if not is_joined:
            value = next(waiting, "")
        if not value or (not is_joined and value.startswith("--")):
            raise LaunchError(f"{option} needs a value: {OPTIONS[name]}")
        own[f"SCHEDSVC_{name.upper().replace('-', '_')}"] = value
    return rest, own


def _unknown(name: str, option: str) -> str:
    if name == "token":
        return f"{option}: other users of this host could read it; give --schedsvc-token-file"
    close = difflib.get_close_matches(name, OPTIONS, n=1)
    hint = f"; did you mean {OPTION_PREFIX}{close[0]}?" if close else "; see --help"
    return f"there is no option {option}{hint}"


def _check_front_end(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse what would serve without running Python middleware, or run the gate twice."""
    if environment.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise LaunchError(
            "VLLM_USE_RUST_FRONTEND is set: that front end cannot run the gate; unset it, or put "
            "schedsvc-proxy before it"
        )
    for argument in arguments:
        if argument == "--grpc":
            raise LaunchError("--grpc: vLLM's gRPC server cannot run the gate; leave it out")
        if argument.removeprefix("--middleware=") == MIDDLEWARE:
            raise LaunchError(f"--middleware {MIDDLEWARE}: is added by this command; leave it out")


def find_vllm(environment: Mapping[str, str]) -> str:
    """Find `vllm`: beside this interpreter first, so that both are of one environment."""
    beside = str(Path(sys.executable).parent)
    places = os.pathsep.join((beside, environment.get("PATH", os.defpath)))
    found = shutil.which("vllm", path=places)
    if found is None:
        raise LaunchError(f"the command vllm is neither in {beside} nor in PATH; install vllm")
    return found


def options_text() -> str:
    """Write each of our options with its help, within 80 columns."""
    lines = []
    for name, text in OPTIONS.items():
        option, margin = f"  {OPTION_PREFIX}{name}", " " * _HELP_COLUMN
        sentence = f"{text[0].upper()}{text[1:]}."
        wrapped = textwrap.wrap(sentence, _COLUMNS - _HELP_COLUMN, break_on_hyphens=False)
        if len(option) + 2 <= _HELP_COLUMN:
            option += margin[len(option) :] + wrapped.pop(0)
        lines += [option, *(margin + line for line in wrapped)]
    return "\n".join(lines)


def usage() -> str:
    """Explain the command."""
    return "\n".join(
        (
            "Usage: schedsvc-vllm serve MODEL [options below] [vllm serve's own options]",
            "",
            "Runs `vllm serve` with the schedsvc gate in front of it. Each option is also a",
            "variable: --schedsvc-pool-epoch is SCHEDSVC_POOL_EPOCH; the option goes first.",
            "",
            options_text(),
            "",
            "Example:",
            "  schedsvc-vllm serve MODEL --schedsvc-target unix:/run/schedsvc/schedsvc.sock \\",
            "      --schedsvc-tenant-headers x-tenant-id --max-model-len 8192",
            "",
            "`schedsvc-vllm serve --help=all` shows vLLM's own options.",
        )
    )


def version() -> str:
    """Return the version of this package."""
    from importlib import metadata  # with a parser of mail, which no start needs

    return metadata.version("schedsvc-vllm")


def main() -> None:
    """Become `vllm serve`; exit with status 2 if the command line or a setting is wrong."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--version"]:
        sys.stdout.write(f"schedsvc-vllm {version()}\n")
        sys.exit(0)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        sys.stdout.write(usage() + "\n")
        sys.exit(0 if arguments else EXIT_USAGE)
    environment = dict(os.environ)
    try:
        help_only = arguments[0] == "serve" and any(
            argument.split("=")[0] in ("--help", "-h") for argument in arguments
        )
        command = [find_vllm(environment)]
        command += arguments if help_only else prepare(arguments, environment)
    except (LaunchError, SettingsError) as error:
        sys.stderr.write(f"schedsvc-vllm: {error}\n")
        sys.exit(EXIT_USAGE)
    sys.stdout.flush()
    os.execve(command[0], command, environment)  # noqa: S606 - it is vLLM's own command
