"""Builds the task of `proximo ppo` from its recipe, with its critic. The steps: task.py, trainer.py."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from proximo.config.rewards.sources import ModelRewardConfig
from proximo.config.run import ScalarModelConfig
from proximo.data.rendering import check_rendering
from proximo.data.rows import row_ids
from proximo.data.tokenise import TextEncoder
from proximo.distributed.world import current
from proximo.environments.engine import Arena
from proximo.environments.reward import EnvironmentReward
from proximo.models.language import LanguageModel
from proximo.models.loading import check_same_output
from proximo.models.pretrained.folders import refuse_second_adapter
from proximo.models.pretrained.sources import ModelSource, adapter_folder, adapter_or_folder
from proximo.models.scalar import HeadStart, ScalarModel, scalar_from_language_model
from proximo.models.sharing import check_scalar_adapter, is_shared, scalar_from_adapter, value_on_base
from proximo.models.transformers_model import check_lengths
from proximo.ppo.recipe import PPORecipe
from proximo.ppo.recipe_data import Data, load_data
from proximo.ppo.roles.policy import sampling_options
from proximo.ppo.roles.worker import ServedReferenceWorker
from proximo.ppo.task import PPOTask
from proximo.ppo.trainer import PPOTrainer
from proximo.rewards.model import ModelReward
from proximo.rewards.source import CheckingSource, ClosableSource, NoReward, RewardSource, build_on_first
from proximo.rewards.weighted import WeightedReward
from proximo.rollout.vllm.server import VLLMServer
from proximo.run.make.conversion import check_optimizer
from proximo.run.make.data import SplitRows, read_split, token_cache
from proximo.run.make.engine import Sampling, check_engine, check_length, engine_of, find_reference, make_servers
from proximo.run.make.environments import make_environments
from proximo.run.make.models import (
    DeviceSpec,
    build_language_model,
    build_reference,
    build_reward_source,
    build_scalar_model,
    build_tokenizer,
    build_value_on_trunk,
    check_readers,
    finish_scalar_model,
    gives_same_ids,
    load_reward_tokenizer,
    lora_options,
    model_source,
    prepare_device,
)
from proximo.run.make.sharding import shard_model
from proximo.run.memory import check_release
from proximo.run.resumption import inputs_fingerprint


def build_task(recipe: PPORecipe) -> PPOTask:
    """Load data, then rewards without a model, then models, so that mistakes are found before slow steps.

    Processes that reward sources start are ended by the task's `close`, or here if building fails.
    """
    with ExitStack() as started:
        task = _build_task(recipe, started)
        started.pop_all()
        return task


def _build_task(recipe: PPORecipe, started: ExitStack) -> PPOTask:
    _check_shared_bases(recipe)
    device_spec, cache = prepare_device(recipe.run), token_cache(recipe.run)
    policy_device = device_spec.on(recipe.devices.policy.device)
    served = _find_servers(recipe, policy_device.device, started)
    _check_device_options(recipe, policy=policy_device, value=device_spec.on(recipe.devices.value.device))
    rows = read_split(recipe.data, seed=recipe.run.seed)
    policy_config = recipe.model
    tokenizer = _tokenizer_of_all(recipe)
    configs = [*recipe.reward, *([recipe.gold] if recipe.gold else [])]
    owns = [load_reward_tokenizer(config) if isinstance(config, ModelRewardConfig) else None for config in configs]
    data = load_data(recipe, rows, tokenizer, cache)
    _check_served(served, recipe, data)
    environments = _start_environments(recipe, tokenizer, started)
    for own in owns:
        if own is not None and not gives_same_ids(own, tokenizer):
            check_rendering(TextEncoder(own), data.all_prompts)
    budget = recipe.ppo.tokens_per_microbatch
    build = partial(
        build_reward_source, policy_tokenizer=tokenizer, device_spec=device_spec, tokens_per_microbatch=budget
    )
    early = [
        None if isinstance(config, ModelRewardConfig) else build_on_first(partial(build, config), name=config.name)
        for config in configs
    ]
    for source in early:
        if isinstance(source, ClosableSource):
            started.callback(source.close)
    current().on_rank_0(lambda: _check_rows(early, rows, data), what="the check of rows by reward sources")
    policy = build_language_model(policy_config, tokenizer, device_spec=policy_device)
    # They start while the other models are loaded.
    sampling = _sampling(recipe, data)
    servers = make_servers(recipe.engine, policy, tokenizer, sampling, path=policy_config.path, started=started)
    all_sources = [
        source or build(config, policy=policy, own=own)
        for config, source, own in zip(configs, early, owns, strict=True)
    ]
    gold = all_sources[-1] if recipe.gold else None
    sources = [
        (config.weight, source) for config, source in zip(recipe.reward, all_sources[: len(recipe.reward)], strict=True)
    ]
    reward = _reward(recipe, sources)
    # A reward model with its own tokenizer has other lengths; it checks each response itself.
    scorers = {s.name: s.model for _, s in sources if isinstance(s, ModelReward) and s.encoder is None}
    reference = _load_reference(recipe, tokenizer, device_spec)
    value = build_value(recipe, policy, tokenizer, device_spec=device_spec)
    _check_context(recipe, data, scorers, {"policy": policy, "reference": reference, "value": value})
    unsaved = _unsaved_models(recipe, policy, reference, value, sources)
    fingerprint = inputs_fingerprint(rows, tokenizer, unsaved) | dict(data.texts.fingerprints)
    if served is not None:
        fingerprint["models"] |= {"reference": f"served: {served.model_name}"}
    # After fingerprints were taken, which are of the weights on disk.
    frozen = [source.model for source in all_sources if isinstance(source, ModelReward)]
    _prepare_frozen(recipe, frozen, reference, beside=[m.model for m in (policy, value) if m is not None])
    trainer = PPOTrainer(
        policy,
        tokenizer,
        reference=served or reference,
        value=value,
        reward=reward,
        ptx=data.texts.examples,
        engine=engine_of(servers, policy, tokenizer),
        environment=environments,
        config=recipe.ppo,
        seed=recipe.run.seed,
        devices=recipe.devices,
    )
    return PPOTask(
        trainer,
        data.prompts,
        data.held_out,
        reward=reward,
        gold=gold,
        servers=servers,
        environments=environments,
        samples_per_step=recipe.run.samples_per_step,
        difficulty=data.difficulty,
        inputs_fingerprint=fingerprint,
        notes=(*data.notes, *cache.notes, *_sharing_note(trainer, sources), *_served_note(served, recipe)),
    )


def _find_servers(recipe: PPORecipe, device: torch.device, started: ExitStack) -> ServedReferenceWorker | None:
    """Checks the servers of the engine; the worker of a reference on servers, which answer, or None. For every rank."""
    current().on_rank_0(lambda: check_engine(recipe.engine, device), what="the check of the engine")
    config, reference, servers = recipe.devices.reference, recipe.reference, list[VLLMServer]()
    if not config.addresses or reference is None:
        return None

    def find() -> str:
        servers.extend(find_reference(config, started, named=model_source(reference, seed=0)))
        return Path(servers[0].model()).name

    model_name = current().on_rank_0(find, what="the servers of the reference")
    return ServedReferenceWorker(servers, model_name=model_name)


def _check_served(served: ServedReferenceWorker | None, recipe: PPORecipe, data: Data) -> None:
    """Raises ConfigError if a server of the reference takes fewer tokens than the run may ask it for."""
    if served is not None:
        longest = sum(_longest(recipe, data)) + 1  # vLLM writes one after a prompt
        check = partial(check_length, max_tokens=longest)
        current().on_rank_0(lambda: list(map(check, served.servers)), what="the length that the reference takes")


def _start_environments(recipe: PPORecipe, tokenizer: PreTrainedTokenizerBase, started: ExitStack) -> Arena | None:
    if recipe.environment is None:
        return None
    everywhere = recipe.engine.kind == "local"
    is_rewarded = bool(recipe.reward)
    environments = make_environments(recipe.environment, tokenizer, on_every_rank=everywhere, is_rewarded=is_rewarded)
    started.callback(environments.close)
    return environments


def _reward(recipe: PPORecipe, sources: Sequence[tuple[float, RewardSource]]) -> RewardSource:
    """The weighted sum of the sources, with what the environment gives."""
    if recipe.environment is not None:
        sources = [(1.0, EnvironmentReward(per_turn=recipe.ppo.advantage.is_per_token)), *sources]
    return WeightedReward(sources, task=recipe.ppo.task_reward) if sources else NoReward()


def _load_reference(
    recipe: PPORecipe, tokenizer: PreTrainedTokenizerBase, device_spec: DeviceSpec
) -> LanguageModel | None:
    """The model of the section `reference`; None without one, and where servers have it."""
    if recipe.reference is None or not recipe.loads_reference:
        return None
    return build_reference(recipe.reference, tokenizer, device_spec=device_spec.on(recipe.devices.reference.device))


def _tokenizer_of_all(recipe: PPORecipe) -> PreTrainedTokenizerBase:
    """The policy's tokenizer. Raises ModelError where a role reads or writes other tokens."""
    policy_config = recipe.model
    reference_config = recipe.reference if recipe.ppo.kl.needs_reference else None
    tokenizer = build_tokenizer(recipe.tokenizer, model_path=policy_config.path, revision=policy_config.revision)
    roles = {"policy": policy_config, "reference": reference_config, "value": value_reader(recipe)}
    check_readers(recipe.tokenizer, tokenizer, roles)
    if reference_config is not None:
        sources = (model_source(config, seed=0) for config in (policy_config, reference_config))
        check_same_output(*sources, tokenizer)
    return tokenizer


