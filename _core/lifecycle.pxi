# Events: what each call and each timer changes.

include "lifecycle/tree_moves.pxi"       # which flows stand below which in the tree of shares
include "lifecycle/verdicts.pxi"         # verdicts, put where their callers read them
include "lifecycle/request_ids.pxi"      # the key under which a request's id is found
include "lifecycle/served_rows.pxi"      # what flows were served here, for other members
include "lifecycle/evict.pxi"            # a queued request leaves without a grant
include "lifecycle/usage.pxi"            # what an ended lease used, for the ledger
include "lifecycle/lease.pxi"            # renew, account, end, void, forget
include "lifecycle/progress.pxi"         # what a lease's reports change
include "lifecycle/complete.pxi"         # a lease ends, or its request is cancelled
include "lifecycle/grant.pxi"            # a queued request becomes a lease
include "lifecycle/rest.pxi"             # how long a pool that waits is left out
include "lifecycle/dispatch.pxi"         # pools are served until nothing fits
include "lifecycle/expire.pxi"           # timers
include "lifecycle/escrow.pxi"           # chunks of buckets that a cluster's store keeps
include "lifecycle/limits.pxi"           # quotas, shares, pool limits, adapters' sizes
include "lifecycle/pool_positions.pxi"   # where flows stand in a pool, and which may run there
include "lifecycle/registry.pxi"         # numbers for names, flows of classes, and pools
include "lifecycle/forgetting.pxi"       # tenants that are forgotten for others
include "lifecycle/first_sight.pxi"      # flows of tenants that the configuration does not list
include "lifecycle/row_reader.pxi"       # what rows of the state file have in common
include "lifecycle/saved_positions.pxi"  # where flows stood in pools, in those rows
include "lifecycle/saved_tree.pxi"       # nodes of the tree of shares, in those rows
include "lifecycle/save.pxi"             # rows for the state file, of what has changed
include "lifecycle/restore_lengths.pxi"  # rows of the predictor from the state file
include "lifecycle/restore_sessions.pxi"  # rows of sessions of agents from the state file
include "lifecycle/restore.pxi"          # all other rows of the state file
include "lifecycle/configure.pxi"        # enter(), tenants, classes, pools, telemetry
include "lifecycle/live_settings.pxi"    # settings that change while everything runs
include "lifecycle/remote_service.pxi"   # what flows were served by other members
include "lifecycle/kept_places.pxi"      # places in the queue that outlive the leader
include "lifecycle/targets.pxi"          # the pools that an Admit names
include "lifecycle/admit.pxi"            # an Admit becomes a queued request or an answer
include "lifecycle/replay.pxi"           # leases that their holders report after a restart
include "lifecycle/late_usage.pxi"       # usage of leases whose replay came too late
include "lifecycle/drain.pxi"            # what an operator does: drain, revoke, list
