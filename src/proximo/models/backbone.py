"""Runs the layers of a transformers model, without its head, on packed tokens or with a key-value cache.

Legend: T packed tokens, B rows of a decode step, D width.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from proximo.algorithms.losses import ExpertLoad, expert_load
from proximo.distributed.world import is_alone
from proximo.errors import ConfigError, ModelError, RankError
from proximo.models.attention.cache import cache_argument
from proximo.models.attention.cache_layouts import ExtensionLayout
from proximo.models.attention.packed import (
    ATTENTION,
    AttentionLayout,
    PackedLayout,
    attending,
    attending_again,
    register_attention,
)
from proximo.models.fast_path import Decoder, FastPath, PackedLayers, fast_path
from proximo.models.packing import Packed
from proximo.models.precision.compute import Compute, Products, cast_weight, computing
from proximo.models.precision.placement import Precision
from proximo.models.pretrained.sources import Balancing, balancing_of
from proximo.models.pretrained.vocabulary import settle_tying
from proximo.models.transformers_model import base_of, position_limit, quiet_transformers

if TYPE_CHECKING:  # peft and FSDP take a second to import, and a run without adapters on one rank needs neither
    from peft import PeftModel

    from proximo.distributed.sharding import Sharding

Result = TypeVar("Result")


def checkpoint_activations(base: PreTrainedModel) -> None:
    """Enable activation checkpointing: in train mode, each layer saves only its input and is recomputed in the backward
    pass.

    Uses the non-reentrant implementation, which also works if the input needs no gradient, as with frozen embeddings
    under LoRA. Raises ModelError if the architecture does not support checkpointing.
    """
    if not base.supports_gradient_checkpointing:
        raise ModelError(
            f"activation checkpointing is not possible with a {base.config.model_type} model; leave it off"
        )
    with warnings.catch_warnings():
        # Newer versions of transformers have renamed the method; older ones have only this name.
        warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable`", category=FutureWarning)
        base.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": attending_again}
        )


def _no_padding_warning(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Replaces `warn_if_padding_and_no_attention_mask` of transformers."""


