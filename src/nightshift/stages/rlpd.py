"""Off-policy reinforcement learning from demos and experience: play, store what was played, learn from both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import scipy.stats  # noqa: F401 - the intervals at the end need it: if it is not installed, that is told now
import torch

from nightshift import config, envs, files, policies
from nightshift.algorithms.rlpd.learner import Metrics, RlpdLearner, mean_entropy
from nightshift.algorithms.rlpd.transitions import Transitions, from_replay
from nightshift.data import dataset_store
from nightshift.data.decision_replay import DecisionReplay
from nightshift.data.decisions import CONTROL_STEPS, policy_inputs, solved_at_end
from nightshift.data.experience import Experience, without_ordered
from nightshift.envs.splits import check_validation_states, split_training_states
from nightshift.interventions.metrics import intervention_metrics
from nightshift.interventions.opening import check_person
from nightshift.learners import checkpoint
from nightshift.learners.checkpoint import Checkpoint
from nightshift.pipeline.job import Job
from nightshift.policies import device
from nightshift.policies.base import Policy
from nightshift.policies.heads import HeadPolicy
from nightshift.policies.snapshot import PolicySnapshot, restore, snapshot
from nightshift.project import paths
from nightshift.rewards.reward import Reward, open_reward, verdict_metrics
from nightshift.rollouts.validation import BY_SIMULATOR, Judge, Selection, Validator, without_best
from nightshift.stages._actor import Recorder
from nightshift.stages._experience import open_experience
from nightshift.telemetry import experience as names
from nightshift.telemetry import gpu, progress
from nightshift.telemetry.stopwatch import Stopwatch
from nightshift.types import Controller

_PLAY, _UPDATE = "time/play", "time/update"


def run(job: Job, *, seed: int, env: config.Env, states: config.States, rlpd: config.Rlpd) -> None:
    torch.set_num_threads(1)  # one order of summation on every machine: the same weights everywhere
    files.verify_folder(paths.SFT_POLICY, f"rm -r {paths.SFT_POLICY} and run again")
    cloned = policies.load(paths.SFT_POLICY)
    envs.check_whole_decisions(env, cloned.chunk)
    reward = open_reward(rlpd.reward, env)
    reward.check(env)
    check_person(rlpd.interventions, job.machine)
    splits = {task.name: split_training_states(task, states) for task in envs.tasks(env)}
    check_validation_states(splits, rlpd.validation.level, "rlpd.validation.level")
    data = dataset_store.read(paths.DATASET)
    start = _start(cloned, data, rlpd, seed).to(device.resolve(job.machine.device))
    base_entropy = _entropy_on_demos(start, data) if rlpd.entropy.relative else 0.0
    learner, begun = RlpdLearner(start, rlpd, seed=seed, base_entropy=base_entropy), snapshot(start)
    demos = (reward.demo(solved_at_end(demo)) for demo in data.episodes("train"))
    replay = DecisionReplay(start, demos, rlpd, seed=seed)
    pool = job.pool(env)
    selection = Selection(Validator(pool, splits, _judge(job, env, rlpd, reward)), begun)
    with (
        open_experience(job, pool, seed=seed, env=env, states=states, rlpd=rlpd) as experience,
        device.out_of_memory_advice("rlpd.batch_size"),
    ):
        training = _Training(learner, replay, experience, selection)
        _train(job, training, rlpd)
    kept = selection.kept(rlpd.validation.level)
    job.tracker.log({"validation/kept_iteration": float(kept.iteration)}, training.replay.decisions)
    with files.new_folder(paths.RLPD_POLICY) as folder:
        policies.save(restore(selection.best if kept.iteration else begun, start.device), folder)
        rate = {"control_hz": envs.suite(env.suite).control_hz}
        history = {"algorithm": "rlpd", "iterations": training.history, **rate}
        files.write_json(folder / paths.HISTORY, {**history, **selection.to_json(rlpd.validation.level)})


@dataclass
class _Training:
    """What a run consists of; all of it is in every checkpoint."""

    learner: RlpdLearner
    replay: DecisionReplay
    experience: Experience
    selection: Selection
    history: list[dict[str, float]] = field(default_factory=list)
    """Metrics of every round of episodes."""

    def policy(self) -> PolicySnapshot:
        return snapshot(self.learner.policy, version=len(self.history))

    def averaged_policy(self) -> PolicySnapshot:
        return snapshot(self.learner.averaged, version=len(self.history))


def _judge(job: Job, env: config.Env, rlpd: config.Rlpd, reward: Reward) -> Judge:
    """What decides success in validation: the simulator or the robot's server, or the reward if neither reports it."""
    if env.robot is None or env.robot.success != "none":
        return BY_SIMULATOR
    recorder = Recorder(tasks=envs.tasks(env), discount=rlpd.discount, reward=reward, commit=job.commit)
    return Judge(request=reward.request, is_success=lambda episode: recorder(episode).success)


def _start(cloned: Policy, data: dataset_store.EpisodeDataset, rlpd: config.Rlpd, seed: int) -> HeadPolicy:
    """The clone, or fresh weights of the same network."""
    assert isinstance(cloned, HeadPolicy)
    if rlpd.actor.start == "clone":
        return cloned
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = policies.build(cloned.spec)
    fresh.normalise_by(data.statistics)
    assert isinstance(fresh, HeadPolicy)
    return fresh


