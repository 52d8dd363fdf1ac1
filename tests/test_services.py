"The API and the mail server: right answers, every kind of failure, and nothing that gets out or stays behind."
import asyncio,json,socket,sqlite3,subprocess,sys,threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from smtplib import SMTP
from time import monotonic

import psutil,pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st

from agentrl_cookbook.task.api import (FAILS, PAGE, VERSIONS, Access, Api, http, interpret, read, read_schema, refused, respond)
from agentrl_cookbook.task.mail import Mail, compose, send, unfit
from agentrl_cookbook.task.service import Service
from agentrl_cookbook.task.tools import RESERVED, as_text, connect, failure, open_database, quoted
from agentrl_cookbook.task.world import company, write_database

quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

@pytest.fixture(scope="module")
def api(database):
    with closing(Api(database)) as api: yield api

@pytest.fixture
def token(api):
    token = api.open()
    yield token
    api.forget(token)

@pytest.fixture(scope="module")
def mail():
    with closing(Mail()) as mail: yield mail

@pytest.fixture
def box(mail):
    box = mail.open()
    yield box
    mail.forget(box)

def serve(protocol):
    service = Service()
    service.serve(protocol)
    return service

def saying(*parts):
    "A server that answers every request with these bytes and hangs up"
    class Says(asyncio.Protocol):
        def connection_made(self, transport): self.transport = transport
        def data_received(self, data):
            for part in parts: self.transport.write(part)
            self.transport.close()
    return closing(serve(Says))

@pytest.fixture(scope="module")
def trap():
    "A server next door and those who came to it"
    visits = []
    class Trap(asyncio.Protocol):
        def connection_made(self, transport): visits.append(transport)
    with closing(serve(Trap)) as service: yield service,visits

def is_result(r):
    "Whether it has the one shape that all tools share"
    return list(r) == (["ok", "result"] if r["ok"] else ["ok", "kind", "error"]) and json.loads(json.dumps(r)) == r

def held(): return threading.active_count(),psutil.Process().num_fds()


# ---- The API says what the database says ----

def walk(get, start):
    "Every answer that links lead to, by path"
    todo,seen = [start],{}
    while todo:
        path = todo.pop()
        if path is None or path in seen: continue
        seen[path] = body = get(path)
        found = body.get("tables", body.get("links", []))
        todo += [body.get("next"), *(found.values() if isinstance(found, dict) else found)]
    return seen

def rows_of(database):
    "By table, the rows as text"
    schema = read_schema(database)
    with closing(connect(database)) as c:
        return {t: [dict(zip([d["key"], *d["columns"]], map(as_text, row))) for row in c.execute(
            f"SELECT {','.join(map(quoted, [d['key'], *d['columns']]))} FROM {quoted(t)} ORDER BY {quoted(d['key'])}")]
            for t,d in schema.items()}

@pytest.mark.parametrize("version", VERSIONS)
def test_links_lead_to_every_row_and_each_is_as_stored(api, database, version):
    token,one = api.open(version),VERSIONS[version]["row"]
    def get(path):
        r = http(api, token, path)
        assert r["ok"], (path, r)
        return r["result"][0]
    seen = walk(get, VERSIONS[version]["home"]+"/")
    found = sorted(json.dumps(b[one]) for b in seen.values() if one in b)
    assert found == sorted(json.dumps(r) for rows in rows_of(database).values() for r in rows) and len(found) == 173

names = st.one_of(st.sampled_from(sorted(RESERVED)), st.text("abcXYZ_ \"'-./?&%é0", min_size=1, max_size=6))
cells = st.one_of(st.none(), st.text(max_size=5), st.text("'\"\\/%?#&+;é☃.", max_size=4), st.integers(-9, 10**12), st.floats(allow_nan=False))

@settings(quick, max_examples=30)
@given(names=st.lists(names, min_size=6, max_size=6, unique_by=str.casefold), keys=st.lists(cells, min_size=1, max_size=12, unique_by=str),
       notes=st.lists(st.tuples(st.integers(0, 9), cells), max_size=4))
