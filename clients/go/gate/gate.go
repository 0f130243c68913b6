// Package gate lets each request of a net/http server wait for its turn before its handler runs.
package gate

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	schedsvc "github.com/schedsvc/schedsvc/clients/go"
	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

// bodyMax is the largest body of a request, in bytes.
const bodyMax = 32 << 20

// SizeOf gives the size of a request, and its tenant. It gets the whole body, because net/http sees
// that a client leaves only once the body was read; the handler can read it again. With nil the
// request passes without a turn. An error is answered with status 400.
//
// Name the tenant by what your server has verified, never by a header that the client chose.
type SizeOf func(r *http.Request, body []byte) (*pb.AdmitRequest, error)

type gate struct {
	scheduler *schedsvc.Scheduler
	sizeOf    SizeOf
	next      http.Handler
}

// Handler gates a handler. The lease ends with the answer: as completed, or as cancelled if the
// status is 400 or above, the handler panics, or the client left. The request's context is done
// when the client leaves and when the lease is lost: stop the engine's work then.
func Handler(scheduler *schedsvc.Scheduler, sizeOf SizeOf, next http.Handler) http.Handler {
	return &gate{scheduler, sizeOf, next}
}

type turn struct{}

// Turn returns the admission of a gated request: report its tokens to it. It is nil for a request
// that passed without a turn.
func Turn(r *http.Request) *schedsvc.Admission {
	admission, _ := r.Context().Value(turn{}).(*schedsvc.Admission)
	return admission
}

// ServeHTTP implements http.Handler.
func (g *gate) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, bodyMax))
	if err != nil {
		answer(w, face{http.StatusRequestEntityTooLarge, badRequest, "request_too_large"}, err.Error(), 0)
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	request, err := g.sizeOf(r, body)
	r.Body = io.NopCloser(bytes.NewReader(body)) // For the handler, if sizeOf has read it, too.
	if err != nil {
		answer(w, invalidSize, err.Error(), 0)
		return
	}
	if request == nil {
		g.next.ServeHTTP(w, r)
		return
	}
	admission, err := g.scheduler.Admit(r.Context(), request)
	switch {
	case err == nil:
		g.serve(w, r, request, admission)
	case r.Context().Err() == nil: // Else the client left.
		refuse(w, request, err)
	}
}

// serve runs the handler, and ends the lease with it. The answer does not wait for the scheduler.
func (g *gate) serve(
	w http.ResponseWriter, r *http.Request, request *pb.AdmitRequest, admission *schedsvc.Admission,
) {
	written := &recorder{ResponseWriter: w, status: http.StatusOK}
	end := admission.Cancel
	defer func() {
		ctx, stop := context.WithCancel(context.Background())
		stop()
		end(ctx, schedsvc.Totals{}) // If the end fails, the lease expires.
	}()
	w.Header().Set("x-schedsvc-request-id", admission.RequestID)
	describe(w.Header(), request, admission.QueueDuration, admission.Grant.GetQuota().GetLimits())
	g.next.ServeHTTP(written, r.WithContext(context.WithValue(admission.Context(), turn{}, admission)))
	if written.status < http.StatusBadRequest && !written.broke && r.Context().Err() == nil {
		end = admission.Complete
	}
}

// recorder notes how an answer went.
type recorder struct {
	http.ResponseWriter
	status  int
	started bool
	broke   bool
}

// WriteHeader implements http.ResponseWriter.
func (r *recorder) WriteHeader(status int) {
	if !r.started && status >= http.StatusOK {
		r.status, r.started = status, true
	}
	r.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (r *recorder) Write(data []byte) (int, error) {
	r.started = true
	n, err := r.ResponseWriter.Write(data)
	r.broke = r.broke || err != nil
	return n, err
}

// Flush implements http.Flusher.
func (r *recorder) Flush() {
	if flusher, ok := r.ResponseWriter.(http.Flusher); ok {
		flusher.Flush()
	}
}

// Unwrap lets http.ResponseController reach the rest.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// refuse answers a request that gets no turn.
func refuse(w http.ResponseWriter, request *pb.AdmitRequest, err error) {
	var refused *schedsvc.RefusedError
	if errors.As(err, &refused) {
		f, ok := faces[refused.Outcome]
		if !ok {
			f = overloaded
		}
		w.Header().Set("x-schedsvc-request-id", refused.RequestID)
		w.Header().Set("x-schedsvc-dropped-reason", reason(refused.Outcome))
		describe(w.Header(), request, refused.QueueDuration, refused.Refusal.GetQuota().GetLimits())
		answer(w, f, refused.Refusal.GetMessage(), refused.RetryAfter)
		return
	}
	var failed *schedsvc.CallError
	errors.As(err, &failed)
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.ResourceExhausted:
		retry := awayRetry
		if failed.RetryAfter > 0 {
			retry = failed.RetryAfter
		}
		w.Header().Set("x-schedsvc-dropped-reason", "scheduler_unreachable")
		answer(w, overloaded, "the scheduler is away", retry)
	case codes.InvalidArgument:
		answer(w, invalidSize, failed.Error(), 0)
	default: // A mistake of the server is not its client's.
		answer(w, face{http.StatusInternalServerError, "internal_error", "gate_misconfigured"},
			"the request could not be scheduled", 0)
	}
}

// describe sets what the scheduler said of a request: its wait, and the quotas of its tenant. A
// caller without a name shares the limits of unknown tenants, which are not its own to see.
func describe(header http.Header, r *pb.AdmitRequest, waited time.Duration, limits []*pb.Limit) {
	ms := float64(waited) / float64(time.Millisecond)
	header.Set("x-schedsvc-queue-duration-ms", strconv.FormatFloat(ms, 'f', 3, 64))
	if r.GetTenant() == "" && len(r.GetApiKeySha256()) == 0 {
		return
	}
	for _, limit := range limits {
		if name, ok := quotas[limit.GetKind()]; ok {
			header.Set("x-ratelimit-limit-"+name, strconv.FormatInt(limit.GetLimit(), 10))
			header.Set("x-ratelimit-remaining-"+name, strconv.FormatInt(limit.GetRemaining(), 10))
			reset := time.Duration(limit.GetResetMs()) * time.Millisecond
			header.Set("x-ratelimit-reset-"+name, reset.String())
		}
	}
}
