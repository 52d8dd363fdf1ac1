"Decoding, rollouts and both trainers: the same numbers by every way, and only sampled tokens are learned."
import json
from copy import deepcopy
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig,
    Qwen3Config, Qwen3ForCausalLM, Qwen3MoeForCausalLM, TrainerCallback)
from trl import GRPOTrainer

from agentrl_cookbook.algo.objective import cispo_loss
from agentrl_cookbook.loop import rollout as rollout_module, train as train_module
from agentrl_cookbook.loop.decode import decoding, feed, fused_step, next_logits, slot_cache
from agentrl_cookbook.loop.rollout import between_turns, choose, rollout
from agentrl_cookbook.loop.train import AgentTrainer, by_length, keep_mixed, per_episode, train_rl
from agentrl_cookbook.policy import sft as sft_module
from agentrl_cookbook.policy.sft import last_checkpoint, train_sft
from agentrl_cookbook.policy.tiny import encode_traces, tiny_config, tiny_policy, trace_texts, train_tokenizer
from agentrl_cookbook.reward.verifier import Score
from agentrl_cookbook.run import read_log
from agentrl_cookbook.task.env import Environment
from agentrl_cookbook.task.synth import sample_tasks, solve

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- One policy for all: 60 steps on a few tasks, enough to solve them greedily ----

@pytest.fixture(scope="module")
def tasks(g): return sample_tasks(g, 16, {1: .5, 2: .5}, seed=0, split="test")

@pytest.fixture(scope="module")
def traces(database, tasks):
    environment = Environment(database, dict(sql=dict(timeout=.2)))
    return [solve(t, environment, seed=i) for i,t in enumerate(tasks*4)]

@pytest.fixture(scope="module")
def tokenizer(traces): return train_tokenizer(trace_texts(traces))

@pytest.fixture(scope="module")
def rows(tokenizer, traces): return encode_traces(tokenizer, traces)

@pytest.fixture(scope="module")
def trained(tmp_path_factory, tokenizer, rows):
    return train_sft(tiny_policy(tokenizer), tokenizer, rows, tmp_path_factory.mktemp("policy"), steps=60, batch_size=16,
                     save_strategy="no")

@pytest.fixture
def policy(trained): return deepcopy(trained)

def environments(database, n=8, **limits): return [Environment(database, **dict(profile=dict(sql=dict(timeout=.2))) | limits) for _ in range(n)]

def weights(model): return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()

def play(model, tokenizer, database, tasks, n=8, seed=0, **options):
    seeds = [f"{seed}-{i}" for i in range(len(tasks))]
    return rollout(model, tokenizer, environments(database, n), tasks, seeds,
                   generator=torch.Generator().manual_seed(seed), **options)


# ---- Decoding: every way gives the logits of one forward pass ----

SHAPES = dict(
    default={}, top1=dict(num_experts_per_tok=1), top3=dict(num_experts_per_tok=3, num_experts=5),
    raw_weights=dict(norm_topk_prob=False), one_kv_head=dict(num_attention_heads=3, num_key_value_heads=1),
    other=dict(num_attention_heads=6, num_key_value_heads=3, head_dim=16, hidden_size=80, num_hidden_layers=3,
               moe_intermediate_size=24, tie_word_embeddings=False, norm_topk_prob=False, num_experts_per_tok=3,
               rms_norm_eps=1e-3, rope_parameters=dict(rope_type="default", rope_theta=300.)))

def randomized(model, seed=0):
    "All weights random, norms too: weights of 1 would hide a norm left out"
    generator = torch.Generator().manual_seed(seed)
    for name,p in model.named_parameters():
        with torch.no_grad(): p.normal_(float("norm" in name), .15, generator=generator)
    return model.eval()

def ragged(vocab, lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (n,), generator=generator).tolist() for n in lengths]

@torch.no_grad()
def whole(model, ids): return model(input_ids=torch.tensor([ids])).logits[0].float()

def fill(model, cache, rows):
    "Feed all but the last token of each sequence"
    width = max(map(len, rows))-1
    ids = torch.tensor([r[:-1]+[0]*(width+1-len(r)) for r in rows])
    feed(model, cache, torch.arange(len(rows)), ids, torch.zeros(len(rows), dtype=torch.long))

def steps(model, way, prompts, more):
    "Logits of each of `more` steps after prompts of different lengths, (steps, S, V), for all slots at once"
    cache = slot_cache(model, len(prompts), max(map(len, prompts))+len(more[0]))
    fill(model, cache, prompts)
    step,position_S,found = way(model, cache),torch.tensor([len(p)-1 for p in prompts]),[]
    for ids_S in torch.tensor([[p[-1] for p in prompts], *zip(*more)][:-1]):
        found.append(step(ids_S, position_S))
        position_S = position_S+1
    return torch.stack(found)

def by_feed(model, cache):
    rows = torch.arange(cache.layers[0].keys.shape[0])
    return lambda ids_S,position_S: feed(model, cache, rows, ids_S[:, None], position_S)

def check_steps(model, ways):
    prompts,more = ragged(model.config.vocab_size, [3, 9, 1, 6]),ragged(model.config.vocab_size, [7]*4, seed=2)
    want = torch.stack([whole(model, p+m)[len(p)-1:-1] for p,m in zip(prompts, more)], 1)
    assert want.std() > .3, "logits that hardly differ show nothing"
    for way in ways: assert torch.allclose(steps(model, way, prompts, more), want, atol=1e-4)