def test_any_database_can_be_served(tmp_path_factory, names, keys, notes):
    "Whatever its tables and columns are called and its keys are, all rows are listed, and their links lead to them"
    assume(not any(n.casefold().startswith("sqlite_") for n in names))
    parent,child,key,value,link,note = map(quoted, names)
    path = tmp_path_factory.mktemp("any")/"any.db"
    with closing(sqlite3.connect(path)) as c, c:
        c.executescript(f"pragma synchronous=off; create table {parent} ({key} text primary key, {value});"
                        f"create table {child} ({quoted(names[2])} integer primary key, {link} references {parent}, {note})")
        c.executemany(f"insert or ignore into {parent} values (?,?)", [(k, k) for k in keys])
        stored = [k for (k,) in c.execute(f"select {key} from {parent}")]
        c.executemany(f"insert into {child} values (?,?,?)", [(i, stored[at % len(stored)], v) for i,(at,v) in enumerate(notes)])
    expected = rows_of(path)
    with closing(open_database(path)) as c:
        schema = read_schema(path)
        seen = walk(lambda p: respond(c, schema, "v1", p)[1], "/v1/")
    pages = [b for b in seen.values() if "rows" in b]
    assert not any("error" in b for b in seen.values())
    for b in pages:
        for row,to in zip(b["rows"], b["links"], strict=True):
            assert row in expected[names[0]]+expected[names[1]] and (to is None or seen[to]["row"] == row)
    listed = [r for t in names[:2] for r in expected[t]]
    assert all(any(r in b["rows"] for b in pages) for r in listed)

def test_pages_together_are_the_table_in_the_order_of_the_key(api, token, database):
    path,rows,pages = "/v1/ticket",[],0
    while path:
        [body] = http(api, token, path)["result"]
        assert len(body["rows"]) <= PAGE
        rows,path,pages = rows+body["rows"],body["next"],pages+1
    assert rows == rows_of(database)["ticket"] and pages == 5

@pytest.mark.parametrize("n,pages", [(0, 1), (PAGE, 1), (PAGE+1, 2)])
def test_the_last_page_has_no_next(tmp_path, n, pages):
    path = write_database(tmp_path/"n.db", "create table a(id integer primary key); create table b(id integer primary key)",
                          {k: v for k,v in dict(a=[(i,) for i in range(n)], b=[(1,)]).items() if v})
    with closing(open_database(path)) as c:
        seen = walk(lambda p: respond(c, read_schema(path), "v1", p)[1], "/v1/a")
    assert sum("next" in b for b in seen.values()) == pages and sum("row" in b for b in seen.values()) == n

def test_filters_are_joined_and_kept_on_the_next_page(api, token, database):
    [body] = http(api, token, "/v1/ticket?level=urgent&about=Drill")["result"]
    assert body["rows"] == [r for r in rows_of(database)["ticket"] if (r["level"], r["about"]) == ("urgent", "Drill")]
    [body] = http(api, token, "/v1/person?role=engineer")["result"]
    assert body["next"] in (None, "/v1/person?role=engineer&page=2") and {r["role"] for r in body["rows"]} == {"engineer"}

def test_awkward_names_and_values_survive_the_trip(tmp_path):
    "Slashes, percent signs, spaces, question marks and other alphabets, in names and in keys; columns called home and page"
    names = ["a/b", "50%", "x y", "who?", "q&a=1", "Łódź", "#1", "it's", "+", "ein;zwei", "\\"]
    schema = '''create table "my table"(key text primary key, "first name" text, home text, page text);
        create table child(id integer primary key, home text references "my table"(key))'''
    path = write_database(tmp_path/"odd.db", schema, {'"my table"': [(k, k*2, "h", None) for k in names],
                                                      "child": list(enumerate(names))})
    with closing(Api(path)) as api:
        token = api.open()
        seen = walk(lambda p: http(api, token, p, max_bytes=5000)["result"][0], "/v1/")
        rows = [b["row"] for b in seen.values() if "row" in b and "key" in b["row"]]
        assert sorted(r["key"] for r in rows) == sorted(names)
        assert all(r["first name"] == r["key"]*2 and r["page"] is None for r in rows)
        for k in names:
            if not set(k) & set("/?#&"): assert http(api, token, f"/v1/my table/{k}")["result"][0]["row"]["key"] == k
        assert len(http(api, token, "/v1/my table?first name=x yx y")["result"][0]["rows"]) == 1

def test_tables_without_one_key_are_not_served(tmp_path):
    path = write_database(tmp_path/"keys.db", "create table a(id integer primary key); create table log(line text);"
                          "create table pair(x text, y text, primary key(x, y))", dict(a=[(1,)], log=[("s",)], pair=[(1, 2)]))
    with closing(open_database(path)) as c: assert respond(c, read_schema(path), "v1", "/v1/") == (200, dict(tables=dict(a="/v1/a")))

def test_a_dangling_reference_is_not_found(tmp_path):
    path = write_database(tmp_path/"gone.db", "create table a(id integer primary key, b text references b(name));"
                          "create table b(name text primary key)", dict(a=[(1, "nowhere")], b=[("here",)]))
    with closing(open_database(path)) as c:
        schema = read_schema(path)
        link = respond(c, schema, "v1", "/v1/a/1")[1]["links"]["b"]
        assert respond(c, schema, "v1", link)[0] == 404

