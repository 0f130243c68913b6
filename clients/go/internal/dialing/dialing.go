// Package dialing reads the options of test programs from the environment.
package dialing

import (
	"os"

	"google.golang.org/grpc/credentials"

	schedsvc "github.com/schedsvc/schedsvc/clients/go"
)

// Options returns the token in SCHEDSVC_TOKEN, and TLS if SCHEDSVC_TLS_CA_FILE is set.
func Options() (schedsvc.Options, error) {
	options := schedsvc.Options{Token: os.Getenv("SCHEDSVC_TOKEN")}
	if path := os.Getenv("SCHEDSVC_TLS_CA_FILE"); path != "" {
		found, err := credentials.NewClientTLSFromFile(path, "")
		if err != nil {
			return options, err
		}
		options.Credentials = found
	}
	return options, nil
}
