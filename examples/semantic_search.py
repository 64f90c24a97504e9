"""Semantic search: one vector per text, and the nearest texts for a question.

    documents, questions --> embedder --one vector of length 1 per text--> dot products --> ranks

Run it with ``python examples/semantic_search.py [checkpoint] [question ...]``. The checkpoint is a
folder or a hub id in the layout of sentence-transformers, such as all-MiniLM-L6-v2, which defines
pooling and normalization. The default is a small random encoder: it knows no meaning, but texts
with the same words have similar vectors.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from omni import EncoderStage, EngineConfig, Omni, Pipeline

DOCUMENTS = [
    "The tide comes in twice a day.",
    "A cache keeps what was computed before.",
    "Bread rises because yeast makes gas.",
    "The moon pulls the water of the sea towards it.",
    "A balanced tree finds a key in few steps.",
]
QUESTIONS = ["When does the tide come in?", "What does a cache keep?"]


def embedder(checkpoint: str | None) -> EncoderStage:
    """Return the stage that computes the vectors."""
    config = EngineConfig(model=checkpoint or "seeded:bert", num_blocks=512)
    if checkpoint is not None:
        return EncoderStage("embedder", config, outputs=["pooled"])
    return EncoderStage("embedder", config, pooling="mean", normalize=True, outputs=["pooled"])


def embed(omni: Omni, texts: list[str]) -> Tensor:
    """Return the vectors of texts, ``(texts, width)``."""
    outputs = omni.generate(texts)
    for output in outputs:
        if output.error is not None:
            raise SystemExit(f"{output.request_id}: {output.error}")
    return torch.stack([output.stages["embedder"].tensors["pooled"] for output in outputs])


def main() -> None:
    checkpoint = sys.argv[1] if len(sys.argv) > 1 else None
    questions = sys.argv[2:] or QUESTIONS
    with Omni(Pipeline([embedder(checkpoint)])) as omni:
        documents = embed(omni, DOCUMENTS)
        print(f"{len(documents)} documents, vectors of {documents.shape[1]} numbers")
        for question, scores in zip(questions, embed(omni, questions) @ documents.T, strict=True):
            print(question)
            for score, index in zip(*(each.tolist() for each in scores.topk(3)), strict=True):
                print(f"  {score:.3f}  {DOCUMENTS[index]}")
        again = embed(omni, DOCUMENTS)
        hits = omni.stats()["embedder"].cached_tokens
        print(
            f"embedded again: {hits} tokens hit, the same vectors: {torch.equal(again, documents)}"
        )


if __name__ == "__main__":
    main()
