"""Reads the gate's settings: environment variables, checked once at the start."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from schedsvc_client import api_key_hash
from schedsvc_client.channel import Token
from schedsvc_client.targets import check_targets

from schedsvc_vllm.certificates import XFCC, CertificateSettings, read_patterns
from schedsvc_vllm.files import read_bytes, read_text
from schedsvc_vllm.image_sizes import UNKNOWN_MODEL, ImageSizes
from schedsvc_vllm.operator_paths import is_operator_path
from schedsvc_vllm.paths import canonical

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_ORIGIN = re.compile(r"https?://[\w.:\[\]-]+", re.ASCII)
MAX_QUEUE = "x-schedsvc-max-queue-ms"
DEADLINE = "x-schedsvc-deadline-ms"
LLM_D_TTFT = "x-llm-d-slo-ttft-ms"
LLM_D_OBJECTIVE = "x-llm-d-inference-objective"
SESSION = "x-session-id"
#: All that the gate can read, and those that it reads by default: an unknown class is refused, so
#: a router in front that names objectives of its own must not break its requests.
REQUEST_HEADERS = (MAX_QUEUE, DEADLINE, LLM_D_TTFT, LLM_D_OBJECTIVE, SESSION)
REQUEST_HEADERS_DEFAULT = (MAX_QUEUE, DEADLINE, LLM_D_TTFT, SESSION)
_JWT = tuple(
    f"SCHEDSVC_JWT_{name}"
    for name in (
        *("ISSUER", "AUDIENCE", "JWKS_FILE", "JWKS_URL"),
        *("TENANT_CLAIM", "CLASS_CLAIM", "LEEWAY", "REFRESH", "KEYS_AGE_MAX"),
    )
)
_JWKS_URL = re.compile(r"https://[^/@]+|http://(127\.0\.0\.1|localhost|\[::1\])(:\d+)?(/|$)")
_PRESETS = {"llm-d": "x-llm-d-inference-fairness-id"}
# The length of a key that cannot be guessed: 128 bits in hexadecimal digits.
_RESPONSE_KEY_BYTES_MIN = 32
_log = logging.getLogger("schedsvc_vllm")
_HEADER = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+")


class SettingsError(ValueError):
    """A setting is missing or wrong; the message names its variable."""


@dataclass(frozen=True)
class PoolSettings:
    """Describes the pool as the environment sets it; 0: as the engine reports."""

    name: str = "default"
    capacity_tokens: int = 0
    block_size_tokens: int = 0
    max_running: int = 0
    max_model_tokens: int = 0
    epoch: int = 0
    gates: int = 1


@dataclass(frozen=True)
class TlsSettings:
    """Names the files for TLS to the scheduler; without a CA grpc's own roots are trusted."""

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None


@dataclass(frozen=True)
class JwtSettings:
    """Says whose tokens are taken, and what they say. `jwks`: a file, or an https URL."""

    issuer: str
    audience: str
    jwks: str
    tenant_claim: str = "sub"
    class_claim: str = ""
    leeway_s: float = 30.0
    refresh_s: float = 300.0
    keys_age_s_max: float = 86_400.0


