"""Runs the production core in a deterministic fault simulator: one seed is one run.

It owns time, network, shims, clients, engines and the scheduler's process. `run_seed()` draws
everything from a seed; an auditor that knows only the contract watches each message.
"""
