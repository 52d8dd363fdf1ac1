"Composed tasks: answers that the tools agree with, goals without excuses, traces that use nothing unread, rows that hold together."
import json,random,re,sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from time import process_time

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from agentrl_cookbook.task.compose import OPERATIONS, finish, make_chore, measured_difficulty, reached, sample_chores
from agentrl_cookbook.task.env import Environment
from agentrl_cookbook.task.graph import facts, graph
from agentrl_cookbook.task.render import ARGUMENTS, CLOSED, HELD_OUT, PLAIN, closed, plain
from agentrl_cookbook.task.synth import belongs
from agentrl_cookbook.task.traces import Row, accept, as_row, detour, leaves, play_chore, replay, unread, used, write_rows
from agentrl_cookbook.task.world import company, flights, office, write_database

quick = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
ALL = ("sql", "http", "python", "mail")
MIX = {1: 1, 2: 1, 3: 1, 4: 1}
sent = dict(to="a@x", subject="report", body="7")

@pytest.fixture(scope="module")
def database(tmp_path_factory): return office(tmp_path_factory.mktemp("office")/"office.db", people=40)

@pytest.fixture(scope="module")
def f(database): return facts(graph(database, max_values=1000))

@pytest.fixture(scope="module")
def place(database):
    environment = Environment(database, tools=ALL, max_calls=60)
    yield environment
    environment.close()

@pytest.fixture(scope="module")
def chores(f):
    found = sample_chores(f, 400, MIX, 0, "sft", ALL)
    return found[:50] + [c for c in found[50:] if "python" in c.tools][:5]


# ---- Answers ----

def test_the_tools_agree_with_the_graph_on_every_chore(f, place, chores):
    assert accept(chores, place)[1] == Counter(kept=len(chores))
    assert {t for c in chores for t in c.tools} == set(ALL)

def test_all_operations_occur(f):
    assert {op for c in sample_chores(f, 600, MIX, 0, "train", ALL) for op in c.ops} == set(OPERATIONS.values())

@pytest.mark.parametrize("seed", range(2))
def test_sql_agrees_on_other_companies(tmp_path, seed):
    for path in company(tmp_path/"c.db", seed), flights(tmp_path/"f.db", seed=seed):
        with closing(Environment(path, max_calls=60)) as environment:
            asked = sample_chores(facts(graph(path)), 150, MIX, seed, "train")
            assert accept(asked, environment)[1] == Counter(kept=150)

def test_names_that_sql_must_quote(tmp_path):
    schema = """create table customer(name text primary key, "first name" text);
        create table "order"(id integer primary key, buyer text references customer, "group" text, "per cent" integer)"""
    path = write_database(tmp_path/"shop.db", schema, dict(
        customer=[(f"O'Neill {i}", f"M{i%3}") for i in range(9)],
        **{'"order"': [(i, f"O'Neill {i%9}", "ab"[i%2], i%7) for i in range(90)]}))
    with closing(Environment(path, max_calls=60)) as environment:
        f = facts(graph(path))
        kept,counts = accept(sample_chores(f, 120, {1: 1, 2: 1, 3: 1}, 0, "train"), environment)
        assert counts == Counter(kept=120) and any('"per cent"' in s[1]["query"] for c,_ in kept for s in c.steps)
        assert accept([c for c,_ in kept], environment, detours=1, tables=f.tables)[1] == Counter(kept=120)

@quick
@given(seed=st.integers(0, 10**6), n=st.integers(0, 5))
def test_a_chore_follows_from_its_seed_and_number_of_operations(f, seed, n):
    c = make_chore(f, seed, n)
    assert c == make_chore(f, seed, n)
    if c is None: return
    assert len(c.ops) == n and c.seed == seed and closed(c.plan) == c.question and finish(f, c.plan, seed) == c
    assert c.kind == ("question" if c.answer else "chore") and ("outbox" in c.goal) == (c.kind == "chore")
    assert not any(re.search(r"\bv\d", s[1]["path"]) for s in c.steps if s[0] == "http"), "no version in a path"

def test_conditions_leave_something_out_and_something_in(f):
    for c in sample_chores(f, 300, {3: 1, 4: 1}, 1, "train", ALL):
        if {"negation", "window"} & set(c.ops): assert c.answer != "0"
        note = next((m for m in c.plan if m[0] == "note"), None)
        assert not note or note[-1] != (c.answer or c.goal["outbox"][0]["body"])

