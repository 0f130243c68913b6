package schedsvc

import (
	"context"
	"hash/maphash"
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
)

// Invoke makes a unary call of the contract. With several targets it asks one after the other,
// until ctx is done. Its error is a *CallError. It implements grpc.ClientConnInterface.
func (s *Scheduler) Invoke(
	ctx context.Context, method string, args, reply interface{}, opts ...grpc.CallOption,
) error {
	for awaySince := time.Now(); ; {
		target, began := s.targets.ask(), time.Now()
		err := s.attempt(ctx, target, method, args, reply, opts)
		if err == nil {
			s.targets.answered()
			return nil
		}
		if !s.targets.several() || isOfCaller(err) || ctx.Err() != nil {
			return err
		}
		now, silent := time.Now(), time.Duration(0)
		if status.Code(err) == codes.DeadlineExceeded { // That of attempt, for the caller's has time.
			silent = s.options.SilentAfter
		}
		if now.Sub(began) > s.options.FailoverWait { // It was held by one that answered until then.
			awaySince = now
		}
		pauseMax := s.targets.moveOn(target, err.Leader, now, silent)
		if now.Sub(awaySince) > s.options.FailoverWait || !sleep(ctx, randomly(pauseMax)) {
			return err
		}
	}
}

// NewStream refuses: a Session has a protocol of its own, and follows no leader here.
func (s *Scheduler) NewStream(
	_ context.Context, _ *grpc.StreamDesc, method string, _ ...grpc.CallOption,
) (grpc.ClientStream, error) {
	return nil, newCallError(method, status.Error(codes.Unimplemented, "only unary calls are made"))
}

// attempt makes a call at one target. It drops an answer of a scheduler that leads no more.
func (s *Scheduler) attempt(
	parent context.Context, target, method string, args, reply interface{}, opts []grpc.CallOption,
) *CallError {
	ctx := parent
	if s.targets.several() {
		// An Admit may be held for long, so it is watched. Others are answered at once.
		if method == admitMethod {
			defer s.watch(target)()
		} else {
			var cancel context.CancelFunc
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
		failed.Leader = strings.Join(trailer.Get("schedsvc-leader"), "")
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

// watch lets a target be probed while it holds a call, until unwatch is called.
func (s *Scheduler) watch(target string) (unwatch func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, isProbed := s.held[target]; !isProbed {
		go s.probe(target)
	}
	s.held[target]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.held[target]--
	}
}

// probe asks a scheduler for a sign of life while it holds calls, and hangs up if there is none.
// Each probe has its own deadline, so a process that stood still loses one probe at most.
func (s *Scheduler) probe(target string) {
	step := s.options.SilentAfter / probesMax
	ticker := time.NewTicker(step)
	defer ticker.Stop()
	for missed := 0; ; {
		now := <-ticker.C
		s.mu.Lock()
		if s.held[target] == 0 {
			delete(s.held, target)
			s.mu.Unlock()
			return
		}
		if missed == probesMax {
			s.targets.moveOn(target, "", now, s.options.SilentAfter)
			s.hangUp(target)
			missed = 0
		}
		s.mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), step)
		asked, answer := &pb.ProgressRequest{}, &pb.ProgressResponse{}
		err := s.attempt(ctx, target, progressMethod, asked, answer, nil)
		cancel()
		missed++
		if err == nil || (!err.stale && status.Code(err) != codes.DeadlineExceeded) {
			missed = 0
		}
	}
}

// conn returns the connection to a target, which all calls share.
func (s *Scheduler) conn(target string) (*grpc.ClientConn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if conn, ok := s.conns[target]; ok {
		return conn, nil
	}
	reconnect := backoff.DefaultConfig
	reconnect.BaseDelay, reconnect.MaxDelay = 100*time.Millisecond, time.Second
	params := grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: 5 * time.Second}
	options := []grpc.DialOption{grpc.WithConnectParams(params)}
	if s.options.Credentials != nil {
		options = append(options, grpc.WithTransportCredentials(s.options.Credentials))
	} else {
		options = append(options, grpc.WithInsecure())
	}
	address := target
	if path := strings.TrimPrefix(target, "unix:"); path != target {
		// gRPC 1.33 would take the proxy of the environment.
		address = "passthrough:///localhost"
		dial := func(ctx context.Context, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(path, "//"))
		}
		options = append(options, grpc.WithContextDialer(dial))
	}
	// Dial and WithInsecure exist in each release of gRPC 1; their successors do not.
	conn, err := grpc.Dial(address, append(options, s.options.DialOptions...)...)
	if err == nil {
		s.conns[target] = conn
	}
	return conn, err
}

// hangUp ends the calls at a target. Its caller holds the lock.
func (s *Scheduler) hangUp(target string) {
	if conn, ok := s.conns[target]; ok {
		delete(s.conns, target)
		conn.Close() // It fails only if the connection is closed already.
	}
}

// sleep waits, and reports whether ctx was not done before.
func sleep(ctx context.Context, pause time.Duration) bool {
	timed, stop := context.WithTimeout(ctx, pause)
	defer stop()
	<-timed.Done()
	return ctx.Err() == nil
}

// randomly returns a random part of a duration: each new hash has a random seed.
func randomly(most time.Duration) time.Duration {
	return time.Duration(new(maphash.Hash).Sum64() % uint64(most+1))
}
