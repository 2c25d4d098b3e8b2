"""torchtune's recipe `ppo_full_finetune_single_device` on a job, with settings as in the configurations it ships.

The recipe's class is taken from the file that is installed and run as `tune run` runs it. Injected through the
configuration are a dataset of token ids, the tokenizer's two ids and a logger; two forward hooks note where generation
and scoring end. The recipe saves when it is done: the peak of memory is taken at the last step, before that.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torchtune
from endings import EOS_ID, PAD_ID
from omegaconf import OmegaConf
from stopwatch import Stopwatch
from work import SIZES, Job

WATCH: list[Stopwatch] = []
"""The one of this process: the recipe makes its components itself."""


class Tokens(torch.utils.data.Dataset):
    """Prompts as ids, as often as there are steps: a pass over the data is then one run, and saves once."""

    def __init__(self, tokenizer: Any, job: str) -> None:
        del tokenizer
        loaded = Job.load(job)
        once = [prompt for prompt in loaded.prompts() for _ in range(loaded.group)]
        self.rows = once * (loaded.steps + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": self.rows[index], "labels": self.rows[index]}


class Ids:
    """All that the recipe asks of a tokenizer."""

    pad_id, eos_id, stop_tokens = PAD_ID, EOS_ID, (EOS_ID,)


class StepEnds:
    """A metric logger: the recipe logs once at the end of a step."""

    def log_config(self, config: Any) -> None:
        """Not noted."""
        del config

    def log_dict(self, payload: Any, step: int) -> None:
        """The step is over."""
        del payload, step
        WATCH[0].end_step()

    def close(self) -> None:
        """Nothing is open."""


def recipe_class() -> Any:
    """From the file in the installed package."""
    place = Path(torchtune.__file__).parent.parent / "recipes" / "ppo_full_finetune_single_device.py"
    spec = importlib.util.spec_from_file_location("ppo_recipe", place)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PPOFullFinetuneRecipeSingleDevice


def config_of(job: Job, job_path: str, folder: str) -> Any:
    """The job in torchtune's words."""
    size = SIZES[job.size]
    model = {
        "vocab_size": size.vocabulary,
        "num_layers": size.layers,
        "num_heads": size.heads,
        "num_kv_heads": size.heads,
        "embed_dim": size.width,
        "intermediate_dim": size.mlp,
        "max_seq_len": max(256, job.prompt_tokens + job.new_tokens),
        "norm_eps": 1e-6,
    }

    def checkpointer(name: str, kind: str) -> dict[str, Any]:
        return {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": f"{job.models}/{name}",
            "checkpoint_files": ["model.safetensors"],
            "recipe_checkpoint": None,
            "output_dir": f"{folder}/{name}",
            "model_type": kind,
        }

    return OmegaConf.create(
        {
            "tokenizer": {"_component_": "side_torchtune.Ids"},
            "dataset": {"_component_": "side_torchtune.Tokens", "job": job_path},
            "policy_model": {"_component_": "torchtune.models.llama2.llama2", **model},
            "reward_and_value_model": {
                "_component_": "torchtune.models.llama2._component_builders.llama2_classifier",
                "num_classes": 1,
                **model,
            },
            "checkpointer": checkpointer("policy", "LLAMA2"),
            "ref_policy_checkpointer": checkpointer("policy", "LLAMA2"),
            "value_checkpointer": checkpointer("value", "REWARD"),
            "reward_checkpointer": checkpointer("reward", "REWARD"),
            "resume_from_checkpoint": False,
            "output_dir": folder,
            "seed": job.seed + 1,
            "shuffle": False,
            "device": "cpu",
            "batch_size": job.num_responses,
            "num_steps": job.num_responses * (job.steps + 1),
            "ppo_epochs": job.epochs,
            "ppo_batch_size": job.minibatch,
            "gradient_accumulation_steps": 1,
            "compile": False,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": job.learning_rate, "fused": True},
            "optimizer_in_bwd": False,
            "log_peak_memory_stats": False,
            "enable_activation_checkpointing": False,
            "enable_kv_cache": True,
            "dtype": {"float32": "fp32", "bf16": "bf16"}[job.precision],
            "forward_batch_size": job.num_responses,
            "max_generated_tokens": job.new_tokens,
            "temperature": 1.0,
            "top_k": None,
            "min_response_length": None,
            "penalise_no_eos": False,
            "reward_penalty": -3,
            "stop_token_ids": [EOS_ID],
            "whiten_rewards": False,
            "gamma": 1,
            "lmbda": 0.95,
            "loss": {
                "_component_": "torchtune.rlhf.loss.PPOLoss",
                "epsilon": 0.2,
                "value_coeff": 0.1,
                "value_clip_range": 0.2,
            },
            "kl_coeff": 0.05,
            "metric_logger": {"_component_": "side_torchtune.StepEnds"},
            "log_every_n_steps": 1,
        }
    )


def main() -> None:
    """Run the recipe and report the steps."""
    job = Job.load(sys.argv[1])
    torch.set_num_threads(job.threads)
    watch = Stopwatch()
    sys.modules["side_torchtune"].WATCH.append(watch)
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(job, sys.argv[1], folder)
        recipe = recipe_class()(cfg=config)
        recipe.setup(cfg=config)
        longest = max(len(prompt) for prompt in job.prompts())  # all prompts of a step are padded to it

        def score_begins(_: Any, given: tuple[torch.Tensor, ...]) -> None:
            watch.count((given[0][:, longest:] != PAD_ID).sum(dim=1).tolist())

        recipe._ref_policy_model.register_forward_pre_hook(lambda *_: watch.mark("rollout"))
        recipe._reward_model.register_forward_pre_hook(score_begins)
        recipe._reward_model.register_forward_hook(lambda *_: watch.mark("scoring"))
        watch.begin()
        recipe.train()
        recipe.cleanup()
    watch.report("torch", "torchtune", "torchao")


if __name__ == "__main__":
    sys.modules["side_torchtune"] = sys.modules["__main__"]
    main()