def test_the_hash_is_of_the_rows_that_the_answer_depends_on(tmp_path):
    def hashes(change):
        path = office(tmp_path/"o.db", people=20)
        with closing(sqlite3.connect(path)) as c, c: c.execute(change)
        g = facts(graph(path, max_values=1000))
        return finish(g, (("row", "city", "Oslo"), ("read", "zone"))).subgraph
    same = hashes("update city set zone='none' where name='Rome'")
    assert same == hashes("select 1") != hashes("update city set zone='none' where name='Oslo'")


# ---- Samples ----

def test_more_than_20000_distinct_tasks_a_minute(tmp_path):
    g = facts(graph(office(tmp_path/"o.db"), max_values=1000))
    start = process_time()
    made = sample_chores(g, 1500, MIX, 0, "train", ALL)
    assert 60*len({c.id for c in made})/(process_time()-start) > 20_000

def test_samples_keep_to_split_tools_and_operations(f):
    train,test = (sample_chores(f, 200, {1: 1, 2: 1}, seed, split, ("sql", "mail"), without=("negation",))
                  for seed,split in ((0, "train"), (1, "test")))
    assert not {c.id for c in train} & {c.id for c in test} and len({c.id for c in train}) == 200
    for c in train+test:
        assert set(c.tools) <= {"sql", "mail"} and "negation" not in c.ops and belongs(c, "test") == (c in test)
    assert train == sample_chores(f, 200, {1: 1, 2: 1}, 0, "train", ("sql", "mail"), without=("negation",))

def test_the_same_fact_asked_in_another_way_is_the_same_task(f):
    plan = (("row", "city", "Oslo"), ("read", "zone"))
    key = f.keys["person"][0]
    ways = [(*plan, ("mail", "person", key)), (plan[0], ("by", "http"), plan[1]), (*plan, ("note", "zone", "city", "Rome", "far"))]
    made = [finish(f, p) for p in (plan, *ways)]
    assert len({c.id for c in made}) == 1 and len({c.question for c in made}) == 4

def test_a_database_that_has_no_more_says_so(tmp_path):
    path = write_database(tmp_path/"s.db", "create table b(n text primary key, v text); create table a(n text primary key, b text references b)",
                          dict(b=[("x", "p"), ("y", "q")], a=[("z", "x")]))
    with pytest.raises(ValueError, match="hardly more than [0-9] train tasks .*: ask for fewer"):
        sample_chores(facts(graph(path)), 50, {0: 1}, 0, "train")

@pytest.mark.parametrize("operations,split,said", [({1: 1}, "dev", "split is 'dev': give one of test, rl, sft, train"),
                                                   ({}, "train", "operations is {}: give it a weight"), ({2: 0}, "train", "operations is {2: 0}")])
def test_a_sample_of_nothing_is_named(f, operations, split, said):
    with pytest.raises(ValueError, match=said): sample_chores(f, 1, operations, 0, split)


# ---- Goals ----

@pytest.mark.parametrize("goal,answer,outbox,right", [
    (dict(answer="Oslo"), " Oslo\n", [], True), (dict(answer="Oslo"), "oslo", [], False), (dict(answer="Oslo"), None, [], False),
    (dict(answer="Oslo"), "Oslo", [sent], False), (dict(outbox=[sent]), "done", [sent], True), (dict(outbox=[sent]), None, [sent], True),
    (dict(outbox=[sent]), "done", [], False), (dict(outbox=[sent]), "done", [sent, sent], False),
    (dict(outbox=[sent]), "done", [sent | dict(body="8")], False), (dict(outbox=[sent]), "done", [sent | dict(to="b@x")], False),
    (dict(outbox=[sent]), "done", [sent | dict(subject="")], False), (dict(outbox=[sent, sent | dict(to="b@x")]), "", [sent | dict(to="b@x"), sent], True),
    (dict(answer="7", outbox=[sent]), "7", [sent], True), (dict(answer="7", outbox=[sent]), "8", [sent], False)])
def test_a_goal_is_reached_with_all_of_it_and_nothing_beside(goal, answer, outbox, right): assert reached(goal, answer, outbox) is right

