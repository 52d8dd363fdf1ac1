"Verifier and monitor: the rule, and what the log of a run says."
import json
import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings, strategies as st
from peft import LoraConfig, get_peft_model
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from agentrl_cookbook.evals import monitor as monitor_module
from agentrl_cookbook.evals.monitor import (
    ExpertLoad, Monitor, batch_stats, kl_estimates, load_entropy, max_violation, sampled_logp)
from agentrl_cookbook.loop.rollout import Episode
from agentrl_cookbook.policy.tiny import tiny_policy, trace_texts, train_tokenizer
from agentrl_cookbook.reward.rules import match_set, within_budget
from agentrl_cookbook.reward.verifier import KINDS, Score, count_kinds, read_values, verify
from agentrl_cookbook.run import read_log
from agentrl_cookbook.task.env import Environment
from agentrl_cookbook.task.graph import graph
from agentrl_cookbook.task.synth import sample_tasks, solve
from agentrl_cookbook.task.world import company

quick = settings(max_examples=80, deadline=None, derandomize=True)


def result(*values): return json.dumps(dict(ok=True, result=[[v] for v in values]))

def episode(task="t", hops=1, reward=1.0, kind="right", calls=(("sql", "ok"),), turns=2, mask=(1, 1), **more):
    "A scored episode of a task that only has an id and a number of hops"
    return Episode(**dict(task=SimpleNamespace(id=task, hops=hops), prompt_ids=[1], ids=[2]*len(mask), mask=list(mask),
                          logp=[-0.5*m for m in mask], calls=list(calls), answer="x", turns=turns,
                          observed=[], score=Score(reward, kind, "")) | more)


# ---- the rule ----

@pytest.mark.parametrize("answer, calls, observed, kind", [
    ("Oslo", ["ok"], [result("Oslo")], "right"),
    (" Oslo\n", ["timeout", "ok"], [result("Bergen", "Oslo")], "right"),
    (None, ["ok"], [result("Oslo")], "no_answer"),
    ("  ", ["ok"], [result("Oslo")], "no_answer"),
    ("Oslo", ["malformed", "ok"], [result("Oslo")], "illegal_call"),
    ("Oslo", ["ok", "budget"], [result("Oslo")], "illegal_call"),
    ("Bergen", ["ok"], [result("Bergen")], "wrong_answer"),
    ("oslo", ["ok"], [result("oslo")], "wrong_answer"),
    ("Oslo", [], [], "not_observed"),
    ("Oslo", ["ok"], [result("Oslofjord")], "not_observed"),
    ("Oslo", ["timeout"], ['{"ok": false, "kind": "timeout", "error": "Oslo"}'], "not_observed"),
    (None, ["malformed"], [], "illegal_call"),       # the first question that fails names the kind
    ("Bergen", ["malformed"], [], "illegal_call"),
    ("Bergen", [], [], "wrong_answer"),
])
def test_one_kind_for_each_way_to_end(answer, calls, observed, kind):
    score = verify(answer, "Oslo", [("sql", k) for k in calls], observed)
    assert (score.kind, score.reward) == (kind, float(kind == "right"))

def test_evidence_names_the_thing():
    assert "'Bergen' is not 'Oslo'" in verify("Bergen", "Oslo", [], []).evidence
    assert verify("Oslo", "Oslo", [("sql", "ok"), ("mail", "argument")], []).evidence == "call 2 (mail) ended in 'argument'"
    assert "'Oslo'" in verify("Oslo", "Oslo", [], [result("Rome")]*3).evidence

outcomes = st.lists(st.tuples(st.sampled_from(["sql", "?"]), st.sampled_from(["ok", "timeout", "sql", "malformed"])), max_size=5)
words = st.sampled_from(["Oslo", "Rome", "No", ""])

@quick
@given(st.none() | words, outcomes, st.lists(words, max_size=3))
def test_a_reward_needs_all_four(answer, calls, read):
    observed = [result(w) for w in read]
    score = verify(answer, "Oslo", calls, observed)
    legal = all(k in ("ok", "timeout") for _,k in calls)
    assert score.reward == float(answer == "Oslo" and legal and "Oslo" in read) == float(score.kind == "right")
    assert verify(answer, "Oslo", [("sql", "timeout"), *calls], observed).reward == score.reward
    assert verify(answer, "Oslo", [*calls, ("sql", "denied")], observed).reward == 0

