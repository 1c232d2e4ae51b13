"""What processes exchange: frozen dataclasses of plain values and numpy arrays.

Shapes stand in comments: T steps of an episode, K decisions, A action dimensions, D features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Observation = Mapping[str, NDArray[Any]]
"""Arrays by their name in the suite's observation space: state vectors float32 [D], camera images uint8 [H, W, 3], and
texts, str []. Several observations side by side have an axis more, in front."""

Latents = Mapping[str, NDArray[Any]]
"""What a policy drew or computed on the way to its actions, by name, where the update needs it: the denoising chain of
a flow policy, features of images. Most policies have none. policies/arrays.py has their dtypes."""

GRIPPER_OPEN, GRIPPER_CLOSED = -1.0, 1.0
"""What the gripper is told, in the last dimension of an action, as LIBERO takes it."""

INSTRUCTION = "instruction"
"""The name of the observation that is the task's instruction, a text."""
SIMULATOR_STATE = "simulator_state"
"""The observation in the place of images that are drawn later: all that they show, float64 [D]."""

Split = Literal["train", "validation", "eval"]
"""Which frozen init states. Demos and RL groups start from "train" states only. "validation" states are training states
that are set aside, with the same numbering; evaluation alone plays "eval"."""

Controller = Literal["expert", "greedy", "sample", "random"]
"""What acts: the scripted expert, the policy's mean action, a sample from the policy, or a uniform draw from [-1, 1] in
the place of the policy."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a suite.

    Example: Task(suite="libero_mini", name="lift_cube", language="lift the cube", index=0, suite_size=6)
    """

    suite: str
    name: str
    language: str
    index: int
    suite_size: int


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where an episode came from, complete enough to play it again."""

    source: str  # "expert", "policy", "human", or the format it was imported from
    suite: str
    task: str
    language: str
    split: Split
    init_state: int | None  # None: not one of ours, so `origin` tells it apart
    seed: int | None
    versions: Mapping[str, str]  # mujoco, robosuite, libero, nightshift
    commit: str
    disturbance: float = 0.0
    origin: str = ""  # file of an import and the place there; run, actor, epoch and number; or perturbations


InterventionSource = Literal["scripted", "keyboard", "gamepad", "spacemouse", "browser"]
"""Who may take over while a policy acts: the scripted expert, or a person with an input device or at a web page."""


@dataclass(frozen=True, kw_only=True)
class InterventionSettings:
    """The section `rlpd.interventions` of params.yaml, for the process that plays."""

    source: InterventionSource
    stall_steps: int
    stall_distance: float
    stray_steps: int
    stray_distance: float
    hold_steps: int
    release_seconds: float


@dataclass(frozen=True, kw_only=True)
class PerturbationSpec:
    """How the world of an episode differs from the suite's: envs/perturbations.

    Example: PerturbationSpec(name="action_delay", strength=2.0)
    """

    name: str
    strength: float  # from 0, which changes nothing, to 5
    instruction: str = ""  # of language_instructions: what the policy is told instead


@dataclass(frozen=True, kw_only=True)
class RolloutRequest:
    """One group: `count` episodes of one task from one init state. The unit of work of a pool.

    The result depends on this request and the policy's weights alone, not on the worker or the time.
    """

    task: str
    split: Split
    init_state: int
    controller: Controller
    seed: int
    count: int = 1
    temperature: float = 1.0  # of the distribution that "sample" draws from
    disturbance: float = 0.0  # standard deviation of noise added to actions on their way to the simulator
    frames_every: int = 0  # keep a rendered frame every so many steps; 0 keeps none
    cameras: tuple[str, ...] = ()  # to record beside what the policy sees
    until_horizon: bool = False  # play on after success: another judge than the simulator ends the episode
    interventions: InterventionSettings | None = None  # who may take over; the episode is recorded step by step
    perturbations: tuple[PerturbationSpec, ...] = ()  # in this order; drawn from task, state and seed alone

    @property
    def place(self) -> str:
        """For people. Example: lift_cube, state 3, under action_noise 2"""
        under = ", ".join(f"{spec.name} {spec.strength:g}" for spec in self.perturbations)
        return f"{self.task}, state {self.init_state}" + (f", under {under}" if under else "")


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """One episode as it was played."""

    request: RolloutRequest
    member: int  # position in the group
    observations: Observation  # each [K, …]: what was seen at each of K decisions, before steps 0, chunk, 2 chunk, …
    final: Observation  # what the last action led to; if unstable, what the last decision was made on, so finite
    actions: Array  # [T, A] as the policy chose them, before the simulator clips
    executed: Array  # [T, A] as the simulator executed them: disturbed and clipped
    log_probs: Array  # [T, A] of `actions` under the acting policy; zeros for the expert
    chunk: int  # actions per decision
    success: bool
    unstable: bool = False  # the actions drove the physics unstable: a failure, and terminal
    version: int = 0  # of the policy that acted: its number of updates
    latents: Latents = field(default_factory=dict)  # each [K, …]
    success_step: int | None = None  # control steps until the simulator first reported success
    interventions: NDArray[np.bool_] | None = None  # [T] steps in which another acted; None: nobody could take over
    beside: tuple[str, ...] = ()  # the observations that the policy did not see: from `request.cameras`
    valid: bool = True  # False: the simulator itself failed, so the episode says nothing about the controller
    frames: NDArray[np.uint8] | None = None  # [F, H, W, 3]
    reached: Mapping[str, float] = field(default_factory=dict)  # strengths that a scene had less room for, by name

    @classmethod
    def lost(cls, request: RolloutRequest, member: int) -> Trajectory:
        """The episode of a simulator that failed: no steps, and invalid."""
        return cls(
            request=request,
            member=member,
            observations={},
            final={},
            actions=np.zeros((0, 0), np.float32),
            executed=np.zeros((0, 0), np.float32),
            log_probs=np.zeros((0, 0), np.float32),
            chunk=1,
            success=False,
            valid=False,
        )

    @property
    def length(self) -> int:
        return len(self.actions)

    @property
    def clipped_steps(self) -> int:
        """Steps in which the simulator executed another action than was chosen: it clips to its action space."""
        changed = (self.actions != self.executed).any(axis=1)
        return int((changed if self.interventions is None else changed & ~self.interventions).sum())


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """N boxes in the world: what an object collides with."""

    centres: NDArray[np.float64]  # [N, 3]
    axes: NDArray[np.float64]  # [N, 3, 3] their rotations: one axis per column
    half_sizes: NDArray[np.float64]  # [N, 3]


@dataclass(frozen=True, kw_only=True)
class Body:
    """An object of the scene as the expert sees it."""

    position: NDArray[np.float64]  # [3]
    rotation: NDArray[np.float64]  # [3, 3]
    half_size: NDArray[np.float64]  # [3] of the axis-aligned box around it, in its own frame
    boxes: Boxes | None = None  # its collision shape; None for a region, which collides with nothing


@dataclass(frozen=True, kw_only=True)
class Joint:
    """A slide or a hinge of the scene: a drawer, a door, a knob."""

    kind: Literal["slide", "hinge"]
    position: float  # metres or radians
    limits: tuple[float, float]
    axis: NDArray[np.float64]  # [3] of unit length: the way it slides, or the line it turns about
    anchor: NDArray[np.float64]  # [3] a point on that line
    link: Boxes  # the collision shape of what it moves
    holds: Mapping[str, tuple[float, float]]  # between which positions a BDDL predicate holds, by its name


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Privileged state, for the scripted expert and not for a policy."""

    gripper_position: NDArray[np.float64]  # [3] between the finger tips
    gripper_rotation: NDArray[np.float64]  # [3, 3]
    gripper_opening: float  # metres between the finger pads
    bodies: Mapping[str, Body]  # objects, fixtures and target sites by their BDDL name
    joints: Mapping[str, Joint]  # of drawers, doors and knobs, by the BDDL name of their region or fixture
    goal: tuple[tuple[str, ...], ...]  # BDDL predicates, e.g. (("on", "cube_1", "plate_1"),)
    robot_position: NDArray[np.float64] | None = None  # [3] of the arm's base; None: it reaches everywhere
