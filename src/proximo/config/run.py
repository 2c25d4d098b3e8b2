"""Config sections of every run: folder, device, models, tokenizer, optimizers."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from proximo.config.schema.base import Section
from proximo.config.sinks import PushConfig, SinkConfig


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?|mps", name):
        raise ValueError(f"the device must be auto, cpu, cuda, cuda:N or mps, got {name!r}")
    return name


Device = Annotated[str, AfterValidator(_device)]


class RunConfig(Section):
    """Where a run writes, what it runs on, when it saves and evaluates."""

    folder: str
    """The run folder; it holds everything that the run writes."""
    seed: int = Field(0, ge=0, lt=2**31)
    """All randomness is a function of this seed and of a position (step, prompt, sample, token)."""
    device: Device = "auto"
    """`cpu`, `cuda`, `cuda:1` for one of several, or `mps`. `auto` takes CUDA, then MPS, then the CPU."""
    precision: Annotated[
        Literal["float32", "tf32", "bf16", "auto"], BeforeValidator(lambda it: "bf16" if it == "bfloat16" else it)
    ] = "float32"
    """`tf32`: float32 with products rounded to 10 bits, several times faster; CUDA only. `bf16`: products in bfloat16
    with float32 master weights, optimizer state and log-softmax. `auto`: bf16 on a CUDA device that supports it,
    otherwise float32. docs/memory.md."""
    head_precision: Literal["auto", "float32"] = "auto"
    """Under bf16, the operands of the output layer: `auto` rounds them to bf16, with float32 sums and results;
    `float32` does not round, at several times the cost on a GPU; for close looks at log-probs. docs/memory.md."""
    compile: Literal["none", "inductor", "aot_eager"] = "none"
    """Run all passes but sampling through torch.compile with this backend; `aot_eager` is for debugging.
    docs/memory.md."""
    deterministic: bool = True
    """On CUDA: kernels that give the same bits in every run, attention's backward pass included; an operator that has
    none ends the run with its name. `false` for speed, where no two runs need be equal. Elsewhere kernels always are
    so."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads; null is torch's default. The number changes the last bits of results, so a resume requires the
    same."""
    save_every_steps: int | None = Field(None, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    save_every_minutes: float | None = Field(None, gt=0)
    """Minutes between checkpoints, measured at the end of a step."""
    keep_last: int = Field(2, ge=2)
    """Checkpoints to keep besides the best one; at least 2, because a full disk may damage the newest. The best one is
    selected among the steps that are both saved and evaluated. For who wants to go back further."""
    grace_seconds: float = Field(25.0, ge=0)
    """Time limit for the current step after the first signal that ends the run; it then exits without finishing it.
    For clusters, which kill a job some seconds after the signal: less than that."""
    evaluate_every_steps: int | None = Field(None, ge=1)
    """Steps between evaluations; null evaluates only before the first and after the last step."""
    samples_per_step: int = Field(2, ge=0)
    """Responses written to samples.jsonl at each PPO step, to different prompts if possible, plus one that could not be
    scored; an evaluation writes all of its responses. For who reads more of them, or none."""
    token_cache: str | None = None
    """A folder that caches token ids of data and may be shared by several runs; null tokenises at every start. For
    large data and runs that start often."""
    tensorboard: bool = True
    """Write TensorBoard curves beside metrics.jsonl."""
    sinks: tuple[SinkConfig, ...] = ()
    """Further outputs for the metrics of each step: experiment trackers, or your own sink. A failing sink is counted
    and shown, and does not end the run."""
    push: PushConfig | None = None
    """Upload the trained model to the Hugging Face Hub, beside the training; null uploads nothing. A push that fails is
    shown, and does not end the run."""

    def conflicts(self) -> Iterator[str]:
        labels = [sink.label for sink in self.sinks]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            yield f"sinks has {twice[0]} more than once, and a resumed run could not distinguish them: keep one"

    @field_validator("folder")
    @classmethod
    def _a_path_as_it_is(cls, value: str) -> str:
        if value.split("/", maxsplit=1)[0] == "~":
            raise ValueError("begins with ~, which a recipe does not expand: write the full path")
        if not value or "\0" in value:
            raise ValueError("must be the name of a folder, such as runs/first")
        return value


class TokenizerConfig(Section):
    """The tokenizer of the policy."""

    path: str | None = None
    """A folder or Hub name; null uses the tokenizer beside the model."""
    train_vocab_size: int | None = Field(None, ge=257)
    """Train a byte-level BPE tokenizer of this size (256 bytes, the end of text and merges) on the SFT data instead of
    loading one; for random weights."""
    chat_template: str | None = None
    """A Jinja chat template that replaces the tokenizer's own."""
    added_tokens: tuple[str, ...] = ()
    """Special tokens to add, or that a tokenizer has beyond its model's embedding; the embeddings of every role grow
    accordingly, by rows that are the mean of the others and that an adapter does not train. For templates with marks of
    their own. A tokenizer that is larger for another reason is an error."""

    def conflicts(self) -> Iterator[str]:
        if self.path is not None and self.train_vocab_size is not None:
            yield "path and train_vocab_size exclude each other: load a tokenizer or train one"


class LoRAConfig(Section):
    """Train a low-rank adapter instead of the whole model."""

    rank: int = Field(16, ge=1)
    """Rank of the update of each adapted matrix."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Names of the modules that get an adapter; `all-linear` means every linear layer except the head."""


RANDOM_BASE = (
    "lora needs trained weights (path) below it: only the adapter is saved, and a random base from config lies in no "
    "folder that it could be loaded with; remove lora"
)


