"""An environment of texts that registers itself with Gymnasium, as those of users do."""

from typing import Any

import gymnasium


class Password(gymnasium.Env):
    """Opens at a word."""

    action_space = gymnasium.spaces.Text(max_length=20)
    observation_space = gymnasium.spaces.Text(max_length=100)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"Say the word, {(options or {}).get('hint')}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        is_right = action == "sesame"
        return "open" if is_right else "closed", float(is_right), is_right, False, {}


gymnasium.register(id="Password-v0", entry_point=Password)