@dataclass(frozen=True)
class Settings:
    """Holds the settings of one gate. README.md describes each variable."""

    target: str
    token: Token | None = None
    tls: TlsSettings | None = None
    client_id: str = ""
    pool: PoolSettings = PoolSettings()
    tenant_headers: tuple[str, ...] = ()
    header_set_by: str = ""
    jwt: JwtSettings | None = None
    certificates: CertificateSettings | None = None
    trust_api_key: bool = True
    asks_for_keys: bool = False
    known_keys_file: str = ""
    trust_user_field: bool = False
    class_from_service_tier: bool = False
    request_headers: tuple[str, ...] = REQUEST_HEADERS_DEFAULT
    trust_request_id: bool = False
    api_keys_sha256: frozenset[bytes] = frozenset()
    operator_keys_sha256: frozenset[bytes] = frozenset()
    models_open: bool = True
    metrics_open: bool = False
    response_key: bytes = b""
    fail_open: bool = True
    fail_open_concurrency_min: int = 1
    unreachable_after_s: float = 3.0
    failover_wait_s: float = 5.0
    fence: str = ""
    refuse_ungated: bool = True
    open_paths: frozenset[str] = frozenset()
    prefix_hashes: bool = True
    serves_beams: bool = True
    output_limit: int = 0
    body_bytes_max: int = 32 << 20
    bodies_bytes_max: int = 48 << 20
    send_stall_s: float = 30.0
    cors_origins: tuple[str, ...] = ()
    joins_retries: bool = False
    queue_comments_s: float = 0.0
    images: ImageSizes = UNKNOWN_MODEL
    traces: bool = False
    histogram_tenants_max: int = 50

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the schedulers that may lead."""
        return check_targets(self.target)

    @property
    def is_fronted(self) -> bool:
        """Return whether a front writes headers that count: tenants' or clients' addresses."""
        return bool(self.header_set_by)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings. Raises SettingsError, which names the variable at fault."""
        read = _Reader(os.environ if environment is None else environment)
        pool = PoolSettings(
            name=read.text("SCHEDSVC_POOL", "default"),
            capacity_tokens=read.number("SCHEDSVC_POOL_CAPACITY_TOKENS"),
            block_size_tokens=read.number("SCHEDSVC_POOL_BLOCK_SIZE_TOKENS", maximum=65_536),
            max_running=read.number("SCHEDSVC_POOL_MAX_RUNNING"),
            max_model_tokens=read.number("SCHEDSVC_POOL_MAX_MODEL_TOKENS"),
            epoch=read.number("SCHEDSVC_POOL_EPOCH"),
            gates=read.number("SCHEDSVC_POOL_GATES", 1, maximum=65_536),
        )
        target = read.checked("SCHEDSVC_TARGET", lambda text: ",".join(check_targets(text)))
        several, fence = "," in target, read.raw("SCHEDSVC_FENCE")
        if several and pool.gates > 1 and not fence:
            raise SettingsError(
                f"SCHEDSVC_FENCE is not set: the {pool.gates} processes of SCHEDSVC_POOL_GATES need"
                " one file together, because SCHEDSVC_TARGET has several targets"
            )
        default_id = f"{socket.gethostname()}/{pool.name}/{os.getpid()}"[:128]
        return cls(
            target=target,
            token=read.token(),
            tls=read.tls(),
            client_id=read.text("SCHEDSVC_CLIENT_ID", default_id),
            pool=pool,
            tenant_headers=read.tenant_headers("SCHEDSVC_TENANT_HEADERS"),
            header_set_by=read.text("SCHEDSVC_HEADER_SET_BY", ""),
            jwt=read.jwt(),
            certificates=read.certificates(),
            trust_api_key=read.flag("SCHEDSVC_TRUST_API_KEY", True),
            asks_for_keys=read.choice("SCHEDSVC_API_KEYS_FROM", ("gate", "scheduler")) != "gate",
            known_keys_file=read.known_keys_file(target, pool.name),
            trust_user_field=read.flag("SCHEDSVC_TRUST_USER_FIELD", False),
            class_from_service_tier=read.flag("SCHEDSVC_CLASS_FROM_SERVICE_TIER", False),
            request_headers=read.request_headers("SCHEDSVC_REQUEST_HEADERS"),
            trust_request_id=read.flag("SCHEDSVC_TRUST_REQUEST_ID", False),
            api_keys_sha256=read.api_keys(),
            operator_keys_sha256=read.operator_keys(),
            models_open=read.flag("SCHEDSVC_MODELS_OPEN", True),
            metrics_open=read.flag("SCHEDSVC_METRICS_OPEN", False),
            response_key=read.response_key(),
            fail_open=read.choice("SCHEDSVC_UNREACHABLE", ("open", "closed")) == "open",
            fail_open_concurrency_min=read.number("SCHEDSVC_UNREACHABLE_CONCURRENCY_MIN", 1),
            unreachable_after_s=read.seconds("SCHEDSVC_UNREACHABLE_AFTER", 1.5 if several else 3.0),
            failover_wait_s=read.seconds("SCHEDSVC_FAILOVER_WAIT", 5.0),
            fence=fence,
            refuse_ungated=read.raw("SCHEDSVC_UNGATED").lower() != "pass",
            open_paths=read.open_paths("SCHEDSVC_UNGATED"),
            prefix_hashes=read.choice("SCHEDSVC_PREFIX_HASHES", ("auto", "off")) == "auto",
            serves_beams=read.choice("SCHEDSVC_BEAM_SEARCH", ("serve", "refuse")) == "serve",
            output_limit=read.output_limit("SCHEDSVC_OUTPUT_LIMIT"),
            body_bytes_max=read.number("SCHEDSVC_BODY_BYTES_MAX", 32 << 20),
            bodies_bytes_max=read.number("SCHEDSVC_BODIES_BYTES_MAX", 48 << 20),
            queue_comments_s=read.seconds("SCHEDSVC_QUEUE_COMMENTS", 0.0),
            joins_retries=read.flag("SCHEDSVC_IDEMPOTENCY_KEYS", False),
            cors_origins=read.origins("SCHEDSVC_CORS_ORIGINS"),
            send_stall_s=read.seconds("SCHEDSVC_SEND_STALL", 30.0),
            images=read.images(),
            traces=read.traces(),
            histogram_tenants_max=read.number("SCHEDSVC_HISTOGRAM_TENANTS_MAX", 50, maximum=1_000),
        )


