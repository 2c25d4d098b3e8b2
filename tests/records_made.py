"""Records made by hand, for tests that need no model."""

from collections.abc import Sequence

import torch

from proximo.records import Finish, Prompt, Response, Scored, ScoreState


def prompt(identifier: str = "p0", *, token_ids: Sequence[int] = (5, 6), text: str | None = "hi", **fields) -> Prompt:
    return Prompt(id=identifier, token_ids=tuple(token_ids), text=text, **fields)


def response(
    token_ids: Sequence[int] = (7, 8, 2),
    *,
    to: Prompt | None = None,
    finish: Finish = Finish.EOS,
    logprobs: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
    text: str = "ok",
) -> Response:
    return Response(
        prompt=to or prompt(),
        sample_index=0,
        token_ids=tuple(token_ids),
        logprobs=torch.tensor(logprobs if logprobs is not None else [-1.0] * len(token_ids)),
        response_mask=torch.tensor(mask if mask is not None else [True] * len(token_ids), dtype=torch.bool),
        finish=finish,
        policy_version=0,
        text=text,
    )


def scored(score: float = 1.0, *, of: Response | None = None, state: ScoreState = ScoreState.SCORED) -> Scored:
    return Scored(response=of or response(), score=score, state=state)


def drawn(lengths: Sequence[tuple[int, int]], seed: int = 0) -> list[Scored]:
    """Random responses with the scores 0, 1, 2, 0, ..., each to its own prompt; `lengths`: of prompt and response."""
    generator = torch.Generator().manual_seed(seed)
    ids = [[torch.randint(3, 60, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    return [
        scored(float(i % 3), of=response(written, to=prompt(str(i), token_ids=asked)))
        for i, (asked, written) in enumerate(ids)
    ]
