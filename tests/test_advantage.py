"Advantages over groups: published vectors, TRL's own numbers, and what holds for any rewards"
import pytest
import torch
from hypothesis import given, strategies as st
from trl import RLOOTrainer
from trl_code import ADVANTAGE, MASK, batches, binary, floats, ints, quick, rewards, trl_scored

from agentrl_cookbook.algo.advantage import (
    discounted_returns, gdpo_advantages, group_advantages, maxrl_advantages, per_token, reinforce_pp_advantages,
    rloo_advantages, step_advantages, whiten, zero_variance)

HARD = torch.tensor([[1., 0., 0., 0.]], dtype=torch.float64)
TWO_B = torch.tensor([1., 0, 0, 0, 1, 1, 1, 0], dtype=torch.float64)
each_scale = pytest.mark.parametrize("scale", ["group", "batch", "none"])
of_groups = pytest.mark.parametrize("fn", [group_advantages, rloo_advantages], ids=lambda f: f.__name__)

def assert_close(got, expected, atol=1e-6):
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


# ---- published vectors ----

@pytest.mark.parametrize("kw, expected", [
    ({}, [1.4997, -.4999, -.4999, -.4999]), (dict(ddof=0, eps=1e-8), [1.732051, -.57735, -.57735, -.57735]),
    (dict(scale="none"), [.75, -.25, -.25, -.25])])
def test_grpo_and_dr_grpo(kw, expected): assert_close(group_advantages(HARD, **kw)[0], expected, 5e-5)

def test_batch_scale():
    assert_close(group_advantages(TWO_B, 4, scale="batch"),
          [1.402859, -.46762, -.46762, -.46762, .46762, .46762, .46762, -1.402859])

def test_rloo(): assert_close(rloo_advantages(HARD)[0], [1, -1/3, -1/3, -1/3])

def test_maxrl(): assert_close(maxrl_advantages(HARD)[0], [3, -1, -1, -1])

@pytest.mark.parametrize("group_size, expected", [
    (0, [.935414, -.935414, -.935414, -.935414, .935414, .935414, .935414, -.935414]),
    (4, [1.620185, -.540062, -.540062, -.540062, .540062, .540062, .540062, -1.620185])])
def test_reinforce_pp(group_size, expected):
    assert_close(reinforce_pp_advantages(TWO_B, torch.ones(8, 1), group_size)[:, 0], expected)

def test_gigpo_steps():
    return_BK, same_BK, on_BK = torch.tensor([[1.], [.95], [0.]]), torch.zeros(3, 1).long(), torch.ones(3, 1)
    assert_close(step_advantages(return_BK, same_BK, on_BK, 3)[:, 0], [.35, .30, -.65])
    assert_close(step_advantages(return_BK, same_BK, on_BK, 3, eps=0.)[:, 0], [.62115, .532414, -1.153563], 1e-5)


# ---- TRL's numbers ----

@each_scale
@quick
@given(reward_PG=st.one_of(rewards, binary))
def test_group_advantages_equal_trl(scale, reward_PG):
    reward_PG = reward_PG.double()
    theirs = trl_scored(reward_PG.reshape(-1, 1), reward_PG.shape[1], scale_rewards=scale)["advantages"]
    torch.testing.assert_close(group_advantages(reward_PG, scale=scale).flatten(), theirs, rtol=1e-9, atol=1e-7)

@quick
@given(reward_PG=rewards)
def test_rloo_equals_trl(reward_PG):
    zero_B1 = torch.zeros(reward_PG.numel(), 1)
    theirs = trl_scored(reward_PG.reshape(-1, 1), reward_PG.shape[1], RLOOTrainer, logps=zero_B1)
    torch.testing.assert_close(rloo_advantages(reward_PG).flatten(), theirs["advantages"], rtol=1e-9, atol=1e-7)

@quick
@given(data=st.data(), P=st.integers(1, 4), G=st.integers(2, 5), R=st.integers(1, 3))
def test_gdpo_equals_trl(data, P, G, R):
    reward_PGR, weight_R = data.draw(floats((P, G, R), -10, 10)), data.draw(floats(R, 0, 2))
    theirs = trl_scored(reward_PGR.reshape(-1, R), G, multi_objective_aggregation="normalize_then_sum",
                        reward_weights=weight_R)["advantages"]
    torch.testing.assert_close(gdpo_advantages(reward_PGR, weight_R).flatten(), theirs, rtol=1e-7, atol=1e-7)


