package schedsvc

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

const (
	// These bound one attempt to end a lease.
	endDeadline   = 5 * time.Second
	endBackoffMin = 50 * time.Millisecond
	endBackoffMax = 2 * time.Second
	// leaseGrace is the time for which the scheduler keeps an expired lease: past it a Complete is
	// no longer repeated.
	leaseGrace = 20 * time.Second
	// closeWait is how long Close waits for an end that has to be repeated.
	closeWait       = time.Second
	renewBackoffMin = 100 * time.Millisecond
	// tokensMax is the most of any total.
	tokensMax = 1 << 27
)

// Totals are running totals of a request, never differences. A total of 0 is not known.
type Totals struct {
	InputTokens, CachedInputTokens, OutputTokens int64
}

// Admission is a granted request. It is renewed in the background until it ends.
type Admission struct {
	// RequestID is the id by which Explain knows the request.
	RequestID string
	// Grant has the lease, its pool, and what is reserved.
	Grant         *pb.Grant
	QueueDuration time.Duration

	scheduler *Scheduler
	ctx       context.Context
	cancel    context.CancelFunc
	ending    context.Context // It is done when the lease needs no more renewals.
	stopRenew context.CancelFunc
	done      chan struct{} // It is closed when books and err are there.
	books     *pb.CompleteResponse
	err       error

	mu     sync.Mutex
	report pb.LeaseProgress // The lease, and what is known of its totals.
	lost   error
}

func newAdmission(
	ctx context.Context, s *Scheduler, requestID string, response *pb.AdmitResponse,
) *Admission {
	a := &Admission{
		RequestID:     requestID,
		Grant:         response.GetGrant(),
		QueueDuration: time.Duration(response.GetQueueDurationUs()) * time.Microsecond,
		scheduler:     s,
		done:          make(chan struct{}),
	}
	a.report.LeaseId, a.report.PoolEpoch = a.Grant.GetLeaseId(), a.Grant.GetPoolEpoch()
	a.ctx, a.cancel = context.WithCancel(ctx)
	a.ending, a.stopRenew = context.WithCancel(context.Background())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.note(a, func() { a.end(pb.Outcome_OUTCOME_CANCELLED, false) })
	go a.renew()
	return a
}

// Context returns the context of the request's work. It comes from that of Admit, and is done when
// the lease is lost, and when it has ended: stop the engine's work then. Lost says why.
func (a *Admission) Context() context.Context { return a.ctx }

// Lost returns an error if the scheduler no longer knows the lease as live.
func (a *Admission) Lost() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lost
}

// Report notes running totals. They are sent with the next renewal and with the end, so it costs
// nothing to call it for every token.
func (a *Admission) Report(totals Totals) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for known, total := range map[**int64]int64{
		&a.report.InputTokens:       totals.InputTokens,
		&a.report.CachedInputTokens: totals.CachedInputTokens,
		&a.report.OutputTokens:      totals.OutputTokens,
	} {
		if total != 0 {
			*known = proto.Int64(within(total))
		}
	}
}

// within brings a total within the limits of the contract: a scheduler refuses the whole report
// otherwise, and the lease of a Complete would live until its TTL.
func within(total int64) int64 {
	if total < 0 {
		return 0
	}
	if total > tokensMax {
		return tokensMax
	}
	return total
}

// Complete ends the lease as done, and returns what was charged. The first end counts: after
// another one it returns the charge of that one.
//
// It waits for the scheduler until ctx is done. If the scheduler is away, the client repeats the
// end until the lease has surely expired, also after that.
func (a *Admission) Complete(ctx context.Context, totals Totals) (*pb.CompleteResponse, error) {
	a.Report(totals)
	a.end(pb.Outcome_OUTCOME_COMPLETED, false)
	return a.wait(ctx)
}

// Cancel ends the lease before it was done, as Complete does. Without totals the request is charged
// for its time.
func (a *Admission) Cancel(ctx context.Context, totals Totals) (*pb.CompleteResponse, error) {
	a.Report(totals)
	a.end(pb.Outcome_OUTCOME_CANCELLED, false)
	return a.wait(ctx)
}