def _check_device_options(recipe: PPORecipe, *, policy: DeviceSpec, value: DeviceSpec) -> None:
    """Raises ConfigError where an optimizer, or `release_cache`, is not for the device of its role."""
    check_release(recipe.ppo.release_cache, policy.device)
    check_optimizer(recipe.ppo.policy_optimizer, policy.device)
    if recipe.ppo.uses_critic:
        check_optimizer(recipe.ppo.value_optimizer, value.device)


def _prepare_frozen(
    recipe: PPORecipe,
    rewards: Sequence[ScalarModel],
    reference: LanguageModel | None,
    *,
    beside: Sequence[nn.Module],
) -> None:
    """Store frozen models in bf16, under bf16, and shard reward models over the ranks.

    `beside`: trained models, whose tensors a frozen one may share.
    """
    for model in rewards:
        model.narrow_frozen(beside=beside)
        shard_model(model, recipe.devices, role="reward", beside=beside)
    if reference is not None and recipe.ppo.kl.reference_every_steps is None:
        reference.narrow_frozen(beside=beside)


def _check_rows(sources: Sequence[RewardSource | None], rows: SplitRows, data: "Data") -> None:
    """Raises DataError for a prompt that a reward source could not grade, whatever the response."""
    checking = [source for source in sources if isinstance(source, CheckingSource)]
    for part, prompts in ((rows.training, data.prompts), (rows.held_out, data.held_out)):
        origins = dict(zip(row_ids(part), (row.origin for row in part), strict=True)) if checking else {}
        for source in checking:
            source.check_prompts(prompts, origins)