@quick
@given(st.lists(st.text(max_size=30) | st.sampled_from(['{"ok": true}', "[]", "null", '{"result": null}']), max_size=4))
def test_reading_anything_raises_nothing(texts):
    assert read_values([*texts, result("Oslo")]) >= {"Oslo"}

def test_nested_results_are_read_to_their_leaves():
    assert read_values(['{"ok": true, "result": {"a": [1, {"b": "x"}], "c": 2.5}}']) == {"1", "x", "2.5"}

def test_all_kinds_are_counted_in_one_order():
    scores = [Score(0.0, "wrong_answer", ""), Score(1.0, "right", ""), Score(0.0, "wrong_answer", "")]
    assert count_kinds(scores) == dict(right=1, illegal_call=0, no_answer=0, wrong_answer=2, not_observed=0)
    assert list(count_kinds([])) == list(KINDS)

def test_kinds_of_other_rules_are_counted_after_those_of_the_verifier():
    others = [match_set("Oslo", "Oslo, Rome"), *[within_budget(dict(calls=9), dict(calls=8))]*2]
    counts = count_kinds([*others, Score(1.0, "right", "")])
    assert counts == dict.fromkeys(KINDS, 0) | dict(right=1, budget=2, missing_item=1)
    assert list(counts) == [*KINDS, "budget", "missing_item"]
    assert batch_stats([episode(score=s) for s in others])["score_kinds"]["budget"] == 2


# ---- a world ----

@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "The company, an untrained policy for it, and its tokenizer"
    database = company(tmp_path_factory.mktemp("world")/"company.db")
    g, env = graph(database), Environment(database)
    traces = [solve(t, env) for t in sample_tasks(g, 200, {1: 1, 2: 1}, seed=0, split="train")]
    tokenizer = train_tokenizer(trace_texts(traces))
    return SimpleNamespace(database=database, graph=g, tokenizer=tokenizer, policy=tiny_policy(tokenizer).eval())


# ---- expert load ----

counts = st.lists(st.lists(st.integers(0, 1000), min_size=4, max_size=4).filter(any), min_size=1, max_size=5)

@quick
@given(counts)
def test_bounds_of_the_two_figures(rows):
    counts_LE = torch.tensor(rows)
    vio_L, entropy_L = max_violation(counts_LE), load_entropy(counts_LE)
    assert (0 <= vio_L).all() and (vio_L <= 3).all() and (-1e-6 <= entropy_L).all() and (entropy_L <= 1+1e-6).all()
    assert torch.allclose(vio_L, max_violation(7*counts_LE)) and torch.allclose(entropy_L, load_entropy(7*counts_LE))

def test_vector_of_the_two_figures():
    counts_LE = torch.tensor([[10, 2, 0, 4]])
    assert max_violation(counts_LE).item() == 1.5 and load_entropy(counts_LE).item() == pytest.approx(0.649397, abs=1e-6)

def qwen3():
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=40, num_hidden_layers=3, hidden_size=32, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
        intermediate_size=32, mlp_only_layers=[1], max_position_embeddings=64, pad_token_id=0))

def qwen35():
    return Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(vocab_size=40, num_hidden_layers=4, hidden_size=32, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
        linear_value_head_dim=16, max_position_embeddings=64, pad_token_id=0))

def padded(seed=0):
    "Token ids and mask of six rows, some padded on the left and some on the right"
    gen = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(1, 40, (6, 20), generator=gen)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, :5] = mask_BT[2, 12:] = mask_BT[3, :11] = 0
    return dict(input_ids=ids_BT*mask_BT, attention_mask=mask_BT)

def chosen(out, k=2, E=6, real=slice(None)):
    "Tokens by layer and expert from the logits of the routers"
    return torch.stack([logits[real].topk(k).indices.flatten().bincount(minlength=E) for logits in out.router_logits])

@pytest.mark.parametrize("make, layers", [(qwen3, 2), (qwen35, 4)])
def test_the_load_is_what_the_router_decides(make, layers):
    torch.manual_seed(0)
    model, batch = make(), padded()
    load = ExpertLoad(model)
    out = model(**batch, output_router_logits=True)
    assert torch.equal(load.counts_LE, chosen(out, real=batch["attention_mask"].flatten().bool()))
    assert (load.counts_LE.sum(1) == 2*batch["attention_mask"].sum()).all() and len(load.counts_LE) == layers
    load.reset()
    assert torch.equal(load.counts_LE, torch.zeros(layers, 6, dtype=torch.long))
    out = model(batch["input_ids"], output_router_logits=True)      # no mask: every row is a token
    assert torch.equal(load.counts_LE, chosen(out))

