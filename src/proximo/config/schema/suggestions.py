"""Suggests known keys for an unknown one, from the whole recipe."""

from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache, lru_cache
from itertools import groupby, islice
from typing import Any

from proximo.config.schema.fields import Path, annotation_at, key_paths

MIN_SIMILARITY = 0.75
MAX_SUGGESTIONS = 3
OTHER_TOOLS_KEYS = {
    "actor_learning_rate": "policy_optimizer.learning_rate",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
    "adv_estimator": "advantage.estimator",
    "assistant_only_loss": "data.train_on",
    "batch_size": "examples_per_step pairs_per_step solutions_per_step prompts_per_step",
    "beta": "kl.coefficient",
    "bf16": "run.precision",
    "center_rewards_coefficient": "score_centring",
    "cliprange": "policy_loss.clip_low",
    "cliprange_value": "value_loss.clip",
    "completion_only_loss": "data.train_on",
    "critic_learning_rate": "value_optimizer.learning_rate",
    "dataset_name": "data.sources",
    "dataset_text_field": "data.sources.0.columns",
    "dtype": "run.precision",
    "epochs": "epochs_per_step",
    "epsilon": "policy_loss.clip_low",
    "epsilon_high": "policy_loss.clip_high",
    "eval_dataset": "data.evaluation_sources",
    "eval_steps": "evaluate_every_steps",
    "eval_strategy": "evaluate_every_steps",
    "evaluation_strategy": "evaluate_every_steps",
    "fp16": "run.precision",
    "gae_lambda": "gae_lambda",
    "generation_batches": "prompts_per_step",
    "generation_size": "samples_per_prompt",
    "gradient_accumulation_steps": "tokens_per_microbatch",
    "gradient_checkpointing": "model.activation_checkpointing",
    "hub_model_id": "run.push",
    "init_kl_coef": "kl.coefficient",
    "kl_coef": "kl.coefficient",
    "lam": "gae_lambda",
    "lambda": "gae_lambda",
    "load_in_4bit": "model.quantisation",
    "load_in_8bit": "model.quantisation",
    "local_rollout_forward_batch_size": "tokens_per_microbatch",
    "lora_alpha": "model.lora.alpha",
    "lora_r": "model.lora.rank",
    "lora_target_modules": "model.lora.target_modules",
    "loss_type": "reward.loss dpo.loss policy_loss.aggregation",
    "lr": "learning_rate",
    "lr_scheduler_type": "schedule",
    "m2_threshold": "max_second_moment",
    "mask_truncated_completions": "truncation_value",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "max_gradient_norm",
    "max_length": "data.max_tokens rollout.max_new_tokens",
    "max_prompt_length": "max_prompt_tokens data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "max_steps": "num_steps num_epochs",
    "micro_batch_size": "tokens_per_microbatch",
    "mini_batch_size": "minibatch_responses",
    "model_name_or_path": "model.path",
    "num_epochs": "num_steps",
    "num_generations": "responses_per_prompt",
    "num_iterations": "epochs_per_step",
    "num_mini_batches": "num_minibatches",
    "num_ppo_epochs": "epochs_per_step",
    "num_steps": "num_epochs",
    "num_train_epochs": "num_epochs num_steps",
    "optim": "optimizer.kind policy_optimizer.kind",
    "output_dir": "folder",
    "packing": "data.layout",
    "peft_config": "model.lora",
    "per_device_eval_batch_size": "tokens_per_microbatch",
    "per_device_train_batch_size": "examples_per_step pairs_per_step solutions_per_step prompts_per_step",
    "policy": "model",
    "ppo_epochs": "epochs_per_step",
    "ppo_n_minibatches": "num_minibatches",
    "processing_class": "tokenizer",
    "push_to_hub": "run.push",
    "r": "lora.rank",
    "ref_model": "reference",
    "report_to": "run.sinks",
    "response_length": "rollout.max_new_tokens",
    **dict.fromkeys(("reward_funcs", "reward_model", "reward_model_path", "reward_weights"), "reward"),
    "run_name": "run.sinks",
    "save_steps": "save_every_steps",
    "save_total_limit": "keep_last",
    "scale_rewards": "advantage.estimator",
    "sft_model_path": "model.path",
    "tf32": "run.precision",
    "torch_dtype": "run.precision",
    "total_episodes": "num_steps",
    "total_steps": "num_steps num_epochs",
    "train_batch_size": "examples_per_step pairs_per_step solutions_per_step prompts_per_step",
    "train_dataset": "data.sources",
    "use_peft": "model.lora",
    "use_vllm": "engine",
    "value_model": "value",
    "vf_coef": "value_loss.coefficient",
    "vllm_mode": "engine",
    "vllm_server_base_url": "engine",
    "warmup_ratio": "warmup_updates",
    "warmup_steps": "warmup_updates",
}
"""Name of a setting in other tools -> ends of the paths of the equivalent keys, one or more, of one trainer each."""
NEEDLESS_KEYS = {
    "disable_dropout": "dropout is off, but for `dropout: true` of those trainers that have it",
    "do_eval": "rows that are held out are evaluated",
    "do_train": "the command trains",
    "early_stopping_patience": "a run takes all of its steps, and the best checkpoint is kept besides the last ones",
    "load_best_model_at_end": "the best checkpoint is kept: --checkpoint best of the other commands takes it",
    "logging_steps": "every step is written to metrics.jsonl",
    "logging_strategy": "every step is written to metrics.jsonl",
    "overwrite_output_dir": "--overwrite of the command replaces a run",
    "padding_free": "sequences are packed without padding",
    "padding_side": "sequences are packed without padding",
    "remove_unused_columns": "columns that are not used are named and left out",
    "resume_from_checkpoint": "--resume of the command goes on",
}
"""Name of a setting in other tools that has no key here -> why none is needed."""
RENAMED = {
    "advantage.equal_groups": "advantage.zero_variance_groups",
    "advantage.lam": "advantage.gae_lambda",
    "advantage.value_lam": "advantage.value_gae_lambda",
    "arguments": "kwargs",
    "each_number": "number_usage",
    "first_pause_seconds": "initial_backoff_seconds",
    "guards.max_equal_steps": "guards.max_constant_reward_steps",
    "guards.max_faulty_fraction": "guards.max_unscored_fraction",
    "judge_class": "verifier_class",
    "kl.measure": "kl.estimator",
    "kl.place": "kl.apply_to",
    "limit_each_test": "limit_per_test",
    "model.start": "model.init_from",
    "no_answer": "no_answer_score",
    "no_program": "no_program_score",
    "opened_by_prompt": "think_in_prompt",
    "outcome": "task_reward",
    "policy_loss.average": "policy_loss.aggregation",
    "policy_loss.average_constant": "policy_loss.divisor",
    "rejection.measure": "rejection.estimator",
    "requests_at_once": "max_concurrent_requests",
    "right": "correct_score",
    "right_reads": "verifier_input",
    "rollout.max_rows": "rollout.max_num_seqs",
    "rollout.shortest_limit": "rollout.random_limit_min",
    "satisfies": "json_schema",
    "score.running": "score.normalise",
    "score.truncated": "score.score_truncated",
    "several_boxes": "multiple_answers",
    "truncated": "truncation_value",
    "unfenced": "allow_unfenced",
    "value.start": "value.init_from",
    "well_formed_credit": "format_bonus",
    "wrong": "incorrect_score",
    "zero_as_minus_one": "min_score",
}
"""Key of an earlier version, with its section if the name is ambiguous -> last part of the path of the current key."""


