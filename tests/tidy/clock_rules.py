"""Holds as data which tests may read clocks, and the calls that read them."""

# These calls measure how long something takes.
DURATION_CLOCKS = frozenset(
    {
        *(f"time.{name}" for name in ("clock_gettime", "clock_gettime_ns")),
        *(
            f"time.{name}{unit}"
            for name in ("monotonic", "perf_counter", "process_time", "thread_time")
            for unit in ("", "_ns")
        ),
        "os.times",
        "resource.getrusage",
    }
)
# Files and folders below tests/ that may read these clocks, and why. All others wait for conditions
# (tests/waiting.py), count, or run in virtual time; measurements of time are in bench/.
CLOCK_READERS = {
    "waiting.py": "ends tests that hang, and shows that a time has passed",
    "server/test_notify.py": "compares a stamp in a message with the clock before and after it",
    "server/test_state.py": "asks until a reported age shows that a moment is saved",
    "server/test_state_lost.py": "uses that of test_state.py",
    "ladder/test_parts.py": "compares two readers of the CPU time of one process",
    "ladder/test_stalls.py": "uses up CPU time, which the bench has to see",
    "processes/test_kills.py": "lets the engine's steps last as long as this machine needs",
    "processes/programs.py": "notes the order of first tokens",
    # Programs that people run, and the modules that they use.
    "clients/exchanges.py": "prints how long it took",
    "cluster/failover_runs.py": "make failovers, for as long as it may take",
    "cluster/failovers.py": "make failovers, which measures gaps",
    "cluster/message_audit.py": "notes the gaps of make failovers",
    "fuzz/__main__.py": "make test-fuzz, for as long as it may take",
    "lab/emulator/side.py": "looks once a period, in a comparison that people run",
    "litellm/cost.py": "python -m tests.litellm.cost, which compares times of one run",
    "usage/proof.py": "make usage-proof, for as long as it may take",
    # Neither make test nor make test-slow runs these.
    "box": "starts images",
    "vllm": "measures the real vLLM",
}
# The least limit of a wait in a test, in s: it ends a test that hangs.
LIMIT_S_MIN = 30
