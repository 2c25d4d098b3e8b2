"""The load-balancing loss of experts: transformers' number and gradient, and the same for every cut of an update."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from architectures import ARCHITECTURES, EXPERTS, LLAMA_LIKE, enlarge_weights, keep_float64, random_sequences
from builders import tiny_tokenizer
from proximo.config.run import ModelConfig, TokenizerConfig
from proximo.errors import ModelError
from proximo.learner.expert_balance import ExpertBalance
from proximo.learner.optimizers import OptimizerOptions
from proximo.learner.update import Learner, UpdateResult
from proximo.models.language import LanguageModel
from proximo.models.lora import LoRAOptions
from proximo.models.packing import Packed, PackedResponses, pack, pack_nothing, pack_responses
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.sources import balancing_of
from proximo.run.make.models import check_readers

LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
KINDS: dict[str, dict] = {
    **{name: ARCHITECTURES[name] for name in ("mixtral", "qwen3_moe", "gpt_oss")},
    "olmoe": {**LLAMA_LIKE, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**LLAMA_LIKE, **EXPERTS, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 24},
    "granitemoe": {**LLAMA_LIKE, **LOCAL, "model_type": "granitemoe"},
    "jetmoe": {**LLAMA_LIKE, **LOCAL, "model_type": "jetmoe", "kv_channels": 8},
    "minimax_m2": {**LLAMA_LIKE, **LOCAL, "model_type": "minimax_m2", "head_dim": 8},
    "flex_olmo": {**LLAMA_LIKE, "model_type": "flex_olmo", "num_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {
        **LLAMA_LIKE,
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
    },
}
"""Each has names of its own for what it is balanced by; in the last, a layer has no router."""
COEFFICIENT = 0.3
PROMPTS = [[5, 6, 7, 8]] * 3 + [[9, 10], [11, 12, 13]]
RESPONSES = random_sequences([7, 4, 9, 6, 3], seed=1)
CUTS = ([[0, 1, 2, 3, 4]], [[0, 1], [2, 3, 4]], [[0], [1], [2], [3], [4]], [[4, 3], [2], [1, 0]])


def build(name: str, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    config = AutoConfig.for_model(**{**KINDS[name], "output_router_logits": True, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        enlarge_weights(model)
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # torch has no grouped product of that type
    return model.eval()


def learner(model: LanguageModel, **options: object) -> Learner:
    given = OptimizerOptions(**{"learning_rate": 0.1, "max_gradient_norm": None, **options})
    return Learner(model.model, given, num_updates=4, balance=ExpertBalance.of(model.backbone))


def update(model: LanguageModel, batches: Sequence[PackedResponses]) -> tuple[UpdateResult, dict]:
    """An update with the mean negative log-likelihood, which is refused, and its gradients."""
    made, found = learner(model), {}
    num_tokens = sum(len(batch.targets) for batch in batches)

    def loss(batch: PackedResponses) -> tuple[Tensor, int]:
        return -model.response_logprobs(batch).logprobs.sum() / num_tokens, len(batch.targets)

    def guard(parts: Sequence[int]) -> str:
        assert sum(parts) == num_tokens
        found.update({n: p.grad.clone() for n, p in made.parameters.items() if p.grad is not None})
        return "only its gradients are wanted"

    return made.update(batches, loss, guard=guard), found


def cut(indices: Sequence[Sequence[int]]) -> list[PackedResponses]:
    return [pack_responses([PROMPTS[i] for i in part], [RESPONSES[i] for i in part]) for part in indices]


def check_same(found: dict[str, Tensor], wanted: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= bound * gradient.norm().clamp(min=1e-6), name


@pytest.mark.parametrize("name", KINDS)
def test_of_one_micro_batch_loss_and_gradients_are_those_of_transformers(name: str) -> None:
    theirs = build(name)
    sequences = random_sequences([13] * 4)
    ids = torch.tensor(sequences)
    output = theirs(input_ids=ids, labels=ids)
    output.loss.backward()
    wanted = {n: p.grad.clone() for n, p in theirs.named_parameters() if p.grad is not None}
    model = LanguageModel(build(name))
    batch = pack_responses([each[:1] for each in sequences], [each[1:] for each in sequences])
    result, found = update(model, [batch])
    assert result.balancing_loss == pytest.approx(output.aux_loss.item(), rel=1e-5)
    options = model.backbone.balancing
    assert result.loss + options.coefficient * result.balancing_loss == pytest.approx(output.loss.item(), rel=1e-5)
    check_same(found, wanted, 1e-4)


def by_definition(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> float:
    """A double sum over the sequences, each alone, and over layers and tokens, as the formula is written."""
    experts, per_token = 4, 2
    shares, means, number = [0.0] * experts, [0.0] * experts, 0
    for sequence in sequences:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            layers = model(input_ids=torch.tensor([sequence]), output_router_logits=True).router_logits
        for logits in layers:
            for token in logits.double().softmax(dim=-1).tolist():
                number += 1
                for expert in sorted(range(experts), key=lambda e: -token[e])[:per_token]:
                    shares[expert] += 1
                for expert in range(experts):
                    means[expert] += token[expert]
    return experts * sum(share / number * mean / number for share, mean in zip(shares, means, strict=True))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_gradient_does_not_depend_on_how_an_update_is_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not on what is packed together: three of the responses share a prompt, which each of them counts."""
    keep_float64(monkeypatch)
    base = build(name, torch.float64, router_aux_loss_coef=COEFFICIENT)
    wanted = by_definition(base, [[*p, *r] for p, r in zip(PROMPTS, RESPONSES, strict=True)])
    results = [update(LanguageModel(base), cut(indices)) for indices in CUTS]
    for result, gradients in results:  # some routers and softmaxes are float32 whatever they are given
        assert result.balancing_loss == pytest.approx(wanted, rel=1e-6)
        assert result.loss == pytest.approx(results[0][0].loss, rel=1e-6)
        check_same(gradients, results[0][1], 1e-5)
    without = LanguageModel(base)
    without.backbone.balance(0)
    router = next(n for n in results[0][1] if "gate.weight" in n or "router.weight" in n)
    _, gradients = update(without, cut(CUTS[0]))
    assert (gradients[router] - results[0][1][router]).norm() > 0.01 * gradients[router].norm()


