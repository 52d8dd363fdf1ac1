"Reward models from pairs: AUC, renamed schemas, counterfactual labels, projection, consistency, last layers."
import itertools,json,math,sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from scipy.stats import mannwhitneyu
from torch.distributions import Bernoulli, kl_divergence
from trl import RewardTrainer

from agentrl_cookbook.policy.tiny import tiny_policy, trace_texts, train_tokenizer
from agentrl_cookbook.reward.learnt import (DRESSES, ConsistentTrainer, consistency, counterfactuals, dressed, encode_pairs,
    label_pairs, last_layers, moved, paired_auc, project, rename_schema, renamed, reward_model, score_texts, train_reward,
    with_twins)
from agentrl_cookbook.task.graph import graph
from agentrl_cookbook.task.synth import all_tasks, make_task
from agentrl_cookbook.task.tools import open_database, sql
from agentrl_cookbook.task.world import COMPANY, write_database

pytestmark = pytest.mark.usefixtures("one_thread")
quick = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
scores = st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=2, max_size=30)
CALL = json.dumps(dict(name="sql", arguments=dict(query="SELECT home FROM person WHERE name = 'Ada'")))
RULES = ("order", "tag", "call", "bold", "fence", "spaces")   # what a projection can take off

@pytest.fixture(scope="module")
def texts(g):
    chats = [[dict(role="user", content=t.question), dict(role="assistant", content=t.queries[0])] for t in all_tasks(g, 1)]
    return trace_texts(chats)

@pytest.fixture(scope="module")
def tokenizer(texts): return train_tokenizer(texts)

# ---- figures ----

@quick
@given(scores)
def test_auc_is_mann_whitney(pairs):
    good,bad = np.array(pairs).T
    value,low,high = paired_auc(good, bad)
    assert math.isclose(value, mannwhitneyu(good, bad).statistic/len(good)**2, abs_tol=1e-12)
    assert low <= value <= high and math.isclose(value+paired_auc(bad, good)[0], 1, abs_tol=1e-12)

def test_interval_of_the_auc_holds_what_it_promises():
    "Scores of one question go together; the true AUC of two normals one apart is 0.760"
    rng,held = np.random.default_rng(0),0
    for _ in range(400):
        shared = rng.normal(size=60)
        good,bad = (shared*.5**.5+rng.normal(size=60)*.5**.5+shift for shift in (1, 0))
        _,low,high = paired_auc(good, bad)
        held += low <= 0.7602 <= high
    assert .92 <= held/400 <= .98

def test_scores_without_a_partner_are_refused():
    with pytest.raises(ValueError, match="3 good and 2 bad scores: give one of each for every question"): paired_auc([1, 2, 3], [1, 2])

@quick
@given(scores, st.floats(.1, 9), st.floats(-9, 9))
def test_what_a_change_costs_has_no_unit(pairs, scale, shift):
    a,b = np.array(pairs).T
    if np.concatenate([a, b]).std() < 1e-3: return
    assert math.isclose(moved(a, b), moved(scale*a+shift, scale*b+shift), rel_tol=1e-6, abs_tol=1e-6)
    assert math.isclose(moved(a, b), -moved(b, a), abs_tol=1e-9) and abs(moved(a, b)) <= 2+1e-9

# ---- names ----

def test_renaming_leaves_values_and_longer_words_alone():
    assert renamed("SELECT home,homes FROM person WHERE name = 'home of Ada'", dict(home="h", person="p")) == \
        "SELECT h,homes FROM p WHERE name = 'home of Ada'"
    assert renamed("home", {}) == "home" and renamed("a b", dict(a="b", b="a")) == "b a"

def test_a_renamed_schema_holds_the_same(database, g, tmp_path):
    before = database.read_bytes()
    names = dict(person="staff", home="residence", name="label", city="town")
    new = graph(rename_schema(database, tmp_path/"new.sqlite", names))
    assert database.read_bytes() == before and not new.graph["left_out"]
    assert new.graph["tables"]["staff"]["fk"]["residence"] == ("town", "label")
    for hops in (1, 2):
        old_tasks,new_tasks = list(all_tasks(g, hops)),{t.question: t for t in all_tasks(new, hops)}
        assert len(old_tasks) == len(new_tasks)
        for t in old_tasks:
            twin = new_tasks[renamed(t.question, names)]
            assert twin.answer == t.answer and twin.queries == tuple(renamed(q, names) for q in t.queries)

