// Package schedsvc is a client of the schedsvc scheduler. An Admission is the right of one request
// to run on an engine. It is renewed in the background, and it has to be ended on every way out.
package schedsvc

import (
	"context"
	"crypto/rand"
	"encoding/hex"
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
	// default. A negative one stands for ever.
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

	mu      sync.Mutex
	conns   map[string]*grpc.ClientConn
	held    map[string]map[*context.CancelFunc]struct{} // Admits by the target that holds them.
	waiting map[*context.CancelFunc]struct{}
	open    map[*Admission]struct{}
	closed  bool
	work    sync.WaitGroup // Admits that wait, admissions that are open, grants to return.
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
		held:    map[string]map[*context.CancelFunc]struct{}{},
		waiting: map[*context.CancelFunc]struct{}{},
		open:    map[*Admission]struct{}{},
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
		err := status.Errorf(codes.InvalidArgument,
			"prefix_block_hashes: has %d hashes; at most %d are allowed", count, prefixHashesMax)
		return nil, newCallError(admitMethod, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	asked := proto.Clone(request).(*pb.AdmitRequest)
	if asked.RequestId == "" {
		id, err := newRequestID()
		if err != nil {
			return nil, err
		}
		asked.RequestId = id
	}
	waiting, withdraw := context.WithCancel(ctx)
	defer withdraw()
	if !s.enter(&withdraw) {
		return nil, ErrClosed
	}
	defer s.leave(&withdraw)
	admission, err := s.admit(waiting, ctx, asked)
	if isWithdrawn := waiting.Err() != nil; isWithdrawn {
		if admission != nil {
			admission.end(pb.Outcome_OUTCOME_CANCELLED, &Totals{})
		} else if _, isRefused := err.(*RefusedError); !isRefused {
			s.giveBack(asked)
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, ErrClosed
	}
	if status.Code(err) == codes.DeadlineExceeded {
		s.giveBack(asked)
	}
	return admission, err
}

func (s *Scheduler) admit(
	ctx, parent context.Context, request *pb.AdmitRequest,
) (*Admission, error) {
	response, err := pb.NewSchedulerServiceClient(s).Admit(ctx, request)
	if err != nil {
		return nil, err
	}
	if response.GetOutcome() != pb.Outcome_OUTCOME_GRANTED {
		return nil, newRefusedError(request.GetRequestId(), response)
	}
	return newAdmission(parent, s, request.GetRequestId(), response), nil
}

// giveBack returns a grant that was on its way when its request was withdrawn: a repeat gets the
// same one.
func (s *Scheduler) giveBack(request *pb.AdmitRequest) {
	s.work.Add(1)
	go func() {
		defer s.work.Done()
		ctx, cancel := context.WithTimeout(context.Background(), endDeadline)
		defer cancel()
		asked := &pb.ExplainRequest{RequestId: request.GetRequestId(), Tenant: request.GetTenant()}
		found, err := pb.NewExplainServiceClient(s).Explain(ctx, asked)
		if err != nil {
			return
		}
		for _, story := range found.GetRequests() {
			if story.GetState() != pb.RequestState_REQUEST_STATE_LIVE {
				continue
			}
			request.QueueTtlMs = 1
			if admission, err := s.admit(ctx, ctx, request); err == nil {
				admission.end(pb.Outcome_OUTCOME_CANCELLED, &Totals{})
			}
			return
		}
	}()
}

// Shutdown withdraws what waits, cancels what runs, and waits until the scheduler knows of every
// end, or until ctx is done. Then it hangs up. If the scheduler is away, leases last for their TTL
// and its grace.
func (s *Scheduler) Shutdown(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	for withdraw := range s.waiting {
		(*withdraw)()
	}
	var open []*Admission
	for admission := range s.open {
		open = append(open, admission)
	}
	s.mu.Unlock()
	for _, admission := range open {
		admission.end(pb.Outcome_OUTCOME_CANCELLED, nil)
	}
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
	for _, conn := range s.conns {
		conn.Close() // Its only error is that it is closed already.
	}
	return err
}

// enter counts an Admit that Shutdown has to withdraw; it reports whether there was none yet.
func (s *Scheduler) enter(withdraw *context.CancelFunc) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.waiting[withdraw] = struct{}{}
	s.work.Add(1)
	return true
}

func (s *Scheduler) leave(withdraw *context.CancelFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.waiting, withdraw)
	s.work.Done()
}

// opened counts an admission until ended; its caller was counted when it began.
func (s *Scheduler) opened(admission *Admission) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[admission] = struct{}{}
	s.work.Add(1)
}

func (s *Scheduler) ended(admission *Admission) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, admission)
	s.work.Done()
}

func newRequestID() (string, error) {
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return "", fmt.Errorf("schedsvc: no random numbers: %w", err)
	}
	return hex.EncodeToString(id), nil
}
