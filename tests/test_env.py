"Tools and environments: nothing that gets out, the same faults again, one shape of result, and nothing left behind."
import gc,hashlib,itertools,json,random,shutil,sqlite3,subprocess,sys,threading
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from time import monotonic, thread_time

import psutil,pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from agentrl_cookbook.task import env as chapter
from agentrl_cookbook.task.env import Environment, answer, bad_argument, call, instructions, result_text, schemas, share, tool_methods
from agentrl_cookbook.task.faults import (FAULTS, PENALTIES, PROFILES, REPLIES, TOOLS, check_profile, draw_fault, fit_profile,
                                          penalty, waited)
from agentrl_cookbook.task.synth import sample_tasks
from agentrl_cookbook.task.tools import ATTEMPTS, FUNCTIONS, connect, open_database, parse_call, schema, sql
from agentrl_cookbook.task.world import company, write_database

quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
KINDS = {"ok", "timeout", "sql", "denied", "too_large", "malformed", "unknown_tool", "argument", "budget"}
ALL = ("sql", "python", "http", "mail")

@pytest.fixture(scope="module")
def guarded(database): return open_database(database)

@pytest.fixture(scope="module")
def four(database):
    "An environment with all four tools, which keeps the servers up for the whole file"
    with closing(Environment(database, tools=ALL)) as e: yield e

def is_result(r):
    "Whether it has the one shape that all tools share"
    return list(r) == (["ok", "result"] if r["ok"] else ["ok", "kind", "error"]) and json.loads(result_text(r)) == r


# ---- Tools ----

@pytest.fixture
def fort(database, tmp_path, monkeypatch):
    "A database in a folder of its own, in which no attempt may change or make a file"
    monkeypatch.chdir(tmp_path)
    path = Path(shutil.copy(database, "company.db"))
    before = path.read_bytes()
    connection = open_database(path)
    yield connection
    assert sql(connection, "SELECT count(*) FROM person") == dict(ok=True, result=[["40"]])
    assert [p.name for p in Path().iterdir()] == ["company.db"] and path.read_bytes() == before

@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempts_end_as_tool_errors_in_time(fort, name):
    kind,query = ATTEMPTS[name]
    limit = 0.02 if kind == "timeout" else 10  # seconds
    start,r = thread_time(),sql(fort, query, limit)
    assert is_result(r) and r.get("kind") == kind and len(r["error"]) <= 200, r
    assert thread_time()-start < 3  # processor time, whatever the kind

def test_there_are_attempts_of_every_kind():
    assert len(ATTEMPTS) >= 80 and {kind for kind,_ in ATTEMPTS.values()} == {"denied", "sql", "timeout", "too_large"}

def test_every_function_that_is_allowed_is_named(guarded, database):
    "The others of this build are refused, the functions of extensions among them"
    with closing(connect(database)) as c: found = set(c.execute("SELECT name,max(narg) FROM pragma_function_list GROUP BY 1"))
    told = {name: sql(guarded, f"SELECT {name}({','.join('1'*(n if n >= 0 else 2))})") for name,n in found if name not in ("->", "->>")}
    loose = {n for n,r in told.items() if n not in FUNCTIONS and r.get("kind") not in ("denied", "sql")}
    assert not loose and not {n for n in FUNCTIONS & set(told) if told[n].get("kind") == "denied"}
    assert not FUNCTIONS & {"load_extension", "printf", "format", "readfile", "writefile", "edit", "fts3_tokenizer", "sqlite_log"}

def test_many_slow_steps_meet_the_clock(guarded):
    "LIKE compares each character with each, in one step: a query of 800 comparisons ends soon after its limit"
    text,pattern = "replace(hex(zeroblob(4900)), '00', 'aa')","'%"+"a"*60+"b'"
    query = f"WITH v(x,y) AS MATERIALIZED (SELECT {text},{pattern}) SELECT {'+'.join(['(x LIKE y)']*800)} FROM v"
    start = thread_time()
    assert sql(guarded, query, seconds=0.1)["kind"] == "timeout" and thread_time()-start < 3

