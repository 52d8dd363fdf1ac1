"What the front page and the README say is what was published"
import json
from collections import Counter

from conftest import ROOT
from agentrl_cookbook.run import mean_interval

RUNS = [r["metrics"] for r in json.loads((ROOT/"nbs/results/quickstart.json").read_text())]
TRAINED,CONTROL = ([m for m in RUNS if m["shuffle_rewards"] == s and m["n_heldout"] >= 256] for s in (False, True))

def cell(values):
    mean,low,high = mean_interval(values)
    return f"{mean:.2f} [{max(0, low):.2f}, {min(1, high):.2f}]"

def test_three_seeds_of_each():
    assert Counter(m["seed"] for m in TRAINED) == Counter(m["seed"] for m in CONTROL) == {0: 1, 1: 1, 2: 1}

def test_rl_closes_the_gap_on_every_seed():
    sampled = [m["rl_success_t1"] for m in TRAINED]
    assert sum(sampled)/3 >= 0.90 and min(sampled) >= 0.85
    assert all(m["rl_success_t1"]-m["sft_success_t1"] >= 0.15 for m in TRAINED)
    assert all(m["rl_success_greedy"] > m["sft_success_greedy"] and m["paired_p"] < 0.01 for m in TRAINED)

def test_sft_is_trained_to_its_best_on_what_it_covers():
    assert all(m["sft_success_covered"] >= 0.95 for m in TRAINED)

def test_shuffled_rewards_teach_nothing():
    change = [m["rl_success_t1"]-m["sft_success_t1"] for m in CONTROL]
    assert sum(m["n_heldout"] for m in CONTROL) >= 1024
    assert mean_interval(change)[1] <= 0

def test_readme_says_what_was_published():
    readme = (ROOT/"README.md").read_text()
    for k,how in [("t1", "sampled at temperature 1"), ("greedy", "greedy")]:
        line = [how, cell([m[f"sft_success_{k}"] for m in TRAINED]), cell([m[f"rl_success_{k}"] for m in TRAINED]),
                cell([m[f"rl_success_{k}"] for m in CONTROL])]
        assert f"| {' | '.join(line)} |" in readme
