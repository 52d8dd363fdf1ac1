"Statistics of evaluations: hand-computed vectors, other people's implementations, and properties."
import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import binomtest, norm

from agentrl_cookbook.evals.stats import (
    cluster_bootstrap, detectable, in_words, paired_test, pass_at_k, pass_hat_k, success_interval, wilson)
from agentrl_cookbook.run import mean_interval

quick = settings(max_examples=80, deadline=None, derandomize=True)
counts = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))
levels = st.sampled_from([0.8, 0.95, 0.99])


# ---- one success rate ----

@quick
@given(counts, levels)
def test_wilson_is_its_formula(kn, level):
    (k, n), z = kn, norm.ppf(0.5+level/2)
    lo, hi = wilson(k, n, level)
    assert abs(lo-k/n) == pytest.approx(z*math.sqrt(lo*(1-lo)/n), abs=1e-9)    # an end is a rate that could have given k/n
    assert abs(hi-k/n) == pytest.approx(z*math.sqrt(hi*(1-hi)/n), abs=1e-9)
    assert 0 <= lo <= k/n <= hi <= 1 and (1-hi, 1-lo) == pytest.approx(wilson(n-k, n, level), abs=1e-9)

@quick
@given(counts, levels)
def test_wilson_is_scipys(kn, level):
    interval = binomtest(*kn).proportion_ci(level, method="wilson")
    assert wilson(*kn, level) == pytest.approx((interval.low, interval.high), abs=1e-12)

def test_wilson_takes_arrays():
    lo, hi = wilson(np.arange(11), 10)
    assert [(a, b) for a,b in zip(lo, hi)] == [wilson(k, 10) for k in range(11)]
    assert isinstance(wilson(3, 10)[0], float) and wilson(60, 64) == pytest.approx((0.850, 0.9754), abs=5e-5)

@pytest.mark.parametrize("k, n", [(0, 0), (3, 2), (-1, 5), ([1, 3], 2)])
def test_no_rate_no_interval(k, n):
    with pytest.raises(ValueError, match="tasks give no success rate"): wilson(k, n)


# ---- two policies ----

def flips(gained, lost):
    "Two-sided p of at least this many heads or tails among fair coins, exactly"
    m, far = gained+lost, abs(gained-lost)
    return float(sum(Fraction(math.comb(m, i), 2**m) for i in range(m+1) if abs(2*i-m) >= far))

@quick
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_the_paired_test_is_a_coin_flip_on_the_tasks_that_differ(pairs):
    a, b = [int(x) for x,_ in pairs], [int(y) for _,y in pairs]
    res, back = paired_test(a, b), paired_test(b, a)
    assert res["p"] == pytest.approx(flips(res["gained"], res["lost"])) and res["p"] == back["p"] <= 1
    assert res["difference"] == pytest.approx(sum(b)/len(b)-sum(a)/len(a)) == -back["difference"]
    both = paired_test(a+[1, 0]*20, b+[1, 0]*20)   # tasks on which both do the same say nothing
    assert (both["p"], both["gained"], both["lost"]) == (res["p"], res["gained"], res["lost"])

def test_a_row_is_a_comparison_of_its_own():
    a, b = np.random.default_rng(0).random((2, 7, 30)) < 0.5
    rows = paired_test(a, b)
    for i in range(7):
        one = paired_test(a[i], b[i])
        assert {k: rows[k][i] for k in ("difference", "p", "gained", "lost")} == {k: one[k] for k in one if k != "n"}

def test_types_are_plain():
    res = paired_test([True, False], np.array([1, 1]))
    assert [type(res[k]) for k in ("difference", "p", "gained", "lost", "n")] == [float, float, int, int, int]

@pytest.mark.parametrize("a, b", [([1], [1, 0]), ([], [])])
def test_a_paired_test_needs_pairs(a, b):
    with pytest.raises(ValueError, match="both policies on the same tasks"): paired_test(a, b)

@quick
@given(st.integers(2, 5000), st.floats(0, 1), st.sampled_from([0.5, 0.8, 0.9]))
def test_detectable_solves_its_equation(n, p, power):
    d = detectable(n, p, power)
    other = p-d if p >= 0.5 else p+d
    noise = math.sqrt((p*(1-p)+other*(1-other))/n)
    assert d == pytest.approx((norm.ppf(0.975)+norm.ppf(power))*noise, abs=1e-9) and 0 < d <= 1
    assert detectable(4*n, p, power) < d < detectable(n, p, power, level=0.99)

