"""The gradient that a whole step hands to the optimizer, against the definition: nothing of the step is left out.

A language model over three tokens, one of them EOS, and responses of at most three of them: all 15 are brought to a
trainer one at a time, and their gradients, weighted by the probability of the response, must add up to the gradient of
the expected score minus the KL. The definition is computed by transformers' own forward, response by response. The
pure functions are held alone in algorithms/test_exact_gradients.py; this holds their wiring.
"""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from builders import tiny_language_model
from proximo.config.ppo.options import PPOConfig
from proximo.models.language import LanguageModel
from proximo.models.scalar import HeadStart, ScalarModel
from proximo.models.sharing import scalar_on
from proximo.ppo.step_arguments import as_prompts
from proximo.ppo.trainer import PPOTrainer

EOS, MAX_TOKENS, BETA = 2, 3, 0.7
PREFIXES = [prefix for n in range(MAX_TOKENS) for prefix in product((0, 1), repeat=n)]
RESPONSES = [(*prefix, EOS) for prefix in PREFIXES] + list(product((0, 1), repeat=MAX_TOKENS))
SCORES = torch.arange(len(RESPONSES), dtype=torch.float64).sub(5).div(8)
PROMPT = "a b a"


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1, "<eos>": EOS}, unk_token="a"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def model(seed: int) -> PreTrainedModel:
    """GPT-2, since Llama's norm goes through float32. Large weights, so that the distributions differ."""
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.6, "bos_token_id": None}
    return tiny_language_model("gpt2", seed=seed, vocab_size=3, dtype=torch.float64, **shape)


def made_trainer(*, value: Any = None, **options: Any) -> PPOTrainer:
    alone = {"prompts_per_step": 1, "minibatch_responses": 1, "epochs_per_step": 1, "num_steps": len(RESPONSES)}
    plain = {"advantage": {"gamma": 1.0, "gae_lambda": 1.0, "standardise": False}}
    optimizer = {"learning_rate": 1e-9, "max_gradient_norm": None}
    policy = LanguageModel(model(1))
    return PPOTrainer(
        policy,
        tokenizer(),
        reference=LanguageModel(model(2)),
        value=value(policy) if value else None,
        config=PPOConfig(**{**alone, **plain, "policy_optimizer": optimizer, **options}),
    )


def gradients_of_steps(**options: Any) -> list[Tensor]:
    """What the optimizer of the policy gets for each response alone: of the mean over its tokens, at one policy."""
    trainer = made_trainer(**options)
    (prompt,) = as_prompts(trainer.tokenizer, [PROMPT])
    learner, start, caught = trainer.learners["policy"], trainer.state, list[Tensor]()
    modules = [each.module for each in trainer.learners.values()]
    weights = [copy.deepcopy(module.state_dict()) for module in modules]
    learner.optimizer.register_step_pre_hook(lambda *_: caught.append(gradients(learner.module)))
    for token_ids, score in zip(RESPONSES, SCORES.tolist(), strict=True):
        trainer.step([prompt], [list(token_ids)], [score])
        for module, kept in zip(modules, weights, strict=True):
            module.load_state_dict(kept)
        trainer.state = start
    assert len(caught) == len(RESPONSES)
    return caught


def gradients(of: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in of.parameters() if parameter.grad is not None])


def state_logits(of: PreTrainedModel) -> dict[tuple[int, ...], Tensor]:
    """Prefix -> logits of the next token, by transformers' own forward over prompt and prefix."""
    asked = tokenizer()(PROMPT)["input_ids"]
    return {p: of(input_ids=torch.tensor([[*asked, *p]])).logits[0, -1] for p in PREFIXES}


def objective(*, temperature: float, beta: float, of_sequences: bool) -> Tensor:
    """Gradient of E[score] - beta KL; the KL of whole responses, or at the states as they are visited now."""
    policy, reference = model(1), model(2)
    tables = {p: (z / temperature).log_softmax(-1) for p, z in state_logits(policy).items()}
    others = {p: (z / temperature).log_softmax(-1).detach() for p, z in state_logits(reference).items()}
    total = torch.zeros((), dtype=torch.float64)
    for response, score in zip(RESPONSES, SCORES, strict=True):
        states = [response[:t] for t in range(len(response))]
        logprob = sum((tables[s][token] for s, token in zip(states, response, strict=True)), torch.zeros(()))
        other = sum((others[s][token] for s, token in zip(states, response, strict=True)), torch.zeros(()))
        if of_sequences:
            total = total + logprob.exp() * (score - beta * (logprob - other).detach())
        else:
            kls = [(tables[s].exp() * (tables[s] - others[s])).sum() for s in states]
            total = total + logprob.exp() * score - beta * logprob.exp().detach() * sum(kls, torch.zeros(()))
    total.backward()
    return gradients(policy)


