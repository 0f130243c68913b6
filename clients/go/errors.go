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
	// Refusal has a sentence for a person, and the limits of the tenant.
	Refusal *pb.Refusal
	// RetryAfter is the earliest sensible retry; 0 says that a retry cannot help.
	RetryAfter    time.Duration
	QueueDuration time.Duration
}

func newRefusedError(requestID string, response *pb.AdmitResponse) *RefusedError {
	outcome := response.GetOutcome()
	if _, isKnown := pb.Outcome_name[int32(outcome)]; !isKnown {
		outcome = pb.Outcome_OUTCOME_UNSPECIFIED
	}
	return &RefusedError{
		RequestID:     requestID,
		Outcome:       outcome,
		Refusal:       response.GetRefusal(),
		RetryAfter:    time.Duration(response.GetRefusal().GetRetryAfterMs()) * time.Millisecond,
		QueueDuration: time.Duration(response.GetQueueDurationUs()) * time.Microsecond,
	}
}

// Error returns the outcome, and the scheduler's sentence.
func (e *RefusedError) Error() string {
	return fmt.Sprintf("schedsvc: refused: %v: %s", e.Outcome, e.Refusal.GetMessage())
}

// CallError says that a call failed. It is a gRPC status, too: status.Code knows it.
type CallError struct {
	Method string
	// Fields are those of the request that were wrong.
	Fields []*errdetails.BadRequest_FieldViolation
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
			e.Fields = detail.GetFieldViolations()
		case *errdetails.RetryInfo:
			e.RetryAfter = detail.GetRetryDelay().AsDuration()
		}
	}
	return e
}

// Error names the method, and the fields that were wrong.
func (e *CallError) Error() string {
	text := e.status.Message()
	if len(e.Fields) > 0 {
		text = ""
	}
	for _, field := range e.Fields {
		text += fmt.Sprintf("%s: %s; ", field.GetField(), field.GetDescription())
	}
	text = strings.TrimSuffix(text, "; ")
	return fmt.Sprintf("schedsvc: %s: %v: %s", e.Method, e.status.Code(), text)
}

// GRPCStatus returns the status of the call.
func (e *CallError) GRPCStatus() *status.Status { return e.status }

// Unwrap returns gRPC's error, or the caller's context.Canceled or context.DeadlineExceeded.
func (e *CallError) Unwrap() error { return e.cause }

// isPassing reports whether the same call may succeed later.
func isPassing(err error) bool {
	code := status.Code(err)
	return code == codes.Unavailable || code == codes.DeadlineExceeded
}

// isOfCaller reports whether every scheduler would answer so.
func isOfCaller(err error) bool {
	switch status.Code(err) {
	case codes.InvalidArgument, codes.OutOfRange, codes.AlreadyExists, codes.NotFound,
		codes.Unauthenticated, codes.PermissionDenied, codes.ResourceExhausted:
		return true
	}
	return false
}
