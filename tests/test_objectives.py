"The compared methods: equal where theory says so, on fresh data, and each with its own weighting and its own log."
from random import Random

import papermill
import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM

from agentrl_cookbook.loop import train as train_module
from agentrl_cookbook.loop.objectives import CAPS, METHODS, AdaptiveKL, Published, train_method
from agentrl_cookbook.loop.rollout import rollout
from agentrl_cookbook.policy.tiny import tiny_policy, trace_texts, train_tokenizer
from agentrl_cookbook.reward.verifier import Score
from agentrl_cookbook.run import load_metrics, results
from agentrl_cookbook.task.env import Environment
from agentrl_cookbook.task.graph import graph
from agentrl_cookbook.task.synth import sample_tasks, solve
from agentrl_cookbook.task.world import company

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST = 48  # tokens of an episode

@pytest.fixture(scope="module")
def world(tmp_path_factory):
    "An untrained policy kept on disk, its tokenizer, tasks, environments"
    folder = tmp_path_factory.mktemp("objectives")
    database = company(folder/"company.db")
    tasks = sample_tasks(graph(database), 4, {1: 1}, seed=0, split="rl")
    environment = Environment(database, {}, 8)
    tokenizer = train_tokenizer(trace_texts([solve(t, environment) for t in tasks]))
    tiny_policy(tokenizer, seed=0, num_hidden_layers=1).save_pretrained(folder/"start")
    return folder/"start",tokenizer,tasks,[Environment(database, {}, 8) for _ in range(8)]

def coin(model, tokenizer, environments, tasks, seeds, **options):
    "Rollouts with rewards and lengths that depend on the seed of the episode alone, so that every batch has a signal"
    episodes = rollout(model, tokenizer, environments, tasks, seeds, **options)
    for e,s in zip(episodes, seeds):
        r = Random(s)
        e.score,n = Score(float(r.random() < .5), "right", ""),r.randrange(8, LONGEST)
        e.ids,e.mask,e.logp = e.ids[:n],e.mask[:n],e.logp[:n]
    return episodes

@pytest.fixture(scope="module")
def train(world, tmp_path_factory):
    "Trains a method; returns its trainer and the gradient of each optimizer step"
    start,tokenizer,tasks,environments = world
    def run(method, steps=1, updates=1, **settings):
        found,norm = [],train_module.AgentTrainer._clip_grad_norm
        def noted(self, model):
            found.append((self, torch.cat([p.grad.flatten() for n,p in model.named_parameters() if "critic" not in n])))
            return norm(self, model)
        with pytest.MonkeyPatch.context() as m:
            m.setattr(train_module, "rollout", coin)
            m.setattr(train_module.AgentTrainer, "_clip_grad_norm", noted)
            train_method(method, AutoModelForCausalLM.from_pretrained(start), tokenizer, tasks, environments,
                         tmp_path_factory.mktemp("run"), steps, **dict(
                             updates=updates, groups=2, group_size=4, max_tokens=LONGEST, max_turn_tokens=LONGEST,
                             lr=3e-3, warmup=0, save_strategy="no") | settings)
        return found[0][0],[g for _,g in found]
    return run

@pytest.fixture(scope="module")
def fresh(train):
    "Trainer and gradient of each method after one step on fresh data"
    return {method: train(method) for method in METHODS if method != "PPO"}

def close(a, b): return torch.allclose(a, b, atol=1e-5*b.abs().max(), rtol=1e-3)


# ---- Fresh data: the ratio is 1 ----

def test_token_means_are_one_method_on_fresh_data(fresh):
    dapo = fresh["DAPO"][1][0]
    assert dapo.abs().max() > 1e-4
    for cap in CAPS[1:]: assert close(fresh[f"CISPO {cap:g}"][1][0], dapo)

def test_a_cap_of_0_2_is_a_fifth_of_it(fresh):
    assert close(5*fresh["CISPO 0.2"][1][0], fresh["DAPO"][1][0])

def test_gspo_is_grpo_on_fresh_data(fresh):
    assert close(fresh["GSPO"][1][0], fresh["GRPO"][1][0])

def test_rloo_is_dr_grpo_up_to_a_factor(fresh):
    "G/(G-1) from the baseline without the episode itself, and no division by the longest episode"
    assert close(fresh["RLOO"][1][0], 4/3*LONGEST*fresh["Dr. GRPO"][1][0])

def test_reinforce_is_dr_grpo_up_to_the_number_of_tokens(fresh):
    a,b = fresh["REINFORCE"][1][0],fresh["Dr. GRPO"][1][0]
    factor = (a@b)/(b@b)
    assert factor > 1 and close(a, factor*b)