@pytest.mark.parametrize("target,status,part", [
    ("/v1/planet", 404, "no table planet"), ("/v1/person/Nobody", 404, "no row Nobody"), ("/v1/person/Ada/home", 404, "no row Ada/home"),
    ("/v1/person?shoe=9", 404, "no column shoe: the columns are name, team"), ("/v1/person?page=0", 404, "from 1"),
    ("/v1/person?page=x", 404, "from 1"), ("/v2/tables/", 404, "the version is v1"), ("/person", 404, "begins at /v1/"),
    ("/", 404, "/v1/"), ("", 404, "/v1/"), ("*", 404, "/v1/"), ("/v1", 200, ""), ("/v1/person/", 200, "")])
def test_what_is_not_there_says_what_is(database, target, status, part):
    with closing(open_database(database)) as c: found,body = respond(c, read_schema(database), "v1", target)
    assert found == status and part in body.get("error", "")


# ---- Versions, limits, faults: all of one token ----

def test_a_version_belongs_to_a_token_and_a_reset_restores_it(api):
    old,new = api.open("v1"),api.open("v2")
    assert http(api, old, "/v1/city/Oslo")["ok"] and http(api, new, "/v2/tables/city/Oslo")["ok"]
    gone = http(api, new, "/v1/city/Oslo")
    assert gone["kind"] == "gone" and "v2" in gone["error"] and "/v2/tables/" in gone["error"]
    assert http(api, old, "/v2/tables/city/Oslo")["kind"] == "not_found"
    api.set_version(old, "v2")
    assert http(api, old, "/v1/city/Oslo")["kind"] == "gone"
    api.reset(old), api.reset(new)
    assert http(api, old, "/v1/city/Oslo")["ok"] and http(api, new, "/v2/tables/city/Oslo")["ok"]

def test_no_call_of_one_version_works_in_the_other(database):
    with closing(open_database(database)) as c:
        schema = read_schema(database)
        for a,b in (("v1", "v2"), ("v2", "v1")):
            paths = walk(lambda p: respond(c, schema, a, p)[1], VERSIONS[a]["home"]+"/")
            assert {respond(c, schema, b, p)[0] for p in paths} == {410 if a < b else 404}
        assert {respond(c, schema, "v2", p.replace("/v1/", "/v2/"))[0] for p in ("/v1/person", "/v1/person/Ada")} == {404}

def test_a_limit_without_seconds_counts_the_episode(api):
    a,b = api.open(limit=3),api.open(limit=3)
    kinds = [http(api, t, "/v1/city/Oslo").get("kind", "ok") for t in (a, a, a, a, b, a)]
    assert kinds == ["ok", "ok", "ok", "rate_limit", "ok", "rate_limit"]
    api.reset(a)
    assert http(api, a, "/v1/city/Oslo")["ok"]

def test_a_window_moves_with_the_clock(database):
    now = [100.0]
    with closing(Api(database, clock=lambda: now[0])) as api:
        token,kinds = api.open(limit=2, per_seconds=10),[]
        for now[0] in (100, 104, 109, 110, 113, 114, 121):
            kinds.append(http(api, token, "/v1/city/Oslo").get("kind", "ok"))
    assert kinds == ["ok", "ok", "rate_limit", "ok", "rate_limit", "ok", "ok"]

@quick
@given(limit=st.integers(1, 4), per=st.integers(1, 9), steps=st.lists(st.integers(0, 6), max_size=30))
def test_no_window_has_more_than_the_limit(limit, per, steps):
    access,now,passed = Access("v1", limit, per),0,[]
    for step in steps:
        now += step
        crowd = [t for t in passed if t > now-per]
        assert access.admit(now) == (len(crowd) < limit)
        if len(crowd) < limit: passed.append(now)

@pytest.mark.parametrize("kind", FAILS)
def test_a_fault_strikes_the_next_answer_and_no_other(api, token, kind):
    other,asked = api.open(),"/v1/city/Oslo"
    api.fail(token, kind)
    began = monotonic()
    assert http(api, other, asked)["ok"]
    struck = http(api, token, asked, seconds=0.2 if kind == "timeout" else 5.0)
    assert struck["kind"] == kind and is_result(struck) and http(api, token, asked)["ok"] and monotonic()-began < 5

def test_a_reset_takes_back_a_fault(api, token):
    api.fail(token, "server_error")
    api.reset(token)
    assert http(api, token, "/v1/city/Oslo")["ok"]

def test_an_unknown_token_is_unauthorized(api):
    forgotten = api.open()
    api.forget(forgotten), api.forget(forgotten)
    assert {http(api, t, "/v1/")["kind"] for t in (forgotten, "", "0"*16)} == {"unauthorized"}

def test_tokens_cannot_be_guessed(api): assert len({api.open() for _ in range(500)}) == 500 and len(api.open()) >= 16

@pytest.mark.parametrize("call,said", [(lambda a,t: a.open("v3"), "version is 'v3': give one of v1, v2"),
    (lambda a,t: a.set_version(t, "1"), "give one of v1, v2"), (lambda a,t: a.fail(t, "fire"), "kind is 'fire': give one of unauthorized")])
