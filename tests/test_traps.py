"What a batch pays for, and the cures of six reward traps."
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from agentrl_cookbook.algo.advantage import group_advantages, zero_variance
from agentrl_cookbook.reward.traps import (WEIGHTS, add_rewards, advantages, filled, helped, paid, parts, rehearsed,
                                           standardised, tool_used, out_of_tokens, watch, whole, with_signal)
from agentrl_cookbook.task.faults import PROFILES

quick = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
rewards = st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0, 10.0]), min_size=12, max_size=12)
with_gaps = st.lists(st.sampled_from([None, 0.0, 0.3, 1.0]), min_size=12, max_size=12)
OK,ILLEGAL = [("sql", "ok")],[("?", "malformed")]

def made(calls=(), answer="Oslo"): return SimpleNamespace(calls=list(calls), answer=answer)
def result(value): return json.dumps(dict(ok=True, result=[[value]]))

# ---- advantages and the monitor ----

@quick
@given(rewards)
def test_advantages_are_those_of_the_library_where_all_count(reward_B):
    expected = group_advantages(torch.tensor(reward_B, dtype=torch.float64).reshape(3, 4), eps=1e-4)
    assert np.allclose(advantages(reward_B, 4), expected.reshape(-1), atol=1e-6)

@quick
@given(with_gaps, st.floats(-5, 5))
def test_what_does_not_count_changes_nothing(reward_B, shift):
    a = advantages(reward_B, 4)
    assert all(a[i] == 0 for i,r in enumerate(reward_B) if r is None)
    assert np.allclose(a.reshape(3, 4).sum(1), 0, atol=1e-9)
    assert np.allclose(advantages([r and r+shift if r is None else r+shift for r in reward_B], 4), a, atol=1e-6)
    for g in range(3):
        counted = [r for r in reward_B[4*g:4*g+4] if r is not None]
        if len(counted) > 1: assert np.allclose([x for x,r in zip(a[4*g:], reward_B[4*g:4*g+4]) if r is not None],
                                                advantages(counted, len(counted)))

def test_a_lone_reward_says_nothing(): assert not advantages([None, None, 1.0, None]+[None]*4, 4).any()

@quick
@given(with_gaps)
def test_a_filled_reward_has_no_advantage_and_moves_no_mean(reward_B):
    full,gaps = filled(reward_B, 4),np.array([r is None for r in reward_B])
    library = group_advantages(torch.tensor(full).reshape(3, 4), eps=1e-4).reshape(-1).numpy()
    assert abs(library[gaps]).max(initial=0) < 1e-5 and all(f == r for f,r in zip(full, reward_B) if r is not None)
    for g in range(0, 12, 4):
        counted = [r for r in reward_B[g:g+4] if r is not None]
        assert np.isclose(np.mean(full[g:g+4]), np.mean(counted or [0]))
        assert (advantages(full[g:g+4], 4)*advantages(reward_B[g:g+4], 4) >= -1e-9).all()

def test_tool_and_cut():
    assert [tool_used(c) for c in ([], OK, [("sql", "ok"), ("http", "timeout")])] == ["none", "sql", "http"]
    assert out_of_tokens(made(OK, None)) and out_of_tokens(made([("sql", "timeout")], None)) and out_of_tokens(made([], None))
    assert not out_of_tokens(made(OK, "")) and not out_of_tokens(made(ILLEGAL, None))
    assert not out_of_tokens(made([*OK, ("sql", "budget")], None))

def test_watch():
    batch = [made(OK), made([("http", "slow")]), made([], ""), made(OK, None), made(), made(), made(), made()]
    seen = watch(batch, [1, 0, None, 0, 1, 1, 1, 1], 4)
    assert seen["tools"] == dict(http=1/8, none=5/8, sql=2/8)
    assert seen["alike"] == .5 and seen["left_out"] == seen["cut"] == 1/8 and seen["silent"] == 5/8
    assert seen["struck"] == 0 and watch([made([("sql", "bad_body")])]*2, [1, 1], 2)["struck"] == 1
    assert seen["advantage"]["sql"] == pytest.approx(advantages([1, 0, 0], 3)[[0, 2]].mean())
    assert seen["size"] == pytest.approx(abs(advantages([1, 0, 0], 3)).sum()/8)

# ---- 1 ----

tools_and_rewards = st.lists(st.tuples(st.sampled_from(["sql", "http"]), st.floats(-10, 10)), min_size=1, max_size=30)

