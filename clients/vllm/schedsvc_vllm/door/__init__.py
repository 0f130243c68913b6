"""Serves HTTP/1 to the proxy's clients, and asks the server behind it, both on httptools."""
