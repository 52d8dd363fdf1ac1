"Objectives: equal to TRL's own code in value and gradient, to hand-computed vectors, and to each other at ratio 1"
import math

import pytest
import torch
from hypothesis import given, strategies as st
from trl import GRPOConfig
from trl_code import ADVANTAGE, MASK, NEW, OLD, V1, batches, floats, gradient, quick, spread, trl_rloo_loss

from agentrl_cookbook.algo.advantage import per_token
from agentrl_cookbook.algo.objective import (
    aggregate, cispo_loss, dapo_loss, dr_grpo_loss, grpo_loss, gspo_loss, ppo_loss, ratio, reinforce_loss, rloo_loss,
    sapo_loss, trl_loss)

def dr_grpo(*batch): return dr_grpo_loss(*batch, max_length=4)
LOSSES = (reinforce_loss, ppo_loss, grpo_loss, dr_grpo, dapo_loss, gspo_loss, rloo_loss, cispo_loss, sapo_loss)
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
GSPO = dict(loss_type="grpo", importance_sampling_level="sequence")

PAIRS = {  # name: (TRL's settings, our function, our settings, loss on V1, gradient on V1)
    "grpo": (dict(loss_type="grpo"), grpo_loss, {}, -.272770, [[0, -.226209, 0, 0], [0, .069073, .084366, 0]]),
    "dapo": (dict(loss_type="dapo"), dapo_loss, dict(eps_high=.2), -.012887,
             [[0, -.150806, 0, 0], [0, .092098, .112488, 0]]),
    "dapo clip-higher": (dict(loss_type="dapo", epsilon_high=.28), dapo_loss, {}, -.026220,
                         [[0, -.150806, 0, 0], [0, .092098, .112488, 0]]),
    "ppo": (dict(loss_type="bnpo", delta=3.), ppo_loss, {}, -.012887, [[0, -.150806, 0, 0], [0, .092098, .112488, 0]]),
    "ppo dual 1.3": (dict(loss_type="bnpo", delta=1.3), ppo_loss, dict(dual=1.3), -.017042,
                     [[0, -.150806, 0, 0], [0, .092098, 0, 0]]),
    "dr_grpo": (dict(loss_type="dr_grpo", max_completion_length=4), dr_grpo, {}, -.009665,
                [[0, -.113105, 0, 0], [0, .069073, .084366, 0]]),
    "gspo": (GSPO | dict(epsilon=3e-4, epsilon_high=4e-4), gspo_loss, {}, -.250275, [[0] * 4] * 2),
    "gspo .2": (GSPO, gspo_loss, dict(eps_low=.2, eps_high=.2), -.354708,
                [[-.290459, -.290459, 0, 0], [.056552, .056552, .056552, .056552]]),
    "sapo": (dict(loss_type="sapo"), sapo_loss, {}, -.633186,
             [[-.351281, -.225698, 0, 0], [.040665, .068863, .081583, .040665]]),
    "cispo 5": (dict(loss_type="cispo", epsilon_high=5.), cispo_loss, {}, .017999,
                [[-.248637, -.150806, 0, 0], [.05586, .092098, .112488, .05586]]),
    "cispo 1.2": (dict(loss_type="cispo", epsilon_high=1.2), cispo_loss, dict(cap=1.2), -.002442,
                  [[-.2, -.150806, 0, 0], [.05586, .092098, .1, .05586]]),
    "cispo default": (dict(loss_type="cispo"), cispo_loss, dict(cap=.2), -.016667,
                      [[-.033333, -.033333, 0, 0], [.016667, .016667, .016667, .016667]])}
each_pair = pytest.mark.parametrize("name", PAIRS)


# ---- TRL, and the published vectors ----

@each_pair
def test_published_vector(name):
    _, loss, kw, value, grad = PAIRS[name]
    got, got_BT = gradient(loss, *V1, **kw)
    assert abs(got - value) < 1e-6
    assert (got_BT - torch.tensor(grad)).abs().max() < 1e-6