# ---- labels ----

def test_counterfactual_calls_run_and_use_the_names_of_the_schema(database, g):
    with closing(open_database(database)) as connection:
        for t in list(all_tasks(g, 1))[::7]:
            labelled = counterfactuals(t, g, seed=3)
            assert [label for _,label in labelled] == [1.0, -.5, -.5, -.5] and labelled[0][0] == t.queries[0]
            assert len({call for call,_ in labelled}) == 4 and labelled == counterfactuals(t, g, seed=3)
            results = [sql(connection, call) for call,_ in labelled]
            assert all(r["ok"] for r in results) and results[0]["result"] == [[t.answer]]

def test_other_seeds_give_other_calls(g):
    t = make_task(g, "person", "Ada", ("home",))
    assert len({counterfactuals(t, g, seed)[1] for seed in range(20)}) > 5

def test_a_table_of_one_row_is_named(tmp_path):
    rows = dict(city=[("Oslo", "Norway", "north")], team=[("Atlas", "Oslo", None, "sales")])
    g = graph(write_database(tmp_path/"one.sqlite", COMPANY, rows))
    with pytest.raises(ValueError, match="Table city has one row only"): counterfactuals(make_task(g, "city", "Oslo", ("zone",)), g)

def test_pairs_of_labels():
    pairs = label_pairs("q ", [("gold", 1.0), ("tried", 0.0), ("wrong", -.5)])
    assert [(p["chosen"], p["rejected"], p["margin"]) for p in pairs] == [
        ("q gold", "q tried", 1.0), ("q gold", "q wrong", 1.5), ("q tried", "q wrong", .5)]
    assert label_pairs("q", [("a", 1), ("b", 1)]) == []

# ---- dress ----

@pytest.mark.parametrize("names", [c for n in range(4) for c in itertools.permutations(RULES, n)], ids="-".join)
def test_every_dress_by_rule_is_taken_off(names): assert project(dressed(CALL, names)) == project(CALL)

def test_the_work_is_not_taken_off():
    other = CALL.replace("home", "team")
    assert project(CALL) != project(other) and project(dressed(CALL, ("tag",))) != project(dressed(other, ("tag",)))
    for text in ("a < b and c > d", "SELECT * FROM t WHERE a<b AND c>d", "x_y __init", "2 * 3", "'a', \"b\""):
        assert project(text) == text
    assert project('{"b": 1, "a": {"d": [2, 1], "c": "x"}} then') == '{"a": {"c": "x", "d": [2, 1]}, "b": 1} then'
    inside = json.dumps(dict(query="SELECT a**2  FROM t WHERE a<b AND c>'<b>x</b>'"))
    assert project(f"<answer>{inside}</answer>") == project(inside) == inside
    assert project('<a href="x y">Oslo</a><br/>\n## Rome') == "Oslo Rome" and project("") == ""

@quick
@given(st.text(alphabet="<>/ab*`_#{}\":1, \n", max_size=40))
def test_projecting_twice_changes_nothing(text): assert project(project(text)) == project(text)

def test_a_dress_keeps_the_call():
    for name in (*DRESSES, "order", "plain"):
        text = dressed(CALL, (name,))
        assert json.loads(text[text.index("{"):text.rindex("}")+1]) == json.loads(CALL)

@quick
@given(scores)
def test_the_penalty_is_a_kl_divergence(pairs):
    a,b = torch.tensor(pairs, dtype=torch.float64).T
    kl = consistency(a, b)
    assert torch.allclose(kl, kl_divergence(Bernoulli(logits=a), Bernoulli(logits=b)), atol=1e-9) and (kl >= -1e-9).all()

def test_the_penalty_pulls_the_scores_together():
    s = torch.tensor([1.0, -2.0, .5], requires_grad=True)
    t = torch.tensor([0.0, 1.0, .5], requires_grad=True)
    consistency(s, t).sum().backward()
    assert s.grad[0] > 0 > s.grad[1] and t.grad[0] < 0 < t.grad[1] and s.grad[2] == t.grad[2] == 0