def test_no_function_of_sqlite_outruns_the_clock(guarded, database):
    "Each function that is allowed, with arguments as long and as large as they may be"
    long,short = "hex(zeroblob(4990))","hex(zeroblob(600))||'1'"
    values = [long, short, "1000000000", "'%.*f%1000000000d%J'", "'$[0]'"]
    with closing(connect(database)) as c: found = set(c.execute("SELECT name,narg FROM pragma_function_list"))
    assert len(found) > 100
    for name,n in sorted(found):
        for k in ([n] if n >= 0 else [0, 1, 2, 3]):
            for args in itertools.product(values, repeat=min(k, 3)):
                start = thread_time()
                assert is_result(sql(guarded, f"SELECT {name}({','.join([*args, *[long]*(k-len(args))])})", seconds=0.1))
                assert thread_time()-start < 3, (name, args)

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

def timeouts(rate): return dict(sql=dict(timeout=rate))

def play(environment, seed, queries=("SELECT 1",)*12):
    environment.reset(seed=seed)
    for q in queries: environment.sql(q)
    return [kind for _,kind in environment.calls]

@quick
@given(seed=st.integers(), rate=st.floats(0, 1), wrong=st.lists(st.booleans(), min_size=12, max_size=12))
def test_faults_follow_the_seed_and_nothing_else(database, seed, rate, wrong):
    a,b = Environment(database, timeouts(rate)),Environment(database, timeouts(rate))
    kinds = play(a, seed)
    play(b, seed+1)
    assert kinds == play(b, seed) == play(a, seed)
    mixed = play(b, seed, ["SELEKT" if w else "SELECT 1" for w in wrong])
    assert [k == "timeout" for k in mixed] == [k == "timeout" for k in kinds]

@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 1.0])
def test_the_rate_is_the_share_of_calls_that_time_out(database, rate):
    environment = Environment(database, timeouts(rate))
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
    environment = Environment(database, timeouts(.3), max_calls=budget)
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


# ---- Faults ----

def test_the_profile_of_one_rate_gives_the_published_episodes(database):
    "Recorded before there were profiles: results that are published were made with these time-outs"
    recorded = {0: "....xx......", 1: ".xx..xx.....", 2: "............", "0-7": "...x.x.x....", -3: ".......x...x"}
    environment = Environment(database, timeouts(.2))
    assert {s: "".join(".x"[k == "timeout"] for k in play(environment, s)) for s in recorded} == recorded
    play(environment, 0)
    assert environment.reset(seed=0) is None and [environment.sql("SELECT 1") for _ in range(5)][4] == \
        '{"ok": false, "kind": "timeout", "error": "try again"}'
    told = "a24f9af38351e53b8ec2c90d79946569eb09ef3521366cccc8dbdc4922c8c0a6"
    assert hashlib.sha256(instructions(environment).encode()).hexdigest() == told

@quick
@given(seed=st.integers(), rate=st.floats(0, 1))
def test_one_draw_a_call(database, seed, rate):
    luck = random.Random(f"{seed}")
    assert play(Environment(database, timeouts(rate)), seed) == [("ok", "timeout")[luck.random() < rate] for _ in range(12)]

chances = st.dictionaries(st.sampled_from(FAULTS[:-1]), st.floats(0, .16))

@quick
@given(st.floats(0, 1, exclude_max=True), chances)
def test_a_number_stands_for_the_fault_in_whose_stretch_it_falls(share, given):
    edges = list(itertools.accumulate(given.get(k, 0.0) for k in FAULTS))
    expected = next((k for k,e in zip(FAULTS, edges) if share < e), None)
    assert draw_fault(share, given) == expected and (expected is None or given[expected] > 0)

@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("kind", REPLIES)
def test_a_fault_replaces_the_call(four, tool, kind):
    "Nothing is sent, nothing is run, and the next call comes through"
    arguments = dict(sql=dict(query="SELECT 1"), python=dict(code="print(1)"), http=dict(path="/"), mail=dict(to="a", subject="b", body="c"))
    four.profile = {tool: {kind: 1.0}}
    four.reset()
    r = call(four, (tool, arguments[tool]))
    assert r == dict(ok=False, kind=kind, error=REPLIES[kind]) and four.calls == [(tool, kind)] and four.outbox == []
    four.profile = {}
    assert call(four, (tool, arguments[tool]))["ok"]

