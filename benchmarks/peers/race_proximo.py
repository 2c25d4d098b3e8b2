"""Proximo in a race: `PPOTrainer` as a library."""

import sys

import torch
from race import Course, Race
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from proximo import PPOConfig, PPOTrainer
from proximo.models.scalar import ScalarModel
from proximo.records import Prompt
from proximo.rewards.function import FunctionReward
from proximo.rewards.model import ModelReward


def config_of(race: Race) -> PPOConfig:
    """The race in Proximo's words."""
    chosen, own = race.settings, {}
    if race.algorithm == "ppo":
        own["value_optimizer"] = {"learning_rate": chosen.value_rate}
    elif race.algorithm == "reinforce++":
        own["advantage"] = "return_to_go"
    elif race.algorithm != "trunk":
        raise ValueError(f"the algorithm is ppo, trunk or reinforce++, not {race.algorithm}")
    return PPOConfig.model_validate(
        {
            "num_steps": race.max_steps,
            "prompts_per_step": chosen.batch,
            "epochs_per_step": chosen.epochs,
            "minibatch_responses": chosen.minibatch,
            "rollout": {"max_new_tokens": race.new_tokens, "max_num_seqs": chosen.batch},
            "kl": {"coefficient": race.kl_coefficient},
            "policy_optimizer": {"learning_rate": chosen.policy_rate},
            **own,
        }
    )


def digits_in_order() -> FunctionReward:
    """The rule, given the digits that the prompt names."""
    import sorting

    def score(prompts, responses, metadata):
        del metadata
        right = [{"answer": sorting.digits_sorted(prompt)} for prompt in prompts]
        return sorting.in_order(prompts, responses, right)

    return FunctionReward(score)


def main() -> None:
    """Run until it is there."""
    race = Race.load(sys.argv[1])
    torch.set_num_threads(race.threads)
    torch.manual_seed(race.seed)
    tokenizer = AutoTokenizer.from_pretrained(race.policy)

    def classifier() -> ScalarModel:
        return ScalarModel(AutoModelForSequenceClassification.from_pretrained(race.reward, dtype=torch.float32))

    value = "trunk" if race.algorithm == "trunk" else None
    if race.algorithm == "ppo" and race.reward:
        value = classifier()
    trainer = PPOTrainer(
        AutoModelForCausalLM.from_pretrained(race.policy, dtype=torch.float32),
        tokenizer,
        value=value,
        reward=ModelReward(classifier()) if race.reward else digits_in_order(),
        config=config_of(race),
        seed=race.seed,
    )
    prompts = [
        Prompt(id=str(number), token_ids=tuple(tokenizer(text, add_special_tokens=False).input_ids), text=text)
        for number, text in enumerate(race.texts())
    ]
    course = Course(race)
    course.begin()
    over, step = False, 0
    while not over:
        first = step * race.settings.batch
        taken = [prompts[place % len(prompts)] for place in range(first, first + race.settings.batch)]
        metrics = trainer.metrics(trainer.run_step(prompts=taken))
        over = course.note(score=metrics["score/mean"].value, kl=metrics["kl/sequence"].value)
        step += 1
    course.report("torch", "transformers")


if __name__ == "__main__":
    main()