@each_pair
@quick
@given(batch=batches(), per_episode=st.booleans())
def test_random_batches_with_tool_masks_equal_trl(name, batch, per_episode):
    theirs_kw, loss, kw, _, _ = PAIRS[name]
    logp_BT, old_BT, advantage_B, mask_BT = batch
    advantage_BT = per_token(advantage_B, mask_BT)
    theirs = gradient(trl_loss, logp_BT, old_BT, advantage_B if per_episode else advantage_BT, mask_BT, **theirs_kw)
    for a, b in zip(gradient(loss, logp_BT, old_BT, advantage_BT, mask_BT, **kw), theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

@quick
@given(batch=batches(), data=st.data())
def test_an_advantage_per_token_equals_trl(batch, data):
    logp_BT, old_BT, _, mask_BT = batch
    advantage_BT = data.draw(floats(mask_BT.shape, -3, 3))
    for name in ("grpo", "dapo", "gspo .2", "sapo", "cispo 5"):
        theirs_kw, loss, kw, _, _ = PAIRS[name]
        for a, b in zip(gradient(loss, logp_BT, old_BT, advantage_BT, mask_BT, **kw),
                        gradient(trl_loss, logp_BT, old_BT, advantage_BT, mask_BT, **theirs_kw)):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

@quick
@given(batch=batches())
def test_rloo_equals_trl(batch):
    "TRL's RLOO has no tool mask; a mask is a mask"
    logp_BT, old_BT, advantage_B, mask_BT = batch
    mask_BT[:, 0] = 1
    theirs = gradient(trl_rloo_loss, logp_BT, old_BT, advantage_B, mask_BT)
    for a, b in zip(gradient(rloo_loss, logp_BT, old_BT, per_token(advantage_B, mask_BT), mask_BT), theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

def test_rloo_by_hand():
    "Products of ratios exp(.3) = 1.35, clipped at 1.2 for A = 1, and exp(-.4) = .67, clipped at .8 for A = -.5"
    value, grad_BT = gradient(rloo_loss, *V1)
    assert value == pytest.approx(-(1.2 - .5 * .8) / 2) and (grad_BT == 0).all()
    value, grad_BT = gradient(rloo_loss, *V1, eps_low=.4, eps_high=.4)
    assert value == pytest.approx(-(math.exp(.3) - .5 * math.exp(-.4)) / 2)
    torch.testing.assert_close(grad_BT, -torch.tensor([[math.exp(.3)], [-.5 * math.exp(-.4)]]).double() * MASK / 2)

def test_float32_agrees_to_1e_6():
    batch = [x.float() for x in V1]
    for name, (_, loss, kw, value, _) in PAIRS.items():
        assert abs(gradient(loss, *batch, **kw)[0] - value) < 1e-6, name

@quick
@given(batch=batches())
def test_trl_without_old_log_probabilities_is_reinforce(batch):
    "One optimizer step per generation batch: TRL fills in the new log-probabilities, and the ratio is 1"
    logp_BT, _, advantage_B, mask_BT = batch
    ours = gradient(reinforce_loss, logp_BT, logp_BT, per_token(advantage_B, mask_BT), mask_BT)[1]
    for kw in (dict(loss_type="dapo"), dict(loss_type="cispo", epsilon_high=5.)):
        torch.testing.assert_close(ours, gradient(trl_loss, logp_BT, None, advantage_B, mask_BT, **kw)[1])

def test_trl_loss_takes_trls_own_settings_only():
    with pytest.raises(TypeError, match="GRPOConfig has no field epsilon_hi"): trl_loss(*V1, epsilon_hi=5.)
    default = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
    assert (default["epsilon"], default["epsilon_high"], default["num_iterations"]) == (.2, None, 1)


# ---- at ratio 1, and away from it ----

@quick
@given(batch=batches())
def test_at_ratio_1_only_the_divisor_differs(batch):
    logp_BT, _, advantage_BT, mask_BT = spread(batch)
    fresh, n_B1 = (logp_BT, logp_BT, advantage_BT, mask_BT), mask_BT.sum(1, keepdim=True).clamp(min=1)
    B = len(mask_BT)
    divisors = {mask_BT.sum().clamp(min=1): (reinforce_loss, ppo_loss, dapo_loss, cispo_loss),
                B * n_B1: (grpo_loss, gspo_loss, sapo_loss), B * 4: (dr_grpo,), B: (rloo_loss,)}
    for divisor, losses in divisors.items():
        for loss in losses: torch.testing.assert_close(gradient(loss, *fresh)[1], -advantage_BT / divisor)

@quick
@given(batch=batches())
def test_away_from_ratio_1_clipping_drops_tokens_and_cispo_none(batch):
    logp_BT, old_BT, advantage_BT, mask_BT = spread(batch)
    r_BT, live_BT = ratio(logp_BT, old_BT), advantage_BT.abs() > 1e-6
    clipped_BT = ((advantage_BT > 0) & (r_BT > 1.2)) | ((advantage_BT < 0) & (r_BT < .8))
    dapo_BT = gradient(dapo_loss, logp_BT, old_BT, advantage_BT, mask_BT, eps_high=.2)[1]
    ppo_BT = gradient(ppo_loss, logp_BT, old_BT, advantage_BT, mask_BT)[1]
    cispo_BT = gradient(cispo_loss, logp_BT, old_BT, advantage_BT, mask_BT)[1]
    assert (dapo_BT[clipped_BT] == 0).all() and (ppo_BT[clipped_BT] == 0).all()
    assert (ppo_BT[(advantage_BT < 0) & (r_BT > 3)] == 0).all()
    assert (cispo_BT[live_BT].sign() == -advantage_BT[live_BT].sign()).all()
    n = mask_BT.sum().clamp(min=1)
    assert (cispo_BT.abs() <= 5 * advantage_BT.abs() / n + 1e-9).all()
    assert (ppo_BT.abs() <= 3 * advantage_BT.abs() / n + 1e-9).all()

@quick
@given(batch=batches())
def test_without_dual_clip_ppo_is_dapo(batch):
    batch = spread(batch)
    for a, b in zip(gradient(ppo_loss, *batch, eps_high=.28, dual=math.inf), gradient(dapo_loss, *batch)):
        assert torch.equal(a, b)

@quick
@given(batch=batches())
def test_the_floor_of_cispo_lifts_weights(batch):
    logp_BT, old_BT, advantage_BT, mask_BT = spread(batch)
    weight_BT = ratio(logp_BT, old_BT).clamp(.8, 1.2)
    got_BT = gradient(cispo_loss, logp_BT, old_BT, advantage_BT, mask_BT, cap=1.2, floor=.8)[1]
    torch.testing.assert_close(got_BT, -advantage_BT * weight_BT / mask_BT.sum().clamp(min=1))


# ---- masks and shapes ----

@quick
@given(batch=batches(), data=st.data())
def test_masked_tokens_change_neither_loss_nor_gradient(batch, data):
    logp_BT, old_BT, advantage_BT, mask_BT = spread(batch)
    def other(x_BT): return torch.where(mask_BT == 1, x_BT, data.draw(floats(mask_BT.shape, -20, 0)))
    changed = other(logp_BT), other(old_BT), other(advantage_BT), mask_BT
    for loss in LOSSES:
        a, b = gradient(loss, logp_BT, old_BT, advantage_BT, mask_BT), gradient(loss, *changed)
        torch.testing.assert_close(a[0], b[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(a[1], b[1], rtol=0, atol=1e-12)
        assert (b[1][mask_BT == 0] == 0).all()

@quick
@given(batch=batches())
def test_episodes_of_one_length_make_all_means_equal(batch):
    logp_BT = batch[0]
    for how in ("episode", "token", "length"):
        torch.testing.assert_close(aggregate(logp_BT, torch.ones_like(logp_BT), how, logp_BT.shape[1]), logp_BT.mean())

@each_loss
def test_a_batch_of_tool_tokens_only_gives_zero_not_nan(loss):
    value, grad_BT = gradient(loss, NEW, OLD, 0 * ADVANTAGE[:, None].expand_as(MASK), torch.zeros_like(MASK))
    assert value == 0 and (grad_BT == 0).all()

@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_any_kind_of_mask_gives_one_loss(dtype):
    for loss in LOSSES: assert torch.equal(loss(*V1[:3], MASK.to(dtype)), loss(*V1))

@each_loss
def test_an_advantage_per_episode_is_refused_where_it_would_broadcast(loss):
    square_BT = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"advantage_BT \(4,\).*per_token"):
        loss(square_BT, square_BT, torch.zeros(4), square_BT)

@pytest.mark.parametrize("how", ["sequence", "length"])
def test_an_unknown_mean_is_named(how):
    with pytest.raises(ValueError, match=f"how is '{how}': use 'episode', 'token', or 'length' with a max_length"):
        aggregate(NEW, MASK, how)