OTHER_TOOLS_VALUES = {
    "cosine_with_warmup": "cosine",
    "dr_grpo": "group_centred",
    "fp32": "float32",
    "gpu": "cuda",
    "grpo": "group_standardised",
    "opo": "length_weighted",
    "ppo": "gae",
    "reinforce": "return_to_go",
    "reinforce++": "return_to_go",
    "remax": "greedy_baseline",
    "rloo": "leave_one_out",
    "seq_mean_token_mean": "response_mean",
    "seq_mean_token_sum_norm": "constant",
}
"""Value of a setting in other tools -> the equivalent value here."""


def suggested_value(typed: Any, offered: Sequence[Any]) -> Any:
    """The value of `offered` that was probably meant; None if none is similar to `typed`."""
    if not isinstance(typed, str):
        return None
    meant = OTHER_TOOLS_VALUES.get(typed.lower().replace("-", "_"))
    words = [value for value in offered if isinstance(value, str)]
    near = get_close_matches(typed.lower(), words, n=1)
    return meant if meant in words else next(iter(near), None)


def suggestions(typed: Path, schema: Any, tree: Any) -> tuple[str, ...]:
    """Full paths of the known keys most similar to `typed`: at most MAX_SUGGESTIONS, without `typed` itself."""
    ranks = {path: _rank(typed, path) for path in _similar_places(typed, schema)}
    near = [path for path, rank in ranks.items() if rank[0] >= MIN_SIMILARITY]
    # Whether a path exists takes longer to find out than its rank, so the nearest are asked first.
    nearest_first = sorted(near, key=ranks.__getitem__, reverse=True)
    known = (path for path in nearest_first if annotation_at(schema, tree, path) is not None)
    _, nearest = next(groupby(known, key=ranks.__getitem__), (None, ()))
    return tuple(".".join(path) for path in islice(nearest, MAX_SUGGESTIONS))


