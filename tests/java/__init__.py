"""Runs tests of the Java client, which are a lane of their own: `make test-java`."""
