"Traces that are kept, dropped and why; tasks found again under other wordings; leaks told from coincidence."
import copy,json,random
from contextlib import closing
from itertools import product
import sqlite3

import pandas as pd
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from agentrl_cookbook.task.contamination import (IDLE, WAYS, candidates, canonical, given_away, jaccard, leaks, match, named,
    near_pairs, report, shingles, state_hash, task_key, without)
from agentrl_cookbook.task.compose import sample_chores
from agentrl_cookbook.task.env import Environment
from agentrl_cookbook.task.graph import facts as index_rows, graph
from agentrl_cookbook.task.hygiene import failures, problems, read_row, sift, steps
from agentrl_cookbook.task.render import plain
from agentrl_cookbook.task.synth import all_tasks, sample_tasks, solve
from agentrl_cookbook.task.traces import as_row, play_chore, write_rows
from agentrl_cookbook.task.world import company, office

quick = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

@pytest.fixture(scope="module")
def environment(database):
    with closing(Environment(database, max_calls=99)) as e: yield e

@pytest.fixture(scope="module")
def task(g): return next(t for t in all_tasks(g, 2) if t.id == "person:Ada:manager.home")

@pytest.fixture
def trace(task, environment): return solve(task, environment)

def asks(t, w):
    back = list(reversed(t.path))
    return (t.question, f"What is the {' of the '.join(back)} of {t.table} '{t.key}'?", f"For {t.table} '{t.key}': {', then '.join(t.path)}")[w]

def row(t, w=0, environment=None, **more):
    messages = [dict(role="user", content=asks(t, w))] + (solve(t, environment)[1:] if environment else [])
    return dict(question=asks(t, w), answer=t.answer, state="s", kind=f"{t.hops} hops", messages=messages) | more

def called(tool, arguments, result):
    "A call and its result"
    function = dict(name=tool, arguments=arguments)
    return [dict(role="assistant", content="", tool_calls=[dict(type="function", function=function)]),
            dict(role="tool", name=tool, content=json.dumps(result))]

def ok(*values): return dict(ok=True, result=list(values))
def fault(kind): return dict(ok=False, kind=kind, error="try again")
def say(text): return [dict(role="assistant", content=text)]
def kinds(row): return [r.split(":")[0] for r in failures(row)]


# ---- Schema ----

def test_every_solved_task_is_well_formed_and_works(g, environment):
    for t in sample_tasks(g, 100, {1: 1, 2: 1, 3: 1}, 0, "train"):
        r = row(t, 0, environment)
        assert problems(r) == failures(r) == [] and len(steps(r["messages"])) == t.hops

BROKEN = dict(
    no_messages=(lambda m: m.clear(), "question: there is none"),
    one_message=(lambda m: m.__delitem__(slice(1, None)), "messages: List should have at least 2"),
    no_user_first=(lambda m: m.insert(0, m[-1]), "the first one is not the user's"),
    unknown_role=(lambda m: m[1].update(role="boss"), "messages.1: "),
    no_role=(lambda m: m[1].pop("role"), "messages.1: "),
    empty_question=(lambda m: m[0].update(content=""), "question: there is none"),
    number_as_answer=(lambda m: m[-1].update(content=7), "messages.5.assistant.content: "),
    text_as_arguments=(lambda m: m[1]["tool_calls"][0]["function"].update(arguments="SELECT 1"), "arguments: "),
    no_name=(lambda m: m[1]["tool_calls"][0]["function"].update(name=""), "name: "),
    misspelt_field=(lambda m: m[1].update(tool_call=m[1].pop("tool_calls")), "tool_call: "),
    result_no_json=(lambda m: m[2].update(content="Hana"), "messages.2.tool.content"),
    result_without_kind=(lambda m: m[2].update(content='{"ok": false, "error": "x"}'), "messages.2.tool.content"),
    result_twice=(lambda m: m.insert(3, dict(m[2])), "messages.3: a result of sql that was not called"),
    call_lost=(lambda m: m.pop(1), "messages.1: a result of sql that was not called"),
    result_lost=(lambda m: m.pop(2), "messages.2: no result of sql before it"),
    result_of_another_tool=(lambda m: m[2].update(name="http"), "messages.2: a result of http that was not called"),
    null_message=(lambda m: m.insert(1, "text"), "messages.1"))

