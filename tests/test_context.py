"Context as an action: what an edit does, what a budget does, and that every trained token has the context it was sampled in."
import json,subprocess,sys
from contextlib import closing
from random import Random

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings, strategies as st
from transformers import PrinterCallback
from trl import GRPOConfig

from agentrl_cookbook.loop import edited as edited_module
from agentrl_cookbook.loop.decode import decoding
from agentrl_cookbook.loop.edited import draw_segment, refill, rollout_edited, shared, verify_list
from agentrl_cookbook.loop.rollout import rollout
from agentrl_cookbook.loop.train import AgentTrainer
from agentrl_cookbook.policy.sft import copy_policy, train_sft
from agentrl_cookbook.policy.tiny import tiny_policy, trace_texts, train_tokenizer
from agentrl_cookbook.task.context import (
    STATES, Segment, Step, Turn, advise, apply, compress_all, demonstrate, encode, fit, keep_all, messages, obey,
    read_actions, scan_tasks, segments, sft_row, summary)
from agentrl_cookbook.task.env import Environment
from agentrl_cookbook.task.tools import TOOL_CALL, connect

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- Histories and actions ----

CALL = json.dumps(dict(name="sql", arguments=dict(query="SELECT status,item FROM purchase WHERE id = '104'"))).join(TOOL_CALL)
FOUND = '{"ok": true, "result": [["sent", "Lamp"]]}'
histories = st.lists(st.sampled_from(STATES), max_size=8).map(lambda s: tuple(Turn(CALL, FOUND, state) for state in s))

def states(turns): return [t.state for t in turns]
def in_view(turns): return [i for i,t in enumerate(turns) if t.state != "drop"]

@given(histories, st.sampled_from(STATES), st.integers(-2, 10))
def test_an_action_changes_one_turn_in_view_and_only_takes_detail_away(turns, kind, back):
    view = in_view(turns)
    if not 1 <= back <= len(view):
        with pytest.raises(ValueError, match=f"no turn {back} back: {len(view)} of {len(turns)}"): apply(turns, (kind, back))
        return
    after = apply(turns, (kind, back))
    i = view[-back]
    assert after[:i]+after[i+1:] == turns[:i]+turns[i+1:]
    assert after[i].state == max(turns[i].state, kind, key=STATES.index)
    assert (after[i].message, after[i].result) == (turns[i].message, turns[i].result)

def test_an_unknown_action_is_named():
    with pytest.raises(ValueError, match="`forget` is no action: give one of keep, compress, drop"): apply((Turn("", ""),), ("forget", 1))

@pytest.mark.parametrize("message, actions", [
    (CALL, []), ("drop"+CALL, [("drop", 1)]), ("keep 3 "+CALL, [("keep", 3)]), ("compress drop 2"+CALL, [("compress", 1), ("drop", 2)]),
    ("dropped"+CALL, []), ("drop", []), ("", []), ("drop 12345"+CALL, [("drop", 1)]),
    (CALL+"drop", []), ("drop 0"+CALL, [("drop", 0)])])
def test_actions_stand_before_the_call(message, actions): assert read_actions(message) == actions

@given(histories, st.text(alphabet="kepdrocms 0123\n", max_size=40))
def test_whatever_a_policy_writes_obey_goes_on(turns, text):
    after = obey(turns, text+CALL)
    assert len(after) == len(turns) and all(STATES.index(a.state) >= STATES.index(b.state) for a,b in zip(after, turns))
    assert obey(turns, text) == turns and keep_all(turns, text) == turns

def test_obey_counts_back_in_what_is_left():
    turns = tuple(Turn(CALL, FOUND) for _ in range(4))
    assert states(obey(turns, "drop drop"+CALL)) == ["keep", "keep", "drop", "drop"]
    assert states(obey(turns, "drop compress"+CALL)) == ["keep", "keep", "compress", "drop"]
    assert states(compress_all(obey(turns, "drop 2"+CALL), CALL)) == ["compress", "compress", "drop", "compress"]


# ---- The summary, the context and the budget ----

def message(name, **arguments): return json.dumps(dict(name=name, arguments=arguments)).join(TOOL_CALL)