def test_a_place_that_no_sequence_fills_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_float64(monkeypatch)
    base = build("mixtral", torch.float64, router_aux_loss_coef=COEFFICIENT)
    (result, gradients), (wanted, expected) = (
        update(LanguageModel(base), batches) for batches in ([*cut(CUTS[0]), pack_nothing("cpu")], cut(CUTS[0]))
    )
    assert result.balancing_loss == pytest.approx(wanted.balancing_loss, rel=1e-12)
    check_same(gradients, expected, 1e-9)


def test_layers_that_are_recomputed_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_float64(monkeypatch)
    base = build("mixtral", torch.float64, router_aux_loss_coef=COEFFICIENT)
    wanted, expected = update(LanguageModel(base), cut(CUTS[1]))
    model = LanguageModel(base)
    model.use_activation_checkpointing()
    result, gradients = update(model, cut(CUTS[1]))
    assert result.balancing_loss == pytest.approx(wanted.balancing_loss, rel=1e-12)
    check_same(gradients, expected, 1e-9)


# torch looks at `.grad` of every tensor that enters what it compiles.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_are_balanced_alike() -> None:
    torch._dynamo.reset()
    base = build("mixtral", router_aux_loss_coef=COEFFICIENT)
    wanted, expected = update(LanguageModel(base), cut(CUTS[1]))
    model = LanguageModel(base)
    model.compile("eager")
    result, gradients = update(model, cut(CUTS[1]))
    assert result.balancing_loss == pytest.approx(wanted.balancing_loss, rel=1e-5)
    check_same(gradients, expected, 1e-4)


