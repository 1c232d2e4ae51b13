"""The types of params.yaml: one frozen model per section. `load` is the only reader of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from nightshift.errors import ConfigError

Count = Annotated[int, Field(ge=1, strict=True)]
Natural = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(gt=0, lt=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Name = Annotated[str, Field(min_length=1)]


def _unique(names: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(names)) < len(names):
        raise ValueError("names one thing twice")
    return names


Names = Annotated[tuple[Name, ...], AfterValidator(_unique)]

Auto = Literal["auto"]
"""Let the evaluation protocol say."""


def _count_or_auto(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError("should be a whole number from 1 on, or auto")


CountOrAuto = Annotated[int | Auto, BeforeValidator(_count_or_auto)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Machine(Section):
    """How to run, never what comes out."""

    workers: Natural
    """Simulator processes; 0 runs them in this process."""


class Env(Section):
    suite: Name
    tasks: Names
    """A subset of the suite; empty means all of it."""
    protocol: Name
    """Which published way of playing LIBERO; envs/protocols.py has the table."""
    horizon: CountOrAuto
    """Control steps until an episode counts as failed; auto takes the protocol's for the suite."""


class States(Section):
    per_task: Count
    """Training init states drawn for each task of a suite that ships none."""
    validation_share: Share
    """Share of a task's training states that no demo and no RL group starts from: training stages validate on them."""


class Collect(Section):
    demos_per_task: Annotated[int, Field(ge=2, strict=True)]
    """At least two: one to train on and one to validate with."""
    attempts: Count
    """At most this many expert episodes per demo wanted."""
    disturbance: NonNegative
    """Standard deviation of noise on what the expert's hand does, not on what is recorded of the expert."""


class Dataset(Section):
    sources: Annotated[Names, Field(min_length=1)]
    """Where episodes come from: "demos" are those of the stage collect, any other name is an import."""
    validation_share: Share
    """Share of the init states whose episodes are held back from behaviour cloning."""


class Policy(Section):
    inputs: Annotated[Names, Field(min_length=1)]
    """Names of the observations the policy sees, in order."""
    hidden: Annotated[tuple[Count, ...], Field(min_length=1)]
    chunk: Count
    """Actions per decision: the policy looks, plays them all, and looks again."""


class Sft(Section):
    steps: Count
    batch_size: Count
    learning_rate: Positive
    checkpoint_every: Count


class Clip(Section):
    """How far the ratio of new to old probability may move and still earn anything."""

    low: Annotated[float, Field(gt=0, lt=1, strict=True)]
    high: Positive
    dual: Annotated[float, Field(gt=1, allow_inf_nan=False, strict=True)] | None
    """Bounds the loss of an action that went badly and became this much likelier; null does not."""
    log_ratio: Positive | None
    """Bounds the logarithm of the ratio; null does not."""


class Kl(Section):
    """A penalty for leaving the policy that training started from."""

    weight: NonNegative
    form: Literal["k1", "k2", "k3", "abs"]
    target: Positive | None
    """Adapt the weight so that the distance stays about this; null keeps the weight."""
    horizon: Count
    """Over how many episodes an adaptive weight reacts."""


class Critic(Section):
    """What GAE needs; used where advantage is gae."""

    hidden: Annotated[tuple[Count, ...], Field(min_length=1)]
    learning_rate: Positive
    discount: Annotated[float, Field(gt=0, le=1, strict=True)]
    decay: Annotated[float, Field(ge=0, le=1, strict=True)]
    """GAE's λ: 0 trusts the critic, 1 the outcome."""


class Optimizer(Section):
    learning_rate: Positive
    weight_decay: NonNegative
    warmup: Natural
    """Gradients until the learning rate is reached."""
    decay: Literal["constant", "cosine"]
    gradient_norm: Positive


class Sampling(Section):
    """Which groups an iteration learns from."""

    tasks_at_once: Natural
    """Tasks that one iteration plays before the next iteration moves on to the next ones; 0 = all."""
    keep_from: Annotated[float, Field(ge=0, le=1, strict=True)]
    keep_to: Annotated[float, Field(ge=0, le=1, strict=True)]
    """A group is kept if its success rate lies between the two, both included."""
    waves: Count
    """Of groups per iteration: after the first, as many as are still missing."""
    oversample: Annotated[float, Field(ge=1, allow_inf_nan=False, strict=True)]
    """Ask for this many times the groups that are missing. Who is left over is counted, and not learned from: the next
    update is another policy's."""
    when_short: Literal["train", "skip"]
    """If all waves leave groups missing: train on what there is, or end the iteration without an update."""
    skip_solved: Natural
    """Pass over an init state that a whole group solved until it has come up this often again."""
    staleness: Literal[0, 1]
    """Updates between the policy that plays and the one that learns: 1 plays the next iteration during the update."""
    curriculum_floor: Annotated[float, Field(gt=0, le=1, strict=True)]
    """Groups of a task that is always or never solved, relative to one that is solved half the time: 1 plays all tasks
    alike. It must be high enough to notice when a solved task is forgotten."""

    @model_validator(mode="after")
    def _consistent(self) -> Sampling:
        if self.keep_from > self.keep_to:
            raise ValueError("keep_from is above keep_to: no group could be kept")
        if self.oversample > 1 and (self.keep_from, self.keep_to) == (0, 1):
            raise ValueError("oversample above 1 wastes episodes while keep_from and keep_to keep every group")
        return self


