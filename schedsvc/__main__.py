"""Lets `python -m schedsvc` be the command `schedsvc`."""

from schedsvc.cli import main

main(prog_name="schedsvc")