WHOLE_WEIGHTS_TRAIN = (
    "quantisation is for a base that an adapter trains above: give lora, or remove quantisation, since weights of 8 or "
    "4 bits cannot train"
)


class WeightsConfig(Section):
    """Where the weights of a model come from, and how they are held and trained."""

    path: str | None = None
    """A folder or Hub name. In a pipeline, `@sft` and `@reward` are the models of those stages."""
    revision: str | None = None
    """Branch, tag or commit on the Hub, for who needs the same weights again later."""
    config: dict[str, Any] | None = None
    """A Hugging Face config with `model_type`, for random weights. `vocab_size` defaults to that of the tokenizer."""
    lora: LoRAConfig | None = None
    """Train only an adapter, and the head of a model with scores; the base is frozen. A policy's is its reference."""
    quantisation: Literal["none", "8bit", "4bit"] = "none"
    """Store the matrices of the base in 4 or 8 bits; requires lora where the model trains, and the extra `low-memory`.
    8bit requires bf16. For a base that is too large otherwise."""
    frozen_layers: int = Field(0, ge=0)
    """The number of first layers to freeze, with the embeddings below them. Embeddings that are the output layer too
    (tied) still train, and their gradient passes back through all layers. For less memory without an adapter."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    balancing_coefficient: float | None = Field(None, ge=0)
    """Of the loss that balances the experts of a mixture (docs/experts.md); 0 is none. null: the one in the model's
    configuration if that asks for it (`output_router_logits`), otherwise none; of a critic that begins as a copy of the
    policy, the policy's. For mixtures of experts."""

    def conflicts(self) -> Iterator[str]:
        if self.config is not None and self.lora is not None:
            yield RANDOM_BASE
        if self.frozen_layers and self.lora is not None:
            yield "frozen_layers and lora exclude each other: with an adapter, the whole base is frozen"


class ModelConfig(WeightsConfig):
    """A causal language model: from a folder, from the Hub, or random from a config."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if (self.path is None) == (self.config is None):
            yield "exactly one of path (trained weights) and config (random weights) is needed"
        if self.config is not None and "model_type" not in self.config:
            yield "config needs model_type, the architecture's name in transformers (for example llama)"
        if self.quantisation != "none" and self.config is not None:
            yield "quantisation stores trained weights (path) in few bits, and config has random ones"


class ScalarModelConfig(WeightsConfig):
    """A model with one score per token: the value model, or a reward model in training. At `path` is a causal LM, which
    gets a new head, a one-label sequence classifier, or the folder `value` of a checkpoint.
    """

    init_from: Literal["policy", "trunk", "reward", "path"] = "policy"
    """Initial backbone and head: a copy of the policy (new head; its base is the policy's, quantised or not), the
    reward model (with its head), or `path` or `config`, which is implied if one of them is set. `trunk`: no separate
    backbone, but a head on the policy's (new, or that of the model at `path`), so that one pass and one update serve
    both."""

    @model_validator(mode="before")
    @classmethod
    def _init_from_what_is_given(cls, data: Any) -> Any:
        if isinstance(data, dict) and "init_from" not in data and (data.get("path") or data.get("config")):
            return {**data, "init_from": "path"}
        return data

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        given = (self.path is not None) + (self.config is not None)
        if self.init_from == "path" and given != 1:
            yield "init_from: path needs exactly one of path and config"
        own = ("config", "lora", "frozen_layers", "activation_checkpointing", "balancing_coefficient")
        for name in own if self.init_from == "trunk" else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                yield (
                    f"init_from: trunk puts a head on the policy's own layers: set model.{name} instead of value.{name}"
                )
        if self.init_from not in ("path", "trunk") and given:
            yield f"path and config need init_from: path; init_from is {self.init_from}"
        if self.quantisation != "none" and self.init_from == "policy":
            yield "the value model uses the policy's base: set model.quantisation and remove this key"
        if self.quantisation != "none" and self.lora is None:
            yield WHOLE_WEIGHTS_TRAIN


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """AdamW and its schedule. One update is one optimizer step."""

    learning_rate: float = Field(gt=0)
    """Peak learning rate."""
    kind: Literal["adamw", "adamw_8bit", "adamw_paged_8bit"] = "adamw"
    """`adamw`; `adamw_8bit` stores moments in 8 bits instead of 32 (extra `low-memory`); `adamw_paged_8bit` also lets
    CUDA move them to the host when its memory is full. docs/memory.md."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices; biases, norms and scalars never decay."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_updates: int = Field(0, ge=0)
    """Number of warm-up updates. The learning rate rises linearly, from 1 / (warmup_updates + 1) of the peak at the
    first."""
    final_fraction: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end of a linear or cosine schedule, as a fraction of the peak."""
    max_gradient_norm: float | None = Field(1.0, gt=0)
    """Clip gradients to this norm; null does not clip."""
    non_finite_gradient: Literal["skip", "stop"] = "skip"
    """Skip an update whose gradient is not finite, or stop the run."""
    in_backward: bool = False
    """Update each weight as soon as its gradient is complete and free the gradient, so that gradients take almost no
    memory. Requires `max_gradient_norm: null`, `non_finite_gradient: stop` and one micro-batch per update.
    docs/memory.md."""

    def conflicts(self) -> Iterator[str]:
        if self.in_backward and (self.max_gradient_norm is not None or self.non_finite_gradient == "skip"):
            yield (
                "in_backward updates weights before the norm of all gradients is known, so it can neither clip nor "
                "skip: set max_gradient_norm: null and non_finite_gradient: stop, or in_backward: false"
            )
