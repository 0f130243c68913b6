"""Names from outside do nothing to a terminal: stats, why, logs, messages of the command line."""

import io
import logging
from typing import Any, Literal

import pytest
import structlog
from rich.console import Console
from schedsvc_client.v1 import explain_pb2, mode_pb2, pool_pb2
from schedsvc_client.v1 import scheduler_pb2 as pb

from schedsvc.cli import stats, why
from schedsvc.cli.mode import mode_text
from schedsvc.config import Place, Problem, problem_text
from schedsvc.server.logs import configure_logs, flush_logs
from schedsvc.text.printable import printable, printable_message

EVIL = "gpu\x1b[2J\x07\u202eevil\u2066\x9b31m\n"
STYLES: tuple[Literal["console", "json"], ...] = ("console", "json")
HARMFUL = set("\x1b\x07\u202e\u2066\x9b")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("gpu-1", "gpu-1"),
        ("größe €", "größe €"),
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("a\x07\n", "a\\x07\\n"),
        ("\u202eab", "\\u202eab"),
        ("\ud800", "\\ud800"),
    ],
)
def test_unprintable_text_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def rendered(view: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=300, markup=False).print(view)
    return file.getvalue()


def test_stats_shows_names_without_obeying_them() -> None:
    answer = pb.StatsResponse(
        pools=[pool_pb2.PoolStats(name=EVIL)], flows=[pb.FlowStats(tenant=EVIL)]
    )
    shown = rendered(stats._view(printable_message(answer), everything=True, named=False))
    assert HARMFUL.isdisjoint(shown)
    assert "gpu\\x1b[2J" in shown
    assert answer.pools[0].name == EVIL  # the message itself is as it was
    assert "replays" not in shown
    answer.totals.replays_refused = 1_234
    assert "1,234 lease replays rejected" in rendered(
        stats._view(answer, everything=True, named=False)
    )


def test_why_shows_names_without_obeying_them() -> None:
    story = explain_pb2.RequestStory(tenant=EVIL, request_class=EVIL, pool=EVIL, message=EVIL)
    assert HARMFUL.isdisjoint(
        rendered(why.story_view(explain_pb2.ExplainResponse(requests=[story])))
    )


def test_modes_show_tenants_without_obeying_them() -> None:
    modes = mode_pb2.ModeStats(
        tenants=[mode_pb2.TenantMode(tenant=EVIL, mode=1)], tenants_overlaid=1
    )
    assert HARMFUL.isdisjoint(mode_text(printable_message(modes)))


def test_problem_of_a_file_holds_no_escape(tmp_path: Any) -> None:
    text = problem_text(tmp_path, Problem(Place(1, 1), (EVIL,), f"{EVIL} is wrong"))
    assert HARMFUL.isdisjoint(text)


def test_log_lines_hold_no_escape(capsys: pytest.CaptureFixture[str]) -> None:
    handlers, level = logging.getLogger().handlers[:], logging.getLogger().level
    before = structlog.get_config()
    try:
        for style in STYLES:
            configure_logs(style, "info")
            structlog.get_logger("schedsvc.x").info("registered", pool=EVIL)
            flush_logs()
            line = capsys.readouterr().err
            assert "registered" in line
            assert HARMFUL.isdisjoint(line), style
            assert line.count("\n") == 1
    finally:
        logging.getLogger().handlers[:] = handlers
        logging.getLogger().setLevel(level)
        structlog.configure(**before)
