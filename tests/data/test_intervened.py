"""What is learned from an episode in which somebody took over: segments stay segments, and gaps stay gaps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nightshift.algorithms.rlpd.transitions import from_replay
from nightshift.data.decision_replay import DEMOS, DecisionReplay
from nightshift.data.decisions import decision_episode, demo_transitions
from nightshift.data.episode import Episode
from nightshift.data.intervened import Spans, all_starts, intervention_starts
from nightshift.data.mixer import SOURCE
from nightshift.data.replay import TrajectoryReplay
from nightshift.data.replay.validation import check
from nightshift.errors import DataError
from tests.algorithms.rlpd.parts import settings
from tests.data.test_decision_replay import DEMO, Held, same
from tests.data.test_decisions import DISCOUNT, PROVENANCE, policy, trajectory

SCRIPTED = {"interventions": {"source": "scripted"}}


def played(flags: str, *, success: bool) -> Episode:
    """Steps by who acted, P for the policy and H for somebody else. What is seen before step t is t; [t, -t] was
    executed, and the policy wanted half more."""
    flagged = np.array([one == "H" for one in flags])
    episode = decision_episode(
        replace(trajectory(len(flags), 1, success=success), interventions=flagged), PROVENANCE, DISCOUNT
    )
    assert episode.interventions[:-1].tolist() == flagged.tolist()
    return episode


def spans(chunk: int, n_step: int) -> Spans:
    return Spans(chunk=chunk, n_step=n_step, discount=DISCOUNT, takeover_fails=False)


def ends(flags: str, chunk: int, n_step: int, *, success: bool = True) -> dict[int, int]:
    episode = played(flags, success=success)
    starts = all_starts(episode, chunk)
    return dict(zip(starts.tolist(), spans(chunk, n_step).ends(episode, starts).tolist(), strict=True))


def test_a_return_ends_at_both_borders_of_an_intervention() -> None:
    assert ends("PPPHHHPPP", chunk=1, n_step=3) == {0: 3, 1: 3, 2: 3, 3: 6, 4: 6, 5: 6, 6: 9, 7: 9, 8: 9}
    assert ends("PPPHHHPPP", chunk=1, n_step=1) == {t: t + 1 for t in range(9)}


def test_a_chunk_spans_all_its_actions_whoever_chose_them_and_ends_at_the_next_border() -> None:
    found = ends("PPPHHHPPP", chunk=2, n_step=2)
    assert found[1] == 3, "the policy's own two actions; then somebody takes over"
    assert found[2] == 6, "mixed: both actions count, and the return goes on to where the policy gets control back"
    assert found[5] == 9, "mixed at the other border"


def test_after_a_time_limit_a_chunk_that_was_not_finished_is_no_transition() -> None:
    assert list(ends("PPHH", chunk=3, n_step=1, success=False)) == [0, 1]
    assert list(ends("PPHH", chunk=3, n_step=1, success=True)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("chunk", "n_step", "failing"), [(1, 1, [1, 5]), (1, 3, [0, 1, 4, 5]), (2, 1, [0, 4])])
def test_where_a_takeover_counts_as_failure_no_value_follows_it(chunk: int, n_step: int, failing: list[int]) -> None:
    """The step at which somebody lets go, and the time limit, are none."""
    episode = played("PPHHPPHH", success=False)
    starts = all_starts(episode, chunk)
    strict = replace(spans(chunk, n_step), takeover_fails=True)
    found = strict.transitions(episode, 0, policy(chunk), starts, imitate="none")
    assert starts[found.terminations[:, 0]].tolist() == failing
    lenient = spans(chunk, n_step).transitions(episode, 0, policy(chunk), starts, imitate="none")
    assert not lenient.terminations.any()
    assert found.next is not None
    assert lenient.next is not None
    assert np.array_equal(found.next, lenient.next)


@pytest.mark.parametrize(
    ("flags", "chunk", "success", "starts"),
    [
        ("PHHPPHHHP", 1, False, [1, 2, 5, 6, 7]),
        ("PHHPPHHHP", 2, False, [1, 5, 6]),
        ("PHHPPHHHP", 3, False, [5]),
        ("PPPPHHHHH", 3, False, [4, 5, 6]),
        ("PPPPHHHHH", 3, True, [4, 5, 6, 7, 8]),
        ("PPPPP", 1, True, []),
    ],
)
def test_demonstrations_are_the_chunks_that_are_somebody_elses_to_the_last_action(
    flags: str, chunk: int, success: bool, starts: list[int]
) -> None:
    assert intervention_starts(played(flags, success=success), chunk).tolist() == starts


@given(
    flags=st.text("PH", min_size=1, max_size=14),
    chunk=st.integers(1, 3),
    n_step=st.integers(1, 4),
    success=st.booleans(),
)
def test_no_transition_of_a_demonstration_spans_a_gap_and_none_credits_another(
    flags: str, chunk: int, n_step: int, success: bool
) -> None:
    episode = played(flags, success=success)
    for starts, of_demos in ((all_starts(episode, chunk), False), (intervention_starts(episode, chunk), True)):
        if not len(starts):
            continue
        rows = spans(chunk, n_step).transitions(episode, 0, policy(chunk), starts, imitate="all")
        check(rows)
        assert rows.next is not None
        for row, (start, end) in enumerate(zip(starts.tolist(), rows.next[:, 0].tolist(), strict=True)):
            spanned = flags[start:end]
            assert len(set(spanned[max(chunk - 1, 0) :])) <= 1, "beyond its chunk a return stays with who acts"
            assert not (of_demos and "P" in spanned)
            assert rows.curr[row, 0] == start
            assert end - start >= min(chunk, len(flags) - start)
            discount = rows.forward_inputs["discounts"][row, 0]
            assert discount == pytest.approx(DISCOUNT ** (end - start))
            reward = DISCOUNT ** (end - 1 - start) if success and end == len(flags) else 0.0
            assert rows.rewards[row, 0] == pytest.approx(reward)
            assert rows.terminations[row, 0] == (success and end == len(flags))
            assert rows.truncations[row, 0] == (not success and end == len(flags))
            for ahead in range(chunk):
                step = min(start + ahead, len(flags) - 1)
                assert rows.actions[row, 0, ahead].tolist() == [step, -step], "what was executed"
                wanted = step if flags[step] == "H" else step + 0.5
                assert rows.forward_inputs["bc_actions"][row, 0, ahead, 0] == wanted


@given(length=st.integers(1, 12), chunk=st.integers(1, 3), n_step=st.integers(1, 4))
def test_without_an_intervention_transitions_are_those_of_a_demo_in_the_replay_buffer(
    length: int, chunk: int, n_step: int
) -> None:
    """The buffer sums up rewards itself there: both ways give the same numbers."""
    episode = played("P" * length, success=True)
    buffers = TrajectoryReplay(seed=1), TrajectoryReplay(seed=1)
    buffers[0].add_trajectories([demo_transitions(episode, 0, policy(chunk))])
    own = spans(chunk, n_step).transitions(episode, 0, policy(chunk), all_starts(episode, chunk), imitate="all")
    buffers[1].add_trajectories([own])
    theirs = from_replay(buffers[0].sample(50, n_step=n_step * chunk, discount=DISCOUNT))
    ours = from_replay(buffers[1].sample(50))
    for name in ("actions", "rewards", "discounts", "bc_actions", "bc_mask", "bc_filter"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert np.array_equal(ours.inputs["state"], theirs.inputs["state"])
    assert np.array_equal(ours.next_inputs["state"], theirs.next_inputs["state"])


def make(**changes: Any) -> DecisionReplay:
    wanted = {"training_starts": 1, "n_step": 1, "batch_size": 400, "utd_ratio": 1, "discount": DISCOUNT}
    return DecisionReplay(policy(1), [DEMO], settings(**{**wanted, **SCRIPTED, **changes}), seed=0)


def rows(replay: DecisionReplay, source: int) -> set[tuple[float, float, float]]:
    """What is seen before and after, and the first action, of all transitions of a source."""
    batch = replay.sample()
    chosen = batch[SOURCE] == source
    columns = batch["curr_obs"]["state"], batch["next_obs"]["state"], batch["actions"][:, 0]
    return {tuple(row) for row in np.concatenate([c[chosen][:, :1] for c in columns], axis=1).tolist()}


def test_hil_serls_five_on_five_off_pattern_has_every_transition_with_its_own_next_observation() -> None:
    """There 4 of 25 transitions at the start of a segment show the last image of the segment before (16 % of samples);
    in LeRobot's buffer 17.5 % have a wrong next state."""
    flags = "HHHHHPPPPP" * 5
    replay = make()
    replay.add(Held(played(flags, success=False)))
    intervened = {t for t, who in enumerate(flags) if who == "H"}
    online = {(float(t), float(t + 1), float(t)) for t in range(len(flags))}
    demos = {(float(t), float(t + 1), float(t)) for t in [*range(5), *intervened]}
    names = [DEMOS, "experience"]
    assert rows(replay, names.index("experience")) <= online
    found: set[tuple[float, float, float]] = set()
    for _ in range(5):
        found |= rows(replay, names.index(DEMOS))
    assert found == demos, "the demo's five steps, and the intervened ones, each once and none else"


