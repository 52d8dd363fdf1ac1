"States read from results, values from outcomes, where roll-outs start, a fine; and the parameters and results of the chapter."
import json

import pytest
import yaml
from conftest import ROOT
from hypothesis import HealthCheck, given, settings, strategies as st

from agentrl_cookbook.reward.credit import branch_points, fined, read_states, state_values
from agentrl_cookbook.reward.shaping import shaping
from agentrl_cookbook.reward.verifier import LEGAL, verify
from agentrl_cookbook.run import check_values, read_params, results
from agentrl_cookbook.task.faults import FAULTS, REPLIES

quick = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
values = st.lists(st.sampled_from("abcd"), min_size=1, max_size=5)
visits = st.lists(st.lists(st.sampled_from("abc"), max_size=4).map(lambda l: ["start", *l]), min_size=1, max_size=6)

def ok(*found): return json.dumps(dict(ok=True, result=[list(found)]))
def failed(kind): return json.dumps(dict(ok=False, kind=kind, error="try again"))

# ---- states ----

def test_values_count_only_in_order():
    assert read_states([ok("b"), ok("a"), ok("b")], ["a", "b"]) == ["2: 0 start", "2: 0 nothing", "2: 1 read", "2: 2 read"]

def test_a_value_twice_on_the_path_is_read_twice():
    assert read_states([ok("a"), ok("a"), ok("a")], ["a", "a"])[1:] == ["2: 1 read", "2: 2 read", "2: 2 nothing"]

@pytest.mark.parametrize("kind", REPLIES)
def test_a_fault_is_not_the_policys_doing(kind): assert read_states([failed(kind)], ["a"])[1] == "1: 0 fault"

@pytest.mark.parametrize("text", ["", "nonsense", "7", "[1]", "null", failed("malformed"), failed("sql")])
def test_what_brings_nothing(text): assert read_states([text], ["a"])[1] == "1: 0 nothing"

@quick
@given(values, values)
def test_progress_never_falls_and_ends_at_the_number_needed(needed, found):
    counts = [int(s.split()[1]) for s in read_states([ok(v) for v in found], needed)]
    assert len(counts) == len(found)+1 and all(0 <= b-a <= 1 for a,b in zip(counts, counts[1:]))
    assert read_states([ok(v) for v in needed], needed)[-1] == f"{len(needed)}: {len(needed)} read"

# ---- values ----

def test_an_episode_counts_once_for_a_state():
    found = state_values([["s", "a", "a"], ["s", "a"], ["s", "b"]], [1, 0, 1])
    assert found.to_dict() == {"s": pytest.approx(2/3), "a": 0.5, "b": 1}

@quick
@given(visits, st.data())
def test_step_scores_add_up_to_outcome_minus_the_start(visited, data):
    outcomes = data.draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=len(visited), max_size=len(visited)))
    found = state_values(visited, outcomes)
    assert found["start"] == pytest.approx(sum(outcomes)/len(outcomes)) and found.between(0, 1).all()
    for row,o in zip(visited, outcomes):
        assert shaping([*(found[s] for s in row), o]).sum() == pytest.approx(o-found["start"])

# ---- roll-outs ----

@quick
@given(visits, st.integers(1, 30), st.integers(1, 6))
def test_roll_outs_start_at_states_that_were_reached(visited, n, least):
    found = branch_points(visited, n, least)
    after = {s for row in visited for s in row[1:]}
    assert len(found) == (n if after else 0)
    assert all(0 < k < len(visited[b]) for b,k in found)
    counts = [sum(visited[b][k] == s for b,k in found) for s in {visited[b][k] for b,k in found}]
    if counts: assert max(counts)-min(counts) <= 1 and (min(counts) >= least or len(counts) == 1)

def test_the_most_visited_state_comes_first():
    assert {k for _,k in branch_points([["s", "a", "b"], ["s", "a"]], 4)} == {1}

def test_nothing_to_branch_from(): assert branch_points([["s"], ["s"]], 8) == []

# ---- the fine ----

@quick
@given(st.lists(st.sampled_from([*LEGAL, "malformed", "sql", "budget"]), max_size=5), st.sampled_from(["x", "y", "", None]),
       st.floats(0, 2))
def test_a_fine_is_taken_once_and_a_right_answer_keeps_its_point(kinds, answer, fine):
    calls,observed = [("sql", k) for k in kinds],[ok("x")]*("ok" in kinds)
    legal = all(k in LEGAL for k in kinds)
    right = answer == "x" and "ok" in kinds
    assert fined(answer, "x", calls, observed, fine) == right-fine*(not legal)
    if legal: assert fined(answer, "x", calls, observed, fine) == verify(answer, "x", calls, observed).reward

