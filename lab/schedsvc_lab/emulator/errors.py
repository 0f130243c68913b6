"""Writes errors that a client gets to see, in the form of vLLM and OpenAI."""

import json
from http import HTTPStatus

_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
}


class ApiError(Exception):
    """Refuses a request: a status, a sentence for a person, and the field at fault."""

    def __init__(
        self, message: str, param: str | None = None, status: HTTPStatus = HTTPStatus.BAD_REQUEST
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status

    def body(self) -> bytes:
        """Give the JSON body."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, self.status.phrase),
            "param": self.param,
            "code": int(self.status),
        }
        return json.dumps({"error": error}).encode()


def stopping() -> ApiError:
    """Make the error of a request that the end of the engine cuts off."""
    return ApiError("the engine has stopped", status=HTTPStatus.SERVICE_UNAVAILABLE)
