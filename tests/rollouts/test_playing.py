import pytest

from nightshift.rollouts.playing import shares


def test_shares_of_the_workers_time_add_up_to_all_of_it() -> None:
    before = {"busy": 1.0, "simulation": 1.0}
    after = {"busy": 13.0, "simulation": 9.0, "look": 0.4, "inference": 2.6, "transfer": 2.0}
    found = shares(before, after, workers=2, seconds=10.0)
    assert found.pop("time/play") == 10.0
    assert found == {
        "time/share_simulation": pytest.approx(0.4),
        "time/share_look": pytest.approx(0.02),
        "time/share_inference": pytest.approx(0.13),
        "time/share_record": pytest.approx(0.05),
        "time/share_transfer": pytest.approx(0.1),
        "time/share_idle": pytest.approx(0.3),
    }
