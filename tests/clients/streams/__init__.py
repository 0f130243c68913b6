"""Sends random byte streams through the proxy: its upstream reads what h11 reads, or nothing."""
