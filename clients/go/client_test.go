package schedsvc

import (
	"context"
	"errors"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/schedsvc/schedsvc/clients/go/internal/fake"
	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

var background = context.Background()

func request() *pb.AdmitRequest {
	return &pb.AdmitRequest{Tenant: "red", InputTokens: []int64{100}, MaxOutputTokens: 20}
}

// open makes a client, and shuts it down when the test ends.
func open(t *testing.T, target string, options Options) *Scheduler {
	t.Helper()
	s, err := New(target, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(background, time.Minute)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Error(err)
		}
	})
	return s
}

func admit(t *testing.T, s *Scheduler) *Admission {
	t.Helper()
	admission, err := s.Admit(background, request())
	if err != nil {
		t.Fatal(err)
	}
	return admission
}

func repeated(code codes.Code, count int) []codes.Code {
	var all []codes.Code
	for i := 0; i < count; i++ {
		all = append(all, code)
	}
	return all
}

func TestAnEndThatDoesNotArriveIsRepeated(t *testing.T) {
	f := fake.Start(t, 1)
	f.Failures["Complete"] = append(repeated(codes.Unavailable, 5), codes.DeadlineExceeded)
	s := open(t, f.Target, Options{})
	admission := admit(t, s)
	books, err := admission.Complete(background, Totals{OutputTokens: 3})
	if err != nil || books.OutputTokens != 3 || books.Outcome != pb.Outcome_OUTCOME_COMPLETED {
		t.Errorf("%v, %v", books, err)
	}
	for i := 0; i < 100; i++ {
		again, err := admission.Cancel(background, Totals{OutputTokens: 50})
		if err != nil || again != books {
			t.Errorf("the first end does not win: %v, %v", again, err)
		}
	}
	if err := admit(t, s).Close(); err != nil {
		t.Error(err)
	}
	if f.Count("Complete") != 7+1 || len(f.Leases[1].Ends) != 1 {
		t.Errorf("%d attempts, ends %v", f.Count("Complete"), f.Leases[1].Ends)
	}
}

func TestTotalsBeyondTheLimitsAreBroughtWithinThem(t *testing.T) {
	f := fake.Start(t, 1)
	admission := admit(t, open(t, f.Target, Options{}))
	totals := Totals{InputTokens: -1, CachedInputTokens: -9, OutputTokens: 1 << 40}
	if _, err := admission.Complete(background, totals); err != nil {
		t.Fatal(err)
	}
	end := f.Leases[1].Ends[0]
	if end.GetInputTokens() != 0 || end.GetCachedInputTokens() != 0 || end.GetOutputTokens() != 1<<27 {
		t.Error(end)
	}
}

func TestAnEndThatCannotSucceedIsNotRepeated(t *testing.T) {
	f := fake.Start(t, 1)
	f.Failures["Complete"] = repeated(codes.NotFound, 2)
	_, err := admit(t, open(t, f.Target, Options{})).Cancel(background, Totals{})
	var failed *CallError
	if !errors.As(err, &failed) || status.Code(err) != codes.NotFound || failed.Method != "Complete" {
		t.Error(err)
	}
	if f.Count("Complete") != 1 {
		t.Error(f.Count("Complete"))
	}
}

func TestCloseDoesNotWaitForAnEndThatTakesLong(t *testing.T) {
	f := fake.Start(t, 1)
	f.Failures["Complete"] = repeated(codes.Unavailable, 10_000)
	s := open(t, f.Target, Options{})
	admission := admit(t, s)
	if err := admission.Close(); err != nil {
		t.Error(err)
	}
	f.Lock()
	if f.Count("Complete") == 0 || f.Live() != 1 {
		t.Error("it has ended")
	}
	f.Failures["Complete"] = nil
	f.Unlock()
	if _, err := admission.Complete(background, Totals{}); err != nil || f.Live() != 0 {
		t.Error(err, f.Live())
	}
}

