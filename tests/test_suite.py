"The suite: tasks that can be solved, a user with a script, strict and lenient scores, runs that resume, reports."
import json
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from agentrl_cookbook.evals.kinds import KINDS, UNSURE, Item, asks, item, make_items, reply, solver
from agentrl_cookbook.evals.stats import paired_test, wilson
from agentrl_cookbook.evals.suite import (
    compare, evaluate, figures, from_task, outputs, play, policy_agent, report, run_suite, score, summarize)
from agentrl_cookbook.loop.rollout import Episode
from agentrl_cookbook.policy.tiny import tiny_policy, trace_texts, train_tokenizer
from agentrl_cookbook.reward.verifier import Score, count_kinds, verify
from agentrl_cookbook.task.env import Environment
from agentrl_cookbook.task.faults import PROFILES
from agentrl_cookbook.task.graph import graph
from agentrl_cookbook.task.sandbox import Pool
from agentrl_cookbook.task.synth import sample_tasks, solve
from agentrl_cookbook.task.tools import open_database
from agentrl_cookbook.task.world import company, write_database

quick = settings(max_examples=60, deadline=None, derandomize=True)

@pytest.fixture(scope="module")
def items(database): return make_items(database, 4)

@pytest.fixture(scope="module")
def pool():
    with Pool(1) as pool: yield pool


# ---- tasks ----

def test_tasks_follow_from_the_seed(database, items):
    assert items == make_items(database, 4) != make_items(database, 4, seed=1)
    assert [i.kind for i in items] == [k for k in KINDS for _ in range(4)] and len({i.id for i in items}) == len(items)

def test_the_wording_of_the_evaluation_is_in_no_training_task(database):
    train, test = ({i.question.split("'")[0] for i in make_items(database, 15, split=s)} for s in ("train", "test"))
    assert not train & test

def test_answers_are_in_the_database(database, items):
    with closing(open_database(database)) as connection:
        for i in items:
            if i.kind not in ("call", "dialogue"): continue
            found = [str(connection.execute(a["query"]).fetchone()[0]) for tool,a in i.steps if tool == "sql"]
            assert found == list(i.goal["answers"])

def test_the_mails_of_a_chore_are_what_the_rows_say(database, items):
    with closing(open_database(database)) as connection:
        for i in items:
            if i.kind != "chore": continue
            *single, summary = i.goal["outbox"]
            rows = [k for (k,) in connection.execute(i.steps[0][1]["query"])]
            assert sorted(m["to"] for m in single) == sorted(map(str, rows)) and summary["to"] == "office"
            assert summary["body"] == ",".join(sorted({m["body"] for m in single}))
            assert i.goal["answers"] == [str(len(summary["body"]))]

def test_hidden_tests_are_hidden(items):
    for i in items:
        if i.kind == "code":
            assert all((f"f({a}) == {out}" in i.question) == (n < 2) for n,(a,out) in enumerate(i.goal["cases"]))

def test_another_world(tmp_path):
    assert len(make_items(company(tmp_path/"b.db", seed=7), 2)) == 10

def test_unknown_kinds_and_too_many(database, tmp_path):
    with pytest.raises(ValueError, match="'talk': the kinds are call, browse"): make_items(database, 1, kinds=["talk"])
    few = write_database(tmp_path/"few.db", "create table city(name text primary key, zone text);"
                         "create table person(name text primary key, home text references city(name));",
                         dict(city=[("Oslo", "north")], person=[("Ada", "Oslo")]))
    with pytest.raises(ValueError, match="few.db has only 0 tasks of kind chore: ask for fewer"): make_items(few, 1, kinds=["chore"])
    with pytest.raises(ValueError, match="tasks of kind dialogue"): make_items(few, 1, kinds=["dialogue"])
    assert len(make_items(few, 3, kinds=["call", "browse", "code"])) == 9
    with pytest.raises(ValueError, match="split is 'dev': give train or test"): make_items(database, 1, split="dev")

