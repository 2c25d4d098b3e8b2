"""Which path is taken on which device, by models as they are."""

import pytest
import torch

from architectures import build_architecture
from fake_cuda import fake_cuda
from proximo.models.attention.packed import AttentionOptions, PackedLayout, SegmentAttention
from proximo.models.attention.varlen import VarlenAttention
from proximo.models.fast_path import fast_path, paths, planning_for
from proximo.models.heads import CHUNK_TOKENS
from proximo.models.language import LanguageModel
from proximo.models.precision.placement import Precision
from proximo_cpu.attention import KernelAttention
from proximo_cpu.library import library


def test_every_precision_has_an_entry_for_every_device_that_offers_it() -> None:
    everywhere = [each for each in Precision if each is not Precision.TF32]
    wanted = {(device, each) for device in ("cpu", "cuda", "mps") for each in everywhere}
    assert set(paths()) == wanted | {("cuda", Precision.TF32)}
    assert {each for (_, each), path in paths().items() if path.bf16_head} == {Precision.BF16}
    assert all(path.bf16_head for (_, each), path in paths().items() if each is Precision.BF16)
    path = fast_path("xpu", Precision.BF16_FLOAT32_HEAD)  # of a device that is not in the table
    assert (path.attention, path.layers, path.decoder) == (None, None, None)


def test_where_kernels_are_known_the_modules_are_left() -> None:
    kernels = library() is not None
    model = LanguageModel(build_architecture("llama"))
    assert model.backbone._fused_layers() is not None
    assert (model.decoder() != model.backbone.decode) is kernels
    with planning_for("cuda"):
        assert model.backbone._fused_layers() is not None
        assert model.decoder() != model.backbone.decode
    with planning_for("mps"):
        assert model.backbone._fused_layers() is None
        assert model.decoder() == model.backbone.decode
    half = LanguageModel(build_architecture("llama"), precision=Precision.BF16)
    fused = half.backbone._fused_layers()
    assert fused.parts.layers[0].rest.dtype is torch.bfloat16
    assert (half.decoder() != half.backbone.decode) is kernels


@pytest.mark.parametrize(
    ("device", "precision", "expected"),
    [
        ("cpu", Precision.FLOAT32, KernelAttention),
        ("cpu", Precision.BF16, KernelAttention),
        ("cuda", Precision.BF16, VarlenAttention),
        ("cuda", Precision.BF16_FLOAT32_HEAD, VarlenAttention),
        ("cuda", Precision.TF32, None),
        ("mps", Precision.FLOAT32, None),
    ],
)
def test_attention(device: str, precision: Precision, expected: type | None) -> None:
    assert fast_path(device, precision).attention is expected


def test_the_path_follows_the_weights() -> None:
    model = LanguageModel(build_architecture("llama"), precision=Precision.BF16)
    assert model.backbone.path is paths()["cpu", Precision.BF16]
    with fake_cuda(model.model):
        assert model.backbone.path is paths()["cuda", Precision.BF16]


def test_without_a_kernel_each_sequence_is_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    plain = SegmentAttention.attend
    monkeypatch.setattr(
        SegmentAttention, "attend", lambda self, q, *given: (lengths.append(q.shape[2]), plain(self, q, *given))[1]
    )
    heads = [torch.randn(1, 2, 7, 8) for _ in range(3)]
    PackedLayout((3, 4)).attend(*heads, AttentionOptions())
    assert lengths == [3, 4]


@pytest.mark.parametrize(("vocabulary", "expected"), [(151_936, 883), (32_000, 4194), (2**20, CHUNK_TOKENS)])
def test_an_accelerator_takes_larger_chunks_of_the_head(vocabulary: int, expected: int) -> None:
    model = LanguageModel(build_architecture("llama"))
    model.base.lm_head = torch.nn.Linear(32, vocabulary, bias=False, device="meta")
    assert model.head.chunk_tokens == CHUNK_TOKENS
    with planning_for("cuda:1"):
        assert model.head.chunk_tokens == expected
