"An endpoint over a real socket, with everything that can go wrong on the way; result files of tau2-bench."
import json,os,subprocess,sys,threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler,ThreadingHTTPServer
from pathlib import Path

import pytest

from agentrl_cookbook.evals.endpoint import EndpointError, completion, endpoint, read_message, read_tau2, serve
from agentrl_cookbook.evals.kinds import make_items, solver
from agentrl_cookbook.evals.suite import report, run_suite
from agentrl_cookbook.task.world import company

HELLO = [dict(role="user", content="hello")]
FINE = completion(dict(role="assistant", content="hi", tokens=2))
at_once = dict(pause=lambda state: 0)

@contextmanager
def scripted(*replies):
    "A server that gives these replies, (status, body) or (status, body, headers), one after the other; its requests are kept"
    left, requests, stopped = list(replies), [], threading.Event()
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_): pass
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, dict(self.headers), body))
            status, said, *headers = left.pop(0)
            if status is None: return stopped.wait(30)      # no answer as long as the server lives
            data = said.encode() if isinstance(said, str) else json.dumps(said).encode()
            self.send_response(status)
            for k,v in headers[0].items() if headers else []: self.send_header(k, v)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try: yield f"http://127.0.0.1:{server.server_port}/v1", requests
        finally: stopped.set(); server.shutdown()

@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    for name in ("AGENTRL_API_KEY", "OPENAI_API_KEY"): monkeypatch.delenv(name, raising=False)

def fails(url, **options):
    "The one sentence of an agent that gives up"
    with pytest.raises(EndpointError) as e: endpoint(url, "m", **at_once | options)(HELLO, [])
    assert "\n" not in str(e.value) and "What is finished is kept" in str(e.value)
    return str(e.value)


# ---- the protocol ----

def test_what_is_asked():
    tools = [dict(type="function", function=dict(name="sql", parameters={}))]
    with scripted((200, FINE)) as (url, requests):
        assert endpoint(url, "m", temperature=0.5)(HELLO, tools) == dict(role="assistant", content="hi", tokens=2)
    [(path, headers, body)] = requests
    assert path == "/v1/chat/completions" and "Authorization" not in headers
    assert body == dict(model="m", messages=HELLO, temperature=0.5, tools=tools)

@pytest.mark.parametrize("said, content, calls", [
    (dict(content="a"), "a", None), (dict(content=None), "", None), ({}, "", None), (dict(content="", tool_calls=[]), "", None),
    (dict(content=[dict(type="text", text="a"), dict(type="text", text="b")]), "ab", None),
    (dict(tool_calls=[dict(id="x", function=dict(name="sql", arguments="{}"))]), "", [("x", "sql", "{}")]),
    (dict(tool_calls=[dict(function=dict(name="sql", arguments={"a": 1})), dict(function=dict(name="b"))]), "",
     [("call_0", "sql", '{"a": 1}'), ("call_1", "b", "{}")])])