def _longest(recipe: PPORecipe, data: Data) -> tuple[int, int]:
    """Most tokens of a prompt and of its response; of an episode, together those of its longest call."""
    if recipe.environment is not None:
        return recipe.longest
    return max(len(prompt.token_ids) for prompt in data.all_prompts), recipe.ppo.rollout.max_new_tokens


def _sampling(recipe: PPORecipe, data: Data) -> Sampling:
    """What servers have to know of the rollouts when they start."""
    rollout, longest = recipe.ppo.rollout, sum(_longest(recipe, data))
    leaves_out = sampling_options(recipe.ppo).leaves_out_tokens
    return Sampling(
        temperature=rollout.temperature, max_tokens=longest, leaves_out_tokens=leaves_out, staleness=rollout.staleness
    )


def _check_shared_bases(recipe: PPORecipe) -> None:
    """Raises ModelError if a reward model with `share_base` has another base than the policy. Reads no weights."""
    base = ModelSource(path=recipe.model.path, revision=recipe.model.revision, config=recipe.model.config)
    for source in recipe.reward:
        if isinstance(source, ModelRewardConfig) and source.share_base:
            check_scalar_adapter(base, adapter_or_folder(source.path, source.revision), role="reward")


def _served_note(served: ServedReferenceWorker | None, recipe: PPORecipe) -> list[str]:
    """A note that says which model the servers of the reference have, if there are any."""
    if served is None or recipe.reference is None:
        return []
    named = Path(str(recipe.reference.path)).name
    other = "" if named == served.model_name else f"; of {named} (reference.path) only the vocabulary is read"
    return [f"the servers of the reference have {served.model_name}{other}"]


def _sharing_note(trainer: PPOTrainer, sources: Sequence[tuple[float, RewardSource]]) -> list[str]:
    """A note that lists the models that share the policy's weights, if any."""
    scorers = {source.name: source.model for _, source in sources if isinstance(source, ModelReward)}
    if not trainer.policy.has_adapter:
        return []
    own = {worker.role: worker.model for worker in trainer.roles.workers if worker.role != "policy"}
    others = own | scorers
    shared = [name for name, model in others.items() if is_shared(model, trainer.policy)]
    return [f"one copy of the base serves the policy and {', '.join(shared)}"] if shared else []


