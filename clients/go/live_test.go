package schedsvc_test

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	schedsvc "github.com/schedsvc/schedsvc/clients/go"
	"github.com/schedsvc/schedsvc/clients/go/internal/dialing"
	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

// leaseTTL is that of the scheduler at SCHEDSVC_TARGET, whose grace is the same.
const leaseTTL = 3 * time.Second

var background = context.Background()

type live struct {
	*testing.T
	*schedsvc.Scheduler
	pb.SchedulerServiceClient
	options schedsvc.Options
}

// onLive connects to the scheduler at SCHEDSVC_TARGET, whose pool runs one request at a time for
// the tenant red, and whose queue holds one. In the end nothing may be left there.
func onLive(t *testing.T) live {
	t.Helper()
	target := os.Getenv("SCHEDSVC_TARGET")
	if target == "" {
		t.Skip("make test-go starts a scheduler for it")
	}
	options, err := dialing.Options()
	if err != nil {
		t.Fatal(err)
	}
	scheduler, err := schedsvc.New(target, options)
	if err != nil {
		t.Fatal(err)
	}
	l := live{t, scheduler, pb.NewSchedulerServiceClient(scheduler), options}
	t.Cleanup(func() {
		totals := l.stats().GetTotals()
		if totals.GetQueued()+totals.GetLiveLeases()+totals.GetPromisedTokens() != 0 {
			t.Error(totals)
		}
		if err := scheduler.Shutdown(background); err != nil {
			t.Error(err)
		}
	})
	return l
}

func (l live) stats() *pb.StatsResponse {
	l.Helper()
	found, err := l.Stats(background, &pb.StatsRequest{})
	if err != nil {
		l.Fatal(err)
	}
	return found
}

func (l live) flow() *pb.FlowStats {
	l.Helper()
	for _, flow := range l.stats().GetFlows() {
		if flow.GetTenant() == "red" {
			return flow
		}
	}
	l.Fatal("no flow of red")
	return nil
}

// ask asks for one request; change makes it another one.
func (l live) ask(ctx context.Context, change func(*pb.AdmitRequest)) (*schedsvc.Admission, error) {
	request := &pb.AdmitRequest{
		Tenant: "red", InputTokens: []int64{100}, MaxOutputTokens: 20, ReportsProgress: true,
	}
	if change != nil {
		change(request)
	}
	return l.Scheduler.Admit(ctx, request)
}

func (l live) admit() *schedsvc.Admission {
	l.Helper()
	admission, err := l.ask(background, nil)
	if err != nil {
		l.Fatal(err)
	}
	return admission
}

func TestLiveTotalsAreCharged(t *testing.T) {
	l := onLive(t)
	before := l.flow()
	admission := l.admit()
	if admission.Grant.GetPool() != "main" || admission.Grant.GetReservedTokens() < 120 {
		t.Error(admission.Grant)
	}
	admission.Report(schedsvc.Totals{InputTokens: 100, CachedInputTokens: 16})
	books, err := admission.Complete(background, schedsvc.Totals{OutputTokens: 7})
	expected := &pb.CompleteResponse{
		Outcome: pb.Outcome_OUTCOME_COMPLETED, InputTokens: 100, CachedInputTokens: 16, OutputTokens: 7,
	}
	if err != nil || !proto.Equal(books, expected) {
		t.Error(books, err)
	}
	after := l.flow()
	if after.GetCompleted()-before.GetCompleted() != 1 ||
		after.GetOutputTokens()-before.GetOutputTokens() != 7 {
		t.Error(before, after)
	}
}

func TestLiveAnAdmissionThatIsClosedIsCancelled(t *testing.T) {
	l := onLive(t)
	before := l.flow()
	admission := l.admit()
	if err := admission.Close(); err != nil {
		t.Error(err)
	}
	books, err := l.admit().Return(background)
	if err != nil || books.GetInputTokens() != 0 || books.GetOutputTokens() != 0 {
		t.Error(books, err)
	}
	if cancelled := l.flow().GetCancelled() - before.GetCancelled(); cancelled != 2 {
		t.Error(cancelled)
	}
}