def test_a_limit_of_requests_holds_for_an_episode(database):
    with closing(Environment(database, tools=("sql", "http"), limit=2)) as e:
        for _ in range(2):
            assert [json.loads(e.http("/city/Oslo")).get("kind", "ok") for _ in range(3)] == ["ok", "ok", "rate_limit"]
            assert json.loads(e.sql("SELECT 1"))["ok"] and e.faults == 0
            e.reset()

def test_a_slow_answer_is_an_answer_and_takes_no_time_here(database):
    environment = Environment(database, dict(sql=dict(slow=1.0)))
    start,plain = monotonic(),Environment(database)
    assert [environment.sql(q) for q in ("SELECT 1", "SELEKT")] == [plain.sql(q) for q in ("SELECT 1", "SELEKT")]
    assert monotonic()-start < 2 and environment.calls == [("sql", "slow"), ("sql", "sql")] and waited(environment.calls) == 5.0

def test_faults_are_those_that_were_injected(four):
    "A query or a program that meets its own time limit is the policy's doing, and so is a call beyond the budget"
    four.profile = {}
    four.reset()
    assert json.loads(four.python("while True: pass"))["kind"] == json.loads(four.sql(ATTEMPTS["recursion"][1]))["kind"] == "timeout"
    assert four.faults == 0
    four.profile = dict(sql=dict(timeout=1.0), http=dict(version=1.0), python=dict(slow=1.0))
    four.reset()
    four.sql("SELECT 1"), four.http("/city/Oslo"), four.http("/city/Oslo"), four.python("1/0"), four.python("print(1)"), four.mail("a", "b", "c")
    assert [k for _,k in four.calls] == ["timeout", "version", "ok", "python", "slow", "ok"] and four.faults == 3
    four.max_calls,before = 6,four.max_calls
    assert json.loads(four.sql("SELECT 1"))["kind"] == "budget" and four.faults == 3
    four.max_calls,four.profile = before,{}
    four.reset()
    assert four.faults == 0

def test_the_version_moves_for_one_episode_and_one_environment(four, database):
    four.profile = dict(http=dict(version=1.0))
    with closing(Environment(database, tools=("http",))) as other, closing(Environment(database, tools=("http",), version="v2")) as later:
        four.reset()
        kinds = [call(four, ("http", dict(path=p))).get("kind", "ok") for p in ("/v1/city/Oslo", "/v1/city/Oslo", "/v2/tables/city/Oslo", "/city/Oslo")]
        assert kinds == ["gone", "gone", "ok", "ok"] and [k for _,k in four.calls] == ["version", "gone", "ok", "ok"]
        row,item = (json.loads(e.http("/city/Oslo"))["result"][0] for e in (other, later))
        assert row["row"] == item["item"] and json.loads(later.http("/v1/city/Oslo"))["kind"] == "gone"
        four.profile = {}
        four.reset()
        later.reset()
        assert json.loads(four.http("/v1/city/Oslo"))["ok"] and json.loads(later.http("/v2/tables/"))["ok"]

@pytest.mark.parametrize("profile,said", [
    (dict(shell=dict(timeout=.1)), "There is no tool 'shell'"), (dict(sql=dict(oops=.1)), "There is no fault 'oops'"),
    (dict(sql=dict(timeout=-.1)), "timeout of sql is -0.1: give a probability from 0 to 1"), (dict(sql=dict(timeout=20)), "timeout of sql is 20"),
    (dict(sql=dict(timeout=float("nan"))), "timeout of sql is nan"), (dict(mail=dict(version=.1)), "mail has no versions"),
    (dict(http=dict(timeout=.7, slow=.4)), "The faults of http add up to more than 1"),
    (dict(sql=dict(timeout=".1")), "timeout of sql is '.1': give a probability"), (dict(sql=dict(timeout=None)), "timeout of sql is None"),
    (dict(sql=.1), "{'sql': 0.1} is no error profile: give"), (dict(sql=None), "is no error profile"), ("light", "'light' is no error profile"),
    (None, "None is no error profile")])
