# cython: language_level=3
# cython: boundscheck=False
# cython: wraparound=False
# cython: cdivision=True
# cython: initializedcheck=False
# cython: embedsignature=True
"""The scheduling core, one compiled unit out of the files beside this one.

Order matters: each file uses only those above it. `schedsvc/_core.pyi` documents the interface.
"""

cimport cython

include "types.pxi"
include "hash.pxi"
include "table.pxi"
include "heap.pxi"
include "classes.pxi"
include "changes.pxi"
include "sketch.pxi"
include "predictor.pxi"
include "requests.pxi"
include "waits.pxi"
include "refused.pxi"
include "treap.pxi"
include "shares.pxi"
include "quotas.pxi"
include "rates.pxi"
include "flows.pxi"
include "wire.pxi"
include "adapters.pxi"
include "loras.pxi"
include "prefixes.pxi"
include "peak.pxi"
include "ledger.pxi"
include "encode.pxi"
include "settings.pxi"
include "scheduler.pxi"
include "headroom.pxi"
include "overload.pxi"
include "config.pxi"
include "gate.pxi"
include "limits.pxi"
include "lending.pxi"
include "order.pxi"
include "mode.pxi"
include "estimate.pxi"
include "refusal.pxi"
include "admit.pxi"
include "choose.pxi"
include "delay.pxi"
include "placement.pxi"
include "locality.pxi"
include "dispatch.pxi"
include "lease.pxi"
include "handles.pxi"
include "save.pxi"
include "restore.pxi"
include "bulk.pxi"
include "inspect.pxi"
include "why.pxi"
include "audit.pxi"
include "events.pxi"
include "session.pxi"
