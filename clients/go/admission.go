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
	stop      context.CancelFunc
	running   context.Context // It is done when the lease is to be ended.
	stopRenew context.CancelFunc
	done      chan struct{} // It is closed when books and err are there.
	books     *pb.CompleteResponse
	err       error

	mu     sync.Mutex
	totals Totals
	lost   error
	isOver bool
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
	a.ctx, a.stop = context.WithCancel(ctx)
	a.running, a.stopRenew = context.WithCancel(context.Background())
	s.opened(a)
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
	a.note(totals)
}

func (a *Admission) note(totals Totals) {
	for _, pair := range [][2]*int64{
		{&a.totals.InputTokens, &totals.InputTokens},
		{&a.totals.CachedInputTokens, &totals.CachedInputTokens},
		{&a.totals.OutputTokens, &totals.OutputTokens},
	} {
		if *pair[1] != 0 {
			*pair[0] = *pair[1]
		}
	}
}

// Complete ends the lease as done, and returns what was charged. The first end counts: after
// another one it returns the charge of that one.
//
// It waits for the scheduler until ctx is done. If the scheduler is away, the client repeats the
// end until the lease has surely expired, also after that.
func (a *Admission) Complete(ctx context.Context, totals Totals) (*pb.CompleteResponse, error) {
	a.Report(totals)
	a.end(pb.Outcome_OUTCOME_COMPLETED, nil)
	return a.wait(ctx)
}

// Cancel ends the lease before it was done, as Complete does. Without totals the request is charged
// for its time.
func (a *Admission) Cancel(ctx context.Context, totals Totals) (*pb.CompleteResponse, error) {
	a.Report(totals)
	a.end(pb.Outcome_OUTCOME_CANCELLED, nil)
	return a.wait(ctx)
}

// Return cancels a lease whose request the engine never had. It costs nothing.
func (a *Admission) Return(ctx context.Context) (*pb.CompleteResponse, error) {
	a.end(pb.Outcome_OUTCOME_CANCELLED, &Totals{})
	return a.wait(ctx)
}

// Close cancels the lease if it has not ended: defer it. If the scheduler is away, it waits for a
// second at most, and the rest goes on behind it.
func (a *Admission) Close() error {
	a.end(pb.Outcome_OUTCOME_CANCELLED, nil)
	ctx, cancel := context.WithTimeout(context.Background(), closeWait)
	defer cancel()
	if _, err := a.wait(ctx); ctx.Err() == nil {
		return err
	}
	return nil
}

// end begins to end the lease, if that has not begun. Final totals are sent as they are, zeros
// too.
func (a *Admission) end(outcome pb.Outcome, final *Totals) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.isOver {
		return
	}
	a.isOver = true
	a.stopRenew()
	a.stop()
	request := &pb.CompleteRequest{
		LeaseId:           a.Grant.GetLeaseId(),
		PoolEpoch:         a.Grant.GetPoolEpoch(),
		Outcome:           outcome,
		InputTokens:       known(a.totals.InputTokens),
		CachedInputTokens: known(a.totals.CachedInputTokens),
		OutputTokens:      known(a.totals.OutputTokens),
	}
	if final != nil {
		request.InputTokens = proto.Int64(final.InputTokens)
		request.CachedInputTokens = proto.Int64(final.CachedInputTokens)
		request.OutputTokens = proto.Int64(final.OutputTokens)
	}
	go a.deliver(request)
}

// wait returns the books as soon as they are there.
func (a *Admission) wait(ctx context.Context) (*pb.CompleteResponse, error) {
	select {
	case <-a.done:
		return a.books, a.err
	default:
	}
	select {
	case <-a.done:
		return a.books, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// deliver repeats the end until the scheduler has it, or the lease has surely expired.
func (a *Admission) deliver(request *pb.CompleteRequest) {
	defer a.scheduler.ended(a)
	defer close(a.done)
	expired := time.Now().Add(a.ttl() + leaseGrace)
	for ceiling := endBackoffMin; ; ceiling *= 2 {
		ctx, cancel := context.WithTimeout(context.Background(), endDeadline)
		a.books, a.err = pb.NewSchedulerServiceClient(a.scheduler).Complete(ctx, request)
		cancel()
		failed, ok := asCallError(a.err)
		if !ok || !failed.isPassing() || time.Now().After(expired) {
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
	backoff := renewBackoffMin
	for pause := a.ttl() / 3; sleep(a.running, pause); {
		a.mu.Lock()
		report := &pb.LeaseProgress{
			LeaseId:           a.Grant.GetLeaseId(),
			PoolEpoch:         a.Grant.GetPoolEpoch(),
			InputTokens:       known(a.totals.InputTokens),
			CachedInputTokens: known(a.totals.CachedInputTokens),
			OutputTokens:      known(a.totals.OutputTokens),
		}
		a.mu.Unlock()
		request := &pb.ProgressRequest{Leases: []*pb.LeaseProgress{report}}
		ctx, cancel := context.WithTimeout(a.running, a.ttl()/3)
		response, err := pb.NewSchedulerServiceClient(a.scheduler).Progress(ctx, request)
		cancel()
		if pause = a.ttl() / 3; err != nil {
			if backoff < pause {
				pause = backoff
			}
			backoff *= 2
			continue
		}
		backoff = renewBackoffMin
		for _, lease := range response.GetLeases() {
			switch state := lease.GetState(); state {
			case pb.LeaseState_LEASE_STATE_UNKNOWN, pb.LeaseState_LEASE_STATE_VOID,
				pb.LeaseState_LEASE_STATE_ENDED: // One of a later version is no reason to stop.
				a.lose(state)
				return
			}
		}
	}
}

func (a *Admission) lose(state pb.LeaseState) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.isOver {
		a.lost = fmt.Errorf("schedsvc: lease %d is %v", a.Grant.GetLeaseId(), state)
		a.stop()
	}
}

func (a *Admission) ttl() time.Duration {
	return time.Duration(a.Grant.GetTtlMs()) * time.Millisecond
}

// known returns a total for the wire, where an absent one means that it is not known.
func known(total int64) *int64 {
	if total == 0 {
		return nil
	}
	return &total
}
