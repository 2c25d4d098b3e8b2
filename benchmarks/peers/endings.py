"""Where responses of random models end: nowhere, after a length that the prompt says, or by chance.

Weights are set so that it comes out of ordinary sampling at temperature 1, under any trainer.
"""

import math
from typing import Any

PAD_ID, EOS_ID, FIRST_ID = 0, 1, 4
"""Padding, the stop token, and the first token that prompts are made of."""
MEAN_EOS_PROBABILITY = 0.0475
"""64 draws with this probability of the stop token end after (1 - (1 - p)^64) / p = 20 on average."""
LONGEST = 65
"""Of a response that counts down: one more than a response may have here, which says that it is cut."""


def geometric_lengths(count: int, *, longest: int) -> list[int]:
    """So many quantiles of the tokens until a stop token of `MEAN_EOS_PROBABILITY`, in order, none above `longest`."""
    rate = math.log1p(-MEAN_EOS_PROBABILITY)
    quantiles = ((place + 0.5) / count for place in range(count))
    return [min(math.ceil(math.log1p(-quantile) / rate), longest) for quantile in quantiles]


def last_prompt_token(response_length: int) -> int:
    """With which a prompt says how long its response will be, to a policy of `count_down`."""
    if not 1 <= response_length <= LONGEST:
        raise ValueError(f"a response that counts down has 1 to {LONGEST} tokens, not {response_length}")
    return FIRST_ID + response_length - 1


def count_down(policy: Any) -> None:
    """Give every token a number, and let each be followed by one of the next lower number; 1 by the stop token.

    Token `FIRST_ID + i` has the number `i % LONGEST + 1`. The input embedding writes it, one-hot, into the first
    places of the residual stream, so strongly that no layer drowns it; the output layer reads it there. Among the
    tokens of a number the policy draws as the rest of its random weights has it. Raises ValueError where the model is
    too narrow for it, or another token has a probability above 1e-6 in all.
    """
    import torch

    inputs, outputs = policy.get_input_embeddings().weight, policy.get_output_embeddings().weight
    if inputs.shape[1] <= LONGEST or inputs is outputs:
        raise ValueError(f"counting down takes a width above {LONGEST} and an output layer of its own")
    token_ids = torch.arange(FIRST_ID, inputs.shape[0])
    place = (token_ids - FIRST_ID) % LONGEST  # one less than the token's number
    with torch.no_grad():
        inputs[:, :LONGEST] = 0.0
        inputs[token_ids, place] = 8.0
        outputs[:, :LONGEST] = 0.0
        outputs[:FIRST_ID] = 0.0
        outputs[EOS_ID, 0] = 4.0
        lower = place < LONGEST - 1  # nothing is followed by the highest number
        outputs[token_ids[lower], place[lower] + 1] = 4.0
        context = token_ids[torch.randperm(len(token_ids), generator=torch.Generator().manual_seed(1))][None, :1024]
        follows = policy(context).logits[0].softmax(dim=1)
        number = torch.full((inputs.shape[0],), -1)  # of what is never drawn
        number[EOS_ID], number[token_ids] = 0, place + 1
        is_next = number[None] == number[context[0]][:, None] - 1
        wrong = follows.masked_fill(is_next, 0.0).sum(dim=1).max().item()
    if wrong > 1e-6:
        raise ValueError(f"the policy does not count down: other tokens have a probability of {wrong:.1e}")


def forbid_ends(policy: Any) -> None:
    """Never draw the stop token, nor the padding token, which a peer takes for the end of a response.

    Every input embedding gets the same large number in its first place. The residual stream carries it to the output
    layer, where the rows of these two tokens read that place alone, as a bias would. No layer writes to that place:
    the sum of many would turn its sign.
    """
    import torch

    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight[0] = 0.0
            elif name.endswith("c_proj.weight"):  # GPT-2 keeps [in, out]
                weight[:, 0] = 0.0
        inputs, outputs = policy.get_input_embeddings().weight, policy.get_output_embeddings().weight
        inputs[:, 0] = 0.5
        if inputs is not outputs:
            outputs[:, 0] = 0.0  # where they are tied, all other tokens read that place alike
        outputs[[PAD_ID, EOS_ID]] = 0.0
        outputs[[PAD_ID, EOS_ID], 0] = -100.0


def set_stop_probability(policy: Any, wanted: float) -> None:
    """Move the weights until the stop token has this probability on average over random contexts.

    How strongly its row reads what `forbid_ends` put into every hidden state is found by bisection.
    """
    import torch

    forbid_ends(policy)
    with torch.no_grad():
        outputs = policy.get_output_embeddings().weight
        contexts = torch.randint(FIRST_ID, outputs.shape[0], (32, 48), generator=torch.Generator().manual_seed(1))
        hidden = policy.base_model(contexts).last_hidden_state[:, 8:].flatten(0, 1)
        others = hidden @ outputs.t()
        others[:, EOS_ID] = -torch.inf
        rest, carried = others.logsumexp(dim=1), hidden[:, 0]
        low, high = -64.0, 64.0
        for _ in range(60):
            middle = (low + high) / 2
            found = torch.sigmoid(middle * carried - rest).mean().item()
            low, high = (middle, high) if found < wanted else (low, middle)
        outputs[EOS_ID, 0] = (low + high) / 2
