# Policy decides which request goes first, where and when, and which is refused; it grants nothing.

include "policy/session_keys.pxi"       # the counters by which sessions of a tenant are ordered
include "policy/tree_lines.pxi"         # the order of queues at each node of the tree
include "policy/line_heads.pxi"         # the first requests in the lines of a pool
include "policy/local_position.pxi"     # where flows stand in each of several pools
include "policy/lead.pxi"               # service in all pools, and how far it may lead
include "policy/pool_comes.pxi"         # flows get their positions in a pool that comes
include "policy/parking.pxi"            # flows that wait outside the order, for a quota or a share
include "policy/external_order.pxi"     # keys from a function outside, in simulations
include "policy/fair_queue.pxi"         # virtual token counters, and the order of the queues
include "policy/edf_queue.pxi"          # order inside a queue: arrival, or earliest deadline first
include "policy/session_order.pxi"      # which session of a tenant goes first
include "policy/queueing.pxi"           # enqueue(), dequeue()
include "policy/forecast.pxi"           # how long a request will wait, and until its first token
include "policy/borrowing.pxi"          # shares of groups: paid, lent, borrowed, enforced
include "policy/quota_admission.pxi"    # heads that their quotas admit; flows that wait for one
include "policy/queue_order.pxi"        # heads that are displaced, and sorting again
include "policy/session_records.pxi"    # sessions of agents at first sight, and forgotten
include "policy/session_cap.pxi"        # sessions of agents that wait until others pause
include "policy/headroom.pxi"           # cache kept free for flows that are below their share
include "policy/locality.pxi"           # prompts that a pool has cached, and DLPM
include "policy/pick_next.pxi"          # head_for(), plan_for(): next, and its plan
include "policy/backfill.pxi"           # who_may_pass(): which request may pass the next one
include "policy/prefill_batching.pxi"   # how long a grant waits for company
include "policy/placement.pxi"          # which pool serves next
include "policy/overload.pxi"           # when a pool and the whole are overloaded
include "policy/retry_slots.pxi"        # places of a full queue, kept for retries on time
include "policy/deadline_shedding.pxi"  # requests that cannot have their first token in time
include "policy/retry_after.pxi"        # when a refused request may be retried
include "policy/dry_run.pxi"            # counts what would be refused or would wait
include "policy/wait_tracking.pxi"      # what the next request of each pool waits for