def test_difficulty_is_the_share_of_failures():
    assert measured_difficulty({"a": [True, 1, 0, False], "b": [1]}) == {"a": 0.5, "b": 0.0}


# ---- Traces ----

def test_what_a_call_uses():
    assert used("sql", dict(query="SELECT a FROM b WHERE c = 'O''Neill' AND d > '5'")) == {"O'Neill", "5"}
    assert used("http", dict(path="/city/S%C3%A3o%20Paulo")) == {"São Paulo"} and used("http", dict(path="/person?team=Atlas&page=2")) == {"Atlas", "2"}
    assert used("python", dict(code="print(sum([3, 15]))")) == {"3", "15"} and used("mail", sent) == {"a@x", "report", "7"}
    assert leaves([["1", None], [{"row": {"a": "x"}}, "9\n"]]) == {"1", "None", "x", "9"}

def test_a_value_that_was_not_read_is_found(f, place, chores):
    c = next(c for c in chores if c.ops == ("hop",) and c.tools == ("sql",))
    messages,why = play_chore(c, place)
    assert why == "" and unread(messages) is None
    assert unread([messages[0], *messages[3:]]) is not None, "the first look-up left out"
    assert unread([*messages[:-1], dict(role="assistant", content="nobody")]) == "nobody"
    assert play_chore(replace(c, steps=c.steps[1:]), place)[1] == "unread"
    assert play_chore(replace(c, goal=dict(answer="nobody")), place)[1] == "goal"

def test_faults_are_repeated_until_the_budget_ends(database, chores):
    asked = [c for c in chores if c.tools == ("sql",)]
    with closing(Environment(database, dict(sql=dict(timeout=.2, server_error=.2)), max_calls=60)) as faulty:
        kept,counts = accept(asked, faulty)
        assert counts == Counter(kept=len(asked)) and sum(len(ms) for _,ms in kept) > sum(2*c.hops+2 for c in asked)
    with closing(Environment(database, dict(sql=dict(timeout=1.)), max_calls=5)) as dead:
        assert accept(asked[:5], dead)[1] == Counter(budget=5)

@pytest.mark.parametrize("p", [0, .4, 1])
def test_detours_recover_and_send_no_mail(f, place, chores, p):
    kept,counts = accept(chores, place, seed=p, detours=p, tables=f.tables)
    assert counts == Counter(kept=len(chores))
    extra = sum(len(ms)-2*c.hops-2 for c,ms in kept)//2
    assert extra == 0 if p == 0 else .8*p < extra/sum(c.hops for c in chores) < 1.2*p
    for c,ms in kept:
        mails = [m for m in ms for call in m.get("tool_calls", []) if call["function"]["name"] == "mail"]
        assert len(mails) == len(c.goal.get("outbox", []))
    assert p < 1 or any(not json.loads(m["content"])["ok"] for _,ms in kept for m in ms if m["role"] == "tool")

def test_a_detour_is_never_the_right_call(f, chores):
    for c in chores:
        for i,(step,seed) in enumerate(zip(c.steps, range(9))):
            wrong = detour(f.tables, *step, (), random.Random(seed))
            assert wrong != step and (step[0] != "mail" or wrong is None)

def test_replay_notices_a_new_version_only_where_it_was_written_down(f, database, place):
    asked = [c for c in sample_chores(f, 80, {1: 1, 2: 1}, 5, "sft", ("http", "sql")) if "http" in c.tools][:8]
    pinned = [replace(c, steps=tuple((t, dict(path="/v1"+a["path"]) if t == "http" else a) for t,a in c.steps)) for c in asked]
    old,free = accept(pinned, place)[0],accept(asked, place)[0]
    assert len(old) == len(free) == 8 and replay(old, place) == replay(free, place) == 1
    with closing(Environment(database, tools=ALL, version="v2")) as later:
        assert replay(old, later) == 0 and replay(free, later) == 1

def test_replay_notices_facts_that_changed(f, database, place, tmp_path):
    [(c,ms)],_ = accept([finish(f, (("row", "city", "Oslo"), ("read", "zone")))], place)
    path = tmp_path/"aged.db"
    path.write_bytes(database.read_bytes())
    with closing(sqlite3.connect(path)) as other, other: other.execute("update city set zone='none'")
    with closing(Environment(path, tools=ALL)) as aged: assert replay([(c, ms)], place) == 1 and replay([(c, ms)], aged) == 0


