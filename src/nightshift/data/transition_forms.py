"""How episodes become transitions of `rlpd`: from decision to decision, or from control step to control step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from nightshift import config
from nightshift.data import intervened
from nightshift.data.decisions import demo_transitions, experience_transitions
from nightshift.data.episode import Episode
from nightshift.data.experience import ExperienceEpisode
from nightshift.data.intervened import Spans
from nightshift.data.replay import ReplaySource, TrajectoryBatch, TrajectoryReplay
from nightshift.data.replay.storage import EpisodeFile
from nightshift.policies.base import Policy


class TransitionForm(Protocol):
    def demo(self, episode: Episode, number: int) -> TrajectoryBatch:
        """The transitions of a demo; `number` is unique in its buffer, here and below."""
        ...

    def experience(self, episode: ExperienceEpisode, number: int) -> Sequence[EpisodeFile]:
        """An episode that was played; none if it has no transition."""
        ...

    def interventions(self, episode: ExperienceEpisode, number: int) -> Sequence[EpisodeFile]:
        """What of it joins the demonstrations, for the critics and the actor's Q; for cloning if that is asked for."""
        ...

    def sources(self, demos: TrajectoryReplay, experience: TrajectoryReplay) -> tuple[ReplaySource, ReplaySource]:
        """Both buffers, with returns of the right length."""
        ...

    def decisions(self, transitions: int) -> int:
        """How many the rate limiter counts for an episode of so many transitions."""
        ...


def transition_form(policy: Policy, settings: config.Rlpd) -> TransitionForm:
    if not settings.interventions.is_on:
        return _OfDecisions(policy, settings.n_step, settings.discount)
    spans = Spans(
        chunk=policy.chunk,
        n_step=settings.n_step,
        discount=settings.discount,
        takeover_fails=settings.interventions.takeover == "fail",
    )
    return _OfSteps(policy, spans, settings.interventions.imitate)


@dataclass(frozen=True)
class _OfDecisions:
    """Nobody can take over: an episode of experience is one of decisions, and the buffers sum up rewards."""

    policy: Policy
    n_step: int
    discount: float

    def demo(self, episode: Episode, number: int) -> TrajectoryBatch:
        return demo_transitions(episode, number, self.policy)

    def experience(self, episode: ExperienceEpisode, number: int) -> Sequence[EpisodeFile]:
        return [_DecisionFile(episode, number, self.policy)]

    def interventions(self, episode: ExperienceEpisode, number: int) -> Sequence[EpisodeFile]:
        return []

    def sources(self, demos: TrajectoryReplay, experience: TrajectoryReplay) -> tuple[ReplaySource, ReplaySource]:
        chunk = self.policy.chunk
        return (
            demos.source(n_step=self.n_step * chunk, discount=self.discount),
            experience.source(n_step=self.n_step, discount=self.discount**chunk),
        )

    def decisions(self, transitions: int) -> int:
        return transitions


@dataclass(frozen=True)
class _OfSteps:
    """Somebody may take over: an episode is one of control steps, and a transition is stored with its return."""

    policy: Policy
    spans: Spans
    imitate: config.Imitate
    """Of interventions."""

    def demo(self, episode: Episode, number: int) -> TrajectoryBatch:
        starts = self.starts(episode, of_interventions=False)
        return self.spans.transitions(episode, number, self.policy, starts, imitate="all")

    def experience(self, episode: ExperienceEpisode, number: int) -> Sequence[EpisodeFile]:
        return self._files(episode, number, of_interventions=False)

    def interventions(self, episode: ExperienceEpisode, number: int) -> Sequence[EpisodeFile]:
        return self._files(episode, number, of_interventions=True)

    def starts(self, episode: Episode, *, of_interventions: bool) -> intervened.Steps:
        chosen = intervened.intervention_starts if of_interventions else intervened.all_starts
        return chosen(episode, self.policy.chunk)

    def _files(self, episode: ExperienceEpisode, number: int, *, of_interventions: bool) -> Sequence[EpisodeFile]:
        count = len(self.starts(episode.load(verify=False), of_interventions=of_interventions))
        return [_StepFile(self, episode, number, count, of_interventions)] if count else []

    def sources(self, demos: TrajectoryReplay, experience: TrajectoryReplay) -> tuple[ReplaySource, ReplaySource]:
        return demos.source(), experience.source()

    def decisions(self, transitions: int) -> int:
        """Every C control steps count as one decision, whoever acted: as many as the policy makes by itself."""
        return -(-transitions // self.policy.chunk)


@dataclass(frozen=True, slots=True)
class _DecisionFile:
    episode: ExperienceEpisode
    number: int
    policy: Policy

    @property
    def num_samples(self) -> int:
        return self.episode.transitions

    def read(self, *, verify: bool) -> TrajectoryBatch:
        return experience_transitions(self.episode.load(verify=verify), self.number, self.policy)


@dataclass(frozen=True, slots=True)
class _StepFile:
    form: _OfSteps
    episode: ExperienceEpisode
    number: int
    num_samples: int
    of_interventions: bool

    def read(self, *, verify: bool) -> TrajectoryBatch:
        episode, form = self.episode.load(verify=verify), self.form
        starts = form.starts(episode, of_interventions=self.of_interventions)
        imitate = form.imitate if self.of_interventions else "none"
        return form.spans.transitions(episode, self.number, form.policy, starts, imitate=imitate)
