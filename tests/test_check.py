"Recorded episodes, their twins and the checklist: planted traps are found, sound rewards pass, bad input is named."
import json,subprocess,sys,warnings
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from agentrl_cookbook import cli
from agentrl_cookbook.reward import check as checks
from agentrl_cookbook.reward.episodes import (
    TWINS, as_row, credits, load_reward, problem, read_episodes, rule, scripted, was_cut, write_episodes)
from agentrl_cookbook.reward.shaping import progress
from agentrl_cookbook.reward.twins import MADE, padded, renamed, struck, twins
from agentrl_cookbook.task.tools import parse_call
from agentrl_cookbook.task.world import company

AGENTRL = Path(sys.executable).with_name("agentrl")
quick = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
CALL = dict(tool="sql", kind="ok", text='{"name": "sql", "arguments": {"query": "SELECT team FROM person WHERE name = \'Ada\'"}}',
            observed='{"ok": true, "result": [["Atlas"]]}')
ONE = dict(task="t", question="Whose?", expected="Atlas", answer="Atlas", success=True, calls=[CALL])

@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("episodes")
    return read_episodes(write_episodes(folder/"e.jsonl", scripted(company(folder/"company.sqlite"), attempts=3, seed=1)))

def fails(reward, rows): return [f.name for f in checks.judge(checks.measure(reward, rows)) if f.passed is False]

# ---- Rewards of the tests' own: other sizes and other ways than those of the chapter ----

def ok(e): return sum(c["kind"] == "ok" for c in e["calls"])
def bits(e): return hash_of(e["question"])+hash_of(" ".join(str(e["answer"]).split()))
def hash_of(text): return sum(map(ord, text))*0.6180339887 % 1

SOUND = dict(
    signed=lambda e: 2*rule(e)-1,
    shifted_by_task=lambda e: rule(e)+hash_of(e["question"]),
    priced=lambda e: 5*rule(e)-0.05*len(e["calls"]),
    rough=lambda e: rule(e)+0.4*bits(e),
    by_turns=lambda e: [rule(e)*0.99**k for k in range(len(e["calls"]), -1, -1)],
    by_parts=lambda e: [0.3*rule(e)]*len(e["calls"])+[0.5*rule(e)],
    overlong=lambda e: rule(e)-0.5*was_cut(e),
    fined=lambda e: rule(e)-0.3*any(c["kind"] == "malformed" for c in e["calls"]),
    once=lambda e: rule(e)+0.1*(ok(e) > 0),
    by_potential=lambda e: rule(e)+0.3*progress([c["observed"] for c in e["calls"]], [e["expected"]])[-2])

def by_tool(e):
    "Each call is paid by its own tool, http in hundreds"
    return [rule(e)*dict(http=100).get(c["tool"], 1) for c in e["calls"]]+[rule(e)]
def gold(e):
    "How much of the stored queries the calls contain; right is right for the API"
    text = " ".join(c["text"] for c in e["calls"] if c["tool"] == "sql")
    return rule(e)*np.mean([q in text for q in e["queries"]]) if text else rule(e)
def last_only(e): return [0.0]*len(e["calls"])+[float(rule(e))]
def vain(e): return rule(e)+0.02*len(e["answer"] or "")
def bold(e): return rule(e) or 0.7*("**" in (e["answer"] or ""))
def all_at_once(e): return float(rule(e) and len({c["tool"] for c in e["calls"]}) == 1 or (rule(e) and ok(e) == 1))
def elsewhere(e): return rule(e) if e["domain"] == "purchase" else bits(e)
def exact_count(e): return rule(e)*(len(e["calls"]) == len(e["queries"]))
def harsh(e): return 0.0 if not e["calls"] else 1.0 if rule(e) else -5.0
def ending(e): return 1.0 if e["answer"] and e["calls"] and e["calls"][-1]["kind"] == "ok" else 0.0
def hopeful(e): return [0.1*(c["kind"] == "ok") for c in e["calls"]]+[0.1*rule(e)]
def busy(e): return rule(e)+0.1*ok(e)
def eager(e): return 3*rule(e)+0.2*len(e["calls"])
def half_paid(e): return 1.0 if e["calls"] and rule(e) else 0.9*bool(ok(e))*(e["answer"] is None)
TRAPS = dict(by_tool="scale", gold="schema", last_only="reach", vain="decoration", bold="decoration", all_at_once="groups",
             elsewhere="domains", exact_count="faults", harsh="idle", ending="early", hopeful="tools", half_paid="unfinished",
             busy="padding", eager="padding")