def _unsaved_models(
    recipe: PPORecipe,
    policy: LanguageModel,
    reference: LanguageModel | None,
    value: ScalarModel | None,
    sources: Sequence[tuple[float, RewardSource]],
) -> dict[str, nn.Module]:
    """Models that no checkpoint of this run holds: reference, bases of adapters, reward models."""
    models: dict[str, nn.Module] = {s.name: s.model.model for _, s in sources if isinstance(s, ModelReward)}
    if policy.has_adapter:  # its base is the reference, unless there is another one
        models["policy_base"] = policy.model
    if reference is not None:
        models["reference"] = reference.model
    elif recipe.loads_reference and not policy.has_adapter:
        models["reference"] = policy.model
    if value is not None and value.has_adapter:
        models["value_base"] = value.model
    return models


def _check_context(
    recipe: PPORecipe,
    data: Data,
    scorers: Mapping[str, ScalarModel],
    models: Mapping[str, LanguageModel | ScalarModel | None],
) -> None:
    """Raises ConfigError if a sequence exceeds the context of a model that reads it.

    `scorers`: reward models, which also read the reference answers. `models`: those of the other roles.
    """
    longest, response = _longest(recipe, data)
    lengths = [(len(answer.prompt.token_ids), len(answer.token_ids)) for answer in data.answers]
    answered = max(lengths, key=sum, default=(0, 0))

    section = "data" if recipe.environment is None else "environment"
    for role, model in (*scorers.items(), *models.items()):
        if model is not None:
            lengths_of_run = {"max_prompt_tokens": longest, "max_response_tokens": response}
            check_lengths(model.base.config, role=role, section=section, **lengths_of_run)
    for role, model in scorers.items():
        check_lengths(model.base.config, role=role, max_prompt_tokens=answered[0], max_response_tokens=answered[1])
    if (policy := models["policy"]) is not None:
        texts = max((len(text.token_ids) for text in data.texts.examples or ()), default=0)
        config = policy.base.config
        check_lengths(config, role="policy", max_prompt_tokens=texts, max_response_tokens=0, section="ptx_data")


def build_value(
    recipe: PPORecipe, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, *, device_spec: DeviceSpec
) -> ScalarModel | None:
    """The critic: on the policy's backbone or a copy of it, from the reward model with its head, or from a checkpoint.

    None if the advantage estimator needs no critic. Raises ModelError if it cannot be built.
    """
    config, device_spec = recipe.value, device_spec.on(recipe.devices.value.device)
    if not recipe.ppo.uses_critic:
        return None
    if config.init_from == "trunk":
        return build_value_on_trunk(config, policy, device_spec=device_spec)
    if config.init_from == "policy":
        return _from_policy(recipe, policy, device_spec=device_spec)
    if config.init_from == "reward":
        return _from_reward(recipe, policy, tokenizer, device_spec=device_spec)
    return build_scalar_model(config, tokenizer, fresh_head=HeadStart.ZERO, device_spec=device_spec)


def value_reader(recipe: PPORecipe) -> ScalarModelConfig | ModelRewardConfig | None:
    """The section of the model whose embedding the critic uses for the policy's ids; None if it is the policy's own."""
    config = recipe.value
    if not recipe.ppo.uses_critic or config.init_from in ("policy", "trunk"):
        return None
    return _scorer(recipe) if config.init_from == "reward" else config


def _scorer(recipe: PPORecipe) -> ModelRewardConfig:
    return next(source for source in recipe.reward if isinstance(source, ModelRewardConfig))


def _from_policy(recipe: PPORecipe, policy: LanguageModel, *, device_spec: DeviceSpec) -> ScalarModel:
    config = recipe.value
    if config.lora is not None:
        source = model_source(recipe.model, seed=device_spec.seed)
        refuse_second_adapter(adapter_folder(source), source.name)
    if config.lora is not None and policy.has_adapter:
        options = lora_options(config.lora, seed=device_spec.seed)
        model = value_on_base(policy, options, HeadStart.ZERO, seed=device_spec.seed)
        return finish_scalar_model(model, config.model_copy(update={"lora": None}), device_spec=device_spec)
    model = scalar_from_language_model(policy, HeadStart.ZERO, seed=device_spec.seed)
    if model.device != device_spec.loading_device:
        model.model.to(device_spec.loading_device)
    return finish_scalar_model(model, config, device_spec=device_spec)


def _from_reward(
    recipe: PPORecipe, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase, *, device_spec: DeviceSpec
) -> ScalarModel:
    config, scorer = recipe.value, _scorer(recipe)
    path, revision = scorer.path, scorer.revision
    if scorer.share_base:
        model = scalar_from_adapter(policy, adapter_or_folder(path, revision), role="value")
        return finish_scalar_model(model, config, device_spec=device_spec)
    start = config.model_copy(update={"init_from": "path", "path": path, "revision": revision})
    return build_scalar_model(start, tokenizer, fresh_head=None, device_spec=device_spec)