# ---- training ----

def test_a_reward_model_takes_the_backbone_and_leaves_the_random_state(tokenizer):
    policy,before = tiny_policy(tokenizer, seed=5),torch.get_rng_state()
    model = reward_model(tokenizer, seed=1, policy=policy)
    assert torch.equal(torch.get_rng_state(), before) and model.score.weight.shape[0] == 1
    assert all(torch.equal(p, model.model.state_dict()[k]) for k,p in policy.model.state_dict().items())
    assert not torch.equal(model.score.weight, reward_model(tokenizer, seed=2).score.weight)

def test_a_score_does_not_depend_on_its_company(tokenizer, texts):
    model = reward_model(tokenizer).eval()
    alone = [score_texts(model, tokenizer, [t])[0] for t in texts[:8]]
    assert np.allclose(score_texts(model, tokenizer, texts[:8]+["x"*90], batch=5)[:8], alone, atol=1e-5)

def batch_of(trainer, tokenizer, pairs): return trainer.data_collator(encode_pairs(tokenizer, pairs))

def make_trainer(kind, tokenizer, pairs, folder):
    "An untrained trainer, from inside `train_reward`"
    kept = []
    class Kept(kind):
        def train(self, *args, **kwargs): kept.append(self)
    train_reward(reward_model(tokenizer), tokenizer, pairs, folder, trainer_class=Kept)
    return kept[0]

def test_the_losses_by_hand(tokenizer, texts, tmp_path):
    a,b,c,d = texts[:4]
    pair = dict(chosen=a, rejected=b, margin=1.5, twin_chosen=c, twin_rejected=d)
    plain,kind = (make_trainer(k, tokenizer, [pair], tmp_path) for k in (RewardTrainer, ConsistentTrainer))
    s = torch.tensor(score_texts(plain.model.eval(), tokenizer, texts[:4]))
    expected = -torch.nn.functional.logsigmoid(s[0]-s[1]-1.5)
    assert math.isclose(plain.compute_loss(plain.model, batch_of(plain, tokenizer, [pair])).item(), expected, abs_tol=1e-5)
    penalty = consistency(s[:2], s[2:]).mean()
    for weight in (1.0, 3.0):
        kind.weight = weight
        loss = kind.compute_loss(kind.model.eval(), batch_of(kind, tokenizer, [pair])).item()
        assert math.isclose(loss, expected+weight*penalty, abs_tol=1e-5)

def test_twins_in_one_batch():
    rows = [dict(chosen_ids=[1], rejected_ids=[2], twin_chosen_ids=[3], twin_rejected_ids=[4])]*2
    both = with_twins(lambda rows: dict(ids=[(r["chosen_ids"], r["rejected_ids"]) for r in rows]))(rows)
    assert both == dict(ids=[([1], [2])]*2, twins=dict(ids=[([3], [4])]*2))

def test_training_learns_a_word_and_only_where_it_may(tokenizer, texts, tmp_path):
    good = [t for t in texts if "SELECT home" in t]
    bad = [t for t in texts if "SELECT team" in t]
    pairs = [dict(chosen=a, rejected=b) for a,b in zip(good, bad)]
    runs = []
    for _ in range(2):
        model = last_layers(reward_model(tokenizer, seed=3))
        before = {k: v.clone() for k,v in model.state_dict().items()}
        train_reward(model, tokenizer, pairs, tmp_path, steps=12, batch_size=8, seed=1)
        runs.append(score_texts(model, tokenizer, good+bad))
        changed = {k for k,v in model.state_dict().items() if not torch.equal(v, before[k])}
        assert changed and not any("embed" in k or "layers.0." in k for k in changed) and "score.weight" in changed
    assert np.array_equal(*runs) and paired_auc(runs[0][:len(good)], runs[0][len(good):])[0] > .95

def test_last_layers_that_are_not_there(tokenizer):
    with pytest.raises(ValueError, match="n is 3: the model has 2 layers"): last_layers(reward_model(tokenizer), 3)