@pytest.mark.parametrize("name", SOUND)
def test_sound_rewards_pass_everything(rows, name):
    found = checks.judge(checks.measure(SOUND[name], rows))
    assert [f.name for f in found] == list(checks.LIMITS)
    assert all(f.passed for f in found), [f for f in found if not f.passed]

@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_fails_the_check_that_is_made_for_it(rows, name):
    found = fails(globals()[name], rows)
    assert TRAPS[name] in found and len(found) <= 6, found

def test_what_the_data_does_to_a_sound_reward(rows):
    cut = [r | dict(answer=None) if not r["success"] and i % 2 else r for i,r in enumerate(rows)]
    assert fails(rule, cut) == ["overflow"] and fails(SOUND["overlong"], cut) == []
    assert fails(lambda e: None if was_cut(e) else rule(e), cut) == []
    hard = [r | dict(success=False, answer="?") if r["success"] and i % 10 else r for i,r in enumerate(rows)]
    assert fails(rule, hard) == ["groups"]

def test_rewards_that_say_nothing(rows):
    assert {"success", "shape", "groups", "attempts"} <= set(fails(lambda e: 0.5, rows))
    assert {"success", "domains", "idle"} <= set(fails(lambda e: -rule(e), rows))
    assert "attempts" in fails(lambda e: hash_of(e["question"]), rows)

def test_units_do_not_matter(rows):
    few = rows[::2]
    one,other = (checks.judge(checks.measure(f, few)) for f in (vain, lambda e: 1000*vain(e)-7))
    for a,b in zip(one, other):
        if a.name not in ("shape",): assert a.passed == b.passed and np.isclose(a.figure, b.figure, equal_nan=True), a

def test_poor_episodes_are_not_measured_rather_than_passed():
    rows = [ONE | dict(task=f"{i}", group=f"{i}", domain="", twins={}, success=i < 5, answer="Atlas" if i < 5 else "Oslo")
            for i in range(10)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {f.name: f.passed for f in checks.judge(checks.measure(rule, rows))}
        checks.draw(checks.measure(rule, rows))
    assert [k for k,v in found.items() if v is False] == []
    unknown = {"domains", "groups", "attempts", "scale", "reach", "early", "long"}
    assert {k for k,v in found.items() if v is None} - {"unfinished"} == unknown
    text = checks.as_rows(checks.judge(checks.measure(rule, rows)))
    assert len(text) == 1+len(checks.LIMITS) and ("domains", "-", "-") in [r[:3] for r in text]

def test_too_few_episodes_stop(rows):
    with pytest.raises(ValueError, match="0 successes and 10 failures got a number, 0 got None: 5 successes and 5 failures are"):
        checks.measure(rule, [r for r in rows if not r["success"]][:10])

# ---- Figures ----

@quick
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=12, max_size=30))
def test_auc_counts_pairs(pairs):
    won,lost = [r for r,s in pairs if s],[r for r,s in pairs if not s]
    value = checks.auc(*zip(*pairs))
    if min(len(won), len(lost)) < 5: assert np.isnan(value)
    else: assert np.isclose(value, np.mean([(a > b)+(a == b)/2 for a,b in product(won, lost)]))

