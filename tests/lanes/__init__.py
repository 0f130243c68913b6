"""Chooses what CI runs for a change: `python -m tests.lanes --help`.

A lane is a stage of CI, such as the slow tests or the images. A change is what differs from a base
commit. A lane runs for two reasons: its subject is in the change, or it is in the quarter that the
hash of the tree picks. Subjects follow the static import graph (graph.py), and files that are not
Python follow stated rules (rules.py). If anything is unclear, everything runs.
"""
