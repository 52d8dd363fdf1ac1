"KL terms: values and gradients by exact sums, and TRL's own term"
import pytest
import torch
from hypothesis import given, strategies as st
from trl_code import MASK, NEW, OLD, REF, V1, batches, floats, gradient, quick, spread

from agentrl_cookbook.algo.kl import kl_estimate, kl_loss
from agentrl_cookbook.algo.objective import dapo_loss, grpo_loss, trl_loss

@pytest.mark.parametrize("kind, expected", [("k1", .2), ("k2", .02), ("k3", .018731)])
def test_published_estimates(kind, expected):
    assert abs(kl_estimate(torch.tensor(-1.), torch.tensor(-1.2), kind) - expected) < 1e-6

logits = floats(5, -3, 3)
def on_logits(f, logits_V):
    logits_V = logits_V.clone().requires_grad_()
    return torch.autograd.grad(f(logits_V.log_softmax(0)), logits_V)[0]
def forms(ref_V):
    return dict(reverse=lambda l: (l.exp() * (l - ref_V)).sum(), forward=lambda l: (ref_V.exp() * (ref_V - l)).sum(),
                zero=lambda l: 0 * l.sum())

@quick
@given(policy_V=logits, ref_V=logits)
def test_k1_and_k3_are_right_on_average(policy_V, ref_V):
    p_V, ref_V = policy_V.log_softmax(0), ref_V.log_softmax(0)
    exact = (p_V.exp() * (p_V - ref_V)).sum()
    for kind in ("k1", "k3"): torch.testing.assert_close((p_V.exp() * kl_estimate(p_V, ref_V, kind)).sum(), exact)
    assert (kl_estimate(p_V, ref_V, "k3") >= -1e-12).all() and (kl_estimate(p_V, ref_V, "k2") >= 0).all()

@pytest.mark.parametrize("kind, form", [("k1", "zero"), ("k2", "reverse"), ("k3", "forward")])
@quick
@given(policy_V=logits, ref_V=logits)
def test_gradient_of_each_as_a_loss_on_fresh_data(kind, form, policy_V, ref_V):
    ref_V = ref_V.log_softmax(0)
    got_V = on_logits(lambda l: (l.detach().exp() * kl_estimate(l, ref_V, kind)).sum(), policy_V)
    torch.testing.assert_close(got_V, on_logits(forms(ref_V)[form], policy_V))

@pytest.mark.parametrize("kind", ["k1", "k3"])
@quick
@given(policy_V=logits, ref_V=logits, old_V=logits)
def test_with_the_ratio_the_gradient_is_right_on_any_data(kind, policy_V, ref_V, old_V):
    "A batch in which each token of the vocabulary stands with its probability: weight * V tokens in a mean over V"
    ref_V, old_V = ref_V.log_softmax(0), old_V.log_softmax(0)
    def f(l): return sum(old_V.exp()[i] * kl_loss(l[None, i:i+1], old_V[None, i:i+1], ref_V[None, i:i+1],
                                                 torch.ones(1, 1), kind) for i in range(5))
    torch.testing.assert_close(on_logits(f, policy_V), on_logits(forms(ref_V)["reverse"], policy_V))

@pytest.mark.parametrize("corrected, expected, grad", [
    (True, -.265395, [[.018648, -.230734, 0, 0], [-.002514, .070455, .091115, -.00419]]),
    (False, -.266150, [[.009837, -.231744, 0, 0], [-.004373, .070263, .088487, -.008109]])])
def test_published_grpo_with_kl(corrected, expected, grad):
    def ours(logp_BT):
        return grpo_loss(logp_BT, *V1[1:]) + .1 * kl_loss(logp_BT, OLD, REF, MASK, corrected=corrected, how="episode")
    value, grad_BT = gradient(ours, NEW)
    assert abs(value - expected) < 1e-6 and (grad_BT - torch.tensor(grad)).abs().max() < 1e-6

@quick
@given(batch=batches(), data=st.data(), corrected=st.booleans())
def test_random_batches_equal_trl(batch, data, corrected):
    logp_BT, old_BT, advantage_BT, mask_BT = spread(batch)
    ref_BT = logp_BT + data.draw(floats(mask_BT.shape, -2, 2))
    for objective, how, kind, high in ((grpo_loss, "episode", "grpo", .2), (dapo_loss, "token", "dapo", .28)):
        def ours(l): return (objective(l, old_BT, advantage_BT, mask_BT)
                             + .3 * kl_loss(l, old_BT, ref_BT, mask_BT, corrected=corrected, how=how))
        def theirs(l): return trl_loss(l, old_BT, advantage_BT, mask_BT, ref_BT, loss_type=kind, beta=.3,
                                       epsilon_high=high, use_bias_correction_kl=corrected)
        for a, b in zip(gradient(ours, logp_BT), gradient(theirs, logp_BT)):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)

def test_bad_input_is_named():
    with pytest.raises(ValueError, match="kind is 'k4': use 'k1', 'k2' or 'k3'"): kl_estimate(NEW, REF, "k4")
    with pytest.raises(ValueError, match="shapes differ"): kl_loss(NEW, OLD, REF[0], MASK)
