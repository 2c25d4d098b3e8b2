"""TRL's classic trainer (0.11) on a job: a value head on the policy's trunk, and the loop that its users write.

The user's part is the loop in `main`: generate, score with the reward model, `step`. `step` computes log-probs, the
reference's and values before it trains; how long each took is among the statistics that it returns.
"""

import sys

import torch
from endings import EOS_ID, PAD_ID
from stopwatch import Stopwatch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from work import Job

TRAINING = ("time/ppo/optimize_step",)
"""What `step` reports as training; the rest of it counts as scoring."""


def config_of(job: Job) -> PPOConfig:
    """The job in TRL's words."""
    return PPOConfig(
        seed=job.seed + 1,
        learning_rate=job.learning_rate,
        batch_size=job.num_responses,
        mini_batch_size=job.minibatch,
        gradient_accumulation_steps=1,
        ppo_epochs=job.epochs,
        accelerator_kwargs={"cpu": True, "mixed_precision": "bf16" if job.precision == "bf16" else "no"},
    )


@torch.no_grad()
def scores_of(reward: torch.nn.Module, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """One padded pass of the reward model."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=PAD_ID)
    mask = torch.arange(padded.shape[1])[None] < lengths[:, None]
    return list(reward(input_ids=padded, attention_mask=mask.long()).logits[:, 0])


def main() -> None:
    """The loop."""
    job = Job.load(sys.argv[1])
    torch.set_num_threads(job.threads)
    watch = Stopwatch()
    tokenizer = AutoTokenizer.from_pretrained(f"{job.models}/tokenizer")
    policy, reference = (AutoModelForCausalLMWithValueHead.from_pretrained(f"{job.models}/policy") for _ in range(2))
    reward = AutoModelForSequenceClassification.from_pretrained(f"{job.models}/reward").eval()
    trainer = PPOTrainer(config=config_of(job), model=policy, ref_model=reference, tokenizer=tokenizer)
    sampling = {
        "do_sample": True,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": job.new_tokens,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
    }
    queries = [torch.tensor(prompt) for prompt in job.prompts() for _ in range(job.group)]
    for _ in range(job.steps + 1):
        watch.begin()
        responses = trainer.generate(queries, batch_size=job.num_responses, return_prompt=False, **sampling)
        watch.mark("rollout")
        scores = scores_of(reward, [torch.cat(pair) for pair in zip(queries, responses, strict=True)])
        watch.mark("scoring")
        statistics = trainer.step(queries, responses, scores)
        watch.mark("step")
        training = sum(float(statistics[name]) for name in TRAINING)
        seconds = {
            "rollout": watch.taken("rollout"),
            "scoring": watch.taken("scoring") + watch.taken("step") - training,
            "training": training,
        }
        watch.add(seconds, [len(response) for response in responses])
    watch.report("torch", "transformers", "trl")


if __name__ == "__main__":
    main()
