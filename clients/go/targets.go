package schedsvc

import (
	"fmt"
	"sort"
	"strings"
	"sync"
	"time"

	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

const (
	targetsMax = 16
	fencesMax  = 1024
	// The longest pause before the next attempt, and for namedFor after the leader was named.
	pauseMax      = 200 * time.Millisecond
	namedPauseMax = 20 * time.Millisecond
	namedFor      = 500 * time.Millisecond
	// The same name shortens the pauses again after this time, as a dead leader may be named.
	namedAgain = 2 * time.Second
)

// targets decides which of several schedulers a client asks.
type targets struct {
	all []string

	mu          sync.Mutex
	current     string
	failed      map[string]bool
	silentUntil map[string]time.Time
	named       string
	namedSince  time.Time
	quickUntil  time.Time
}

// newTargets reads a list that is separated by commas.
func newTargets(list string) (*targets, error) {
	t := &targets{}
	seen := map[string]bool{}
	for _, part := range strings.Split(list, ",") {
		target := strings.TrimSpace(part)
		if target == "" || seen[target] {
			return nil, fmt.Errorf("schedsvc: target %q of %q is empty or listed twice", target, list)
		}
		seen[target] = true
		t.all = append(t.all, target)
	}
	if len(t.all) > targetsMax {
		return nil, fmt.Errorf("schedsvc: %d targets are listed; list at most %d", len(t.all), targetsMax)
	}
	t.current = t.all[0]
	t.answered()
	return t, nil
}

func (t *targets) several() bool { return len(t.all) > 1 }

// ask returns the target to ask now.
func (t *targets) ask() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.current
}

// answered notes that the current target serves this client.
func (t *targets) answered() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.failed = map[string]bool{}
	t.silentUntil = map[string]time.Time{}
}

// moveOn leaves a target that failed. The next one is the leader that it named, if that one is in
// the list and has not failed itself. A target that gave no answer is passed over for the time
// silent while others answer. There is no effect if another call has moved on already. It returns
// the longest pause before the next attempt.
func (t *targets) moveOn(
	failed, leader string, now time.Time, silent time.Duration,
) (pause time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if failed == t.current && t.several() {
		t.choose(failed, leader, now, silent)
	}
	if now.Before(t.quickUntil) {
		return namedPauseMax
	}
	return pauseMax
}

func (t *targets) choose(failed, leader string, now time.Time, silent time.Duration) {
	t.failed[failed] = true
	if silent > 0 {
		t.silentUntil[failed] = now.Add(silent)
	}
	at := 0
	for t.all[at] != failed {
		at++
	}
	ring := append(append([]string{}, t.all[at+1:]...), t.all[:at+1]...)
	t.current = ""
	for _, target := range ring {
		if t.silentUntil[target].After(now) {
			continue
		}
		if isLeader := target == leader && !t.failed[leader]; isLeader || t.current == "" {
			t.current = target
		}
	}
	if t.current == "" {
		t.current = ring[0]
	}
	isNews := leader != t.named || now.Sub(t.namedSince) >= namedAgain
	if t.current == leader && !t.failed[leader] && isNews {
		t.named, t.namedSince, t.quickUntil = leader, now, now.Add(namedFor)
	}
	if len(t.failed) == len(t.all) {
		t.failed = map[string]bool{}
	}
}

// fence keeps the highest leadership that this process has seen. The term is compared first. An
// equal term of another leader, and a lower term, are not obeyed. With several targets an answer
// without a leadership counts as term 0.
type fence struct {
	mu     sync.Mutex
	strict bool
	term   uint64
	leader string
}

// obeys reports whether an answer under this leadership has an effect, and notes a higher one.
func (f *fence) obeys(leadership *pb.Leadership) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	term := leadership.GetTerm()
	if term > f.term {
		f.term, f.leader = term, leadership.GetLeader()
	}
	if term == 0 {
		return !f.strict || f.term == 0
	}
	return term == f.term && leadership.GetLeader() == f.leader
}

// latest returns the highest term.
func (f *fence) latest() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.term
}

var fences = struct {
	sync.Mutex
	of map[string]*fence
}{of: map[string]*fence{}}

// fenceOf returns this process's fence for the schedulers of a list, in whatever order.
func fenceOf(all []string) *fence {
	sorted := append([]string{}, all...)
	sort.Strings(sorted)
	key := strings.Join(sorted, ",")
	fences.Lock()
	defer fences.Unlock()
	if fences.of[key] == nil {
		for some := range fences.of {
			if len(fences.of) < fencesMax {
				break
			}
			delete(fences.of, some)
		}
		fences.of[key] = &fence{strict: len(all) > 1}
	}
	return fences.of[key]
}
