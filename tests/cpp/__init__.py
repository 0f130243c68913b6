"""Runs tests of the C++ client, which are a lane of their own: `make test-cpp`."""