def test_hooks_come_off():
    model = qwen3()
    load = ExpertLoad(model)
    load.remove()
    model(**padded())
    assert load.counts_LE.sum() == 0

def test_the_load_under_lora_and_recomputation():
    torch.manual_seed(0)
    model, batch = qwen3(), padded()
    load = ExpertLoad(model)
    model(**batch)
    once_LE = load.counts_LE
    load.remove()
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).train()
    load = ExpertLoad(wrapped)
    wrapped(**batch)
    assert torch.equal(load.counts_LE, once_LE)
    load.reset()
    wrapped.enable_input_require_grads()
    wrapped.gradient_checkpointing_enable()
    wrapped(**batch).logits.sum().backward()
    assert torch.equal(load.counts_LE, 2*once_LE), "recomputed layers count twice; shares stay"

def test_a_dense_model_has_no_load():
    with pytest.raises(ValueError, match="only a mixture of experts has a load"): ExpertLoad(torch.nn.Linear(2, 2))


# ---- KL ----

def some_episodes(seed=0, n=9, vocab=40):
    "Episodes of random tokens with tool results inside; nothing of them is real but the lengths"
    gen = torch.Generator().manual_seed(seed)
    def draw(n): return torch.randint(1, vocab, (n,), generator=gen).tolist()
    res = []
    for i in range(n):
        mask = [1]*(3+i % 4) + [0]*(i % 3) + [1]*2
        res.append(episode(prompt_ids=draw(2+i % 5), ids=draw(len(mask)), mask=mask, logp=[-1.0*m for m in mask]))
    return res

def test_log_probabilities_equal_one_episode_at_a_time(monkeypatch):
    torch.manual_seed(0)
    model, episodes, expected = qwen3().eval(), some_episodes(), []
    for e in episodes:
        logp_TV = model(torch.tensor([e.prompt_ids+e.ids])).logits[0].log_softmax(-1)
        expected += [logp_TV[len(e.prompt_ids)-1+t, i] for t,(i,m) in enumerate(zip(e.ids, e.mask)) if m]
    logp_N = sampled_logp(model, episodes)
    assert torch.allclose(logp_N, torch.stack(expected), atol=1e-5) and not logp_N.requires_grad
    monkeypatch.setattr(monitor_module, "LOGITS", 2000)             # two episodes at a time
    assert torch.allclose(sampled_logp(model, episodes), logp_N, atol=1e-5)

def test_both_estimators_have_the_right_mean():
    gen = torch.Generator().manual_seed(0)
    p_V, q_V = torch.randn(2, 12, generator=gen).softmax(-1)
    exact = (p_V*(p_V/q_V).log()).sum().item()
    each = [kl_estimates(p.log()[None], q.log()[None]) for p,q in zip(p_V, q_V)]
    for name in ("kl_k1", "kl_k3"):
        assert sum(p*o[name] for p,o in zip(p_V.tolist(), each)) == pytest.approx(exact, abs=1e-5)
    assert all(o["kl_k3"] >= 0 for o in each) and any(o["kl_k1"] < 0 for o in each)


# ---- the log of a run ----

def test_stats_of_a_known_batch():
    lost = dict(reward=0.0, kind="illegal_call")
    batch = [episode("a"), episode("a", calls=[("sql", "timeout"), ("sql", "ok")], turns=4),
             episode("b"), episode("b", calls=[("?", "malformed")], mask=(1, 0, 0, 1), **lost)]
    assert batch_stats(batch) == dict(
        episodes=4, reward_mean=0.75, reward_0=0.25, reward_1=0.75, zero_variance=0.5, turns=2.5, tokens=2.0,
        tool_ok={"?": 0.0, "sql": 0.75}, call_kinds=dict(malformed=1, ok=3, timeout=1),
        score_kinds=count_kinds([e.score for e in batch]))

def test_every_second_batch(tmp_path):
    monitor = Monitor(tmp_path, every=2)
    for _ in range(5): monitor.record([episode()])
    monitor.on_train_end(None, None, None)
    assert [row["step"] for row in read_log(tmp_path)] == [0, 2, 4]