# ---- properties ----

@of_groups
@quick
@given(reward_PG=rewards, shift=st.floats(-100, 100))
def test_a_group_sums_to_zero_and_a_shift_changes_nothing(fn, reward_PG, shift):
    got_PG = fn(reward_PG)
    assert got_PG.sum(1).abs().max() < 1e-8
    torch.testing.assert_close(fn(reward_PG + shift), got_PG, rtol=1e-6, atol=1e-8)

@each_scale
@quick
@given(reward_PG=rewards, shift=st.floats(-100, 100), factor=st.floats(.01, 100))
def test_shift_and_unit_of_every_scale(scale, reward_PG, shift, factor):
    plain_PG = group_advantages(reward_PG, scale=scale)
    torch.testing.assert_close(group_advantages(reward_PG + shift, scale=scale), plain_PG, rtol=1e-6, atol=1e-8)
    scaled_PG = group_advantages(factor * reward_PG, scale=scale, eps=factor * 1e-4)
    torch.testing.assert_close(scaled_PG, (factor if scale == "none" else 1) * plain_PG, rtol=1e-6, atol=1e-7)

@quick
@given(reward_PG=binary)
def test_maxrl_sums_to_zero_and_is_silent_without_success(reward_PG):
    got_PG = maxrl_advantages(reward_PG)
    assert got_PG.sum(1).abs().max() < 1e-5 and got_PG.isfinite().all()
    assert (got_PG[reward_PG.sum(1) == 0] == 0).all()

@quick
@given(reward_PG=rewards)
def test_rloo_is_dr_grpo_times_a_constant(reward_PG):
    G = reward_PG.shape[1]
    torch.testing.assert_close(rloo_advantages(reward_PG), group_advantages(reward_PG, scale="none") * G / (G - 1))

@quick
@given(batch=batches(), shift=st.floats(-5, 5))
def test_reinforce_pp_is_normal_over_the_tokens_and_ignores_masked_kl(batch, shift):
    kl_BT, _, reward_B, mask_BT = batch
    got_BT = reinforce_pp_advantages(reward_B, mask_BT, kl_BT=kl_BT, beta=.1)
    assert (got_BT[mask_BT == 0] == 0).all() and got_BT.isfinite().all()
    if mask_BT.sum() > 1:
        assert abs(got_BT[mask_BT == 1].mean()) < 1e-6
        assert got_BT[mask_BT == 1].std() < 1.001
    junk_BT = torch.where(mask_BT == 1, kl_BT, 99.)
    torch.testing.assert_close(reinforce_pp_advantages(reward_B, mask_BT, kl_BT=junk_BT, beta=.1), got_BT)
    if (reward_B.max() - reward_B.min()) > .01:
        moved_BT = reinforce_pp_advantages(reward_B + shift, mask_BT, kl_BT=kl_BT, beta=.1)
        torch.testing.assert_close(moved_BT, got_BT, rtol=1e-4, atol=1e-4)

@quick
@given(reward_PG=rewards)
def test_reinforce_pp_with_baseline_sums_to_zero_in_each_group(reward_PG):
    P, G = reward_PG.shape
    got_PG = reinforce_pp_advantages(reward_PG.flatten(), torch.ones(P * G, 3), G).view(P, G, 3)
    assert got_PG.sum((1, 2)).abs().max() < 1e-5 and torch.equal(got_PG[..., 0], got_PG[..., 2])

def test_reinforce_pp_kl_is_paid_by_the_tokens_before_it():
    "beta = 1: one episode, KL of 1 at the last token; in a second one KL of 1 at the first token"
    kl_BT = torch.tensor([[0., 0., 1.], [1., 0., 0.]])
    raw_BT = torch.tensor([[-1., -1., -1.], [-1., 0., 0.]])
    got_BT = reinforce_pp_advantages(torch.zeros(2), torch.ones(2, 3), kl_BT=kl_BT, beta=1.)
    torch.testing.assert_close(got_BT, whiten(raw_BT, torch.ones(2, 3)))

