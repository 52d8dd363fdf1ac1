"Off-policy corrections: TRL's own weights and masks, and what they do to long episodes"
import math

import pytest
import torch
from hypothesis import given, strategies as st
from trl_code import MASK, NEW, OLD, V1, batches, floats, gradient, quick, spread, trl_scored

from agentrl_cookbook.algo.objective import cispo_loss, dapo_loss, grpo_loss, ppo_loss, reinforce_loss, trl_loss
from agentrl_cookbook.algo.offpolicy import dropped_share, off_policy_mask, sampler_weights, useful_share

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
each_mode = pytest.mark.parametrize("mode", MODES)
SAMPLER = torch.tensor([[-1.1, -2., 0, 0], [-.5, -2.9, -1., -3.]], dtype=torch.float64)

@pytest.mark.parametrize("mode, expected", [
    ("token_truncate", [[1.105171, 1, 1, 1], [1, 3, 1, 1]]), ("token_mask", [[1.105171, 1, 1, 1], [1, 0, 1, 1]]),
    ("sequence_truncate", [[1.105171], [3]]), ("sequence_mask", [[1.105171], [0]])])
def test_published_weights(mode, expected):
    torch.testing.assert_close(sampler_weights(OLD, SAMPLER, MASK, mode), torch.tensor(expected).double(),
                               rtol=0, atol=1e-6)

def test_published_loss():
    weight = sampler_weights(OLD, SAMPLER, MASK, "sequence_mask")
    value, grad_BT = gradient(dapo_loss, NEW, OLD, V1[2] * weight, MASK, eps_high=.2)
    assert abs(value - -.387701) < 1e-6
    torch.testing.assert_close(grad_BT, torch.tensor([[0, -1 / 6, 0, 0], [0] * 4]).double(), rtol=0, atol=1e-6)
    for a, b in zip((value, grad_BT), gradient(trl_loss, *V1, weight=weight, loss_type="dapo")):
        torch.testing.assert_close(a, b)

@each_mode
@quick
@given(data=st.data(), low=st.sampled_from([None, .5]), high=st.sampled_from([1.5, 3.]))
def test_weights_equal_trl(mode, data, low, high):
    B, T = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    length_B = torch.tensor(data.draw(st.lists(st.integers(1, T), min_size=B, max_size=B)))
    length_B[0] = T
    mask_BT = (torch.arange(T) < length_B[:, None]).long()
    logp_BT, sampler_BT = data.draw(floats((B, T), -6, 0)).float(), data.draw(floats((B, T), -6, 0)).float()
    if data.draw(st.booleans()): sampler_BT[0, 0] = float("nan")
    theirs = trl_scored(torch.zeros(B, 1), 1, logps=logp_BT, mask_BT=mask_BT, sampler_BT=sampler_BT, use_vllm=True,
                        vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=mode,
                        vllm_importance_sampling_clip_min=low, vllm_importance_sampling_clip_max=high)
    ours = sampler_weights(logp_BT, sampler_BT, mask_BT, mode, high, low or 0.)
    torch.testing.assert_close(ours, theirs["importance_sampling_ratio"], rtol=1e-5, atol=1e-6)

@each_mode
@quick
@given(batch=batches(), data=st.data())
def test_a_weight_on_the_advantage_is_a_weight_on_trls_loss(mode, batch, data):
    logp_BT, old_BT, advantage_BT, mask_BT = spread(batch)
    weight = sampler_weights(old_BT, data.draw(floats(mask_BT.shape, -6, 0)), mask_BT, mode)
    weighted = logp_BT, old_BT, advantage_BT * weight, mask_BT
    for loss, kw in ((grpo_loss, dict(loss_type="grpo")), (dapo_loss, dict(loss_type="dapo", epsilon_high=.28)),
                     (ppo_loss, dict(loss_type="bnpo", delta=3.)),
                     (cispo_loss, dict(loss_type="cispo", epsilon_high=5.))):
        theirs = gradient(trl_loss, logp_BT, old_BT, advantage_BT, mask_BT, weight=weight, **kw)
        for a, b in zip(gradient(loss, *weighted), theirs): torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

@quick
@given(batch=batches(), cap=st.floats(.5, 5))
def test_truncated_reinforce_is_cispo(batch, cap):
    logp_BT, old_BT, advantage_BT, mask_BT = spread(batch)
    tis_BT = advantage_BT * sampler_weights(logp_BT, old_BT, mask_BT, high=cap)
    torch.testing.assert_close(gradient(reinforce_loss, logp_BT, old_BT, tis_BT, mask_BT)[1],
                               gradient(cispo_loss, logp_BT, old_BT, advantage_BT, mask_BT, cap=cap)[1])

@each_mode
@quick
@given(batch=batches())
def test_the_same_engine_changes_nothing(mode, batch):
    logp_BT, _, _, mask_BT = batch
    weight = sampler_weights(logp_BT, logp_BT, mask_BT, mode)
    assert (weight == 1).all() and dropped_share(weight, mask_BT) == 0

@each_mode
@quick
@given(batch=batches(), data=st.data())
def test_masked_tokens_never_matter(mode, batch, data):
    logp_BT, old_BT, _, mask_BT = batch
    other_BT = torch.where(mask_BT == 1, old_BT, data.draw(floats(mask_BT.shape, -99, 0)))
    a, b = [sampler_weights(logp_BT, x_BT, mask_BT, mode) for x_BT in (old_BT, other_BT)]
    assert torch.equal(a, b)

@quick
@given(batch=batches(), data=st.data(), threshold=st.floats(-1, 1))
def test_off_policy_mask_equals_trl(batch, data, threshold):
    logp_BT, old_BT, advantage_BT, mask_BT = spread(batch)
    theirs = gradient(trl_loss, logp_BT, old_BT, advantage_BT, mask_BT, epsilon_high=.28,
                      off_policy_mask_threshold=threshold)
    kept_BT = off_policy_mask(logp_BT, old_BT, advantage_BT, mask_BT, threshold)
    for a, b in zip(gradient(dapo_loss, logp_BT, old_BT, advantage_BT * kept_BT, mask_BT), theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert (kept_BT[advantage_BT >= 0] == 1).all()

@pytest.mark.parametrize("T, dropped", [(10_980, 0), (10_990, 1)])
def test_a_drift_of_1e_4_drops_every_episode_beyond_log_3_over_1e_4_tokens(T, dropped):
    "ln 3 / 0.0001 = 10,986"
    gap_BT, zero_BT, mask_BT = torch.full((2, T), 1e-4, dtype=torch.float64), torch.zeros(2, T), torch.ones(2, T)
    assert dropped_share(sampler_weights(gap_BT, zero_BT, mask_BT, "sequence_mask"), mask_BT) == dropped
    assert dropped_share(sampler_weights(gap_BT, zero_BT, mask_BT, "token_mask"), mask_BT) == 0

def test_useful_share():
    assert useful_share(torch.ones(7)) == pytest.approx(1) and useful_share(torch.eye(5)[0]) == pytest.approx(.2)
    assert useful_share(torch.zeros(3)) == 0
    weight_B = (0.5 * torch.randn(100_000, generator=torch.Generator().manual_seed(0)) - .125).exp()
    assert useful_share(weight_B) == pytest.approx(math.exp(-.25), abs=.02)

def test_an_unknown_mode_is_named():
    with pytest.raises(ValueError, match="mode is 'token': use token_truncate"):
        sampler_weights(OLD, NEW, MASK, "token")
