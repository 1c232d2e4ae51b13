"""What says that an episode of experience succeeded: the simulator, or a success classifier on what cameras saw.

Another package adds a reward with the entry point `nightshift.rewards`: a class with the methods of `Reward`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np

from nightshift import config, envs, plugins
from nightshift.data.decisions import CONTROL_STEPS, decision_episode
from nightshift.data.episode import Episode
from nightshift.errors import DataError
from nightshift.project import paths
from nightshift.rewards import classifier
from nightshift.rewards.classifier import Trained
from nightshift.types import INSTRUCTION, Observation, Provenance, RolloutRequest, Trajectory

Verdict = Literal["true_positive", "false_positive", "false_negative", "true_negative"]
"""Of the classifier on an episode, by the simulator."""
_VERDICT = "verdict"
"""In the metadata of an episode."""


@runtime_checkable
class Reward(Protocol):
    def request(self, request: RolloutRequest) -> RolloutRequest:
        """The request, with what has to be seen to reward its episodes."""
        ...

    def episode(self, trajectory: Trajectory, provenance: Provenance, discount: float) -> Episode:
        """The episode of decisions that is learned from, with its rewards and its end."""
        ...

    def demo(self, episode: Episode) -> Episode:
        """A demo of control steps with this reward; it comes with 1 at success and 0 before."""
        ...

    def check(self, env: config.Env) -> None:
        """Raise a NightshiftError if it cannot reward episodes of this environment, before any is played."""
        ...


class SimulatorReward:
    """1 at the step in which the simulator reports success, which ends the episode."""

    def request(self, request: RolloutRequest) -> RolloutRequest:
        return request

    def episode(self, trajectory: Trajectory, provenance: Provenance, discount: float) -> Episode:
        return decision_episode(trajectory, provenance, discount)

    def demo(self, episode: Episode) -> Episode:
        return episode

    def check(self, env: config.Env) -> None:
        """Every simulator reports success."""


SIMULATOR = SimulatorReward()


class ClassifierReward:
    """1 at the first decision after which the cameras show success, which ends the episode.

    The simulator's success neither ends an episode nor rewards it: episodes are played to the horizon, and cut where
    the classifier first reports success. One frame is enough, as in HIL-SERL: the threshold was chosen by the highest
    probability of whole episodes, so it accounts for the many chances of one to be wrong.
    """

    def __init__(self, trained: Trained, *, is_judged: bool) -> None:
        """`is_judged`: whether anybody else reports success of what is trained on."""
        self._trained = trained
        self._is_judged = is_judged
        self._cameras = trained.network.cameras

    def request(self, request: RolloutRequest) -> RolloutRequest:
        return replace(request, cameras=tuple(self._cameras), until_horizon=True)

    def episode(self, trajectory: Trajectory, provenance: Provenance, discount: float) -> Episode:
        decisions = self._first_success(trajectory, provenance.language)
        judged = _without(_cut(trajectory, decisions), trajectory.beside)
        episode = decision_episode(judged, provenance, discount)
        metadata = {**episode.metadata, CONTROL_STEPS: trajectory.length}
        if self._is_judged:
            rewarded_after = None if decisions is None else judged.length
            metadata[_VERDICT] = _verdict(trajectory, rewarded_after, self._trained.ambiguous_steps)
        return replace(episode, metadata=metadata)

    def demo(self, episode: Episode) -> Episode:
        """It succeeds at its end, as its dataset says."""
        return episode

    def check(self, env: config.Env) -> None:
        """DataError if it does not know these tasks or what the cameras show."""
        self._trained.check_tasks([task.name for task in envs.tasks(env)])
        shapes = {name: spec.shape for name, spec in envs.observation_space(env).items()}
        self._trained.network.check(shapes, "env.cameras in params.yaml")

    def _first_success(self, trajectory: Trajectory, language: str) -> int | None:
        """After how many decisions; what was seen before the first one is not judged."""
        seen = {
            name: np.concatenate([trajectory.observations[name][1:], trajectory.final[name][None]])
            for name in self._cameras
        }
        frames: Observation = {**seen, INSTRUCTION: np.full(len(seen[self._cameras[0]]), language)}
        scores = self._trained.network.probabilities(frames).astype(np.float64)  # as the threshold was chosen
        (found,) = np.nonzero(scores >= self._trained.threshold)
        return int(found[0]) + 1 if found.size else None


def _cut(trajectory: Trajectory, decisions: int | None) -> Trajectory:
    """The episode that ends with success after `decisions`; None: without success, where it was played to."""
    if decisions is None:
        return replace(trajectory, success=False)
    steps = min(decisions * trajectory.chunk, trajectory.length)
    whole = decisions == len(next(iter(trajectory.observations.values())))
    return replace(
        trajectory,
        observations={name: values[:decisions] for name, values in trajectory.observations.items()},
        final=trajectory.final if whole else {name: v[decisions] for name, v in trajectory.observations.items()},
        actions=trajectory.actions[:steps],
        executed=trajectory.executed[:steps],
        log_probs=trajectory.log_probs[:steps],
        latents={name: values[:decisions] for name, values in trajectory.latents.items()},
        interventions=None if trajectory.interventions is None else trajectory.interventions[:steps],
        success=True,
        unstable=False,
    )


def _without(trajectory: Trajectory, names: Sequence[str]) -> Trajectory:
    """What only the classifier sees is not stored."""
    return replace(
        trajectory,
        observations={name: values for name, values in trajectory.observations.items() if name not in names},
        final={name: values for name, values in trajectory.final.items() if name not in names},
        beside=(),
    )


def _verdict(trajectory: Trajectory, rewarded_after: int | None, ambiguous_steps: int) -> Verdict:
    """A reward is right if the simulator has reported success by then, or does so within the ambiguous steps."""
    solved_after = trajectory.success_step
    if rewarded_after is None:
        return "true_negative" if solved_after is None else "false_negative"
    is_right = solved_after is not None and solved_after <= rewarded_after + ambiguous_steps
    return "true_positive" if is_right else "false_positive"


def verdict_metrics(episodes: Iterable[Episode]) -> dict[str, float]:
    """How many rewards the simulator agrees with; nothing where it gives them itself, or nobody else judges."""
    verdicts = Counter(episode.metadata[_VERDICT] for episode in episodes if _VERDICT in episode.metadata)
    return {f"reward/{verdict}": float(verdicts[verdict]) for verdict in get_args(Verdict)} if verdicts else {}


def open_reward(name: str, env: config.Env) -> Reward:
    """What `rlpd.reward` names: the simulator, the classifier, or a reward of another package."""
    others = plugins.find(plugins.REWARDS, (config.SIMULATOR,))
    if name == config.SIMULATOR:
        return SIMULATOR
    return _of_package(others[name]) if name in others else ClassifierReward(_load(name), is_judged=env.is_judged)


def _of_package(entry: EntryPoint) -> Reward:
    made = plugins.load(entry)
    found = made() if isinstance(made, type) else None
    if not isinstance(found, Reward):
        raise plugins.unfit(entry, "a class with the methods request, episode, demo and check")
    return found


def check_reward(name: str, env: config.Env) -> None:
    """NightshiftError if there is no such reward, or it cannot reward episodes of this environment."""
    open_reward(name, env).check(env)


def _load(name: str) -> Trained:
    found = classifier.name_of(paths.CLASSIFIER)
    if found != name:
        raise DataError(
            f"rlpd.reward is {name}, and {paths.CLASSIFIER} holds {found}",
            f"set rlpd.reward in params.yaml to {found}, or bring the other one back with "
            f"`dvc checkout {paths.CLASSIFIER}.dvc`",
        )
    return classifier.load(paths.CLASSIFIER)
