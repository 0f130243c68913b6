"""A sans-IO model of a continuous-batching engine with a paged KV cache.

It reads no clock and no random source. `Engine.plan_step()` decides what the next step computes
and how long it takes; `Engine.finish_step()` gives what it produced. The caller owns the time, so
the same model runs under the simulator in virtual time and under the emulator in real time.
"""

from schedsvc.sim.engine.blocks import BlockPool
from schedsvc.sim.engine.config import EngineConfig
from schedsvc.sim.engine.engine import DecodeRun, Engine, EngineGauges, Step, StepResult
from schedsvc.sim.engine.errors import EngineInvariantError, EngineRequestError
from schedsvc.sim.engine.profile import Profile, ProfileError, load_profile, profile_names
from schedsvc.sim.engine.sequence import EngineRequest, Sequence, SequenceState

__all__ = [
    "BlockPool",
    "DecodeRun",
    "Engine",
    "EngineConfig",
    "EngineGauges",
    "EngineInvariantError",
    "EngineRequest",
    "EngineRequestError",
    "Profile",
    "ProfileError",
    "Sequence",
    "SequenceState",
    "Step",
    "StepResult",
    "load_profile",
    "profile_names",
]
