"""Proximo trains language models with PPO. Importing it loads nothing heavy; its public names load when first used."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from proximo.commands.pipeline.kind import PIPELINE
from proximo.ppo.kind import PPO
from proximo.supervised.kinds import DPO, KTO, PRM, REWARD, SFT
from proximo.trainer_kinds import register

for _kind in (SFT, REWARD, PRM, DPO, KTO, PPO, PIPELINE):
    register(_kind)

if TYPE_CHECKING:  # what type checkers and editors read; at run time `__getattr__` gives the same names
    from proximo.api import *  # noqa: F403
    from proximo.api import __all__ as __all__

    __version__: str
else:

    def __getattr__(name: str) -> Any:
        """A public name, imported when it is first used, so that `proximo --help` needs no torch."""
        if name == "__version__":
            from importlib.metadata import version  # takes half of a worker's start

            return version("proximo")
        if name == "__all__":  # so that `from proximo import *` gives what there is
            return import_module("proximo.api").__all__
        # `from proximo import errors` asks for an attribute first, and imports the file if there is none.
        if not (name.startswith("_") or find_spec(f"proximo.{name}") is not None):
            public = import_module("proximo.api")
            if name in public.__all__:
                return vars(public)[name]
        raise AttributeError(f"module 'proximo' has no public name {name!r}; proximo.api lists them")


def __dir__() -> list[str]:
    return [*globals(), *import_module("proximo.api").__all__]
