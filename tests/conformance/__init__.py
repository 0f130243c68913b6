"""Runs clients/conformance against a live scheduler, in every language that has a runner."""
