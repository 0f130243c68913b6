"""Known bugs of what one caller can do to another."""

from mutant import Mutant

REPORTS = frozenset({"report-false"})

TRUST_BUGS = (
    Mutant(
        "report-unlimited",
        "a report is charged whatever its request can use",
        (
            (
                "lifecycle/lease.pxi",
                "    if u.input_tokens <= input_max and u.output_tokens <= output_max:\n",
                "    if BUG:\n        return\n",
            ),
        ),
        40,
        REPORTS,
    ),
    Mutant(
        "report-counted-each-time",
        "a lease counts as limited with each of its reports",
        (
            (
                "lifecycle/lease.pxi",
                "    core.reports_limited += not r.was_limited\n",
                "    if BUG:\n        core.reports_limited += r.was_limited\n",
            ),
        ),
        40,
        REPORTS,
    ),
    Mutant(
        "output-limited-once",
        "the output of several sequences is limited as that of one",
        (
            (
                "lifecycle/lease.pxi",
                "    if not r.has_exact_input:\n",
                "    if BUG:\n        output_max = r.output_max_tokens\n",
            ),
        ),
        40,
    ),
)
