"""The paper's curves as shipped: read from different figures, they agree with each other."""

import numpy as np
import pytest

from dspark_hf.evaluation.data_sets import GROUPS
from dspark_hf.evaluation.paper_curves import paper_offline_curves

CURVES = paper_offline_curves()


@pytest.mark.parametrize("group", list(GROUPS))
@pytest.mark.parametrize("drafter", ["DSpark", "DFlash"])
def test_acceptance_by_slot_gives_tau(group, drafter):
    tau = 1 + np.cumprod(CURVES["conditional_acceptance"][group][drafter]).sum()
    by_length = CURVES["tau_by_draft_length"]
    assert tau == pytest.approx(by_length[group][drafter][by_length["num_draft_tokens"].index(7)], abs=0.06)


@pytest.mark.parametrize("group", list(GROUPS))
def test_rates_are_of_accepted_and_rejected_tokens(group):
    sweep = CURVES["threshold_sweep"]
    accepted, rejected = np.array(sweep[group]["accepted_incl_bonus"]), np.array(sweep[group]["rejected"])
    assert np.allclose(accepted / (accepted + rejected), sweep[group]["rate"], atol=0.005)
    assert len(sweep["threshold"]) == len(accepted) == 10


def test_data_sets_are_those_of_the_groups():
    known = {name for members in GROUPS.values() for name in members}
    assert all(set(taus) <= known for layers in CURVES["tau_by_depth"].values() for taus in layers.values())
    assert "arXiv 2607.05147" in CURVES["source"]