def test_below_an_adapter_the_routers_stay_and_the_loss_reaches_the_adapter() -> None:
    def gradients_with(coefficient: float) -> dict[str, Tensor]:
        model = LanguageModel(build("mixtral", router_aux_loss_coef=COEFFICIENT)).with_adapter(LoRAOptions(rank=2))
        for path, weight in model.trainable_parameters():
            if "lora_B" in path:
                weight.data.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
        model.backbone.balance(coefficient)
        return update(model, cut(CUTS[1]))[1]

    balanced, plain = gradients_with(COEFFICIENT), gradients_with(0.0)
    assert all("lora_" in name for name in balanced)
    assert any((balanced[name] - plain[name]).norm() > 1e-3 * plain[name].norm() for name in plain)


def test_in_bf16_it_is_computed_in_float32() -> None:
    result, gradients = update(LanguageModel(build("mixtral"), precision=Precision.BF16), cut(CUTS[1]))
    wanted, _ = update(LanguageModel(build("mixtral")), cut(CUTS[1]))
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert result.balancing_loss == pytest.approx(wanted.balancing_loss, rel=0.05)


def test_a_router_that_favours_one_expert_is_pulled_back() -> None:
    base = build("mixtral")
    with torch.no_grad():
        for layer in base.model.layers:
            layer.mlp.gate.weight[0] = 3 * layer.mlp.gate.weight[1:].abs().mean(dim=0)
            layer.post_attention_layernorm.weight.abs_()
    model = LanguageModel(base)
    model.backbone.balance(10.0)
    made = learner(model, learning_rate=0.003)

    def nothing(batch: PackedResponses) -> tuple[Tensor, None]:
        return 0.0 * model.response_logprobs(batch).logprobs.sum(), None

    losses = [made.update(cut(CUTS[1]), nothing) for _ in range(20)]
    first, *_, last = (result.balancing_loss for result in losses)
    assert first is not None
    assert last is not None
    assert abs(last - 2.0) < (first - 2.0) / 2
    assert losses[0].loss == pytest.approx(0.0, abs=1e-5)


def test_passes_outside_an_update_give_no_router_logits() -> None:
    """Each would be kept for nothing: transformers gives them where the configuration asks."""
    model = LanguageModel(build("mixtral"))
    packed: Packed = pack(random_sequences([5, 4]))
    layers = model.backbone.layers
    seen: list[bool] = []
    plain = layers.forward
    layers.forward = lambda **given: (seen.append(given["output_router_logits"]), plain(**given))[1]
    model.hidden_states(packed)
    update(model, cut(CUTS[0]))
    assert seen == [False, True]


def test_who_is_balanced() -> None:
    def config(name: str, **given: object):
        return AutoConfig.for_model(**{**KINDS[name], **given})

    asked = {"output_router_logits": True}
    assert balancing_of(config("mixtral")) is None
    assert balancing_of(config("mixtral", **asked, router_aux_loss_coef=0.0)) is None
    assert balancing_of(config("mixtral", **asked), 0.0) is None
    for given, coefficient, found in (
        (config("mixtral", **asked, router_aux_loss_coef=0.02), None, 0.02),
        (config("jetmoe", **asked), None, 0.01),
        (config("mixtral"), 0.5, 0.5),
    ):
        options = balancing_of(given, coefficient)
        assert (options.coefficient, options.experts_per_token) == (found, 2)
    dense = AutoConfig.for_model(**ARCHITECTURES["llama"])
    assert balancing_of(dense) is None
    assert balancing_of(dense, 0.0) is None
    with pytest.raises(ModelError, match=r"balancing_coefficient is 0\.1, but a llama model has no loss"):
        balancing_of(dense, 0.1)


def test_a_section_that_balances_a_dense_model_is_refused_before_any_weights_are_read(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    config = AutoConfig.for_model(**ARCHITECTURES["llama"])
    config.vocab_size = len(tokenizer)
    config.save_pretrained(tmp_path)
    section = ModelConfig(path=str(tmp_path), balancing_coefficient=0.01)
    with pytest.raises(ModelError, match="a llama model has no loss that balances experts"):
        check_readers(TokenizerConfig(), tokenizer, {"policy": section})
    check_readers(TokenizerConfig(), tokenizer, {"policy": section.model_copy(update={"balancing_coefficient": 0.0})})