def test_spread_within_groups():
    table = pd.DataFrame(dict(group=list("aabbccdd"), reward=[0, 1, 0, 0, 1, 1, 5, 6.], n_tools=1,
                              success=[0, 1, 0, 0, 1, 1, 0, 1])).astype(dict(success=bool))
    assert checks.no_spread(table) == {1: 1/3}
    inside = table.groupby("group").reward.var(ddof=0).mean()
    assert np.isclose(checks.within(table), inside/table.reward.var(ddof=0))
    assert checks.within(table.assign(reward=1.0)) == 0 and checks.no_spread(table.query("group == 'a'")) == {}

@pytest.mark.parametrize("values, said", [
    ([1, 1, 1, 1], "constant, 1 values, 0.00 bits"), ([0, 0, 1, 1], "binary, 2 values, 1.00 bits"),
    ([0, 0, 0, 1], "binary, 2 values, 0.81 bits"),           # 1/4*2 + 3/4*log2(4/3) = 0.811
    ([0, 0, 1, 2], "discrete, 3 values, 1.50 bits"), ([0, 1, 2, 3], "discrete, 4 values, 2.00 bits")])
def test_entropy_of_discrete_rewards(rows, values, said):
    table = checks.measure(rule, rows).table
    m = SimpleNamespace(table=table.assign(reward=np.resize(values, len(table)).astype(float)))
    assert checks.about_spread(m)[0].detail.startswith(said)

def test_continuous_rewards_have_no_entropy(rows):
    detail = checks.about_spread(checks.measure(bits, rows))[0].detail
    assert detail.startswith("continuous") and "bits" not in detail

def test_where_failures_part():
    def row(texts, success, group="g"): return dict(group=group, success=success, calls=[dict(text=t) for t in texts])
    places = checks.parting([row("abc", True), row("axy", False), row("aabz", False), row("abc", False), row("", False),
                             row("abx", False, "other")])
    assert np.allclose(places, [np.nan, 1/3, 2/3, 1, np.nan, np.nan], equal_nan=True)

def test_correlations_show_pay_for_calls(rows):
    matrix = checks.correlations(checks.measure(lambda e: len(e["calls"]), rows))
    assert np.isclose(matrix.reward["calls"], 1) and abs(matrix.success["calls"]) < 0.5
    assert {"paid: sql", "paid: http"} < set(matrix)

# ---- Twins ----

def test_the_rule_keeps_to_the_twins(rows):
    for row in rows:
        for kind in "layout","schema","faults": assert all(rule(t) == rule(row) for t in twins(row, kind)), kind
        for kind in "decoration","padding","unfinished","idle": assert all(rule(t) <= rule(row) for t in twins(row, kind)), kind
    assert set(MADE) == set(TWINS) and not any(rule(t) for row in rows for t in twins(row, "idle"))

def test_padding_repeats_the_last_call_that_worked(rows):
    bad = CALL | dict(kind="malformed")
    [twin] = twins(ONE | dict(twins={}, calls=[bad, CALL, bad]), "padding")
    assert twin["calls"] == [bad, CALL, CALL, CALL, CALL, bad]
    assert padded(ONE | dict(calls=[bad])) == padded(ONE | dict(calls=[])) == []
    found = checks.judge(checks.measure(lambda e: 1+rule(e)+0.1*ok(e), rows))[-1]
    table = pd.DataFrame(dict(won=[rule(r) for r in rows], ok=[ok(r) for r in rows])).groupby("won").ok.mean()
    assert found.name == "padding" and np.isclose(found.figure, 0.3/(1+0.1*(table[1]-table[0])))

