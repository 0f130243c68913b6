# A stream: its events in, its messages out.

include "session/encode.pxi"   # answers and verdicts as messages
include "session/events.pxi"   # reads a LeaseReplay
include "session/pools.pxi"    # PoolOffers: the pools of one stream
include "session/session.pxi"  # Session: the state machine of one stream, and its events
include "session/contest.pxi"  # two engines that claim one pool: which of them has it