def test_dialects_of_a_message(said, content, calls):
    message = read_message(dict(choices=[dict(message=said)]))
    assert message["content"] == content and message["tokens"] == 0
    assert calls is None or [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == calls
    assert ("tool_calls" in message) == (calls is not None)

def test_arguments_that_are_no_json_are_not_sent_back():
    call = lambda arguments: dict(id="c", type="function", function=dict(name="sql", arguments=arguments))
    history = [*HELLO, dict(role="assistant", content="", tool_calls=[call('{"query": "SEL'), call("[1]"), call('{"a": 1}')])]
    with scripted((200, FINE)) as (url, requests): endpoint(url, "m")(history, [])
    assert [c["function"]["arguments"] for c in requests[0][2]["messages"][1]["tool_calls"]] == ["{}", "{}", '{"a": 1}']
    assert history[1]["tool_calls"][0]["function"]["arguments"] == '{"query": "SEL'


# ---- what goes wrong ----

NONSENSE = [(200, "<html>busy</html>"), (200, "{}"), (200, dict(choices=[])), (200, "[1]"), (200, dict(choices=[dict(message=None)])),
            (200, dict(choices=[dict(message=dict(tool_calls=[{}]))])), (200, "")]

@pytest.mark.parametrize("reply", [(500, "boom"), (503, dict(error="busy")), (429, "slow down", {"Retry-After": "0"}), *NONSENSE])
def test_what_passes_is_tried_again(reply):
    with scripted(reply, reply, (200, FINE)) as (url, requests): assert endpoint(url, "m", **at_once)(HELLO, [])["content"] == "hi"
    assert len(requests) == 3

@pytest.mark.parametrize("reply, word", [((500, "boom"), "answers 500: boom after 2 tries"), ((200, "<html>"), "no chat completion: '<html>'")])
def test_what_does_not_pass_ends_in_a_sentence(reply, word):
    with scripted(reply, reply) as (url, requests): assert word in fails(url, tries=2)
    assert len(requests) == 2

@pytest.mark.parametrize("reply, word", [
    ((401, "bad key"), "refuses the key (401): set AGENTRL_API_KEY"), ((403, ""), "refuses the key (403)"),
    ((404, "no model m"), "404: no model m"), ((400, "no tool parser"), "refuses the request (400: no tool parser)"),
    ((307, "", {"Location": "http://127.0.0.1:1/"}), "refuses the request (307")])
def test_what_will_not_get_better_is_said_at_once(reply, word):
    with scripted(reply) as (url, requests): assert word in fails(url)
    assert len(requests) == 1

def test_no_answer_in_time():
    with scripted((None, "")) as (url, _): assert "did not answer within 0.2 s after 1 tries" in fails(url, timeout=0.2, tries=1)

def test_nobody_is_there():
    with scripted() as (url, _): pass
    assert "cannot be reached" in fails(url, tries=2)

def test_no_address():
    with pytest.raises(EndpointError, match="is no address: give one such as"): endpoint("127.0.0.1:8000", "m")

def test_a_conversation_that_is_too_long_ends_with_an_empty_answer():
    with scripted((400, "This model's maximum context length is 4096 tokens.")) as (url, _):
        assert endpoint(url, "m")(HELLO, []) == dict(role="assistant", content="", tokens=0)

def test_the_server_says_how_long_to_wait():
    from agentrl_cookbook.evals import endpoint as module
    waits = []
    def pause(state):
        waits.append(module._wait(state))
        return 0
    replies = [(429, "", {"Retry-After": "7"}), (429, "", {"Retry-After": "7000"}), (500, ""), (500, ""), (200, FINE)]
    with scripted(*replies) as (url, _): endpoint(url, "m", pause=pause)(HELLO, [])
    assert waits[:2] == [7, 60] and 2 <= waits[2] <= 2.5 and 4 <= waits[3] <= 4.5

@pytest.mark.parametrize("name", ["AGENTRL_API_KEY", "OPENAI_API_KEY"])
def test_the_key_is_sent_and_never_said(name, monkeypatch):
    monkeypatch.setenv(name, "sk-secret-1234")
    with scripted((400, "Bearer sk-secret-1234 is odd"), (200, FINE)) as (url, requests):
        sentence = fails(url)
        endpoint(url, "m")(HELLO, [])
    assert "sk-secret" not in sentence and "***" in sentence
    assert [h["Authorization"] for _,h,_ in requests] == ["Bearer sk-secret-1234"]*2


# ---- the suite over the wire ----

@pytest.fixture(scope="module")
def items(database): return make_items(database, 2)

def test_over_the_wire_and_in_the_process_are_the_same(database, items, tmp_path):
    with serve(solver(items)) as url: remote = run_suite(endpoint(url, "m"), items, database, tmp_path/"a", workers=3)
    assert remote == run_suite(solver(items), items, database, tmp_path/"b") and all(r["strict"] for r in remote)

def test_a_call_with_malformed_arguments_is_the_models_mistake(database, items, tmp_path):
    call = dict(id="c", type="function", function=dict(name="sql", arguments='{"query": '))
    bad = completion(dict(role="assistant", content="", tool_calls=[call]))
    good = completion(dict(role="assistant", content=items[0].goal["answers"][0]))
    with scripted((200, bad), (200, good)) as (url, requests):
        [record] = run_suite(endpoint(url, "m"), items[:1], database, tmp_path)
    assert record["strict"] and record["calls"] == [["?", "malformed"]]
    assert "malformed" in requests[1][2]["messages"][-1]["content"]

def test_an_agent_that_raises_is_a_500():
    def broken(messages, tools): raise KeyError("x")
    with serve(broken) as url: assert "answers 500" in fails(url, tries=1) and "KeyError" in fails(url, tries=1)

@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command(tmp_path, checkout):
    "A dead server: one sentence and status 1; repeated, it goes on and asks for nothing twice"
    runs = tmp_path/"runs"
    env = os.environ | dict(AGENTRL_RUNS_DIR=str(runs), AGENTRL_API_KEY="sk-secret-1234", PYTHONPATH=str(checkout))
    items, asked = make_items(company(tmp_path/"company.db", 0), 2, kinds=["call", "code"]), []
    alive = threading.Event()
    def mortal(messages, tools):
        asked.append(messages[1]["content"])
        if len(asked) > 4 and not alive.is_set(): raise MemoryError("out of memory")
        return solver(items)(messages, tools)
    with serve(mortal) as url:
        words = f"run evaluate -p endpoint {url} -p model m -p n 2 -p kinds call,code -p trials 1 -p tries 1 -p workers 1 -p profile none"
        def run(): return subprocess.run([Path(sys.executable).with_name("agentrl"), *words.split()], cwd=checkout, env=env,
                                         capture_output=True, text=True, timeout=500)
        first = run()
        done = len(list(runs.rglob("trials/*.json")))
        assert first.returncode == 1 and "Traceback" not in first.stderr+first.stdout, first.stderr
        assert "agentrl: EndpointError: " in first.stderr and "answers 500" in first.stderr and 0 < done < 4
        alive.set()
        before = len(asked)
        second = run()
        assert second.returncode == 0, second.stderr
    assert len(asked)-before <= 2*(4-done), "a finished task is not asked for again"
    assert "strict" in second.stdout and "4 tasks" in second.stdout
    kept = [p.read_text(errors="replace") for p in runs.rglob("*") if p.is_file()]
    assert kept and not any("sk-secret" in text for text in [*kept, first.stderr, second.stdout])


# ---- tau2-bench ----

CALL = dict(id="c1", name="get_order", arguments=dict(order_id="W1"), requestor="assistant")

def simulation(task, trial, reward, db_match=None, reason="user_stop", **more):
    "A trial as src/tau2/data_model/simulation.py of tau2-bench writes it, with the fields that it always has"
    messages = [dict(role="assistant", content="Hi!", tool_calls=None), dict(role="user", content="Cancel W1."),
                dict(role="assistant", content=None, tool_calls=[CALL], usage=dict(completion_tokens=20, prompt_tokens=9)),
                dict(role="tool", id="c1", content="not found", requestor="assistant", error=True),
                dict(role="user", content=None, tool_calls=[CALL | dict(id="u1", requestor="user")]),
                dict(role="tool", id="u1", content="ok", requestor="user", error=False),
                dict(role="assistant", content="Done.", usage=None), dict(role="user", content="###STOP###")]
    info = dict(reward=reward, db_check=None if db_match is None else dict(db_match=db_match, db_reward=float(db_match)),
                reward_basis=["DB", "COMMUNICATE"])
    return dict(id=f"{task}/{trial}", task_id=task, start_time="", end_time="", duration=1.0, termination_reason=reason,
                reward_info=info, messages=messages, trial=trial, seed=1) | more

def results(sims): return dict(timestamp="", info=dict(num_trials=2, environment_info=dict(domain_name="airline")), tasks=[], simulations=sims)

SIMS = [simulation("0", 0, 1.0, True), simulation("0", 1, 0.0, True), simulation("1", 0, 1.0), simulation("1", 1, 1.0),
        simulation("2", 0, 0.0, reason="context_window_exceeded", reward_info=None, messages=None), simulation("2", 1, 0.5, False),
        simulation("2", 2, 0.0, reason="infrastructure_error")]

def test_a_results_file(tmp_path):
    (tmp_path/"results.json").write_text(json.dumps(results(SIMS)))
    records, left_out = read_tau2(tmp_path/"results.json")
    assert left_out == 1 and [r["strict"] for r in records] == [True, False, True, True, False, False]
    assert [r["lenient"] for r in records] == [True, True, True, True, False, False]
    assert records[1] | dict(id="", kind="") == dict(id="", kind="", trial=1, strict=False, lenient=True, why="user_stop", turns=3,
                                                     tokens=20, users=2, calls=[("get_order", "error")], faults=0)
    assert records[4]["why"] == "context_window_exceeded" and records[4]["turns"] == 0
    found = report(records)
    f = found["kinds"]["airline"]
    assert (f["tasks"], f["trials"], f["strict"]) == (3, 2, 0.5) and f["low"] < 0.5 < f["high"]
    assert [f["pass_hat"][k][0] for k in (1, 2)] == pytest.approx([0.5, 1/3])
    assert found["recovery"] is None and found["tools"] == dict(get_order=dict(calls=5, worked=0))

def test_a_folder_with_a_file_for_each_trial(tmp_path):
    (tmp_path/"results.json").write_text(json.dumps(results([])))
    (tmp_path/"simulations").mkdir()
    for i,s in enumerate(SIMS): (tmp_path/f"simulations/{i}.json").write_text(json.dumps(s))
    (tmp_path/"one.json").write_text(json.dumps(results(SIMS)))
    assert read_tau2(tmp_path) == read_tau2(tmp_path/"one.json")

def test_several_tool_results_in_one_message(tmp_path):
    group = dict(role="tool", tool_messages=[dict(role="tool", id="c1", content="", error=False), dict(role="tool", id="c2", content="", error=True)])
    messages = [dict(role="assistant", content=None, tool_calls=[CALL, CALL | dict(id="c2", name="cancel")]), group]
    (tmp_path/"r.json").write_text(json.dumps(results([simulation("0", 0, 1.0, messages=messages)])))
    assert read_tau2(tmp_path/"r.json")[0][0]["calls"] == [("get_order", "ok"), ("cancel", "error")]

@pytest.mark.parametrize("text, words", [
    ("{", "is no results file of tau2-bench"), ("[]", "is no results file"), ('{"simulations": [{}]}', "is no results file"),
    (json.dumps(results([])), "has no trial that ran"), (json.dumps(results([dict(task_id="1")])), "termination_reason"),
    (json.dumps(results([SIMS[-1]])), "has no trial that ran")])
def test_other_files(tmp_path, text, words):
    (tmp_path/"r.json").write_text(text)
    with pytest.raises(ValueError, match=words) as e: read_tau2(tmp_path/"r.json")
    assert "r.json" in str(e.value)

def test_no_file(tmp_path):
    with pytest.raises(ValueError, match="Cannot read .*gone.json: No such file"): read_tau2(tmp_path/"gone.json")
