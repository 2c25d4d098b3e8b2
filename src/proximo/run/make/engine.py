"""Builds the engine of a recipe: finds running vLLM servers or starts them."""

import copy
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from proximo.config.engine import EngineConfig, ServersConfig, VLLMEngineConfig
from proximo.distributed.unread_parameters import numbers_of
from proximo.distributed.world import current
from proximo.errors import ConfigError
from proximo.http_client import RequestRefusedError, UnansweredError
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.sources import ModelSource, adapter_base
from proximo.models.pretrained.vocabulary import embedding_rows
from proximo.models.quantised import is_quantised
from proximo.models.transformers_model import quiet_transformers
from proximo.rollout.engine import Engine
from proximo.rollout.ranks_engine import FirstRankEngine
from proximo.rollout.stopping import ending_ids
from proximo.rollout.vllm.engine import VLLMEngine, VLLMOptions
from proximo.rollout.vllm.process import DEVICES, ServerProcess, ServerSpec, divided_devices, interpreter
from proximo.rollout.vllm.requests import NEVER_PUSHED
from proximo.rollout.vllm.server import ServerLimits, VLLMServer
from proximo.run.preflight import read_secret

IN_MEMORY = Path("/dev/shm")
_SERVER_FOLDER = "proximo-vllm-"
CHECK_SECONDS = 60.0
"""Time for an idle server to answer at the start of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling settings of a run that a server needs at its start."""

    temperature: float
    max_tokens: int
    """Longest prompt and response together."""
    leaves_out_tokens: bool = False
    """By top_k or top_p."""
    staleness: int = 0
    """Number of steps that are sampled ahead of training."""


