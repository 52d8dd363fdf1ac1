"The rule that compares plan and call, the cutting of episodes, and the rewards; and the published run, when there is one."
import json

import papermill
import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from agentrl_cookbook.loop.rollout import Episode
from agentrl_cookbook.policy.tiny import encode_traces, trace_texts, train_tokenizer
from agentrl_cookbook.reward.episodes import messages, spoken
from agentrl_cookbook.reward.reasons import REWARDS, agreement, agrees, plan_of, step_of_call, step_of_plan, step_of_query
from agentrl_cookbook.run import load_metrics, results
from agentrl_cookbook.task.env import Environment
from agentrl_cookbook.task.graph import graph, lookup
from agentrl_cookbook.task.synth import all_tasks, solve
from agentrl_cookbook.task.world import company

def as_call(query): return json.dumps(dict(name="sql", arguments=dict(query=query)))

@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "The path of a company, and its graph"
    database = company(tmp_path_factory.mktemp("reasons")/"company.db")
    return database,graph(database)


# ---- The rule ----

def test_every_step_of_every_task_is_read_back(world):
    queries = {q for hops in (1, 2) for t in all_tasks(world[1], hops) for q in t.queries}
    assert len(queries) > 500
    for q in queries:
        step = step_of_query(q)
        assert step == step_of_call(as_call(q))
        assert lookup(step[1], world[1].graph["tables"][step[1]]["key"], [step[0]], step[2]) == q
        assert step_of_plan(plan_of(step)) == step and agrees(plan_of(step), as_call(q))

values = st.text(st.characters(exclude_characters="\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029", exclude_categories=["Cs"]))

@given(values)
def test_any_value_is_read_alike_from_plan_and_call(value):
    call = as_call(lookup("person", "name", ["home"], value))
    assert step_of_call(call) == ("home", "person", value)
    assert agrees(plan_of(("home", "person", value)), call)

def test_names_that_sql_quotes():
    call = as_call(lookup("order", "the key", ["to"], "7"))
    assert '"order"' in call.replace("\\", "") and step_of_call(call) == ("to", "order", "7")

CALL = as_call(lookup("person", "name", ["home"], "Ada"))

@pytest.mark.parametrize("plan", [
    "Read role of person 'Ada'.", "Read home of city 'Ada'.", "Read home of person 'Ben'.", "Read home of person 'ada'.",
    "Read home of person 'Ada'", "Read home of person 'Ada'. Read role of person 'Ada'.", "read home of person Ada", "", "42"])
def test_another_plan_does_not_agree(plan): assert not agrees(plan, CALL)

@pytest.mark.parametrize("call", [
    as_call(lookup("person", "name", ["role"], "Ada")), as_call(lookup("person", "name", ["home", "role"], "Ada")),
    as_call("SELECT home FROM person WHERE name = 'Ada' OR 1"), as_call("SELECT home FROM person"), as_call(None), "{}", "[]", "",
    CALL[:-1], json.dumps(dict(name="sql", arguments=[])), json.dumps(dict(name="sql", arguments={}))])
def test_another_call_does_not_agree(call): assert not agrees("Read home of person 'Ada'.", call)

@given(st.text(), st.text())
def test_no_text_raises(plan, call): assert agrees(plan, call) in (True, False)

def test_space_around_a_plan_does_not_count(): assert agrees(" Read home of person 'Ada'.\n", CALL)

def test_the_share_of_no_calls_is_nothing():
    assert agreement([]) == 0 and agreement([("Read home of person 'Ada'.", CALL), ("", CALL)]) == .5


# ---- Episodes ----

@pytest.fixture(scope="module")
def played(world):
    "A tokenizer, and a trace of two hops with plans"
    task = next(t for t in all_tasks(world[1], 2) if t.id == "person:Ada:manager.home")
    trace = solve(task, Environment(world[0], max_calls=9))
    for m in trace:
        if m.get("tool_calls"): m["content"] = plan_of(step_of_call(json.dumps(m["tool_calls"][0]["function"])))
    return train_tokenizer(trace_texts([trace])),trace

def as_episode(tokenizer, trace):
    [row] = encode_traces(tokenizer, [trace])
    first = next(i for i,l in enumerate(row["labels"]) if l != -100)
    return Episode(None, row["input_ids"][:first], row["input_ids"][first:], [int(l != -100) for l in row["labels"][first:]])

