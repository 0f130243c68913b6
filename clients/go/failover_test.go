package schedsvc

import (
	"context"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/schedsvc/schedsvc/clients/go/internal/fake"
	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

// two starts two schedulers. The leases of the first are 1 and up, those of the other 101 and up.
func two(t *testing.T) (a, b *fake.Scheduler, both string) {
	a, b = fake.Start(t, 1), fake.Start(t, 101)
	return a, b, a.Target + "," + b.Target
}

func stats(s *Scheduler) error {
	_, err := pb.NewSchedulerServiceClient(s).Stats(background, &pb.StatsRequest{})
	return err
}

func TestACallGoesToTheNextTargetIfTheFirstIsAway(t *testing.T) {
	a, _, both := two(t)
	a.Stop()
	admission := admit(t, open(t, both, Options{}))
	if admission.Grant.LeaseId != 101 {
		t.Error(admission.Grant)
	}
	if books, err := admission.Complete(background, Totals{}); err != nil {
		t.Error(books, err)
	}
}

func TestAHeldCallMovesOnWithItsRequestID(t *testing.T) {
	a, _, both := two(t)
	a.Hangs = true
	s := open(t, both, Options{SilentAfter: time.Minute})
	go func() {
		a.Until(t, func() bool { return len(a.Admits) > 0 })
		a.Stop()
	}()
	admission := admit(t, s)
	a.Lock()
	defer a.Unlock()
	if admission.Grant.LeaseId != 101 || a.Admits[0].RequestId != admission.RequestID {
		t.Error(admission.Grant, a.Admits)
	}
}

func TestASilentSchedulerIsLeftForTheNext(t *testing.T) {
	a, b, both := two(t)
	a.Hangs = true
	s := open(t, both, Options{SilentAfter: 150 * time.Millisecond})
	admission := admit(t, s)
	a.Lock()
	if admission.Grant.LeaseId != 101 || a.Count("Progress") < probesMax || b.Count("Admit") != 1 {
		t.Error(admission.Grant, a.Calls)
	}
	a.Unlock()
	// The other calls have their own deadlines.
	s = open(t, both, Options{SilentAfter: 150 * time.Millisecond})
	if err := stats(s); err != nil {
		t.Error(err)
	}
	a.Lock()
	defer a.Unlock()
	if a.Count("Stats") != 1 || b.Count("Stats") != 1 {
		t.Error(a.Calls, b.Calls)
	}
}

func TestAHeldCallStaysWithASchedulerThatAnswersProbes(t *testing.T) {
	a, b, both := two(t)
	release := make(chan struct{})
	a.Decide = func(context.Context, *pb.AdmitRequest) (*pb.AdmitResponse, error) {
		<-release
		return nil, nil
	}
	s := open(t, both, Options{SilentAfter: 900 * time.Millisecond})
	go func() {
		a.Until(t, func() bool { return a.Count("Progress") >= 5 })
		close(release)
	}()
	if admission := admit(t, s); admission.Grant.LeaseId != 1 || len(b.Calls) != 0 {
		t.Error(admission.Grant, b.Calls)
	}
}

func TestASchedulerWhoseTermIsOverIsLeftWhileItHoldsACall(t *testing.T) {
	a, b, both := two(t)
	a.Leadership = &pb.Leadership{Term: 6, Leader: "a/1"}
	s := open(t, both, Options{SilentAfter: 150 * time.Millisecond})
	if err := admit(t, s).Close(); err != nil {
		t.Error(err)
	}
	a.Lock()
	a.Decide, a.Leadership = a.Hold, &pb.Leadership{Term: 5, Leader: "a/0"}
	a.Unlock()
	b.Leadership = &pb.Leadership{Term: 7, Leader: "b/1"}
	if admission := admit(t, s); admission.Grant.LeaseId != 101 {
		t.Error(admission.Grant)
	}
}

func TestTheNamedLeaderIsAskedIfItIsInTheList(t *testing.T) {
	a, b, both := two(t)
	c := fake.Start(t, 201)
	a.Leader = c.Target
	s := open(t, both+","+c.Target, Options{})
	if err := stats(s); err != nil || len(b.Calls) != 0 || len(c.Calls) != 1 {
		t.Error(err, b.Calls, c.Calls)
	}
	a.Leader, c.Leader = "", "192.0.2.1:7600"
	if err := stats(s); err != nil || len(a.Calls) != 2 || len(b.Calls) != 0 {
		t.Error(err, a.Calls, b.Calls)
	}
}

// stale are leaderships that a client which knows the term 5 of a/1 does not obey.
var stale = map[string]*pb.Leadership{
	"a lower term":                    {Term: 4, Leader: "b/1"},
	"an equal term of another leader": {Term: 5, Leader: "b/1"},
	"no term":                         nil,
}

func TestAGrantUnderAStaleTermIsDropped(t *testing.T) {
	for name, leadership := range stale {
		t.Run(name, func(t *testing.T) {
			a, b, both := two(t)
			a.Leadership, b.Leadership = &pb.Leadership{Term: 5, Leader: "a/1"}, leadership
			s := open(t, both, Options{FailoverWait: 300 * time.Millisecond})
			if err := admit(t, s).Close(); err != nil {
				t.Error(err)
			}
			a.Leader = b.Target
			if _, err := s.Admit(background, request()); status.Code(err) != codes.Unavailable {
				t.Error(err)
			}
			if len(b.Admits) == 0 || b.Calls[0].Metadata.Get("schedsvc-term")[0] != "5" {
				t.Error(b.Calls)
			}
			b.Leadership = &pb.Leadership{Term: 6, Leader: "b/2"}
			if next := admit(t, s); next.Grant.LeaseId < 101 {
				t.Error(next.Grant)
			}
		})
	}
}

func TestTheStateAndTheEndOfALeaseUnderAStaleTermHaveNoEffect(t *testing.T) {
	for name, leadership := range stale {
		t.Run(name, func(t *testing.T) {
			a, b, both := two(t)
			a.TTL = 60 * time.Millisecond
			a.Leadership, b.Leadership = &pb.Leadership{Term: 5, Leader: "a/1"}, leadership
			admission := admit(t, open(t, both, Options{FailoverWait: time.Minute}))
			b.Lock()
			b.Leases[1] = &fake.Lease{Request: request(), State: pb.LeaseState_LEASE_STATE_VOID}
			b.Unlock()
			a.Lock()
			a.Leader = b.Target
			a.Unlock()
			b.Until(t, func() bool { return len(b.Leases[1].Reports) >= 2 })
			if admission.Context().Err() != nil {
				t.Error("it is lost")
			}
			go func() {
				b.Until(t, func() bool { return len(b.Leases[1].Ends) >= 2 })
				a.Lock()
				defer a.Unlock()
				if len(a.Leases[1].Ends) != 0 {
					t.Error(a.Leases[1].Ends)
				}
				a.Leader = ""
			}()
			books, err := admission.Complete(background, Totals{})
			if err != nil || books.GetLeadership().GetLeader() != "a/1" || len(a.Leases[1].Ends) != 1 {
				t.Error(books, err)
			}
		})
	}
}

func TestAnAnswerAboutTheCallerIsFinal(t *testing.T) {
	a, b, both := two(t)
	a.Failures["Stats"] = []codes.Code{codes.Unauthenticated}
	err := stats(open(t, both, Options{}))
	if status.Code(err) != codes.Unauthenticated || len(b.Calls) != 0 {
		t.Error(err, b.Calls)
	}
}

func TestRetriesEndWithTheContext(t *testing.T) {
	a, b, both := two(t)
	a.Stop()
	b.Stop()
	s := open(t, both, Options{FailoverWait: time.Hour})
	ctx, cancel := context.WithTimeout(background, 300*time.Millisecond)
	defer cancel()
	_, err := pb.NewSchedulerServiceClient(s).Stats(ctx, &pb.StatsRequest{})
	if code := status.Code(err); code != codes.Unavailable && code != codes.DeadlineExceeded {
		t.Error(err)
	}
}

func TestAListIsChecked(t *testing.T) {
	many := "a:0"
	for i := 1; i <= targetsMax; i++ {
		many += fmt.Sprintf(",a:%d", i)
	}
	for list, complaint := range map[string]string{
		"a:1,":        `schedsvc: target "" of "a:1," is empty or listed twice`,
		"a:1,b:2,a:1": `schedsvc: target "a:1" of "a:1,b:2,a:1" is empty or listed twice`,
		many:          "schedsvc: 17 targets are listed; list at most 16",
	} {
		if _, err := New(list, Options{}); err == nil || err.Error() != complaint {
			t.Error(err)
		}
	}
	list, err := newTargets(" a:1, b:2")
	if err != nil || len(list.all) != 2 || list.all[1] != "b:2" {
		t.Error(list, err)
	}
}

// at is a moment of the tests of targets.
func at(ms int) time.Time { return time.Unix(1_000, 0).Add(time.Duration(ms) * time.Millisecond) }

func targetsOf(t *testing.T, list string) *targets {
	t.Helper()
	found, err := newTargets(list)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestPausesAreShorterAfterTheLeaderIsNamed(t *testing.T) {
	list := targetsOf(t, "a:1,b:1")
	for _, move := range []struct {
		failed, leader string
		ms             int
		pause          time.Duration
	}{
		{"a:1", "b:1", 1_000, namedPauseMax},
		{"a:1", "", 1_499, namedPauseMax}, // Another call of a:1 fails; there is no effect.
		{"a:1", "", 1_500, pauseMax},
		{"b:1", "", 1_600, pauseMax},
		{"a:1", "b:1", 1_700, pauseMax}, // A standby names a dead leader while its term lasts.
		{"b:1", "evil:6", 9_000, pauseMax},
		{"a:1", "b:1", 9_100, namedPauseMax},
	} {
		if pause := list.moveOn(move.failed, move.leader, at(move.ms), 0); pause != move.pause {
			t.Errorf("%v: %v", move, pause)
		}
		list.answered()
	}
}

func TestALeaderThatFailedIsNotFollowed(t *testing.T) {
	list := targetsOf(t, "a:1,b:2,c:3")
	list.moveOn("a:1", "", at(0), 0)
	list.moveOn("b:2", "a:1", at(0), 0)
	if list.ask() != "c:3" {
		t.Error(list.ask())
	}
}

func TestASilentTargetIsPassedOverWhileAnotherAnswers(t *testing.T) {
	list := targetsOf(t, "a:1,b:2")
	list.moveOn("a:1", "", at(1_000), 1_500*time.Millisecond)
	for ms, next := range map[int]string{1_100: "b:2", 2_499: "b:2"} {
		if list.moveOn("b:2", "a:1", at(ms), 0); list.ask() != next {
			t.Error(ms, list.ask())
		}
	}
	if list.moveOn("b:2", "a:1", at(2_500), 0); list.ask() != "a:1" {
		t.Error(list.ask())
	}
}

func TestOneTargetIsObeyedWithoutATerm(t *testing.T) {
	f := &fence{}
	for _, step := range []struct {
		leadership *pb.Leadership
		isObeyed   bool
	}{
		{&pb.Leadership{Term: 3, Leader: "a/1"}, true},
		{nil, true},
		{&pb.Leadership{Term: 2, Leader: "a/1"}, false},
	} {
		if f.obeys(step.leadership) != step.isObeyed {
			t.Error(step)
		}
	}
	if fenceOf([]string{"a", "b"}) != fenceOf([]string{"b", "a"}) {
		t.Error("the order counts")
	}
	for i := 0; i < 2*fencesMax; i++ {
		fenceOf([]string{fmt.Sprint(i)})
	}
	if len(fences.of) > fencesMax {
		t.Error(len(fences.of))
	}
}
