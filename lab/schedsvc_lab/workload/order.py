"""Puts the requests of a trace into the order of their arrival, on disk."""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from tempfile import TemporaryFile

import numpy as np

from schedsvc_lab.workload.fields import Fields
from schedsvc_lab.workload.json_forms import own_line, own_record
from schedsvc_lab.workload.record import Record


def in_order_of_arrival(
    records: Iterable[Record], untimed: Callable[[], Exception]
) -> Iterator[Record]:
    """Yield records by arrival; equal arrivals keep their order.

    If some arrive before 0, all are moved so that the first arrives at 0. O(n log n); the requests
    wait in a temporary file, memory holds 24 bytes for each. Raises the error of `untimed` for a
    record without an arrival, and OSError.
    """
    arrivals, places = array("d"), array("q")
    with TemporaryFile() as file:
        for record in records:
            if record.arrival_s is None:
                raise untimed()
            arrivals.append(record.arrival_s)
            places.append(file.tell())
            file.write(own_line(replace(record, arrival_s=None)).encode() + b"\n")
        times_s = np.frombuffer(arrivals) if arrivals else np.empty(0)
        shift_s = min(0.0, float(times_s.min(initial=0.0)))
        for at in np.argsort(times_s, kind="stable"):
            file.seek(places[at])
            record = own_record(Fields(json.loads(file.readline())))
            yield replace(record, arrival_s=float(times_s[at]) - shift_s)