func TestShutdownEndsWhatIsUnderWay(t *testing.T) {
	f := fake.Start(t, 1)
	s := open(t, f.Target, Options{})
	running := admit(t, s)
	f.Failures["Complete"] = repeated(codes.Unavailable, 2)
	f.Decide = f.Hold
	refused := make(chan error)
	go func() {
		_, err := s.Admit(background, request())
		refused <- err
	}()
	f.Until(t, func() bool { return len(f.Admits) == 2 })
	if err := s.Shutdown(background); err != nil {
		t.Error(err)
	}
	if err := <-refused; err != ErrClosed {
		t.Error(err)
	}
	if running.Context().Err() == nil || running.Lost() != nil {
		t.Error(running.Lost())
	}
	f.Until(t, func() bool { return len(f.Withdrawn) == 1 })
	if f.Live() != 0 || f.Leases[1].Ends[0].Outcome != pb.Outcome_OUTCOME_CANCELLED {
		t.Error(f.Leases[1].Ends)
	}
	if _, err := s.Admit(background, request()); err != ErrClosed || len(f.Admits) != 2 {
		t.Error(err)
	}
}

func TestShutdownGivesUpWhenItsContextIsDone(t *testing.T) {
	f := fake.Start(t, 1)
	s, err := New(f.Target, Options{})
	if err != nil {
		t.Fatal(err)
	}
	admit(t, s)
	f.Failures["Complete"] = repeated(codes.Unavailable, 10_000)
	ctx, cancel := context.WithCancel(background)
	cancel()
	if err := s.Shutdown(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestAGrantThatCrossesACancellationIsReturned(t *testing.T) {
	f := fake.Start(t, 1)
	s := open(t, f.Target, Options{})
	ctx, cancel := context.WithCancel(background)
	// The grant is out, and the client withdraws before it reads it.
	f.Decide = func(_ context.Context, asked *pb.AdmitRequest) (*pb.AdmitResponse, error) {
		f.Lock()
		defer f.Unlock()
		f.GrantTo(asked)
		cancel()
		return nil, nil
	}
	if _, err := s.Admit(ctx, request()); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := s.Shutdown(background); err != nil {
		t.Error(err)
	}
	if len(f.Leases) != 1 || f.Live() != 0 {
		t.Fatal(f.Leases)
	}
	end := f.Leases[1].Ends[0]
	if end.Outcome != pb.Outcome_OUTCOME_CANCELLED || end.InputTokens == nil || *end.InputTokens != 0 {
		t.Error(end)
	}
}

func TestAGrantThatCrossesADeadlineIsReturned(t *testing.T) {
	f := fake.Start(t, 1)
	s := open(t, f.Target, Options{})
	f.Decide = func(_ context.Context, asked *pb.AdmitRequest) (*pb.AdmitResponse, error) {
		f.Lock()
		defer f.Unlock()
		if len(f.Admits) == 1 {
			f.GrantTo(asked)
			return nil, status.Error(codes.DeadlineExceeded, "the answer is late")
		}
		return nil, nil
	}
	if _, err := s.Admit(background, request()); status.Code(err) != codes.DeadlineExceeded {
		t.Error(err)
	}
	f.Until(t, func() bool { return len(f.Leases[1].Ends) == 1 })
	if f.Admits[0].RequestId != f.Admits[1].RequestId || f.Admits[1].QueueTtlMs != 1 {
		t.Error(f.Admits)
	}
}

func TestARequestThatWasWithdrawnBeforeItWasSentStaysUnsent(t *testing.T) {
	f := fake.Start(t, 1)
	ctx, cancel := context.WithCancel(background)
	cancel()
	if _, err := open(t, f.Target, Options{}).Admit(ctx, request()); err != context.Canceled {
		t.Error(err)
	}
	if len(f.Calls) != 0 {
		t.Error(f.Calls)
	}
}

func TestALostLeaseEndsTheContext(t *testing.T) {
	for _, state := range []pb.LeaseState{
		pb.LeaseState_LEASE_STATE_VOID,
		pb.LeaseState_LEASE_STATE_ENDED,
		pb.LeaseState_LEASE_STATE_UNKNOWN,
	} {
		f := fake.Start(t, 1)
		f.TTL = 30 * time.Millisecond
		admission := admit(t, open(t, f.Target, Options{}))
		admission.Report(Totals{InputTokens: 100, CachedInputTokens: 16})
		admission.Report(Totals{OutputTokens: 7})
		f.Until(t, func() bool {
			reports := f.Leases[1].Reports
			return len(reports) > 0 && reports[len(reports)-1].GetOutputTokens() == 7 &&
				reports[len(reports)-1].GetCachedInputTokens() == 16
		})
		f.Lock()
		f.Leases[1].State = 9 // One of a later version is no reason to stop.
		seen := len(f.Leases[1].Reports)
		f.Unlock()
		f.Until(t, func() bool { return len(f.Leases[1].Reports) > seen+1 })
		if admission.Context().Err() != nil {
			t.Error("an unknown state ends the work")
		}
		f.Lock()
		f.Leases[1].State = state
		f.Unlock()
		<-admission.Context().Done()
		lost := admission.Lost()
		if lost == nil || lost.Error() != "schedsvc: lease 1 is "+state.String() {
			t.Error(lost)
		}
		admission.Close()
	}
}

func TestARenewalThatFailsIsRepeatedBeforeTheNextIsDue(t *testing.T) {
	failing, usual := fake.Start(t, 1), fake.Start(t, 101)
	failing.Failures["Progress"] = repeated(codes.Unavailable, 3)
	failing.TTL, usual.TTL = 3*time.Second, 3*time.Second
	admit(t, open(t, failing.Target, Options{}))
	admit(t, open(t, usual.Target, Options{}))
	failing.Until(t, func() bool { return len(failing.Leases[1].Reports) > 0 })
	usual.Lock()
	defer usual.Unlock()
	if meanwhile := len(usual.Leases[101].Reports); failing.Count("Progress") != 4 || meanwhile > 2 {
		t.Error(failing.Count("Progress"), meanwhile)
	}
}

func TestARefusalSaysWhyAndWhenToRetry(t *testing.T) {
	f := fake.Start(t, 1)
	for outcome, expected := range map[pb.Outcome]pb.Outcome{
		pb.Outcome_OUTCOME_REJECTED_QUOTA: pb.Outcome_OUTCOME_REJECTED_QUOTA,
		31:                                pb.Outcome_OUTCOME_UNSPECIFIED,
	} {
		f.Decide = func(context.Context, *pb.AdmitRequest) (*pb.AdmitResponse, error) {
			return fake.Refusal(outcome, &pb.Refusal{Message: "not now", RetryAfterMs: 500}), nil
		}
		_, err := open(t, f.Target, Options{}).Admit(background, request())
		var refused *RefusedError
		if !errors.As(err, &refused) || refused.Outcome != expected ||
			refused.RetryAfter != 500*time.Millisecond || refused.RequestID == "" {
			t.Errorf("%#v", err)
		}
	}
}

func TestTooManyPrefixHashesAreRefusedWithTheirNumber(t *testing.T) {
	f := fake.Start(t, 1)
	large := request()
	large.PrefixBlockHashes = make([]uint64, 20_000)
	_, err := open(t, f.Target, Options{}).Admit(background, large)
	said := "prefix_block_hashes: has 20000 hashes; at most 4096 are allowed"
	if err == nil || err.Error() != "schedsvc: Admit: InvalidArgument: "+said || len(f.Calls) != 0 {
		t.Error(err)
	}
}

func TestOptionsReachTheCalls(t *testing.T) {
	f := fake.Start(t, 1)
	var methods []string
	intercept := func(
		ctx context.Context, method string, request, reply interface{}, conn *grpc.ClientConn,
		invoke grpc.UnaryInvoker, options ...grpc.CallOption,
	) error {
		methods = append(methods, method)
		return invoke(ctx, method, request, reply, conn, options...)
	}
	dial := []grpc.DialOption{grpc.WithUnaryInterceptor(intercept)}
	s := open(t, f.Target, Options{Token: "secret", DialOptions: dial})
	admission := admit(t, s)
	if err := admission.Close(); err != nil {
		t.Error(err)
	}
	if len(methods) != 2 || f.Calls[0].Metadata.Get("authorization")[0] != "Bearer secret" {
		t.Error(methods, f.Calls)
	}
}

func TestAStreamIsRefused(t *testing.T) {
	s := open(t, "127.0.0.1:1", Options{})
	_, err := pb.NewSchedulerServiceClient(s).Session(background)
	if status.Code(err) != codes.Unimplemented {
		t.Error(err)
	}
}