class Validation(Section):
    """How a training stage chooses the policy that it hands on."""

    every: Count
    """Iterations between two plays of the greedy policy on the validation states."""
    level: Annotated[float, Field(gt=0, lt=1, strict=True)]
    """The best trained policy is handed on if a paired one-sided sign test finds it better than the start at this
    level; otherwise the start is."""


class Rloo(Section):
    iterations: Count
    groups: Count
    """Init states per iteration that are learned from, no more and no fewer, taken in turn from every task."""
    group_size: Annotated[int, Field(ge=2, strict=True)]
    """Episodes per init state; a leave-one-out baseline needs at least two."""
    ranks: Count
    """Processes that share the update; tasks are dealt out to them in turn."""
    sampling: Sampling
    validation: Validation
    temperature: Positive
    """Width of exploration, in standard deviations of the demos' actions."""
    learn_width: Flag
    """Whether gradients change the width as well."""
    advantage: Literal["rloo", "rloo_batch", "grpo", "reinforce++", "gae"]
    level: Literal["token", "action", "chunk"]
    """What a ratio is taken of: one dimension of an action, an action, or a chunk of actions."""
    average: Literal["step", "episode"]
    """Whether every step weighs the same, or every episode."""
    clip: Clip
    old_log_probs: Literal["rollout", "recomputed"]
    kl: Kl
    entropy: NonNegative
    """Weight of a bonus for being undecided; needs learn_width."""
    imitation: NonNegative
    """Weight of the cloning loss on the demos."""
    critic: Critic
    epochs: Count
    mini_batch: Count
    """Decisions per gradient."""
    micro_batch: Count
    """Decisions at a time in memory; never changes the result."""
    optimizer: Optimizer
    kl_limit: Positive | None
    """An iteration's update ends when it has moved the policy this far, measured on the whole batch after every
    gradient; null sets no limit, and measures once, at the end."""

    @model_validator(mode="after")
    def _consistent(self) -> Rloo:
        if self.entropy and not self.learn_width:
            raise ValueError("entropy has no effect while learn_width is false: the width alone decides it")
        if self.kl.target is not None and not self.kl.weight:
            raise ValueError("kl.target has no effect while kl.weight is 0: give a weight to adapt")
        return self


class Evaluate(Section):
    init_states: CountOrAuto
    """Held-out init states per task, each counted once; auto takes the protocol's number."""
    temperature: NonNegative
    """0 is greedy: the policy's mean action. Above, actions are sampled as training would at that temperature."""
    film_frames: Natural
    """Frames in the film strip of each task; 0 = no films."""


class Register(Section):
    model: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    level: Annotated[float, Field(gt=0, le=0.5, strict=True)]
    """A policy becomes champion if its one-sided exact p is at most this; at 0.5 one state more is enough."""


class Params(Section):
    seed: Natural
    machine: Machine
    env: Env
    states: States
    collect: Collect
    dataset: Dataset
    policy: Policy
    sft: Sft
    rloo: Rloo
    evaluate: Evaluate
    register_: Register = Field(alias="register")

    def section(self, name: str) -> Any:
        """The section (or plain value) that params.yaml calls `name`."""
        return getattr(self, "register_" if name == "register" else name)


def load(path: Path) -> Params:
    """Read params.yaml; one ConfigError lists everything that is wrong with it."""
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist", "run from the project's root") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}", "mend the line that it names") from None
    try:
        return Params.model_validate(raw if isinstance(raw, dict) else {})
    except ValidationError as error:
        problems = "\n".join(f"  - {_where(e['loc'])}: {_what(e)}" for e in error.errors())
        count = error.error_count()
        noun = "problem" if count == 1 else "problems"
        raise ConfigError(f"{path.name} has {count} {noun}:\n{problems}", f"edit {path} and run again") from None


def _where(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location)


def _what(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown key (value {error['input']!r})"
    if error["type"] == "missing":
        return "missing"
    message = error["msg"][0].lower() + error["msg"][1:]
    hint = ""
    if isinstance(error["input"], str) and "number" in message and "e" in error["input"]:
        hint = " (YAML reads 3e-4 as text: write 3.0e-4)"
    return f"{message}, got {error['input']!r}{hint}"
