// Package fake is a scheduler inside a test. It answers as the test scripts it, and keeps what it
// was sent.
package fake

import (
	"context"
	"fmt"
	"net"
	"path"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

// Lease is what the fake knows of one lease.
type Lease struct {
	Request *pb.AdmitRequest
	Grant   *pb.Grant
	Reports []*pb.LeaseProgress
	Ends    []*pb.CompleteRequest
	State   pb.LeaseState
}

// Call is the method of one call, and its metadata.
type Call struct {
	Method   string
	Metadata metadata.MD
}

// Scheduler grants at once, unless its fields say otherwise. Change them under Lock.
type Scheduler struct {
	pb.UnimplementedSchedulerServiceServer
	pb.UnimplementedExplainServiceServer
	sync.Mutex

	// Target is where it listens.
	Target string
	// Decide answers an Admit; ctx is done when its client withdraws it.
	Decide func(ctx context.Context, request *pb.AdmitRequest) (*pb.AdmitResponse, error)
	// Failures are the codes of the next calls of a method.
	Failures   map[string][]codes.Code
	Hangs      bool
	Leadership *pb.Leadership
	// Leader is the target of the leader, if it does not lead.
	Leader string
	TTL    time.Duration
	// FirstLease numbers its leases.
	FirstLease uint64

	Calls     []Call
	Admits    []*pb.AdmitRequest
	Withdrawn []string
	Leases    map[uint64]*Lease

	server *grpc.Server
}

// Start starts a scheduler, and stops it when the test ends.
func Start(t *testing.T, first uint64) *Scheduler {
	t.Helper()
	s := &Scheduler{
		Failures:   map[string][]codes.Code{},
		TTL:        30 * time.Second,
		FirstLease: first,
		Leases:     map[uint64]*Lease{},
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.Target = listener.Addr().String()
	s.server = grpc.NewServer(grpc.UnaryInterceptor(s.intercept))
	pb.RegisterSchedulerServiceServer(s.server, s)
	pb.RegisterExplainServiceServer(s.server, s)
	go s.server.Serve(listener)
	t.Cleanup(s.Stop)
	return s
}

// Stop breaks all calls.
func (s *Scheduler) Stop() { s.server.Stop() }

// Until waits until something is so.
func (s *Scheduler) Until(t *testing.T, isSo func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		s.Lock()
		found := isSo()
		s.Unlock()
		if found {
			return
		}
		if time.Now().After(end) {
			t.Fatal("it does not come")
		}
	}
}

// Count returns the number of calls of a method.
func (s *Scheduler) Count(method string) int {
	count := 0
	for _, call := range s.Calls {
		if call.Method == method {
			count++
		}
	}
	return count
}

// Live returns the number of leases that have not ended.
func (s *Scheduler) Live() int {
	count := 0
	for _, lease := range s.Leases {
		if len(lease.Ends) == 0 {
			count++
		}
	}
	return count
}

// Refusal is a verdict that a request does not run.
func Refusal(outcome pb.Outcome, refusal *pb.Refusal) *pb.AdmitResponse {
	return &pb.AdmitResponse{Outcome: outcome, Refusal: refusal}
}

func (s *Scheduler) intercept(
	ctx context.Context, request interface{}, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (interface{}, error) {
	method := path.Base(info.FullMethod)
	given, _ := metadata.FromIncomingContext(ctx)
	s.Lock()
	s.Calls = append(s.Calls, Call{method, given})
	var code codes.Code
	if failures := s.Failures[method]; len(failures) > 0 {
		code, s.Failures[method] = failures[0], failures[1:]
	}
	hangs, leader := s.Hangs, s.Leader
	s.Unlock()
	if code != codes.OK {
		return nil, status.Error(code, "as the test asked")
	}
	if leader != "" {
		grpc.SetTrailer(ctx, metadata.Pairs("schedsvc-leader", leader))
		return nil, status.Error(codes.Unavailable, "another scheduler leads")
	}
	if hangs && method != "Admit" {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return handle(ctx, request)
}

// Admit implements pb.SchedulerServiceServer.
func (s *Scheduler) Admit(
	ctx context.Context, request *pb.AdmitRequest,
) (*pb.AdmitResponse, error) {
	s.Lock()
	s.Admits = append(s.Admits, request)
	decide, hangs := s.Decide, s.Hangs
	s.Unlock()
	if hangs {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	var response *pb.AdmitResponse
	if decide != nil {
		var err error
		if response, err = decide(ctx, request); err != nil {
			return nil, err
		}
	}
	s.Lock()
	defer s.Unlock()
	if response == nil {
		response = &pb.AdmitResponse{Outcome: pb.Outcome_OUTCOME_GRANTED, Grant: s.GrantTo(request)}
	}
	response.Leadership = s.Leadership
	return response, nil
}

// Hold waits until the client withdraws the request.
func (s *Scheduler) Hold(
	ctx context.Context, request *pb.AdmitRequest,
) (*pb.AdmitResponse, error) {
	<-ctx.Done()
	s.Lock()
	defer s.Unlock()
	s.Withdrawn = append(s.Withdrawn, request.RequestId)
	return nil, ctx.Err()
}

// GrantTo returns the grant of a request; a repeat gets the same one.
func (s *Scheduler) GrantTo(request *pb.AdmitRequest) *pb.Grant {
	for _, lease := range s.Leases {
		if lease.Request.RequestId == request.RequestId {
			return lease.Grant
		}
	}
	id := s.FirstLease + uint64(len(s.Leases))
	grant := &pb.Grant{
		LeaseId: id, Pool: "main", PoolEpoch: 1, TtlMs: s.TTL.Milliseconds(), ReservedTokens: 64,
	}
	s.Leases[id] = &Lease{Request: request, Grant: grant, State: pb.LeaseState_LEASE_STATE_LIVE}
	return grant
}

// Progress implements pb.SchedulerServiceServer.
func (s *Scheduler) Progress(
	_ context.Context, request *pb.ProgressRequest,
) (*pb.ProgressResponse, error) {
	s.Lock()
	defer s.Unlock()
	response := &pb.ProgressResponse{Leadership: s.Leadership}
	for _, report := range request.Leases {
		state := pb.LeaseState_LEASE_STATE_UNKNOWN
		if lease := s.Leases[report.LeaseId]; lease != nil {
			lease.Reports = append(lease.Reports, report)
			state = lease.State
		}
		response.Leases = append(response.Leases, &pb.LeaseStatus{LeaseId: report.LeaseId, State: state})
	}
	return response, nil
}

// Complete implements pb.SchedulerServiceServer.
func (s *Scheduler) Complete(
	_ context.Context, request *pb.CompleteRequest,
) (*pb.CompleteResponse, error) {
	s.Lock()
	defer s.Unlock()
	lease := s.Leases[request.LeaseId]
	if lease == nil {
		return nil, status.Error(codes.NotFound, fmt.Sprintf("lease %d is unknown", request.LeaseId))
	}
	lease.Ends = append(lease.Ends, proto.Clone(request).(*pb.CompleteRequest))
	return &pb.CompleteResponse{
		Outcome:      lease.Ends[0].Outcome,
		InputTokens:  lease.Ends[0].GetInputTokens(),
		OutputTokens: lease.Ends[0].GetOutputTokens(),
		Leadership:   s.Leadership,
	}, nil
}

// Stats implements pb.SchedulerServiceServer.
func (s *Scheduler) Stats(context.Context, *pb.StatsRequest) (*pb.StatsResponse, error) {
	return &pb.StatsResponse{}, nil
}

// Explain implements pb.ExplainServiceServer.
func (s *Scheduler) Explain(
	_ context.Context, request *pb.ExplainRequest,
) (*pb.ExplainResponse, error) {
	s.Lock()
	defer s.Unlock()
	response := &pb.ExplainResponse{}
	for _, lease := range s.Leases {
		if lease.Request.RequestId == request.RequestId {
			state := pb.RequestState_REQUEST_STATE_LIVE
			if len(lease.Ends) > 0 {
				state = pb.RequestState_REQUEST_STATE_ENDED
			}
			response.Requests = append(response.Requests, &pb.RequestStory{State: state})
		}
	}
	return response, nil
}
