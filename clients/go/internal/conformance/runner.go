package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	schedsvc "github.com/schedsvc/schedsvc/clients/go"
	pb "github.com/schedsvc/schedsvc/clients/go/schedsvcv1"
)

const (
	deadline = 30 * time.Second
	patience = 20 * time.Second
	poll     = 20 * time.Millisecond
)

type step map[string]interface{}

// object is a message, or what became of a call: its "answer" or its "error".
type object = map[string]interface{}

type started struct {
	cancel  context.CancelFunc
	outcome chan object
}

// runner is the state of one script: what was saved, and calls under way.
type runner struct {
	conn  grpc.ClientConnInterface
	saved object
	calls map[string]*started
}

func (r *runner) run(s step) error {
	switch {
	case s["call"] != nil:
		return r.call(s)
	case s["start"] != nil:
		call, err := r.start(s, s["start"].(string))
		r.calls[s["as"].(string)] = call
		time.Sleep(poll) // The call has to be on its way before the next step is.
		return err
	case s["waits"] != nil:
		call := r.calls[s["waits"].(string)]
		time.Sleep(millis(s["for_ms"]))
		if len(call.outcome) > 0 {
			return fmt.Errorf("it was answered: %v", <-call.outcome)
		}
		return nil
	case s["finish"] != nil:
		name := s["finish"].(string)
		call := r.calls[name]
		delete(r.calls, name)
		return r.judge(s, <-call.outcome)
	case s["cancel"] != nil:
		r.calls[s["cancel"].(string)].cancel()
		return nil
	case s["sleep_ms"] != nil:
		time.Sleep(millis(s["sleep_ms"]))
		return nil
	}
	return fmt.Errorf("no verb that a client without a Session knows: %v", s)
}

// call makes a call, once or until its answer matches.
func (r *runner) call(s step) error {
	until, err := fill(s["until"], r.saved)
	if err != nil {
		return err
	}
	for end := time.Now().Add(patience); ; time.Sleep(poll) {
		call, err := r.start(s, s["call"].(string))
		if err != nil {
			return err
		}
		outcome := <-call.outcome
		if until == nil {
			return r.judge(s, outcome)
		}
		found, err := mismatches(until, outcome["answer"], "")
		if err != nil {
			return err
		}
		if len(found) == 0 {
			return r.judge(s, outcome)
		}
		if time.Now().After(end) {
			return errors.New(strings.Join(found, "; "))
		}
	}
}

func (r *runner) judge(s step, outcome object) error {
	expected, part := s["expect"], "answer"
	if failure, ok := s["error"].(object); ok {
		part = "error"
		wanted := object{}
		for key, value := range failure {
			wanted[key] = value
		}
		if field, ok := wanted["field"]; ok {
			wanted["field"] = object{"$has": field}
		}
		expected = wanted
	}
	actual, ok := outcome[part]
	if !ok {
		return fmt.Errorf("it has no %s: %v", part, outcome)
	}
	if expected == nil {
		expected = object{}
	}
	filled, err := fill(expected, r.saved)
	if err != nil {
		return err
	}
	found, err := mismatches(filled, actual, "")
	if err != nil {
		return err
	}
	if len(found) > 0 {
		return errors.New(strings.Join(found, "; "))
	}
	paths, _ := s["save"].(object)
	for name, path := range paths {
		if r.saved[name], err = lookUp(actual, path.(string)); err != nil {
			return err
		}
	}
	return nil
}

// message makes the request or the response of a method.
func message(name string) (method string, request, response proto.Message, err error) {
	switch name {
	case "Admit":
		request, response = &pb.AdmitRequest{}, &pb.AdmitResponse{}
	case "Progress":
		request, response = &pb.ProgressRequest{}, &pb.ProgressResponse{}
	case "Complete":
		request, response = &pb.CompleteRequest{}, &pb.CompleteResponse{}
	case "Stats":
		request, response = &pb.StatsRequest{}, &pb.StatsResponse{}
	case "Explain":
		request, response = &pb.ExplainRequest{}, &pb.ExplainResponse{}
		return "/schedsvc.v1.ExplainService/Explain", request, response, nil
	default:
		return "", nil, nil, fmt.Errorf("no method %s", name)
	}
	return "/schedsvc.v1.SchedulerService/" + name, request, response, nil
}

// raw sends the bytes of a script as they are.
type raw []byte

type rawCodec struct{}

func (rawCodec) Name() string { return "proto" }

func (rawCodec) Marshal(value interface{}) ([]byte, error) {
	if bytes, ok := value.(raw); ok {
		return bytes, nil
	}
	return proto.Marshal(value.(proto.Message))
}

func (rawCodec) Unmarshal(data []byte, value interface{}) error {
	return proto.Unmarshal(data, value.(proto.Message))
}

func (r *runner) start(s step, name string) (*started, error) {
	method, request, response, err := message(name)
	if err != nil {
		return nil, err
	}
	var sent interface{} = request
	if s["raw"] != nil {
		text, err := fill(s["raw"], r.saved)
		if err != nil {
			return nil, err
		}
		bytes, err := hex.DecodeString(text.(string))
		if err != nil {
			return nil, err
		}
		sent = raw(bytes)
	} else if s["request"] != nil {
		filled, err := fill(s["request"], r.saved)
		if err != nil {
			return nil, err
		}
		text, err := json.Marshal(filled)
		if err != nil {
			return nil, err
		}
		if err := protojson.Unmarshal(text, request); err != nil {
			return nil, err
		}
	}
	limit := deadline
	if s["deadline_ms"] != nil {
		limit = millis(s["deadline_ms"])
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	given, _ := s["metadata"].(object)
	for key, value := range given {
		ctx = metadata.AppendToOutgoingContext(ctx, key, value.(string))
	}
	call := &started{cancel: cancel, outcome: make(chan object, 1)}
	go func() {
		defer cancel()
		err := r.conn.Invoke(ctx, method, sent, response, grpc.ForceCodec(rawCodec{}))
		if err != nil {
			call.outcome <- object{"error": failure(err)}
			return
		}
		call.outcome <- object{"answer": asJSON(response)}
	}()
	return call, nil
}

// asJSON returns a message as scripts write it: with absent messages as null.
func asJSON(response proto.Message) interface{} {
	options := protojson.MarshalOptions{UseProtoNames: true, EmitUnpopulated: true}
	text, err := options.Marshal(response)
	if err != nil {
		return err.Error()
	}
	var answer interface{}
	if err := decode(text, &answer); err != nil {
		return err.Error()
	}
	return answer
}

// failure returns what a script can expect of a call that failed.
func failure(err error) object {
	fields := []interface{}{}
	retry := false
	var failed *schedsvc.CallError
	if errors.As(err, &failed) {
		for _, field := range failed.Fields {
			fields = append(fields, field.Field)
		}
		retry = failed.RetryAfter > 0
	}
	return object{
		"code":    spelled(status.Code(err)),
		"message": status.Convert(err).Message(),
		"field":   fields,
		"retry":   retry,
	}
}

var inWord = regexp.MustCompile(`([a-z])([A-Z])`)

// spelled returns a code as gRPC's documents spell it.
func spelled(code codes.Code) string {
	if code == codes.Canceled {
		return "CANCELLED"
	}
	return strings.ToUpper(inWord.ReplaceAllString(code.String(), "${1}_${2}"))
}

func millis(value interface{}) time.Duration {
	n, _ := number(value)
	return time.Duration(n.Int64()) * time.Millisecond
}
