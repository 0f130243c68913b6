"""Models a continuous-batching engine with a paged KV cache, sans-IO.

It reads no clock and no random source. `Engine.plan_step()` decides what the next step computes
and how long it takes; `Engine.finish_step()` gives what it produced. The caller owns the time, so
the same model runs under the simulator in virtual time and under the emulator in real time.
"""

from schedsvc_lab.engine.blocks import BlockPool
from schedsvc_lab.engine.config import EngineConfig
from schedsvc_lab.engine.engine import Engine
from schedsvc_lab.engine.errors import EngineInvariantError, EngineRequestError
from schedsvc_lab.engine.eviction import Future
from schedsvc_lab.engine.prefix import keys_of_hashes, keys_of_tokens
from schedsvc_lab.engine.profile import (
    CostFields,
    EngineFields,
    Profile,
    ProfileError,
    dump_profile,
    load_profile,
    profile_names,
)
from schedsvc_lab.engine.sequence import EngineRequest, Sequence, SequenceState
from schedsvc_lab.engine.step import DecodeRun, EngineGauges, Step, StepResult

__all__ = [
    "BlockPool",
    "CostFields",
    "DecodeRun",
    "Engine",
    "EngineConfig",
    "EngineFields",
    "EngineGauges",
    "EngineInvariantError",
    "EngineRequest",
    "EngineRequestError",
    "Future",
    "Profile",
    "ProfileError",
    "Sequence",
    "SequenceState",
    "Step",
    "StepResult",
    "dump_profile",
    "keys_of_hashes",
    "keys_of_tokens",
    "load_profile",
    "profile_names",
]
