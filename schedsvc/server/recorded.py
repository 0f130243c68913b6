"""Makes the recording of a server as the configuration says, and logs what happens to it."""

from pathlib import Path
from typing import Any

import structlog

from schedsvc.config import Config
from schedsvc.records.recording.start import Recording

__all__ = ["begin_recording", "recording_of"]

_log = structlog.get_logger("schedsvc.server")


def recording_of(config: Config, now_ns: int, options: dict[str, Any]) -> Recording | None:
    """Make a core that is recorded, if the configuration says so. Raises RecordingError."""
    if config.record is None:
        return None
    path = config.resolve(config.record)

    def put_back(reason: str, aside: Path | None) -> None:
        moved = str(aside or "")
        _log.error("recording_put_back", file=str(path), reason=reason, moved_aside=moved)

    return Recording(config, now_ns, _stopped, put_back, **options)


def begin_recording(recording: Recording) -> None:
    """Begin the file. Raises RecordingError."""
    reason, file = recording.begin(), str(recording.path)
    _log.info("recording", file=file)
    if reason:
        effect = "another program that deletes the file ends the recording, and events are lost"
        _log.warning("recording_unlinked", file=file, reason=reason, effect=effect)


def _stopped(reason: str) -> None:
    """Log that serving goes on without being recorded."""
    _log.error("recording_stopped", reason=reason)
