"""TRL's `GRPOTrainer` on the sums of docs/results.md, with the settings of `examples/real/sums-groups.yaml`.

    python benchmarks/peers/environments.py --environments runs/peers --peer trl-1.16
    PYTHONPATH=src:. runs/peers/trl-1.16/bin/python benchmarks/peers/sums_trl.py models/smollm2 runs/sums-trl.json

The same model, sums, verifier, number of samples, LoRA and optimizer, in float32 on one core. What Proximo has and this
trainer has not stays away: groups of equal scores are in the mean of its loss, with an advantage of 0. Responses train
in micro-batches of 32, of which each step has eight; checkpointing of activations, on by default, would cost time.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from examples.real.sums import rows
from peft import LoraConfig
from step_log import StepLog
from trl import GRPOConfig, GRPOTrainer

from proximo_verifiers import Grader, MathsVerifier, trl_reward

STEPS, PROMPTS, RESPONSES, MICRO_BATCH = 6, 16, 16, 32


def config_of(folder: str) -> GRPOConfig:
    """The recipe in TRL's words."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
        max_steps=STEPS,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=PROMPTS * RESPONSES // MICRO_BATCH,
        num_generations=RESPONSES,
        max_completion_length=12,
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
    )


def main(model: str, out: str) -> None:
    """Train, and write what each step took and reached."""
    torch.set_num_threads(1)
    questions = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in rows()]
    steps = StepLog(out, score="reward", tokens="completions/mean_length")
    grades = Grader(MathsVerifier, {"answer_from": ["number"]}, num_workers=1)
    with grades as grader, tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            model=model,
            reward_funcs=[trl_reward(grader)],
            args=config_of(folder),
            train_dataset=Dataset.from_list(questions),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[steps],
        ).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