def test_an_episode_is_cut_into_its_messages(played):
    tokenizer,trace = played
    episode = as_episode(tokenizer, trace)
    written = [m for m in trace if m["role"] == "assistant"]
    assert [p for p,_ in spoken(episode, tokenizer)] == [m["content"] for m in written[:-1]]
    assert [json.loads(c) for _,c in spoken(episode, tokenizer)] == [m["tool_calls"][0]["function"] for m in written[:-1]]
    assert messages(episode, tokenizer)[-1] == trace[-1]["content"] and agreement(spoken(episode, tokenizer)) == 1

def test_what_a_tool_wrote_is_no_plan(played):
    tokenizer,trace = played
    told = [dict(m, content="Read role of person 'Ada'.") if m["role"] == "tool" else m for m in trace]
    assert spoken(as_episode(tokenizer, told), tokenizer) == spoken(as_episode(tokenizer, trace), tokenizer)

def test_an_episode_that_was_cut_keeps_its_whole_calls(played):
    tokenizer,trace = played
    episode = as_episode(tokenizer, trace)
    whole = spoken(episode, tokenizer)
    for n in range(len(episode.ids)):
        part = spoken(Episode(None, [], episode.ids[:n], episode.mask[:n]), tokenizer)
        assert part[:-1] == whole[:max(0, len(part)-1)] and all(agrees(*p) for p in part[:-1])

def test_two_calls_in_one_message_do_not_agree(played):
    tokenizer,_ = played
    ids = tokenizer.encode(f"Read home of person 'Ada'.<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call><|end|>")
    assert agreement(spoken(Episode(None, [], ids, [1]*len(ids)), tokenizer)) == 0


# ---- Rewards ----

SHARES = st.floats(0, 1)

@given(st.sampled_from([0.0, 1.0]), SHARES, SHARES, SHARES)
def test_agreement_never_costs(won, a, b, weight):
    low,high = sorted((a, b))
    for rule in REWARDS.values(): assert rule(won, low, weight) <= rule(won, high, weight)+1e-12

@given(SHARES, SHARES)
def test_only_success_is_paid_on_success(agreed, weight):
    assert REWARDS["on success"](0.0, agreed, weight) == 0
    assert REWARDS["on success"](1.0, 1.0, weight) == REWARDS["outcome only"](1.0, 1.0, weight) == 1

def test_the_added_term_pays_failures(): assert REWARDS["added"](0.0, 1.0, .5) == .5


# ---- The published run ----

PUBLISHED = [r for r in results("reward/reasons") if r["metrics"]["seeds"] >= 3]
needs_published = pytest.mark.skipif(not PUBLISHED, reason="no run is published")

@needs_published
def test_the_published_run_is_whole():
    m = PUBLISHED[-1]["metrics"]
    arms = {r["arm"] for r in m["runs"]}
    assert {"outcome only"} <= arms <= set(REWARDS) and len(m["start"]) == m["seeds"] and len(m["runs"]) == m["seeds"]*len(arms)
    for row in m["start"]+m["runs"]: assert row["agree"] <= 1-abs(row["plausible"]-row["right"])+1e-9

@pytest.mark.slow
@needs_published
def test_a_slice_run_again_agrees_with_what_was_published(tmp_path):
    "The start and outcome only, seed 0"
    record = PUBLISHED[-1]
    [then] = [r for r in record["metrics"]["runs"] if (r["arm"], r["seed"]) == ("outcome only", 0)]
    given = {k: record["params"][k] for k in ("hops", "careless", "weight", "sft_steps", "updates", "groups", "n_heldout")}
    papermill.execute_notebook(ROOT/"nbs/reward/reasons.ipynb", tmp_path/"out.ipynb", progress_bar=False, cwd=ROOT, parameters=dict(
        given, arms="outcome only", seeds=1, out_dir=str(tmp_path)))
    now = load_metrics(tmp_path)
    assert abs(now["start"][0]["agree"]-record["metrics"]["start"][0]["agree"]) < .15
    assert abs(now["runs"][0]["agree"]-then["agree"]) < .15