def test_wrong_settings_are_named(api, token, call, said):
    with pytest.raises(ValueError, match=said): call(api, token)

def test_a_missing_database_is_named_and_starts_no_thread(tmp_path):
    before = held()
    with pytest.raises(ValueError, match="There is no database file"): Api(tmp_path/"no.db")
    assert held() == before

def test_a_database_that_breaks_is_a_server_error(tmp_path):
    with closing(Api(company(tmp_path/"c.db"))) as api:
        token = api.open()
        with closing(sqlite3.connect(tmp_path/"c.db")) as c:
            c.execute("begin exclusive")
            locked = http(api, token, "/v1/city/Oslo")
        assert locked == failure("server_error", "database is locked") and http(api, token, "/v1/city/Oslo")["ok"]

def test_a_query_that_takes_too_long_is_stopped(tmp_path):
    path = write_database(tmp_path/"large.db", "create table a(id integer primary key, b text)", dict(a=[(i, "x") for i in range(20_000)]))
    with closing(open_database(path)) as c:
        with pytest.raises(sqlite3.OperationalError, match="interrupted"): read(c, read_schema(path), "a", [("b", "y")], seconds=0)
        assert read(c, read_schema(path), "a", [("b", "y")]) == []


# ---- Attempts by http ----

HTTP_ATTEMPTS = {
    "other host": ("http://{there}/", "denied"), "no scheme": ("//{there}/", "denied"), "https": ("https://{there}/", "denied"),
    "capitals": ("HTTP://{there}/", "denied"), "leading space": (" http://{there}/", "denied"), "this host": ("http://{here}/v1/", "denied"),
    "userinfo": ("http://127.0.0.1@{there}/", "denied"), "userinfo in path": ("@{there}/v1/", "denied"),
    "password": ("http://{here}:x@{there}/", "denied"), "userinfo in the first segment": ("/@{there}/", "not_found"),
    "port": (":{port}/v1/", "denied"), "backslashes": ("/\\{there}/", "not_found"), "two backslashes": ("\\\\{there}\\", "denied"),
    "escaped slashes": ("/%2f%2f{there}/", "not_found"), "address as path": ("/http://{there}/", "denied"),
    "address as query": ("/v1/person?url=http://{there}/", "not_found"), "redirect": ("/v1/redirect?to=//{there}/", "not_found"),
    "fragment": ("/v1/#@{there}/", "not_found"), "file": ("file:///etc/passwd", "denied"), "scheme of data": ("data:,x", "denied"),
    "up": ("/v1/../../etc/passwd", "denied"), "up, escaped": ("/v1/%2e%2e/%2e%2e/etc/passwd", "denied"),
    "up, half escaped": ("/v1/%2E./person", "denied"), "up, escaped slash": ("/v1/..%2f..%2fetc", "denied"),
    "up, twice escaped": ("/v1/%252e%252e/etc", "not_found"), "up, backslash": ("/v1/..\\..\\etc", "not_found"),
    "dot": ("/v1/./person", "denied"), "double slash": ("/v1//person", "denied"), "relative": ("v1/person", "denied"),
    "CRLF": ("/v1/\r\nHost: {there}", "denied"), "LF": ("/v1/\nHost: {there}", "denied"), "CR": ("/v1/\rx", "denied"),
    "CRLF, escaped": ("/v1/%0d%0aHost: {there}", "denied"), "CRLF in query": ("/v1/person?name=%0D%0Ax", "denied"),
    "second request": ("/v1/ HTTP/1.1\r\n\r\nGET /v1/", "denied"), "version of HTTP": ("/v1/ HTTP/0.9", "not_found"),
    "wide CRLF": ("/v1/\u560d\u560aHost:x", "not_found"), "line separator": ("/v1/\u2028x", "denied"),
    "null": ("/v1/person/Ada\0", "denied"), "null, escaped": ("/v1/person/Ada%00", "denied"), "tab": ("/v1/\tperson", "denied"),
    "surrogate": ("/v1/\ud800", "denied"), "not UTF-8": ("/v1/person/%ff%fe", "not_found"), "other alphabet": ("/v1/чай", "not_found"),
    "bad escape": ("/v1/%zz", "not_found"), "lone percent": ("/v1/%", "not_found"), "empty": ("", "denied"), "not text": (42, "denied"),
    "nothing": (None, "denied"), "list": (["/v1/"], "denied"), "bytes": (b"/v1/", "denied"),
    "huge path": ("/v1/"+"a"*10**6, "too_large"), "huge query": ("/v1/person?"+"name=Ada&"*10**5, "too_large"),
    "deep path": ("/v1"+"/a"*400, "not_found"), "many filters": ("/v1/person?"+"x=1&"*200, "not_found"),
    "huge page": ("/v1/person?page=99999999999999999999", "not_found"), "negative page": ("/v1/person?page=-1", "not_found"),
    "column as SQL": ("/v1/person?1=1", "not_found"), "column with a quote": ('/v1/person?name" OR "1=1', "not_found"),
    "table as SQL": ("/v1/person;DROP TABLE person", "not_found"), "schema": ("/v1/sqlite_master", "not_found"),
    "key as SQL": ("/v1/person/' OR '1'='1", "not_found")}

