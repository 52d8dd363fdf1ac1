"Shaping that cancels out and shaping that does not, a bonus, decaying weights, and step scores from roll-outs."
import itertools,json,math

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from agentrl_cookbook.reward.shaping import auxiliary_share, call_bonus, mixed, progress, shaping, step_values

quick = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
small = st.floats(-2, 2)
gammas = st.floats(0, 1)

def total(reward_K, gamma): return sum(gamma**k*r for k,r in enumerate(reward_K))
def result(value): return json.dumps(dict(ok=True, result=[[value]]))

# ---- potentials ----

def test_published_vector():
    assert np.allclose(shaping([.2, .5, 0], .9), [.25, -.5], atol=1e-12)
    assert math.isclose(total([0, 1]+shaping([.2, .5, 0], .9), .9), .7)

@quick
@given(st.lists(small, min_size=1, max_size=9), gammas)
def test_the_discounted_sum_telescopes(potential, gamma):
    K = len(potential)-1
    expected = gamma**K*potential[-1]-potential[0]
    assert math.isclose(total(shaping(potential, gamma), gamma), expected, abs_tol=1e-9) and len(shaping(potential, gamma)) == K

@quick
@given(st.lists(st.lists(st.tuples(small, small), min_size=1, max_size=6), min_size=2, max_size=5), small, gammas)
def test_every_episode_of_a_start_shifts_alike(episodes, start, gamma):
    for steps in episodes:
        rewards,after = zip(*steps)
        extra = shaping([start, *after[:-1], 0], gamma)
        assert math.isclose(total(rewards+extra, gamma)-total(rewards, gamma), -start, abs_tol=1e-9)

def values_of(next_state, reward, gamma, potential):
    "Action values of a small decision process by iteration; state 0 is the end"
    S,A = next_state.shape
    q = np.zeros((S, A))
    for _ in range(400):
        q = reward+gamma*potential[next_state]-potential[:, None]+gamma*q.max(1)[next_state]
        q[0] = 0
    return q

@quick
@given(st.integers(0, 10**6))
def test_the_best_action_stays_the_best_in_every_state(seed):
    rng = np.random.default_rng(seed)
    next_state,reward = rng.integers(0, 5, (5, 3)),rng.normal(size=(5, 3))
    potential = np.array([0, *rng.normal(size=4)])
    plain,shaped = (values_of(next_state, reward, .8, p) for p in (0*potential, potential))
    assert np.allclose(shaped[1:], plain[1:]-potential[1:, None]) and (plain.argmax(1) == shaped.argmax(1)).all()

def test_a_last_potential_that_is_not_zero_changes_the_ranking():
    assert total([0]+shaping([0, .5]), 1) > total([.4]+shaping([0, 0]), 1)

def test_progress():
    p = progress([result("x"), result("Atlas"), result("Atlas"), "no JSON", '{"ok": false, "kind": "timeout", "error": "Oslo"}',
                  result("Oslo")], ["Atlas", "Oslo"])
    assert p.tolist() == [0, 0, .5, .5, .5, .5, 1, 0] and progress([], ["Oslo"]).tolist() == [0, 0]

@quick
@given(st.lists(st.sampled_from("abcd"), max_size=6), st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True))
def test_progress_pays_nothing_in_the_end(read, needed):
    p = progress([result(v) for v in read], needed)
    assert abs(shaping(p).sum()) < 1e-12 and (np.diff(p[:-1]) >= 0).all() and p[-2] == len(set(read) & set(needed))/len(needed)

def test_a_group_of_ended_episodes_keeps_its_advantages_and_a_cut_one_changes_them():
    from torch import tensor
    from agentrl_cookbook.algo.advantage import group_advantages
    rewards,ended,cut = [1., 0., 0., 0.], [0, .5, .5, 0], [0, .5, .5]
    plain = group_advantages(tensor([rewards]))
    assert (group_advantages(tensor([[r+float(shaping(ended).sum()) for r in rewards]])) == plain).all()
    changed = group_advantages(tensor([[1., float(shaping(cut).sum()), 0., 0.]]))[0]
    assert changed[0] < plain[0, 0] and changed[1] > 0 > plain[0, 1]

