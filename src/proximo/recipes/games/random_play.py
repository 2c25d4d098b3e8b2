"""Conversations of random play, from which a small model learns what moves look like. They teach no good move."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from random import Random
from typing import Any

from proximo.recipes.games.rules import Game


def rows(num_rows: int, seed: int, *, game: str, kwargs: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Games as `messages`: what the game says is the user's, moves drawn uniformly from the legal ones the assistant's.

    `game` is `package.module:Class`, a subclass of `Game`, made with `kwargs`. Row i depends on (seed, i) alone.
    """
    module, _, name = game.partition(":")
    played: Game = getattr(import_module(module), name)(**(kwargs or {}))
    for row in range(num_rows):
        random = Random(f"{seed}/{row}")
        text, _ = played.reset(seed=random.getrandbits(32), row={})
        messages, is_over = [{"role": "user", "content": text}], False
        while not is_over:
            move = random.choice(played.moves(played.state))
            text, _, terminated, truncated, _ = played.step(move)
            messages += [{"role": "assistant", "content": move}, {"role": "user", "content": text}]
            is_over = terminated or truncated
        yield {"messages": messages[:-1]}
