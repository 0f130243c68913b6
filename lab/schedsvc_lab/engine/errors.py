"""Defines the two families of the engine's errors: the caller's, and ours."""


class EngineRequestError(ValueError):
    """The request can never run, or was handed in wrongly; nothing was changed by it.

    `field` names the wrong field, `description` gives the reason in one sentence.
    """

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field}: {description}")
        self.field = field
        self.description = description


class EngineInvariantError(RuntimeError):
    """The engine's books do not balance: a defect of ours."""
