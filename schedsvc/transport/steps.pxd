# C types for `steps.py`.

cpdef tuple begin(loop, work)
