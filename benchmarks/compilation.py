"""What torch.compile with inductor costs and gives: seconds of the first update, then of an update, beside plain ones.

Processor seconds of this process on a CPU, wall seconds elsewhere: python benchmarks/compilation.py [cpu|cuda]
"""

import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner
from proximo.models.language import LanguageModel
from proximo.models.packing import PackedResponses, pack_responses

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
UPDATES = 6


def batch(number: int, device: torch.device) -> PackedResponses:
    """Other lengths in every update, as in training."""
    lengths = [40 + (7 * row + 11 * number) % 40 for row in range(12)]
    responses = [[(row + token) % 2000 + 3 for token in range(length)] for row, length in enumerate(lengths)]
    return pack_responses([[5, 6, 7, 8]] * len(lengths), responses, device=device)


def main() -> None:
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    for backend in ("none", "inductor"):
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", vocab_size=2048, num_key_value_heads=4, **SIZES)
        model = LanguageModel(AutoModelForCausalLM.from_config(config).to(device))
        if backend != "none":
            model.compile(backend)
        learner = Learner(model.model, OptimizerOptions(learning_rate=1e-4), num_updates=UPDATES)
        seconds = []
        for number in range(UPDATES):
            start = clock()
            learner.update(
                [batch(number, device)],
                lambda packed, model=model: (-model.response_logprobs(packed).logprobs.mean(), None),
            )
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(clock() - start)
        rest = sorted(seconds[1:])[len(seconds) // 2 - 1]
        print(f"{backend:<10} first update {seconds[0]:6.1f} s, then {rest:6.3f} s")


if __name__ == "__main__":
    main()