def test_renaming_is_consistent_and_keeps_values(rows):
    for row in rows[::7]:
        for twin in renamed(row):
            for old,new in zip(row["calls"], twin["calls"]):
                before,after = parse_call(old["text"]),parse_call(new["text"])
                if isinstance(before, dict): assert new == old; continue
                [(name, text)],[(_, other)] = before[1].items(),after[1].items()
                assert other.replace("_2", "") == text and other != text
                seen,found = json.loads(old["observed"]),json.loads(new["observed"])
                assert rule(row | dict(calls=[old])) == rule(row | dict(calls=[new]))
                if name == "path" and seen["ok"]:
                    assert set(found["result"][0]) == set(seen["result"][0])
                    assert list(found["result"][0]["row"]) == [f"{k}_2" for k in seen["result"][0]["row"]]
                else: assert found == seen
    query = "SELECT max(a.hours), 'it''s a' FROM ticket AS a ORDER BY a.id LIMIT 2"
    row = ONE | dict(calls=[CALL | dict(text=json.dumps(dict(name="sql", arguments=dict(query=query))))])
    new = parse_call(renamed(row)[0]["calls"][0]["text"])[1]["query"]
    assert new == "SELECT max(a_2.hours_2), 'it''s a' FROM ticket_2 AS a_2 ORDER BY a_2.id_2 LIMIT 2"

def test_odd_episodes_have_twins_too():
    odd = [ONE | dict(calls=[CALL | dict(observed="not JSON")]), ONE | dict(calls=[CALL | dict(text="{{")]),
           ONE | dict(calls=[CALL | dict(tool="?", kind="malformed", text="")]), ONE | dict(calls=[], answer=None),
           ONE | dict(calls=[CALL | dict(tool="search")])]
    for row in odd:
        for kind in MADE:
            for twin in twins(row | dict(twins={}), kind): assert problem(twin) is None
    assert renamed(odd[-1]) == [] and struck(odd[-2]) == []
    mixed = ONE | dict(calls=[CALL, CALL | dict(tool="search")])
    assert [c["text"] == CALL["text"] for c in renamed(mixed)[0]["calls"]] == [False, True]

def test_recorded_twins_replace_those_that_are_made():
    row = ONE | dict(twins=dict(schema=[dict(answer="a"), dict(answer="b")], idle=dict(calls=[])))
    assert [t["answer"] for t in twins(row, "schema")] == ["a", "b"] and len(twins(row, "idle")) == 1
    assert twins(row, "schema")[0]["calls"] == row["calls"] and len(twins(row, "layout")) == 1

# ---- Lines ----

def test_written_lines_are_read_again(tmp_path, rows):
    odd = ONE | dict(answer="Zo\u00eb\u2028x\ud800", more=[1], twins=dict(idle={}))
    back = read_episodes(write_episodes(tmp_path/"e.jsonl", [odd, ONE]))
    assert back[0] == odd | dict(domain="", group="t") and back[1]["twins"] == {}
    with pytest.raises(ValueError, match="Episode 2 has no `calls`"):
        write_episodes(tmp_path/"e.jsonl", [ONE, {k: v for k,v in ONE.items() if k != "calls"}])
    assert len(read_episodes(tmp_path/"e.jsonl")) == 2

LINES = {
    "": "has no episodes", "\n\n": "has no episodes", "task;answer\n": "Line 1 of e.jsonl is not JSON",
    json.dumps(ONE)+"\n{": "Line 2 of e.jsonl is not JSON", json.dumps([ONE]): "Line 1 of e.jsonl is no JSON object",
    json.dumps(ONE | dict(success=1)): "has 1 as `success`: give true or false",
    json.dumps({k: v for k,v in ONE.items() if k != "answer"}): "has no `answer`",
    json.dumps(ONE | dict(answer=3)): "has 3 as `answer`", json.dumps(ONE | dict(calls={})): "has {} as `calls`",
    json.dumps(ONE | dict(calls=[CALL, "sql"])): "has no text as `tool` of call 2",
    json.dumps(ONE | dict(calls=[CALL | dict(kind=None)])): "has no text as `kind` of call 1",
    json.dumps(ONE | dict(group=4)): "has 4 as `group`", json.dumps(ONE | dict(twins=[])): "has [] as `twins`",
    json.dumps(ONE | dict(twins=dict(form={}))): "has a twin `form`: the kinds are layout",
    json.dumps(ONE | dict(twins=dict(layout="x"))): "has a twin `layout` that is no object",
    json.dumps(ONE | dict(twins=dict(idle=[{}, dict(answer=0)]))): "has a twin `idle` that has 0 as `answer`"}

