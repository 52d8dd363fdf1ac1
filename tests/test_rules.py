"Rules: what each pays for, bad input, and what composing must keep; programs against four verifiers."
import json,math

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from agentrl_cookbook.reward.fidelity import RUNGS, asserts_pass, code_passes, ladder, static_checks
from agentrl_cookbook.reward.rules import (all_of, goal_met, items, legal_calls, match_exact, match_number, match_set,
    match_text, normal, nothing_else, number, priced, was_read, weighted, within_budget)
from agentrl_cookbook.reward.verifier import Score
from agentrl_cookbook.task.compose import reached
from agentrl_cookbook.task.sandbox import Pool

quick = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
texts = st.text(max_size=20)
words = st.text("abc", min_size=1, max_size=3)
scores = st.builds(Score, st.sampled_from([0.0, 0.5, -1.0]), st.sampled_from(["a", "b"]), words)
scores = scores | st.builds(Score, st.just(1.0), st.just("right"), words)
parts = st.dictionaries(words, scores, min_size=1, max_size=5)
RULES = dict(exact=lambda a: match_exact(a, "3"), text=lambda a: match_text(a, "3"), number=lambda a: match_number(a, "3"),
             set=lambda a: match_set(a, "3"), read=lambda a: was_read(a, ['{"ok": true, "result": [["3"]]}']),
             asserts=lambda a: asserts_pass(a, [], None) if not isinstance(a, str) else Score(0.0, "", ""),
             static=static_checks, passes=lambda a: code_passes(a, [], None))

# ---- answers ----

@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("answer", [None, 3, 3.0, b"3", ["3"], {}, "", "  ", "\ud800", "\0", "9"*5000, "-"*9999+"1",
                                    "("*5000, "1e999", "nan", "\u0663", "3,", ",,", "e", ".", "+", "{}"], ids=lambda a: repr(a)[:12])
def test_no_answer_raises(rule, answer):
    s = RULES[rule](answer)
    assert isinstance(s, Score) and s.kind and len(s.evidence) < 400 or rule == "asserts"
    if not isinstance(answer, str): assert s.reward == 0
    s.evidence.encode()

@quick
@given(texts)
def test_the_normal_form_is_normal(text):
    assert normal(normal(text)) == normal(text)
    assert match_text(text, text).reward == bool(normal(text))

def test_the_normal_form_of_two_planes_of_characters_is_normal():
    bad = [c for c in map(chr, range(0x20000)) if normal(normal(f"a{c}b")) != normal(f"a{c}b")]
    assert not bad

@quick
@given(st.text("aAbB -.,'", max_size=9))
def test_case_and_spacing_never_matter_but_signs_do(text):
    assert normal(text) == normal(text.swapcase()) == normal(text.replace(" ", "  "))
    assert normal("-5") != normal("5") and normal("3.5") != normal("35")

@quick
@given(st.text(max_size=8), st.text(max_size=8))
def test_lenient_rules_pass_what_the_exact_one_passes(a, b):
    if match_exact(a, b).reward and items(a): assert match_text(a, b).reward and match_set(a, b).reward
    if match_text(a, b).reward: assert match_text(b, a).reward

@pytest.mark.parametrize("text, value", [("1,250", 1250), ("-3", -3), ("+.5", .5), ("2e3", 2000), (" 7. ", 7), ("12,50", None),
    ("1,2345", None), ("inf", None), ("nan", None), ("1e999", None), ("0x10", None), ("1_000", None), ("3 4", None), ("\u0663", None),
    ("", None), ("5%", None), ("-", None)])
def test_numbers(text, value): assert number(text) == value

finite = st.floats(-1e6, 1e6)

@quick
@given(finite, finite, st.floats(0, 10), st.floats(0, .9))
def test_tolerance_is_symmetric_and_grows(a, b, absolute, relative):
    at = lambda a, b, *t: match_number(repr(a), repr(b), *t).reward
    assert at(a, b, absolute, relative) == at(b, a, absolute, relative) <= at(a, b, 2*absolute, relative)
    assert at(a, b, absolute, relative) == (abs(a-b) <= max(absolute, relative*max(abs(a), abs(b))))
    assert at(a, a) == 1 and at(a, b) == (a == b)

def test_bad_tolerances_and_targets_are_named():
    with pytest.raises(ValueError, match="'Oslo' is expected but is no number"): match_number("3", "Oslo")
    for relative in (-.1, 1.0, math.nan):
        with pytest.raises(ValueError, match="share from 0"): match_number("3", "3", relative=relative)

