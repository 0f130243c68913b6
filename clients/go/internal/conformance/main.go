// Conformance runs scripts of ../../../conformance that need no Session against a live scheduler,
// through the client: conformance TARGET SCRIPT...
//
// Its status is 0 only if every step of every script holds. With SCHEDSVC_TLS_CA_FILE it uses TLS.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	schedsvc "github.com/schedsvc/schedsvc/clients/go"
	"github.com/schedsvc/schedsvc/clients/go/internal/dialing"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: conformance TARGET SCRIPT...")
		os.Exit(2)
	}
	code := 0
	for _, path := range os.Args[2:] {
		steps, err := runScript(os.Args[1], path)
		if err != nil {
			fmt.Printf("FAIL %s %v\n", filepath.Base(path), err)
			code = 1
			continue
		}
		fmt.Printf("ok   %s: %d steps\n", filepath.Base(path), steps)
	}
	os.Exit(code)
}

func runScript(target, path string) (int, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	var script struct{ Steps []step }
	if err := decode(text, &script); err != nil {
		return 0, err
	}
	options, err := dialing.Options()
	if err != nil {
		return 0, err
	}
	scheduler, err := schedsvc.New(target, options)
	if err != nil {
		return 0, err
	}
	defer scheduler.Shutdown(context.Background())
	r := &runner{conn: scheduler, saved: map[string]interface{}{}, calls: map[string]*started{}}
	for number, s := range script.Steps {
		if err := r.run(s); err != nil {
			return 0, fmt.Errorf("step %d %v: %w", number+1, s["note"], err)
		}
	}
	if len(r.calls) > 0 {
		return 0, fmt.Errorf("calls that were not finished: %d", len(r.calls))
	}
	return len(script.Steps), nil
}

// decode reads JSON, and keeps numbers as they are written.
func decode(text []byte, into interface{}) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	return decoder.Decode(into)
}