CITIES = "create table city(name text primary key, zone text); create table person(name text primary key, home text references city(name));"

def test_databases_with_gaps(tmp_path):
    "Rows without a value, tables that nothing leads to, keys that are missing: such a choice leads nowhere, and another is made"
    gaps = write_database(tmp_path/"gaps.db", CITIES + "create table setting(name text primary key, value text)", dict(
        city=[("Oslo", "north"), ("Rome", None), (None, "south")], setting=[("a", None), ("b", "2")],
        person=[("Ada", "Oslo"), ("Ben", None), (None, "Oslo"), ("Cleo", "Rome")]))
    for seed in range(10): assert len(make_items(gaps, 3, seed, kinds=["call", "browse", "code"])) == 9
    blank = write_database(tmp_path/"blank.db", CITIES, dict(city=[("Oslo", None)], person=[("Ada", None)]))
    none = write_database(tmp_path/"none.db", CITIES, {})
    for path,kinds in ((blank, ("call", "browse", "dialogue", "chore")), (none, ("call", "browse", "dialogue", "chore"))):
        for kind in kinds:
            with pytest.raises(ValueError, match=f"{path.name} has only 0 tasks of kind {kind}: ask for fewer"): make_items(path, 1, kinds=[kind])


# ---- the user ----

DESK = (dict(say="A question about a team.", facts=[(["which"], "Atlas."), (["what"], "Its field.")]),
        dict(say="No, its lead.", facts=[(["why"], "I mixed them up.")]))

@pytest.mark.parametrize("texts, said", [
    (["Which?"], "Atlas."), (["WHAT do you need?"], "Its field."), (["Which, and what?"], "Atlas. Its field."),
    (["Hello?"], UNSURE), (["Why?"], UNSURE), (["Somewhat?"], UNSURE), (["Which? It is somewhat odd"], "No, its lead."), (["The whats?"], "Its field."), (["sales"], "No, its lead."), (["sales", "Why?"], "I mixed them up."),
    (["Which?", "sales", "Ada"], None), (["sales", "Which?"], UNSURE), ([""], "No, its lead.")])
def test_what_the_user_says(texts, said): assert reply(DESK, texts) == said

@quick
@given(st.lists(st.sampled_from(["Which?", "What?", "Why?", "Hm?", "an answer"]), min_size=1, max_size=6))
def test_facts_are_told_only_when_asked(texts):
    said, wish = reply(DESK, texts), sum(not asks(t) for t in texts)
    if not asks(texts[-1]): assert said == (DESK[wish]["say"] if wish < 2 else None)
    elif wish < 2: assert said in [fact for words,fact in DESK[wish]["facts"] if words[0] in texts[-1].lower()] or said == UNSURE


# ---- scores ----

MAIL = dict(to="Ada", subject="zone", body="north")
CHORE = item("chore", "Mail Ada the zone.", ["mail"], "done", [], [MAIL])
DIALOGUE = Item("dialogue", DESK, ("sql",), dict(answers=["sales", "Ada"], outbox=[]), ())

@pytest.mark.parametrize("task, texts, outbox, strict, lenient", [
    (CHORE, ["done"], [MAIL], 1, 1), (CHORE, [" done\n"], [MAIL], 1, 1), (CHORE, ["It is done."], [MAIL], 0, 1),
    (CHORE, ["done"], [], 0, 0), (CHORE, [], [MAIL], 0, 0), (CHORE, ["done?"], [MAIL], 0, 1),
    (CHORE, ["done"], [MAIL, MAIL], 0, 1), (CHORE, ["done"], [MAIL | dict(body="It is north.")], 0, 1),
    (CHORE, ["done"], [MAIL | dict(to="Ben")], 0, 0), (CHORE, ["done"], [MAIL | dict(body="south")], 0, 0),
    (CHORE, ["done"], [dict(to="Eve", subject="", body=""), MAIL], 0, 1),
    (DIALOGUE, ["Which?", "sales", "Ada"], [], 1, 1), (DIALOGUE, ["sales"], [], 0, 0),
    (DIALOGUE, ["Ada", "sales"], [], 0, 1), (DIALOGUE, ["sales", "Ada", "Ada"], [], 0, 1)])
