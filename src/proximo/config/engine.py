"""The config section `engine`: what samples the responses of PPO."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from proximo.config.schema.base import Section
from proximo.config.service_address import ServiceAddress, TokenVariable, address_problem
from proximo.errors import UserError


class LocalEngineConfig(Section):
    """The engine in the trainer's own process."""

    kind: Literal["local"] = "local"
    """Sample in the process of the trainer, with the policy's own weights."""


class ServersConfig(Section):
    """vLLM servers, and how long a run waits for an answer."""

    addresses: tuple[ServiceAddress, ...] = ()
    """Servers that run already, such as http://localhost:8000."""
    token_env: TokenVariable | None = None
    """Environment variable that holds the token of the servers; null for servers without one."""
    request_seconds: float = Field(600.0, gt=0)
    """Wall-clock limit of one request, after which it is repeated. Responses of tens of thousands of tokens need
    more."""
    start_seconds: float = Field(900.0, gt=0)
    """Wall-clock limit of the start of a server by the run, and of the wait, within a run, for one that cannot be
    reached. A large model on a slow disk needs more."""


class VLLMEngineConfig(ServersConfig):
    """vLLM servers, which sample with copies of the weights. Without `addresses` the run starts its own on this
    machine. docs/vllm.md."""

    kind: Literal["vllm"]
    """Sample with vLLM servers."""
    replicas: int = Field(1, ge=1)
    """Number of servers that the run starts, for a model that fits a machine several times. They divide the CUDA
    devices into equal groups. Prompts are balanced over them."""
    environment: str | None = None
    """Folder of vLLM's own Python environment. Null: the one of `proximo engine install`."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type in which the servers compute and weights travel. Null: bfloat16 where the run trains in bf16, else
    float32."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the servers that the run starts, such as the share of a GPU that one may take."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of these servers. `CUDA_VISIBLE_DEVICES` has the devices of all of them."""
    transfer_folder: str | None = None
    """Folder through which weights travel to servers that cannot open the memory of the learner's GPU, and adapters to
    all. Trainer and servers must see it under the same path. Null: /dev/shm, which is in memory, else the folder for
    temporary files."""
    max_concurrent_requests: int = Field(256, ge=1)
    """Responses that are asked of a server at a time."""
    sleep: bool = False
    """Servers give up the memory of their GPU while they sample nothing: the weights move to the host, and the cache of
    keys and values is dropped. For servers that share a GPU with the learner."""

    def conflicts(self) -> Iterator[str]:
        own = {"replicas": self.replicas > 1, "arguments": self.arguments, "variables": self.variables}
        for name, given in own.items():
            if self.addresses and given:
                yield f"{name} is for servers that the run starts, but addresses names servers that run: remove one"


EngineConfig = LocalEngineConfig | VLLMEngineConfig


def engine_named(name: str) -> EngineConfig:
    """The engine that a command line names: `local`, `vllm`, or the address of a vLLM server that runs.

    Raises UserError for others.
    """
    if name == "local":
        return LocalEngineConfig()
    if name == "vllm":
        return VLLMEngineConfig(kind="vllm")
    if problem := address_problem(name):
        raise UserError(f"engine is local, vllm, or the address of a vLLM server: {problem}")
    return VLLMEngineConfig(kind="vllm", addresses=(name,))


MAY_CHANGE = (
    "addresses",
    "token_env",
    "environment",
    "variables",
    "transfer_folder",
    "max_concurrent_requests",
    "request_seconds",
    "start_seconds",
    "sleep",
)
"""Keys of the section that may change on resume: none of them affects a sample."""
