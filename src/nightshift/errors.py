"""Every error a user can meet. Each says what is wrong, where, and what to do next.

NightshiftError
├── ConfigError            params.yaml does not fit its types
├── PluginError            a package that adds to Nightshift is missing or faulty
├── ProjectError           the project folder cannot be worked in (no git, read-only, full disk)
│   └── ServerGone         the Prefect server of a run stopped answering
├── SimulatorError         a simulator, its assets or its init states are not usable
│   ├── StatesNotDrawn     the stage `states` has not run for these tasks
│   └── UnstablePhysics    the actions of one episode drove the simulation out of bounds
├── DataError              an episode or dataset file is damaged or breaks its schema
├── CacheError             DVC refuses (locked, damaged cache)
│   └── Busy               another run works in this folder
├── RegistryError          MLflow has no such model, version or alias
│   └── Unreachable        MLflow does not answer: worth another try
├── RobustnessFell         a policy does worse under perturbations than the one it is compared with
├── StreamError            episodes or weights cannot travel between actor and learner
├── DeviceError            there is no GPU, or it has not enough memory
├── RolloutError           a simulator worker failed, or Ray under it
└── Problems               several of these at once
"""

from __future__ import annotations

from collections.abc import Sequence


class NightshiftError(Exception):
    """Base of all errors meant for people: `what` went wrong and the `next_step` to take."""

    def __init__(self, what: str, next_step: str = "") -> None:
        self.what = what
        self.next_step = next_step
        super().__init__(f"{what}\n  → {next_step}" if next_step else what)

    def __reduce__(self) -> tuple[type[NightshiftError], tuple[str, str]]:
        # Errors cross process borders (Ray workers), so they rebuild from their two sentences.
        return type(self), (self.what, self.next_step)


class ConfigError(NightshiftError):
    """params.yaml does not fit its types."""


class PluginError(NightshiftError):
    """A package that adds a suite, a policy, a reward or a format is missing or faulty."""


class ProjectError(NightshiftError):
    """The project folder cannot be worked in."""


class ServerGone(ProjectError):
    """The Prefect server of a run stopped answering."""


class SimulatorError(NightshiftError):
    """A simulator, its assets or its init states are not usable."""


class StatesNotDrawn(SimulatorError):
    """The stage `states` has not run for these tasks."""


class UnstablePhysics(SimulatorError):
    """The actions of one episode drove the simulation out of bounds."""


class DataError(NightshiftError):
    """An episode or dataset file is damaged or breaks its schema."""


class OtherVersion(DataError):
    """A policy that another version of Nightshift saved, and this one cannot build."""


class CacheError(NightshiftError):
    """DVC refuses."""


class Busy(CacheError):
    """Another run works in this folder."""


class RegistryError(NightshiftError):
    """MLflow has no such model, version or alias."""


class Unreachable(RegistryError):
    """MLflow does not answer: worth another try."""


class RobustnessFell(NightshiftError):
    """A policy does worse under perturbations than the one it is compared with."""


class StreamError(NightshiftError):
    """Episodes or weights cannot travel between actor and learner."""


class RolloutError(NightshiftError):
    """A simulator worker failed."""


class DeviceError(NightshiftError):
    """There is no GPU, or it has not enough memory."""


class Problems(NightshiftError):
    """Several problems at once, so that all can be mended before the next try."""

    @classmethod
    def of(cls, errors: Sequence[NightshiftError]) -> NightshiftError:
        """The error itself if there is one only."""
        if len(errors) == 1:
            return errors[0]
        lines = [f"  - {error.what}\n    → {error.next_step}" for error in errors]
        return cls("\n".join([f"{len(errors)} problems:", *lines]), "mend them and run again")