@quick
@given(tools_and_rewards, st.integers(0, 30))
def test_running_moments_are_those_of_all_rewards_at_once(pairs, at):
    tools,values = map(list, zip(*pairs))
    stats = add_rewards(add_rewards({}, tools[:at], values[:at]), tools[at:], values[at:])
    for tool in set(tools):
        x = np.array([v for t,v in pairs if t == tool])
        assert stats[tool][0] == len(x)
        assert np.allclose(stats[tool][1:], [x.mean(), len(x)*x.var()], atol=1e-8)

@quick
@given(tools_and_rewards)
def test_adding_leaves_the_old_moments_alone(pairs):
    before = dict(sql=(2, .5, .5))
    add_rewards(before, *map(list, zip(*pairs)))
    assert before == dict(sql=(2, .5, .5))

def test_the_scale_of_a_tool_vanishes():
    rng = np.random.default_rng(0)
    tools = ["sql", "http"]*50
    plain = rng.random(100).round()
    scaled = [10*r if t == "http" else r for t,r in zip(tools, plain)]
    one,ten = (standardised(tools, r, add_rewards({}, tools, r)) for r in (plain, scaled))
    assert np.allclose(one, ten)
    for tool in ("sql", "http"):
        mine = [r for t,r in zip(tools, ten) if t == tool]
        assert np.isclose(np.mean(mine), 0) and np.isclose(np.std(mine), 1)

def test_the_floor_bounds_a_rare_failure():
    stats = add_rewards({}, ["sql"]*1000, [1.0]*1000)
    assert standardised(["sql"], [0.0], stats, floor=0.5) == [-2.0] and standardised(["sql"], [1.0], stats) == [0.0]

# ---- 5 ----

def test_parts_of_an_episode():
    assert parts([], [], ["Atlas"]) == dict(form=0, tool=0, progress=0)
    found = parts([("sql", "ok"), ("?", "malformed")], [result("Atlas"), result("x")], ["Atlas", "Oslo"])
    assert found == dict(form=.5, tool=.5, progress=.5) and set(found) == set(WEIGHTS)
    many = parts([("sql", "ok")]*9, [result("Ben")]*9, ["Atlas", "Oslo"])
    assert many == dict(form=1, tool=1, progress=0), "calls beyond those needed earn nothing"

@quick
@given(st.sampled_from([0.0, 1.0]), st.tuples(*[st.floats(0, 1)]*3), st.floats(0, 1))
def test_help_fades(outcome, values, done):
    found = dict(zip(WEIGHTS, values))
    assert 0 <= helped(outcome, found, done) <= 1+1e-9
    assert abs(helped(outcome, found, 1.0)-outcome) <= 0.1+1e-9 and abs(helped(outcome, found, 0.0)-outcome) <= 0.8+1e-9

# ---- 7 ----

def test_rehearsed_lifts_what_is_there():
    lifted = rehearsed(PROFILES["production"], 0.05)
    assert all(p >= 0.05 for kinds in lifted.values() for p in kinds.values())
    assert {t: set(k) for t,k in lifted.items()} == {t: set(k) for t,k in PROFILES["production"].items()}
    assert rehearsed({}) == {} and rehearsed(dict(sql=dict(timeout=0.0, slow=.3))) == dict(sql=dict(timeout=0, slow=.3))

def test_a_lift_beyond_certainty_is_refused():
    with pytest.raises(ValueError, match="add up to more than 1"): rehearsed(PROFILES["production"], 0.3)

# ---- 8, 9, 10 ----

def test_no_price_is_no_reward():
    assert paid(["right", "no_answer", "illegal_call"], dict(right=1, illegal_call=-1)) == [1, None, -1]
    assert paid(["no_answer"], dict(right=1, wrong_answer=-1, no_answer=-1)) == [-1]

def test_silence_may_not_pay_more_than_the_worst_attempt():
    with pytest.raises(ValueError, match="no_answer earns 0, more than the worst attempt"):
        paid(["right"], dict(right=1, wrong_answer=-1, no_answer=0))

@quick
@given(rewards)
def test_signal_is_where_rewards_differ(reward_B):
    expected = ~zero_variance(torch.tensor(reward_B).reshape(3, 4)).repeat_interleave(4)
    assert with_signal(reward_B, 4).tolist() == expected.int().tolist()

def test_cut_episodes_leave_their_group():
    batch = [made(OK), made(OK, None), made(ILLEGAL, None), made()]
    assert whole(batch, [1.0, 0.0, 0.0, 1.0]) == [1, None, 0, 1]
    assert with_signal(whole(batch, [1.0, 0.0, 1.0, 1.0]), 4).tolist() == [0]*4