def test_a_profile_that_cannot_be_meant_is_refused(database, profile, said):
    with pytest.raises(ValueError, match=said): Environment(database, profile)

@settings(quick, max_examples=15)
@given(st.dictionaries(st.sampled_from(TOOLS), chances, min_size=1), st.integers(0, 99))
def test_a_profile_comes_back_from_the_log_of_its_faults(tmp_path_factory, profile, seed):
    luck,log = random.Random(seed),tmp_path_factory.mktemp("log")/"requests.jsonl"
    status,n = dict(timeout=None, unauthorized=401, rate_limit=429, server_error=503),1500
    with log.open("w") as f:
        for tool in profile:
            for _ in range(n):
                kind = draw_fault(luck.random(), profile[tool])
                f.write(json.dumps(dict(tool=tool, status=status.get(kind, 200), json=kind != "bad_body", seconds=[.1, 8][kind == "slow"]))+"\n")
    fitted = fit_profile(log)
    assert set(fitted) == set(profile) and check_profile(fitted) is fitted
    assert all(abs(fitted[t].get(k, 0)-profile[t].get(k, 0)) < .06 for t in profile for k in FAULTS)

def test_a_log_may_lack_times(tmp_path):
    (tmp_path/"log.jsonl").write_text('{"tool": "sql", "status": 200, "seconds": null}\n{"tool": "sql", "status": null}\n')
    assert fit_profile(tmp_path/"log.jsonl") == dict(sql=dict(timeout=.5))

def test_versions_in_a_log_count_where_they_change(tmp_path):
    versions,log = ["v1", "v1", "v2", "v2", None, "v3"],tmp_path/"log.jsonl"
    lines = [dict(tool="http", status=200, seconds=.1) | (dict(version=v) if v else {}) for v in versions]
    log.write_text("\n".join(json.dumps(l) for l in lines+[dict(tool="http", status=404), dict(tool="sql", status=200, version="3")])+"\n\n")
    assert fit_profile(log) == dict(http=dict(version=2/7), sql={})

@pytest.mark.parametrize("text,said", [
    ('{"tool": "sql", "status": 200}\nnonsense', "Line 2 of .* is no request"), ("[]", "Line 1 of .* is no request"),
    ('{"status": 200}', "Line 1 of .* is no request"), ('{"tool": "sql", "status": "ok"}', "Line 1"), ("\n\n", "There is no request in"),
    ('{"tool": "search", "status": 200}', "has the tool 'search': rename it to one of sql, python, http, mail"), (b"\xff\xfe\0", "Line 1 of .* is no request")])
