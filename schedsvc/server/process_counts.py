"""Counts that a process has once, however many servers follow one another in it."""

from collections.abc import Callable

from schedsvc.server.descriptors import exhaustions
from schedsvc.server.logs import lines_dropped, lines_suppressed

__all__ = ["PROCESS_COUNTS"]

#: The help text and the count of each metric.
PROCESS_COUNTS: dict[str, tuple[str, Callable[[], int]]] = {
    "schedsvc_log_lines_dropped": (
        "Lines of the log that were lost, because no program read stderr.",
        lines_dropped,
    ),
    "schedsvc_log_lines_suppressed": (
        "Lines of the log that were left out, because their peer caused too many.",
        lines_suppressed,
    ),
    "schedsvc_descriptors_exhausted": (
        "Times at which the process began to be without a free file descriptor.",
        exhaustions,
    ),
}
