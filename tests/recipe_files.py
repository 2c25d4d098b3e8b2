"""Small recipes as text, for tests. Not fixtures: a test changes what it needs and writes the file itself."""

from pathlib import Path

PPO = """\
run:
  folder: runs/x
model:
  path: owner/model
data:
  sources:
  - path: owner/prompts
reward:
- kind: model
  path: owner/reward
  weight: 2
ppo:
  num_steps: 10
"""


def _supervised(data: str, section: str, setting: str) -> str:
    return f"""\
run:
  folder: runs/x
model:
  path: owner/model
data:
  sources:
  - path: owner/{data}
{section}:
  {setting}
"""


SFT = _supervised("texts", "sft", "num_epochs: 2")
REWARD = _supervised("pairs", "reward", "num_epochs: 1")
DPO = _supervised("pairs", "dpo", "pairs_per_step: 8")
KTO = _supervised("labelled", "kto", "examples_per_step: 8")
PIPELINE = """\
run:
  folder: runs/x
  seed: 7
sft:
  model:
    path: owner/model
  data:
    sources:
    - path: owner/texts
reward:
  run:
    precision: bf16
  model:
    path: "@sft"
  data:
    sources:
    - path: owner/pairs
ppo:
  model:
    path: "@sft"
  data:
    sources:
    - path: owner/prompts
  reward:
  - kind: model
    path: "@reward"
"""


def write_recipe(folder: Path, text: str, name: str = "r.yaml") -> str:
    """Write a recipe and return its path as text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)
