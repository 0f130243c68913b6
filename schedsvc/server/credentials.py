"""The tokens of a configuration, wherever they come from."""

import os

from schedsvc.config import Config, token_digest
from schedsvc.service import Credentials

__all__ = ["credentials_of"]


def credentials_of(config: Config) -> Credentials:
    """Read the tokens from the file, the environment and files. Raises ValueError."""
    return Credentials(
        (
            (
                token.name,
                token_digest(
                    sha256=token.sha256,
                    env=token.env,
                    file=None if token.file is None else config.resolve(token.file),
                    environ=os.environ,
                ),
            )
            for token in config.auth.tokens
        ),
        config.auth.operators,
    )
