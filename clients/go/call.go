package schedsvc

import (
	"context"
	"crypto/rand"
	"errors"
	"math/big"
	"net"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

const (
	admitMethod    = "/schedsvc.v1.SchedulerService/Admit"
	progressMethod = "/schedsvc.v1.SchedulerService/Progress"
	// probesMax is the number of unanswered probes in a row after which a scheduler that holds a
	// call is silent.
	probesMax = 3
	unix      = "unix:"
)

// Invoke makes a unary call of the contract. With several targets it asks one after the other,
// until ctx is done. Its error is a *CallError. It implements grpc.ClientConnInterface.
func (s *Scheduler) Invoke(
	ctx context.Context, method string, args, reply interface{}, opts ...grpc.CallOption,
) error {
	awaySince := time.Now()
	for {
		target := s.targets.ask()
		began := time.Now()
		err := s.attempt(ctx, target, method, args, reply, opts)
		if err == nil {
			s.targets.answered()
			return nil
		}
		if !s.targets.several() || err.isOfCaller() || ctx.Err() != nil {
			return err
		}
		now := time.Now()
		silent := time.Duration(0)
		// A call that was watched is cancelled by this client alone.
		switch err.status.Code() {
		case codes.DeadlineExceeded, codes.Canceled:
			silent = s.options.SilentAfter
		}
		s.targets.moveOn(target, err.Leader, now, silent)
		// It was held by a scheduler that answered until then.
		if now.Sub(began) > s.options.FailoverWait {
			awaySince = now
		}
		if now.Sub(awaySince) > s.options.FailoverWait {
			return err
		}
		if !sleep(ctx, randomly(s.targets.pauseMax(now))) {
			return err
		}
	}
}

// NewStream refuses: a Session needs a protocol of its own, and follows no leader here.
func (s *Scheduler) NewStream(
	_ context.Context, _ *grpc.StreamDesc, method string, _ ...grpc.CallOption,
) (grpc.ClientStream, error) {
	err := status.Error(codes.Unimplemented, "this client makes unary calls only")
	return nil, newCallError(method, err)
}

// attempt makes a call at one target. An answer of a scheduler that leads no more is dropped.
func (s *Scheduler) attempt(
	parent context.Context, target, method string, args, reply interface{}, opts []grpc.CallOption,
) *CallError {
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	if s.targets.several() && s.options.SilentAfter > 0 {
		// An Admit may be held for long, so it is watched. Others are answered at once.
		if method == admitMethod {
			defer s.watch(target, &cancel)()
		} else {
			ctx, cancel = context.WithTimeout(ctx, s.options.SilentAfter)
			defer cancel()
		}
	}
	if s.options.Token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+s.options.Token)
	}
	if term := s.fence.latest(); term > 0 {
		ctx = metadata.AppendToOutgoingContext(ctx, "schedsvc-term", strconv.FormatUint(term, 10))
	}
	conn, err := s.conn(target)
	if err != nil {
		return newCallError(method, status.Error(codes.InvalidArgument, err.Error()))
	}
	var trailer metadata.MD
	opts = append(opts[:len(opts):len(opts)], grpc.Trailer(&trailer))
	if err := conn.Invoke(ctx, method, args, reply, opts...); err != nil {
		failed := newCallError(method, err)
		if named := trailer.Get("schedsvc-leader"); len(named) > 0 {
			failed.Leader = named[0]
		}
		if parent.Err() != nil {
			failed.cause = parent.Err()
		}
		return failed
	}
	led, ok := reply.(interface{ GetLeadership() *pb.Leadership })
	if ok && !s.fence.obeys(led.GetLeadership()) {
		failed := newCallError(method, status.Errorf(codes.Unavailable,
			"%s answers under term %d, but %d is known",
			target, led.GetLeadership().GetTerm(), s.fence.latest()))
		failed.stale = true
		return failed
	}
	return nil
}

// watch cancels a held call if its scheduler answers nothing any more, until unwatch is called.
func (s *Scheduler) watch(target string, cancel *context.CancelFunc) (unwatch func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	calls, ok := s.held[target]
	if !ok {
		calls = map[*context.CancelFunc]struct{}{}
		s.held[target] = calls
		go s.probe(target)
	}
	calls[cancel] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(calls, cancel)
	}
}

// probe asks a scheduler for a sign of life while it holds calls. Each probe has its own deadline,
// so a process that stood still loses one probe at most.
func (s *Scheduler) probe(target string) {
	step := s.options.SilentAfter / probesMax
	ticker := time.NewTicker(step)
	defer ticker.Stop()
	missed := 0
	for range ticker.C {
		s.mu.Lock()
		if len(s.held[target]) == 0 {
			delete(s.held, target)
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), step)
		err := s.attempt(ctx, target, progressMethod, &pb.ProgressRequest{}, &pb.ProgressResponse{}, nil)
		cancel()
		if err != nil && (err.stale || err.status.Code() == codes.DeadlineExceeded) {
			missed++
		} else {
			missed = 0
		}
		if missed < probesMax {
			continue
		}
		missed = 0
		s.mu.Lock()
		for cancel := range s.held[target] {
			(*cancel)()
		}
		s.mu.Unlock()
	}
}

// conn returns the connection to a target, which all calls share.
func (s *Scheduler) conn(target string) (*grpc.ClientConn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if conn, ok := s.conns[target]; ok {
		return conn, nil
	}
	options := []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
		Backoff: backoff.Config{
			BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second,
		},
		MinConnectTimeout: 5 * time.Second,
	})}
	if s.options.Credentials != nil {
		options = append(options, grpc.WithTransportCredentials(s.options.Credentials))
	} else {
		options = append(options, grpc.WithInsecure())
	}
	address := target
	if strings.HasPrefix(target, unix) {
		path := strings.TrimPrefix(strings.TrimPrefix(target, unix), "//")
		address = "passthrough:///localhost"
		options = append(options, grpc.WithContextDialer(
			func(ctx context.Context, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "unix", path)
			}))
	}
	// Dial and WithInsecure exist in each release of gRPC 1; their successors do not.
	conn, err := grpc.Dial(address, append(options, s.options.DialOptions...)...)
	if err != nil {
		return nil, err
	}
	s.conns[target] = conn
	return conn, nil
}

// sleep waits, and reports whether ctx was not done before.
func sleep(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// randomly returns a random part of a duration.
func randomly(most time.Duration) time.Duration {
	n, err := rand.Int(rand.Reader, big.NewInt(int64(most)+1))
	if err != nil {
		return most
	}
	return time.Duration(n.Int64())
}

// asCallError returns the *CallError in err, if there is one.
func asCallError(err error) (*CallError, bool) {
	var failed *CallError
	ok := errors.As(err, &failed)
	return failed, ok
}
