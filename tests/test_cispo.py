"CISPO's cap: TRL's trap, and the translation between libraries"
import pytest
import torch
from hypothesis import given, strategies as st
from trl_code import ADVANTAGE, MASK, NEW, OLD, V1, batches, gradient, quick

from agentrl_cookbook.algo.cispo import CAPS, capped_share, cispo_range, cispo_settings
from agentrl_cookbook.algo.objective import ratio, reinforce_loss, trl_loss

each_library = pytest.mark.parametrize("library", CAPS)

def test_default_cispo_is_a_fifth_of_reinforce_and_its_metric_misses_it():
    _, trapped = gradient(trl_loss, NEW, OLD, ADVANTAGE, MASK, loss_type="cispo")
    torch.testing.assert_close(trapped, .2 * gradient(reinforce_loss, *V1)[1])
    assert trl_loss(NEW, OLD, ADVANTAGE, MASK, loss_type="cispo")[1]["cispo_clip_ratio"] == [pytest.approx(1 / 3)]
    assert capped_share(NEW, OLD, MASK, .2) == 1
    assert trl_loss(NEW, OLD, -torch.ones(2).double(), MASK, loss_type="cispo")[1]["cispo_clip_ratio"] == [0]

@quick
@given(batch=batches(), cap=st.floats(.1, 6))
def test_capped_share_counts_sampled_tokens_of_both_signs(batch, cap):
    logp_BT, old_BT, _, mask_BT = batch
    above = [r > cap for r, m in zip(ratio(logp_BT, old_BT).flatten(), mask_BT.flatten()) if m]
    assert capped_share(logp_BT, old_BT, mask_BT, cap) == pytest.approx(sum(above) / max(1, len(above)))

@pytest.mark.parametrize("library, settings, expected", [
    ("TRL", dict(epsilon_high=.2), (0, .2)), ("ms-swift", dict(epsilon_high=5.), (0, 5)),
    ("ScaleRL", dict(epsilon_max=5.), (0, 5)), ("MiniMax-M1", dict(epsilon_high=.2), (0, 1.2)),
    ("verl", dict(clip_ratio_low=.2, clip_ratio_high=.2), (.8, 1.2)),
    ("slime", dict(eps_clip=1., eps_clip_high=4.), (0, 5)),
    ("Tinker", dict(clip_low_threshold=0., clip_high_threshold=4.), (0, 4))])
def test_what_settings_mean(library, settings, expected):
    assert cispo_range(library, **settings) == pytest.approx(expected)

@each_library
@quick
@given(floor=st.floats(0, 1), above=st.floats(.01, 10))
def test_translating_there_and_back_changes_nothing(library, floor, above):
    if CAPS[library][1] is None: floor = 0.
    cap = 1 + above
    assert cispo_range(library, **cispo_settings(library, floor, cap)) == pytest.approx((floor, cap))

@pytest.mark.parametrize("library, floor, cap, message", [
    ("TRL", .8, 1.2, "TRL has no lower bound"), ("verl", 0., .2, "verl measures its settings from 1"),
    ("slime", 1.5, 2., "slime measures"), ("Tinker", 2., 1., "0 <= floor < cap"),
    ("trl", 0., 5., "no entry for 'trl'")])
def test_what_a_library_cannot_say_is_refused(library, floor, cap, message):
    with pytest.raises(ValueError, match=message): cispo_settings(library, floor, cap)

def test_settings_of_another_library_are_refused():
    with pytest.raises(ValueError, match="verl takes clip_ratio_high and clip_ratio_low, not epsilon_high"):
        cispo_range("verl", epsilon_high=.2)
    with pytest.raises(ValueError, match="TRL takes epsilon_high, not nothing"): cispo_range("TRL")
