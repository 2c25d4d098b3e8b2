"""TRL's `PPOTrainer` on the film reviews of docs/results.md, as `examples/real/sentiment-ppo.yaml` but for two keys.

It takes 16 steps at a KL coefficient of 0.05.

    python benchmarks/peers/environments.py --environments runs/peers --peer trl-1.12
    PYTHONPATH=benchmarks/peers runs/peers/trl-1.12/bin/python benchmarks/peers/sentiment_trl.py \
        models/smollm2 models/sentiment-reward data/sentiment/reviews_train.jsonl runs/sentiment-trl.json

The same model, openings, reward model, frozen layers, number of samples and KL coefficient, in float32 on one core. It
has one learning rate for policy and critic, and ends a line at the token of a line end, not at any token that has one.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from step_log import StepLog
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl.experimental.ppo import PPOConfig, PPOTrainer

STEPS, PROMPTS, MINIBATCHES = 16, 48, 3
WORDS, MAX_PROMPT_TOKENS = 8, 24


def config_of(folder: str, line_end: int) -> PPOConfig:
    """The recipe in TRL's words."""
    return PPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
        learning_rate=1.5e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        adam_beta2=0.95,
        per_device_train_batch_size=PROMPTS,
        gradient_accumulation_steps=1,
        num_mini_batches=MINIBATCHES,
        num_ppo_epochs=1,
        local_rollout_forward_batch_size=PROMPTS,
        total_episodes=PROMPTS * STEPS,
        response_length=20,
        temperature=0.8,
        stop_token_id=line_end,
        kl_coef=0.05,
        num_sample_generations=0,
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def freeze(model: nn.Module, number: int) -> None:
    """The lowest layers stay as they are, the embeddings do not."""
    model.get_submodule("model.layers")[:number].requires_grad_(requires_grad=False)


def main(model: str, reward: str, reviews: str, out: str) -> None:
    """Train, and write what each step took and reached."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token = "<|endoftext|>"
    (line_end,) = tokenizer("\n", add_special_tokens=False).input_ids
    rows = [json.loads(line) for line in Path(reviews).read_text(encoding="utf-8").split("\n") if line]
    ids = [tokenizer(" ".join(row["text"].split()[:WORDS])).input_ids for row in rows]
    policy, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    value, judge = (AutoModelForSequenceClassification.from_pretrained(reward, num_labels=1) for _ in range(2))
    freeze(policy, 20)
    freeze(value, 24)
    policy.generation_config.pad_token_id = tokenizer.pad_token_id
    with tempfile.TemporaryDirectory() as folder:
        PPOTrainer(
            args=config_of(folder, line_end),
            processing_class=tokenizer,
            model=policy,
            ref_model=reference,
            reward_model=judge,
            value_model=value,
            train_dataset=Dataset.from_dict({"input_ids": [each for each in ids if len(each) <= MAX_PROMPT_TOKENS]}),
            callbacks=[StepLog(out, score="objective/scores", kl="objective/kl")],
        ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
