"""megaflow: decode language models in one persistent GPU kernel with programmable schedules."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "MegaModel": "megaflow.models.mega_model",
    "MegaflowError": "megaflow.errors",
    "BackendError": "megaflow.errors",
    "CapacityError": "megaflow.errors",
    "CheckpointError": "megaflow.errors",
    "ConfigError": "megaflow.errors",
    "DeadlockError": "megaflow.errors",
    "HazardError": "megaflow.errors",
    "InputError": "megaflow.errors",
    "PlanError": "megaflow.errors",
    "ScheduleError": "megaflow.errors",
    "VerificationError": "megaflow.errors",
}

if TYPE_CHECKING:
    from megaflow.errors import (
        BackendError,
        CapacityError,
        CheckpointError,
        ConfigError,
        DeadlockError,
        HazardError,
        InputError,
        MegaflowError,
        PlanError,
        ScheduleError,
        VerificationError,
    )
    from megaflow.models.mega_model import MegaModel

__all__ = [
    "BackendError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DeadlockError",
    "HazardError",
    "InputError",
    "MegaModel",
    "MegaflowError",
    "PlanError",
    "ScheduleError",
    "VerificationError",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