# ---- Rows ----

@pytest.fixture(scope="module")
def rows(f, place, chores): return [as_row(c, ms, "sft", .25) for c,ms in accept(chores[:12], place, detours=.3, tables=f.tables)[0]]

def test_rows_come_back_as_they_were(rows, tmp_path, f):
    from datasets import load_dataset
    path = write_rows(tmp_path/"a.parquet", rows)
    data = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path/"cache"))
    assert data.to_list() == rows and [p.name for p in tmp_path.glob("a*")] == ["a.parquet"]
    for row in data:
        c = make_chore(f, row["seed"], len(row["ops"]))
        assert (c.id, c.subgraph, list(c.ops), json.dumps(c.goal)) == (row["id"], row["subgraph"], row["ops"], row["goal"])

@pytest.mark.parametrize("change,said", [
    (dict(answer="x"), "not that of the goal"), (dict(subgraph="zz"), "subgraph: String should match"), (dict(ops=["magic"]), r"ops\.0"),
    (dict(more=1), "more: Extra inputs"), (dict(question="Find it"), "not that of the plan"), (dict(ops=[]), "other operations"),
    (dict(split="dev"), "split: Input should be"), (dict(difficulty=2.), "difficulty: .*less than or equal"), (dict(messages=[]), "messages: List"),
    (dict(seed="x"), "seed: Input should be a valid integer"), (dict(tools=["shell"]), r"tools\.0")])
def test_a_row_that_does_not_hold_together_is_named_and_nothing_is_written(rows, tmp_path, change, said):
    path = tmp_path/"a.parquet"
    path.write_text("old")
    at = next(i for i,r in enumerate(rows) if r["answer"] and r["ops"])
    bad = [*rows[:at], rows[at] | change, *rows[at+1:]]
    with pytest.raises(ValueError, match=fr"^Row {at} \(.*{said}") as e: write_rows(path, bad)
    assert "\n" not in str(e.value) and path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1

def test_a_row_whose_trace_uses_what_it_did_not_read_is_refused(rows):
    row = next(r for r in rows if len(r["messages"]) > 4 and r["kind"] == "question")
    Row(**row)
    with pytest.raises(ValueError, match="used but was not read"): Row(**row | dict(messages=[row["messages"][0], row["messages"][-1]]))

def test_a_call_that_names_a_version_is_refused(rows):
    row = next(r for r in rows if any(c["function"]["name"] == "http" for m in r["messages"] for c in m.get("tool_calls") or []))
    Row(**row)
    pinned = json.loads(json.dumps(row["messages"]).replace('"path\\": \\"', '"path\\": \\"/v1/').replace('"path": "', '"path": "/v1/'))
    assert pinned != row["messages"]
    with pytest.raises(ValueError, match="a call names a version of the API"): Row(**row | dict(messages=pinned))

def test_nothing_to_replay_or_to_measure(place):
    with pytest.raises(ValueError, match="no trace to replay"): replay([], place)
    with pytest.raises(ValueError, match="without an attempt"): measured_difficulty(dict(a=[True], b=[]))


# ---- Words ----

def test_every_template_has_each_argument_once():
    for name,ts in PLAIN.items():
        assert len(set(ts)) == len(ts) >= HELD_OUT+2
        for t in (*ts, CLOSED[name]):
            text = t.format(p="<p>", **{a: f"<{a}>" for a in ARGUMENTS[name]})
            assert all(text.count(f"<{a}>") == 1 for a in ARGUMENTS[name]) and text.count("<p>") == (name not in ("row", "alias"))

def test_plain_words_keep_the_values_and_held_out_words_stay_out(chores):
    values = lambda text: sorted(re.findall("'([^']*)'", text))
    for i,c in enumerate(chores):
        texts = {split: [plain(c.plan, seed, split) for seed in range(6)] for split in ("train", "rl", "test")}
        assert all(values(t) == values(c.question) for ts in texts.values() for t in ts)
        assert not set(texts["test"]) & set(texts["train"]+texts["rl"]) and len(set(texts["train"])) > 1