@pytest.mark.parametrize("turn, line", [
    (Turn(CALL, FOUND), "purchase 104: status sent, item Lamp"),
    (Turn("drop 2"+CALL, FOUND), "purchase 104: status sent, item Lamp"),
    (Turn(message("sql", query="SELECT status = 'sent',item FROM purchase WHERE id = '104'"), '{"ok": true, "result": [["1", "Lamp"]]}'),
     "purchase 104: status = 'sent' 1, item Lamp"),
    (Turn(CALL, '{"ok": false, "kind": "timeout", "error": "try again"}'), "purchase 104: timeout"),
    (Turn(CALL, '{"ok": true, "result": []}'), "purchase 104: []"),
    (Turn(message("sql", query="SELECT count(*) FROM purchase"), '{"ok": true, "result": [["40"]]}'),
     'sql {"query": "SELECT count(*) FROM purchase"}: [["40"]]'),
    (Turn(message("python", code="print(2)"), '{"ok": true, "result": ["2"]}'), 'python {"code": "print(2)"}: ["2"]'),
    (Turn("no json".join(TOOL_CALL), '{"ok": false, "kind": "malformed", "error": "..."}'), "a call {}: malformed")])
def test_summary(turn, line): assert summary(turn) == line

@given(st.text(max_size=300), st.lists(st.lists(st.one_of(st.none(), st.text(max_size=200)), max_size=3), max_size=3))
def test_a_summary_is_one_short_line(query, rows):
    for q in (query, f"SELECT a,b FROM t WHERE k = '{query}'"):
        line = summary(Turn(message("sql", query=q), json.dumps(dict(ok=True, result=rows))))
        assert len(line.splitlines()) <= 1 and len(line) <= 162

def letters(chat): return sum(len(m["content"]) for m in chat)

def test_notes_stand_under_the_question_and_kept_turns_are_messages():
    turns = tuple(Turn(CALL, FOUND, s) for s in ("keep", "compress", "drop", "keep"))
    chat = messages("Q", turns)
    assert [m["role"] for m in chat] == ["user", "assistant", "tool", "assistant", "tool"]
    assert chat[0]["content"] == "Q\npurchase 104: status sent, item Lamp" and chat[1]["content"] == CALL
    assert messages("Q", ()) == [dict(role="user", content="Q")]

@given(histories, st.integers(0, 900))
def test_a_budget_drops_the_oldest_turns_and_no_more_than_needed(turns, budget):
    after = fit("Q", turns, letters, budget)
    gone = [i for i,(a,b) in enumerate(zip(after, turns)) if a.state != b.state]
    assert all(after[i].state == "drop" for i in gone) and gone == in_view(turns)[:len(gone)]
    assert letters(messages("Q", after)) <= budget or not in_view(after[:-1])
    if gone:   # with the last one of them back it would not fit
        i = gone[-1]
        assert letters(messages("Q", after[:i]+(turns[i],)+after[i+1:])) > budget
    assert fit("Q", after, letters, budget) == after


# ---- Segments: every trained token under the context that it was sampled in ----

def sampled(steps): return [(s.context+s.ids[:i], token, l) for s in steps for i,(token,l) in enumerate(zip(s.ids, s.logp))]
def trained(pairs):
    return [(p.prompt_ids+p.ids[:i], token, l) for p in pairs for i,(token,m,l) in enumerate(zip(p.ids, p.mask, p.logp)) if m]

@st.composite
def episodes_of_ids(draw):
    "Steps of which some continue the one before, some are cut or changed"
    ids,steps,context = st.lists(st.integers(0, 2), min_size=1, max_size=4),[],None
    for _ in range(draw(st.integers(1, 6))):
        how = draw(st.sampled_from(["grow", "cut", "new"]))
        so_far = context or []
        if how == "grow": context = so_far+draw(ids)
        elif how == "cut": context = so_far[:draw(st.integers(0, len(so_far)))]+draw(ids)
        else: context = draw(ids)
        new = draw(ids)
        steps.append(Step(context, new, [-float(len(steps))-i/10 for i in range(len(new))]))
        context = context+new
    return steps

@given(episodes_of_ids())
@settings(max_examples=200)
def test_every_trained_token_has_the_context_that_it_was_sampled_in(steps):
    pairs = segments(steps)
    assert trained(pairs) == sampled(steps)
    assert all(len(p.ids) == len(p.mask) == len(p.logp) and p.mask[-1] == 1 for p in pairs)
    assert all(l == 0 for p in pairs for m,l in zip(p.mask, p.logp) if not m)
    breaks = sum(b.context[:len(a.context+a.ids)] != a.context+a.ids for a,b in zip(steps, steps[1:]))
    assert len(pairs) == breaks+1, "as few pairs as there are edits"