@quick
@given(data=st.data())
def test_step_groups_sum_to_zero_and_lonely_states_get_nothing(data):
    B, K, G = 4, data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 2, 4]))
    return_BK, state_BK = data.draw(floats((B, K), -5, 5)), data.draw(ints((B, K), (0, 1, 2, 7)))
    mask_BK = data.draw(ints((B, K)))
    got_BK = step_advantages(return_BK, state_BK, mask_BK, G)
    assert (got_BK[mask_BK == 0] == 0).all()
    for task in range(B // G):
        for state in (0, 1, 2, 7):
            own_BK = (state_BK == state) & (mask_BK == 1) & (torch.arange(B)[:, None] // G == task)
            assert abs(got_BK[own_BK].sum()) < 1e-8
            if own_BK.sum() == 1: assert got_BK[own_BK] == 0
            if own_BK.sum() > 1:
                torch.testing.assert_close(got_BK[own_BK], return_BK[own_BK] - return_BK[own_BK].mean())
    scaled_BK = step_advantages(return_BK, state_BK, mask_BK, G, eps=0.)
    assert scaled_BK.isfinite().all() and torch.equal(scaled_BK.sign(), got_BK.sign())

@quick
@given(reward_BK=st.integers(1, 6).flatmap(lambda K: floats((3, K), -5, 5)), gamma=st.floats(0, 1))
def test_discounted_returns_follow_the_recursion(reward_BK, gamma):
    got_BK = discounted_returns(reward_BK, gamma)
    torch.testing.assert_close(got_BK[:, -1], reward_BK[:, -1])
    torch.testing.assert_close(got_BK[:, :-1], reward_BK[:, :-1] + gamma * got_BK[:, 1:], rtol=1e-5, atol=1e-5)

@quick
@given(batch=batches())
def test_per_token_credits_sampled_tokens_only(batch):
    _, _, advantage_B, mask_BT = batch
    advantage_BT = per_token(advantage_B, mask_BT)
    for A, A_T, mask_T in zip(advantage_B, advantage_BT, mask_BT):
        assert (A_T[mask_T == 1] == A).all() and (A_T[mask_T == 0] == 0).all()

@quick
@given(reward_PG=binary)
def test_zero_variance_marks_exactly_the_groups_without_signal(reward_PG):
    assert torch.equal(zero_variance(reward_PG), (group_advantages(reward_PG).abs() < 1e-6).all(1))

@pytest.mark.parametrize("fn", [group_advantages, rloo_advantages, maxrl_advantages], ids=lambda f: f.__name__)
@quick
@given(reward_PG=binary)
def test_a_flat_batch_gives_the_same_advantages(fn, reward_PG):
    assert torch.equal(fn(reward_PG.flatten(), group_size=reward_PG.shape[1]), fn(reward_PG).flatten())


# ---- bad input ----

@pytest.mark.parametrize("reward, group_size", [
    (torch.zeros(8), 0), (torch.zeros(8), 3), (torch.zeros(8), 1), (torch.zeros(2, 4), 2), (torch.zeros(4, 1), 0),
    (torch.zeros(2, 2, 2), 2)])
def test_rewards_that_do_not_split_into_groups_are_refused(reward, group_size):
    for fn in (group_advantages, rloo_advantages, maxrl_advantages):
        with pytest.raises(ValueError, match=r"cannot split reward of shape .* into groups .*pass \(P, G\)"):
            fn(reward, group_size)

def test_other_bad_input_is_named():
    with pytest.raises(ValueError, match="reward contains nan"): group_advantages(torch.tensor([[1., float("nan")]]))
    with pytest.raises(ValueError, match="scale is 'std': use 'group'"): group_advantages(torch.eye(2), scale="std")
    with pytest.raises(ValueError, match="3 advantages for 2 mask rows"): per_token(torch.zeros(3), MASK)
    with pytest.raises(ValueError, match="rewards of 0 and above"): maxrl_advantages(-torch.eye(2))
    assert len(per_token(ADVANTAGE, MASK)) == 2
