"""Reads and writes what people type and read: numbers, options, tables, names, ids."""
