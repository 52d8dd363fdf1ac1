"Advantages and objectives: equal to TRL's own code, and the properties that any correct version has."
from collections import defaultdict
from types import SimpleNamespace

import hypothesis.extra.numpy as hnp
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from trl import GRPOConfig, GRPOTrainer

from agentrl_cookbook.algo.advantage import group_advantages, per_token, zero_variance
from agentrl_cookbook.algo.objective import aggregate, cispo_loss, dapo_loss, grpo_loss, ratio, reinforce_loss

LOSSES = (reinforce_loss, grpo_loss, dapo_loss, cispo_loss)
quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


# ---- TRL's own code, run on given tensors: only what asks a model, a tokenizer or other processes is replaced ----

def stand_in(**attrs):
    one_process = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"),
                                  gather=lambda x: x, reduce=lambda x, reduction: x)
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    return SimpleNamespace(accelerator=one_process, model=model, beta=0.0, use_vllm=False,
                           _metrics=dict(train=defaultdict(list)), **attrs)

def trl_loss(logp_BT, old_logp_BT, advantage, completion_BT, tool_BT, *, loss_type, epsilon_high, epsilon_low=0.2):
    "`GRPOTrainer._compute_loss`, with the completion mask and the tool mask apart, as it gets them in training"
    trainer = stand_in(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp_BT, torch.zeros_like(logp_BT), None),
        args=SimpleNamespace(delta=None, steps_per_generation=1), current_gradient_accumulation_steps=1,
        loss_type=loss_type, epsilon_low=epsilon_low, epsilon_high=epsilon_high, importance_sampling_level="token",
        top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False, _entropy_bonus_enabled=False)
    id_BT = torch.zeros_like(completion_BT)
    inputs = dict(prompt_ids=id_BT, prompt_mask=id_BT, completion_ids=id_BT, completion_mask=completion_BT,
                  tool_mask=tool_BT, advantages=advantage, num_items_in_batch=(completion_BT * tool_BT).sum())
    if old_logp_BT is not None: inputs["old_per_token_logps"] = old_logp_BT
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs), trainer._metrics["train"]

def trl_advantages(reward_PG, scale):
    "The advantages that `GRPOTrainer._generate_and_score_completions` gives episodes with these rewards"
    n, G = reward_PG.numel(), reward_PG.shape[1]
    trainer = stand_in(
        environment_factories=None, environments=None, tools=None, pad_to_multiple_of=None, num_iterations=1,
        mask_truncated_completions=False, num_generations=G, scale_rewards=scale,
        multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1, dtype=reward_PG.dtype),
        reward_funcs=[None], reward_func_names=["rule"], _tokenizer=SimpleNamespace(pad_token_id=0),
        args=SimpleNamespace(per_device_train_batch_size=n, steps_per_generation=1, gradient_accumulation_steps=1,
                             gradient_checkpointing_kwargs=None),
        _generate=lambda prompts: ([[1]] * n, [[1]] * n, None, [""] * n, None, {}, None, None),
        _calculate_rewards=lambda *a: reward_PG.reshape(-1, 1), _logs=defaultdict(list), _pending_extra_logs={},
        _pending_metrics={})
    trainer._logs["rewards"] = defaultdict(list)
    return GRPOTrainer._generate_and_score_completions(trainer, [dict(prompt="")] * n)["advantages"].view(-1, G)

def gradient(loss, logp_BT, *rest, **kw):
    logp_BT = logp_BT.clone().requires_grad_()
    value = loss(logp_BT, *rest, **kw)
    value = value[0] if isinstance(value, tuple) else value
    return value.detach(), torch.autograd.grad(value, logp_BT)[0]


# ---- random batches ----

def floats(shape, low, high):
    return hnp.arrays("float64", shape, elements=st.floats(low, high, width=32)).map(torch.tensor)

def ints(shape, values=(0, 1)):
    return hnp.arrays("int64", shape, elements=st.sampled_from(values)).map(torch.tensor)

@st.composite
def batches(draw):
    "New and old log-probabilities (ratios from exp(-3) to exp(3)), advantage per episode, completion and tool mask"
    B, T = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    logp_BT, drift_BT = draw(floats((B, T), -6, 0)), draw(floats((B, T), -3, 3))
    length_B = torch.tensor(draw(st.lists(st.integers(0, T), min_size=B, max_size=B)))
    completion_BT = (torch.arange(T) < length_B[:, None]).long()
    return logp_BT, logp_BT - drift_BT, draw(floats(B, -3, 3)), completion_BT, draw(ints((B, T)))

rewards = st.tuples(st.integers(1, 5), st.integers(2, 8)).flatmap(lambda shape: floats(shape, -10, 10))
binary = st.tuples(st.integers(1, 5), st.integers(2, 8)).flatmap(ints)


