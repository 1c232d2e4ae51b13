import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from nightshift.data.episode import Episode
from nightshift.data.schema import Schema, common
from nightshift.errors import DataError
from nightshift.types import Provenance
from tests.data.examples import PROVENANCE, episodes, make, with_images


def odd(**changes: Any) -> Provenance:
    return replace(PROVENANCE, **changes)


SCHEMA = Schema.of(make(), {"actions": (-1, 1)})


def broken_at(step: int, value: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    actions = make().actions.copy()
    actions[step, 3] = value
    return actions


def test_a_valid_episode_of_any_length_is_accepted() -> None:
    SCHEMA.check(make(), "a")
    SCHEMA.check(make(steps=1, seed=3), "b")


@given(episodes(), episodes())
def test_an_episode_satisfies_the_schema_of_a_similar_one(one: Episode, other: Episode) -> None:
    Schema.of(one).check(other, "other")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actions": broken_at(4, np.nan)}, "actions is not finite (episode: lift_cube, init state 17, step 4)"),
        ({"actions": broken_at(2, 1.5)}, "actions lies outside [-1, 1] (episode: lift_cube, init state 17, step 2)"),
        ({"actions": make().actions.astype(np.float64)}, "actions is float64, not float32"),
        ({"actions": make().actions[:, :6]}, "shape"),
        ({"rewards": make().rewards[:4]}, "rewards has shape [4], not [6]"),
        ({"rewards": make().rewards[:, None]}, "rewards has shape [6, 1], not [6]"),
        ({"discounts": make().discounts * 1.01}, "discounts lies outside [0, 1]"),
        ({"interventions": np.zeros(6)}, "interventions is float64, not bool"),
        ({"policy_versions": np.zeros(6, np.int32)}, "policy_versions is int32, not int64"),
        ({"observations": {"proprio": make().observations["proprio"]}}, "observations.objects is missing"),
        ({"observations": {**make().observations, "extra": make().actions}}, "observations.extra is not declared"),
        ({"extras": {"force": np.zeros(6)}}, "extras.force is not declared"),
        ({"terminated": False}, "the episode has no end"),
        ({"success": 1}, "success is 1, not true or false"),
        ({"provenance": odd(task=5)}, "provenance.task is 5, not text"),
        ({"provenance": odd(split="test")}, "provenance.split is 'test', not train, validation or eval"),
        ({"provenance": odd(seed="0")}, "provenance.seed is '0', not a whole number"),
        ({"provenance": odd(versions=None)}, "provenance.versions is None"),
        ({"provenance": odd(disturbance=math.nan)}, "provenance.disturbance is nan"),
        ({"metadata": None}, "metadata is None, not a dict"),
        ({"metadata": {"grip": (1, 2)}}, "metadata.grip is (1, 2), which JSON cannot represent exactly"),
        ({"metadata": {"grip": {1: 2}}}, "metadata.grip is {1: 2}"),
        ({"metadata": {"grip": np.float32(1)}}, "metadata.grip is"),
        ({"rewards": make().rewards.astype(">f4")}, "rewards is >f4, not float32"),
        ({"actions": np.float32(0) + np.zeros((), np.float32)}, "actions has no steps"),
        ({"rewards": np.zeros((), np.float32)}, "rewards has shape [], not [6]"),
    ],
)
def test_a_violation_of_the_schema_is_reported_with_field_episode_and_step(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as error:
        SCHEMA.check(make(**changes), "data/demos/a.safetensors")
    assert error.value.what.startswith("data/demos/a.safetensors: ")
    assert words in error.value.what


def test_fields_whose_meaning_is_fixed_cannot_be_declared_otherwise() -> None:
    odd = make(policy_versions=np.zeros(6, np.float32))
    with pytest.raises(DataError, match="policy_versions is float32, not int64"):
        Schema.of(odd).check(odd, "first")


def test_an_imported_episode_is_identified_by_its_origin() -> None:
    imported = replace(make().provenance, init_state=None, origin="demos.pkl#3")
    with pytest.raises(DataError, match=r"episode: lift_cube, demos.pkl#3, step 4"):
        SCHEMA.check(make(actions=broken_at(4, np.inf), provenance=imported), "demos.pkl")


def test_a_schema_survives_json() -> None:
    assert Schema.from_json(SCHEMA.to_json(), "a") == SCHEMA
    with pytest.raises(DataError, match=r"s.json is not a schema"):
        Schema.from_json({"actions": {"dtype": "float32"}}, "s.json")


def test_a_common_schema_widens_vectors_and_refuses_images_of_another_dtype() -> None:
    bytes_, shares = with_images(), with_images(seed=1)
    lit = {name: column / np.float32(255) for name, column in shares.observations.items() if column.ndim > 2}
    shares = replace(
        shares, observations={**shares.observations, **lit}, actions=shares.actions.astype(np.float64), extras={}
    )
    shared = common([Schema.of(bytes_), Schema.of(shares)])
    assert (shared.fields["actions"].dtype, shared.fields["observations.front"].dtype) == ("float64", "uint8")
    with pytest.raises(DataError, match=r"observations\.front is float32, not uint8"):
        shared.check(shared.conformed(shares), "here")