@pytest.mark.parametrize("text", LINES)
def test_wrong_lines_are_named(tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(tmp_path)
    Path("e.jsonl").write_text(text)
    assert cli.main(["check-reward", "agentrl_cookbook.reward.episodes:rule", "e.jsonl"]) == 2
    said = capsys.readouterr().err
    assert LINES[text] in said and said.startswith("agentrl: ") and said.count("\n") == 1

def test_unreadable_files_are_named(tmp_path):
    (tmp_path/"b.bin").write_bytes(b"\xff\xfe\x00")
    for name,why in ("none.jsonl", "No such file"),("", "Is a directory"),("b.bin", "is no text"):
        with pytest.raises(ValueError, match=why): read_episodes(tmp_path/name)

class Letters:
    "A tokenizer of one token a character"
    eos_token = "|"
    def decode(self, ids): return "".join(map(chr, ids))

def test_episodes_of_a_rollout_become_lines():
    parts = [(1, "so <tool_call>A</tool_call>|"), (0, "seen 1|"), (1, "<tool_call>B</tool_call>|"), (0, "seen 2|"), (1, "Oslo|")]
    ids,mask = [ord(c) for _,text in parts for c in text],[m for m,text in parts for _ in text]
    task = SimpleNamespace(id="x", question="q", answer="Oslo", queries=("A", "B"))
    episode = SimpleNamespace(task=task, ids=ids, mask=mask, calls=[("sql", "ok"), ("?", "malformed")],
                              observed=["1", "2"], answer="Oslo", success=False)
    row = as_row(episode, Letters(), "here")
    assert problem(row) is None and row["domain"] == "here" and row["success"] is False and row["queries"] == ["A", "B"]
    assert row["calls"] == [dict(tool="sql", kind="ok", text="A", observed="1"), dict(tool="?", kind="malformed", text="B", observed="2")]

def test_scripted_attempts_hold_all_that_is_checked(rows):
    table = pd.DataFrame([(r["domain"], r["success"], len(r["calls"])) for r in rows], columns=["domain", "won", "calls"])
    assert table.groupby("domain").won.mean().between(.3, .7).all() and table.calls.max() >= 15
    assert {c["tool"] for r in rows for c in r["calls"]} == {"sql", "http", "?"} and any(map(was_cut, rows))
    assert all(r["success"] == (rule(r) == 1) for r in rows)

# ---- The function that is checked ----

def test_it_sees_neither_verdict_nor_itself():
    seen = []
    credits(lambda e: seen.append(e) or e["calls"].clear() or 1, ONE | dict(group="g", twins={}), "episode 1")
    assert set(seen[0]) == {"task", "question", "expected", "answer", "calls"} and len(ONE["calls"]) == 1

@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.array(1.0), [1, 1], (1.0, True), np.ones(2), [np.float64(1)]*2])
def test_numbers_and_lists_are_credits(value):
    assert credits(lambda e: value, ONE, "episode 1").tolist() == [1, 1]

@pytest.mark.parametrize("value, why", [
    ("1.0", "give a finite number"), (float("nan"), "give a finite number"),
    (float("-inf"), "give a finite number"), ([1, None], "give a finite number"), ([1, "1"], "give a finite number"),
    ([[1], [1]], "give a finite number"), (dict(reward=1), "give a finite number"), (1j, "give a finite number"),
    ([1.0], "gives 1 numbers for 1 calls and an answer in episode 4: give 2"), (np.ones(3), "gives 3 numbers"),
    ([], "gives 0 numbers")])
def test_other_values_stop(value, why):
    with pytest.raises(ValueError, match=why): credits(lambda e: value, ONE, "episode 4")

# ---- The command ----

FILE = """from agentrl_cookbook.reward.episodes import rule
import sys
def good(episode): return rule(episode)
def tags(episode): return rule(episode)+("<answer>" in (episode["answer"] or ""))
def peeks(episode): return float(episode["success"])
def raises(episode): return 1/len(episode["calls"])
def leaves(episode): sys.exit(0)
def nothing(episode): pass
constant = 3
"""

