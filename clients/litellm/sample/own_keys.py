"""Checks the keys of the sample: LiteLLM's virtual keys need a database."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from litellm.proxy._types import UserAPIKeyAuth

# Each key with its team, its user and its name.
KEYS = {
    "sk-quiet": ("research", "ann", "quiet"),
    "sk-hog": ("sales", "bob", "hog"),
}


async def check(request: Any, api_key: str) -> UserAPIKeyAuth:
    """Return whose key it is. Raises HTTPException for an unknown one."""
    if api_key not in KEYS:
        raise HTTPException(401, "unknown key")
    team, user, alias = KEYS[api_key]
    return UserAPIKeyAuth(api_key=api_key, team_id=team, user_id=user, key_alias=alias)
