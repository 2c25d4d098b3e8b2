"""Every supported architecture: the engine against transformers' own `generate`, and against the learner."""

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from architectures import ARCHITECTURES, build_architecture, random_sequences
from builders import tiny_tokenizer
from proximo.models.language import LanguageModel
from proximo.models.packing import pack_responses
from proximo.records import Prompt, Response
from proximo.rollout.local import LocalEngine
from proximo.rollout.sampling import RandomKey, SamplingOptions

PROMPTS = [
    Prompt(id=str(index), token_ids=tuple(tokens))
    for index, tokens in enumerate(random_sequences([3, 11, 7, 1, 9], seed=3))
]
NEW_TOKENS = 14
ENDS = [2, 17, 40]
TIE = 1e-5


def build(name: str) -> PreTrainedModel:
    """Gemma gets a head of its own: with scaled embeddings for a head, a random one repeats its last token for ever."""
    model = build_architecture(name)
    if name.startswith("gemma"):
        weight = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(0)) / 2
        model.lm_head.weight = torch.nn.Parameter(weight)
    return model


def run(name: str, **options) -> tuple[LanguageModel, list[Response]]:
    """Two samples of each prompt in fewer rows than samples, so that rows leave, move and are taken again."""
    model = LanguageModel(build(name))
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer()
    engine = LocalEngine(model, tokenizer, eos_token_ids=ENDS, max_num_seqs=4)
    chosen = SamplingOptions(max_new_tokens=NEW_TOKENS, **options)
    key = RandomKey(seed=0, purpose="test", step=0)
    return model, engine.generate(PROMPTS, num_samples=2, options=chosen, key=key)


def transformers_greedy(model: PreTrainedModel, prompt: Prompt) -> list[int]:
    tokens = torch.tensor([prompt.token_ids])
    whole = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=ENDS,
        pad_token_id=0,
    )
    assert isinstance(whole, Tensor)
    return whole[0, len(prompt.token_ids) :].tolist()


@torch.no_grad()
def smallest_gap(model: PreTrainedModel, token_ids: list[int]) -> float:
    """How near the next token, or the choice of any expert on the way, is to a tie."""
    routes: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    hooks = [
        module.register_forward_hook(lambda _m, _i, output: routes.append(scores_of(output))) for module in routers
    ]
    logits = model(torch.tensor([token_ids])).logits[0, -1]
    for hook in hooks:
        hook.remove()
    gaps = [logits.topk(2).values.diff().abs().min()]
    gaps += [each.topk(3, dim=-1).values[..., 1:].diff().abs().min() for each in routes]
    return min(gap.item() for gap in gaps)


def scores_of(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    """A router returns its scores for all experts, alone or first among others; two experts of four are chosen."""
    return output if isinstance(output, Tensor) else output[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_engine_is_transformers_generate(name: str) -> None:
    oracle = build(name)
    _, responses = run(name, greedy=True)
    num_checked = 0
    for response in responses:
        expected = transformers_greedy(oracle, response.prompt)
        drawn = list(response.token_ids)
        agree = [ours == theirs for ours, theirs in zip(drawn, expected, strict=False)]
        num_same = agree.index(False) if False in agree else len(agree)
        num_checked += num_same
        if drawn != expected:
            assert smallest_gap(oracle, [*response.prompt.token_ids, *drawn[:num_same]]) < TIE
    assert num_checked > 20
    assert len({response.token_ids for response in responses}) == len(PROMPTS), "each prompt has its own answer"
    assert max(len(set(response.token_ids)) for response in responses) > 4, "answers that repeat one token show little"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sampled_logprobs_are_the_learners(name: str) -> None:
    model, responses = run(name, temperature=1.5)
    tokens = [response.token_ids for response in responses]
    batch = pack_responses([response.prompt.token_ids for response in responses], tokens)
    learner = model.response_logprobs(batch, temperature=1.5).logprobs
    torch.testing.assert_close(torch.cat([response.logprobs for response in responses]), learner, atol=2e-5, rtol=0)
    assert learner.mean() < -0.5, "log-probs near 0 would agree whatever the engine did"
    assert len(set(tokens)) >= 8
    assert len({len(each) for each in tokens}) > 1
