"""TRL's `PPOTrainer` (trl.experimental.ppo) in a race. Nothing in it is replaced.

It takes its scores from a reward model and from nothing else. Where a rule judges, the "model" is a module whose body
reads the text of each row and gives the rule's answer as hidden states, which its head passes on. Padding must have a
token of its own: a byte that no text has, which the policy does not write either.
"""

import sys
import tempfile
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import sorting
import torch
from datasets import Dataset
from race import Course, Race
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl.experimental.ppo import PPOConfig, PPOTrainer

PAD_TOKEN = "ÿ"
"""How a byte-level tokenizer writes the byte 255, which no text in UTF-8 has."""


class ArrivedError(Exception):
    """The trainer's loop asks nobody whether to go on."""


class Steps(TrainerCallback):
    """Hands score and KL of every step to the course."""

    def __init__(self, course: Course) -> None:
        self.course = course

    def on_train_begin(self, *_, **__) -> None:
        """The first step begins."""
        self.course.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_) -> None:
        """Once, at the end of a step."""
        del args, state, control
        if self.course.note(score=logs["objective/scores"], kl=logs["objective/kl"]):
            raise ArrivedError


class _ReadsText(nn.Module):
    """The body of `Judged`."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_) -> SimpleNamespace:
        """The row's score at every position, [B, T, 1]."""
        texts = self.tokenizer.batch_decode(
            [row[mask].tolist() for row, mask in zip(input_ids, attention_mask.bool(), strict=True)],
            skip_special_tokens=True,
        )
        prompts, _, responses = zip(*(text.partition("=") for text in texts), strict=True)
        right = [{"answer": sorting.digits_sorted(prompt)} for prompt in prompts]
        scores = torch.tensor(sorting.in_order(prompts, responses, right))
        return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])


class Judged(nn.Module):
    """What the trainer takes for a reward model."""

    base_model_prefix = "body"

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.body, self.score = _ReadsText(tokenizer), nn.Identity()


def config_of(race: Race, folder: str) -> PPOConfig:
    """The race in TRL's words."""
    chosen = race.settings
    return PPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=race.seed + 1,
        learning_rate=chosen.policy_rate,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        per_device_train_batch_size=chosen.batch,
        gradient_accumulation_steps=1,
        num_mini_batches=chosen.batch // chosen.minibatch,
        num_ppo_epochs=chosen.epochs,
        local_rollout_forward_batch_size=chosen.batch,
        total_episodes=chosen.batch * race.max_steps,
        response_length=race.new_tokens,
        temperature=1.0,
        stop_token="eos",
        kl_coef=race.kl_coefficient,
        num_sample_generations=0,
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    """Run until it is there."""
    race = Race.load(sys.argv[1])
    torch.set_num_threads(race.threads)
    torch.manual_seed(race.seed)
    tokenizer = AutoTokenizer.from_pretrained(race.policy, padding_side="left")
    tokenizer.pad_token = PAD_TOKEN
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id, tokenizer.unk_token_id):
        raise SystemExit(f"the tokenizer has no token for the byte {PAD_TOKEN!r}, and so none that can pad")
    policy, reference = (AutoModelForCausalLM.from_pretrained(race.policy) for _ in range(2))
    policy.generation_config.pad_token_id = tokenizer.pad_token_id
    value = AutoModelForSequenceClassification.from_pretrained(race.reward or race.policy, num_labels=1)
    reward = AutoModelForSequenceClassification.from_pretrained(race.reward) if race.reward else Judged(tokenizer)
    course = Course(race)
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in race.texts()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(
            args=config_of(race, folder),
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=reward,
            value_model=value,
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            callbacks=[Steps(course)],
        )
        with suppress(ArrivedError):
            trainer.train()
    course.report("torch", "transformers", "trl")


if __name__ == "__main__":
    main()
