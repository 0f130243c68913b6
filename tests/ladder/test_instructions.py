"""Tests reading what callgrind counted in the calls of certain functions."""

import re

from bench.instructions import calls

#: Two callers of progress(), one of which comes before its name is repeated by number alone.
DUMP = """\
fn=(1) main
16 20
cfn=(2) core_9Scheduler_73progress
calls=3 40
16 900
cfi=(7) other.c
cfn=(3) core_9Scheduler_75complete
calls=1 50
* 70
fn=(2)
40 600
cfn=(4) core_progress_lease
calls=3 60
+2 300
fn=(5) twice
16 1
cfn=(2)
calls=1 40
+1 100
"""


def test_calls_of_all_callers_count_with_all_that_they_call() -> None:
    pattern = re.compile(r"core_9Scheduler_\d+(admit|progress|complete)")
    assert calls(DUMP, pattern) == {"progress": 1_000, "complete": 70}