def test_one_list_of_ids_would_have_other_contexts():
    steps = [Step([1, 2], [3], [-.1]), Step([1, 7], [4], [-.2])]
    assert trained([Segment([1, 2], [3, 7, 4], [1, 0, 1], [-.1, 0, -.2])]) != sampled(steps)

def test_steps_are_not_changed():
    steps = [Step([1], [2], [-.1]), Step([1, 2, 3], [4], [-.2])]
    segments(steps)[0].ids.append(9)
    assert steps == [Step([1], [2], [-.1]), Step([1, 2, 3], [4], [-.2])]

def test_sft_row():
    row = sft_row(Segment([1, 2], [3, 8, 4], [1, 0, 1], [0.0]*3))
    assert row == dict(input_ids=[1, 2, 3, 8, 4], labels=[-100, -100, 3, -100, 4])

def test_the_pure_part_needs_no_torch():
    check = "import sys,agentrl_cookbook.task.context; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", check], text=True) == "False\n"


# ---- The long task and its solver ----

def test_long_tasks_have_the_answer_that_one_query_gives(database):
    tasks = scan_tasks(database, 40, seed=3)
    with closing(connect(database)) as reader:
        for t in tasks:
            column,wanted = t.path[0],t.question.rsplit("'", 2)[1]
            find = f"SELECT {column} FROM purchase WHERE id >= {t.key} AND status = '{wanted}' ORDER BY id"
            assert t.answer == ", ".join(v for (v,) in reader.execute(find))
            assert t.hops == len(t.queries) == 140-int(t.key) and 12 <= t.hops <= 16
    assert tasks == scan_tasks(database, 40, seed=3) != scan_tasks(database, 40, seed=4)

def test_a_database_without_such_rows_has_no_tasks(database):
    assert scan_tasks(database, 1, 0, turns=(2, 3), matches=(9, 9)) == []

def test_what_the_solver_keeps_and_what_a_window_loses(database):
    environment,lost = Environment(database, max_calls=99),0
    for task in scan_tasks(database, 12, seed=0):
        parts = task.answer.split(", ")
        edited,window,full = (demonstrate(task, environment, edit, letters, budget)
                              for edit,budget in ((obey, 700), (keep_all, 700), (keep_all, 10**6)))
        assert all(len(shown) == task.hops+1 and shown[-1][1] == task.answer for shown in (edited, window, full))
        texts = ["".join(m["content"] for m in shown[-1][0]) for shown in (edited, window, full)]
        assert all(p in texts[0] and p in texts[2] for p in parts)
        assert max(letters(c) for c,_ in edited+window) <= 700 < letters(full[-1][0])
        lost += not all(p in texts[1] for p in parts)
    assert lost >= 6

def test_advice_is_to_keep_what_matches():
    assert advise(Turn(CALL, '{"ok": true, "result": [["1", "Lamp"]]}')) == "compress"
    for result in ('{"ok": true, "result": [["0", "Lamp"]]}', '{"ok": true, "result": []}', '{"ok": false, "kind": "timeout", "error": ""}'):
        assert advise(Turn(CALL, result)) == "drop"


# ---- Played by a policy ----

@pytest.fixture(scope="module")
def task(database): return scan_tasks(database, 1, seed=0, turns=(12, 12))[0]

@pytest.fixture(scope="module")
def tokenizer(database, task):
    texts = []
    for edit in (obey, compress_all, keep_all):
        shown = demonstrate(task, Environment(database, max_calls=99), edit, letters, 10**6)
        texts += trace_texts([c+[dict(role="assistant", content=t)] for c,t in shown])
    return train_tokenizer(texts)

@pytest.fixture(scope="module")
def rows(database, task, tokenizer):
    return [sft_row(p) for p in segments(encode(tokenizer, demonstrate(task, Environment(database, max_calls=99), obey, letters, 10**6)))]

@pytest.fixture(scope="module")
def policy(tmp_path_factory, tokenizer, rows):
    return train_sft(tiny_policy(tokenizer), tokenizer, rows, tmp_path_factory.mktemp("policy"), steps=70, batch_size=8,
                     save_strategy="no")

def play(policy, tokenizer, database, task, n=6, seed=0, **options):
    environments = [Environment(database, max_calls=24) for _ in range(n)]
    return rollout_edited(policy, tokenizer, environments, [task]*n, generator=torch.Generator().manual_seed(seed), **options)

