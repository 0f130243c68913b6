# How a call fails: a caller's mistake is refused, a broken invariant stops admission.

# google.rpc.Code
cdef enum Code:
    CODE_INVALID_ARGUMENT = 3
    CODE_NOT_FOUND = 5
    CODE_ALREADY_EXISTS = 6
    CODE_PERMISSION_DENIED = 7
    CODE_RESOURCE_EXHAUSTED = 8
    CODE_FAILED_PRECONDITION = 9


class CallerError(ValueError):
    """The caller sent something wrong; nothing was changed by it.

    Made of code, field and description. It is made thousands of times for one hostile message, so
    it writes its text only when that is asked for.
    """

    code = property(lambda self: self.args[0])
    field = property(lambda self: self.args[1])
    description = property(lambda self: self.args[2])

    def __str__(self):
        return f"{self.field}: {self.description}" if self.field else self.description


class InvariantError(RuntimeError):
    """The books do not balance: a defect of ours."""


@cython.final
cdef class Fuse:
    """Blows at the first broken invariant and stays blown: nothing is granted after it."""

    cdef str what

    cdef object blow(self, str what):
        if self.what is None:
            self.what = what
        return InvariantError(what)


cdef int invalid(str field, str description) except -1:
    raise CallerError(CODE_INVALID_ARGUMENT, field, description)
