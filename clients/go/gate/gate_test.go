package gate_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	schedsvc "github.com/schedsvc/schedsvc/clients/go"
	"github.com/schedsvc/schedsvc/clients/go/gate"
	"github.com/schedsvc/schedsvc/clients/go/internal/fake"
	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

func sizeOf(r *http.Request, body []byte) (*pb.AdmitRequest, error) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil { // The handler can read it all the same.
		return nil, err
	}
	switch tenant := r.Header.Get("x-tenant"); tenant {
	case "free":
		return nil, nil
	case "wrong":
		return nil, errors.New("its size is unknown")
	case "nobody":
		tenant = ""
		fallthrough
	default:
		return &pb.AdmitRequest{
			Tenant: tenant, InputTokens: []int64{int64(len(body))}, MaxOutputTokens: 20,
		}, nil
	}
}

// serve starts a server whose handler is gated; it returns the fake scheduler and the URL.
func serve(t *testing.T, handle http.HandlerFunc) (*fake.Scheduler, string) {
	t.Helper()
	f := fake.Start(t, 1)
	scheduler, err := schedsvc.New(f.Target, schedsvc.Options{})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(gate.Handler(scheduler, sizeOf, handle))
	t.Cleanup(func() {
		server.Close()
		if err := scheduler.Shutdown(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return f, server.URL
}

func ask(t *testing.T, ctx context.Context, url, tenant string) (*http.Response, error) {
	t.Helper()
	request, err := http.NewRequestWithContext(ctx, "POST", url, strings.NewReader("four"))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("x-tenant", tenant)
	return http.DefaultClient.Do(request)
}

// answerTo returns a whole answer.
func answerTo(t *testing.T, url, tenant string) (*http.Response, string) {
	t.Helper()
	response, err := ask(t, context.Background(), url, tenant)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(body)
}

// ended returns the end of the only lease.
func ended(t *testing.T, f *fake.Scheduler) *pb.CompleteRequest {
	t.Helper()
	f.Until(t, func() bool { return len(f.Leases) == 1 && f.Live() == 0 })
	return f.Leases[1].Ends[0]
}

func never(t *testing.T) http.HandlerFunc {
	return func(http.ResponseWriter, *http.Request) { t.Error("it ran") }
}

func TestAnAnswerEndsTheLeaseWithItsReport(t *testing.T) {
	f, url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		gate.Turn(r).Report(schedsvc.Totals{InputTokens: int64(len(body)), OutputTokens: 7})
		w.Write([]byte("done"))
	})
	response, body := answerTo(t, url, "red")
	if response.StatusCode != 200 || body != "done" {
		t.Error(response.StatusCode, body)
	}
	if waited := response.Header.Get("x-schedsvc-queue-duration-ms"); waited != "0.000" {
		t.Error(waited)
	}
	if end := ended(t, f); end.Outcome != pb.Outcome_OUTCOME_COMPLETED ||
		end.GetInputTokens() != 4 || end.GetOutputTokens() != 7 {
		t.Error(end)
	}
	asked := f.Admits[0]
	if asked.Tenant != "red" || asked.InputTokens[0] != 4 ||
		response.Header.Get("x-schedsvc-request-id") != asked.RequestId {
		t.Error(asked)
	}
}

// table says how each gate answers a refusal.
type table struct {
	Outcomes []struct {
		Outcome            json.RawMessage // A name, or the number of a later version.
		Status             int
		Type, Code, Reason string
	}
	Retries []struct {
		RetryAfterMs int64 `json:"retry_after_ms"`
		Headers      map[string]string
	}
	Limits []struct {
		Kind, Name, Reset string
		Limit             int64
		ResetMs           int64 `json:"reset_ms"`
	}
}

func readTable(t *testing.T) (read table, quota *pb.QuotaSnapshot, shown map[string]string) {
	t.Helper()
	data, err := os.ReadFile("../../conformance/gates/refusals.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(data, &read); err != nil {
		t.Fatal(err)
	}
	quota, shown = &pb.QuotaSnapshot{}, map[string]string{}
	for _, limit := range read.Limits {
		quota.Limits = append(quota.Limits, &pb.Limit{
			Kind: pb.LimitKind(pb.LimitKind_value[limit.Kind]), Limit: limit.Limit, Remaining: 1,
			ResetMs: limit.ResetMs,
		})
		if limit.Name != "" {
			shown["x-ratelimit-limit-"+limit.Name] = fmt.Sprint(limit.Limit)
			shown["x-ratelimit-remaining-"+limit.Name] = "1"
			shown["x-ratelimit-reset-"+limit.Name] = limit.Reset
		}
	}
	return read, quota, shown
}

// gateHeaders returns those headers that a gate sets.
func gateHeaders(header http.Header) map[string]string {
	found := map[string]string{}
	for name := range header {
		lower := strings.ToLower(name)
		for _, prefix := range []string{"retry-after", "x-should-retry", "x-ratelimit", "x-schedsvc"} {
			if strings.HasPrefix(lower, prefix) {
				found[lower] = header.Get(name)
			}
		}
	}
	return found
}

func TestEachRefusalIsAnsweredByTheTableOfAllGates(t *testing.T) {
	read, quota, shown := readTable(t)
	f, url := serve(t, never(t))
	var verdict *pb.AdmitResponse
	f.Decide = func(context.Context, *pb.AdmitRequest) (*pb.AdmitResponse, error) {
		return verdict, nil
	}
	if len(read.Outcomes) < 16 || len(read.Retries) < 5 || len(shown) < 21 {
		t.Fatal(read)
	}
	for _, face := range read.Outcomes {
		var name string
		var outcome pb.Outcome
		if json.Unmarshal(face.Outcome, &name) == nil {
			outcome = pb.Outcome(pb.Outcome_value[name])
		} else if err := json.Unmarshal(face.Outcome, &outcome); err != nil {
			t.Fatal(err)
		}
		for _, retry := range read.Retries {
			for tenant, limits := range map[string]map[string]string{"red": shown, "nobody": nil} {
				verdict = fake.Refusal(outcome, &pb.Refusal{
					Message: "not now", RetryAfterMs: retry.RetryAfterMs, Quota: quota,
				})
				response, body := answerTo(t, url, tenant)
				expected := map[string]string{
					"x-schedsvc-dropped-reason":    face.Reason,
					"x-schedsvc-queue-duration-ms": "0.000",
					"x-schedsvc-request-id":        f.Admits[len(f.Admits)-1].RequestId,
				}
				for _, headers := range []map[string]string{retry.Headers, limits} {
					for header, value := range headers {
						expected[header] = value
					}
				}
				if found := gateHeaders(response.Header); !reflect.DeepEqual(found, expected) {
					t.Errorf("%s, %d: %v, not %v", face.Outcome, retry.RetryAfterMs, found, expected)
				}
				var found struct {
					Error struct{ Message, Type, Code string }
				}
				if err := json.Unmarshal([]byte(body), &found); err != nil {
					t.Fatal(err)
				}
				if response.StatusCode != face.Status || found.Error.Message != "not now" ||
					found.Error.Type != face.Type || found.Error.Code != face.Code {
					t.Error(face, response, body)
				}
			}
		}
	}
}

func TestAFailedCallIsAnswered(t *testing.T) {
	for code, expected := range map[codes.Code]struct {
		status        int
		reason, retry string
	}{
		codes.Unavailable:     {503, "scheduler_unreachable", "1"},
		codes.InvalidArgument: {400, "", ""},
		codes.Unauthenticated: {500, "", ""}, // A mistake of the server.
	} {
		f, url := serve(t, never(t))
		f.Failures["Admit"] = []codes.Code{code}
		response, body := answerTo(t, url, "red")
		if response.StatusCode != expected.status ||
			response.Header.Get("retry-after") != expected.retry ||
			response.Header.Get("x-schedsvc-dropped-reason") != expected.reason {
			t.Error(code, response, body)
		}
	}
}

func TestARequestWithoutASizePasses(t *testing.T) {
	f, url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if gate.Turn(r) != nil || string(body) != "four" {
			t.Error(body)
		}
	})
	if response, _ := answerTo(t, url, "free"); response.StatusCode != 200 || len(f.Calls) != 0 {
		t.Error(response, f.Calls)
	}
	if response, body := answerTo(t, url, "wrong"); response.StatusCode != 400 ||
		!strings.Contains(body, "its size is unknown") {
		t.Error(response, body)
	}
}