def test_detectable_takes_arrays():
    ns = np.array([50, 114, 512])
    assert detectable(ns, 0.8).tolist() == [detectable(int(n), 0.8) for n in ns]


# ---- many trials ----

def test_vectors_of_passing():
    k = np.arange(1, 5)
    assert pass_hat_k(4, 3, k).tolist() == [0.75, 0.5, 0.25, 0]
    assert pass_at_k(4, 3, k).tolist() == [0.75, 1, 1, 1]
    assert pass_hat_k([4, 4, 2], [4, 2, 0], 2).tolist() == pytest.approx([1, 1/6, 0])

trials = st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))

@quick
@given(trials)
def test_passing_is_counting_subsets(nck):
    n, c, k = nck
    subsets = list(combinations([1]*c+[0]*(n-c), k))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, subsets))/len(subsets))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets))/len(subsets))

@quick
@given(trials)
def test_one_minus_all_fail_is_one_succeeds(nck):
    n, c, k = nck
    assert pass_at_k(n, c, k) == pytest.approx(1-pass_hat_k(n, n-c, k))
    assert pass_hat_k(n, c, 1) == pytest.approx(c/n) == pass_at_k(n, c, 1)
    assert pass_hat_k(n, c, k) <= c/n+1e-12 <= pass_at_k(n, c, k)+2e-12

@pytest.mark.parametrize("n, c, k", [(3, 1, 4), (3, 1, 0), ([4, 2], [1, 1], 3)])
def test_no_more_trials_than_were_played(n, c, k):
    for f in (pass_hat_k, pass_at_k):
        with pytest.raises(ValueError, match="k goes from 1 to the number of trials"): f(n, c, k)

def test_no_more_successes_than_trials():
    with pytest.raises(ValueError, match="successes of each task"): pass_hat_k(3, 4, 2)


# ---- trials are not tasks ----

values = st.lists(st.tuples(st.sampled_from("abcde"), st.floats(-5, 5)), min_size=1, max_size=30)

@quick
@given(values)
def test_the_bootstrap_contains_the_mean_and_nothing_impossible(pairs):
    labels, xs = zip(*pairs)
    mean, low, high = cluster_bootstrap(xs, labels, draws=200)
    means = [np.mean([x for l,x in pairs if l == name]) for name in set(labels)]
    assert mean == pytest.approx(np.mean(xs)) and min(means)-1e-9 <= low <= high <= max(means)+1e-9
    again = cluster_bootstrap(xs, [l*2 for l in labels], draws=200)     # names do not matter
    assert again == (mean, low, high)

def test_the_spread_of_the_bootstrap_is_the_standard_error():
    rng = np.random.default_rng(0)
    by_task = rng.normal(size=(400, 1))+0.1*rng.normal(size=(400, 4))
    mean, low, high = cluster_bootstrap(by_task.ravel(), np.repeat(np.arange(400), 4), draws=4000)
    error = by_task.mean(1).std(ddof=1)/20
    assert (high-low)/2/1.96 == pytest.approx(error, rel=0.06)
    assert (high-low) > 1.8*np.subtract(*cluster_bootstrap(by_task.ravel(), draws=4000)[:0:-1])   # trials as tasks: too narrow

def test_tasks_of_different_size_are_weighed_by_their_trials():
    mean, low, high = cluster_bootstrap([1, 1, 1, 0], ["a", "a", "a", "b"], draws=500)
    assert (mean, low, high) == (0.75, 0, 1)

@pytest.mark.parametrize("xs, labels", [([], None), ([1.0, math.nan], None), ([[1, 0]], None), ([1, 0], ["a"])])
def test_no_bootstrap_of_nothing(xs, labels):
    with pytest.raises(ValueError, match="give one"): cluster_bootstrap(xs, labels)

def test_certainty_is_never_claimed():
    assert success_interval([1]*8, list("aabbccdd")) == (1.0, *wilson(4, 4))
    assert success_interval([0, 0], "ab") == (0.0, *wilson(0, 2))
    assert success_interval([1, 0, 1], "abc") == (2/3, *wilson(2, 3))
    assert success_interval([1, 0, 1, 1], "aabb") == cluster_bootstrap([1, 0, 1, 1], list("aabb"))


# ---- a difference over seeds ----

@quick
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8))
def test_words_follow_the_interval(values):
    _,low,high = mean_interval(values)
    word = in_words(values).split(", ")[-1]
    assert word == ("more" if low > 0 else "less" if high < 0 else "no difference")
    assert in_words([-v for v in values]).endswith(dict(more="less", less="more").get(word, word))
