"""Random byte streams through the proxy: its upstream is asked what h11 reads, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from schedsvc_vllm import http_limits, proxy, proxy_headers

from tests.seeds import fresh

from .streams.reading import DEVIATIONS, read
from .streams.runs import play
from .streams.world import Disagreement

_FOUND_IN = 4_000
Plant = Callable[[pytest.MonkeyPatch], None]
Bounded: Any = http_limits._Bounded


@pytest.mark.parametrize("seed", fresh(2))
async def test_the_upstream_is_asked_what_h11_reads(seed: int) -> None:
    kinds = await play(150, seed)
    happened = ("requests read alike", "requests admitted", "served whole", "refused")
    assert min(kinds[kind] for kind in happened) > 0


def test_a_listed_deviation_is_read_as_its_sound_form() -> None:
    head = b"POST /a HTTP/1.1\r\nHost: x\r\n"
    sound = head + b"Content-Length: 5\r\n\r\nabcde"
    chunks = head + b"Transfer-Encoding: chunked\r\n\r\n%b5\r\nabcde\r\n0\r\n\r\n"
    zeros = b"0" * 20
    forms = {
        "blank lines": (b"\r\n\r\n" + sound, sound),
        "spaces in a request line": (sound.replace(b" /a ", b"   /a  "), sound),
        "zeros before a Content-Length": (sound.replace(b"h: ", b"h: " + zeros), sound),
        "zeros before the size of a chunk": (chunks % zeros, chunks % b""),
    }
    assert forms.keys() == {deviation.name for deviation in DEVIATIONS}
    for name, (odd, same) in forms.items():
        [found], [expected] = read(odd).requests, read(same).requests
        assert found.deviations == (name,)
        assert (found.target, found.body, found.is_whole) == (b"/a", b"abcde", True)
        assert found.body == expected.body


# Known holes, opened again.


def trailers_are_headers(patch: pytest.MonkeyPatch) -> None:
    kept = Bounded.on_headers_complete

    def on_headers_complete(self: Any) -> None:
        kept(self)
        if self.cycle is not None:
            self.headers = self.cycle.scope["headers"]

    patch.setattr(Bounded, "on_headers_complete", on_headers_complete)


def offers_are_cut_out_of_the_bytes(patch: pytest.MonkeyPatch) -> None:
    kept = Bounded._feed
    patch.setattr(
        Bounded, "_feed", lambda self, data: kept(self, data.replace(b"Upgrade: h2c\r\n", b""))
    )


def a_get_has_its_body(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(proxy, "_BODILESS", frozenset())


def fields_of_the_connection_pass(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(proxy_headers, "_named_by_connection", lambda _: frozenset())


def every_head_passes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(http_limits, "head_refusal", lambda *_: b"")


def a_fragment_is_dropped(patch: pytest.MonkeyPatch) -> None:
    kept = http_limits.head_refusal
    patch.setattr(http_limits, "head_refusal", lambda method, _, *rest: kept(method, b"/", *rest))


def bytes_end_the_limit_of_an_idle_connection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Bounded, "_wait_for_request", lambda _: None)


def a_trailer_leaves_its_connection_open(patch: pytest.MonkeyPatch) -> None:
    kept = Bounded.on_message_complete

    def on_message_complete(self: Any) -> None:
        cycle = self.cycle
        keeps_alive = cycle is not None and cycle.keep_alive
        kept(self)
        if keeps_alive:
            cycle.keep_alive = True

    patch.setattr(Bounded, "on_message_complete", on_message_complete)


@pytest.mark.parametrize(
    "plant",
    [
        trailers_are_headers,
        offers_are_cut_out_of_the_bytes,
        a_get_has_its_body,
        fields_of_the_connection_pass,
        every_head_passes,
        a_fragment_is_dropped,
        bytes_end_the_limit_of_an_idle_connection,
        a_trailer_leaves_its_connection_open,
    ],
    ids=lambda plant: plant.__name__,
)
async def test_a_known_hole_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    [seed] = fresh(1)
    with pytest.raises(Disagreement, match=f"seed {seed}, stream [0-9]+: .*\nmade small: b['\"]"):
        await play(_FOUND_IN, seed)