def expected_gradient(*, temperature: float, **options: Any) -> Tensor:
    """Of the trainer's steps over all responses, each as often as the policy gives it."""
    with torch.no_grad():
        tables = {p: (z / temperature).log_softmax(-1) for p, z in state_logits(model(1)).items()}
    total = torch.zeros((), dtype=torch.float64)
    steps = gradients_of_steps(rollout={"max_new_tokens": MAX_TOKENS, "temperature": temperature}, **options)
    for response, step in zip(RESPONSES, steps, strict=True):
        logprob = sum(float(tables[response[:t]][token]) for t, token in enumerate(response))
        total = total + torch.tensor(logprob, dtype=torch.float64).exp() * len(response) * step
    return total


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("kl", "of_sequences"),
    [
        ({"kind": "none"}, True),
        ({"kind": "reward", "estimator": "k1"}, True),
        ({"kind": "loss", "estimator": "k2"}, False),
        ({"kind": "loss", "estimator": "weighted_k3"}, False),
        ({"kind": "loss", "estimator": "full"}, False),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_the_steps_of_all_responses_add_up_to_the_gradient_of_the_objective(
    kl: dict[str, str], of_sequences: bool, temperature: float
) -> None:
    beta = 0.0 if kl["kind"] == "none" else BETA
    found = expected_gradient(temperature=temperature, kl={**kl, "coefficient": BETA} if beta else kl)
    wanted = -objective(temperature=temperature, beta=beta, of_sequences=of_sequences)
    assert wanted.abs().max() > 1e-2
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    assert (
        found + objective(temperature=temperature, beta=beta / 2, of_sequences=of_sequences)
    ).norm() > 1e-3 or not beta


@pytest.mark.parametrize(
    "loss",
    [
        {"objective": "cispo"},
        {"objective": {"kind": "sapo", "gate_positive": 2.0, "gate_negative": 3.0}},
        {"objective": "m2po"},
        {"objective": {"dual_clip": 2.0}},
        {"aggregation": "response_mean"},
    ],
    ids=lambda loss: "-".join(map(str, loss.values())),
)
def test_the_first_update_of_every_objective_has_the_gradient_of_the_expected_score(loss: dict[str, Any]) -> None:
    """Before anything was learned the ratio is 1, where clip, weight and gate are one; gspo is in test_exact_gradients,
    since it has no credit for single tokens."""
    found = expected_gradient(temperature=0.6, kl="none", policy_loss=loss)
    torch.testing.assert_close(found, -objective(temperature=0.6, beta=0.0, of_sequences=True), rtol=0, atol=1e-10)


def value_objective(head: nn.Linear) -> Tensor:
    """Gradient, for the layers and then the head, of E[sum over tokens of (V - score)^2 / 2], as sampled now."""
    policy = model(1)
    asked = tokenizer()(PROMPT)["input_ids"]
    tables = {p: z.detach().log_softmax(-1) for p, z in state_logits(policy).items()}
    values = {p: head(policy.base_model(torch.tensor([[*asked, *p]])).last_hidden_state[0, -1])[0] for p in PREFIXES}
    total = torch.zeros((), dtype=torch.float64)
    for response, score in zip(RESPONSES, SCORES, strict=True):
        states = [response[:t] for t in range(len(response))]
        logprob = sum((tables[s][token] for s, token in zip(states, response, strict=True)), torch.zeros(()))
        total = total + logprob.exp() * sum(((values[s] - score) ** 2 / 2 for s in states), torch.zeros(()))
    total.backward()
    return torch.cat([gradients(policy), gradients(head)])


@pytest.mark.parametrize("coefficient", [0.1, 2.0])
def test_on_a_shared_trunk_they_add_up_to_the_gradient_of_both_objectives(coefficient: float) -> None:
    """The values are a baseline that changes no expectation of the policy's gradient."""

    def on_trunk(policy: LanguageModel) -> ScalarModel:
        return scalar_on(policy, HeadStart.NORMAL, seed=3)

    options = {"value_loss": {"coefficient": coefficient, "clip": None}, "kl": "none"}
    found = expected_gradient(temperature=1.0, value=on_trunk, **options)
    head = on_trunk(LanguageModel(model(1))).base.get_submodule("score")
    assert isinstance(head, nn.Linear)
    of_policy = objective(temperature=1.0, beta=0.0, of_sequences=True)
    of_value = value_objective(head)
    wanted = coefficient * of_value - torch.cat([of_policy, torch.zeros(16)])
    assert (coefficient * of_value).abs().max() > 1e-2
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kl", ["none", "reward"])
def test_returns_to_go_without_a_critic_add_up_to_the_same_gradient(kl: str) -> None:
    """What came before a token is left out of its return: that changes no expectation."""
    advantage = {"kind": "return_to_go", "standardise": False}
    options = {"kind": kl, "coefficient": BETA} if kl == "reward" else kl
    found = expected_gradient(temperature=1.0, kl=options, advantage=advantage)
    wanted = -objective(temperature=1.0, beta=0.0 if kl == "none" else BETA, of_sequences=True)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