class EngineServers:
    """The servers of a run, on rank 0. `close` ends those that were started."""

    def __init__(self, config: VLLMEngineConfig, *, dtype: str, leaves_out_tokens: bool = False) -> None:
        """`leaves_out_tokens`: by top_k or top_p, so that servers may be those that return sampling masks."""
        self.config = config
        self._leaves_out_tokens = leaves_out_tokens
        self.dtype = dtype
        self._opened = ExitStack()
        self._processes: list[ServerProcess] = []
        self.servers: list[VLLMServer] = []

    def find(self) -> None:
        """Use the servers that the configuration names."""
        token = None if self.config.token_env is None else read_secret(self.config.token_env)
        for address in self.config.addresses:
            self._client(address, token)

    def start(
        self,
        policy: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        *,
        path: str | None,
        device: torch.device,
        logs: Path | None,
    ) -> None:
        """Start the servers that the configuration asks for, without waiting until they are ready.

        `path`: folder or Hub name of the policy's weights; None for random ones. `device`: where the policy will be.
        `logs`: folder for the servers' output; None for one that is removed with them.
        """
        folder = Path(tempfile.mkdtemp(prefix=_SERVER_FOLDER))
        self._opened.callback(shutil.rmtree, folder, ignore_errors=True)
        model = self._model(policy, path, folder / "model")
        on_cpu = device.type == "cpu"
        loading = ("--load-format", "dummy") if _is_pushed_whole(policy) else ()
        has_masks = sampling.leaves_out_tokens and not on_cpu  # vLLM 0.32 has none on a CPU
        spec = ServerSpec(
            python=interpreter(self.config.environment),
            model=model,
            revision=_revision(policy) if model == path else None,
            dtype=self.dtype,
            raw_logprobs=sampling.temperature == 1 and not has_masks,
            sampling_mask=has_masks,
            on_cpu=on_cpu,
            max_model_len=sampling.max_tokens,
            lora_rank=None if policy.adapter_config is None else getattr(policy.adapter_config, "r", None),
            num_adapters=sampling.staleness + 2,
            sleeps=self.config.sleep,
            arguments=(*loading, "--tokenizer", str(folder / "tokenizer"), *self.config.arguments),
            environment=self.config.variables,
        )
        tokenizer.save_pretrained(folder / "tokenizer")
        if logs is not None:
            logs.mkdir(parents=True, exist_ok=True)
        for number, devices in enumerate(_devices_of_servers(self.config, device)):
            own = replace(spec, environment={**spec.environment, **devices})
            process = ServerProcess(own, log=(logs or folder) / f"server-{number}.log", folder=folder)
            self._opened.callback(process.close)
            self._processes.append(process)
            how = {"has_ended": process.has_ended, "last_words": process.last_words}
            self._client(process.url, None, restart=process.restart_if_ended, **how)

    def engine(self, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> VLLMEngine:
        """The engine of these servers, once they are ready. Raises TrainingError if one does not become ready."""
        for process, server in zip(self._processes, self.servers, strict=False):
            process.wait_until_ready(server, seconds=self.config.start_seconds)
        options = VLLMOptions(
            transfer_folder=_transfer_folder(self.config),
            dtype=getattr(torch, self.dtype),
            may_have_masks=self._leaves_out_tokens,
            sleeps=self.config.sleep,
        )
        endings = ending_ids(policy.base, tokenizer)
        engine = VLLMEngine(self.servers, policy, tokenizer, eos_token_ids=endings, options=options)
        self._opened.callback(engine.close)
        return engine

    def close(self) -> None:
        """End the servers that `start` started."""
        self._opened.close()

    def _client(self, url: str, token: str | None, **options: Any) -> None:
        limits = ServerLimits(
            max_concurrent_requests=self.config.max_concurrent_requests,
            request_seconds=self.config.request_seconds,
            start_seconds=self.config.start_seconds,
        )
        self.servers.append(server := VLLMServer(url, token=token, limits=limits, **options))
        self._opened.callback(server.close)

    def _model(self, policy: LanguageModel, path: str | None, folder: Path) -> str:
        """The path that a server loads: a configuration if all weights are pushed, else the policy's start."""
        if _is_pushed_whole(policy):
            config = copy.deepcopy(policy.base.config)
            config.architectures = [type(policy.base).__name__]  # by which vLLM chooses its own class
            config.save_pretrained(folder)
            return str(folder)
        if path is not None and _holds_start_of(policy, path):
            return path
        base = policy.base.state_dict(keep_vars=True)
        kept = {name.replace(".base_layer.", "."): numbers_of(base[name]) for name in base if ".lora_" not in name}
        with quiet_transformers():
            policy.base.save_pretrained(folder, state_dict=kept)
        return str(folder)


def _devices_of_servers(config: VLLMEngineConfig, device: torch.device) -> list[dict[str, str]]:
    """The variable that gives each server its devices; empty where one server has all, or none is a CUDA device."""
    if config.replicas == 1 or device.type != "cuda":
        return [{}] * config.replicas
    groups = divided_devices(
        config.variables, config.arguments, replicas=config.replicas, num_devices=torch.cuda.device_count()
    )
    return [{DEVICES: group} for group in groups]


def check_engine(config: EngineConfig, device: torch.device | None = None) -> None:
    """Raises ConfigError if the servers cannot be started, or do not answer. For rank 0, before models are loaded.

    `device`: where the policy will be, if that is known.
    """
    if config.kind == "local":
        return
    if not (folder := _transfer_folder(config)).is_dir():
        raise ConfigError(f"engine.transfer_folder: there is no folder {folder}")
    if not config.addresses:
        interpreter(config.environment)
        if len(os.fsencode(Path(tempfile.gettempdir(), f"{_SERVER_FOLDER}12345678", "server-999.sock"))) > 107:
            raise ConfigError(
                f"the folder for temporary files, {tempfile.gettempdir()}, has too long a name for the sockets of vLLM "
                "servers, 107 bytes in all: set TMPDIR to a shorter one"
            )
        if device is not None:
            _devices_of_servers(config, device)
        return
    servers = EngineServers(config, dtype="float32")
    servers.find()
    with closing(servers):
        for server in servers.servers:
            _check_answers(server)
            with _refusing(server):
                server.weight_version()


def find_reference(config: ServersConfig, started: ExitStack, *, named: ModelSource | None = None) -> list[VLLMServer]:
    """The servers of a reference, for rank 0. `started` closes their clients if the rest of the run cannot be built.

    Raises ConfigError if one does not answer, they have different models, one has an adapter, or `named` is one.
    """
    if named is not None and adapter_base(named) is not None:
        raise ConfigError(
            f"reference.path {named.name} is an adapter, and servers of a reference are asked for the model below it: "
            "write it whole with `proximo export RUN OUT --merge`, serve OUT, and name that"
        )
    limits = ServerLimits(
        request_seconds=config.request_seconds, start_seconds=config.start_seconds, section="devices.reference"
    )
    token, servers, models = None if config.token_env is None else read_secret(config.token_env), [], {}
    for address in config.addresses:
        servers.append(server := VLLMServer(address, token=token, limits=limits))
        started.callback(server.close)
        _check_answers(server)
        with _refusing(server):
            models[server.model()] = address
            if (version := server.weight_version()) != NEVER_PUSHED:
                raise ConfigError(
                    f"the vLLM server {server.url} (devices.reference.addresses) was given other weights, {version}, "
                    "than it started with: start it again, and let no run push to it"
                )
            if adapters := server.adapters():
                raise ConfigError(
                    f"the vLLM server {server.url} (devices.reference.addresses) has adapters, {', '.join(adapters)}, "
                    "and would give the log-probs of the model below them: serve the reference whole, by itself"
                )
    if len(models) > 1:
        given = ", ".join(f"{model} at {address}" for model, address in models.items())
        raise ConfigError(f"devices.reference.addresses: all servers must have one model, they have {given}")
    return servers


def _check_answers(server: VLLMServer) -> None:
    if not server.is_healthy(seconds=CHECK_SECONDS):
        raise ConfigError(
            f"no vLLM server answers at {server.url} ({server.limits.section}.addresses): start one with "
            "`proximo engine serve`, or correct the address"
        )


@contextmanager
def _refusing(server: VLLMServer) -> Generator[None]:
    """Turns a failed request to a server into a ConfigError."""
    try:
        yield
    except RequestRefusedError as error:
        raise ConfigError(f"{server.limits.section}.addresses: {error}") from None
    except UnansweredError as error:
        raise ConfigError(f"{server.limits.section}.addresses: {server.url} cannot be used: {error}") from None


def check_length(server: VLLMServer, max_tokens: int) -> None:
    """Raises ConfigError if a server takes fewer tokens than the run may ask it for."""
    with _refusing(server):
        longest = server.max_model_len()
    if longest is not None and longest < max_tokens:
        raise ConfigError(
            f"the vLLM server {server.url} ({server.limits.section}.addresses) takes up to {longest} tokens, but the "
            f"run asks it for {max_tokens}: start it with `-- --max-model-len {max_tokens}`, or "
            "lower ppo.rollout.max_new_tokens or data.max_prompt_tokens"
        )


def make_servers(
    config: EngineConfig,
    policy: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    *,
    path: str | None,
    started: ExitStack,
) -> EngineServers | None:
    """Find or start the servers of a recipe on rank 0; None for the built-in engine. Every rank must call it.

    `started` closes them if the rest of the run cannot be built. Raises ConfigError and TrainingError.
    """
    if config.kind == "local":
        return None
    if is_quantised(policy.base):
        raise ConfigError("engine.kind vllm cannot be given a quantised base: set model.quantisation to null")
    logs = current().server_logs
    device = current().device or policy.device  # on several ranks, models are on the host while a run is built
    if config.sleep and device.type == "cpu":
        raise ConfigError("engine.sleep frees the memory of a GPU, but the policy is on the CPU: set it to false")
    dtype = config.dtype or ("float32" if policy.precision is Precision.FLOAT32 else "bfloat16")
    made = EngineServers(config, dtype=dtype, leaves_out_tokens=sampling.leaves_out_tokens)
    started.callback(made.close)

    def effect() -> None:
        if config.addresses:
            made.find()
            for server in made.servers:
                check_length(server, sampling.max_tokens)
        else:
            made.start(policy, tokenizer, sampling, path=path, device=device, logs=logs)

    current().on_rank_0(effect, what="the start of the engine")
    return made


def engine_of(
    servers: EngineServers | None, policy: LanguageModel, tokenizer: PreTrainedTokenizerBase
) -> Engine | None:
    """The engine for the trainer; None for the built-in one. Every rank must call it."""
    if servers is None:
        return None
    built: list[Engine] = []
    current().on_rank_0(lambda: built.append(servers.engine(policy, tokenizer)), what="the start of the engine")
    # Only rank 0 talks to servers.
    return built[0] if current().size == 1 else FirstRankEngine(built[0] if built else cast(Any, None))


def _is_pushed_whole(policy: LanguageModel) -> bool:
    return all(parameter.requires_grad for parameter in policy.model.parameters())


def _holds_start_of(policy: LanguageModel, path: str) -> bool:
    """Whether the weights at `path` are the policy's start: no adapter was loaded and no tokens were added."""
    if adapter_base(ModelSource(path=path)) is not None:
        return False
    saved = type(policy.base.config).from_pretrained(path, revision=_revision(policy) or "main")
    return saved.get_text_config().vocab_size == embedding_rows(policy.base)


def _revision(policy: LanguageModel) -> str | None:
    """The commit of the Hub that the policy was loaded from; None for a folder."""
    return getattr(policy.base.config, "_commit_hash", None)


def _transfer_folder(config: VLLMEngineConfig) -> Path:
    if config.transfer_folder is not None:
        return Path(config.transfer_folder)
    return IN_MEMORY if IN_MEMORY.is_dir() else Path(tempfile.gettempdir())
