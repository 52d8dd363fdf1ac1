"TRL's own code, run on given tensors, and random batches: what the tests of the algo chapters share"
from collections import defaultdict
from types import SimpleNamespace

import hypothesis.extra.numpy as hnp
import torch
from hypothesis import HealthCheck, settings, strategies as st
from trl import GRPOTrainer, RLOOTrainer

from agentrl_cookbook.algo.advantage import per_token

quick = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

OLD = torch.tensor([[-1., -2., 0., 0.], [-.5, -1.5, -1., -3.]], dtype=torch.float64)
NEW = torch.tensor([[-.6, -2.1, 0., 0.], [-.9, -1.4, -.7, -3.4]], dtype=torch.float64)
REF = torch.tensor([[-1.1, -1.9, 0., 0.], [-.6, -1.5, -1.1, -2.9]], dtype=torch.float64)
ADVANTAGE = torch.tensor([1., -.5], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
V1 = (NEW, OLD, per_token(ADVANTAGE, MASK), MASK)

def gradient(loss, logp_BT, *rest, **kw):
    "Value and gradient with respect to the first argument"
    logp_BT = logp_BT.clone().requires_grad_()
    value = loss(logp_BT, *rest, **kw)
    value = value[0] if isinstance(value, tuple) else value
    return value.detach(), torch.autograd.grad(value, logp_BT)[0]


# ---- only what asks a model, a tokenizer or other processes is replaced ----

def stand_in(**attrs):
    one_process = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"),
                                  gather=lambda x: x, reduce=lambda x, reduction: x)
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    defaults = dict(accelerator=one_process, model=model, beta=0.0, use_vllm=False, aux_loss_enabled=False,
                    _metrics=dict(train=defaultdict(list)))
    return SimpleNamespace(**defaults | attrs)

def trl_scored(reward_BR, group_size, trainer=GRPOTrainer, logps=None, mask_BT=None, sampler_BT=None, **attrs):
    "What `_generate_and_score_completions` makes of episodes with these rewards"
    B, R = reward_BR.shape
    lengths = [1] * B if mask_BT is None else mask_BT.sum(1).tolist()
    ids = [[1] * n for n in lengths]
    sampled = None if sampler_BT is None else [row[:n].tolist() for row, n in zip(sampler_BT, lengths)]
    made = ([[1]] * B, ids, [""] * B) if trainer is RLOOTrainer else ([[1]] * B, ids, None, [""] * B, sampled,
                                                                       {}, None, None)
    defaults = dict(
        environment_factories=None, environments=None, tools=None, pad_to_multiple_of=None, num_iterations=1,
        mask_truncated_completions=False, num_generations=group_size, scale_rewards="group", reward_clip_range=None,
        normalize_advantages=False, multi_objective_aggregation="sum_then_normalize",
        reward_weights=torch.ones(R, dtype=reward_BR.dtype), reward_funcs=[None] * R,
        reward_func_names=[f"rule {i}" for i in range(R)], _tokenizer=SimpleNamespace(pad_token_id=0),
        args=SimpleNamespace(per_device_train_batch_size=B, steps_per_generation=1, gradient_accumulation_steps=1,
                             gradient_checkpointing_kwargs=None),
        _get_per_token_logps_and_entropies=lambda *a, **k: (logps, None, None), _generate=lambda prompts: made,
        _calculate_rewards=lambda *a: reward_BR, _logs=defaultdict(list), _pending_extra_logs={}, _pending_metrics={})
    one = stand_in(**defaults | attrs)
    one._logs["rewards"] = defaultdict(list)
    return trainer._generate_and_score_completions(one, [dict(prompt="")] * B)

def trl_rloo_loss(logp_BT, old_logp_BT, advantage_B, mask_BT, epsilon_low=.2, epsilon_high=.2):
    "`RLOOTrainer._compute_loss`"
    id_BT = torch.zeros_like(mask_BT)
    trainer = stand_in(epsilon_low=epsilon_low, epsilon_high=epsilon_high,
                       _get_per_token_logps_and_entropies=lambda *a, **k: (logp_BT, 0 * logp_BT.detach(), None))
    return RLOOTrainer._compute_loss(trainer, trainer.model, dict(
        prompt_ids=id_BT, prompt_mask=id_BT, completion_ids=id_BT, completion_mask=mask_BT, advantages=advantage_B,
        old_logps=(old_logp_BT * mask_BT).sum(1)))


# ---- random batches ----

def floats(shape, low, high):
    return hnp.arrays("float64", shape, elements=st.floats(low, high, width=32)).map(torch.tensor)

def ints(shape, values=(0, 1)):
    return hnp.arrays("int64", shape, elements=st.sampled_from(values)).map(torch.tensor)

@st.composite
def batches(draw):
    "New and old log-probabilities (ratios from exp(-3) to exp(3)), advantage per episode, mask with tools and padding"
    B, T = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    logp_BT, drift_BT = draw(floats((B, T), -6, 0)), draw(floats((B, T), -3, 3))
    length_B = torch.tensor(draw(st.lists(st.integers(0, T), min_size=B, max_size=B)))
    completion_BT = (torch.arange(T) < length_B[:, None]).long()
    return logp_BT, logp_BT - drift_BT, draw(floats(B, -3, 3)), completion_BT * draw(ints((B, T)))

def spread(batch):
    "The batch as every objective takes it"
    logp_BT, old_BT, advantage_B, mask_BT = batch
    return logp_BT, old_BT, per_token(advantage_B, mask_BT), mask_BT

rewards = st.tuples(st.integers(1, 5), st.integers(2, 8)).flatmap(lambda shape: floats(shape, -10, 10))
binary = st.tuples(st.integers(1, 5), st.integers(2, 8)).flatmap(ints)