def test_both_scores(task, texts, outbox, strict, lenient):
    found = score(task, texts, outbox)
    assert (found["strict"], found["lenient"]) == (strict, lenient) and bool(found["why"]) != bool(strict)

CODE = Item("code", (dict(say="f", facts=[]),), ("python",), dict(
    cases=[[[n, 1], [2*n, 2]] for n in range(8)], shown=2, answers=[""], outbox=[]), ())
RIGHT = "def f(a):\n    return [2*x for x in a]\n"

@pytest.mark.parametrize("source, strict, lenient", [
    (RIGHT, 1, 1), (f"Here it is:\n```python\n{RIGHT}```\nDone.", 1, 1), (f"print('loaded')\n{RIGHT}", 1, 1),
    ("def f(a): return {'[0, 1]': [0, 2], '[1, 1]': [2, 2]}.get(str(a))", 0, 1),      # knows the visible tests
    ("def f(a): return [2*x for x in a] if a[0] < 2 else 1/0", 0, 1), ("def f(a): return a", 0, 0),
    ("", 0, 0), ("def f(a: return", 0, 0), ("f = 3", 0, 0), ("raise SystemExit(0)", 0, 0),
    ("print('[[0, 2]]'*8); raise SystemExit", 0, 0), ("class A:\n    __eq__ = lambda *_: True\ndef f(a): return A()", 0, 0),
    ("import sys\ndef f(a): return sys._getframe(1).f_globals.get('wanted')", 0, 0)])
def test_code_is_judged_by_what_it_returns(pool, source, strict, lenient):
    found = score(CODE, [source], [], pool.run)
    assert (found["strict"], found["lenient"]) == (strict, lenient)

def test_code_that_never_ends(database):
    with Pool(1, seconds=0.2) as pool: assert outputs(pool.run, "while True: pass", [[1]]) is None


# ---- playing ----

def test_the_solver_solves_all_whatever_fails(database, items, tmp_path):
    clean = run_suite(solver(items), items, database, tmp_path/"clean")
    assert all(r["strict"] for r in clean) and not any(r["faults"] for r in clean)
    harsh = PROFILES["production"] | dict(http=dict(timeout=.1, server_error=.1, version=.1), mail=dict(rate_limit=.3))
    faulty = run_suite(solver(items), items, database, tmp_path/"faulty", harsh, workers=3)
    assert [r["why"] for r in faulty] == [""]*len(items) and sum(r["faults"] for r in faulty) > 10
    assert "version" in {kind for r in faulty for _,kind in r["calls"]}, "the API moved and the solver followed"

def test_threads_change_nothing(database, items, tmp_path):
    one, three = (run_suite(solver(items), items[:12], database, tmp_path/str(w), PROFILES["production"], 2, workers=w)
                  for w in (1, 3))
    assert one == three and [r["trial"] for r in one] == [0]*12+[1]*12

def test_two_agents_meet_the_same_faults(database, items, tmp_path):
    def again(messages, tools):     # calls the same tool until its turns are over
        call = dict(name="sql", arguments='{"query": "SELECT 1"}')
        return dict(role="assistant", content="", tool_calls=[dict(id="c", type="function", function=call)])
    profile, tasks = dict(sql=dict(timeout=.5)), [i for i in items if i.kind == "call"]
    a = run_suite(again, tasks, database, tmp_path/"a", profile, max_turns=6)
    b = run_suite(solver(tasks), tasks, database, tmp_path/"b", profile)
    for x,y in zip(a, b): assert [k for _,k in x["calls"]][:len(y["calls"])] == [k for _,k in y["calls"]]
    assert all(r["turns"] == 6 and not r["strict"] for r in a)