@pytest.fixture(scope="module")
def episodes(policy, tokenizer, database, task): return play(policy, tokenizer, database, task)

def score(policy, prompt_ids, ids, mask):
    "Log-probability of the tokens whose mask is 1, by one forward pass"
    logits = policy(torch.tensor([prompt_ids+ids])).logits[0, len(prompt_ids)-1:-1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0][torch.tensor(mask) == 1]

def test_recorded_log_probabilities_are_those_of_the_segments_and_not_of_the_history(policy, episodes):
    assert max(len(segments(e.steps)) for e in episodes) >= 4
    recorded = torch.tensor([l for e in episodes for s in e.steps for l in s.logp])
    with decoding(policy), torch.no_grad():
        pairs = torch.cat([score(policy, p.prompt_ids, p.ids, p.mask) for e in episodes for p in segments(e.steps)])
        whole = torch.cat([score(policy, e.prompt_ids, e.ids, e.mask) for e in episodes])
    assert torch.allclose(pairs, recorded, atol=1e-4)
    assert (whole-recorded).abs().max() > .1

def test_steps_and_history_hold_the_same_sampled_tokens(episodes, tokenizer):
    for e in episodes:
        assert [t for s in e.steps for t in s.ids] == [t for t,m in zip(e.ids, e.mask) if m]
        assert e.n_read == sum(len(s.context) for s in e.steps) and len(e.ids) == len(e.mask) == len(e.logp)
        said = [tokenizer.decode(s.ids[:-1]) for s in e.steps if s.ids[-1] == tokenizer.eos_token_id]
        assert [t.message for t in e.turns_read] == [t for t in said if TOOL_CALL[0] in t]

def test_contexts_are_the_rendered_turns_within_the_budget(episodes, tokenizer, task):
    e = max(episodes, key=lambda e: len(e.steps))
    turns = ()
    for step,turn in zip(e.steps, e.turns_read):
        context = tokenizer.apply_chat_template(messages(task.question, turns), add_generation_prompt=True, return_dict=True)
        assert step.context == context["input_ids"] and len(step.context) <= 96
        turns = obey(turns, turn.message)+(Turn(turn.message, turn.result),)

def test_the_window_holds_for_a_small_budget(policy, tokenizer, database, task):
    for edit in (obey, keep_all, compress_all):
        played = play(policy, tokenizer, database, task, edit=edit, budget=64)
        assert max(len(s.context) for e in played for s in e.steps) <= 64
    with pytest.raises(ValueError, match="budget=5 is less than a question of"): play(policy, tokenizer, database, task, budget=5)

def test_without_edits_it_is_the_plain_rollout(policy, tokenizer, database, task):
    edited = play(policy, tokenizer, database, task, n=3, edit=keep_all, budget=640, temperature=0)
    plain = rollout(policy, tokenizer, [Environment(database, max_calls=24) for _ in range(3)], [task]*3, range(3), temperature=0,
                    max_tokens=640)
    for a,b in zip(edited, plain):
        assert (a.ids, a.mask, a.calls, a.answer) == (b.ids, b.mask, b.calls, b.answer)
        assert torch.allclose(torch.tensor(a.logp), torch.tensor(b.logp), atol=1e-4)
        assert len(segments(a.steps)) == 1

def test_the_same_seed_and_a_forgetful_cache_give_the_same_episodes(policy, tokenizer, database, task, episodes, monkeypatch):
    assert [e.ids for e in play(policy, tokenizer, database, task)] == [e.ids for e in episodes]
    monkeypatch.setattr(edited_module, "refill", lambda model, cache, cached, *rest: refill(model, cache, [[] for _ in cached], *rest))
    assert [e.ids for e in play(policy, tokenizer, database, task)] == [e.ids for e in episodes]
    assert [e.ids for e in play(policy, tokenizer, database, task, seed=1)] != [e.ids for e in episodes]

@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_shared(a, b):
    n = shared(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])

@pytest.mark.parametrize("answer, observed, kind", [
    ("Lamp, Jack", ["Lamp", "Jack"], "right"), ("Lamp, Jack", ["Lamp"], "not_observed"), ("Jack, Lamp", ["Lamp", "Jack"], "wrong_answer"),
    (None, ["Lamp", "Jack"], "no_answer")])