class _Reader:
    """Reads variables; whatever is wrong becomes a SettingsError with the variable's name."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def raw(self, name: str) -> str:
        return self._environment.get(name, "").strip()

    def text(self, name: str, default: str) -> str:
        value = self.raw(name) or default
        if len(value.encode()) > 128:
            raise SettingsError(f"{name}: has more than 128 bytes")
        return value

    def checked(self, name: str, check: Callable[[str], str]) -> str:
        value = self.raw(name)
        if not value:
            raise SettingsError(f"{name} is not set: host:port or unix:/path of the scheduler")
        try:
            return check(value)
        except ValueError as error:
            raise SettingsError(f"{name}: {error}") from None

    def number(self, name: str, default: int = 0, maximum: int = (1 << 62)) -> int:
        value = self.raw(name)
        if not value:
            return default
        if not (value.isascii() and value.isdigit()) or not 1 <= int(value) <= maximum:
            raise SettingsError(f"{name}: must be a whole number from 1 to {maximum}, not {value}")
        return int(value)

    def output_limit(self, name: str) -> int:
        """Return a number of tokens; 0 for the context."""
        return 0 if self.raw(name).lower() == "context" else self.number(name, maximum=1 << 27)

    def seconds(self, name: str, default: float) -> float:
        value = self.raw(name)
        if not value:
            return default
        try:
            seconds = float(value.removesuffix("s"))
        except ValueError:
            seconds = 0.0
        if not 0.01 <= seconds <= 86_400:
            raise SettingsError(f"{name}: must be seconds from 0.01 to 86400, not {value}")
        return seconds

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name).lower()
        if not value:
            return default
        if value not in _TRUE + _FALSE:
            raise SettingsError(f"{name}: must be one of {', '.join(_TRUE + _FALSE)}, not {value}")
        return value in _TRUE

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of the choices; the first is the default."""
        value = self.raw(name).lower() or choices[0]
        if value not in choices:
            raise SettingsError(f"{name}: must be {' or '.join(choices)}, not {value}")
        return value

    def open_paths(self, name: str) -> frozenset[str]:
        """Return the paths of a list; none for the words that stand for no path or for all."""
        value = self.raw(name)
        if value.lower() in ("", "refuse", "pass"):
            return frozenset()
        paths = [part.strip() for part in value.split(",") if part.strip()]
        for path in paths:
            if canonical(path.encode()) != path:
                raise SettingsError(
                    f"{name}: must be refuse, pass, or paths such as /v1/embeddings, not {path}"
                )
            if is_operator_path(path.encode()):
                raise SettingsError(
                    f"{name}: {path} acts on the engine or reveals its state, so it stays"
                    " closed to tenants; SCHEDSVC_OPERATOR_KEYS_FILE opens it to keys of operators"
                )
        return frozenset(paths)

    def origins(self, name: str) -> tuple[str, ...]:
        origins = tuple(part.strip() for part in self.raw(name).split(",") if part.strip())
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise SettingsError(f"{name}: {origin!r} is not * or https://HOST[:PORT]")
        return origins

    def images(self) -> ImageSizes:
        default, most = UNKNOWN_MODEL, 1 << 20
        return ImageSizes(
            tokens=self.number("SCHEDSVC_IMAGE_TOKENS", default.tokens, most),
            patch_pixels=self.number("SCHEDSVC_IMAGE_PATCH_PIXELS", maximum=4_096),
            tokens_min=self.number("SCHEDSVC_IMAGE_TOKENS_MIN", maximum=most),
            tokens_max=self.number("SCHEDSVC_IMAGE_TOKENS_MAX", maximum=most),
        )

    def traces(self) -> bool:
        """Return whether spans are exported: OpenTelemetry's own variables say so."""
        exporter = self.raw("OTEL_TRACES_EXPORTER").lower()
        if self.raw("OTEL_SDK_DISABLED").lower() == "true" or exporter in ("", "none"):
            return False
        if exporter != "otlp":  # meant for another program in this process
            _log.warning("OTEL_TRACES_EXPORTER: the gate exports only otlp, not %s", exporter)
        return exporter == "otlp"

    def headers(self, name: str) -> tuple[str, ...]:
        names = tuple(part.strip().lower() for part in self.raw(name).split(",") if part.strip())
        for header in names:
            if not _HEADER.fullmatch(header):
                raise SettingsError(f"{name}: {header!r} is not the name of an HTTP header")
        return names

    def tenant_headers(self, name: str) -> tuple[str, ...]:
        """Return header names; the word llm-d stands for the one that its routers set."""
        return tuple(_PRESETS.get(header, header) for header in self.headers(name))

    def request_headers(self, name: str) -> tuple[str, ...]:
        """Return the headers of requests that are read; none for `off`."""
        if not self.raw(name):
            return REQUEST_HEADERS_DEFAULT
        names = () if self.raw(name).lower() == "off" else self.headers(name)
        for header in names:
            if header not in REQUEST_HEADERS:
                raise SettingsError(
                    f"{name}: must be off, or some of {', '.join(REQUEST_HEADERS)}, not {header}"
                )
        return names

    def file(self, name: str) -> str | None:
        """Return a path after trying to read it."""
        value = self.raw(name)
        if not value:
            return None
        try:
            read_bytes(value)
        except OSError as error:
            raise SettingsError(f"{name}: cannot read {value}: {error.strerror}") from None
        return value

    def file_text(self, name: str, file: str) -> str:
        """Return the text of the file that a variable names."""
        try:
            return read_text(file)
        except OSError as error:
            raise SettingsError(f"{name}: cannot read {file}: {error.strerror}") from None

    def token(self) -> Token | None:
        """Return the token, or a function that reads its file again, so that it may be rotated."""
        value, file = self.raw("SCHEDSVC_TOKEN"), self.file("SCHEDSVC_TOKEN_FILE")
        if value and file:
            raise SettingsError("SCHEDSVC_TOKEN and SCHEDSVC_TOKEN_FILE: give only one of them")
        if file is None:
            return value or None
        if not self.file_text("SCHEDSVC_TOKEN_FILE", file).strip():
            raise SettingsError(f"SCHEDSVC_TOKEN_FILE: {file} is empty")
        return lambda: read_text(file).strip()

    def tls(self) -> TlsSettings | None:
        files = {
            name: self.file(f"SCHEDSVC_TLS_{name}") for name in ("CA_FILE", "CERT_FILE", "KEY_FILE")
        }
        if bool(files["CERT_FILE"]) != bool(files["KEY_FILE"]):
            missing = "KEY_FILE" if files["CERT_FILE"] else "CERT_FILE"
            raise SettingsError(f"SCHEDSVC_TLS_{missing}: belongs to the other, give both or none")
        if not self.flag("SCHEDSVC_TLS", any(files.values())):
            if any(files.values()):
                raise SettingsError("SCHEDSVC_TLS is off, but SCHEDSVC_TLS_..._FILE are given")
            return None
        return TlsSettings(files["CA_FILE"], files["CERT_FILE"], files["KEY_FILE"])

    def jwt(self) -> JwtSettings | None:
        given = [name for name in _JWT if self.raw(name)]
        if not given:
            return None
        for name in ("SCHEDSVC_JWT_ISSUER", "SCHEDSVC_JWT_AUDIENCE"):
            if not self.raw(name):
                raise SettingsError(f"{name} is not set: {given[0]} needs it")
        file, url = self.file("SCHEDSVC_JWT_JWKS_FILE"), self.raw("SCHEDSVC_JWT_JWKS_URL")
        if bool(file) == bool(url):
            raise SettingsError("SCHEDSVC_JWT_JWKS_FILE, SCHEDSVC_JWT_JWKS_URL: give one of them")
        if url and not _JWKS_URL.match(url):
            raise SettingsError(
                f"SCHEDSVC_JWT_JWKS_URL: must be https:// (http:// only to this host), not {url}"
            )
        return JwtSettings(
            issuer=self.raw("SCHEDSVC_JWT_ISSUER"),
            audience=self.raw("SCHEDSVC_JWT_AUDIENCE"),
            jwks=file or url,
            tenant_claim=self.text("SCHEDSVC_JWT_TENANT_CLAIM", "sub"),
            class_claim=self.text("SCHEDSVC_JWT_CLASS_CLAIM", ""),
            leeway_s=self.seconds("SCHEDSVC_JWT_LEEWAY", 30.0),
            refresh_s=self.seconds("SCHEDSVC_JWT_REFRESH", 300.0),
            keys_age_s_max=self.seconds("SCHEDSVC_JWT_KEYS_AGE_MAX", 86_400.0),
        )

    def certificates(self) -> CertificateSettings | None:
        """Return which names of client certificates stand for tenants; None: none does."""
        set_by = self.text("SCHEDSVC_XFCC_SET_BY", "")
        try:
            patterns = read_patterns(self.raw("SCHEDSVC_CERTIFICATE_TENANTS"))
        except ValueError as error:
            raise SettingsError(f"SCHEDSVC_CERTIFICATE_TENANTS: {error}") from None
        if set_by and not patterns:
            raise SettingsError(
                f"SCHEDSVC_CERTIFICATE_TENANTS is not set: SCHEDSVC_XFCC_SET_BY lets {XFCC} name"
                " tenants, and needs the patterns of the names"
            )
        return CertificateSettings(patterns, set_by) if patterns else None

    def api_keys(self) -> frozenset[bytes]:
        """Return the SHA-256 of each API key a caller may use; empty: the gate checks none."""
        listed = self.keys("SCHEDSVC_API_KEYS_FILE")
        key = self.raw("VLLM_API_KEY")
        return listed | {api_key_hash(key)} if key else listed

    def known_keys_file(self, target: str, pool: str) -> str:
        """Return where the keys are kept that the scheduler has known; "": nowhere."""
        told = self.raw("SCHEDSVC_KNOWN_KEYS_FILE")
        if told:
            return "" if told.lower() == "off" else told
        home = self.raw("HOME")
        state = self.raw("XDG_STATE_HOME") or (f"{home}/.local/state" if home else "")
        name = hashlib.sha256(f"{target}\0{pool}".encode()).hexdigest()[:16]
        return f"{state}/schedsvc/known-keys-{name}" if state else ""

    def operator_keys(self) -> frozenset[bytes]:
        """Return the SHA-256 of each key that may call operators' endpoints; empty: none may."""
        keys = self.keys("SCHEDSVC_OPERATOR_KEYS_FILE")
        if keys & self.api_keys():
            raise SettingsError(
                "SCHEDSVC_OPERATOR_KEYS_FILE: holds a key of SCHEDSVC_API_KEYS_FILE or"
                " VLLM_API_KEY, with which tenants call; give operators keys of their own"
            )
        return keys

    def response_key(self) -> bytes:
        """Return the secret of the ids of responses; b"": each gate process makes its own."""
        file = self.file("SCHEDSVC_RESPONSE_KEY_FILE")
        if file is None:
            return b""
        key = self.file_text("SCHEDSVC_RESPONSE_KEY_FILE", file).strip().encode()
        if len(key) < _RESPONSE_KEY_BYTES_MIN:
            raise SettingsError(
                f"SCHEDSVC_RESPONSE_KEY_FILE: {file} has {len(key)} bytes; it needs"
                f" {_RESPONSE_KEY_BYTES_MIN} or more, as `openssl rand -hex 32` writes"
            )
        return key

    def keys(self, name: str) -> frozenset[bytes]:
        """Return the SHA-256 of each key in the file that a variable names, one on each line."""
        file = self.file(name)
        if file is None:
            return frozenset()
        keys = [line.strip() for line in self.file_text(name, file).splitlines()]
        if not any(keys):
            raise SettingsError(f"{name}: {file} holds no key")
        return frozenset(api_key_hash(key) for key in keys if key)
