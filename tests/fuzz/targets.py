"""Lists all that is fuzzed: where its inputs begin, what it knows, and what has to hold."""

from collections.abc import Callable
from typing import NamedTuple

from tests.fuzz import crowd, files, http, state, walks, wire
from tests.fuzz.sanitised import FOUND


class Target(NamedTuple):
    """Describes one parser, or the walks."""

    what: str
    run: Callable[[bytes], None]  # raises an error for anything that must not happen
    corpus: Callable[[], list[bytes]]
    words: tuple[bytes, ...]
    times: int = 1  # as long as the others, because an input takes longer


TARGETS = {
    "admit": Target("Admit calls, beside protobuf's reader", wire.admit, wire.admit_corpus,
        wire.WORDS),
    "session": Target("Session streams, beside protobuf's reader", wire.session,
        wire.session_corpus, wire.WORDS),
    "crowd": Target("streams of several principals at once", crowd.crowd, crowd.corpus,
        wire.WORDS),
    "life": Target("orders of calls, and the books they leave", wire.life, wire.life_corpus, ()),
    "walk": Target("random walks, of which an input is the seed", walks.walk, walks.corpus,
        (), times=2),
    "gate": Target("HTTP before the engine", http.gate, http.corpus, http.WORDS),
    "config": Target("configuration files", files.config, files.config_corpus, files.CONFIG_WORDS),
    "trace": Target("traces of every form", files.trace, files.trace_corpus, files.TRACE_WORDS),
    "recording": Target("recordings of a scheduler", files.recording, files.recording_corpus,
        files.RECORDING_WORDS),
    "saved": Target("rows of the core from a state file", state.saved,
        lambda: [*state.saved_corpus()], state.ROW_WORDS),
    "state": Target("state files", state.file, lambda: [*state.file_corpus()], state.FILE_WORDS),
    "log": Target("state files of killed processes, with their logs", state.log,
        lambda: [*state.log_corpus()], state.FILE_WORDS),
}  # fmt: skip


def regressions(name: str) -> list[bytes]:
    """Return inputs of a target that broke something once."""
    return [path.read_bytes() for path in sorted((FOUND / name).glob("*"))]
