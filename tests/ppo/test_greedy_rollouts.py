"""Rollouts of the most likely tokens, as DeepSpeed-Chat's are."""

from functools import partial

import torch

from builders import tiny_language_model, tiny_tokenizer
from ppo_trainers import PROMPTS, ppo_trainer
from proximo.models.packing import pack
from proximo.ppo.trainer import PPOTrainer

trainer = partial(ppo_trainer, num_steps=2, rollout={"max_new_tokens": 5, "greedy": True})


@torch.no_grad()
def test_each_token_is_the_most_likely_one_and_has_its_log_prob_at_the_temperature() -> None:
    made = trainer(rollout={"max_new_tokens": 5, "greedy": True, "temperature": 0.5})
    for each in made.generate(PROMPTS):
        asked, written = each.prompt.token_ids, each.token_ids
        logits = made.policy.head.logits(made.policy.hidden_states(pack([[*asked, *written]])))[len(asked) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(written)
        wanted = torch.log_softmax(logits / 0.5, -1)[range(len(written)), written]
        torch.testing.assert_close(each.logprobs, wanted, rtol=0, atol=1e-5)


def test_a_policy_learns_from_them_and_another_seed_changes_no_response() -> None:
    made = trainer()
    other = PPOTrainer(tiny_language_model(), tiny_tokenizer(), config=made.config, seed=5)
    assert [r.token_ids for r in made.generate(PROMPTS)] == [r.token_ids for r in other.generate(PROMPTS)]
    before = torch.cat([p.detach().flatten().clone() for p in made.policy.model.parameters()])
    history = made.train(PROMPTS, reward=lambda responses: [float(len(text)) for text in responses])
    assert history[0]["first_minibatch/max_abs_log_ratio"] < 1e-3
    assert not torch.equal(before, torch.cat([p.detach().flatten() for p in made.policy.model.parameters()]))