func TestLiveARequestIsExplained(t *testing.T) {
	l := onLive(t)
	explain := func(id string) []*pb.RequestStory {
		found, err := pb.NewExplainServiceClient(l.Scheduler).Explain(
			background, &pb.ExplainRequest{RequestId: id, Tenant: "red"})
		if err != nil {
			t.Fatal(err)
		}
		return found.GetRequests()
	}
	admission := l.admit()
	running := explain(admission.RequestID)
	if len(running) != 1 || running[0].GetState() != pb.RequestState_REQUEST_STATE_LIVE {
		t.Error(running)
	}
	if err := admission.Close(); err != nil {
		t.Error(err)
	}
	_, err := l.ask(background, func(r *pb.AdmitRequest) { r.InputTokens[0] = 1_000_000 })
	var refused *schedsvc.RefusedError
	if !errors.As(err, &refused) || refused.RetryAfter != 0 ||
		refused.Outcome != pb.Outcome_OUTCOME_REJECTED_TOO_LARGE {
		t.Fatal(err)
	}
	if found := explain(refused.RequestID); found[0].GetOutcome() != refused.Outcome {
		t.Error(found)
	}
}

func TestLiveAFullQueueNamesItsLimit(t *testing.T) {
	l := onLive(t)
	running := l.admit()
	ctx, withdraw := context.WithCancel(background)
	waiting := make(chan error)
	go func() {
		_, err := l.ask(ctx, nil)
		waiting <- err
	}()
	for l.flow().GetQueued() != 1 {
		time.Sleep(time.Millisecond)
	}
	_, err := l.ask(background, nil)
	var refused *schedsvc.RefusedError
	if !errors.As(err, &refused) || refused.RetryAfter <= 0 {
		t.Fatal(err)
	}
	isNamed := false
	for _, limit := range refused.Refusal.GetQuota().GetLimits() {
		isQueue := limit.GetKind() == pb.LimitKind_LIMIT_KIND_QUEUED_REQUESTS
		isNamed = isNamed || (isQueue && limit.GetLimit() == 1 && limit.GetRemaining() == 0)
	}
	if !isNamed || refused.Outcome != pb.Outcome_OUTCOME_REJECTED_FLOW_QUEUE_FULL {
		t.Error(refused)
	}
	withdraw()
	if err := <-waiting; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	for l.flow().GetQueued() != 0 {
		time.Sleep(time.Millisecond)
	}
	if err := running.Close(); err != nil {
		t.Error(err)
	}
}

func TestLiveAWrongFieldIsNamed(t *testing.T) {
	l := onLive(t)
	_, err := l.ask(background, func(r *pb.AdmitRequest) { r.InputTokens = []int64{5, 0} })
	var failed *schedsvc.CallError
	if !errors.As(err, &failed) || len(failed.Fields) != 1 ||
		failed.Fields[0].GetField() != "input_tokens[1]" {
		t.Error(err)
	}
}

func TestLiveAWrongTokenIsAFailedCall(t *testing.T) {
	l := onLive(t)
	wrong := l.options
	wrong.Token = "wrong"
	stranger, err := schedsvc.New(os.Getenv("SCHEDSVC_TARGET"), wrong)
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Shutdown(background)
	_, err = pb.NewSchedulerServiceClient(stranger).Stats(background, &pb.StatsRequest{})
	if status.Code(err) != codes.Unauthenticated {
		t.Error(err)
	}
}

func TestLiveALeaseIsRenewed(t *testing.T) {
	l := onLive(t)
	admission := l.admit()
	time.Sleep(5 * leaseTTL / 2)
	// TTL and grace are over. A renewal that this machine held up comes a moment later.
	pool := l.stats().GetPools()[0]
	for pool.GetLiveLeases() == 1 && pool.GetSuspectLeases() != 0 {
		pool = l.stats().GetPools()[0]
	}
	if pool.GetLiveLeases() != 1 || admission.Lost() != nil {
		t.Error(pool, admission.Lost())
	}
	books, err := admission.Complete(background, schedsvc.Totals{InputTokens: 100, OutputTokens: 9})
	if err != nil || books.GetOutputTokens() != 9 {
		t.Error(books, err)
	}
}

func TestLiveALostLeaseEndsTheContext(t *testing.T) {
	l := onLive(t)
	admission := l.admit()
	lease, epoch := admission.Grant.GetLeaseId(), admission.Grant.GetPoolEpoch()
	ended := &pb.CompleteRequest{LeaseId: lease, PoolEpoch: epoch}
	if _, err := l.Complete(background, ended); err != nil {
		t.Fatal(err)
	}
	<-admission.Context().Done()
	if admission.Lost() == nil {
		t.Error("nothing says why")
	}
	if err := admission.Close(); err != nil {
		t.Error(err)
	}
}