def say(*calls, text=""):
    "A message with calls"
    calls = [dict(id=f"c{i}", type="function", function=dict(name=n, arguments=a)) for i,(n,a) in enumerate(calls)]
    return dict(role="assistant", content=text) | (dict(tool_calls=calls) if calls else {})

def test_bad_calls_are_answered_and_counted(database, items):
    script = iter([say(("sql", '{"query": "SEL'), ("shell", "{}"), ("sql", '{"qwery": "x"}'), ("sql", "[1]")),
                   say(text=items[0].goal["answers"][0])])
    seen = []
    def agent(messages, tools):
        seen.append([m["role"] for m in messages])
        return next(script)
    with closing(Environment(database)) as environment: record = play(agent, items[0], environment)
    assert [kind for _,kind in record["calls"]] == ["malformed", "unknown_tool", "argument", "malformed"]
    assert record["strict"] and seen[1] == ["system", "user", "assistant", "tool", "tool", "tool", "tool"]
    assert [m["tool_call_id"] for m in record["messages"] if m["role"] == "tool"] == ["c0", "c1", "c2", "c3"]

def test_code_that_never_ends_is_no_fault_of_the_tools(database, items, tmp_path):
    "Its time-out counts as a call that failed, and the trial does not count as one in which the tools failed"
    task = next(i for i in items if i.kind == "code")
    script = iter([say(("python", '{"code": "while True: pass"}')), say(text=task.goal["answers"][0])])
    [record] = run_suite(lambda messages, tools: next(script), [task], database, tmp_path)
    assert record["calls"] == [["python", "timeout"]] and record["faults"] == 0 and record["strict"]
    assert report([record])["recovery"] is None

def test_an_agent_that_only_asks_runs_out_of_turns(database, items):
    talk = next(i for i in items if i.kind == "dialogue")
    with closing(Environment(database)) as environment:
        record = play(lambda messages, tools: say(text="Really?") | dict(tokens=3), talk, environment, max_turns=5)
    assert (record["turns"], record["tokens"], record["users"], record["strict"]) == (5, 15, 5, False)

def test_the_agent_is_given_the_tools_of_the_task(database, items):
    given = {}
    def agent(messages, tools):
        given[len(tools)] = {t["function"]["name"] for t in tools}
        return say(text="done")
    for i in (items[0], items[-1]):
        with closing(Environment(database, tools=i.tools)) as environment: play(agent, i, environment, lambda *_: {})
    assert given == {1: {"sql"}, 4: {"sql", "python", "http", "mail"}}

def test_what_is_finished_is_not_asked_again(database, items, tmp_path):
    asked, solve = [], solver(items)
    def mortal(messages, tools):
        asked.append(messages[1]["content"])
        if len(asked) == 14: raise ConnectionError("gone")
        return solve(messages, tools)
    with pytest.raises(ConnectionError, match="gone"): run_suite(mortal, items, database, tmp_path)
    kept = {p.stem.removesuffix("-0") for p in tmp_path.glob("*.json")}
    assert 0 < len(kept) < len(items)
    before = len(asked)
    records = run_suite(mortal, items, database, tmp_path)
    known = {i.question for i in items if i.id in kept}
    assert not known & set(asked[before:]) and all(r["strict"] for r in records) and len(records) == len(items)
    assert run_suite(None, items, database, tmp_path) == records


# ---- reports ----

def trial(task, strict, kind="call", lenient=True, users=1, faults=0, calls=(("sql", "ok"),), turns=2, tokens=10):
    return dict(id=task, kind=kind, strict=bool(strict), lenient=lenient, why="", users=users, faults=faults,
                calls=list(calls), turns=turns, tokens=tokens)

