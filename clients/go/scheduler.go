// Package schedsvc is a client of the schedsvc scheduler. An Admission is the right of one request
// to run on an engine. It is renewed in the background, and it has to be ended on every way out.
package schedsvc

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

// prefixHashesMax is the number of prefix hashes of one request; the scheduler refuses more.
const prefixHashesMax = 4096

// Options configure a Scheduler. The zero value suits one scheduler without TLS.
type Options struct {
	// Token is the bearer token of this caller.
	Token string
	// Credentials make the connection TLS, as credentials.NewTLS does.
	Credentials credentials.TransportCredentials
	// DialOptions are passed to gRPC, interceptors among them.
	DialOptions []grpc.DialOption
	// FailoverWait is how long a call looks for a target that leads, if there are several: 5 s by
	// default.
	FailoverWait time.Duration
	// SilentAfter is the silence after which a client leaves one of several targets: 1.5 s by
	// default.
	SilentAfter time.Duration
}

// Scheduler is a client of one scheduler, or of several of which one leads. It is safe for
// concurrent use.
//
// It is a grpc.ClientConnInterface, so that the generated clients make every unary call of the
// contract through it, with its credentials and its failover:
//
//	schedsvcv1.NewSchedulerServiceClient(scheduler).Stats(ctx, &schedsvcv1.StatsRequest{})
type Scheduler struct {
	options Options
	targets *targets
	fence   *fence

	mu    sync.Mutex
	conns map[string]*grpc.ClientConn
	held  map[string]int // The number of Admits that each target holds.
	// How to end what is under way: Admits that wait, and admissions.
	ends   map[interface{}]func()
	closed bool
	work   sync.WaitGroup
}

// New makes a client. It connects at the first call. The target is "host:port" or
// "unix:/path/of/socket". Several targets, separated by commas, are the leader and its standbys.
func New(target string, options Options) (*Scheduler, error) {
	list, err := newTargets(target)
	if err != nil {
		return nil, err
	}
	if options.FailoverWait == 0 {
		options.FailoverWait = 5 * time.Second
	}
	if options.SilentAfter == 0 {
		options.SilentAfter = 1500 * time.Millisecond
	}
	return &Scheduler{
		options: options,
		targets: list,
		fence:   fenceOf(list.all),
		conns:   map[string]*grpc.ClientConn{},
		held:    map[string]int{},
		ends:    map[interface{}]func(){},
	}, nil
}

// Admit asks for one request, and waits for the verdict. Close the admission in the end. An empty
// request id is made up.
//
// Cancel ctx to withdraw the request; a grant that is on its way then is returned. The error is a
// *RefusedError if the scheduler refuses the request, a *CallError if the call failed, or that of
// ctx.
func (s *Scheduler) Admit(ctx context.Context, request *pb.AdmitRequest) (*Admission, error) {
	if count := len(request.GetPrefixBlockHashes()); count > prefixHashesMax {
		return nil, newCallError(admitMethod, status.Errorf(codes.InvalidArgument,
			"prefix_block_hashes: has %d hashes; at most %d are allowed", count, prefixHashesMax))
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	asked := proto.Clone(request).(*pb.AdmitRequest)
	if asked.RequestId == "" {
		id := make([]byte, 16)
		if _, err := rand.Read(id); err != nil {
			return nil, err
		}
		asked.RequestId = fmt.Sprintf("%x", id)
	}
	waiting, withdraw := context.WithCancel(ctx)
	defer withdraw()
	if !s.begin(asked, withdraw) {
		return nil, ErrClosed
	}
	defer s.finish(asked)
	admission, err := s.admit(ctx, waiting, asked)
	if waiting.Err() == nil && status.Code(err) != codes.DeadlineExceeded {
		return admission, err
	}
	if admission != nil {
		admission.end(pb.Outcome_OUTCOME_CANCELLED, true)
	} else if refused := (*RefusedError)(nil); !errors.As(err, &refused) {
		s.work.Add(1)
		go s.giveBack(asked)
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case waiting.Err() != nil:
		return nil, ErrClosed
	}
	return nil, err
}

// admit asks while waiting is not done. The admission's context comes from ctx.
func (s *Scheduler) admit(
	ctx, waiting context.Context, request *pb.AdmitRequest,
) (*Admission, error) {
	response, err := pb.NewSchedulerServiceClient(s).Admit(waiting, request)
	if err != nil {
		return nil, err
	}
	if response.GetOutcome() != pb.Outcome_OUTCOME_GRANTED {
		return nil, newRefusedError(request.GetRequestId(), response)
	}
	return newAdmission(ctx, s, request.GetRequestId(), response), nil
}

// giveBack returns a grant that was on its way when its request was withdrawn: a repeat gets the
// same one.
func (s *Scheduler) giveBack(request *pb.AdmitRequest) {
	defer s.work.Done()
	ctx, cancel := context.WithTimeout(context.Background(), endDeadline)
	defer cancel()
	asked := &pb.ExplainRequest{RequestId: request.GetRequestId(), Tenant: request.GetTenant()}
	// The lease of a grant that cannot be returned expires.
	found, _ := pb.NewExplainServiceClient(s).Explain(ctx, asked)
	for _, story := range found.GetRequests() {
		if story.GetState() != pb.RequestState_REQUEST_STATE_LIVE {
			continue
		}
		again := proto.Clone(request).(*pb.AdmitRequest)
		again.QueueTtlMs = 1
		if admission, err := s.admit(ctx, ctx, again); err == nil {
			admission.end(pb.Outcome_OUTCOME_CANCELLED, true)
		}
		return
	}
}

// Shutdown withdraws what waits, cancels what runs, and waits until the scheduler knows of every
// end, or until ctx is done. Then it hangs up. If the scheduler is away, leases last for their TTL
// and its grace.
func (s *Scheduler) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	for _, end := range s.ends {
		end()
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		s.work.Wait()
		close(done)
	}()
	var err error
	select {
	case <-done:
	case <-ctx.Done():
		err = fmt.Errorf("schedsvc: leases may be open until they expire: %w", ctx.Err())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for target := range s.conns {
		s.hangUp(target)
	}
	return err
}

// begin notes how Shutdown withdraws an Admit; it reports whether there was no Shutdown yet.
func (s *Scheduler) begin(request *pb.AdmitRequest, withdraw func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.note(request, withdraw)
	}
	return !s.closed
}

// note counts what Shutdown ends and waits for, until it has finished. Its caller holds the lock.
func (s *Scheduler) note(key interface{}, end func()) {
	s.ends[key] = end
	s.work.Add(1)
}

func (s *Scheduler) finish(key interface{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.ends, key)
	s.work.Done()
}