def test_a_log_that_cannot_be_read_is_named_with_its_line(tmp_path, text, said):
    (tmp_path/"log.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=said) as e: fit_profile(tmp_path/"log.jsonl")
    assert "\n" not in str(e.value)

def test_penalties_and_waiting_are_sums_over_the_calls():
    calls = [("http", "server_error"), ("sql", "timeout"), ("sql", "ok"), ("mail", "unauthorized"), ("http", "slow"), ("?", "malformed")]
    assert penalty(calls) == -6.5 and PENALTIES == dict(server_error=-2.0, unauthorized=-1.5, timeout=-3.0)
    assert penalty(calls, dict(malformed=-1.0)) == -1.0 and penalty([]) == 0 and waited(calls) == 15.0

@pytest.mark.parametrize("name", PROFILES)
def test_the_shares_of_a_profile_are_those_of_the_calls(database, name):
    profile = PROFILES[name]
    environment = Environment(database, check_profile(profile))
    kinds = Counter(k for seed in range(400) for k in play(environment, seed))
    assert all(abs(kinds[k]/4800-profile.get("sql", {}).get(k, 0)) < .015 for k in FAULTS)


# ---- Four tools, one protocol ----

def test_four_tools_share_one_shape_and_are_counted(four):
    four.profile = {}
    four.reset()
    told = [four.sql("SELECT count(*) FROM person"), four.python("print(6*7)"), four.http("/city/Oslo"), four.mail("ada", "Hello", "One.\nTwo.")]
    assert all(is_result(json.loads(t)) and json.loads(t)["ok"] for t in told)
    assert four.calls == [(t, "ok") for t in ALL] and four.outbox == [dict(to="ada", subject="Hello", body="One.\nTwo.")]
    assert json.loads(told[0])["result"] == [["40"]] and "42" in json.loads(told[1])["result"][0]
    assert json.loads(told[2])["result"][0]["row"]["country"] == "Norway"

@pytest.mark.parametrize("tool,arguments,kind", [
    ("python", dict(code="import socket"), "denied"), ("python", dict(code="1/0"), "python"), ("http", dict(path="//evil.test/"), "denied"),
    ("http", dict(path="http://evil.test/"), "denied"), ("http", dict(path="/v9/city"), "not_found"), ("http", dict(path=""), "denied"),
    ("mail", dict(to="a\r\nb", subject="", body=""), "denied"), ("mail", dict(to="a", subject="b"), "argument"), ("http", dict(path=1), "argument")])
def test_what_goes_wrong_in_any_tool_is_a_result_with_a_kind(four, tool, arguments, kind):
    four.profile = {}
    four.reset()
    r = call(four, (tool, arguments))
    if tool == "python" and kind == "denied": kind = r.get("kind")  # what the sandbox calls it is for its own tests
    assert is_result(r) and not r["ok"] and r["kind"] == kind and four.calls == [(tool, kind)] and four.outbox == []

@pytest.mark.parametrize("tools", [("sql",), ("http", "sql"), ("mail",), ALL])
def test_only_the_tools_asked_for_are_methods(database, tools):
    with closing(Environment(database, tools=tools)) as e:
        assert sorted(tools) == list(tool_methods(e)) == [s["function"]["name"] for s in schemas(e)]
        assert not [t for t in TOOLS if t not in tools and hasattr(e, t)] and isinstance(e, Environment)
        missing = call(e, ("shell", {}))
        assert missing["kind"] == "unknown_tool" and missing["error"] == f"the tools are: {', '.join(sorted(tools))}"

def test_a_tool_that_is_not_there_is_refused(database):
    with pytest.raises(ValueError, match="There is no tool shell: the tools are sql, python, http, mail"): Environment(database, tools=("sql", "shell"))

def test_an_environment_of_ones_own_may_add_a_reward(database):
    class Graded(Environment):
        def get_reward(self): return float(len(self.calls))
    e = Graded(database, tools=("sql",))
    e.sql("SELECT 1")
    assert isinstance(e, Graded) and e.get_reward() == 1.0 and list(tool_methods(e)) == ["sql"]

def test_schemas_are_what_an_openai_style_api_takes(four):
    for described in schemas(four):
        function = described["function"]
        assert set(function) == {"name", "description", "parameters"}, "strict servers refuse other fields"
        assert described["type"] == "function" and function["description"] and set(function["parameters"]["required"]) == set(function["parameters"]["properties"])
        assert all(p["type"] == "string" and p["description"] for p in function["parameters"]["properties"].values())
    json.dumps(schemas(four))

@pytest.mark.parametrize("arguments,kind", [('{"path": "/city/Oslo"}', "ok"), (dict(path="/city/Oslo"), "malformed"), ("", "malformed"), (None, "malformed"),
    ("[1]", "malformed"), ("{", "malformed"), ("["*10**5, "malformed"), ('{"path": 1}', "argument"), ('{}', "argument"), ('{"path": "/"}, "name": "mail"', "malformed")])
def test_any_tool_call_of_an_openai_style_api_has_an_answer(four, arguments, kind):
    four.profile = {}
    four.reset()
    message = answer(four, dict(id="call_7", type="function", function=dict(name="http", arguments=arguments)))
    assert set(message) == {"role", "tool_call_id", "content"} and message["role"] == "tool" and message["tool_call_id"] == "call_7"
    assert is_result(json.loads(message["content"])) and [k for _,k in four.calls] == [kind]

def test_a_tool_call_without_a_name_has_an_answer(four):
    message = answer(four, dict(id="call_8", type="function", function=dict(arguments="{}")))
    assert json.loads(message["content"])["kind"] == "malformed" and message["tool_call_id"] == "call_8"

def test_instructions_for_four_tools(four):
    told = instructions(four)
    assert all(json.dumps(schema(m)) in told for m in tool_methods(four).values()) and "chores" in told.splitlines()[0]


# ---- Shared, reset, closed ----

class Counted:
    "A back-end that counts itself"
    live = made = 0
    def __init__(self): Counted.live += 1; Counted.made += 1
    def close(self): Counted.live -= 1

def test_a_back_end_lives_from_the_first_user_to_the_last():
    made = Counted.made
    with share(Counted) as a:
        with share(Counted) as b: assert a is b and Counted.live == 1
        assert Counted.live == 1
    assert Counted.live == 0 and Counted.made == made+1
    with share(Counted): assert Counted.live == 1 and Counted.made == made+2

def test_what_differs_in_more_than_its_arguments_is_another_back_end():
    with share(Counted, of=1) as a, share(Counted, of=2) as b, share(Counted, of=1) as c: assert a is c is not b

def test_a_database_that_was_replaced_is_served_anew(tmp_path):
    path = company(tmp_path/"c.db", seed=0)
    with closing(Environment(path, tools=("http",))) as old:
        company(path, seed=1)
        with closing(Environment(path, tools=("sql", "http"))) as new:
            row = json.loads(new.http("/person/Ada"))["result"][0]["row"]
            assert json.loads(new.sql("SELECT * FROM person WHERE name = 'Ada'"))["result"] == [list(row.values())]
            assert json.loads(old.http("/person/Ada"))["result"][0]["row"] != row

def test_a_back_end_that_does_not_start_leaves_nothing_behind():
    def broken(): raise OSError("no layer holds")
    for _ in range(2):
        with pytest.raises(OSError, match="no layer holds"):
            with share(broken): pass
    assert not [key for key in chapter._shared if key[1] is broken]

def test_many_threads_share_one_back_end():
    made,barrier = Counted.made,threading.Barrier(8)
    def use():
        barrier.wait()
        for _ in range(50):
            with share(Counted): assert Counted.live == 1
    with share(Counted):
        threads = [threading.Thread(target=use) for _ in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
    assert Counted.live == 0 and Counted.made == made+1

def users(): return {getattr(key[1], "__name__", ""): n for key,(_,n) in chapter._shared.items()}

def test_an_environment_that_is_closed_or_lost_lets_go(database):
    before = users()
    kept = Environment(database, tools=("http", "mail"))
    lost = Environment(database, tools=("http", "mail"))
    assert users() == before | {k: before.get(k, 0)+2 for k in ("Api", "Mail")}
    del lost
    gc.collect()
    assert users() == before | {k: before.get(k, 0)+1 for k in ("Api", "Mail")}
    kept.close(); kept.close()
    assert users() == before
    with pytest.raises(ValueError, match="This environment is closed"): kept.http("/")

def test_a_failed_start_gives_back_what_it_took(database, monkeypatch):
    before,files = users(),psutil.Process().num_fds()
    with pytest.raises(ValueError, match="version is 'v9'"): Environment(database, tools=("mail", "http"), version="v9")
    gc.collect()
    assert users() == before and psutil.Process().num_fds() <= files+2

def test_ones_own_back_ends_are_used_and_left_alone(database):
    from agentrl_cookbook.task.mail import Mail
    with closing(Mail()) as own:
        with closing(Environment(database, tools=("mail",), services=dict(mail=own))) as e:
            e.mail("ada", "a", "b")
            assert e.outbox and sum(map(len, own.boxes.values())) == 1
        assert own.boxes == {} and not own.closed

def test_two_environments_do_not_see_each_other(database):
    with closing(Environment(database, tools=ALL)) as a, closing(Environment(database, tools=ALL)) as b:
        a.mail("ada", "from a", "")
        assert b.outbox == [] == b.calls and [m["subject"] for m in a.outbox] == ["from a"]
        b.reset(seed=1)
        assert len(a.outbox) == 1
        a.reset(seed=1)
        assert a.outbox == [] == a.calls

def held():
    gc.collect()
    me = psutil.Process()
    return dict(files=me.num_fds(), threads=threading.active_count(), processes=len(me.children(recursive=True)))

def test_256_environments_live_at_once(four, database):
    before = psutil.Process().memory_info().rss
    live = [Environment(database, tools=ALL) for _ in range(256)]
    for e in live:
        e.sql("SELECT home FROM person WHERE name = 'Ada'")
        e.mail("ada", "a", "b")
    assert all(len(e.outbox) == 1 for e in live) and json.loads(live[-1].http("/city/Oslo"))["ok"]
    assert (psutil.Process().memory_info().rss-before)/256 < 400_000  # bytes of one more
    for e in live: e.close()

def test_5000_episodes_leave_nothing_behind(four, database):
    "Every episode looks something up; one in ten goes over the network, one in a hundred runs Python in an environment of its own"
    def play_some(seeds):
        for seed in seeds:
            four.reset(seed=seed)
            four.sql("SELECT home FROM person WHERE name = 'Ada'")
            if seed % 10 == 0: four.http("/city/Oslo"), four.mail("ada", "a", "b")
            if seed % 100 == 0:
                with closing(Environment(database, tools=("sql", "http", "mail"))) as own: own.http("/city/Oslo"), four.python("print(1)")
    four.profile = PROFILES["production"]
    play_some(range(500))
    before,memory = held(),psutil.Process().memory_info().rss
    play_some(range(5000))
    after = held()
    assert after["processes"] <= before["processes"]+1 and after["threads"] <= before["threads"] and after["files"] <= before["files"]+4, (before, after)
    assert psutil.Process().memory_info().rss-memory < 8_000_000
    four.profile = {}

def test_the_last_environment_stops_servers_and_sandbox(database):
    check = f"""
import psutil,threading
from agentrl_cookbook.task.env import Environment
e = Environment({str(database)!r}, tools={ALL!r})
assert e.python("print(1)") and e.http("/") and threading.active_count() > 1 and psutil.Process().children()
e.close()
print(threading.active_count(), len(psutil.Process().children()))
e = Environment({str(database)!r}, tools={ALL!r})  # left open: the end of the program closes it
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1 0\n" and done.stderr == "" and done.returncode == 0

def test_a_reset_starts_and_opens_nothing(four):
    "How many times as fast it is stands on the page: times are measured on a machine that does nothing else"
    api,before,inside = four._services["http"],held(),dict(chapter._shared)
    for seed in range(300): four.reset(seed=seed)
    assert held() == before and four._services["http"] is api and inside == chapter._shared

def test_a_single_tool_loads_no_server(database):
    check = f"""
import sys
from agentrl_cookbook.task.env import Environment
Environment({str(database)!r}).sql("SELECT 1")
print([m for m in ("aiohttp", "aiosmtpd", "torch", "agentrl_cookbook.task.sandbox") if m in sys.modules])
"""
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == "[]\n"


# ---- As others use it ----

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
    mail = '<tool_call>\n{"name": "mail", "arguments": {"to": "ada", "subject": "Home", "body": "Vienna"}}\n</tool_call>'
    wrong = '<tool_call>\n{"name": "sql", "arguments": {"qwery": "SELECT 1"}}\n</tool_call>'
    script = iter([query, query, mail, wrong, "Vienna"])
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
                       environment_factory=partial(Environment, database, timeouts(.5), tools=("sql", "mail")))
    assert [tool.__name__ for tool in trainer.tools] == ["mail", "sql"]
    trainer.train()
    [(messages,environment),(_,other)] = played
    assert environment.calls == [("sql", "timeout"), ("sql", "ok"), ("mail", "ok"), ("sql", "argument")] == other.calls  # seed 5, as everywhere
    answers = [json.loads(m["content"]) for m in messages if m["role"] == "tool"]
    assert all(map(is_result, answers)) and [a["ok"] for a in answers] == [False, True, True, False]
    assert environment.outbox == [dict(to="ada", subject="Home", body="Vienna")] == other.outbox and environment is not other
    assert trainer.state.log_history[-1]["reward"] == 1.0