# ---- objectives against TRL ----

OLD = torch.tensor([[-1., -2., 0., 0.], [-.5, -1.5, -1., -3.]], dtype=torch.float64)
NEW = torch.tensor([[-.6, -2.1, 0., 0.], [-.9, -1.4, -.7, -3.4]], dtype=torch.float64)
ADVANTAGE = torch.tensor([1., -.5], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
ONES = torch.ones_like(MASK)
V1 = (NEW, OLD, per_token(ADVANTAGE, MASK), MASK)

PAIRS = {  # name: (TRL's settings, our function, our settings, loss on V1, gradient on V1)
    "grpo": (dict(loss_type="grpo", epsilon_high=.2), grpo_loss, dict(eps_high=.2), -.272770,
             [[0, -.226209, 0, 0], [0, .069073, .084366, 0]]),
    "dapo": (dict(loss_type="dapo", epsilon_high=.2), dapo_loss, dict(eps_high=.2), -.012887,
             [[0, -.150806, 0, 0], [0, .092098, .112488, 0]]),
    "dapo clip-higher": (dict(loss_type="dapo", epsilon_high=.28), dapo_loss, {}, -.026220,
                         [[0, -.150806, 0, 0], [0, .092098, .112488, 0]]),
    "cispo 5": (dict(loss_type="cispo", epsilon_high=5.), cispo_loss, {}, .017999,
                [[-.248637, -.150806, 0, 0], [.05586, .092098, .112488, .05586]]),
    "cispo 1.2": (dict(loss_type="cispo", epsilon_high=1.2), cispo_loss, dict(cap=1.2), -.002442,
                  [[-.2, -.150806, 0, 0], [.05586, .092098, .1, .05586]]),
    "cispo default": (dict(loss_type="cispo", epsilon_high=.2), cispo_loss, dict(cap=.2), -.016667,
                      [[-.033333, -.033333, 0, 0], [.016667, .016667, .016667, .016667]])}

each_pair = pytest.mark.parametrize("name", PAIRS)

@each_pair
def test_published_vector(name):
    _, loss, kw, value, grad = PAIRS[name]
    got, got_BT = gradient(loss, *V1, **kw)
    assert abs(got - value) < 1e-6
    assert (got_BT - torch.tensor(grad)).abs().max() < 1e-6

@each_pair
def test_vector_equals_trl(name):
    trl_kw, loss, kw, _, _ = PAIRS[name]
    ours, theirs = gradient(loss, *V1, **kw), gradient(trl_loss, NEW, OLD, ADVANTAGE, MASK, ONES, **trl_kw)
    for a, b in zip(ours, theirs): torch.testing.assert_close(a, b, rtol=0, atol=1e-9)

@each_pair
@quick
@given(batch=batches(), per_episode=st.booleans())
def test_random_batches_with_tool_masks_equal_trl(name, batch, per_episode):
    trl_kw, loss, kw, _, _ = PAIRS[name]
    logp_BT, old_BT, advantage_B, completion_BT, tool_BT = batch
    mask_BT = completion_BT * tool_BT
    advantage_BT = per_token(advantage_B, mask_BT)
    theirs = gradient(trl_loss, logp_BT, old_BT, advantage_B if per_episode else advantage_BT, completion_BT, tool_BT,
                      **trl_kw)
    for a, b in zip(gradient(loss, logp_BT, old_BT, advantage_BT, mask_BT, **kw), theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

def test_float32_agrees_to_1e_6():
    batch = [x.float() for x in V1]
    for name, (trl_kw, loss, kw, value, _) in PAIRS.items():
        assert abs(gradient(loss, *batch, **kw)[0] - value) < 1e-6, name

@quick
@given(batch=batches())
def test_trl_without_old_log_probabilities_is_reinforce(batch):
    "One optimizer step per generation batch: TRL fills in the new log-probabilities, and the ratio is 1"
    logp_BT, _, advantage_B, completion_BT, tool_BT = batch
    mask_BT = completion_BT * tool_BT
    ours = gradient(reinforce_loss, logp_BT, logp_BT, per_token(advantage_B, mask_BT), mask_BT)[1]
    for kind, high in (("dapo", .2), ("cispo", 5.)):
        theirs = gradient(trl_loss, logp_BT, None, advantage_B, completion_BT, tool_BT, loss_type=kind, epsilon_high=high)
        torch.testing.assert_close(ours, theirs[1])


# ---- the trap of TRL's CISPO defaults ----

def test_trl_defaults_are_those_the_chapter_warns_of():
    default = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
    assert (default["epsilon"], default["epsilon_high"], default["num_iterations"]) == (.2, None, 1)

def test_default_cispo_is_a_fifth_of_reinforce_and_its_metric_misses_it():
    _, trapped = gradient(trl_loss, NEW, OLD, ADVANTAGE, MASK, ONES, loss_type="cispo", epsilon_high=.2)
    torch.testing.assert_close(trapped, .2 * gradient(reinforce_loss, *V1)[1])
    logged = trl_loss(NEW, OLD, ADVANTAGE, MASK, ONES, loss_type="cispo", epsilon_high=.2)[1]["cispo_clip_ratio"]
    assert logged == [pytest.approx(1 / 3)]
    assert (ratio(NEW, OLD) > .2)[MASK == 1].all()


# ---- properties of the objectives ----

@quick
@given(batch=batches(), data=st.data())
def test_masked_tokens_change_neither_loss_nor_gradient(batch, data):
    logp_BT, old_BT, advantage_B, completion_BT, tool_BT = batch
    mask_BT = completion_BT * tool_BT
    advantage_BT = advantage_B[:, None].expand_as(mask_BT)
    def other(x_BT): return torch.where(mask_BT == 1, x_BT, data.draw(floats(mask_BT.shape, -20, 0)))
    changed = other(logp_BT), other(old_BT), other(advantage_BT), mask_BT
    for loss in LOSSES:
        a, b = gradient(loss, logp_BT, old_BT, advantage_BT, mask_BT), gradient(loss, *changed)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        assert (b[1][mask_BT == 0] == 0).all()

@quick
@given(batch=batches())
def test_at_ratio_1_dapo_cispo_and_reinforce_have_one_gradient(batch):
    logp_BT, _, advantage_B, completion_BT, tool_BT = batch
    mask_BT = completion_BT * tool_BT
    fresh = logp_BT, logp_BT, per_token(advantage_B, mask_BT), mask_BT
    expected = gradient(reinforce_loss, *fresh)[1]
    for loss in (dapo_loss, cispo_loss): torch.testing.assert_close(gradient(loss, *fresh)[1], expected)

@quick
@given(batch=batches())
def test_away_from_ratio_1_clipping_drops_tokens_and_cispo_none(batch):
    logp_BT, old_BT, advantage_B, completion_BT, tool_BT = batch
    mask_BT = completion_BT * tool_BT
    advantage_BT, r_BT = per_token(advantage_B, mask_BT), ratio(logp_BT, old_BT)
    live_BT = advantage_BT.abs() > 1e-6
    clipped_BT = ((advantage_BT > 0) & (r_BT > 1.2)) | ((advantage_BT < 0) & (r_BT < .8))
    dapo_BT = gradient(dapo_loss, logp_BT, old_BT, advantage_BT, mask_BT, eps_high=.2)[1]
    cispo_BT = gradient(cispo_loss, logp_BT, old_BT, advantage_BT, mask_BT)[1]
    assert (dapo_BT[clipped_BT] == 0).all()
    assert (cispo_BT[live_BT] != 0).all()
    assert (cispo_BT[live_BT].sign() == -advantage_BT[live_BT].sign()).all()
    n = mask_BT.sum().clamp(min=1)
    assert (cispo_BT.abs() <= 5 * advantage_BT.abs() / n + 1e-9).all()

@quick
@given(batch=batches())
def test_episodes_of_one_length_make_both_means_equal(batch):
    logp_BT = batch[0]
    torch.testing.assert_close(aggregate(logp_BT, torch.ones_like(logp_BT), "episode"), logp_BT.mean())
    torch.testing.assert_close(aggregate(logp_BT, torch.ones_like(logp_BT), "token"), logp_BT.mean())

@pytest.mark.parametrize("loss", LOSSES)
def test_a_batch_of_tool_tokens_only_gives_zero_not_nan(loss):
    value, grad_BT = gradient(loss, NEW, OLD, ADVANTAGE[:, None].expand_as(MASK), torch.zeros_like(MASK))
    assert value == 0 and (grad_BT == 0).all()

@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_any_kind_of_mask_gives_one_loss(dtype):
    for loss in LOSSES: assert torch.equal(loss(*V1[:3], MASK.to(dtype)), loss(*V1))

@pytest.mark.parametrize("loss", LOSSES)
def test_an_advantage_per_episode_is_refused_where_it_would_broadcast(loss):
    square_BT = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"advantage_BT \(4,\).*per_token"):
        loss(square_BT, square_BT, torch.zeros(4), square_BT)

def test_an_unknown_mean_is_named():
    with pytest.raises(ValueError, match="how is 'sequence': use 'episode' or 'token'"): aggregate(NEW, MASK, "sequence")


# ---- advantages ----

@pytest.mark.parametrize("scale, expected", [
    ("group", [1.4997, -.4999, -.4999, -.4999]), ("none", [.75, -.25, -.25, -.25])])
def test_published_advantages(scale, expected):
    got = group_advantages(torch.tensor([[1., 0., 0., 0.]], dtype=torch.float64), scale=scale)
    assert (got[0] - torch.tensor(expected)).abs().max() < 5e-5

def test_published_advantages_over_the_batch():
    got_B = group_advantages(torch.tensor([1., 0, 0, 0, 1, 1, 1, 0]), group_size=4, scale="batch")
    expected_B = torch.tensor([1.402859, -.46762, -.46762, -.46762, .46762, .46762, .46762, -1.402859])
    assert (got_B - expected_B).abs().max() < 1e-6

def test_ddof_is_1():
    reward_PG = torch.tensor([[1., 0., 0., 0.]], dtype=torch.float64)
    ddof = {n: (reward_PG - .25) / reward_PG.std(1, correction=n) for n in (0, 1)}
    got_PG = group_advantages(reward_PG, eps=0)
    torch.testing.assert_close(got_PG, ddof[1])
    torch.testing.assert_close(got_PG * (4 / 3) ** .5, ddof[0])

@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@quick
@given(reward_PG=st.one_of(rewards, binary))
def test_advantages_equal_trl(scale, reward_PG):
    reward_PG = reward_PG.double()
    torch.testing.assert_close(group_advantages(reward_PG, scale=scale), trl_advantages(reward_PG, scale),
                               rtol=1e-9, atol=1e-7)

each_scale = pytest.mark.parametrize("scale", ["group", "batch", "none"])

@each_scale
@quick
@given(reward_PG=rewards, shift=st.floats(-100, 100))
def test_shifting_rewards_changes_nothing(scale, reward_PG, shift):
    torch.testing.assert_close(group_advantages(reward_PG + shift, scale=scale),
                               group_advantages(reward_PG, scale=scale), rtol=1e-6, atol=1e-8)

@each_scale
@quick
@given(reward_PG=rewards)
def test_advantages_of_a_group_add_up_to_zero(scale, reward_PG):
    assert group_advantages(reward_PG, scale=scale).sum(1).abs().max() < 1e-8

@quick
@given(reward_PG=rewards, factor=st.floats(.01, 100))
def test_the_unit_of_reward_does_not_matter(reward_PG, factor):
    for scale in ("group", "batch"):
        scaled = group_advantages(factor * reward_PG, scale=scale, eps=factor * 1e-4)
        torch.testing.assert_close(scaled, group_advantages(reward_PG, scale=scale), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(group_advantages(factor * reward_PG, scale="none"),
                               factor * group_advantages(reward_PG, scale="none"))

@quick
@given(reward_PG=binary)
def test_zero_variance_marks_exactly_the_groups_without_signal(reward_PG):
    silent_P = (group_advantages(reward_PG).abs() < 1e-6).all(1)
    assert torch.equal(zero_variance(reward_PG), silent_P)

@each_scale
@quick
@given(reward_PG=rewards)
def test_a_flat_batch_gives_the_same_advantages(scale, reward_PG):
    flat_B = group_advantages(reward_PG.flatten(), group_size=reward_PG.shape[1], scale=scale)
    assert torch.equal(flat_B, group_advantages(reward_PG, scale=scale).flatten())

@quick
@given(batch=batches())
def test_per_token_credits_sampled_tokens_only(batch):
    _, _, advantage_B, completion_BT, tool_BT = batch
    mask_BT = completion_BT * tool_BT
    advantage_BT = per_token(advantage_B, mask_BT)
    for A, A_T, mask_T in zip(advantage_B, advantage_BT, mask_BT):
        assert (A_T[mask_T == 1] == A).all() and (A_T[mask_T == 0] == 0).all()

@pytest.mark.parametrize("reward, group_size", [
    (torch.zeros(8), 0), (torch.zeros(8), 3), (torch.zeros(8), 1), (torch.zeros(2, 4), 2), (torch.zeros(4, 1), 0),
    (torch.zeros(2, 2, 2), 2)])
def test_rewards_that_do_not_split_into_groups_are_refused(reward, group_size):
    with pytest.raises(ValueError, match=r"cannot split reward of shape .* into groups .*pass \(P, G\)"):
        group_advantages(reward, group_size)

def test_other_bad_input_is_named():
    with pytest.raises(ValueError, match="reward contains nan"): group_advantages(torch.tensor([[1., float("nan")]]))
    with pytest.raises(ValueError, match="scale is 'std': use 'group'"): group_advantages(torch.eye(2), scale="std")
    with pytest.raises(ValueError, match="3 advantages for 2 mask rows"): per_token(torch.zeros(3), MASK)