def test_each_part_of_a_list_must_have_been_read(answer, observed, kind):
    texts = [json.dumps(dict(ok=True, result=[[v]])) for v in observed]
    assert verify_list(answer, "Lamp, Jack", [("sql", "ok")]*len(texts), texts).kind == kind
    assert verify_list(answer, "Lamp, Jack", [("sql", "denied")], texts).kind == "illegal_call"


# ---- Trained: SFT and RL take segments as ordinary rows ----

def test_sft_learns_each_message_of_the_solver_under_its_own_context(database, task, tokenizer, rows):
    shown = demonstrate(task, Environment(database, max_calls=99), obey, letters, 10**6)
    assert len(rows) == task.hops and sum(r["labels"].count(tokenizer.eos_token_id) for r in rows) == task.hops+1
    learned = [(tokenizer.decode(r["input_ids"][:i]), tokenizer.decode([t for t in r["labels"][i:] if t != -100]))
               for r in rows[1:] for i in [next(i for i,l in enumerate(r["labels"]) if l != -100)]]
    want = [(trace_texts([c])[0]+"<|assistant|>", t+"<|end|>") for c,t in shown[2:]]
    assert learned == want

def gradient(policy): return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])

def test_a_drawn_segment_has_the_gradient_of_the_episode_on_average(policy, episodes):
    e = max(episodes, key=lambda e: len(e.steps))
    pairs,model = segments(e.steps),copy_policy(policy)
    N = sum(e.mask)
    torch.cat([score(model, p.prompt_ids, p.ids, p.mask) for p in pairs]).mean().backward()
    whole = gradient(model)
    model.zero_grad()
    for p in pairs: (sum(p.mask)/N*score(model, p.prompt_ids, p.ids, p.mask).mean()).backward()
    assert torch.allclose(gradient(model), whole, atol=1e-5)
    r = Random(0)
    def key(p): return tuple(p.prompt_ids),tuple(p.ids)
    drawn = [key(draw_segment(e, r)) for _ in range(4000)]
    for p in pairs:
        share = sum(sum(q.mask) for q in pairs if key(q) == key(p))/N  # a policy may write the same again
        assert drawn.count(key(p))/4000 == pytest.approx(share, abs=.03)

def first_ratios(policy, tokenizer, task, rows, folder):
    "New to old probability of the trained tokens in the first step of TRL's trainer on these rows"
    found = []
    class Watched(AgentTrainer):
        def _compute_loss(self, model, inputs):
            ids,mask = (torch.cat([inputs[f"prompt_{k}"], inputs[f"completion_{k}"]], 1) for k in ("ids", "mask"))
            with torch.no_grad():
                logp = self._get_per_token_logps_and_entropies(model, ids, mask, inputs["completion_ids"].shape[1])[0]
            found.append((logp-inputs["old_per_token_logps"]).exp()[(inputs["completion_mask"]*inputs["tool_mask"]).bool()])
            return super()._compute_loss(model, inputs)
    args = GRPOConfig(output_dir=str(folder), max_steps=1, per_device_train_batch_size=len(rows), steps_per_generation=1,
                      num_generations=len(rows), max_completion_length=640, loss_type="cispo", epsilon_high=5., beta=0.,
                      router_aux_loss_coef=0.0, report_to=[], save_strategy="no", disable_tqdm=True, bf16=False,
                      activation_checkpointing=False, dataloader_pin_memory=False)
    def rows_of(prompts, trainer):
        return dict(prompt_ids=[r.prompt_ids for r in rows], completion_ids=[r.ids for r in rows],
                    logprobs=[r.logp for r in rows], env_mask=[r.mask for r in rows], reward=[float(i % 2) for i in range(len(rows))])
    prompt = [dict(role="user", content=task.question)]
    trainer = Watched(copy_policy(policy), reward_funcs=lambda reward, **_: reward, args=args, rollout_func=rows_of,
                      processing_class=tokenizer, train_dataset=Dataset.from_list([dict(prompt=prompt)]))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return torch.cat(found)

def test_the_ratio_in_trl_is_one_on_segments_and_not_on_histories(policy, tokenizer, task, episodes, tmp_path):
    r = Random(1)
    ratio = first_ratios(policy, tokenizer, task, [draw_segment(e, r) for e in episodes], tmp_path/"segments")
    assert (ratio-1).abs().max() < 1e-3
    assert (first_ratios(policy, tokenizer, task, episodes, tmp_path/"histories")-1).abs().max() > .1
