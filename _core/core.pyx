# cython: language_level=3
# cython: boundscheck=False
# cython: wraparound=False
# cython: cdivision=True
# cython: initializedcheck=False
# cython: embedsignature=True
"""Decide who runs next: the scheduling core, one compiled unit out of the files beside this one.

Order matters: each file uses only those above it. `schedsvc/_core.pyi` documents the interface.
"""

cimport cython

include "base.pxi"
include "wire.pxi"
include "model.pxi"
include "policy.pxi"
include "lifecycle.pxi"
include "session.pxi"
include "view.pxi"
include "tenants_api.pxi"
include "usage_api.pxi"
include "cluster_api.pxi"
include "api.pxi"
include "simulator_api.pxi"
