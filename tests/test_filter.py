"Which episodes reach the loss"
import pytest
import torch
from hypothesis import given, strategies as st
from trl_code import binary, quick

from agentrl_cookbook.algo.advantage import group_advantages
from agentrl_cookbook.algo.filter import dynamic_sampling, overlong_penalty

@quick
@given(reward_PG=binary, wanted=st.integers(0, 6))
def test_every_group_kept_teaches_and_every_one_dropped_does_not(reward_PG, wanted):
    kept_N, missing = dynamic_sampling(reward_PG, wanted)
    teaches = [p for p in range(len(reward_PG)) if group_advantages(reward_PG)[p].abs().sum() > 0]
    assert kept_N.tolist() == teaches[:wanted] and missing == wanted - len(kept_N)

@pytest.mark.parametrize("length, expected", [(0, 0), (16384, 0), (18432, -.5), (20480, -1), (20481, -1), (10**6, -1)])
def test_published_penalty(length, expected): assert overlong_penalty(torch.tensor([length])) == expected

@quick
@given(a=st.integers(0, 200), b=st.integers(0, 200))
def test_longer_is_never_better(a, b):
    short, long = overlong_penalty(torch.tensor(sorted((a, b))), 100, 40)
    assert -1 <= long <= short <= 0