@pytest.mark.parametrize("shape", SHAPES)
def test_fused_step_and_feed_equal_a_forward_pass(shape):
    model = randomized(Qwen3MoeForCausalLM(tiny_config(90, **SHAPES[shape])))
    check_steps(model, (fused_step, by_feed, next_logits))

DENSE = dict(vocab_size=90, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)

@pytest.mark.parametrize("make", [lambda: Qwen3ForCausalLM(Qwen3Config(**DENSE, head_dim=24)),
                                  lambda: LlamaForCausalLM(LlamaConfig(**DENSE)),
                                  lambda: Qwen3MoeForCausalLM(tiny_config(90, attention_bias=True)),
                                  lambda: Qwen3MoeForCausalLM(tiny_config(90, mlp_only_layers=[0]))],
                         ids=["qwen3", "llama", "moe_with_bias", "moe_with_a_dense_layer"])
def test_models_without_a_fused_step_decode_by_feed(make):
    check_steps(randomized(make()), (by_feed, next_logits))

def test_the_fused_step_reads_the_weights_of_now(policy):
    before = steps(policy, next_logits, [[5, 6]], [[7]])
    with torch.no_grad(): policy.model.layers[0].mlp.experts.down_proj *= 2
    assert not torch.allclose(steps(policy, next_logits, [[5, 6]], [[7]]), before, atol=1e-2)

def test_a_slot_is_used_again_without_a_trace_of_the_last_sequence(trained):
    cache = slot_cache(trained, 2, 12)
    first,second = ragged(trained.config.vocab_size, [10, 4])
    for ids in (first, second): fill(trained, cache, [ids, ids])
    got = fused_step(trained, cache)(torch.tensor([second[-1]]*2), torch.tensor([3, 3]))
    assert torch.allclose(got, whole(trained, second)[-1].expand(2, -1), atol=1e-4)

def test_greedy_tokens_are_those_of_generate(trained, tokenizer, g):
    questions = [t.question for t in sample_tasks(g, 64, {1: .4, 2: .4, 3: .2}, seed=5, split="train")]
    chats = [[dict(role="user", content=q)] for q in questions]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
    batch = tokenizer.pad(dict(input_ids=prompts), return_tensors="pt")
    with decoding(trained):
        want = trained.generate(**batch, max_new_tokens=24, do_sample=False)[:, batch["input_ids"].shape[1]:].tolist()
        cache = slot_cache(trained, 64, max(map(len, prompts))+24)
        fill(trained, cache, prompts)
        step,ids_S,position_S,got = next_logits(trained, cache),[p[-1] for p in prompts],[len(p)-1 for p in prompts],[]
        ids_S,position_S = torch.tensor(ids_S),torch.tensor(position_S)
        for _ in range(len(want[0])):
            ids_S,position_S = step(ids_S, position_S).argmax(-1),position_S+1
            got.append(ids_S.tolist())
    def until_end(ids): return ids[:ids.index(tokenizer.eos_token_id)+1] if tokenizer.eos_token_id in ids else ids
    assert [until_end(ids) for ids in map(list, zip(*got))] == [until_end(ids) for ids in want]
    assert len({tuple(until_end(ids)) for ids in want}) > 5

