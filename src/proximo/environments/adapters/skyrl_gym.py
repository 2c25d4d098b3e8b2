"""The environments of SkyRL's gym, which are made anew for each row."""

from collections.abc import Mapping
from typing import Any

from proximo.environments.adapters import package
from proximo.errors import ConfigError

skyrl_gym = package("skyrl_gym", "skyrl-gym")


class SkyRLGym:
    """An environment by its id. The row is its `extras`, with `prompt` as the first messages."""

    def __init__(self, id: str, kwargs: Mapping[str, Any]) -> None:
        if id not in skyrl_gym.envs.registration.registry:
            known = ", ".join(skyrl_gym.envs.registration.registry)
            raise ConfigError(f"skyrl-gym has no environment {id!r}; it has {known}")
        self._id, self._config = id, package("omegaconf", "skyrl-gym").OmegaConf.create(dict(kwargs))
        self._environment: Any = None

    def reset(self, seed: int, row: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """Makes the environment of a row."""
        self.close()
        self._environment = skyrl_gym.make(self._id, env_config=self._config, extras=dict(row))
        prompt = row.get("prompt", "")
        return self._environment.init(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )

    def step(self, text: str) -> tuple[Any, float, bool, bool, Mapping[str, Any]]:
        """Acts. What the environment calls done has ended."""
        answer = self._environment.step(text)
        info = {**self._environment.get_metrics(), **(answer.get("metadata") or {})}
        return answer["observations"], float(answer["reward"]), bool(answer["done"]), False, info

    def close(self) -> None:
        """Closes the environment of the last row."""
        if self._environment is not None:
            self._environment.close()
