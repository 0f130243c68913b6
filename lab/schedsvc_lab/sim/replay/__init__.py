"""Replays what a server recorded: exactly, or under another configuration."""
