"""What an off-policy learner samples: demos and experience in a ratio, as often as the update-to-data ratio says.

Every batch, and every slice of it for one gradient step, has the exact share of demos (`data/mixer.py`). A rate limiter
(`data/rate_limiter.py`) counts decisions that came in and gradient steps that were made of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nightshift import config
from nightshift.data.episode import Episode
from nightshift.data.experience import ExperienceEpisode
from nightshift.data.mixer import Mixer
from nightshift.data.rate_limiter import RateLimiter, RateLimits
from nightshift.data.replay import TrajectoryReplay, TransitionBatch
from nightshift.data.transition_forms import transition_form
from nightshift.errors import DataError
from nightshift.policies.base import Policy
from nightshift.telemetry import experience as names

DEMOS, EXPERIENCE = "demos", "experience"
_NO_LIMIT = 2.0**53
"""Whatever was ordered is taken: orders hold actors back (`data/experience.py`), and the limiter the learner."""


class DecisionReplay:
    def __init__(self, policy: Policy, demos: Iterable[Episode], settings: config.Rlpd, *, seed: int) -> None:
        self._settings = settings
        self._form = transition_form(policy, settings)
        self._demos = TrajectoryReplay(seed=seed)
        self._experience = TrajectoryReplay(seed=seed + 1, capacity=settings.window)
        self._episodes = 0
        usable = [episode for episode in demos if episode.length > 1]
        if not usable and settings.demo_share:
            raise DataError("there is no demo to learn from", "set rlpd.demo_share: 0.0, or add demos")
        self._num_demos = len(usable)
        self._demos.add_trajectories([self._form.demo(episode, number) for number, episode in enumerate(usable)])
        self._demo_source, experience = self._form.sources(self._demos, self._experience)
        self._mixer = Mixer({DEMOS: self._demo_source, EXPERIENCE: experience}, self._ratio())
        self._limiter = RateLimiter(
            RateLimits(
                samples_per_insert=settings.utd_ratio,
                min_size_to_sample=settings.training_starts,
                min_diff=settings.utd_ratio * settings.training_starts,
                max_diff=_NO_LIMIT,
            )
        )

    def _ratio(self) -> dict[str, float]:
        """Of the sources. Pooled, their transitions are all sampled equally often, to within half a row per update."""
        share = self._settings.demo_share
        if isinstance(share, str):
            share = self._demos.total_samples / (self._demos.total_samples + self._experience.total_samples)
        return {DEMOS: share, EXPERIENCE: 1 - share}

    @property
    def episodes(self) -> int:
        """Of experience, so far; with a window only the newest of them are held."""
        return self._episodes

    @property
    def decisions(self) -> int:
        """Of experience, so far."""
        return self._limiter.state_dict()["inserts"]

    @property
    def demo_transitions(self) -> int:
        return self._demos.total_samples

    def add(self, episode: ExperienceEpisode) -> int:
        """Learn from this episode, too; its number of decisions. Interventions become demos as well, and count once."""
        decisions = self._form.decisions(episode.transitions)
        self._limiter.wait_for_insert(decisions)
        self._insert([episode])
        return decisions

    def _insert(self, episodes: Iterable[ExperienceEpisode]) -> None:
        """Episodes stay in their files, which are mapped while they are sampled; those beyond the window are let go.

        Their interventions stay: they are demos from then on.
        """
        numbered = list(enumerate(episodes, self._episodes))
        self._episodes += len(numbered)
        for number, episode in numbered:
            self._demos.add_files(self._form.interventions(episode, self._num_demos + number))
        for number, episode in numbered[-self._settings.window :]:
            self._experience.add_files(self._form.experience(episode, number))
        if self._settings.demo_share == "pooled":
            self._mixer.mix(self._ratio())

    @property
    def is_update_due(self) -> bool:
        """Whether fewer updates were made than decisions came in after the first `training_starts`."""
        return self._limiter.can_sample(self._settings.utd_ratio)

    def sample(self) -> TransitionBatch:
        """The slices of one update, one after the other."""
        with self._limiter.sampling(self._settings.utd_ratio, timeout=0):
            return self._mixer.sample(self._settings.batch_size, self._settings.utd_ratio)

    def sample_demos(self) -> TransitionBatch:
        """The slices of one update on demos alone; it does not count against the ratio."""
        return self._demo_source.sample(self._settings.batch_size * self._settings.utd_ratio)

    def metrics(self) -> dict[str, float]:
        counted = self._limiter.state_dict()
        return {
            names.DECISIONS: float(self.decisions),
            names.EPISODES: float(self.episodes),
            names.UTD_RATIO: counted["samples"] / max(counted["inserts"], 1),
            **self._limiter.metrics(),
        }

    def state(self) -> dict[str, Any]:
        """JSON of everything but the episodes."""
        return {
            "episodes": self.episodes,
            "demos": self._demos.random_state.hex(),
            "experience": self._experience.random_state.hex(),
            "mixer": self._mixer.state_dict(),
            "limiter": self._limiter.state_dict(),
        }

    def restore(self, state: Mapping[str, Any], episodes: Sequence[ExperienceEpisode]) -> None:
        """Continue with what `state` returned, and the episodes that had been added by then, in that order."""
        if len(episodes) != state["episodes"]:
            raise DataError(
                f"{len(episodes)} episodes of experience are there, and the checkpoint counts {state['episodes']}",
                "remove the folder of checkpoints and run again",
            )
        self._insert(episodes)
        self._demos.random_state = bytes.fromhex(state["demos"])
        self._experience.random_state = bytes.fromhex(state["experience"])
        self._mixer.load_state_dict(state["mixer"])
        self._limiter.load_state_dict(state["limiter"])