def test_report_of_known_records():
    rows = [trial("a", 1), trial("a", 1), trial("b", 1, users=2), trial("b", 0, users=2, faults=1, calls=[("sql", "timeout")]),
            trial("c", 0, "code", lenient=False, calls=[("python", "slow"), ("python", "denied")], turns=6), trial("c", 0, "code")]
    res = report(rows)
    assert list(res["kinds"]) == ["all", "call", "code"]
    everything = res["kinds"]["all"]
    assert (everything["tasks"], everything["trials"], everything["strict"], everything["lenient"]) == (3, 2, 0.5, 5/6)
    assert [everything["pass_hat"][k][0] for k in (1, 2)] == pytest.approx([0.5, 1/3])
    assert [everything["pass_at"][k][0] for k in (1, 2)] == pytest.approx([0.5, 2/3])
    assert everything["low"] < 0.5 < everything["high"] and (res["kinds"]["code"]["low"], res["kinds"]["code"]["high"]) == wilson(0, 1)
    assert (res["multi_turn"]["strict"], res["recovery"]["strict"], res["recovery"]["tasks"]) == (0.5, 0, 1)
    assert res["tools"] == dict(python=dict(calls=2, worked=0.5), sql=dict(calls=5, worked=0.8))
    assert (res["turns"], res["tokens"]) == (pytest.approx(16/6), 10)
    assert json.loads(json.dumps(res))["kinds"]["all"]["pass_hat"]["1"][0] == 0.5

def test_one_trial_each_gives_wilsons_interval():
    f = figures([trial(str(i), i < 60) for i in range(64)])
    assert (f["low"], f["high"]) == wilson(60, 64) and list(f["pass_hat"]) == [1]

def test_no_report_of_nothing():
    with pytest.raises(ValueError, match="play or read at least one task"): report([])

def test_a_comparison_with_one_trial_is_the_paired_test():
    rng = np.random.default_rng(0)
    a, b = rng.random(60) < 0.5, rng.random(60) < 0.8
    res = compare([trial(str(i), x) for i,x in enumerate(a)], [trial(str(i), x) for i,x in enumerate(b)])
    assert res["p"] == paired_test(a, b)["p"] and res["difference"] == pytest.approx(b.mean()-a.mean())
    assert res["low"] < res["difference"] < res["high"] and res["n"] == 60

def test_a_comparison_with_many_trials_counts_tasks_and_not_trials():
    def rows(rates): return [trial(str(i), j < rate) for i,rate in enumerate(rates) for j in range(4)]
    few = compare(rows([1, 2, 3]), rows([3, 4, 4]))
    assert few["n"] == 3 and few["p"] > 0.2, "three tasks prove little, however often each is tried"
    many = compare(rows([1, 2, 3]*6), rows([3, 4, 4]*6))
    assert many["p"] < 0.001 and compare(rows([2]*9), rows([2]*9))["p"] == 1
    swapped = compare(rows([3, 4, 4]*6), rows([1, 2, 3]*6))
    assert swapped["difference"] == -many["difference"] and swapped["p"] == pytest.approx(many["p"], abs=1e-3)

def test_a_comparison_needs_the_same_tasks():
    with pytest.raises(ValueError, match="both agents on the same tasks"): compare([trial("a", 1)], [trial("b", 1)])


# ---- policies ----

@pytest.fixture(scope="module")
def world(database):
    "An untrained policy for the company, and its tokenizer"
    g, env = graph(database), Environment(database)
    traces = [solve(t, env) for t in sample_tasks(g, 200, {1: 1, 2: 1}, seed=0, split="train")]
    tokenizer = train_tokenizer(trace_texts(traces))
    return SimpleNamespace(database=database, graph=g, tokenizer=tokenizer, policy=tiny_policy(tokenizer).eval())