// Return cancels a lease whose request the engine never had. It costs nothing.
func (a *Admission) Return(ctx context.Context) (*pb.CompleteResponse, error) {
	a.end(pb.Outcome_OUTCOME_CANCELLED, true)
	return a.wait(ctx)
}

// Close cancels the lease if it has not ended: defer it. If the scheduler is away, it waits for a
// second at most, and the rest goes on behind it.
func (a *Admission) Close() error {
	ctx, stop := context.WithTimeout(context.Background(), closeWait)
	defer stop()
	_, err := a.Cancel(ctx, Totals{})
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// end begins to end the lease, if that has not begun. The totals of a lease that was not used are
// 0.
func (a *Admission) end(outcome pb.Outcome, isUnused bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ending.Err() != nil {
		return
	}
	a.stopRenew()
	a.cancel()
	if isUnused {
		zero := proto.Int64(0)
		a.report.InputTokens, a.report.CachedInputTokens, a.report.OutputTokens = zero, zero, zero
	}
	go a.deliver(&pb.CompleteRequest{
		LeaseId:           a.report.LeaseId,
		PoolEpoch:         a.report.PoolEpoch,
		Outcome:           outcome,
		InputTokens:       a.report.InputTokens,
		CachedInputTokens: a.report.CachedInputTokens,
		OutputTokens:      a.report.OutputTokens,
	})
}

// wait returns the books as soon as they are there.
func (a *Admission) wait(ctx context.Context) (*pb.CompleteResponse, error) {
	select {
	case <-a.done:
		return a.books, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// deliver repeats the end until the scheduler has it, or the lease has surely expired.
func (a *Admission) deliver(request *pb.CompleteRequest) {
	defer a.scheduler.finish(a)
	defer close(a.done)
	expired := time.Now().Add(a.ttl() + leaseGrace)
	for ceiling := endBackoffMin; ; ceiling *= 2 {
		ctx, stop := context.WithTimeout(context.Background(), endDeadline)
		a.books, a.err = pb.NewSchedulerServiceClient(a.scheduler).Complete(ctx, request)
		stop()
		if a.err == nil || !isPassing(a.err) || time.Now().After(expired) {
			return
		}
		if ceiling > endBackoffMax {
			ceiling = endBackoffMax
		}
		time.Sleep(ceiling/2 + randomly(ceiling/2))
	}
}

// renew reports the totals every third of the TTL, so that two renewals may be lost before the
// lease is.
func (a *Admission) renew() {
	usual := a.ttl() / 3
	backoff := renewBackoffMin
	for pause := usual; sleep(a.ending, pause); {
		a.mu.Lock()
		lease := proto.Clone(&a.report).(*pb.LeaseProgress)
		a.mu.Unlock()
		request := &pb.ProgressRequest{Leases: []*pb.LeaseProgress{lease}}
		response, err := pb.NewSchedulerServiceClient(a.scheduler).Progress(a.ending, request)
		if err != nil && backoff < usual {
			pause, backoff = backoff, 2*backoff
			continue
		}
		pause, backoff = usual, renewBackoffMin
		for _, found := range response.GetLeases() {
			switch state := found.GetState(); state {
			case pb.LeaseState_LEASE_STATE_UNKNOWN, pb.LeaseState_LEASE_STATE_VOID,
				pb.LeaseState_LEASE_STATE_ENDED: // One of a later version is no reason to stop.
				a.mu.Lock()
				defer a.mu.Unlock()
				if a.ending.Err() == nil {
					a.lost = fmt.Errorf("schedsvc: lease %d is %v", a.Grant.GetLeaseId(), state)
					a.cancel()
				}
				return
			}
		}
	}
}

func (a *Admission) ttl() time.Duration {
	return time.Duration(a.Grant.GetTtlMs()) * time.Millisecond
}