@pytest.mark.parametrize("name", HTTP_ATTEMPTS)
def test_http_attempt(api, token, trap, name):
    (path,kind),(service,visits) = HTTP_ATTEMPTS[name],trap
    if isinstance(path, str):
        for k,v in dict(there=f"127.0.0.1:{service.port}", here=f"127.0.0.1:{api.port}", port=service.port).items():
            path = path.replace("{"+k+"}", str(v))
    began,result = monotonic(),http(api, token, path)
    assert is_result(result) and result.get("kind") == kind, result
    assert visits == [] and monotonic()-began < 5 and len(result["error"]) <= 200
    assert http(api, token, "/v1/city/Oslo")["ok"]

def test_values_cannot_become_sql(api, token):
    for value in ("x' OR '1'='1", "x'; DROP TABLE person; --", "1 OR 1=1", '" OR ""="'):
        assert http(api, token, f"/v1/person?name={value}")["result"][0]["rows"] == []

@quick
@given(path=st.one_of(st.text(max_size=60), st.text("/v1.%?&=person Ada\\\r\n\0é@:#", max_size=40).map("/v1/".__add__)))
def test_no_path_raises_and_none_unsettles_the_server(api, path):
    token = api.open()
    assert is_result(http(api, token, path)) and http(api, token, "/v1/city/Oslo")["ok"]

