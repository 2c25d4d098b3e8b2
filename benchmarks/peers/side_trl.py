"""TRL's `PPOTrainer` (trl.experimental.ppo) on a job, as its documentation starts it.

Nothing in it is replaced. Two forward hooks and a callback note the time: the reference's first forward pass of a step
comes right after the generation, and the reward model's head is the last thing before the training. The hook on the
reward model also counts the tokens that are not padding.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from stopwatch import Stopwatch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer
from work import Job


class StepEnds(TrainerCallback):
    """Tells the stopwatch where steps begin and end."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch

    def on_train_begin(self, *_, **__) -> None:
        """The first step begins."""
        self.watch.begin()

    def on_step_end(self, *_, **__) -> None:
        """The next begins at once."""
        self.watch.end_step()


def config_of(job: Job, folder: str) -> PPOConfig:
    """The job in TRL's words."""
    return PPOConfig(
        output_dir=folder,
        use_cpu=job.device == "cpu",
        bf16=job.precision == "bf16",
        gradient_checkpointing=False,
        seed=job.seed + 1,
        learning_rate=job.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=job.num_responses,
        gradient_accumulation_steps=1,
        num_mini_batches=job.num_responses // job.minibatch,
        num_ppo_epochs=job.epochs,
        local_rollout_forward_batch_size=job.num_responses,
        total_episodes=job.num_responses * (job.steps + 1),
        response_length=job.new_tokens,
        temperature=1.0,
        stop_token="eos",
        num_sample_generations=0,
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Train for as many steps and report them."""
    job = Job.load(sys.argv[1])
    torch.set_num_threads(job.threads)
    watch = Stopwatch(job.device)
    tokenizer = AutoTokenizer.from_pretrained(f"{job.models}/tokenizer")
    prompts = [prompt for prompt in job.prompts() for _ in range(job.group)]
    longest = max(len(prompt) for prompt in prompts)  # all prompts of a step are padded to it
    policy, reference = (AutoModelForCausalLM.from_pretrained(f"{job.models}/policy") for _ in range(2))
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(f"{job.models}/{name}") for name in ("value", "reward")
    )
    adapter = None
    if job.adapter_rank:
        reference = None  # the base below the adapter
        lora = {"r": job.adapter_rank, "lora_alpha": 32, "target_modules": "all-linear"}
        adapter = LoraConfig(task_type="CAUSAL_LM", **lora)
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(
            args=config_of(job, folder),
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=reward,
            value_model=value,
            peft_config=adapter,
            train_dataset=Dataset.from_dict({"input_ids": prompts}),
            callbacks=[StepEnds(watch)],
        )
        # With an adapter the reference is the policy without it, and counts as rollout, as do the values.
        marks = reward.base_model if reference is None else reference
        marks.register_forward_pre_hook(lambda *_: watch.mark("rollout"))
        reward.score.register_forward_hook(lambda *_: watch.mark("scoring"))
        reward.base_model.register_forward_pre_hook(
            lambda _, __, given: watch.count(given["attention_mask"][:, longest:].sum(dim=1).tolist()), with_kwargs=True
        )
        trainer.train()
    watch.report("torch", "transformers", "trl")


if __name__ == "__main__":
    main()