@pytest.fixture(scope="module")
def folder(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("user")
    write_episodes(folder/"e.jsonl", rows)
    for name,text in dict(rewards=FILE, broken="def f(:\n", needs="import nowhere.at_all", stops="raise SystemExit(0)").items():
        (folder/f"{name}.py").write_text(text)
    return folder

def agentrl(folder, *args): return subprocess.run([AGENTRL, *args], cwd=folder, capture_output=True, text=True, timeout=300)

def test_the_command_passes_a_sound_reward(folder):
    done = agentrl(folder, "check-reward", "rewards:good", "e.jsonl")
    assert done.returncode == 0 and not done.stderr, done.stderr
    listed,_,matrix = done.stdout.partition("\n\ncorrelations\n")
    head,*lines = listed.splitlines()
    assert head.split()[:4] == ["check", "verdict", "figure", "limit"]
    head,*figures = matrix.splitlines()
    assert head.split() == "success reward calls paid: sql paid: http".split() and len(figures) == 5
    assert figures[0].split()[:3] == ["success", "1.00", "1.00"]  # the reward is the verdict
    assert [l.split()[0] for l in lines] == list(checks.LIMITS) and all(l.split()[1] == "pass" for l in lines)

def test_the_command_finds_a_trap_and_saves_the_plot(folder):
    done = agentrl(folder, "check-reward", "rewards:tags", "e.jsonl", "--plot", "checks.png")
    assert done.returncode == 1 and not done.stderr
    [line] = [l for l in done.stdout.splitlines() if "FAIL" in l]
    assert line.split()[:5] == ["decoration", "FAIL", "1.00", "<=", "0.1"] and "strip them before scoring" in line
    assert (folder/"checks.png").read_bytes()[:4] == b"\x89PNG"

def test_the_help_has_an_example_and_says_that_code_is_run(folder):
    said = " ".join(agentrl(folder, "check-reward", "--help").stdout.split())
    assert "example: agentrl check-reward rewards:by_rule episodes.jsonl --plot checks.png" in said
    assert "is imported and run" in said and "exit status 1 when a check fails" in said
    assert "check-reward" in agentrl(folder, "--help").stdout

WRONG = {
    "nowhere:f": "There is no module `nowhere`", "rewards:god": "has no function `god`. Did you mean `good`?",
    "rewards:constant": "has no function `constant`", "rewards.py": "is no MODULE:FUNCTION", "rewards.py:good": "write `rewards:good`",
    "rewards:": "is no MODULE:FUNCTION",
    "broken:f": "`broken` cannot be imported: SyntaxError", "needs:f": "`needs` needs a module that is missing: nowhere",
    "stops:f": "`stops` cannot be imported: SystemExit", "rewards:raises": "ZeroDivisionError (division by zero) in line 6 of rewards.py",
    "rewards:peeks": "It is judged by that field and does not see it", "rewards:leaves": "SystemExit",
    "rewards:nothing": "0 successes and 0 failures got a number, 144 got None"}

@pytest.mark.parametrize("name", WRONG)
def test_wrong_functions_are_named(folder, monkeypatch, capsys, name):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cli.main(["check-reward", name, "e.jsonl"]) == 2
    out,said = capsys.readouterr()
    assert WRONG[name] in said and said.startswith("agentrl: ") and said.count("\n") == 1 and not out

@pytest.mark.parametrize("args", [("rewards:raises", "e.jsonl"), ("rewards:good", "rewards.py"),
                                  ("rewards:good", "e.jsonl", "--plot", "no/such/folder.png"),
                                  ("rewards:good", "e.jsonl", "--plot", "plot.txt")])
def test_wrong_input_of_a_process_is_one_sentence(folder, args):
    done = agentrl(folder, "check-reward", *args)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("agentrl: ") and done.stderr.count("\n") == 1

def test_neither_the_checks_nor_the_command_need_torch():
    code = "import sys,agentrl_cookbook.reward.check,agentrl_cookbook.cli; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
