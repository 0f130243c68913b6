// Load sends requests to a live scheduler: load cancels TARGET SEED, or load kill TARGETS. It
// prints what became of them.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	schedsvc "github.com/schedsvc/schedsvc/clients/go"
	"github.com/schedsvc/schedsvc/clients/go/internal/dialing"
	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

const (
	atOnce    = 32
	cancelled = 1000
)

type counts struct {
	Withdrawn int64    `json:"withdrawn"`
	Ran       int64    `json:"ran"`
	Served    int64    `json:"served"`
	Failed    []string `json:"failed"`

	mu sync.Mutex
}

func (c *counts) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Failed = append(c.Failed, err.Error())
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: load cancels TARGET SEED, or load kill TARGETS")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(verb, target string, rest []string) error {
	options, err := dialing.Options()
	if err != nil {
		return err
	}
	options.FailoverWait = time.Minute // A busy machine takes long to elect a leader.
	scheduler, err := schedsvc.New(target, options)
	if err != nil {
		return err
	}
	found := &counts{Failed: []string{}}
	if verb == "kill" {
		kill(scheduler, found)
	} else {
		seed, err := strconv.ParseInt(rest[0], 10, 64)
		if err != nil {
			return err
		}
		cancels(scheduler, found, seed)
	}
	if err := scheduler.Shutdown(context.Background()); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(found)
}

func request() *pb.AdmitRequest {
	return &pb.AdmitRequest{
		Tenant: "red", InputTokens: []int64{100}, MaxOutputTokens: 20, ReportsProgress: true,
	}
}

// serve asks for one request, and works for a time unless ctx is done.
func serve(
	ctx context.Context, scheduler *schedsvc.Scheduler, work time.Duration, granted func(),
) error {
	admission, err := scheduler.Admit(ctx, request())
	if err != nil {
		return err
	}
	defer admission.Close()
	granted()
	admission.Report(schedsvc.Totals{InputTokens: 100, OutputTokens: 5})
	select {
	case <-time.After(work):
	case <-admission.Context().Done():
		if lost := admission.Lost(); lost != nil {
			return lost
		}
		return admission.Context().Err()
	}
	// A lease whose leader was killed is unknown to the next one; the request was served.
	_, _ = admission.Complete(context.Background(), schedsvc.Totals{})
	return nil
}

// cancels withdraws 1,000 requests, each after a random time: it waits, starts or runs.
func cancels(scheduler *schedsvc.Scheduler, found *counts, seed int64) {
	random := rand.New(rand.NewSource(seed))
	draw := make([]float64, 2*cancelled)
	for i := range draw {
		draw[i] = random.Float64()
	}
	ms := float64(time.Millisecond)
	ignore := func() {}
	began := time.Now()
	loops(4*atOnce, func(i int) bool {
		work := time.Duration(10 * ms * draw[i])
		if err := serve(context.Background(), scheduler, work, ignore); err != nil {
			found.fail(err)
		}
		return true
	})
	usual := float64(time.Since(began)) / 4 // How long a request takes here, if not withdrawn.
	loops(cancelled, func(i int) bool {
		ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
		defer cancel()
		timer := time.AfterFunc(time.Duration(2*usual*draw[2*i]), cancel)
		defer timer.Stop()
		ran := func() { atomic.AddInt64(&found.Ran, 1) }
		err := serve(ctx, scheduler, time.Duration(10*ms*draw[2*i+1]), ran)
		switch {
		case errors.Is(err, context.Canceled):
			atomic.AddInt64(&found.Withdrawn, 1)
		case err != nil:
			found.fail(err)
		default:
			atomic.AddInt64(&found.Served, 1)
		}
		return true
	})
}

// loops runs ask for each number below count while it returns true, atOnce at a time.
func loops(count int64, ask func(i int) bool) {
	var next int64
	var all sync.WaitGroup
	for n := 0; n < atOnce; n++ {
		all.Add(1)
		go func() {
			defer all.Done()
			for i := atomic.AddInt64(&next, 1); i <= count && ask(int(i-1)); {
				i = atomic.AddInt64(&next, 1)
			}
		}()
	}
	all.Wait()
}

// end prints the first failure, and exits: requests that still run would wait for a scheduler that
// is away.
func (c *counts) end(err error) {
	c.fail(err)
	c.mu.Lock()
	json.NewEncoder(os.Stdout).Encode(c)
	os.Exit(0)
}

// kill asks without a pause until a line arrives or a request fails, and prints how many were
// served.
func kill(scheduler *schedsvc.Scheduler, found *counts) {
	stop := make(chan struct{})
	go func() {
		bufio.NewReader(os.Stdin).ReadString('\n')
		close(stop)
	}()
	loops(1<<40, func(int) bool {
		if err := serve(context.Background(), scheduler, 20*time.Millisecond, func() {}); err != nil {
			found.end(err)
		} else if served := atomic.AddInt64(&found.Served, 1); served%100 == 0 {
			fmt.Println(served)
		}
		select {
		case <-stop:
			return false
		default:
			return true
		}
	})
}