class Backbone:
    """Runs a transformers model without its head. Weights and adapters belong to the model."""

    def __init__(self, model: "PreTrainedModel | PeftModel", *, precision: Precision) -> None:
        register_attention()
        base = base_of(model)
        with quiet_transformers():  # transformers only warns if it cannot; the probe refuses such models
            base.set_attn_implementation(ATTENTION)
        for module in base.modules():
            if isinstance(module, nn.Embedding):
                # Inputs have no padding, so the embedding of the padding token trains like any other.
                module.padding_idx = None
        settle_tying(base)
        layers = base.base_model
        assert isinstance(layers, PreTrainedModel), "models of transformers have layers of transformers"
        # It would search for padding in every pass, only to print a warning.
        layers.warn_if_padding_and_no_attention_mask = _no_padding_warning
        self.layers = layers
        self._cache_argument = cache_argument(type(layers))
        self.packed_layers: Any = layers
        """The layers of passes without a cache: `layers` itself, or a compiled view of it."""
        self.precision = precision
        self._is_half = precision.is_half
        self._products = Products(layers)
        self.sharding: Sharding | None = None
        """None for a model whose tensors are whole on this rank."""
        self.home: torch.device | None = None
        """The device of passes; None for that of the weights. Shards may be on the host."""
        self.idle: nn.Module | None = None
        """What is kept in host memory while no call uses the model, and else at `home`; None for nothing."""
        self._num_users = 0
        self.position_limit = position_limit(base.config)
        self.balancing: Balancing | None = balancing_of(base.config)
        """How the experts are balanced in training; None for a model without a mixture or without balancing."""
        self._loads: list[ExpertLoad] | None = None

    @property
    def device(self) -> torch.device:
        """The device that passes run on."""
        return self.layers.device if self.home is None else self.home

    @property
    def path(self) -> FastPath:
        """The implementation of passes on the device of the weights."""
        return fast_path(self.device.type, self.precision)

    def run_pass(self, run: Callable[[], Result]) -> Result:
        """Run one or several passes with access to every weight of the model. All ranks have to call it.

        Code that reads weights (an output layer) runs inside. The result is a tensor or a tuple.
        """
        self._check_ranks()
        return run() if self.sharding is None else self.sharding.run(run)

    @contextmanager
    def at_work(self) -> Generator[None]:
        """Encloses every use of the model on ranks, and frees gathered weights afterwards."""
        self._num_users += 1
        if self._num_users == 1 and self.idle is not None:
            self.idle.to(self.home)
        try:
            yield
        finally:
            self._num_users -= 1
            if self._num_users == 0 and self.sharding is not None:
                self.sharding.release()
            if self._num_users == 0 and self.idle is not None:
                self.idle.to("cpu")

    @contextmanager
    def gathered(self) -> Generator[None]:
        """Inside, all weights are whole, plain tensors, and passes without gradients need no other rank."""
        self._check_ranks()
        with self.at_work(), nullcontext() if self.sharding is None else self.sharding.gathered():
            yield

    def _check_ranks(self) -> None:
        """Raises RankError if rank 0 alone would use a model that is sharded over all ranks."""
        if self.sharding is not None and is_alone():
            raise RankError(
                "this code runs only on rank 0, and the model is sharded over all ranks, so that its passes need the "
                "other ranks: set its shard under devices to replicate, or use the model between steps, on every rank"
            )

    @property
    def is_compiled(self) -> bool:
        """True where passes without a cache run through torch.compile."""
        return self.packed_layers is not self.layers

    @property
    def matrices(self) -> list[nn.Parameter]:
        """Weights and biases of the layers' linear modules, which a bf16 pass reads in bf16 only."""
        return self._products.matrices

    @property
    def embeddings(self) -> list[nn.Parameter]:
        """The embedding tables of tokens and positions."""
        return self._products.embeddings

    def cast_weights(self) -> None:
        """Cast all weights now that passes would cast one by one. Call it inside `casting` (compute.py)."""
        if self._is_half:
            for weight in self.matrices:
                cast_weight(weight, torch.bfloat16)

    def compile(self, backend: str) -> None:
        """Run passes without a cache through torch.compile, with gradients and without, so that old log-probs round as
        the update does. Neither sampling nor checkpointed layers are compiled."""
        from proximo.models.attention.compiled import compile_layers

        if not any(getattr(module, "gradient_checkpointing", False) for module in self.layers.modules()):
            self.packed_layers = compile_layers(self.layers, backend)

    def packed(
        self,
        packed: Packed,
        *,
        rows: Int64[Tensor, "rows"] | None = None,
        cache: Cache | None = None,
        layout: PackedLayout | None = None,
    ) -> Float[Tensor, "rows hidden"]:
        """Hidden states after the final norm: [T, D], or [R, D] of the distinct flat indices `rows` [R].

        Passes the keys and values of all tokens to `cache`, if there is one. `layout`: None for the default of the
        device. Raises ModelError if a sequence is longer than the model's position limit.
        """
        longest = packed.longest
        if self.position_limit is not None and longest > self.position_limit:
            raise ModelError(
                f"a sequence of {longest} tokens was given to a {self.layers.config.model_type} model that reads at "
                f"most {self.position_limit} positions"
            )
        layout = layout or PackedLayout(packed.lengths, self.path.attention, prefixes=packed.prefixes)
        fused = None if self.is_compiled and cache is None else self._fused_layers()
        if fused is not None:
            return fused.run(packed, layout, rows=rows, cache=cache)
        notes = self._loads is not None and torch.is_grad_enabled()
        output = self._output(
            packed.token_ids[None], packed.position_ids[None], layout=layout, cache=cache, routers=notes
        )
        if self._loads is not None and notes:
            self._loads.append(self._load_of(output, packed))
        hidden = output.last_hidden_state[0]
        return hidden if rows is None else hidden[rows]

    @contextmanager
    def noting_loads(self) -> Generator[list[ExpertLoad]]:
        """Inside, each pass with gradients over packed tokens adds the choices of its routers to the list."""
        self._loads = loads = []
        try:
            yield loads
        finally:
            self._loads = None

    def expert_load(self, packed: Packed) -> ExpertLoad:
        """The choices of the routers for packed tokens, for a model that is balanced.

        Raises ModelError if the model does not return them.
        """
        layout = PackedLayout(packed.lengths, self.path.attention, prefixes=packed.prefixes)
        output = self._output(packed.token_ids[None], packed.position_ids[None], layout=layout, routers=True)
        return self._load_of(output, packed)

    def balance(self, coefficient: float) -> None:
        """Balance the experts with this coefficient in place of the configuration's; 0 for no balancing.

        Raises ModelError if the model has no loss that balances experts.
        """
        self.balancing = balancing_of(self.layers.config, coefficient)

    def _load_of(self, output: Any, packed: Packed) -> ExpertLoad:
        assert self.balancing is not None, "only such models are asked"
        per_layer = output.get("router_logits") or ()
        shapes = [list(logits.shape) for logits in per_layer]
        if not shapes or any(shape != [packed.num_tokens, shapes[0][-1]] for shape in shapes):
            raise ModelError(
                f"to balance experts, the routers of a {self.layers.config.model_type} model must each give "
                f"[{packed.num_tokens} tokens, experts], and they give {shapes or 'nothing'}: set "
                "balancing_coefficient to 0"
            )
        return expert_load(per_layer, packed.num_uses, experts_per_token=self.balancing.experts_per_token)

    def decoder(self) -> Decoder:
        """The fastest implementation of `decode` for the current modules. Weights may still change in place."""
        fused, make = self._fused_layers(), self.path.decoder
        return (None if fused is None or make is None else make(fused, self.decode)) or self.decode

    def decode(
        self,
        token_ids: Int64[Tensor, "tokens"],
        position_ids: Int64[Tensor, "tokens"],
        cache: Cache,
        layout: AttentionLayout,
    ) -> Float[Tensor, "tokens hidden"]:
        """Run new tokens over a cache with the modules: token_ids and position_ids [T] -> hidden states [T, D].

        One token for each row is a batch; several for some rows (an `ExtensionLayout`) are packed.
        """
        shape = (1, -1) if isinstance(layout, ExtensionLayout) else (-1, 1)
        hidden = self.run(token_ids.view(shape), position_ids.view(shape), layout=layout, cache=cache)
        return hidden.flatten(0, 1)

    def _fused_layers(self) -> PackedLayers | None:
        """The fused layers; None if this device, precision or model has none."""
        make = self.path.layers
        return None if make is None else make(self.layers)

    def run(
        self,
        token_ids: Int64[Tensor, "batch tokens"],
        position_ids: Int64[Tensor, "batch tokens"],
        *,
        layout: AttentionLayout,
        cache: Cache | None = None,
    ) -> Float[Tensor, "batch tokens hidden"]:
        """token_ids and position_ids [B, T] -> hidden states [B, T, D]."""
        return self._output(token_ids, position_ids, layout=layout, cache=cache).last_hidden_state

    def _output(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        *,
        layout: AttentionLayout,
        cache: Cache | None = None,
        routers: bool = False,
    ) -> Any:
        """The output of the layers, as transformers names it. `routers`: with the logits of routers."""
        layers = self.packed_layers if cache is None else self.layers
        compute = None
        if self._is_half:
            compute = Compute(torch.bfloat16, self._products, is_compiled=layers is not self.layers)
        # `computing` casts plain matrix products. Autocast covers the others: experts, and attention written out in a
        # model.
        half = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=compute is not None)
        given: dict[str, Any] = {self._cache_argument: cache}
        if self.balancing is not None:
            given["output_router_logits"] = routers
        with half, attending(layout), computing(compute):
            return layers(input_ids=token_ids, position_ids=position_ids, use_cache=cache is not None, **given)


def check_compiler(backend: str, device: torch.device) -> None:
    """Raises ConfigError if inductor would find no C++ compiler for the CPU."""
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++", "c++") if name]
    if backend == "inductor" and device.type == "cpu" and not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"run.compile inductor compiles C++ for the CPU, and none of {', '.join(names)} is installed: install g++, "
            "or set run.compile: none"
        )
