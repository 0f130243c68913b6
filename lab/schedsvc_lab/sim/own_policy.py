"""Loads a policy that its user wrote, and asks it for the keys by which the core orders."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from schedsvc_lab.sim.requests import Requests

__all__ = ["OwnKeys", "Policy", "PolicyError", "Standing", "Waiting", "load_policy", "policy_name"]

#: The name of a policy of the simulator, package.module:Class, or such a class itself.
Policy = str | type


class PolicyError(ValueError):
    """Says that a policy of the user's own cannot be used, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Holds what a policy may know of a waiting request.

    `index` is its place in the order of arrival. `output_tokens` is what it will produce: only an
    oracle knows that. `output_tokens_max` is what it asks for.
    """

    index: int
    tenant: str
    request_class: str
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    output_tokens_max: int


class Standing(NamedTuple):
    """Holds how a request's tenant stands, in the class of the request.

    `charged_micro` is the service that the tenant was charged so far, in micro-tokens by the prices
    of the configuration, divided by its weight. `queued` counts its waiting requests, this one
    included.
    """

    charged_micro: int
    queued: int
    now_ns: int


def policy_name(policy: Policy) -> str:
    """Name a policy as `--policy` does. Raises PolicyError for what is neither name nor class."""
    if isinstance(policy, str):
        return policy
    if not isinstance(policy, type):
        raise PolicyError(f"{policy!r}: give the name of a policy, or a class, and no object of it")
    return f"{policy.__module__}:{policy.__qualname__}"


def load_policy(name: str) -> type:
    """Find the class that package.module:Class names. Raises PolicyError."""
    module_name, _, class_name = name.partition(":")
    try:
        found: Any = import_module(module_name)
        for part in class_name.split("."):
            found = getattr(found, part)
    except Exception as error:  # the module is the user's: anything may come out of it
        raise PolicyError(f"{name}: {type(error).__name__}: {error}") from error
    return _checked(name, found)


def _checked(name: str, found: Any) -> type:
    if not isinstance(found, type) or not callable(getattr(found, "key", None)):
        raise PolicyError(f"{name}: has to be a class with a method key(self, request, standing)")
    return found


class OwnKeys:
    """Asks an object of a policy's class, which is made for one run.

    The core calls `key()` and, if the class has a method of that name, `place()`:
    `_core/policy/external_order.pxi` says when. Raises PolicyError for whatever they raise.
    """

    def __init__(self, policy: Policy, requests: Requests, output_tokens_max: int) -> None:
        self.name = policy_name(policy)
        made = load_policy(policy) if isinstance(policy, str) else _checked(self.name, policy)
        self._requests, self._output_tokens_max = requests, output_tokens_max
        self._heads: dict[int, Waiting] = {}  # by client: the request that was last asked for
        try:
            self._policy: Any = made()
        except Exception as error:
            raise self._wrong("__init__", error) from error
        self._key: Callable[[Waiting, Standing], int] = self._policy.key

    @property
    def has_places(self) -> bool:
        """Return whether the class orders the requests of one tenant, too."""
        return callable(getattr(self._policy, "place", None))

    def key(self, index: int, charged_micro: int, queued: int, now_ns: int) -> int:
        """Return the key of a request that is the first of its tenant."""
        client = self._requests.client[index]
        request = self._heads.get(client)
        if request is None or request.index != index:
            request = self._heads[client] = self._waiting(index)
        try:
            return self._key(request, Standing(charged_micro, queued, now_ns))
        except Exception as error:
            raise self._wrong("key", error) from error

    def place(self, index: int) -> int:
        """Return the place of a request among those of its tenant."""
        try:
            place: int = self._policy.place(self._waiting(index))
        except Exception as error:
            raise self._wrong("place", error) from error
        return place

    def _waiting(self, index: int) -> Waiting:
        requests = self._requests
        classes, output_tokens = requests.classes, requests.output_tokens[index]
        return Waiting(
            index,
            requests.clients[requests.client[index]],
            "" if classes is None else classes[requests.place[index]],
            requests.arrival_ns[index],
            requests.prompt_tokens[index],
            output_tokens,
            max(self._output_tokens_max, output_tokens),
        )

    def _wrong(self, method: str, error: Exception) -> PolicyError:
        return PolicyError(f"{self.name}.{method}(): {type(error).__name__}: {error}")
