"PPO: what the critic sees and when it learns, the three safeguards, credit, and resuming."
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import TrainerCallback

from agentrl_cookbook.algo.advantage import whiten
from agentrl_cookbook.algo.gae import at_last_token, gae, value_loss
from agentrl_cookbook.loop import train as train_module
from agentrl_cookbook.loop.ppo import PPOTrainer, add_critic, explained_variance, train_ppo
from agentrl_cookbook.loop.rollout import rollout
from agentrl_cookbook.policy.sft import last_checkpoint
from agentrl_cookbook.policy.tiny import tiny_policy, trace_texts, train_tokenizer
from agentrl_cookbook.reward.verifier import Score
from agentrl_cookbook.task.env import Environment
from agentrl_cookbook.task.graph import graph
from agentrl_cookbook.task.synth import sample_tasks, solve
from agentrl_cookbook.task.world import company

pytestmark = pytest.mark.usefixtures("one_thread")

def coin(model, tokenizer, environments, tasks, seeds, **options):
    "Rollouts with rewards and lengths that depend on the seed of the episode alone, so that every batch has a signal"
    episodes = rollout(model, tokenizer, environments, tasks, seeds, **options)
    for e,s in zip(episodes, seeds):
        r = Random(s)
        e.score,n = Score(float(r.random() < .5), "right", ""),r.randrange(8, 48)
        e.ids,e.mask,e.logp = e.ids[:n],e.mask[:n],e.logp[:n]
    return episodes

def weights(model): return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()

class Spy(TrainerCallback):
    "Notes the policy and the bonus at each step; ends the process, as far as training can tell, after some steps"
    def __init__(self, at=None): self.at,self.played,self.bonus,self.norms,self.gradients = at,0,[],[],[]
    def record(self, episodes): self.played += 1
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.bonus.append(self.trainer.entropy_coef)
        own = [p.grad for n,p in model.named_parameters() if not n.startswith("critic")]
        self.gradients.append(max(0 if g is None else g.abs().max().item() for g in own))
        layers = [*model.model.layers, model.critic]
        self.norms.append([torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item() for layer in layers])
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at: raise KeyboardInterrupt

@pytest.fixture(scope="module")
def ppo(tmp_path_factory):
    "Trains an untrained policy by PPO; returns it, its critic and what was noted"
    folder = tmp_path_factory.mktemp("ppo")
    database = company(folder/"company.db")
    tasks = sample_tasks(graph(database), 4, {1: 1}, seed=0, split="rl")
    tokenizer = train_tokenizer(trace_texts([solve(t, Environment(database, {}, 8)) for t in tasks]))
    environments = [Environment(database, {}, 8) for _ in range(8)]
    def run(folder=None, at=None, **options):
        spy,saving,start = Spy(at),{} if folder else dict(save_strategy="no"),PPOTrainer.__init__
        def noted(self, *args, **kwargs):
            start(self, *args, **kwargs)
            spy.trainer = self
        run.model = tiny_policy(tokenizer, seed=0)
        with pytest.MonkeyPatch.context() as m:
            m.setattr(train_module, "rollout", coin)
            m.setattr(PPOTrainer, "__init__", noted)
            policy,critic = train_ppo(
                run.model, tokenizer, tasks, environments, folder or tmp_path_factory.mktemp("run"),
                monitor=spy, **dict(updates=2, groups=2, group_size=4, steps_per_update=2, max_tokens=48, max_turn_tokens=48,
                                    lr=3e-3, warmup=0, critic_warmup=0) | saving | options)
        return policy,critic,spy
    run.start = weights(tiny_policy(tokenizer, seed=0))
    return run

@pytest.fixture(scope="module")
def plain(ppo): return ppo()

@pytest.fixture
def seeing(plain):
    "A trainer whose policy has a critic with random weights, and a batch of prompts and completions"
    trainer = plain[2].trainer
    policy = add_critic(trainer.accelerator.unwrap_model(trainer.model)).eval()
    torch.nn.init.normal_(policy.critic.weight, generator=torch.Generator().manual_seed(0))
    ids_BT = torch.randint(10, 200, (5, 12), generator=torch.Generator().manual_seed(1))
    mask_BT = torch.ones_like(ids_BT)
    for row,(left,right) in enumerate([(0, 0), (2, 5), (1, 3), (0, 6), (3, 1)]):
        mask_BT[row, :left] = 0
        mask_BT[row, 12-right:] = 0
    yield trainer,policy,ids_BT*mask_BT,mask_BT
    del policy.critic

def values(seeing, ids_BT, keep=8):
    trainer,policy,_,mask_BT = seeing
    with torch.no_grad(): trainer._get_per_token_logps_and_entropies(policy, ids_BT, mask_BT, keep)
    return trainer.value_BT


# ---- The critic ----

def test_a_critic_starts_at_zero_and_leaves_at_the_end(ppo, plain):
    policy,critic,_ = plain
    assert not hasattr(policy, "critic") and not [n for n,_ in policy.named_parameters() if "critic" in n]
    assert critic.weight.abs().max() > 0 and critic.weight.shape == (1, policy.config.hidden_size)
    assert all((p == 0).all() for p in add_critic(policy).critic.parameters())
    del policy.critic

def test_the_value_before_a_token_sees_only_earlier_tokens(seeing):
    ids_BT,mask_BT = seeing[2:]
    before = values(seeing, ids_BT)
    assert before.abs().max() > 1e-3
    for t in (0, 3, 7):  # of the completion, which begins at column 4
        other_BT = ids_BT.clone()
        other_BT[:, 4+t:] = torch.where(mask_BT[:, 4+t:] == 1, ids_BT[:, 4+t:]+1, 0)
        after = values(seeing, other_BT)
        assert torch.allclose(after[:, :t+1], before[:, :t+1], atol=1e-4)
        if t < 7: assert (after[0, t+1:]-before[0, t+1:]).abs().min() > 1e-3, "it does see the token once it is written"

