# The contract as bytes: what may be said, and how it is read and written.

include "wire/outcomes.pxi"      # outcomes of requests, states of leases, Decision, Ended, Verdict
include "wire/wait_reasons.pxi"  # what a pool and what a request can wait for
include "wire/reader.pxi"        # Cursor, Slice, read_*(): protocol buffers without a copy
include "wire/messages.pxi"      # AdmitMessage, Usage, LeaseMessage and how each is checked
include "wire/writer.pxi"        # Writer: protocol buffers, from the last field to the first