WINDOWED = dict(
    linear=lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"])),
    sliding=lambda: Qwen3ForCausalLM(Qwen3Config(**DENSE, use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    sliding_moe=lambda: Qwen3MoeForCausalLM(tiny_config(60, use_sliding_window=True, sliding_window=4)),
    mistral=lambda: MistralForCausalLM(MistralConfig(**DENSE, sliding_window=4)))

@pytest.mark.parametrize("kind", WINDOWED)
def test_layers_without_full_attention_are_refused(kind):
    model = WINDOWED[kind]()
    with pytest.raises(ValueError, match=f"{type(model).__name__} has layers that are no full attention.*vLLM"):
        slot_cache(model, 2, 8)

@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("routers", [True, False])
def test_decoding_puts_the_model_back_even_after_an_error(policy, training, routers):
    policy.train(training)
    policy.config.output_router_logits = routers
    with pytest.raises(ZeroDivisionError):
        with decoding(policy):
            assert not policy.training and not policy.config.output_router_logits
            1/0
    assert policy.training is training and policy.config.output_router_logits is routers
    assert all(m.training is training for m in policy.modules())


# ---- Sampling ----

def test_choose_samples_the_softmax_at_the_temperature():
    logits_V = torch.tensor([1., 0., -float("inf"), 2., -1.])
    p_V,n = torch.softmax(logits_V/.7, -1),20_000
    token,logp = choose(logits_V.expand(n, -1), .7, torch.Generator().manual_seed(0))
    share_V = torch.bincount(token, minlength=5)/n
    assert (share_V-p_V).abs().max() < 4*(.25/n)**.5 and share_V[2] == 0
    assert torch.allclose(logp, p_V.log()[token], atol=1e-6)

def test_choose_is_greedy_at_temperature_0_and_gives_the_logp_of_temperature_1():
    logits_SV = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    token,logp = choose(logits_SV, 0, None)
    assert torch.equal(token, logits_SV.argmax(-1))
    assert torch.allclose(logp, logits_SV.log_softmax(-1).max(-1).values)


# ---- Rollouts of a real policy ----

@pytest.mark.parametrize("temperature", [1., 1.4, .5])
def test_logp_is_that_of_a_forward_pass_at_the_temperature(trained, tokenizer, database, tasks, temperature):
    episodes = play(trained, tokenizer, database, tasks[:8], n=5, temperature=temperature, max_tokens=90)
    for e in episodes:
        assert len(e.ids) == len(e.mask) == len(e.logp) <= 90 and set(e.mask) <= {0, 1}
        want_TV = (whole(trained, e.prompt_ids+e.ids)/temperature).log_softmax(-1)[len(e.prompt_ids)-1:-1]
        want_T = want_TV.gather(1, torch.tensor(e.ids)[:, None])[:, 0]*torch.tensor(e.mask)
        assert torch.allclose(torch.tensor(e.logp), want_T, atol=1e-4)
    assert sum(m == 0 for e in episodes for m in e.mask) > 5, "tool results are part of it"

def told(episodes): return [(e.ids, e.mask, e.calls, e.answer, e.observed, e.turns, e.score) for e in episodes]

@pytest.mark.parametrize("n", [1, 3, 40])
def test_greedy_episodes_do_not_depend_on_the_number_of_slots(trained, tokenizer, database, tasks, n):
    ended = []
    episodes = play(trained, tokenizer, database, tasks, n=n, temperature=0, on_end=ended.append)
    assert [e.task for e in episodes] == tasks
    assert [e.prompt_ids for e in episodes] == [tokenizer.apply_chat_template(
        [dict(role="user", content=t.question)], add_generation_prompt=True, return_dict=True)["input_ids"] for t in tasks]
    assert sorted(map(id, ended)) == sorted(map(id, episodes))
    want = play(trained, tokenizer, database, tasks, n=16, temperature=0)
    assert told(episodes) == told(want)
    assert [e.logp for e in episodes] == [pytest.approx(e.logp, abs=1e-4) for e in want]

def test_the_policy_solves_what_it_was_shown_and_meets_time_outs(trained, tokenizer, database, tasks):
    episodes = play(trained, tokenizer, database, tasks, temperature=0)
    assert sum(e.success for e in episodes) >= 13 and sum(e.n_timeouts for e in episodes) >= 2
    won = [e for e in episodes if e.success and e.n_timeouts]
    assert won and all(e.turns == e.task.hops+e.n_timeouts+1 == len(e.observed)+1 for e in won)

def test_the_same_generator_gives_the_same_episodes(trained, tokenizer, database, tasks):
    a,b,c = (told(play(trained, tokenizer, database, tasks[:6], seed=s, max_tokens=60)) for s in (3, 3, 4))
    assert a == b and a != c


# ---- Rollouts of a policy that writes what it is told ----

@pytest.fixture
def scripted(monkeypatch, tokenizer):
    "Makes the policy in slot r write `scripts[r]`, a turn after each generation prompt"
    begin,end = tokenizer.convert_tokens_to_ids("<|assistant|>"),tokenizer.eos_token_id
    def write(*scripts):
        def fake(model, cache):
            left,now = [list(s) for s in scripts],[[] for _ in scripts]
            def step(ids_S, position_S):
                logits_SV = torch.zeros(len(scripts), len(tokenizer))
                for r,token in enumerate(ids_S.tolist()):
                    if token == begin: now[r] = tokenizer.encode(left[r].pop(0), add_special_tokens=False)+[end]
                    if now[r]: logits_SV[r, now[r].pop(0)] = 50.
                return logits_SV
            return step
        monkeypatch.setattr(rollout_module, "next_logits", fake)
    return write

def called(name, **arguments): return f"<tool_call>{json.dumps(dict(name=name, arguments=arguments))}</tool_call>"

def play_scripts(scripted, trained, tokenizer, database, tasks, scripts, max_calls=12, **options):
    scripted(*scripts)
    return rollout(trained, tokenizer, environments(database, len(scripts), profile={}, max_calls=max_calls), tasks,
                   list(range(len(scripts))), **dict(max_tokens=600, max_turn_tokens=600) | options)

def solution(task): return [called("sql", query=q) for q in task.queries]+[task.answer]

BAD = dict(
    cut_json=('<tool_call>{"name": "sql", "arguments": {"query"</tool_call>', "?", "malformed"),
    no_end=('<tool_call>{"name": "sql"', "?", "malformed"),
    empty=("<tool_call></tool_call>", "?", "malformed"),
    no_object=("<tool_call>[1, 2]</tool_call>", "?", "malformed"),
    too_deep=("<tool_call>"+"["*150+"</tool_call>", "?", "malformed"),
    unknown=(called("mail", to="x"), "?", "unknown_tool"),
    reset=(called("reset", seed="1"), "?", "unknown_tool"),
    other_argument=(called("sql", q="SELECT 1"), "sql", "argument"),
    no_argument=(called("sql"), "sql", "argument"),
    number=(called("sql", query=3), "sql", "argument"),
    surrogate_argument=('<tool_call>{"name": "sql", "arguments": {"\\ud800": "x"}}</tool_call>', "sql", "argument"),
    bad_sql=(called("sql", query="SELEC 1"), "sql", "sql"),
    surrogate_sql=('<tool_call>{"name": "sql", "arguments": {"query": "SELECT \\ud800"}}</tool_call>', "sql", "sql"),
    write=(called("sql", query="CREATE TABLE t (c)"), "sql", "denied"),
    two_calls=(2*called("sql", query="SELECT 1"), "?", "malformed"),
    huge=(called("sql", query="SELECT hex(zeroblob(3000))"), "sql", "too_large"))

def test_bad_calls_become_errors_that_the_policy_reads(scripted, trained, tokenizer, database, tasks):
    todo = [tasks[i % 16] for i in range(len(BAD))]
    scripts = [[text, *solution(t)] for (text,*_),t in zip(BAD.values(), todo)]
    episodes = play_scripts(scripted, trained, tokenizer, database, todo, scripts, stop_on_illegal=False)
    for e,(text,*bad) in zip(episodes, BAD.values()):
        assert e.calls == [tuple(bad)]+[("sql", "ok")]*e.task.hops
        assert e.turns == e.task.hops+2 and e.answer == e.task.answer
        assert e.score.kind == "illegal_call" and not e.success
        error = json.loads(e.observed[0])
        assert list(error) == ["ok", "kind", "error"] and error["kind"] == bad[1]
        shown = tokenizer.decode([i for i,m in zip(e.ids, e.mask) if not m])
        assert shown == "".join(f"<|tool|>{o}<|end|><|assistant|>" for o in e.observed)

def test_an_illegal_call_ends_the_episode_unless_told_otherwise(scripted, trained, tokenizer, database, tasks):
    todo = [tasks[i % 16] for i in range(len(BAD))]
    scripts = [[text, *solution(t)] for (text,*_),t in zip(BAD.values(), todo)]
    episodes = play_scripts(scripted, trained, tokenizer, database, todo, scripts)
    for e,(text,*bad) in zip(episodes, BAD.values()):
        assert e.calls == [tuple(bad)] and e.turns == 1 and e.answer is None and e.score.kind == "illegal_call"
        assert tokenizer.decode(e.ids) == text+"<|end|>" and set(e.mask) == {1} and len(e.observed) == 1

def test_one_bad_episode_does_not_touch_the_others(scripted, trained, tokenizer, database, tasks):
    scripts = [solution(tasks[0]), ["<tool_call>"], solution(tasks[2]), ["", *solution(tasks[3])]]
    episodes = play_scripts(scripted, trained, tokenizer, database, tasks[:4], scripts)
    assert [e.score.kind for e in episodes] == ["right", "illegal_call", "right", "no_answer"]

@pytest.mark.parametrize("stop", [True, False])
def test_the_budget_of_calls_ends_an_episode(scripted, trained, tokenizer, database, tasks, stop):
    script = [called("sql", query="SELECT 1")]*5
    [e] = play_scripts(scripted, trained, tokenizer, database, tasks[:1], [script], max_calls=2, stop_on_illegal=stop)
    assert e.calls == [("sql", "ok")]*2+[("sql", "budget")] and e.answer is None and e.turns == 3

def test_token_ids_and_mask_are_those_of_the_trace(scripted, trained, tokenizer, database, tasks):
    episodes = play_scripts(scripted, trained, tokenizer, database, tasks, [solution(t) for t in tasks])
    for e,row in zip(episodes, encode_traces(tokenizer, [solve(t, Environment(database)) for t in tasks])):
        assert e.success and e.prompt_ids+e.ids == row["input_ids"]
        assert [0]*len(e.prompt_ids)+e.mask == [int(l != -100) for l in row["labels"]]

def test_a_right_answer_that_was_not_read_earns_nothing(scripted, trained, tokenizer, database, tasks):
    [e] = play_scripts(scripted, trained, tokenizer, database, tasks[:1], [[tasks[0].answer]])
    assert e.answer == tasks[0].answer and e.score.kind == "not_observed"

def test_max_tokens_cuts_an_episode(scripted, trained, tokenizer, database, tasks):
    script = solution(tasks[0])
    [full] = play_scripts(scripted, trained, tokenizer, database, tasks[:1], [script])
    call,n = full.mask.index(0),len(full.ids)
    for limit,length in [(1, 1), (call-1, call-1), (call, call), (call+3, call), (n-1, n-1), (n, n)]:
        [e] = play_scripts(scripted, trained, tokenizer, database, tasks[:1], [script], max_tokens=limit)
        assert e.ids == full.ids[:length] and e.mask == full.mask[:length] and len(e.logp) == length
        if limit < n: assert e.answer is None and e.score.kind == "no_answer" and e.score.reward == 0
    assert e.success, "at exactly its length the episode is whole"

@pytest.mark.parametrize("limit", [1, 7])
def test_max_turn_tokens_cuts_a_long_message_and_leaves_short_ones(scripted, trained, tokenizer, database, tasks, limit):
    todo,scripts = tasks[:2],[[called("sql", query="SELECT 1")]*3+["x"], ["y"]]
    [full,_] = play_scripts(scripted, trained, tokenizer, database, todo, scripts)
    longest = full.mask.index(0)
    [e,short] = play_scripts(scripted, trained, tokenizer, database, todo, scripts, max_turn_tokens=longest)
    assert e.ids == full.ids and e.turns == 4, "the limit is for each message, and the whole episode is longer"
    [e,short] = play_scripts(scripted, trained, tokenizer, database, todo, scripts, max_turn_tokens=longest-limit)
    assert e.ids == full.ids[:longest-limit] and e.answer is None and e.turns == 0 and e.score.kind == "no_answer"
    assert short.answer == "y"

CHATML = """\
{%- for m in messages -%}{%- if m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' ~ m.content ~ '\n</tool_response><|im_end|>\n' -}}
{%- else -%}{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""

def test_between_turns_is_what_the_template_writes(tokenizer):
    assert between_turns(tokenizer) == ("<|tool|>", "<|end|><|assistant|>")
    other = deepcopy(tokenizer)
    other.chat_template,other.eos_token = CHATML,"<|im_end|>"
    before,after = between_turns(other)
    assert before == "\n<|im_start|>user\n<tool_response>\n"
    assert after == "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    chat = [dict(role="user", content="q"), dict(role="assistant", content="call"), dict(role="tool", content="result")]
    start,whole = (other.apply_chat_template(c, add_generation_prompt=True, tokenize=False) for c in (chat[:1], chat))
    assert start+"call"+other.eos_token+before+"result"+after == whole

@pytest.mark.parametrize("hides", ["{%- if m.role != 'tool' -%}", "{%- if m.role == 'tool' -%}",
                                   "{{- raise_exception('roles alternate') -}}{%- if true -%}"])
def test_a_template_that_hides_a_role_is_refused(tokenizer, hides):
    other = deepcopy(tokenizer)
    other.chat_template = "{%- for m in messages -%}"+hides+"{{- m.content -}}{%- endif -%}{%- endfor -%}"
    with pytest.raises(ValueError, match="does not show a message of role `tool`"): between_turns(other)


# ---- The trainer, looked at from inside ----

class Spy(AgentTrainer):
    "Keeps what the real trainer computes"
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Spy.last,self.batches,self.rewards,self.ratios = self,[],[],[]

    def _calculate_rewards(self, *args):
        self.rewards.append(super()._calculate_rewards(*args))
        return self.rewards[-1]

    def _generate_and_score_completions(self, inputs):
        self.batches.append(super()._generate_and_score_completions(inputs))
        return self.batches[-1]

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        out = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if out[0] is not None:
            self.logp = out[0]
            if self.logp.requires_grad: self.logp.retain_grad()
        return out

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if "old_per_token_logps" in inputs:
            self.ratios.append((self.logp.detach()-inputs["old_per_token_logps"])[sampled(inputs)].exp())
        return loss

class Reinforce(Spy):
    "What TRL does when it has no old log-probabilities: the ratio is 1"
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        self.batches[-1] = {k: v for k,v in batch.items() if k != "old_per_token_logps"}
        return self.batches[-1]

def sampled(batch): return (batch["completion_mask"]*batch["tool_mask"]).bool()

def coin(model, tokenizer, environments, tasks, seeds, **options):
    "Rollouts with rewards that depend on the seed of the episode alone, so that every batch has a signal"
    episodes = rollout(model, tokenizer, environments, tasks, seeds, **options)
    for e,s in zip(episodes, seeds): e.score = Score(float(Random(s).random() < .5), "right", "")
    return episodes

@pytest.fixture(scope="module")
def rl(trained, tokenizer, database, tasks, tmp_path_factory):
    "Trains a copy of the policy by RL on a few episodes; returns it and the trainer"
    def run(trainer=Spy, folder=None, play=coin, **options):
        with pytest.MonkeyPatch.context() as m:
            m.setattr(train_module, "rollout", play)
            saving = {} if folder else dict(save_strategy="no")
            model = train_rl(deepcopy(trained), tokenizer, tasks, environments(database), folder or tmp_path_factory.mktemp("rl"),
                             **dict(updates=2, groups=2, group_size=4, max_tokens=64, lr=3e-3, warmup=0,
                                    trainer_class=trainer) | saving | options)
        return model,Spy.last
    return run

@pytest.fixture(scope="module")
def cispo(rl): return rl()

@pytest.fixture(scope="module")
def still(rl):
    "A trainer that has not moved the policy, and its batch of 16 episodes"
    trainer = rl(updates=1, groups=4, lr=0.)[1]
    return trainer,trainer.batches[0]

def loss_and_gradient(trainer, batch):
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return loss.item(),torch.cat([p.grad.flatten() for p in trainer.model.parameters()])

def same(a, b): return a[0] == b[0] and torch.equal(a[1], b[1])

def test_no_gradient_from_tool_tokens(still):
    trainer,batch = still
    batch = batch | dict(advantages=batch["advantages"][:, None].expand_as(batch["completion_ids"]).clone())
    before,on_BT = loss_and_gradient(trainer, batch),sampled(batch)
    assert before[1].abs().max() > 1e-3
    grad_BT = trainer.logp.grad
    assert (grad_BT[~on_BT] == 0).all() and (grad_BT[on_BT & (batch["advantages"] != 0)] != 0).all()
    tool_BT = batch["completion_mask"].bool() & ~on_BT
    assert tool_BT.sum() > 50
    noise_BT = torch.randn(on_BT.shape, generator=torch.Generator().manual_seed(0))
    for name in "old_per_token_logps","advantages":
        assert same(loss_and_gradient(trainer, batch | {name: batch[name]+5*noise_BT*~on_BT}), before)
        moved = loss_and_gradient(trainer, batch | {name: batch[name]+noise_BT*on_BT})
        assert not np.isclose(moved[0], before[0]) and not torch.allclose(moved[1], before[1], atol=1e-4)

def test_the_loss_is_that_of_the_objective_chapter(still):
    trainer,batch = still
    loss,_ = loss_and_gradient(trainer, batch)
    advantage_BT = batch["advantages"][:, None].expand_as(trainer.logp)
    want = cispo_loss(trainer.logp, batch["old_per_token_logps"], advantage_BT, sampled(batch).float())
    assert loss == pytest.approx(2*want.item(), abs=1e-5), "two steps share the batch, so each step's loss has half the tokens"

def test_the_batch_holds_what_the_rollout_sampled(still):
    trainer,batch = still
    on_BT,reward_B = sampled(batch),trainer.rewards[0][:, 0]
    assert (batch["old_per_token_logps"][~on_BT] == 0).all() and (batch["old_per_token_logps"][on_BT] < 0).any()
    assert reward_B.tolist() == [float(Random(f"0-0-{i}").random() < .5) for i in range(16)]
    sign_B = (reward_B.view(4, 4)-reward_B.view(4, 4).mean(1, keepdim=True)).flatten().sign()
    assert torch.equal(batch["advantages"].sign(), sign_B)
    weight_B = (batch["advantages"][:, None]*on_BT).sum(1).abs()/on_BT.sum()
    spread_P = reward_B.view(4, 4).std(1)
    assert weight_B.sum().item() == pytest.approx(
        ((reward_B.view(4, 4)-reward_B.view(4, 4).mean(1, keepdim=True)).abs()/(spread_P[:, None]+1e-4)).sum().item()
        / (sign_B != 0).sum().item(), rel=1e-4)

@pytest.mark.parametrize("temperature", [1., 1.4])
def test_before_the_first_step_every_ratio_is_1(rl, cispo, temperature):
    trainer = cispo[1] if temperature == 1 else rl(updates=1, temperature=temperature)[1]
    first,second = trainer.ratios[:2]
    assert torch.allclose(first, torch.ones_like(first), atol=1e-4)
    assert (second-1).abs().max() > .1 and len(trainer.ratios) == 2*len(trainer.batches)

def test_objectives_differ_once_a_batch_is_used_twice(rl, cispo):
    ends = [weights(cispo[0]), weights(rl(loss_type="dapo", cap=.28)[0]), weights(rl(Reinforce)[0])]
    for i in range(3):
        for j in range(i): assert (ends[i]-ends[j]).abs().max() > 1e-3

def test_objectives_agree_when_a_batch_is_used_once(rl, trained):
    with pytest.MonkeyPatch.context() as m:  # Adam would turn a difference of 1e-9 in a gradient of 1e-9 into a step
        m.setattr(train_module, "make_optimizer", lambda model, lr, muon_lr: torch.optim.SGD(model.parameters(), lr=lr))
        one = dict(steps_per_update=1, lr=.1, updates=1)
        a,b,c = (weights(rl(t, loss_type=l, cap=cap, **one)[0]) for t,l,cap in
                 [(Spy, "cispo", 5.), (Spy, "dapo", .28), (Reinforce, "cispo", 5.)])
    assert torch.allclose(a, b, atol=1e-6) and torch.allclose(a, c, atol=1e-5)
    assert (a-weights(trained)).abs().max() > 1e-3

def test_by_length_equals_one_call(still):
    trainer,batch = still
    ids_BT = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask_BT = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    keep,on_BT = batch["completion_ids"].shape[1],batch["completion_mask"].bool()
    assert len(set(on_BT.sum(1).tolist())) > 3, "lengths differ"
    weight_BT = torch.randn(on_BT.shape, generator=torch.Generator().manual_seed(0))*on_BT
    found = []
    for way in (AgentTrainer, GRPOTrainer):
        trainer.model.zero_grad()
        logp_BT,entropy_BT,aux = way._get_per_token_logps_and_entropies(
            trainer, trainer.model, ids_BT, mask_BT, keep, compute_entropy=True)
        (logp_BT*weight_BT).sum().backward()
        found.append((logp_BT[on_BT], entropy_BT[on_BT], torch.cat([p.grad.flatten() for p in trainer.model.parameters()])))
        assert logp_BT.shape == entropy_BT.shape == on_BT.shape and aux is None
    (logp,entropy,gradient),(logp_1,entropy_1,gradient_1) = found
    assert torch.allclose(logp, logp_1, atol=1e-5) and torch.allclose(entropy, entropy_1, atol=1e-5)
    assert gradient_1.abs().max() > 1 and (gradient-gradient_1).abs().max() < 1e-5*gradient_1.abs().max()

@pytest.mark.parametrize("parts", [1, 2, 4, 9])
def test_by_length_cuts_only_padding(parts):
    r,keep = np.random.default_rng(parts),6
    lengths = [(int(p), int(c)) for p,c in zip(r.integers(1, 5, 7), r.integers(1, keep+1, 7))]
    mask_BT = torch.tensor([[0]*(4-p)+[1]*(p+c)+[0]*(keep-c) for p,c in lengths])
    ids_BT,seen = mask_BT*torch.arange(1, mask_BT.numel()+1).view_as(mask_BT),[]
    def forward(ids, mask, n):
        seen.append(ids.numel())
        assert torch.equal(mask, (ids > 0).long())
        return (ids*2.)[:, -n:],None
    doubled_BT,none = by_length(forward, ids_BT, mask_BT, keep, parts)
    assert torch.equal(doubled_BT, 2.*ids_BT[:, -keep:]) and none is None
    assert len(seen) <= parts and sum(seen) <= ids_BT.numel() and (parts == 1 or sum(seen) < ids_BT.numel())

def test_per_episode_by_hand():
    mask_BT = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]])
    got = per_episode(torch.tensor([1., -2., 0., 0.]), mask_BT)
    assert torch.allclose(got, torch.tensor([8/(2*2), -2*8/(4*2), 0., 0.]))
    assert torch.equal(per_episode(torch.zeros(4), mask_BT), torch.zeros(4))
    empty = per_episode(torch.tensor([1., 1.]), torch.tensor([[0, 0], [1, 1]]))
    assert torch.allclose(empty, torch.tensor([1.5, .75])), "an episode without tokens has length 1, not 0"

def test_keep_mixed():
    reward_PG = np.array([[1, 1], [0, 1], [0, 0], [1, 0], [1, 1]])
    assert [keep_mixed(reward_PG, k) for k in (1, 2, 3, 5)] == [[1], [1, 3], [1, 3, 0], [1, 3, 0, 2, 4]]
    assert keep_mixed(reward_PG[[0, 2]], 1) == [0]

def test_more_groups_are_played_and_those_with_a_signal_kept(rl):
    met = []
    def play(model, tokenizer, environments, tasks, seeds, **options):
        episodes = rollout(model, tokenizer, environments, tasks, seeds, **options)
        for i,e in enumerate(episodes): e.score = Score([0., 1.][i//2 >= 2 and i % 2], "right", "")
        met.append(episodes)
        return episodes
    trainer = rl(play=play, updates=1, groups=2, group_size=2, played=2)[1]
    [episodes],[batch] = met,trainer.batches
    assert len(episodes) == 8 and len({e.task.id for e in episodes}) == 4
    assert trainer.rewards[0][:, 0].tolist() == [0, 1, 0, 1] and (batch["advantages"] != 0).all()
    for row,mask,e in zip(batch["completion_ids"], batch["completion_mask"].bool(), episodes[4:]):
        assert row[mask].tolist() == e.ids

def test_the_control_deals_the_same_rewards_to_other_episodes(rl, still):
    dealt = rl(updates=1, groups=4, lr=0., shuffle_rewards=True)[1].rewards[0][:, 0].tolist()
    earned = still[0].rewards[0][:, 0].tolist()
    assert dealt != earned and sorted(dealt) == sorted(earned)

def test_another_reward_is_paid_for_all_episodes_of_an_update(rl):
    played = []
    def place(episodes):
        played.append(episodes)
        return [i/8 for i in range(len(episodes))]
    trainer = rl(updates=1, reward=place)[1]
    assert trainer.rewards[0][:, 0].tolist() == [i/8 for i in range(8)]
    assert trainer.batches[0]["completion_ids"].shape[0] == len(played[0]) == 8

@pytest.mark.parametrize("paid", [[0.]*7, [[0.]]*8, [0.]*7+[float("nan")]])
def test_a_reward_that_is_not_a_number_for_each_episode_is_refused(rl, paid):
    with pytest.raises(ValueError, match="a finite number for each of 8 episodes"): rl(updates=1, reward=lambda episodes: paid)

def test_a_cap_that_weighs_nothing_is_refused(rl):
    with pytest.raises(ValueError, match=r"cap=0.28 .*CISPO needs a cap above 1"): rl(cap=.28)

def test_a_batch_that_does_not_split_into_equal_steps_is_refused(rl):
    "TRL would train on the largest part that does, and say nothing"
    with pytest.raises(ValueError, match="steps_per_update=4"): rl(groups=3, group_size=2, steps_per_update=4)


# ---- Determinism and resuming ----

def test_the_same_seed_gives_the_same_weights(rl, cispo):
    assert torch.equal(weights(rl()[0]), weights(cispo[0]))

def test_another_seed_gives_other_weights(rl, cispo):
    assert (weights(rl(seed=1)[0])-weights(cispo[0])).abs().max() > 1e-3

class Interrupt(TrainerCallback):
    "Ends the process, as far as training can tell, after some optimizer steps"
    def __init__(self, at): self.at,self.batches = at,0
    def record(self, episodes): self.batches += 1
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at: raise KeyboardInterrupt

def test_rl_goes_on_from_the_last_checkpoint(rl, tmp_path):
    options = dict(updates=4, muon_lr=.005, save_every=2)
    straight = weights(rl(**options)[0])
    with pytest.raises(KeyboardInterrupt): rl(folder=tmp_path, monitor=Interrupt(5), **options)
    assert Path(last_checkpoint(tmp_path/"rl")).name == "checkpoint-4"
    rest = Interrupt(None)
    resumed = weights(rl(folder=tmp_path, monitor=rest, **options)[0])
    assert rest.batches == 2 and torch.allclose(resumed, straight, atol=1e-6)
    again = Interrupt(None)
    assert torch.allclose(weights(rl(folder=tmp_path, monitor=again, **options)[0]), straight, atol=1e-6)
    assert again.batches == 0, "a finished stage plays nothing"


# ---- SFT ----

def sft(tokenizer, rows, folder, model={}, **options):
    return train_sft(tiny_policy(tokenizer, **model), tokenizer, rows, folder,
                     **dict(steps=6, batch_size=4, save_every=2, logging_steps=1) | options)

def interrupted_sft(tokenizer, rows, folder, at=5, **options):
    "Leaves checkpoint-4"
    class Stop(sft_module.Progress):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == at: raise KeyboardInterrupt
    with pytest.MonkeyPatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(sft_module, "Progress", Stop)
        sft(tokenizer, rows, folder, **options)
    return Path(last_checkpoint(folder/"sft"))

def test_sft_goes_on_from_the_last_checkpoint(tokenizer, rows, tmp_path):
    straight = weights(sft(tokenizer, rows, tmp_path/"straight"))
    assert interrupted_sft(tokenizer, rows, tmp_path/"cut").name == "checkpoint-4"
    assert torch.allclose(weights(sft(tokenizer, rows, tmp_path/"cut")), straight, atol=1e-6)
    (a,b) = ({l["step"]: l["loss"] for l in read_log(tmp_path/f) if "loss" in l} for f in ("straight", "cut"))
    assert list(a) == [1, 2, 3, 4, 5, 6] and b[6] == pytest.approx(a[6], abs=1e-5)
    lines = len(read_log(tmp_path/"cut"))
    assert torch.allclose(weights(sft(tokenizer, rows, tmp_path/"cut")), straight, atol=1e-6)
    assert not [l for l in read_log(tmp_path/"cut")[lines:] if "loss" in l], "a finished stage makes no step"

@pytest.mark.parametrize("other", [dict(hidden_size=96), dict(num_hidden_layers=3), dict(num_experts=4)], ids=str)
def test_a_checkpoint_of_another_model_is_refused(tokenizer, rows, tmp_path, other):
    checkpoint = interrupted_sft(tokenizer, rows, tmp_path, model=other)
    before = {p: p.read_bytes() for p in checkpoint.rglob("*") if p.is_file()}
    with pytest.raises(RuntimeError, match=f"checkpoint-4 cannot be continued .*another model.*--fresh") as e:
        sft(tokenizer, rows, tmp_path)
    assert str(e.value).startswith(str(checkpoint)) and "\n" not in str(e.value)
    assert before == {p: p.read_bytes() for p in before}

@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "scheduler.pt"])
def test_a_damaged_checkpoint_is_refused(tokenizer, rows, tmp_path, name):
    checkpoint = interrupted_sft(tokenizer, rows, tmp_path)
    (checkpoint/name).write_bytes((checkpoint/name).read_bytes()[:100])
    with pytest.raises(RuntimeError, match="checkpoint-4 cannot be continued .*damaged.*--fresh"):
        sft(tokenizer, rows, tmp_path)

def test_an_error_after_resuming_is_not_blamed_on_the_checkpoint(tokenizer, rows, tmp_path, monkeypatch):
    interrupted_sft(tokenizer, rows, tmp_path)
    class Full(sft_module.Progress):
        def on_step_end(self, *args, **kwargs): raise OSError("No space left on device")
    monkeypatch.setattr(sft_module, "Progress", Full)
    with pytest.raises(OSError, match="^No space left on device$"): sft(tokenizer, rows, tmp_path)

def test_last_checkpoint_is_the_newest_whole_one(tmp_path):
    assert last_checkpoint(tmp_path) is None and last_checkpoint(tmp_path/"none") is None
    for n,state in [(10, '{"global_step": 10}'), (9, '{"global_step": 9}'), (100, None), (20, '{"global_step": 2'),
                    (30, ""), (40, "{}")]:
        (tmp_path/f"checkpoint-{n}").mkdir()
        if state is not None: (tmp_path/f"checkpoint-{n}/trainer_state.json").write_text(state)
    assert last_checkpoint(tmp_path) == str(tmp_path/"checkpoint-10")

def assistant_loss(model, rows):
    "Mean negative log-probability of the tokens that the assistant wrote, by hand"
    with torch.no_grad():
        loss = [-whole(model, r["input_ids"]).log_softmax(-1)[i-1, t]
                for r in rows for i,t in enumerate(r["labels"]) if t != -100]
    return torch.stack(loss).mean().item()

def test_sft_learns_only_what_the_assistant_wrote(tokenizer, rows, tmp_path):
    rows,model = rows[:4],dict(router_aux_loss_coef=0.)
    tail = [dict(input_ids=r["input_ids"]+[7, 8, 9], labels=r["labels"]+[-100]*3) for r in rows]
    learned = [dict(r, labels=r["labels"][:-3]+[7, 8, 9]) for r in tail]
    a,b,c = ([l["loss"] for l in read_log(tmp_path/f) if "loss" in l] for f,data in
             dict(plain=rows, tail=tail, learned=learned).items()
             if sft(tokenizer, data, tmp_path/f, model, steps=3, muon_lr=0, save_strategy="no"))
    assert a[0] == pytest.approx(assistant_loss(tiny_policy(tokenizer), rows), abs=1e-3)
    assert a == pytest.approx(b, abs=1e-3) and abs(a[2]-c[2]) > .01 and a[2] < a[0]