def test_evaluate_plays_each_task_once_and_scores_it(world):
    tasks = sample_tasks(world.graph, 10, {1: 1, 2: 1}, seed=0, split="test")
    flaky = dict(sql=dict(timeout=0.2))
    def play(seed, slots): return evaluate(world.policy, world.tokenizer, world.database, tasks, 1.0, flaky, seed, slots, max_tokens=60)
    episodes = play(0, 4)
    assert [e.task for e in episodes] == tasks
    assert all(e.score == verify(e.answer, e.task.answer, e.calls, e.observed) for e in episodes)
    assert [e.ids for e in play(0, 4)] == [e.ids for e in episodes] != [e.ids for e in play(1, 4)]

def test_a_policy_says_the_same_as_an_agent_and_in_a_rollout(world):
    tasks = sample_tasks(world.graph, 3, {1: 1}, seed=0, split="test")
    episodes = evaluate(world.policy, world.tokenizer, world.database, tasks, 0.0, {}, 0, 3, max_turn_tokens=20)
    agent = policy_agent(world.policy, world.tokenizer, system=False, max_tokens=20)
    for e in episodes:
        said = agent([dict(role="system", content="x"), dict(role="user", content=e.task.question)], [])
        assert said["tokens"] == len(e.ids) and said["content"] == world.tokenizer.decode(e.ids).removesuffix("<|end|>").strip()

@pytest.mark.parametrize("text, name", [('{"name": "sql", "arguments": {"query": "SELECT 1"}}', "sql"), ('{"name": "sql"', "?")])
def test_a_policy_that_calls(world, text, name):
    "The token ids of a call are decided beforehand"
    ids = world.tokenizer(f"<tool_call>{text}</tool_call><|end|>", add_special_tokens=False, return_tensors="pt")["input_ids"]
    class Fixed:
        device = "cpu"
        def generate(self, input_ids, **_): return np.concatenate([input_ids, ids], 1)
    message = policy_agent(Fixed(), world.tokenizer, system=False)([dict(role="user", content="Find zone of city 'Oslo'")], [])
    assert message["tool_calls"][0]["function"]["name"] == name and message["content"] == ""

def test_a_question_over_a_path_is_a_task_of_the_suite(world, tmp_path):
    tasks = sample_tasks(world.graph, 5, {2: 1}, seed=0, split="test")
    items = [from_task(t) for t in tasks]
    assert [i.question for i in items] == [t.question for t in tasks]
    assert all(r["strict"] and r["turns"] == 3 for r in run_suite(solver(items), items, world.database, tmp_path))


# ---- figures of an evaluation ----

def episode(hops=1, reward=1.0, kind="right", calls=(("sql", "ok"),), turns=2, mask=(1, 1)):
    "A scored episode of a task that only has an id and a number of hops"
    return Episode(task=SimpleNamespace(id="t", hops=hops), prompt_ids=[1], ids=[2]*len(mask), mask=list(mask),
                   logp=[-0.5*m for m in mask], calls=list(calls), answer="x", turns=turns, observed=[], score=Score(reward, kind, ""))

def test_summary_of_known_episodes():
    late = (("sql", "timeout"), ("sql", "ok"))
    episodes = [episode(hops=1), episode(hops=2, calls=late, turns=3, mask=(1, 0, 0, 1, 1)),
                episode(hops=2, calls=late, reward=0.0, kind="wrong_answer", mask=(1,)), episode(hops=3, turns=5)]
    res = summarize(episodes)
    assert (res["success"], res["n"], (res["lo"], res["hi"])) == (0.75, 4, wilson(3, 4))
    assert res["success_by_hops"] == {1: (1.0, 1), 2: (0.5, 2), 3: (1.0, 1)}
    assert (res["recovery_rate"], res["turns"], res["tokens"]) == (0.5, 3.0, 2.0)
    assert res["kinds"] == count_kinds([e.score for e in episodes])
    assert json.loads(json.dumps(res))["success_by_hops"]["2"] == [0.5, 2]

def test_no_recovery_rate_without_a_timeout(): assert summarize([episode()])["recovery_rate"] is None

def test_no_summary_of_nothing():
    with pytest.raises(ValueError, match="0 tasks"): summarize([])
