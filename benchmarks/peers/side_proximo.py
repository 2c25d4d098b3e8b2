"""Proximo on a job: `PPOTrainer` as a library, a reward model, nothing else."""

import sys
from typing import Any

import torch
from stopwatch import Stopwatch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from work import Job

from proximo import PPOConfig, PPOTrainer
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.precision.placement import resolve_precision
from proximo.models.scalar import HeadStart, ScalarModel
from proximo.models.sharing import value_on_base
from proximo.models.transformers_model import disable_dropout
from proximo.records import Prompt
from proximo.rewards.model import ModelReward

PHASE_OF = {
    "generate": "rollout",
    "score": "scoring",
    "reference_logprobs": "scoring",
    "policy_logprobs": "scoring",
    "values": "scoring",
    "policy_logprobs_and_values": "scoring",
}
"""Calls of a step; all others, the bookkeeping among them, count as training."""


def config_of(job: Job) -> PPOConfig:
    """The job in Proximo's words."""
    rate = {"learning_rate": job.learning_rate}
    return PPOConfig.model_validate(
        {
            "num_steps": job.steps + 1,
            "prompts_per_step": job.num_prompts,
            "responses_per_prompt": job.group,
            "epochs_per_step": job.epochs,
            "minibatch_responses": job.minibatch,
            "rollout": {"max_new_tokens": job.new_tokens, "max_num_seqs": job.num_responses},
            "policy_optimizer": rate,
            **({} if job.shared_trunk else {"value_optimizer": rate}),
        }
    )


def make_trainer(job: Job, *, config: PPOConfig | None = None) -> tuple[PPOTrainer, list[Prompt]]:
    """Models from the job's folder; `config` where it is not the job's own."""
    precision = resolve_precision(job.precision)

    def causal() -> LanguageModel:
        model = AutoModelForCausalLM.from_pretrained(f"{job.models}/policy", dtype=torch.float32)
        return LanguageModel(model.to(job.device), precision=precision)

    def classifier(name: str) -> ScalarModel:
        model = AutoModelForSequenceClassification.from_pretrained(f"{job.models}/{name}", dtype=torch.float32)
        return ScalarModel(model.to(job.device), precision=precision)

    policy = causal()
    disable_dropout(policy.model)
    if job.adapter_rank:  # as in recipes: the value model has an adapter of its own on the policy's base
        lora = LoRAOptions(rank=job.adapter_rank)
        policy = policy.with_adapter(lora)
        value: Any = value_on_base(policy, lora, HeadStart.ZERO)
    elif job.shared_trunk:
        value = "trunk"
    else:
        value = classifier("value")
        disable_dropout(value.model)

    trainer = PPOTrainer(
        policy,
        AutoTokenizer.from_pretrained(f"{job.models}/tokenizer"),
        reference=None if job.adapter_rank else causal(),
        value=value,
        reward=ModelReward(classifier("reward")),
        config=config or config_of(job),
        seed=job.seed,
    )
    return trainer, [Prompt(id=str(index), token_ids=tuple(ids)) for index, ids in enumerate(job.prompts())]


def main() -> None:
    """Take the steps and report them."""
    job = Job.load(sys.argv[1])
    torch.set_num_threads(job.threads)
    watch = Stopwatch(job.device)
    trainer, prompts = make_trainer(job)
    for _ in range(job.steps + 1):
        watch.begin()
        outcome = trainer.run_step(prompts=prompts)
        trainer.metrics(outcome)
        watch.mark("whole")
        lengths = [len(scored.response.token_ids) for scored in outcome.experience.scored]
        seconds = {"rollout": 0.0, "scoring": 0.0}
        for call, took in outcome.seconds.items():
            if call in PHASE_OF:
                seconds[PHASE_OF[call]] += took
        seconds["training"] = watch.taken("whole") - sum(seconds.values())
        watch.add(seconds, lengths)
    watch.report("torch", "transformers")


if __name__ == "__main__":
    main()