def _entropy_on_demos(policy: HeadPolicy, data: dataset_store.EpisodeDataset) -> float:
    seen = (policy_inputs(episode, policy) for episode in data.episodes("train"))
    return mean_entropy(policy, ({name: torch.tensor(column[:-1]) for name, column in one.items()} for one in seen))


def _train(job: Job, training: _Training, rlpd: config.Rlpd) -> None:
    """Rounds of playing and learning until enough decisions were played."""
    if not _resume(job, training):
        _validate(job, training)
        _warm_up(training, rlpd)
        _save(job, training)
    decisions = training.replay.decisions
    with progress.bar("rlpd", total=rlpd.steps, done=decisions) as advance:
        while decisions < rlpd.steps:
            before, found = decisions, _round(training, rlpd, advance)
            decisions = training.replay.decisions
            training.history.append(found.metrics)
            job.tracker.log({**found.metrics, **found.times, **gpu.sample()}, decisions)
            if _is_due(before, decisions, rlpd.validation.every, rlpd.steps):
                _validate(job, training)
            if _is_due(before, decisions, job.machine.checkpoint_every.rlpd_decisions, rlpd.steps):
                _save(job, training)


def _is_due(before: int, now: int, every: int, end: int) -> bool:
    """What happens once for `every` so many decisions, and at the end."""
    return now >= end or now // every > before // every


@dataclass(frozen=True)
class _Round:
    """The metrics of one."""

    metrics: dict[str, float]
    """The same whenever it is repeated: they are the history, which later stages depend on."""
    times: dict[str, float]
    """What depends on the clock: seconds, speeds, and the queues of the actors."""


def _round(training: _Training, rlpd: config.Rlpd, advance: progress.Advance) -> _Round:
    """Play some episodes, and make the updates that their decisions allow."""
    watch, replay = Stopwatch(), training.replay
    controller: Controller = "random" if replay.decisions < rlpd.random_steps else "sample"
    with watch.timing(_PLAY):
        played = training.experience.play(training.policy(), controller)
    loaded = [episode.load() for episode in played.episodes]
    success = sum(episode.success for episode in loaded) / len(loaded)
    decisions = [replay.add(episode) for episode in played.episodes]
    for _ in range(sum(decisions)):
        advance(f"success {success:.0%}")
    with watch.timing(_UPDATE):
        updates = [training.learner.update(batch) for batch in _batches(replay)]
    control_steps = sum(episode.metadata[CONTROL_STEPS] for episode in loaded)
    return _Round(
        metrics={
            names.SUCCESS: success,
            names.LENGTH: sum(decisions) / len(loaded),
            names.INVALID: float(played.invalid),
            names.WEIGHT_AGE: float(played.weight_age),
            **verdict_metrics(loaded),
            **(intervention_metrics(loaded) if rlpd.interventions.is_on else {}),
            **_mean(updates),
            "actor/target_entropy": training.learner.target_entropy,
            **replay.metrics(),
        },
        times={
            names.WEIGHT_AGE_SECONDS: played.weight_age_seconds,
            names.ENV_STEPS_PER_SECOND: control_steps / (watch.seconds[_PLAY] + watch.seconds[_UPDATE]),
            names.GRADIENT_STEPS_PER_SECOND: len(updates) * rlpd.utd_ratio / watch.seconds[_UPDATE],
            **training.experience.metrics(),
            **watch.seconds,
        },
    )


def _batches(replay: DecisionReplay) -> Iterator[Transitions]:
    """One for every update that is due. The next one is sampled while the learner works on the present one."""
    with ThreadPoolExecutor(1) as sampler:
        waiting = sampler.submit(replay.sample) if replay.is_update_due else None
        while waiting is not None:
            batch = waiting.result()
            waiting = sampler.submit(replay.sample) if replay.is_update_due else None
            yield from_replay(batch)


def _warm_up(training: _Training, rlpd: config.Rlpd) -> None:
    """Critics and temperature learn from demos first: untrained critics would pull the actor away from its start."""
    with progress.bar("warm-up", total=rlpd.warmup_steps) as advance:
        for _ in range(rlpd.warmup_steps):
            training.learner.update(from_replay(training.replay.sample_demos()), train_actor=False)
            advance("")


def _mean(updates: Sequence[Metrics]) -> dict[str, float]:
    """Of every metric, over the updates that have it."""
    found = {name for metrics in updates for name in metrics}
    return {
        name: torch.stack([metrics[name] for metrics in updates if name in metrics]).mean().item()
        for name in sorted(found)
    }


def _validate(job: Job, training: _Training) -> None:
    found = training.selection.validate(training.averaged_policy(), len(training.history))
    job.tracker.log({"validation/success": found.success_rate}, training.replay.decisions)


def _save(job: Job, training: _Training) -> None:
    state = {
        "history": training.history,
        "selection": training.selection.state,
        "experience": training.experience.state,
        "replay": training.replay.state(),
    }
    tensors = {**training.learner.state(), **training.selection.tensors, **training.experience.tensors}
    checkpoint.save(job.state, Checkpoint(step=len(training.history), tensors=tensors, state=state))


def _resume(job: Job, training: _Training) -> bool:
    """Restore the newest complete checkpoint; False without one."""
    newest = checkpoint.newest(job.state)
    if newest is None:
        return False
    training.learner.restore(without_best(without_ordered(newest.tensors)))
    training.selection.restore(newest.tensors, newest.state["selection"])
    training.experience.restore(newest.state["experience"], newest.tensors)
    training.replay.restore(newest.state["replay"], training.experience.episodes())
    training.history = list(newest.state["history"])
    return True
