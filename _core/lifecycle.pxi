# Events: what each call and each timer changes.

include "lifecycle/verdicts.pxi"         # what a caller is told, and where it finds it
include "lifecycle/evict.pxi"            # a queued request leaves without a grant
include "lifecycle/lease.pxi"            # renew, account, end, void, forget
include "lifecycle/progress.pxi"         # what a lease's reports change
include "lifecycle/complete.pxi"         # a lease ends, or its request is cancelled
include "lifecycle/grant.pxi"            # a queued request becomes a lease
include "lifecycle/dispatch.pxi"         # pools are served until nothing fits
include "lifecycle/expire.pxi"           # timers
include "lifecycle/limits.pxi"           # quotas, shares, pool limits, adapters' sizes
include "lifecycle/registry.pxi"         # names, flows of classes and pools find their places
include "lifecycle/restore_lengths.pxi"  # predictions of before a restart
include "lifecycle/restore.pxi"          # everything else of before a restart
include "lifecycle/configure.pxi"        # enter(), tenants, classes, pools, telemetry
include "lifecycle/live_settings.pxi"    # settings that change while everything runs
include "lifecycle/admit.pxi"            # an Admit becomes a queued request or an answer
include "lifecycle/replay.pxi"           # leases that a holder tells anew after a restart
include "lifecycle/drain.pxi"            # what an operator does: drain, revoke, list
