package gate

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"
	"time"

	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

// face is how an error looks in HTTP, in OpenAI's form.
type face struct {
	status     int
	kind, code string
}

const (
	awayRetry   = time.Second
	badRequest  = "invalid_request_error"
	rateLimit   = "rate_limit_error"
	unavailable = "service_unavailable_error"
)

var (
	slowDown    = face{http.StatusTooManyRequests, rateLimit, "slow_down"}
	limited     = face{http.StatusTooManyRequests, rateLimit, "rate_limit_exceeded"}
	never       = face{http.StatusTooManyRequests, rateLimit, "request_too_large"}
	tooLong     = face{http.StatusBadRequest, badRequest, "context_length_exceeded"}
	invalidSize = face{http.StatusBadRequest, badRequest, "invalid_size"}
	unknown     = face{http.StatusForbidden, "permission_error", "unknown_tenant"}
	overloaded  = face{http.StatusServiceUnavailable, unavailable, "server_is_overloaded"}
)

// faces are those of the gate of schedsvc-vllm; an outcome that is missing here is overloaded.
var faces = map[pb.Outcome]face{
	pb.Outcome_OUTCOME_REJECTED_FLOW_QUEUE_FULL: slowDown,
	pb.Outcome_OUTCOME_REJECTED_TOO_LARGE:       tooLong,
	pb.Outcome_OUTCOME_EVICTED_TOO_LARGE:        tooLong,
	pb.Outcome_OUTCOME_REJECTED_UNKNOWN_TENANT:  unknown,
	pb.Outcome_OUTCOME_REJECTED_QUOTA:           limited,
	pb.Outcome_OUTCOME_REJECTED_QUOTA_SIZE:      never,
	pb.Outcome_OUTCOME_REJECTED_DEADLINE:        limited,
	pb.Outcome_OUTCOME_EVICTED_TTL:              limited,
	pb.Outcome_OUTCOME_EVICTED_DEADLINE:         limited,
}

// quotas name the limits that x-ratelimit headers report. Places in a queue and tokens of the pool
// would show how busy the server is with other tenants.
var quotas = map[pb.LimitKind]string{
	pb.LimitKind_LIMIT_KIND_REQUESTS_PER_MINUTE:      "requests",
	pb.LimitKind_LIMIT_KIND_TOKENS_PER_MINUTE:        "tokens",
	pb.LimitKind_LIMIT_KIND_INPUT_TOKENS_PER_MINUTE:  "input-tokens",
	pb.LimitKind_LIMIT_KIND_OUTPUT_TOKENS_PER_MINUTE: "output-tokens",
	pb.LimitKind_LIMIT_KIND_CONCURRENT_REQUESTS:      "concurrent-requests",
	pb.LimitKind_LIMIT_KIND_TOKENS_PER_DAY:           "tokens-day",
	pb.LimitKind_LIMIT_KIND_TOKENS_PER_MONTH:         "tokens-month",
}

func reason(outcome pb.Outcome) string {
	return strings.ToLower(strings.TrimPrefix(outcome.String(), "OUTCOME_"))
}

// answer writes an error. Without a time for a retry, a retry cannot help.
func answer(w http.ResponseWriter, f face, message string, retryAfter time.Duration) {
	header := w.Header()
	header.Set("content-type", "application/json")
	if retryAfter > 0 {
		ms := int64((retryAfter + time.Millisecond - 1) / time.Millisecond)
		header.Set("retry-after", strconv.FormatInt((ms+999)/1000, 10))
		header.Set("retry-after-ms", strconv.FormatInt(ms, 10))
	} else {
		header.Set("x-should-retry", "false")
	}
	w.WriteHeader(f.status)
	fields := map[string]interface{}{"message": message, "type": f.kind, "code": f.code, "param": nil}
	// A client that left reads no answer.
	_ = json.NewEncoder(w).Encode(map[string]interface{}{"error": fields})
}