@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trace_is_named_with_its_place(trace, name):
    breaks,sentence = BROKEN[name]
    breaks(trace)
    found = problems(trace)
    assert found and any(sentence in p for p in found), found
    assert sift([trace]) == ([], [dict(index=0, reasons=[f"schema: {p}" for p in found])])

def test_a_goal_that_is_no_object_is_a_problem(trace): assert problems(dict(messages=trace, goal="Oslo")) == ["goal: it is no object"]

@quick
@given(o=st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                      lambda o: st.lists(o, max_size=4) | st.dictionaries(st.sampled_from(["role", "content", "messages", "goal",
                          "question", "tool_calls", "name", "answer"]), o, max_size=4), max_leaves=12))
def test_whatever_is_given_the_check_ends_in_sentences(o):
    rows = [o] if isinstance(o, (dict, list)) else [dict(messages=o)]
    kept,dropped = sift(rows)
    assert len(kept)+len(dropped) == 1 and all(d["reasons"] for d in dropped)

def test_openai_style_arguments_and_parallel_calls(trace):
    for m in trace[1:-1:2]:
        f = m["tool_calls"][0]["function"]
        f["arguments"] = json.dumps(f["arguments"])
    assert problems(trace) == [] and steps(trace)[0][1] == {"query": "SELECT manager FROM person WHERE name = 'Ada'"}
    both = [trace[0], dict(trace[1], tool_calls=trace[1]["tool_calls"]+trace[3]["tool_calls"]), trace[2], trace[4], trace[-1]]
    assert problems(both) == [] and len(steps(both)) == 2

def test_rows_come_back_from_parquet_as_they_were(tmp_path, task, environment):
    mailed = dict(question="Mail it", goal=json.dumps(dict(outbox=[dict(to="a@b.c", subject="report", body="x")])), messages=[
        dict(role="user", content="Mail it"), *called("mail", dict(to="a@b.c", subject="report", body="x"), ok("sent")), *say("done")])
    rows = [row(task, 0, environment), mailed]
    frame = pd.DataFrame([dict(question=r["question"], messages=r["messages"], goal=r.get("goal"), answer=r.get("answer")) for r in rows])
    frame.to_parquet(tmp_path/"rows.parquet")
    again = pd.read_parquet(tmp_path/"rows.parquet").astype(object).where(lambda f: f.notna(), None).to_dict("records")
    assert sift(again)[1] == []
    assert [task_key(r) for r in again] == [task_key(dict(r, state="")) for r in rows]
    assert [read_row(r)["messages"] for r in again] == [r["messages"] for r in rows]

def test_rows_of_chores_fit_as_they_are_stored(tmp_path):
    world = graph(office(tmp_path/"office.db"))
    chores = sample_chores(index_rows(world), 60, {1: 1, 2: 1, 3: 1}, 4, "train")
    with closing(Environment(tmp_path/"office.db", max_calls=99)) as place:
        played = [(c, play_chore(c, place, i, .3, world.graph["tables"])) for i,c in enumerate(chores)]
    write_rows(tmp_path/"rows.parquet", [as_row(c, messages, "train") for c,(messages,why) in played if not why])
    rows = pyarrow.parquet.read_table(tmp_path/"rows.parquet").to_pylist()
    assert len(rows) > 40 and sift(rows) == (rows, [])
    assert all(task_key(r)[1] == r["subgraph"] and read_row(r)["goal"] == json.loads(r["goal"]) for r in rows)
    found = match(rows, rows)
    assert [o for o in found["key"]] == [[i] for i in range(len(rows))]


