"""Tests one function that reads the caller from a head, by all combinations of a table of heads.

The gate's own tests show the treatment of a caller. Here each row states the meaning of one part of
a head, and the combinations show that no part changes the meaning of another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from schedsvc_vllm.answers import BadRequestError
from schedsvc_vllm.caller import Caller, Peer, Sources, Terms, peer_of, read_caller, use
from schedsvc_vllm.certificates import (
    EXTENSION,
    XFCC,
    CertificateSettings,
    PeerCertificate,
    read_patterns,
)
from schedsvc_vllm.settings import REQUEST_HEADERS, Settings

ID = "spiffe://corp.test/sa/"
PATTERNS = read_patterns(ID + "{tenant}")
TENANTS, LLM_D = "x-tenant-id", "x-llm-d-inference-fairness-id"
MAX_QUEUE, DEADLINE, TTFT, OBJECTIVE, SESSION = REQUEST_HEADERS
TWICE = "the header occurs 2 times; send it once"


@dataclass(frozen=True)
class Row:
    """Pairs fields of a head with the part of a caller that they state.

    `value`: a text is the end of the message that a use of the part raises, if `param` or `status`
    is set.
    """

    fields: list[tuple[str, str]]
    value: Any
    param: str | None = None
    status: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    def holds(self, part: object) -> bool:
        """Return whether a part is what this row says."""
        if not self.status:
            return part == self.value
        with pytest.raises(BadRequestError) as caught:
            use(part)
        error = caught.value
        found = (error.status, error.param)
        return found == (self.status, self.param) and self.value in error.message


def wrong(name: str, value: str, *fields: tuple[str, str], status: int = 400) -> Row:
    return Row(list(fields), value, name or None, status)


FORWARDED = "x-forwarded-for"
NETWORKS = [
    Row([], "", more={"address": ""}),
    Row([], "192.0.2.1", more={"address": "192.0.2.1"}),
    Row([], "192.0.2.1", more={"address": "::ffff:192.0.2.1"}),
    Row([], "2001:db8:1:2::/64", more={"address": "2001:db8:1:2:3:4:5:6"}),
    Row([], "a socket", more={"address": "a socket"}),
    *(
        Row([(FORWARDED, "9.9.9.9"), (FORWARDED, stated)], network, more={"address": "192.0.2.1"})
        for stated, network in (
            ("198.51.100.7", "198.51.100.7"),
            ("9.9.9.9, 198.51.100.7", "198.51.100.7"),
            ("198.51.100.7:4242", "198.51.100.7"),
            ("[2001:db8:1:2::9]:4242", "2001:db8:1:2::/64"),
            ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
            ("198.51.100.7, unknown", "192.0.2.1"),
            ("999.1.1.1", "192.0.2.1"),
            ("::", "::/64"),
        )
    ),
]
BEARER, X_KEY = ("authorization", "Bearer sk-1"), ("x-api-key", "sk-2")
KEYS = [
    Row([], ""),
    Row([BEARER], "sk-1"),
    Row([("authorization", "bEARER  sk-1 ")], "sk-1"),
    Row([("authorization", "Bearer"), X_KEY], ""),
    Row([("authorization", "Basic sk-1")], ""),
    Row([("authorization", "Basic sk-1"), X_KEY], "sk-2"),
    Row([X_KEY], "sk-2"),
    Row([X_KEY, X_KEY, BEARER], "sk-1"),
    wrong("authorization", TWICE, BEARER, BEARER),
    wrong("x-api-key", TWICE, X_KEY, X_KEY),
]
NAMES = [
    Row([], ""),
    Row([(TENANTS, " a ")], "a"),
    Row([(LLM_D, "b"), (TENANTS, "a")], "a"),
    Row([(TENANTS, " "), (LLM_D, "b")], "b"),
    Row([("x-other", "c")], ""),
    Row([(TENANTS, "x" * 256)], "x" * 256),
    wrong(TENANTS, "more than 256 bytes", (TENANTS, "x" * 257)),
    wrong(TENANTS, "is not UTF-8", (TENANTS, "\xff")),
    wrong(TENANTS, "cannot be printed", (TENANTS, "a\x7fb")),
    wrong(TENANTS, "holds a comma", (TENANTS, "a,b")),
    wrong(TENANTS, TWICE, (TENANTS, "a"), (TENANTS, "a")),
    wrong(LLM_D, TWICE, (TENANTS, "a"), (LLM_D, "b"), (LLM_D, "b")),
]
HOURS = "is not a number of milliseconds from 0 to 86400000; send one, such as 500"
TERMS = [
    Row([], Terms()),
    Row([(MAX_QUEUE, "0")], Terms(queue_ttl_ms=1)),
    Row([(MAX_QUEUE, " 250 ")], Terms(queue_ttl_ms=250)),
    Row([(MAX_QUEUE, "0.5"), (DEADLINE, "1500.2")], Terms(1, 1_501)),
    Row([(TTFT, "2000")], Terms(deadline_ms=2_000)),
    Row([(TTFT, "0")], Terms()),
    Row([(TTFT, "not read"), (DEADLINE, "3000")], Terms(deadline_ms=3_000)),
    Row([(OBJECTIVE, "batch")], Terms(request_class="batch", states_tier=True)),
    Row([(OBJECTIVE, "x" * 65)], Terms(states_tier=True)),
    Row([(OBJECTIVE, " ")], Terms()),
    Row([(SESSION, " talk-7 ")], Terms(session="talk-7")),
    wrong(SESSION, "at most 256 printable bytes", (SESSION, "x" * 257)),
    wrong(DEADLINE, "from 1 to 86400000", (DEADLINE, "0")),
    *(
        wrong(MAX_QUEUE, HOURS, (MAX_QUEUE, value))
        for value in ("-1", "5s", "1e3", "nan", "86400001", "1,2", "0x10")
    ),
    *(wrong(name, TWICE, (name, "5"), (name, "5")) for name in (MAX_QUEUE, DEADLINE, OBJECTIVE)),
    wrong(MAX_QUEUE, TWICE, *[(MAX_QUEUE, "5")] * 2, *[(SESSION, "s")] * 2),
]
REQUEST_IDS = [
    Row([], ""),
    Row([("x-request-id", "mine")], "mine"),
    Row([("x-request-id", "mine"), ("x-request-id", "other")], "mine"),
    Row([("x-request-id", "x" * 128)], "x" * 128),
    Row([("x-request-id", "x" * 129)], ""),
    Row([("x-request-id", "a\tb")], ""),
    Row([("x-request-id", "\xe4")], ""),
]
IDEMPOTENCY_KEYS = [
    Row([], b""),
    Row([("idempotency-key", "k")], b"k"),
    Row([("idempotency-key", "k"), ("idempotency-key", "l")], b"k"),
]
REFUSED = "the client certificate is not accepted: "
PEERS = [
    Row([], None),
    Row([], "acme", more={"names": [("URI", f"{ID}acme")]}),
    Row([], None, more={"names": [("DNS", "acme.corp.test")]}),
    Row([(XFCC, f"URI={ID}victim")], "acme", more={"names": [("URI", f"{ID}acme")]}),
    Row([(XFCC, f"URI={ID}victim")], None),
    Row(
        [], f"{REFUSED}it has 2 SPIFFE IDs", None, 401,
        {"names": [("URI", f"{ID}a"), ("URI", f"{ID}b")]},
    ),
    Row(
        [], f"{REFUSED}it expired at today", None, 401,
        {"names": [("URI", f"{ID}acme")], "expired": "today"},
    ),
]  # fmt: skip
XFCCS = [
    Row([], None, more={"names": [("URI", f"{ID}proxy")]}),
    Row([(XFCC, f"Hash=1;URI={ID}acme")], "acme"),
    Row([(XFCC, "URI=")], None),
    wrong(XFCC, TWICE, (XFCC, f"URI={ID}a"), (XFCC, f"URI={ID}a")),
    wrong(XFCC, "describes several certificates", (XFCC, f"URI={ID}a,URI={ID}b")),
    wrong(XFCC, "cannot be read from character 1 on", (XFCC, "?")),
]
PARTS = {
    "network": NETWORKS,
    "api_key": KEYS,
    "named": NAMES,
    "terms": TERMS,
    "request_id": REQUEST_IDS,
    "idempotency_key": IDEMPOTENCY_KEYS,
}
CERTIFIED = {"": PEERS, "envoy": XFCCS}


def sources(set_by: str = "") -> Sources:
    settings = Settings(
        target="",
        tenant_headers=(TENANTS, LLM_D),
        header_set_by="front",
        request_headers=REQUEST_HEADERS,
        certificates=CertificateSettings(PATTERNS, set_by),
    )
    return Sources.of(settings)


def read(rows: dict[str, Row], counting: Sources) -> Caller:
    head = [
        (name.encode(), value.encode("latin-1"))
        for row in rows.values()
        for name, value in row.fields
    ]
    more = {name: value for row in rows.values() for name, value in row.more.items()}
    certificate = PeerCertificate(more.get("names", ()), more.get("expired", ""))
    return read_caller(head, Peer(more.get("address", ""), certificate), counting)


@pytest.mark.parametrize("set_by", CERTIFIED)
def test_each_part_of_a_head_is_read_as_its_row_says(set_by: str) -> None:
    for name, rows in (PARTS | {"certified": CERTIFIED[set_by]}).items():
        for row in rows:
            caller = read({name: row}, sources(set_by))
            assert row.holds(getattr(caller, name)), (name, row, caller)


def combinations(set_by: str) -> Iterator[dict[str, Row]]:
    """Yield every pair of rows of two parts, and each row beside one row of all other parts."""
    parts = PARTS | {"certified": CERTIFIED[set_by]}
    for one, other in itertools.combinations(parts, 2):
        for pair in itertools.product(parts[one], parts[other]):
            yield dict(zip((one, other), pair, strict=True))
    longest = max(map(len, parts.values()))
    for at, shift in itertools.product(range(longest), range(len(parts))):
        yield {
            name: rows[(at + shift * place) % len(rows)]
            for place, (name, rows) in enumerate(parts.items())
        }


@pytest.mark.parametrize("set_by", CERTIFIED)
def test_no_part_of_a_head_changes_what_another_means(set_by: str) -> None:
    for rows in combinations(set_by):
        caller = read(rows, sources(set_by))
        for name, row in rows.items():
            assert row.holds(getattr(caller, name)), (name, rows, caller)


def test_field_that_no_setting_names_is_not_read() -> None:
    for name in ("network", "named", "terms"):
        silent = read({name: Row([], None, more={"address": "192.0.2.1"})}, Sources())
        for row in PARTS[name]:
            if row.fields:
                spoken = read({name: row}, Sources())
                assert getattr(spoken, name) == getattr(silent, name), row
    assert all(read({"certified": row}, Sources()).certified is None for row in (*PEERS, *XFCCS))


def test_a_tenant_header_is_no_term() -> None:
    counting = Sources(tenant_headers=(SESSION.encode(),))
    caller = read({"named": Row([(SESSION, "a")], None)}, counting)
    assert (caller.named, caller.terms) == ("a", Terms())


def test_a_certificate_counts_until_its_end() -> None:
    for year, named in ((2100, "acme"), (2001, "it expired at Jan  1 00:00:00 2001 GMT")):
        certificate = {
            "notAfter": f"Jan  1 00:00:00 {year} GMT",
            "subjectAltName": (("URI", f"{ID}acme"),),
        }
        scope = {"client": None, "extensions": {EXTENSION: certificate}}
        found = read_caller([], peer_of(scope, sources()), sources()).certified
        assert named in (found.message if isinstance(found, BadRequestError) else str(found))
        assert peer_of(scope, sources("envoy")) == Peer()


@pytest.mark.parametrize(
    ("fields", "tier", "request_class", "states_tier"),
    [
        ([], None, "", False),
        ([], 3, "", False),
        ([], "flex", "flex", True),
        ([], "auto", "", True),
        ([], "default", "", True),
        ([], "x" * 65, "", True),
        ([(OBJECTIVE, "batch")], "flex", "batch", True),
        ([(OBJECTIVE, "x" * 65)], "flex", "", True),
    ],
)
def test_the_tier_of_a_body_names_a_class_behind_a_header(
    fields: list[tuple[str, str]], tier: object, request_class: str, states_tier: bool
) -> None:
    terms = use(read({"terms": Row(fields, None)}, sources()).terms)
    found = terms.with_tier_of({"service_tier": tier} if tier is not None else {})
    assert (found.request_class, found.states_tier) == (request_class, states_tier)