@quick
@given(st.lists(words, min_size=1, max_size=5), st.randoms())
def test_sets_have_no_order(names, r):
    expected = ", ".join(names)
    r.shuffle(names)
    assert match_set("; ".join(names), expected).reward == 1
    assert match_set("; ".join([*names, "zzz"]), expected).kind == "extra_item"
    fewer = "; ".join(n for n in names if n != names[0])
    assert match_set(fewer, expected).kind == ("missing_item" if items(fewer) else "no_answer")

# ---- state, calls, budget ----

mails = st.lists(st.builds(dict, to=words, subject=words, body=words | words.map(lambda w: f" {w}\n")), max_size=4)

@quick
@given(mails, mails)
def test_goal_and_side_effects_together_are_what_reached_says(wanted, found):
    s = all_of(dict(goal=goal_met(wanted, found), side=nothing_else(wanted, found)))
    assert bool(s.reward) == reached(dict(outbox=wanted), "", found)
    assert goal_met(wanted, found).reward == nothing_else(found, wanted).reward
    assert goal_met(wanted, wanted+found).reward == 1 == nothing_else(wanted+found, wanted).reward

TOOLS = [dict(type="function", function=dict(name="f", parameters=dict(type="object", required=["n"],
              properties=dict(n=dict(type="integer"), s=dict(type="string")))))]

@pytest.mark.parametrize("arguments, kind", [(dict(n=1), "right"), (dict(n=1, s="x"), "right"), (dict(n="1"), "argument"),
    (dict(n=True), "argument"), (dict(n=1.5), "argument"), (dict(s="x"), "argument"), (dict(n=1, x=1), "argument"), ([1], "malformed")])
def test_types_of_arguments(arguments, kind):
    assert legal_calls([json.dumps(dict(name="f", arguments=arguments))], TOOLS).kind == kind

@pytest.mark.parametrize("depth", [10, 300, 500, 900, 990, 2000])
def test_deep_arguments_are_a_verdict(depth):
    deep = '{"name": "f", "arguments": {"n": %s}}' % ("["*depth+"]"*depth)
    assert legal_calls([deep], TOOLS).kind in ("argument", "malformed")

@pytest.mark.parametrize("text", [None, 3, b"{}", "", "[]", "nul", '{"name": 1, "arguments": {}}', '{"name": "f"}', "\ud800"])
def test_what_is_no_call(text): assert legal_calls([text], TOOLS).kind == "malformed"

def test_the_first_bad_call_is_named():
    good = '{"name": "f", "arguments": {"n": 1}}'
    s = legal_calls([good, good.replace('"f"', '"g"'), "x"], TOOLS)
    assert (s.kind, s.evidence) == ("unknown_tool", "call 2: there is no tool 'g'")

def test_budget():
    assert within_budget(dict(calls=4), dict(calls=4)).reward == 1 and within_budget({}, {}).reward == 1
    s = within_budget(dict(calls=5, tokens=9, seconds=3), dict(calls=4, tokens=9, seconds=2.5))
    assert (s.reward, s.kind, s.evidence) == (0, "budget", "5 calls of 4, 3 seconds of 2.5")

# ---- composition ----

@quick
@given(parts, st.randoms())
def test_order_changes_no_reward(scores, r):
    names = list(scores)
    r.shuffle(names)
    other = {n: scores[n] for n in names}
    weights = {n: 1+i for i,n in enumerate(scores)}
    assert all_of(other).reward == all_of(scores).reward == min(s.reward for s in scores.values())
    assert weighted(other, weights).reward == weighted(scores, weights).reward

@quick
@given(parts)
def test_the_evidence_names_the_first_part_that_failed(scores):
    failed = [(n, s) for n,s in scores.items() if s.kind != "right"]
    for whole in (all_of(scores), weighted(scores, dict.fromkeys(scores, 1))):
        assert (whole.kind == "right") == (not failed)
        if failed: assert whole.evidence == f"{failed[0][0]}: {failed[0][1].evidence}" and whole.kind == failed[0][1].kind
    assert all_of(dict(outer=all_of(scores))).reward == all_of(scores).reward