# ---- Failures ----

def test_each_way_to_fail_has_its_reason(trace, task):
    good = dict(answer=task.answer, messages=trace)
    assert kinds(good) == kinds(trace) == []
    assert kinds(dict(good, messages=trace[:-1])) == ["no_answer"]
    assert kinds(dict(good, messages=trace[:-1]+say("  "))) == ["no_answer"]
    assert kinds(dict(good, messages=trace[:-1]+say("unknown"))) == ["wrong_answer"]
    assert kinds(dict(good, messages=trace[:1]+say(task.answer))) == ["no_call"]
    assert kinds(dict(good, messages=trace[:-1]+called("sql", {}, fault("sql"))+say(task.answer))) == ["failed_call"]
    assert kinds(dict(good, answer=f" {task.answer} ")) == []

def test_the_same_result_for_the_third_time_is_a_loop(trace, task):
    for n,found in [(1, []), (2, []), (3, ["loop"]), (9, ["loop"])]:
        assert kinds(dict(answer=task.answer, messages=trace[:1]+n*trace[1:3]+trace[3:])) == found
    assert failures(trace[:1]+4*trace[1:3]+trace[3:], most=4) == []

def test_going_back_and_forth_is_a_loop(trace): assert kinds(trace[:1]+3*trace[1:5]+trace[-1:]) == ["loop", "loop"]

@pytest.mark.parametrize("kind,found", [("timeout", []), ("rate_limit", []), ("server_error", []), ("bad_body", []),
                                        ("unauthorized", []), ("sql", ["loop"]), ("denied", ["loop"]), ("argument", ["loop"])])
def test_repeating_repairs_some_faults_and_not_others(trace, kind, found):
    failed = [trace[1], dict(trace[2], content=json.dumps(fault(kind)))]
    assert kinds(trace[:1]+5*failed+trace[1:]) == found

def test_one_call_with_changing_results_is_no_loop():
    moves = [m for i in range(6) for m in called("http", dict(path="orders?page=1"), ok(i))]
    assert failures([dict(role="user", content="q"), *moves, *say("5")]) == []

def test_mail_is_compared_with_the_goal():
    letter = dict(to="a@b.c", subject="report", body="Oslo")
    def trace(*letters, kind=None):
        moves = [m for l in letters for m in called("mail", l, fault(kind) if kind else ok("sent"))]
        return dict(goal=dict(outbox=[letter]), messages=[dict(role="user", content="q"), *called("sql", {}, ok("x")), *moves, *say("done")])
    assert failures(trace(dict(reversed(letter.items())))) == []
    for wrong in [(), (letter, letter), (dict(letter, body="Rome"),), (letter, dict(letter, to="x@y.z"))]:
        assert kinds(trace(*wrong)) == ["wrong_mail"]
    assert "wrong_mail" in kinds(trace(letter, kind="timeout"))

def test_sift_keeps_the_rows_themselves_in_order(g, environment):
    rows = [row(t, 0, environment) for t in sample_tasks(g, 40, {1: 1, 2: 1}, 1, "train")]
    bad = set(random.Random(0).sample(range(40), 15))
    mixed = [dict(r, answer="nobody") if i in bad else r for i,r in enumerate(rows)]
    before = copy.deepcopy(mixed)
    kept,dropped = sift(mixed)
    assert kept == [r for i,r in enumerate(rows) if i not in bad] and {d["index"] for d in dropped} == bad and mixed == before


# ---- The key of a task ----

def test_wordings_share_a_key_and_tasks_do_not(g):
    owners = {}
    for h in (1, 2):
        for t in all_tasks(g, h):
            keys = {task_key(row(t, w)) for w in range(3)}
            assert len(keys) == 1
            owners.setdefault(keys.pop(), set()).add(t.id)
    assert sum(len(o) > 1 for o in owners.values()) == 0