def _rank(typed: Path, path: Path) -> tuple[float, ...]:
    """Sort key, higher for a better match: by similarity of the name, shared prefix, and shortness of the path."""
    return round(_similarity(typed, path), 6), _shared_prefix(typed, path), -len(path)


def _similar_places(typed: Path, schema: Any) -> list[Path]:
    """All other key paths of the schema, with the list indices of `typed` where it has the same lists."""
    places = dict.fromkeys(_in_place_of(typed, path) for path in _all_paths(schema))
    return [path for path in places if path != typed]


@cache
def _all_paths(schema: Any) -> tuple[Path, ...]:
    return tuple(path for path, _ in key_paths(schema))


@lru_cache(maxsize=4096)
def _ratio(name: str, end: str) -> float:
    return SequenceMatcher(None, name, end).ratio()


def _in_place_of(typed: Path, path: Path) -> Path:
    shared = 0
    for mine, theirs in zip(typed, path, strict=False):
        if mine != theirs and not (mine.isdecimal() and theirs.isdecimal()):
            break
        shared += 1
    return (*typed[:shared], *path[shared:])


def _similarity(typed: Path, path: Path) -> float:
    """Similarity of two keys, from 0 to 1: 1 for the same name in any section.

    The name is also compared with the last two parts of the path: `kl_coef` with `kl.coefficient`."""
    name = typed[-1].lower().replace("-", "_")
    ends = (path[-1], "_".join(path[-2:]))
    meant = RENAMED.get(".".join(typed[-2:])) or RENAMED.get(name) or OTHER_TOOLS_KEYS.get(name, "")
    if name in ends or any(_ends_with(path, each) for each in meant.split()):
        return 1.0
    same_section, words = typed[:-1] == path[:-1], set(name.split("_"))
    if same_section and len(words) > 1 and words < set(path[-1].split("_")):
        return 1.0  # `max_tokens` for `max_prompt_tokens`
    # A typo in the right section is more likely than a key of another section.
    nearby = 0.1 if same_section else 0.0
    shortened = 0.8 if len(name) >= 3 and path[-1].startswith(name) else 0.0
    return min(0.99, nearby + max(shortened, *(_ratio(name, end) for end in ends)))


def _ends_with(path: Path, end: str) -> bool:
    # `devices` has a key for each role, which is not the role's own section.
    return ".".join(("", *path)).endswith(f".{end}") and path[-2:-1] != ("devices",)


def _shared_prefix(typed: Path, path: Path) -> int:
    return next((index for index, pair in enumerate(zip(typed, path, strict=False)) if pair[0] != pair[1]), len(path))