def test_values_are_those_of_one_forward_pass(seeing):
    "In parts of similar length or not"
    _,policy,ids_BT,mask_BT = seeing
    position_BT = (mask_BT.cumsum(1)-1).clamp(min=0)
    with torch.no_grad():
        states = policy.model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=position_BT).last_hidden_state
        want = policy.critic(states)[:, 3:-1, 0]
    real = mask_BT[:, 4:].bool()
    assert torch.allclose(values(seeing, ids_BT)[real], want[real], atol=1e-3)

def test_value_loss_by_hand():
    value,old,target = torch.tensor([[.9, .1, .5]], requires_grad=True),torch.tensor([[.5, .1, .5]]),torch.tensor([[1., 1., 0.]])
    loss = value_loss(value, old, target, torch.tensor([[1, 1, 0]]))
    assert loss.item() == pytest.approx(.5*(.3**2+.9**2)/2)
    loss.backward()
    assert torch.allclose(value.grad, torch.tensor([[0., -.45, 0.]])), "none beyond the clip, none where a tool wrote"

@pytest.mark.parametrize("value,want", [([[1., 1.], [0., 0.]], 1), ([[.5, .5], [.5, .5]], 0), ([[0., 0.], [1., 1.]], -3)])
def test_explained_variance(value, want):
    assert explained_variance(torch.tensor(value), torch.tensor([1., 0.]), torch.ones(2, 2)) == pytest.approx(want)

def test_explained_variance_skips_the_tools_and_has_no_opinion_without_a_spread():
    assert explained_variance(torch.tensor([[1., 9.], [0., 7.]]), torch.tensor([1., 0.]), torch.tensor([[1, 0], [1, 0]])) == 1
    assert explained_variance(torch.rand(2, 2), torch.ones(2), torch.ones(2, 2)) == 0


# ---- Credit ----

def test_credit_is_gae_on_a_hand_made_batch(seeing):
    trainer,policy,ids_BT,mask_BT = seeing
    tool_BT = torch.ones(5, 8, dtype=torch.long)
    tool_BT[0, 3:5] = tool_BT[2, 1] = 0
    batch = dict(prompt_ids=ids_BT[:, :4], prompt_mask=mask_BT[:, :4], completion_ids=ids_BT[:, 4:],
                 completion_mask=mask_BT[:, 4:], tool_mask=tool_BT, rewards=torch.tensor([1., 0., 0., 1., 1.]))
    on_BT = mask_BT[:, 4:]*tool_BT
    advantage = trainer.credit(batch)
    value = values(seeing, ids_BT)
    want,returns = gae(at_last_token(batch["rewards"], on_BT), value*on_BT, on_BT, 1.0, trainer.lam)
    assert torch.allclose(advantage, whiten(want, on_BT), atol=1e-5) and torch.allclose(batch["returns"], returns, atol=1e-5)
    assert torch.allclose(batch["values"], value) and (advantage[on_BT == 0] == 0).all()
    last = on_BT[3].nonzero().max()
    assert batch["returns"][3, last] == pytest.approx(1, abs=1e-4), "the last token's return is the reward"


# ---- Safeguards ----

def test_the_warm_up_trains_the_critic_alone(ppo):
    policy,critic,spy = ppo(critic_warmup=4)
    assert torch.equal(weights(policy), ppo.start) and critic.weight.abs().max() > 0
    assert spy.gradients == [0]*4

def test_after_the_warm_up_the_policy_learns(ppo):
    policy,_,spy = ppo(critic_warmup=2)
    assert spy.gradients[:2] == [0, 0] and min(spy.gradients[2:]) > 0
    assert (weights(policy)-ppo.start).abs().max() > 1e-3

@pytest.mark.parametrize("bound", [.01, .05])
def test_layers_are_clipped_one_by_one(ppo, plain, bound):
    assert max(map(max, plain[2].norms)) > .06, "there is something to clip"
    norms = ppo(layer_clip=bound)[2].norms
    assert max(map(max, norms)) <= bound*1.001

def test_the_entropy_bonus_fades(ppo):
    assert ppo(entropy_coef=.1)[2].bonus == pytest.approx([.1, .075, .05, .025])
    assert ppo(entropy_coef=.1, entropy_to=.1)[2].bonus == pytest.approx([.1]*4)

def test_what_is_logged(plain):
    rows = [r for r in plain[2].trainer.state.log_history if "value_loss" in r]
    assert len(rows) == 2 and rows[0]["explained_variance"] == pytest.approx(0, abs=1e-6)
    assert rows[0]["value_loss"] > 0 and "clip_ratio/region_mean" in rows[0]


# ---- Resuming ----

def test_it_goes_on_from_the_last_checkpoint_with_its_critic(ppo, tmp_path):
    options = dict(updates=3, save_every=1)
    policy,critic,_ = ppo(**options)
    with pytest.raises(KeyboardInterrupt): ppo(folder=tmp_path, at=3, **options)
    assert Path(last_checkpoint(tmp_path/"rl")).name == "checkpoint-2"
    for played in (2, 0):  # the second time there is nothing left to play
        resumed,kept,spy = ppo(folder=tmp_path, **options)
        assert spy.played == played and torch.allclose(weights(resumed), weights(policy), atol=1e-5)
        assert torch.allclose(kept.weight, critic.weight, atol=1e-5)

def test_the_critic_leaves_even_after_an_error(ppo):
    with pytest.raises(KeyboardInterrupt): ppo(at=1)
    assert not hasattr(ppo.model, "critic")