@pytest.mark.parametrize("kind", FAULTS)
def test_an_injected_fault_costs_nothing(kind): assert fined("x", "x", [("sql", kind), ("sql", "ok")], [ok("x")]) == 1

# ---- the chapter ----

def parameters():
    cells = json.loads((ROOT/"nbs/reward/credit.ipynb").read_text())["cells"]
    [cell] = [c for c in cells if "parameters" in c["metadata"].get("tags", [])]
    return read_params("".join(cell["source"]))

def test_the_published_parameters_are_known():
    given = yaml.safe_load((ROOT/"nbs/params/reward/credit.full.yaml").read_text())
    assert check_values(parameters(), given)["seeds"] >= 3

PUBLISHED = [r for r in results("reward/credit") if r["metrics"]["seeds"] >= 3]

@pytest.mark.skipif(not PUBLISHED, reason="nothing is published")
def test_every_arm_has_every_seed_and_the_same_number_of_episodes():
    for record in PUBLISHED:
        runs,n = record["metrics"]["runs"],record["metrics"]["seeds"]
        played = {}
        for run in runs:
            assert run["success"] == pytest.approx(run["won"].count("1")/len(run["won"]))
            total = sum(line["episodes"]+line.get("rollouts", 0) for line in run["curve"])
            played.setdefault(len(run["curve"]), []).append(total)
        assert all(max(totals) <= 1.05*min(totals) for totals in played.values())
        arms = {run["arm"] for run in runs}
        assert sorted((run["arm"], run["seed"]) for run in runs) == sorted((a, s) for a in arms for s in range(n))

# ---- What the page concludes ----

def code_after(heading):
    "Code cells after a heading"
    cells = json.loads((ROOT/"nbs/reward/credit.ipynb").read_text())["cells"]
    first = next(i for i,c in enumerate(cells) if "".join(c["source"]).startswith(heading))
    return ["".join(c["source"]) for c in cells[first:] if c["cell_type"] == "code"]

def made_up(gain):
    "Metrics of three seeds in which every arm but `weighted mix` gains over its start"
    short = ["outcome", "0.1 a call", "0.1 a call, limited", "weighted mix", "fine, ends", "fine, goes on"]
    long = ["episode", "sub-task", "turn", "token", "step", "step, rolled out"]
    line = dict(success=.5, calls=2.0, ok=2.0, extra=.1, illegal=.1, silent=.1, tokens=20.0, episodes=96, won="10")
    start = [line | dict(kind=kind, seed=seed, success=.3+.01*seed) for kind in ("short", "long") for seed in range(3)]
    runs = [line | dict(arm=arm, seed=seed, curve=[line]*4, success=.3+.012*seed+(arm != "weighted mix")*gain)
            for arm in short+long for seed in range(3)]
    return dict(start=start, runs=runs, seeds=3),dict.fromkeys(short),dict.fromkeys(long)

@pytest.mark.parametrize("gain,outcome", [(.2, "reproduced in direction"), (-.2, "wrong")])
def test_conclusions_follow_the_figures(gain, outcome, capsys):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt, numpy as np, pandas as pd
    from agentrl_cookbook.evals.stats import in_words
    from agentrl_cookbook.run import mean_interval, verdict
    metrics,short,long = made_up(gain)
    studies = dict(bonus=["outcome", "0.1 a call", "0.1 a call, limited"], mix=["outcome", "weighted mix"],
                   illegal=["outcome", "fine, ends", "fine, goes on"], credit=["episode", "sub-task", "turn", "token"],
                   process=["episode", "step", "step, rolled out"])
    space = dict(np=np, pd=pd, plt=plt, mean_interval=mean_interval, verdict=verdict, metrics=metrics, SHORT=short,
                 LONG=long, STUDIES=studies, results=lambda name: [], in_words=in_words)
    for cell in code_after("## What came out"): exec(cell, space)
    plt.close("all")
    said = capsys.readouterr().out
    assert "a slice: 36 runs, 3 seeds" in said and f"K24 · {outcome}" in said
    assert "K18 in training, against the episode · not reproduced" in said and "K35 shaping · not reproduced" in said
    assert "success, sub-task minus episode: +0.000 [+0.000, +0.000], no difference" in said and "too few" not in said
