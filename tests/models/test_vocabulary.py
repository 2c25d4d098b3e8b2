"""Tokenizers: reading, ends of answers, shared vocabularies, growing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from architectures import build_architecture
from builders import tiny_language_model, tiny_tokenizer
from proximo.distributed.shard_files import SavedTensor, saved_tensors_of
from proximo.distributed.unread_parameters import Unread, numbers_of, read_all, source_of
from proximo.errors import ModelError
from proximo.models.language import LanguageModel
from proximo.models.packing import pack
from proximo.models.pretrained.vocabulary import (
    check_same_vocabulary,
    check_vocabulary,
    end_of_sequence_ids,
    load_tokenizer,
    resize_vocabulary,
    vocabulary_layers,
    vocabulary_size,
)
from proximo.models.scalar import HeadStart, scalar_from_language_model


def test_a_saved_tokenizer_comes_back(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again("hello\nyou").input_ids == tokenizer("hello\nyou").input_ids
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no folder"),
        ({}, "holds no tokenizer.*set tokenizer.path"),
        ({"tokenizer.json": "{"}, "cannot be read"),
    ],
)
def test_a_tokenizer_that_is_not_there_or_broken_is_one_message(tmp_path: Path, content: dict | None, message: str):
    folder = tmp_path / "tokenizer"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(ModelError, match=message):
        load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("listed", "own", "expected"),
    [(2, "<eos>", (2,)), ([5, 4], "<eos>", (2, 4, 5)), (None, "<eos>", (2,)), (7, None, (7,))],
)
def test_every_end_of_sequence_token_counts(listed: int | list[int] | None, own: str | None, expected: tuple[int, ...]):
    model, tokenizer = tiny_language_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = listed
    tokenizer.eos_token = own
    assert end_of_sequence_ids(model, tokenizer) == expected
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    with pytest.raises(ModelError, match="no answer could end"):
        end_of_sequence_ids(model, tokenizer)


def test_a_tokenizer_larger_than_the_embedding_is_refused_and_spare_rows_are_not():
    tokenizer = tiny_tokenizer()
    size = vocabulary_size(tokenizer)
    check_vocabulary(tiny_language_model(vocab_size=size), tokenizer, role="policy")
    check_vocabulary(tiny_language_model(vocab_size=size + 8), tokenizer, role="policy")
    with pytest.raises(ModelError, match=f"has {size} tokens, but the value model embeds only {size - 1}"):
        check_vocabulary(tiny_language_model(vocab_size=size - 1), tokenizer, role="value")


def test_roles_that_read_other_ids_are_refused_with_an_example():
    check_same_vocabulary(tiny_tokenizer(), tiny_tokenizer(), role="value")
    other = tiny_tokenizer()
    other.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    assert vocabulary_size(other) == vocabulary_size(tiny_tokenizer()) + 1
    with pytest.raises(
        ModelError, match=r"not that of the value model: they differ in 1 tokens, such as '<\|tool\|>' \(None"
    ):
        check_same_vocabulary(tiny_tokenizer(), other, role="value")
    with pytest.raises(ModelError, match=r"such as '<\|tool\|>' \(63 in this stage, None with the model\)"):
        check_same_vocabulary(other, tiny_tokenizer(), role="value")
    check_same_vocabulary(other, tiny_tokenizer(), role="value", added=["<|tool|>"])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gpt2", "phi", "opt"])
@torch.no_grad()
def test_growing_keeps_old_tokens_and_starts_new_ones_at_the_mean(architecture: str):
    model, grown = build_architecture(architecture), build_architecture(architecture)
    resize_vocabulary(grown, 70)
    assert grown.get_input_embeddings().weight.shape[0] == grown.get_output_embeddings().weight.shape[0] == 70
    assert grown.config.vocab_size == 70
    packed = pack([[3, 4, 5]])
    before, after = LanguageModel(model), LanguageModel(grown)
    logits = after.head.logits(after.hidden_states(packed))
    torch.testing.assert_close(logits[:, :61], before.head.logits(before.hidden_states(packed)), rtol=0, atol=2e-6)
    old = model.get_input_embeddings().weight
    assert grown.get_input_embeddings().weight[61:].equal(old.mean(dim=0).expand(9, -1))
    if architecture == "phi":
        torch.testing.assert_close(grown.lm_head.bias[61:], model.lm_head.bias.mean().expand(9))


@torch.no_grad()
def test_all_roles_grow_alike_and_without_a_random_number():
    language_model = LanguageModel(build_architecture("llama"))
    scalar = scalar_from_language_model(language_model, HeadStart.NORMAL)
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    resize_vocabulary(language_model.base, 66)
    resize_vocabulary(scalar.base, 66)
    assert torch.rand(2).equal(expected)
    assert scalar.base.get_input_embeddings().weight.equal(language_model.base.get_input_embeddings().weight)
    assert language_model.vocab_size == 66
    assert scalar.sequence_scores(pack([[65, 3]])).isfinite().all()


def test_tied_layers_stay_tied_and_nothing_shrinks():
    model = build_architecture("qwen2")
    resize_vocabulary(model, 66)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    resize_vocabulary(model, 10)
    assert model.config.vocab_size == 66


@pytest.mark.parametrize("tied", [False, True])
def test_the_rows_of_layers_in_files_grow_with_one_reading_of_each_file(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, expected = (tiny_language_model(tie_word_embeddings=tied) for _ in range(2))
    layers = vocabulary_layers(model)
    save_file({f"{n}": layer.weight.detach().clone() for n, layer in enumerate(layers)}, tmp_path / "weights")
    weights = [Unread.of(source) for _, source in sorted(saved_tensors_of(tmp_path / "weights").items())]
    for layer, weight in zip(layers, weights[:1] * 2 if tied else weights, strict=True):
        layer.weight = weight
    reads: list[str] = []
    read = SavedTensor.read
    monkeypatch.setattr(SavedTensor, "read", lambda self, *part: (reads.append(self.name), read(self, *part))[1])
    for each in (model, expected):
        resize_vocabulary(each, 70)
    assert reads == (["0"] if tied else ["0", "1"])
    first, second = (layer.weight for layer in vocabulary_layers(model))
    assert isinstance(first, Unread)
    assert (first is second) is tied
    for layer, wanted in zip(vocabulary_layers(model), vocabulary_layers(expected), strict=True):
        assert torch.equal(numbers_of(layer.weight), wanted.weight)
        source = source_of(layer.weight)
        assert source is not None
        assert torch.equal(source.read((60, 3), (9, 4)), wanted.weight[60:69, 3:7])
    read_all(model)
    assert (vocabulary_layers(model)[0].weight is vocabulary_layers(model)[1].weight) is tied
