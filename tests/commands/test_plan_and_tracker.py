"""What a plan says of the activations of a 7B model in bf16, beside torch's own memory tracker on the same pass."""

from pathlib import Path

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker  # noqa: TID251 - a tool that counts, of no process group
from transformers import AutoConfig

from builders import run_through_modules
from proximo.models.language import LanguageModel
from proximo.models.loading import random_model
from proximo.models.packing import pack_responses
from proximo.models.precision.compute import casting
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.sources import ModelSource
from proximo.plan.fake_tensor_profiler import building, shapes_only, to_fake_tensors
from proximo.plan.profiling import make_plans
from proximo.plan.record import Phase
from proximo.supervised.sft_recipe import SFTRecipe
from tiny_runs import make_inputs

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 2,  # of 28: the tracker takes a minute for all
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
LENGTH, SEQUENCES, MICROBATCHES = 2048, 2, 3


def planned(place: Path, *, checkpointing: bool) -> Phase:
    """The phase of training, in bytes."""
    recipe = SFTRecipe.model_validate(
        {
            "run": {"folder": str(place / "run"), "precision": "bf16"},
            "model": {"config": QWEN_7B, "activation_checkpointing": checkpointing},
            "tokenizer": {"path": str(place / "tokenizer")},
            "data": {"sources": [{"path": str(place / "texts.jsonl")}], "max_tokens": LENGTH},
            "sft": {"examples_per_step": SEQUENCES * MICROBATCHES, "tokens_per_microbatch": SEQUENCES * LENGTH},
        }
    )
    (plan,) = make_plans(recipe)
    (phase,) = plan.phases
    return phase


def tracked(*, checkpointing: bool) -> int:
    """Bytes at the peak of two micro-batches, without the weights, as MemTracker counts them."""
    config = AutoConfig.for_model(**QWEN_7B)
    with shapes_only():
        with building():
            plain = random_model(config, ModelSource(config={"model_type": "qwen2"}))
            model = LanguageModel(plain, precision=Precision.BF16)
            if checkpointing:
                model.use_activation_checkpointing()
        to_fake_tensors(model.model)
        model.model.train()
        batch = pack_responses([[0]] * SEQUENCES, [[0] * (LENGTH - 1)] * SEQUENCES)
        tracker = MemTracker()
        tracker.track_external(model.model)
        with tracker, casting():
            model.response_logprobs(batch).logprobs.sum().backward()
            tracker.reset_mod_stats()
            model.response_logprobs(batch).logprobs.sum().backward()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        weights = sum(parameter.numel() * 4 for parameter in model.model.parameters())
        return peak["Total"] - weights


@pytest.mark.parametrize("checkpointing", [True, False])
def test_activations_and_gradients_are_those_of_an_independent_tracker(
    tmp_path: Path, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_through_modules(monkeypatch)  # as the tracker does, which has hooks
    phase = planned(make_inputs(tmp_path), checkpointing=checkpointing)
    beside = ("weights", "optimizer", "process", "allocator")
    counted = sum(size for part, size in phase.parts_bytes.items() if not part.endswith(beside))
    assert counted == pytest.approx(tracked(checkpointing=checkpointing), rel=0.01)


def test_the_weights_and_moments_of_a_7b_model_are_those_of_its_formula(tmp_path: Path) -> None:
    phase = planned(make_inputs(tmp_path), checkpointing=True)
    width, inner, key_width = 3584, 18944, 512
    layer = 2 * (width * width + width * key_width) + 3 * width * inner + (width + 2 * key_width) + 2 * width
    parameters = 2 * 152064 * width + 2 * layer + width
    assert phase.parts_bytes["policy weights"] == pytest.approx(4 * parameters, abs=4096)
    assert phase.parts_bytes["policy optimizer"] == pytest.approx(8 * parameters, abs=4096)
    assert phase.parts_bytes["gradients"] <= 4 * parameters