def test_the_key_has_three_parts(task):
    key = task_key(row(task))
    changed = row(task, state="t"), row(task, answer="Rome"), row(task, question="Find home of person 'Ada'")
    assert [sum(a != b for a,b in zip(key, task_key(r))) for r in changed] == [1, 1, 1]

words = st.lists(st.sampled_from("home manager team lead Zone über 1999".split()), min_size=1, max_size=6)
values = st.lists(st.text("abZ Oé-3", min_size=1, max_size=5), max_size=3)

@quick
@given(words=words, values=values, idle=st.lists(st.sampled_from(sorted(IDLE)), max_size=5), seed=st.integers(0, 99))
def test_order_case_and_idle_words_do_not_count_and_values_do(words, values, idle, seed):
    def text(ws, vs): return " ".join([*ws, *(f"'{v}'" for v in vs)])
    r = random.Random(seed)
    mixed = [w.upper() for w in words]+idle
    r.shuffle(mixed)
    a,b = text(words, values),text(mixed, r.sample(values, len(values)))+"?"
    assert canonical(a) == canonical(b) == canonical(canonical(a)) and sorted(named(a)) == sorted(values)
    if values: assert canonical(a) != canonical(text(words, [values[0]+"x", *values[1:]]))
    assert canonical(a) != canonical(text(words+["extra"], values))

def test_a_value_may_hold_an_apostrophe(): assert named("Ada's home of person 'O'Neil' or 'B'?") == ["O'Neil", "B"]

def test_a_lexicon_says_which_words_count_and_what_they_mean():
    lexicon = dict(manager="manager", boss="manager")
    assert canonical("Would you say who the boss of 'Ada' is?", lexicon) == canonical("the manager of 'Ada'") == "manager 'Ada'"
    assert canonical("boss of 'Ada'") == "boss 'Ada'" and task_key(dict(question="boss of 'Ada'"), lexicon)[0] == "manager 'Ada'"

def test_chores_are_recognised_in_the_words_of_both_sides(tmp_path):
    world = graph(office(tmp_path/"office.db"))
    lexicon = {w: w for t,d in world.graph["tables"].items() for w in (t, d["key"], *d["columns"])}
    chores = sample_chores(index_rows(world), 150, {1: 1, 2: 1, 3: 1}, 3, "train")
    def rows(word): return [dict(question=word(c), goal=json.dumps(c.goal), subgraph=c.subgraph, kind=c.kind) for c in chores]
    train,test = rows(lambda c: plain(c.plan, c.seed, "train")),rows(lambda c: plain(c.plan, c.seed+1, "test"))
    found = match([r | dict(messages=[]) for r in train], test, lexicon)
    assert sum(map(bool, found["text"])) == 0 and sum(i in o for i,o in enumerate(found["key"])) >= 147
    assert sum(map(len, found["key"])) <= 155

def test_a_state_is_what_the_database_holds(tmp_path, database):
    def made(name, rows):
        with closing(sqlite3.connect(tmp_path/name)) as c, c:
            c.execute("create table t(a text primary key, b)")
            c.executemany("insert into t values (?,?)", rows)
        return state_hash(tmp_path/name)
    rows = [("x", 1), ("y", 2), ("z", b"\x00")]
    assert made("1", rows) == made("2", rows[::-1]) and len({made("3", rows[:2]), made("4", [("x", 2)]), made("5", rows)}) == 3
    assert state_hash(database) == state_hash(company(tmp_path/"again.db")) != state_hash(company(tmp_path/"other.db", seed=1))


# ---- Near-duplicates ----

def test_jaccard_is_a_share():
    assert jaccard(set(), set()) == 0 and jaccard({1}, {1}) == 1 and jaccard({1, 2, 3}, {2, 3, 4}) == 0.5

