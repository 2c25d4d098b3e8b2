"""Score labelled sentences with a trained reward model: `score_sst2.py MODEL_FOLDER SENTENCES.jsonl`.

Prints the share of all pairs of one positive and one negative sentence in which the positive one scores higher (a tie
counts half), which is the area under the ROC curve, and the sentences with the highest and lowest scores.
"""

import json
import sys
from pathlib import Path

import torch

from proximo.data.tokenise import TextEncoder
from proximo.models.loading import load_scalar_model
from proximo.models.packing import pack, plan_batches
from proximo.models.pretrained.sources import ModelSource
from proximo.models.pretrained.vocabulary import load_tokenizer


@torch.no_grad()
def scores_of(model_folder: str, texts: list[str]) -> torch.Tensor:
    """One score per text, read after its end-of-sequence token, as in training."""
    encoder = TextEncoder(load_tokenizer(model_folder))
    model = load_scalar_model(ModelSource(path=model_folder), fresh_head=None, device=torch.device("cpu"))
    sequences = [(*ids, encoder.end_id) for ids in encoder.texts(texts)]
    scores = torch.zeros(len(texts))
    for batch in plan_batches([len(sequence) for sequence in sequences], token_budget=8192):
        scores[batch] = model.sequence_scores(pack([sequences[i] for i in batch]))
    return scores


def main(model_folder: str, path: str) -> None:
    """Print the accuracy over all pairs and the extremes."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    texts = [row["text"] for row in rows]
    scores = scores_of(model_folder, texts)
    positive = torch.tensor([row["label"] == 1 for row in rows])
    gaps = scores[positive][:, None] - scores[~positive][None, :]
    right = (gaps > 0).double().mean() + 0.5 * (gaps == 0).double().mean()
    print(f"{gaps.numel():,} pairs, in {right.item():.4f} of which the positive sentence scores higher")
    order = scores.argsort(descending=True).tolist()
    for index in [*order[:3], *order[-3:]]:
        print(f"{scores[index]:+6.2f}  {texts[index]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
