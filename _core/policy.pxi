# Decisions: who goes first, where, when, and who is refused. They grant nothing themselves.

include "policy/parking.pxi"            # a flow outside the line: for a quota, or held to its share
include "policy/fair_queue.pxi"         # virtual token counters, and each queue's place in the line
include "policy/edf_queue.pxi"          # order inside a queue: arrival, or earliest deadline first
include "policy/queueing.pxi"           # enqueue(), dequeue()
include "policy/forecast.pxi"           # how long a request will wait, and until its first token
include "policy/borrowing.pxi"          # shares of groups: who pays, who lends, who is held
include "policy/quota_admission.pxi"    # which head may go under its quotas, and who waits there
include "policy/queue_order.pxi"        # heads that are displaced, and sorting anew
include "policy/headroom.pxi"           # cache kept free for flows that are below their share
include "policy/grant_pacing.pxi"       # grants of equal requests kept apart in time
include "policy/locality.pxi"           # whose prompt a pool has already, and DLPM
include "policy/pick_next.pxi"          # head_for(), plan_for(), who_may_pass(): next, and backfill
include "policy/prefill_batching.pxi"   # how long a grant waits for company
include "policy/placement.pxi"          # which pool serves next
include "policy/overload.pxi"           # when a pool and the whole are overloaded
include "policy/retry_slots.pxi"        # places of a full queue kept for those that come as told
include "policy/deadline_shedding.pxi"  # who cannot have its first token in time
include "policy/retry_after.pxi"        # when whoever is refused may come back
include "policy/dry_run.pxi"            # what would be refused or would wait, counted alone
include "policy/wait_tracking.pxi"      # what the next request of each pool waits for
