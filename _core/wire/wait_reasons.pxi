# The reasons for which a pool and a request can wait, declared once.

cdef enum:  # why a pool grants nothing
    WAIT_NONE = 0
    WAIT_KV = 1
    WAIT_MAX_RUNNING = 2
    WAIT_OVERDRAWN = 3
    WAIT_DETACHED = 4
    WAIT_LIMIT = 5
    WAIT_STRICT = 6
    WAIT_HEADROOM = 7
    WAIT_QUOTA = 8
    WAIT_MAX_TOTAL = 9
    WAIT_ROUND = 10
    WAIT_ADAPTERS = 11
    WAIT_DELAY = 12
    WAIT_SHARE = 13
    WAIT_DRAINING = 14
    WAIT_SESSION_CAP = 16

WAIT_REASONS = [
    "NONE", "KV", "MAX_RUNNING", "OVERDRAWN", "DETACHED", "LIMIT", "STRICT", "HEADROOM", "QUOTA",
    "MAX_TOTAL", "ROUND", "ADAPTERS", "DELAY", "SHARE", "DRAINING",
    "", "SESSION_CAP",
]

cdef enum:  # what a request waits for; numbered as in the contract
    WAITS_QUEUE = 1  # for others of its own queue
    WAITS_QUOTA = 2  # for a quota, of its tenant or of a group above
    WAITS_SHARE = 3  # its flow is held to its share
    WAITS_TURN = 4  # others of the line go first
    WAITS_POOL = 4  # and a reason of its pool, whose next it is: see ledger.pxi

WAITS = ["", "QUEUE", "QUOTA", "SHARE", "TURN"] + [
    {"QUOTA": "MODEL_QUOTA", "SHARE": ""}.get(name, name) for name in WAIT_REASONS[1:]
]