def test_penalties_vanish_at_the_start(fresh):
    "The gradient of k3 is 0 where the policy is still its reference"
    assert close(fresh["GRPO + adaptive KL"][1][0], fresh["GRPO"][1][0])
    assert close(fresh["CISPO 5 + KL"][1][0], fresh["CISPO 5"][1][0])

def test_ppo_without_a_critic_is_reinforce_pp(train, fresh):
    "A critic of zeros: the reward on every token, normalised over the batch"
    ppo = train("PPO", critic_warmup=0, value_coef=0.0)[1][0]
    assert close(ppo, fresh["REINFORCE++"][1][0])

def test_what_differs_differs(fresh):
    def direction(name): return torch.nn.functional.normalize(fresh[name][1][0], dim=0)
    for a,b in [("GRPO", "Dr. GRPO"), ("GRPO", "DAPO"), ("DAPO", "REINFORCE++"), ("GRPO", "RLOO")]:
        assert direction(a)@direction(b) < .999, (a, b)


# ---- Old data ----

@pytest.fixture(scope="module")
def old(train): return {m: train(m, steps=4, lr=5e-3) for m in ("GRPO", "GSPO", "RLOO", "CISPO 0.2", "CISPO 5", "REINFORCE")}

def logged(trainer, name): return [row[name] for row in trainer.state.log_history if name in row]

def test_they_part_once_a_batch_serves_more_steps(old):
    last = {m: torch.nn.functional.normalize(grads[-1], dim=0) for m,(_,grads) in old.items()}
    for a,b in [("GRPO", "GSPO"), ("CISPO 5", "CISPO 0.2"), ("CISPO 0.2", "REINFORCE")]: assert last[a]@last[b] < .999

def test_each_logs_what_its_clip_stops(old):
    share = {m: logged(trainer, "clip_ratio/region_mean")[0] for m,(trainer,_) in old.items()}
    assert share["CISPO 0.2"] > .8 > .5 > share["CISPO 5"]
    assert 0 < share["GRPO"] < share["GSPO"] <= 1 and 0 < share["RLOO"] <= 1 and share["REINFORCE"] == 0
    for trainer,_ in old.values(): assert len(logged(trainer, "entropy")) == 1

def test_cispo_counts_what_trl_does_not(old):
    trainer = old["CISPO 0.2"][0]
    assert logged(trainer, "cispo_clip_ratio")[0] < logged(trainer, "clip_ratio/region_mean")[0]

@pytest.mark.parametrize("target,way", [(1e-9, 1), (1e9, -1)])
def test_the_weight_of_the_penalty_follows_the_kl(train, monkeypatch, target, way):
    monkeypatch.setattr(AdaptiveKL, "target", target)
    trainer = train("GRPO + adaptive KL", steps=2, updates=2)[0]
    # four steps; before the first one the KL is 0 and below any target
    assert trainer.beta == pytest.approx(.04*(1-.02)*(1+.02*way)**3)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="no method 'GRPPO': give one of PPO, GRPO"): train_method("GRPPO", *[None]*5)

def test_every_published_method_keeps_its_own_weighting():
    for name,settings in METHODS.items():
        if name != "PPO": assert issubclass(settings.get("trainer_class", Published), Published)


# ---- The published comparison ----

PUBLISHED = [r for r in results("loop/objectives") if len(r["metrics"]["runs"]) > 100]

@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not PUBLISHED, reason="no comparison is published")
def test_a_slice_run_again_agrees_with_what_was_published(tmp_path):
    "GRPO, seed 0, data 4 updates old: the same start, tasks and learning rate"
    record = PUBLISHED[-1]
    [rate] = {s["rate"] for s in record["metrics"]["search"] if (s["method"], s["age"]) == ("GRPO", 4)}
    [then] = [r for r in record["metrics"]["runs"] if (r["method"], r["age"], r["seed"]) == ("GRPO", 4, 0)]
    given = {k: record["params"][k] for k in ("sft_steps", "sft_long", "updates", "n_heldout")}
    papermill.execute_notebook(ROOT/"nbs/loop/objectives.ipynb", tmp_path/"out.ipynb", progress_bar=False, cwd=ROOT, parameters=dict(
        given, methods="GRPO", ages="4", rates=f"{rate:.10f}", seeds=1, out_dir=str(tmp_path)))
    now = load_metrics(tmp_path)
    begun,[run] = record["metrics"]["start"][0],now["runs"]
    assert abs(now["start"][0]["success"]-begun["success"]) < .1 and run["updates"] == then["updates"]
    assert abs(run["success"]-then["success"]) < .1 and run["success"] > begun["success"] and run["kl"] > .01
    was,curve = (r["curves"]["reward_mean"] for r in (then, run))
    assert abs(curve[0]-was[0]) < .1 and abs(sum(curve)-sum(was))/len(was) < .05
