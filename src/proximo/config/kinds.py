"""The kinds of recipes, by command. Apart from the schemas, which take longer to import than `--help` may."""

from typing import Literal

Kind = Literal["sft", "reward", "dpo", "ppo", "pipeline"]
