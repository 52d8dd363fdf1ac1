"Credit inside an episode: published vectors, a plain loop over one episode, and what masks and spans must do"
import math

import pytest
import torch
from hypothesis import given, strategies as st
from trl_code import floats, ints, quick

from agentrl_cookbook.algo.gae import (
    at_last_token, gae, hierarchical_gae, length_lambda, span_gae, span_lambda, subtasks, turns, value_loss)

R = torch.tensor([[0., 0., 1.]], dtype=torch.float64)
V = torch.tensor([[.5, .6, .7]], dtype=torch.float64)
ONES = torch.ones(1, 3)

def slow_gae(reward_K, value_K, gamma, lam_K):
    "The definition, one episode, no masks: a sum over later surprises"
    K = len(reward_K)
    delta_K = [reward_K[k] + gamma * (value_K[k+1] if k + 1 < K else 0) - value_K[k] for k in range(K)]
    weight = lambda k, n: math.prod(gamma * lam_K[j] for j in range(k, n))
    return [sum(weight(k, n) * delta_K[n] for n in range(k, K)) for k in range(K)]

@st.composite
def episodes(draw):
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    mask_BT = draw(ints((B, T)))
    return draw(floats((B, T), -2, 2)) * mask_BT, draw(floats((B, T), -2, 2)), mask_BT, draw(ints((B, T), (0, 1, 2)))


# ---- published vectors ----

@pytest.mark.parametrize("gamma, lam, expected", [
    (1, .95, [.46575, .385, .3]), (1, 1, [.5, .4, .3]), (.99, .95, [.446829, .37515, .3])])