def test_shingles_weigh_a_value_more_than_a_word():
    one = shingles(canonical("home of manager of person 'Ada'"))
    assert jaccard(one, shingles(canonical("home of manager of person 'Ben'"))) < 0.3
    assert jaccard(one, shingles(canonical("exact home of manager of person 'Ada'"))) > 0.7
    assert shingles("manager manager 'Ada'") != shingles("manager 'Ada'") and shingles("b a") == {"a", "b", "a a", "a b", "b a", "b b"}

@settings(quick, max_examples=20)
@given(seed=st.integers(0, 10**6), threshold=st.sampled_from([0.5, 0.7, 0.9]))
def test_near_pairs_are_exact_and_hardly_any_is_missed(seed, threshold):
    r = random.Random(seed)
    vocabulary = [f"w{i}" for i in range(30)]
    left = [" ".join(r.sample(vocabulary, r.randint(2, 8))) for _ in range(25)]
    right = [" ".join(w for w in t.split() if r.random() > 0.15) or "w0" for t in left]
    exact = {(i, j) for i,a in enumerate(left) for j,b in enumerate(right) if jaccard(shingles(a), shingles(b)) >= threshold}
    found = near_pairs(left, right, threshold)
    assert {p[:2] for p in found} <= exact and all(s == jaccard(shingles(left[i]), shingles(right[j])) for i,j,s in found)
    assert {(i, i) for i,(a,b) in enumerate(zip(left, right)) if shingles(a) == shingles(b)} <= {p[:2] for p in found}
    assert len(found) >= 0.7*len(exact)

def test_the_index_finds_95_in_100(g):
    texts = [canonical(t.question) for t in sample_tasks(g, 300, {1: 1, 2: 1, 3: 1}, 3, "test")]
    sets = [shingles(t) for t in texts],[shingles(f"{t.split()[0]}x {t}") for t in texts]
    exact = {(i, j) for (i,a),(j,b) in product(enumerate(sets[0]), enumerate(sets[1])) if jaccard(a, b) >= 0.6}
    pairs = candidates(*sets, 0.6)
    assert len(exact) >= 250 and len(pairs & exact) >= 0.95*len(exact) and len(pairs) < 300*300/20

def test_nothing_has_no_pairs(): assert near_pairs([], ["a"]) == near_pairs(["a"], []) == []


# ---- Leaks through tool results, and the report ----

def test_a_dump_leaks_its_records_and_no_others(g, environment):
    environment.reset()
    dump = [dict(role="user", content="Describe all products"),
            *called("sql", dict(query="SELECT name,owner,made,color FROM product"),
                    json.loads(environment.sql("SELECT name,owner,made,color FROM product"))), *say("done")]
    evaluation = [row(t) for t in all_tasks(g, 1)]
    found = leaks([dict(messages=dump)], evaluation)
    about = ["of product" in r["question"] for r in evaluation]
    shown = [f["rows"] == [0] for f in found]
    assert all(s for s,a in zip(shown, about) if a) and sum(about) == 60
    assert sum(s for s,a in zip(shown, about) if not a) < 10 and len(given_away(dict(messages=dump))) == 20

def test_a_longer_path_leaks_its_beginning(g, environment):
    first = {t.id: t for t in all_tasks(g, 2) if t.key == "200"}
    pairs = [(first[t.id.rsplit(".", 1)[0]], t) for t in all_tasks(g, 3) if t.key == "200"]
    assert len(pairs) > 10
    for short,long in pairs: assert leaks([row(long, 0, environment)], [row(short)])[0]["rows"] == [0]

def test_the_task_itself_is_no_leak(task, environment):
    found = leaks([row(task, w, environment) for w in range(3)], [row(task)])
    assert found == [dict(rows=[], chance=0.0)]

def test_http_paths_name_their_row():
    train = dict(messages=[dict(role="user", content="Describe someone"), *called("http", dict(path="person/Ad%20a"), ok(dict(home="Oslo"))), *say("x")])
    assert leaks([train], [dict(question="Find home of 'Ad a'", answer="Oslo")])[0]["rows"] == [0]