def test_an_intervened_step_counts_once_at_the_rate_limiter() -> None:
    replay = make(batch_size=4)
    assert replay.add(Held(played("PPHHP", success=False))) == 5
    assert replay.decisions == 5
    assert replay.demo_transitions == 5 + 2


def test_with_chunks_the_limiter_counts_as_many_decisions_as_the_policy_would_have_made() -> None:
    demo = played("PPPP", success=True)
    wanted = settings(**{"training_starts": 1, "batch_size": 4, **SCRIPTED})
    replay = DecisionReplay(policy(2), [demo], wanted, seed=0)
    assert replay.add(Held(played("PPHHPP", success=False))) == 3
    assert replay.demo_transitions == 4 + 1


def test_interventions_outlive_the_window_and_a_restored_replay_samples_the_same_batches() -> None:
    episodes = [Held(played(flags, success=False)) for flags in ("PHHP", "PPPP", "HPPH")]
    replay = make(batch_size=16, window=1)
    for episode in episodes:
        replay.add(episode)
    replay.sample()
    assert replay.demo_transitions == 5 + 4
    resumed = make(batch_size=16, window=1)
    resumed.restore(replay.state(), episodes)
    for _ in range(3):
        assert same(replay.sample(), resumed.sample())


def test_cloning_imitates_demos_and_no_intervention() -> None:
    replay = make()
    replay.add(Held(played("PPPPPPHHP", success=False)))
    batch = replay.sample()
    is_demo_half = batch[SOURCE] == [DEMOS, "experience"].index(DEMOS)
    is_intervention = is_demo_half & (batch["curr_obs"]["state"][:, 0] >= DEMO.length - 1)
    assert is_intervention.any()
    assert np.array_equal(batch["forward_inputs"]["bc_mask"][:, 0], is_demo_half & ~is_intervention)


@pytest.mark.parametrize("imitate", ["better", "all"])
def test_cloning_imitates_interventions_where_that_is_asked_for(imitate: str) -> None:
    cloning = {"bc_weight": 1.0, "bc_steps": 100}
    replay = make(interventions={"source": "scripted", "imitate": imitate}, actor=cloning)
    replay.add(Held(played("PPPPPPHHP", success=False)))
    batch = replay.sample()
    is_demo_half = batch[SOURCE] == [DEMOS, "experience"].index(DEMOS)
    is_intervention = is_demo_half & (batch["curr_obs"]["state"][:, 0] >= DEMO.length - 1)
    assert is_intervention.any()
    assert np.array_equal(batch["forward_inputs"]["bc_mask"][:, 0], is_demo_half)
    in_doubt = is_intervention & (imitate == "better")
    assert np.array_equal(batch["forward_inputs"]["bc_filter"][:, 0], in_doubt)


def test_an_episode_of_chunks_is_refused() -> None:
    episode = decision_episode(trajectory(4, 2, success=True), PROVENANCE, DISCOUNT)
    with pytest.raises(DataError, match="acts with 2"):
        spans(2, 1).transitions(episode, 0, policy(2), all_starts(episode, 2), imitate="none")