class Watched(GRPOTrainer):
    "TRL's trainer on random episodes whose batches a monitor sees; half of the attempts succeed"
    def __init__(self, folder, monitor, steps, world):
        model = tiny_policy(world.tokenizer, num_hidden_layers=2)
        self.played, vocab = [], len(world.tokenizer)
        def play(prompts, trainer):
            batch = some_episodes(trainer.state.global_step, len(prompts), vocab)
            for i,e in enumerate(batch):
                e.task, e.score = SimpleNamespace(id=i//4), Score(float(i % 2), ("wrong_answer", "right")[i % 2], "")
            self.played.append(batch)
            monitor.record(batch)
            return dict(prompt_ids=[e.prompt_ids for e in batch], completion_ids=[e.ids for e in batch],
                        logprobs=[e.logp for e in batch], env_mask=[e.mask for e in batch], r=[e.score.reward for e in batch])
        args = GRPOConfig(
            output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, steps_per_generation=2, num_generations=4,
            max_completion_length=32, loss_type="cispo", epsilon_high=5.0, bf16=False, use_cpu=True, report_to=[],
            logging_steps=1, save_steps=2, disable_tqdm=True, gradient_checkpointing=False, router_aux_loss_coef=0.0,
            dataloader_pin_memory=False)
        super().__init__(model, reward_funcs=lambda r, **kw: r, args=args, processing_class=world.tokenizer, rollout_func=play,
                         train_dataset=Dataset.from_list([dict(prompt=[dict(role="user", content="?")])]*32), callbacks=[monitor])

@pytest.fixture(scope="module")
def watched(world, tmp_path_factory):
    "A run of three generation batches, two optimizer steps each, with the policy at its start as reference"
    folder = tmp_path_factory.mktemp("run")
    monitor = Monitor(folder, reference=tiny_policy(world.tokenizer, num_hidden_layers=2).eval())
    trainer = Watched(folder/"trl", monitor, 6, world)
    trainer.train()
    return folder, trainer

def test_one_line_per_batch_with_the_same_keys(watched):
    rows = read_log(watched[0])
    assert [(row["step"], row["stage"]) for row in rows] == [(0, "rl"), (1, "rl"), (2, "rl")]
    assert len({tuple(row) for row in rows}) == 1
    for row in rows:
        assert row["episodes"] == 16 and row["reward_mean"] == 0.5 and row["zero_variance"] == 0
        assert 0 < row["entropy"] <= math.log(1024) and row["grad_norm"] > 0 and row["clip_ratio/region_mean"] is None
        assert row["cispo_clip_ratio"] is not None and row["kl_k3"] >= 0

def test_the_load_of_a_line_is_that_of_its_batch(watched):
    "Two experts a token, in TRL's two passes over a batch: for the old log-probabilities, and for the loss"
    folder, trainer = watched
    for row,batch in zip(read_log(folder), trainer.played):
        tokens = sum(len(e.prompt_ids)+len(e.ids) for e in batch)
        assert [sum(layer) for layer in row["expert_load"]] == [2*2*tokens]*2
        load_LE = torch.tensor(row["expert_load"])
        assert row["max_violation"] == pytest.approx(max_violation(load_LE).tolist())
        assert row["load_entropy"] == pytest.approx(load_entropy(load_LE).tolist())

def test_the_kl_is_that_of_the_batch(watched, world):
    folder, trainer = watched
    start = tiny_policy(world.tokenizer, num_hidden_layers=2).eval()
    for row,batch in zip(read_log(folder), trainer.played):
        ref_logp_N = sampled_logp(start, batch)
        assert {k: row[k] for k in ("kl_k1", "kl_k3")} == pytest.approx(kl_estimates(torch.full_like(ref_logp_N, -1.0), ref_logp_N))

def test_a_resumed_run_replaces_the_lines_it_plays_again(watched, world):
    folder, trainer = watched
    before = read_log(folder)
    monitor = Monitor(folder, reference=tiny_policy(world.tokenizer, num_hidden_layers=2).eval())
    again = Watched(folder/"trl", monitor, 6, world)
    again.train(resume_from_checkpoint=str(folder/"trl/checkpoint-2"))
    after = read_log(folder)
    assert [row["step"] for row in after] == [0, 1, 2] and len(again.played) == 2
    assert after[0] == before[0] and after[1]["expert_load"] == before[1]["expert_load"]
