package schedsvc

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

// ErrClosed is returned by Admit once Shutdown was called.
var ErrClosed = errors.New("schedsvc: the Scheduler was shut down")

// RefusedError is the scheduler's verdict that a request does not run.
type RefusedError struct {
	RequestID string
	// Outcome is OUTCOME_UNSPECIFIED if a later version of the contract gave the reason.
	Outcome pb.Outcome
	Message string
	// RetryAfter is the earliest sensible retry; 0 says that a retry cannot help.
	RetryAfter time.Duration
	// QueuePosition counts the requests that were ahead of it in the tenant's queue.
	QueuePosition int64
	// Limits are those of the tenant.
	Limits        []*pb.Limit
	QueueDuration time.Duration
}

func newRefusedError(requestID string, response *pb.AdmitResponse) *RefusedError {
	refusal := response.GetRefusal()
	outcome := response.GetOutcome()
	if _, isKnown := pb.Outcome_name[int32(outcome)]; !isKnown {
		outcome = pb.Outcome_OUTCOME_UNSPECIFIED
	}
	return &RefusedError{
		RequestID:     requestID,
		Outcome:       outcome,
		Message:       refusal.GetMessage(),
		RetryAfter:    time.Duration(refusal.GetRetryAfterMs()) * time.Millisecond,
		QueuePosition: refusal.GetQueuePosition(),
		Limits:        refusal.GetQuota().GetLimits(),
		QueueDuration: time.Duration(response.GetQueueDurationUs()) * time.Microsecond,
	}
}

// Error returns the scheduler's sentence, or the name of the outcome.
func (e *RefusedError) Error() string {
	if e.Message != "" {
		return "schedsvc: refused: " + e.Message
	}
	return "schedsvc: refused: " + e.Outcome.String()
}

// FieldError says what is wrong with a field of a request.
type FieldError struct{ Field, Description string }

// CallError says that a call failed. It is a gRPC status, too: status.Code knows it.
type CallError struct {
	Method string
	// Fields are those of the request that were wrong.
	Fields []FieldError
	// RetryAfter is 0 if the scheduler did not state it.
	RetryAfter time.Duration
	// Leader is the target of the leader, if a scheduler that does not lead named it.
	Leader string

	status *status.Status
	cause  error
	stale  bool // The answer came under a term that is over.
}

func newCallError(method string, cause error) *CallError {
	e := &CallError{Method: method[strings.LastIndex(method, "/")+1:], cause: cause}
	e.status = status.Convert(cause)
	for _, detail := range e.status.Details() {
		switch detail := detail.(type) {
		case *errdetails.BadRequest:
			for _, field := range detail.GetFieldViolations() {
				e.Fields = append(e.Fields, FieldError{field.GetField(), field.GetDescription()})
			}
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay()
			e.RetryAfter = time.Duration(delay.GetSeconds())*time.Second + time.Duration(delay.GetNanos())
		}
	}
	return e
}

// Error names the method, and the fields that were wrong.
func (e *CallError) Error() string {
	text := e.status.Message()
	if len(e.Fields) > 0 {
		var named []string
		for _, field := range e.Fields {
			named = append(named, field.Field+": "+field.Description)
		}
		text = strings.Join(named, "; ")
	}
	return fmt.Sprintf("schedsvc: %s: %s: %s", e.Method, e.status.Code(), text)
}

// GRPCStatus returns the status of the call.
func (e *CallError) GRPCStatus() *status.Status { return e.status }

// Unwrap returns gRPC's error, or the caller's context.Canceled or context.DeadlineExceeded.
func (e *CallError) Unwrap() error { return e.cause }

// isPassing reports whether the same call may succeed later.
func (e *CallError) isPassing() bool {
	code := e.status.Code()
	return code == codes.Unavailable || code == codes.DeadlineExceeded
}

// isOfCaller reports whether every scheduler would answer so.
func (e *CallError) isOfCaller() bool {
	switch e.status.Code() {
	case codes.InvalidArgument, codes.OutOfRange, codes.AlreadyExists, codes.NotFound,
		codes.Unauthenticated, codes.PermissionDenied, codes.ResourceExhausted:
		return true
	}
	return false
}