func TestALargeBodyIsRefused(t *testing.T) {
	scheduler, err := schedsvc.New("127.0.0.1:1", schedsvc.Options{})
	if err != nil {
		t.Fatal(err)
	}
	response := httptest.NewRecorder()
	large := httptest.NewRequest("POST", "/", io.LimitReader(zeros{}, 33<<20))
	gate.Handler(scheduler, sizeOf, never(t)).ServeHTTP(response, large)
	if response.Code != 413 {
		t.Error(response)
	}
}

type zeros struct{}

func (zeros) Read(data []byte) (int, error) { return len(data), nil }

func TestAClientThatLeavesWhileItWaitsIsWithdrawn(t *testing.T) {
	f, url := serve(t, never(t))
	f.Decide = f.Hold
	ctx, leave := context.WithCancel(context.Background())
	go func() {
		f.Until(t, func() bool { return len(f.Admits) == 1 })
		leave()
	}()
	if _, err := ask(t, ctx, url, "red"); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	f.Until(t, func() bool { return len(f.Withdrawn) == 1 })
}

func TestAClientThatLeavesWhileItIsServedCancelsItsLease(t *testing.T) {
	f, url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Write([]byte("some\n"))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	ctx, leave := context.WithCancel(context.Background())
	response, err := ask(t, ctx, url, "red")
	if err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(response.Body).ReadString('\n'); err != nil {
		t.Error(line, err)
	}
	leave()
	if end := ended(t, f); end.Outcome != pb.Outcome_OUTCOME_CANCELLED {
		t.Error(end)
	}
}

func TestAHandlerThatFailsCancelsItsLease(t *testing.T) {
	for name, handle := range map[string]http.HandlerFunc{
		"status": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", 502) },
		"panic":  func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			f, url := serve(t, handle)
			if response, err := ask(t, context.Background(), url, "red"); err == nil {
				response.Body.Close()
			}
			if end := ended(t, f); end.Outcome != pb.Outcome_OUTCOME_CANCELLED {
				t.Error(end)
			}
		})
	}
}

func TestALostLeaseEndsTheContextOfTheRequest(t *testing.T) {
	var f *fake.Scheduler
	f, url := serve(t, func(w http.ResponseWriter, r *http.Request) {
		f.Lock()
		f.Leases[1].State = pb.LeaseState_LEASE_STATE_VOID
		f.Unlock()
		<-r.Context().Done()
		w.Write([]byte(gate.Turn(r).Lost().Error()))
	})
	f.TTL = 30 * time.Millisecond
	if _, body := answerTo(t, url, "red"); body != "schedsvc: lease 1 is LEASE_STATE_VOID" {
		t.Error(body)
	}
}