def test_published_gae(gamma, lam, expected):
    advantage_BT, return_BT = gae(R, V, ONES, gamma, lam)
    expected = torch.tensor([expected], dtype=torch.float64)
    torch.testing.assert_close(advantage_BT, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(return_BT, expected + V, rtol=0, atol=1e-6)

def test_vapo():
    lam = torch.cat([length_lambda(torch.ones(1, l)) for l in (200, 1000, 10_000)])[:, 0]
    torch.testing.assert_close(lam, torch.tensor([.9, .98, .998]))
    assert length_lambda(torch.zeros(1, 5)) == 0 and length_lambda(torch.ones(1, 3)) == 0


# ---- against the definition ----

@quick
@given(episode=episodes(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_is_the_sum_over_the_sampled_tokens(episode, gamma, lam):
    reward_BT, value_BT, mask_BT, _ = episode
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, gamma, lam)
    for r, v, m, a, g in zip(reward_BT, value_BT, mask_BT.bool(), advantage_BT, return_BT):
        expected = torch.tensor(slow_gae(r[m].tolist(), v[m].tolist(), gamma, [lam] * len(r)), dtype=torch.float64)
        torch.testing.assert_close(a[m], expected)
        torch.testing.assert_close(g[m], expected + v[m])
        assert (a[~m] == 0).all() and (g[~m] == 0).all()

@quick
@given(episode=episodes(), data=st.data())
def test_a_lambda_per_token(episode, data):
    reward_BT, value_BT, mask_BT, _ = episode
    lam_BT = data.draw(floats(mask_BT.shape, 0, 1))
    advantage_BT, _ = gae(reward_BT, value_BT, mask_BT, .9, lam_BT)
    for r, v, m, l, a in zip(reward_BT, value_BT, mask_BT.bool(), lam_BT, advantage_BT):
        expected = slow_gae(r[m].tolist(), v[m].tolist(), .9, l[m].tolist())
        torch.testing.assert_close(a[m], torch.tensor(expected, dtype=torch.float64))

@quick
@given(episode=episodes(), data=st.data())
def test_masked_tokens_never_matter(episode, data):
    reward_BT, value_BT, mask_BT, tool_BT = episode
    other_BT = torch.where(mask_BT == 1, value_BT, data.draw(floats(mask_BT.shape, -99, 99)))
    other_tool_BT = torch.where(mask_BT == 1, tool_BT, 1 - tool_BT)
    assert torch.equal(gae(reward_BT, value_BT, mask_BT)[0], gae(reward_BT, other_BT, mask_BT)[0])
    for a, b in zip(hierarchical_gae(reward_BT, value_BT, mask_BT, tool_BT),
                    hierarchical_gae(reward_BT, other_BT, mask_BT, other_tool_BT)): assert torch.equal(a, b)
    for a, b in zip(span_gae(reward_BT, value_BT, mask_BT, turns(mask_BT)),
                    span_gae(reward_BT, other_BT, mask_BT, turns(mask_BT))): assert torch.equal(a, b)

@quick
@given(episode=episodes(), n=st.integers(0, 4))
def test_tool_tokens_are_skipped_wherever_they_stand(episode, n):
    reward_BT, value_BT, mask_BT, _ = episode
    pad = lambda x: torch.nn.functional.pad(x, (n, n))
    padded_BT = gae(*map(pad, (reward_BT, value_BT, mask_BT)))[0]
    torch.testing.assert_close(padded_BT, pad(gae(reward_BT, value_BT, mask_BT)[0]))

@quick
@given(episode=episodes(), lam=st.floats(0, 1))
def test_turn_level_is_gae_over_turns(episode, lam):
    reward_BT, value_BT, mask_BT, _ = episode
    turn_BT = turns(mask_BT)
    advantage_BT, return_BT = span_gae(reward_BT, value_BT, mask_BT, turn_BT, lam)
    for r, v, m, k, a, g in zip(reward_BT, value_BT, mask_BT.bool(), turn_BT, advantage_BT, return_BT):
        ks = k[m].unique().tolist()
        starts = [int((m & (k == i)).nonzero()[0, 0]) for i in ks]
        R_K = [r[m & (k == i)].sum().item() for i in ks]
        expected_K = slow_gae(R_K, [v[t].item() for t in starts], 1., [lam] * len(ks))
        for i, t, expected in zip(ks, starts, expected_K):
            own = m & (k == i)
            torch.testing.assert_close(a[own], torch.full_like(a[own], expected))
            torch.testing.assert_close(g[own], torch.full_like(a[own], expected + v[t].item()))
        assert (a[~m] == 0).all() and (g[~m] == 0).all()

@quick
@given(episode=episodes())
def test_one_lambda_makes_all_levels_alike_at_one(episode):
    "With lambda 1 everywhere a sub-task boundary changes nothing; with 0.95 on every token neither does it"
    reward_BT, value_BT, mask_BT, tool_BT = episode
    torch.testing.assert_close(hierarchical_gae(reward_BT, value_BT, mask_BT, tool_BT, 1.)[0],
                               gae(reward_BT, value_BT, mask_BT, lam=1.)[0])
    lam_BT = span_lambda(subtasks(tool_BT, mask_BT), mask_BT, across=.95, inside=.95)
    torch.testing.assert_close(gae(reward_BT, value_BT, mask_BT, lam=lam_BT)[0], gae(reward_BT, value_BT, mask_BT)[0])


# ---- spans ----

def test_turns_and_subtasks():
    mask_BT = torch.tensor([[0, 1, 1, 0, 1, 0, 0, 1]])
    assert turns(mask_BT).tolist() == [[0, 0, 0, 0, 1, 1, 1, 2]]
    assert subtasks(torch.tensor([[5, 1, 1, 5, 1, 5, 5, 2]]), mask_BT)[mask_BT == 1].tolist() == [0, 0, 0, 1]

@quick
@given(episode=episodes())
def test_subtasks_count_the_changes_of_tool(episode):
    _, _, mask_BT, tool_BT = episode
    for span, tool, m in zip(subtasks(tool_BT, mask_BT), tool_BT, mask_BT.bool()):
        changes = (tool[m][1:] != tool[m][:-1]).long().cumsum(0)
        if m.any(): assert span[m].tolist() == [0, *changes.tolist()]
        assert (span[1:] >= span[:-1]).all()

@pytest.mark.parametrize("changes", range(6))
def test_weight_fifteen_steps_back_is_one_factor_a_change(changes):
    tool_BT = torch.zeros(1, 16, dtype=torch.long)
    for i in range(changes): tool_BT[0, 3 * i + 1:] += 1
    reward_BT = torch.zeros(1, 16, dtype=torch.float64, requires_grad=True)
    A_BT, _ = hierarchical_gae(reward_BT, torch.zeros(1, 16, dtype=torch.float64), torch.ones(1, 16), tool_BT)
    weight = torch.autograd.grad(A_BT[0, 0], reward_BT)[0][0, 15]
    assert abs(weight - .95 ** changes) < 1e-6

@quick
@given(mask_BT=ints((3, 6)), reward_B=floats(3, -2, 2))
def test_the_reward_of_an_episode_lands_on_its_last_sampled_token(mask_BT, reward_B):
    got_BT = at_last_token(reward_B, mask_BT)
    for r, m, g in zip(reward_B, mask_BT, got_BT):
        assert g.sum() == (r if m.any() else 0)
        if m.any(): assert g[m.nonzero()[-1, 0]] == r


# ---- value loss, bad input ----

def test_value_loss_is_the_worse_of_two():
    args = torch.full((1, 3), .5), torch.ones(1, 3), torch.ones(1, 3)
    values = torch.tensor([[.6, .8, .2]], requires_grad=True)
    loss = value_loss(values, *args)
    assert loss.item() == pytest.approx((.4 ** 2 + .3 ** 2 + .8 ** 2) / 6)
    torch.testing.assert_close(torch.autograd.grad(loss, values)[0], torch.tensor([[-.4 / 3, 0, -.8 / 3]]))
    assert value_loss(values, *args, clip=math.inf).item() == pytest.approx((.4 ** 2 + .2 ** 2 + .8 ** 2) / 6)

def test_value_loss_ignores_masked_tokens():
    mask_BT = torch.tensor([[1, 0]])
    a = value_loss(torch.tensor([[.3, 9.]]), torch.zeros(1, 2), torch.ones(1, 2), mask_BT)
    assert a == value_loss(torch.tensor([[.3, -9.]]), torch.zeros(1, 2), torch.zeros(1, 2) + mask_BT, mask_BT)
    assert value_loss(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(1, 2)) == 0

def test_a_reward_on_a_tools_token_is_refused():
    with pytest.raises(ValueError, match="mask 0, where it would be lost.*at_last_token"):
        gae(torch.ones(1, 2), torch.zeros(1, 2), torch.tensor([[1, 0]]))