@pytest.mark.parametrize("head,kind", [(b"HTTP/1.1 302 Found\r\nLocation: http://{there}/\r\n", "denied"),
    (b"HTTP/1.1 301 Moved\r\nLocation: //{there}/v1/\r\n", "denied"), (b"HTTP/1.1 307 T\r\nRefresh: 0; url=http://{there}/\r\n", "denied"),
    (b"HTTP/1.1 200 OK\r\nLocation: http://{there}/\r\n", "bad_body"), (b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\n", "server_error")])
def test_redirects_are_not_followed(trap, head, kind):
    service,visits = trap
    head = head.replace(b"{there}", b"127.0.0.1:%d" % service.port)
    with saying(head+b"Content-Length: 0\r\n\r\n") as server: assert http(server, "t", "/v1/")["kind"] == kind
    assert visits == []

@pytest.mark.parametrize("answer,kind", [
    (b"", "server_error"), (b"hello\r\n\r\n", "server_error"), (b"HTTP/1.1 200 OK\r\n"+b"X: y\r\n"*1000, "server_error"),
    (b"HTTP/1.1 2000 OK\r\n\r\n", "server_error"), (b"HTTP/1.1 200 OK\r\nX: "+b"y"*10**5+b"\r\n\r\n", "server_error"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"row\":", "bad_body"), (b"HTTP/1.1 200 OK\r\n\r\n[1]", "bad_body"),
    (b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe", "bad_body"), (b"HTTP/1.1 200 OK\r\n\r\n"+b"["*1900, "bad_body"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999\r\n\r\n"+b" "*5000, "too_large"),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "server_error"), (b"HTTP/1.1 500 No\r\n\r\n<html>", "server_error"),
    (b"HTTP/1.1 429 Slow\r\n\r\n{\"error\": [1]}", "rate_limit"), (b"HTTP/1.1 404 No\r\n\r\n"+b'{"error": "'+b"x"*900+b'"}', "not_found")])
def test_a_server_may_answer_anything(answer, kind):
    with saying(answer) as server: result = http(server, "t", "/v1/")
    assert result["kind"] == kind and is_result(result) and len(result["error"]) <= 200 and server.idle == []

def test_an_answer_cut_off_does_not_spoil_the_next_call(api, token):
    api.fail(token, "bad_body")
    kinds = [http(api, token, p, max_bytes=m).get("kind", "ok") for p,m in
             (("/v1/city/Oslo", 2000), ("/v1/person", 50), ("/v1/city/Oslo", 2000), ("/v1/person", 50), ("/v1/city/Oslo", 2000))]
    assert kinds == ["bad_body", "too_large", "ok", "too_large", "ok"]

def raw(port, data):
    "What a server says to these bytes"
    with socket.create_connection(("127.0.0.1", port), timeout=5) as s:
        s.sendall(data)
        return b"".join(iter(lambda: s.recv(65536), b""))

@pytest.mark.parametrize("line,status", [
    (b"GET http://{there}/ HTTP/1.1", b"404"), (b"POST /v1/person HTTP/1.1", b"405"), (b"DELETE /v1/person/Ada HTTP/1.1", b"405"),
    (b"GET /v1/../../etc/passwd HTTP/1.1", b"404"), (b"GET "+b"/v1/"*9000+b" HTTP/1.1", b"400"), (b"GET /v1/\0 HTTP/1.1", b"4")])
def test_the_server_guards_itself(api, token, trap, line, status):
    "Bytes that the tool would never send"
    service,visits = trap
    line = line.replace(b"{there}", b"127.0.0.1:%d" % service.port)
    said = raw(api.port, line+f"\r\nHost: x\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n".encode())
    assert said.split(b" ")[1].startswith(status) and visits == [] and http(api, token, "/v1/person/Ada")["ok"]

def test_the_server_listens_on_this_machine_only(api, mail):
    assert {s.server.sockets[0].getsockname()[0] for s in (api, mail)} == {"127.0.0.1"}


# ---- Mail: what is sent is what arrives ----

def lines(text): return text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")

@quick
@given(to=st.one_of(st.from_regex(r"[\w+.-]{1,9}(@[\w.-]{1,9})?", fullmatch=True), st.text(max_size=9)), subject=st.text(max_size=40),
       body=st.one_of(st.text(max_size=90), st.text(".\r\n =a", max_size=40)))
def test_any_mail_arrives_as_written_or_not_at_all(mail, to, subject, body):
    box = mail.open()
    result = send(mail, box, to, subject, body)
    assert is_result(result)
    if result["ok"]:
        [m] = mail.outbox(box)
        assert (m["to"], m["body"]) == (to, lines(body))
        if "=?" not in subject: assert m["subject"] == subject.strip()
    else: assert mail.outbox(box) == [] and result["kind"] == "denied"

@pytest.mark.parametrize("subject", ["", " two  blanks ", "a: b, <c>", "日本語の件名 "*10, "x"*200, "é"*200, "word "*39, '"quoted" (remark)'])
def test_subjects_arrive(mail, box, subject):
    assert send(mail, box, "Ada", subject, "")["ok"] and mail.outbox(box)[0]["subject"] == subject.strip()

@pytest.mark.parametrize("body", ["", "\n\n", "x"*2000, ".", "..", "\n.\n", "a\n.\nQUIT\n", "=20=\n=", "é"*900, "a\u2028b\x85c", "\tx \n y", "From me"])
def test_bodies_arrive(mail, box, body):
    assert send(mail, box, "Ada", "s", body)["ok"] and mail.outbox(box)[0]["body"] == lines(body)

def test_boxes_are_apart_and_a_reset_empties_one(mail):
    a,b = mail.open(),mail.open()
    for box,to in ((a, "Ada"), (b, "Ben"), (a, "Cleo")): assert send(mail, box, to, "s", "b")["ok"]
    assert [m["to"] for m in mail.outbox(a)] == ["Ada", "Cleo"] and [m["to"] for m in mail.outbox(b)] == ["Ben"]
    mail.reset(a)
    assert mail.outbox(a) == [] and len(mail.outbox(b)) == 1

def test_an_outbox_is_a_copy(mail, box):
    send(mail, box, "Ada", "s", "b")
    mail.outbox(box)[0]["to"] = "Eve"
    mail.outbox(box).clear()
    assert mail.outbox(box) == [dict(to="Ada", subject="s", body="b")]

def test_a_forgotten_or_invented_sender_is_refused(mail):
    box = mail.open()
    mail.forget(box), mail.forget(box)
    assert {send(mail, s, "Ada", "s", "b")["kind"] for s in (box, "ada@company", "0"*16+"@agent")} == {"unauthorized"}

def test_the_mail_of_one_sender_cannot_be_sent_by_another(mail, box):
    "Not even by one who speaks SMTP himself"
    with SMTP("127.0.0.1", mail.port, "agent") as c:
        c.ehlo()
        assert c.mail("eve@company")[0] == 550 and c.docmd("RCPT", "TO:<ada@company>")[0] == 503 and c.docmd("DATA")[0] == 503
    assert mail.outbox(box) == []

MAIL_ATTEMPTS = {
    "command": (dict(to="ada@company>\r\nRCPT TO:<eve@evil"), "denied"), "command, LF": (dict(to="ada@company\nDATA"), "denied"),
    "command, CR": (dict(to="ada@company\rDATA"), "denied"), "trailing newline": (dict(to="ada@company\n"), "denied"),
    "two": (dict(to="ada@company,eve@evil"), "denied"), "two, semicolon": (dict(to="ada@company;eve@evil"), "denied"),
    "two, blank": (dict(to="ada@company eve@evil"), "denied"), "brackets": (dict(to="<ada@company>"), "denied"),
    "display name": (dict(to="Ada <eve@evil>"), "denied"), "remark": (dict(to="ada(eve)@company"), "denied"),
    "quoted": (dict(to='"ada eve"@company'), "denied"), "parameter": (dict(to="ada@company NOTIFY=NEVER"), "denied"),
    "route": (dict(to="@evil:ada@company"), "denied"), "percent": (dict(to="eve%evil@company"), "denied"),
    "bang": (dict(to="evil!eve"), "denied"), "literal": (dict(to="ada@[127.0.0.1]"), "denied"), "pipe": (dict(to="|/bin/sh"), "denied"),
    "file": (dict(to="../../etc/passwd"), "denied"), "null recipient": (dict(to="ada\0@company"), "denied"),
    "two signs": (dict(to="a@b@c"), "denied"), "nobody": (dict(to=""), "denied"), "dots": (dict(to="a..b@company"), "denied"),
    "long recipient": (dict(to="a"*201), "too_large"), "list": (dict(to=["ada@company"]), "denied"), "number": (dict(to=7), "denied"),
    "header": (dict(subject="s\r\nBcc: eve@evil"), "denied"), "header, LF": (dict(subject="s\nBcc: eve@evil"), "denied"),
    "header, folded": (dict(subject="s\r\n Bcc: eve@evil"), "denied"), "header, CR": (dict(subject="s\rBcc: eve@evil"), "denied"),
    "header, U+2028": (dict(subject="s\u2028Bcc: eve@evil"), "denied"), "header, U+85": (dict(subject="s\x85Bcc: eve@evil"), "denied"),
    "end of header": (dict(subject="s\r\n\r\nbody"), "denied"), "null subject": (dict(subject="s\0"), "denied"),
    "surrogate subject": (dict(subject="\ud800"), "denied"), "long subject": (dict(subject="x"*201), "too_large"),
    "no subject": (dict(subject=None), "denied"), "long body": (dict(body="x"*2001), "too_large"), "long body, wide": (dict(body="é"*1001), "too_large"),
    "huge body": (dict(body="x"*10**7), "too_large"), "null body": (dict(body="a\0b"), "denied"), "surrogate body": (dict(body="\udfff"), "denied"),
    "escape body": (dict(body="\x1b[2J"), "denied"), "bytes": (dict(body=b"x"), "denied"),
    "dot": (dict(body=".\r\nMAIL FROM:<eve@evil>\r\nRCPT TO:<eve@evil>\r\nDATA"), "ok"), "dot, LF": (dict(body="\n.\nRSET\nMAIL FROM:<eve@evil>"), "ok"),
    "dot, CR": (dict(body="\r.\rQUIT\r"), "ok"), "headers in body": (dict(body="Bcc: eve@evil\n\nhello"), "ok"),
    "parts": (dict(body="--x\nContent-Type: text/html\n\n<b>"), "ok"), "encoded header": (dict(subject="=?utf-8?q?s=0D=0ABcc:_eve@evil?="), "denied"),
    "encoded header, base64": (dict(subject="a =?utf-8?b?cw0KQmNjOiBldmU=?= b"), "denied"), "half an encoded word": (dict(subject="2+2=?"), "ok"),
    "encoded recipient": (dict(to="=?utf-8?q?eve=40evil?="), "denied"), "other alphabet": (dict(to="Łucja@компания", subject="тема", body="чай"), "ok")}

@pytest.mark.parametrize("name", MAIL_ATTEMPTS)
def test_mail_attempt(mail, box, name):
    changes,kind = MAIL_ATTEMPTS[name]
    asked = dict(to="ada@company", subject="s", body="b") | changes
    began,result = monotonic(),send(mail, box, **asked)
    assert is_result(result) and result.get("kind", "ok") == kind and monotonic()-began < 5
    if kind == "ok": assert [(m["to"], m["body"]) for m in mail.outbox(box)] == [(asked["to"], lines(asked["body"]))]
    else: assert mail.outbox(box) == []
    assert send(mail, box, "Ben", "after", "")["ok"] and not any("eve" in m["to"] for m in mail.outbox(box))

def test_headers_are_the_four_that_are_meant():
    heads = compose("ada@company", "s", "b").split(b"\r\n\r\n")[0].split(b"\r\n")
    assert {h.split(b":")[0] for h in heads} == {b"To", b"Subject", b"Content-Type", b"Content-Transfer-Encoding", b"MIME-Version"}

def test_the_mail_server_refuses_what_is_too_large_by_itself(mail, box):
    with SMTP("127.0.0.1", mail.port, "agent") as c:
        c.ehlo(), c.mail(box), c.rcpt("ada@company")
        assert c.data(b"x\r\n"*50_000)[0] == 552
    assert mail.outbox(box) == []

def test_mail_that_is_no_mail_is_taken_as_it_is(mail, box):
    with SMTP("127.0.0.1", mail.port, "agent") as c:
        c.ehlo(), c.mail(box), c.rcpt("ada@company"), c.rcpt("ben@company")
        assert c.data(b"\xff\xfe no headers")[0] == 250
    assert [m["to"] for m in mail.outbox(box)] == ["ada@company, ben@company"]


# ---- Servers that hang, die, are shared and end ----

@pytest.mark.parametrize("make,use", [(Api, lambda s: http(s, s.open(), "/v1/", seconds=0.3)),
                                      (lambda d: Mail(), lambda s: send(s, s.open(), "Ada", "s", "b", seconds=0.3))], ids=["api", "mail"])
class TestService:
    def test_one_that_hangs_costs_its_time_limit_and_recovers(self, database, make, use):
        with closing(make(database)) as service:
            assert use(service)["ok"]
            release = threading.Event()
            service.loop.call_soon_threadsafe(release.wait)
            began = monotonic()
            kinds,took = [use(service)["kind"] for _ in range(2)],monotonic()-began  # one kept connection, one new
            release.set()
            assert kinds == ["timeout"]*2 and took < 3 and any(use(service)["ok"] for _ in range(20))

    def test_a_closed_one_is_an_error_at_once(self, database, make, use):
        service = make(database)
        assert use(service)["ok"]
        service.close(), service.close()
        began = monotonic()
        assert use(service)["kind"] == "server_error" and monotonic()-began < 0.3 and not service.thread.is_alive()

    def test_many_starts_and_ends_leave_nothing(self, database, make, use):
        use(first := make(database)), first.close()
        before = held()
        for _ in range(15):
            with closing(make(database)) as service: use(service)
        assert held() == before

def test_a_program_that_forgets_to_close_ends_in_silence(database):
    code = ("from agentrl_cookbook.task.api import Api,http\nfrom agentrl_cookbook.task.mail import Mail,send\n"
            f"a,m = Api({str(database)!r}),Mail()\nprint(http(a, a.open(), '/v1/')['ok'], send(m, m.open(), 'Ada', 's', 'b')['ok'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True\n", "")

def test_a_call_that_waits_when_the_server_closes_is_an_error(database):
    "The fault holds the answer back; closing the server lets go of the caller long before its limit"
    api = Api(database)
    token = api.open()
    api.fail(token, "timeout")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(http, api, token, "/v1/", 30.0)
        while api.tokens[token].fault: pass  # until the request has arrived
        api.close()
        assert call.result(timeout=10)["kind"] == "server_error" and api.idle == []

def test_threads_share_the_servers(api, mail):
    "Each gets its own answers, and there are no more connections than threads"
    def episode(i):
        token,box,city = api.open(limit=10),mail.open(),["Oslo", "Milan", "Graz", "Porto"][i % 4]
        names = [http(api, token, f"/v1/city/{city}")["result"][0]["row"]["name"] for _ in range(10)]
        over = http(api, token, f"/v1/city/{city}")["kind"]
        for n in range(3): assert send(mail, box, city, f"{n}", "b")["ok"]
        return set(names) == {city} and over == "rate_limit" and [m["subject"] for m in mail.outbox(box)] == ["0", "1", "2"] \
            and {m["to"] for m in mail.outbox(box)} == {city}
    with ThreadPoolExecutor(8) as pool: assert all(pool.map(episode, range(24)))
    assert len(api.idle) <= 9 and len(mail.idle) <= 9

def test_2000_episodes_leave_no_file_thread_or_entry(api, mail):
    token,box = api.open(),mail.open()
    assert http(api, token, "/v1/")["ok"] and send(mail, box, "Ada", "s", "b")["ok"]
    before,entries = held(),(len(api.tokens), len(mail.boxes))
    for i in range(2000):
        t,b = api.open(limit=5),mail.open()
        if i % 10 == 0: assert http(api, t, "/v1/city/Oslo")["ok"] and send(mail, b, "Ada", "s", "b")["ok"]
        api.reset(t), mail.reset(b), api.forget(t), mail.forget(b)
    assert held() == before and (len(api.tokens), len(mail.boxes)) == entries

def test_256_environments_at_once_need_one_connection(api):
    tokens = [api.open() for _ in range(256)]
    before = held()
    assert all(http(api, t, "/v1/city/Oslo")["ok"] for t in tokens) and held()[1] <= before[1]+2

def test_checks_say_what_is_wrong():
    assert refused("/v1/person/Ada") is None and unfit("Ada", "s", "b", 10) is None
    assert "one /" in refused("person")["error"] and "one line" in unfit("Ada", "a\nb", "", 10)["error"]
    assert interpret(200, b"{}") == dict(ok=True, result=[{}])