# ---- bonus and weights ----

def test_bonus():
    calls = [("sql", "ok"), ("sql", "timeout"), ("?", "malformed"), ("http", "ok"), ("sql", "ok")]
    assert math.isclose(call_bonus(calls), .3) and call_bonus(calls, most=1) == .1 and call_bonus([]) == 0
    assert call_bonus(calls, bonus=.5, most=2) == 1

def test_share_of_the_auxiliary_rewards():
    assert [round(auxiliary_share(d), 9) for d in (-1, 0, .5, 1, 7)] == [.8, .8, .45, .1, .1]
    assert auxiliary_share(.25, first=1, last=0) == .75

@quick
@given(st.floats(0, 1), st.tuples(*[st.floats(0, 1)]*3), st.floats(0, 1))
def test_the_mix_lies_between_its_parts(outcome, parts, share):
    names = ("form", "tool", "progress")
    weights = dict(zip(names, (.3, .2, .5)))
    m = mixed(outcome, dict(zip(names, parts)), weights, share)
    assert min(outcome, *parts)-1e-9 <= m <= max(outcome, *parts)+1e-9
    assert math.isclose(mixed(outcome, dict(zip(names, parts)), {k: 7*w for k,w in weights.items()}, share), m, abs_tol=1e-9)
    assert math.isclose(mixed(outcome, dict(zip(names, parts)), weights, 0), outcome, abs_tol=1e-12)

def test_where_an_untidy_success_overtakes_a_tidy_failure():
    weights = dict(form=.3, tool=.2, progress=.5)
    gap = lambda share: (mixed(1, dict(form=0, tool=1, progress=1), weights, share)
                         - mixed(0, dict(form=1, tool=1, progress=1), weights, share))
    assert abs(gap(1/1.3)) < 1e-9 and gap(.8) < 0 < gap(.76)

def test_parts_without_weights_are_named():
    with pytest.raises(ValueError, match="The parts are form, the weights tool: give each part a weight"):
        mixed(1, dict(form=1), dict(tool=1), .5)

# ---- step scores ----

def test_step_values():
    table = step_values(pd.DataFrame(dict(state=["b", "a", "b", "b", "b"], outcome=[1, 0, 0, 0, 0])))
    assert list(table.index) == ["b", "a"] and table.loc["b", ["value", "any", "n"]].tolist() == [.25, 1, 4]
    assert table.loc["a", ["value", "any", "n"]].tolist() == [0, 0, 1]
    assert math.isclose(table.error["b"], (1/3*2/3/6)**.5) and table.error["a"] > 0

@quick
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1)), min_size=1, max_size=30), st.randoms())
def test_the_order_of_rollouts_does_not_matter(rows, r):
    table = step_values(pd.DataFrame(rows, columns=["state", "outcome"])).sort_index()
    r.shuffle(rows)
    pd.testing.assert_frame_equal(table, step_values(pd.DataFrame(rows, columns=["state", "outcome"])).sort_index())
    assert table.n.sum() == len(rows) and math.isclose((table.value*table.n).sum(), sum(o for _,o in rows), abs_tol=1e-9)

def test_exact_values_give_each_step_what_it_changed():
    "All roll-outs of a task of three fair coins that must all be right"
    rows = [(state, float("0" not in state+"".join(tail))) for state in ("", "1", "10")
            for tail in itertools.product("01", repeat=3-len(state))]
    values = step_values(pd.DataFrame(rows, columns=["state", "outcome"])).value
    assert values.tolist() == [1/8, 1/4, 0]
    steps = shaping([*values, 0.0])
    assert steps.tolist() == [1/8, -1/4, 0] and steps.sum() == -values[""]