def test_failed_calls_show_nothing_and_some_rows_cannot_be_judged():
    train = dict(messages=[dict(role="user", content="home of 'Ada'"), *called("sql", dict(query="'Ada'"), fault("sql")), *say("x")])
    assert given_away(train) == []
    assert leaks([train], [dict(question="Who is here?", answer="Ada"), dict(question="home of 'Ada'", goal=dict(outbox=[]))]) == [None, None]

def test_a_common_value_is_seen_but_does_not_count_as_a_leak():
    "Ten questions with two answers: what was read about any of them contains one of the two"
    evaluation = [dict(question=f"status of order '{i}'", answer=("paid", "sent")[i % 2]) for i in range(10)]
    rare = [dict(question=f"name of order '{i}'", answer=f"name{i}") for i in range(10)]
    def trace(i, *values): return dict(messages=[dict(role="user", content=f"About order '{i}'"),
                                                 *called("sql", dict(query="SELECT 1"), ok(list(values))), *say("x")])
    common,special = (match([trace(i, o["answer"]) for i,o in enumerate(rows)], rows) for rows in (evaluation, rare))
    assert [list(map(bool, o["seen"])) for o in (common, special)] == [[True]*10]*2
    assert not any(common["leak"]) and all(special["leak"]) and common["chance"].min() > 0.4 and special["chance"].max() == 0

def test_most_leaks_that_are_named_are_true(g, environment):
    train = sample_tasks(g, 200, {1: 1, 2: 1, 3: 1}, 5, "train")
    evaluation = sample_tasks(g, 300, {1: 1, 2: 1, 3: 1}, 5, "test")
    truth = [any(set(t.queries) <= set(o.queries) for o in train) for t in evaluation]
    found = match([row(t, 0, environment) for t in train], [row(t) for t in evaluation])
    seen,leak = (found[way].map(bool).tolist() for way in ("seen", "leak"))
    assert sum(a and b for a,b in zip(seen, truth)) >= 0.9*sum(truth) > 20
    assert sum(a and b for a,b in zip(leak, truth)) >= 0.85*sum(leak) > 20

def test_what_is_planted_is_found_and_nothing_else(g, environment):
    exam = sample_tasks(g, 120, {1: 1, 2: 1, 3: 1}, 0, "test")
    clean = [row(t, i % 3, environment) for i,t in enumerate(sample_tasks(g, 120, {1: 1, 2: 1, 3: 1}, 0, "train"))]
    evaluation = [row(t) for t in exam]
    for share in (0, 12, 60):
        reworded = [row(t, 1+i % 2, environment) for i,t in enumerate(exam[:share])]
        train = clean+reworded+[row(t, 0, environment) for t in exam[share:share+5]]
        found = match(train, evaluation)
        table = report(found)
        assert table.loc["all", "key"] == share+5 and table.loc["all", "text"] == 5 and table.loc["all", "tasks"] == 120
        assert without(train, found, ("key",)) == clean and without(train, found, ("text",)) == clean+reworded
        assert (table.drop("all").sum() == table.loc["all"])[["tasks", "text", "key", "near", "seen", "leak"]].all()
        assert list(table.columns) == ["tasks", *WAYS, "chance"]

def test_a_near_duplicate_has_the_same_state_and_goal(task):
    odd = asks(task, 1).replace("home", "exact home")
    near = [match([r], [row(task)])["near"][0] for r in (row(task, question=odd), row(task, question=odd, answer="Rome"),
                                                        row(task, question=odd, state="t"), row(task))]
    assert near == [[0], [], [], []]

def test_a_report_of_nothing_is_empty(task):
    table = report(match([], [row(task)]))
    assert table.loc["all"].drop("tasks").sum() == 0 and table.loc["all", "tasks"] == 1
    assert report(match([row(task)], [])).loc["all"].sum() == 0 and without([1, 2], match([], [])) == [1, 2]
