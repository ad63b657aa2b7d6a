"""Every mistake a user can make, one class each. A message names the value, the limit and the remedy."""


class MegaflowError(Exception):
    """Base of all errors that megaflow raises on purpose."""


class BackendError(MegaflowError):
    """The kernel cannot run on this device or with this installation."""


class ConfigError(MegaflowError, ValueError):
    """The model's configuration asks for something that is not supported."""


class CheckpointError(MegaflowError):
    """The checkpoint is incomplete or does not fit its configuration."""


class CapacityError(MegaflowError, ValueError):
    """A request is larger than what the model was created for."""


class InputError(MegaflowError, ValueError):
    """Token ids or arguments of a request are not valid."""


class ScheduleError(MegaflowError, ValueError):
    """A schedule is unknown or not valid."""


class PlanError(MegaflowError):
    """A graph cannot be turned into a plan."""


class VerificationError(MegaflowError):
    """A plan lets tiles run in an order in which they must not, runs one not exactly once, or does not end."""


class HazardError(MegaflowError, RuntimeError):
    """A plan executed in torch lets a tile read what is not written yet or no longer there: it misses a wait."""


class DeadlockError(MegaflowError, RuntimeError):
    """A wait in the persistent kernel ran past its bound; the launch was abandoned, the GPU stays usable."""