@quick
@given(parts, st.floats(.1, 10))
def test_weights_are_relative(scores, factor):
    weights = {n: i+1.0 for i,n in enumerate(scores)}
    mean = weighted(scores, weights).reward
    assert math.isclose(mean, weighted(scores, {n: w*factor for n,w in weights.items()}).reward, abs_tol=1e-12)
    rewards = [s.reward for s in scores.values()]
    assert min(rewards)-1e-12 <= mean <= max(rewards)+1e-12

def test_bad_compositions_are_named():
    s = dict(a=Score(1.0, "right", ""))
    with pytest.raises(ValueError, match="at least one score"): all_of({})
    for weights in ({}, dict(b=1), dict(a=0), dict(a=-1), dict(a=1, b=1)):
        with pytest.raises(ValueError, match="give each score a weight"): weighted(s, weights)

def test_prices():
    s = Score(0.0, "malformed", "x")
    assert priced(s, dict(malformed=-1)) == Score(-1, "malformed", "x") and priced(s, dict(other=-1)) == s

# ---- code ----

SHOWN, MANY = [("f(2)", "4")], [("f(2)", "4"), ("f(30)", "60")]
HIDDEN = [("f(7)", "14"), ("f(-5)", "-10")]

@pytest.fixture(scope="module")
def pool():
    with Pool(workers=1, seconds=30) as made: yield made

@pytest.mark.parametrize("code, paid", [
    ("def f(x): return 2*x", 4), ("def f(x): return 4", 1), ("def f(x): return {2: 4}.get(x, 60)", 3),
    ("def f(x): return {30: 60}.get(x, 4)", 2), ("raise SystemExit", 3), ("import os\nos._exit(0)", 2),
    ("class Y:\n def __eq__(s, o): return True\ndef f(x): return Y()", 2), ("def f(x): return str(2*x)", 0), ("", 0), (None, 0),
    ("def f(x):\n while True: pass", 0)], ids=range(11))
def test_ladder(code, paid, pool):
    if code and "while" in code:
        with Pool(workers=1, seconds=.2) as hasty: verdicts = ladder(code, SHOWN, MANY, HIDDEN, hasty)
        assert verdicts["one test"].kind == "timeout"
    else: verdicts = ladder(code, SHOWN, MANY, HIDDEN, pool)
    assert list(verdicts) == list(RUNGS) and [s.reward for s in verdicts.values()] == [1]*paid+[0]*(4-paid)

class Spy:
    "Keeps what would be run, and prints what it is told"
    def __init__(self, text): self.text,self.sent = text,[]
    def run(self, code, files=None):
        self.sent.append(code+json.dumps(files))
        return dict(ok=True, result=[self.text])

def test_expected_values_stay_outside():
    spy = Spy("noise\n4711\n")
    assert code_passes("def f(x): pass", [("f(1)", "4711")], spy).reward == 1
    assert "f(1)" in spy.sent[0] and "4711" not in spy.sent[0]
    assert code_passes("x", [("f(1)", "4711")], Spy("4711\nother")).kind == "wrong_output" == code_passes("x", [("f(1)", "1")], Spy("")).kind

def test_the_first_bad_test_is_named(pool):
    s = code_passes("def f(x):\n if x > 5: raise KeyError(x)\n return 2*x", MANY, pool)
    assert (s.kind, s.evidence) == ("python", "test 2, f(30): KeyError: 30")

@pytest.mark.parametrize("code, kind", [
    ("import math, re", "right"), ("from collections import Counter", "right"), ("import os", "forbidden_name"),
    ("from os import path", "forbidden_name"), ("from . import x", "forbidden_name"), ("import math, sys", "forbidden_name"),
    ("open('x')", "forbidden_name"), ("x.__class__", "forbidden_name"), ("class A:\n def __eq__(s, o): return 1", "forbidden_name"),
    ("try: f()\nexcept: pass", "swallows"), ("try: f()\nexcept Exception: pass", "swallows"),
    ("try: f()\nexcept (KeyError, Exception): pass", "swallows"), ("try: f()\nexcept Exception: raise", "right"),
    ("try: f()\nexcept ValueError: pass", "right"), ("x = {30: 60}", "special_case"), ("x = 60", "right"), ("x = 2", "right"),
    ("def f(:", "syntax"), ("x\0", "syntax"), ("("*5000, "syntax"), ("-"*15000+"1", "syntax"), ("\ud800", "syntax")])
def test_static_checks(code, kind): assert static_checks(code, MANY).kind == kind
