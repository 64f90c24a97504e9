"""Compose a pipeline in Python: one stage feeds two others, and all three cache prefixes.

    prompt --> writer --hidden states--> reader     --> text
                  |
                  +-----text-----------> embedder   --> one vector per request

Run it with ``python examples/compose_in_python.py``. The models are small and random, so the texts
make no sense. Note that the second round computes far less and returns the same output.
"""

from __future__ import annotations

from omni import (
    AutoregressiveStage,
    EncoderStage,
    EngineConfig,
    Omni,
    OmniOutput,
    Pipeline,
    SamplingParams,
    StageInputs,
)

OPENING = "You are a helpful assistant. The user asks a question, and the assistant answers: "
PROMPTS = [OPENING + question for question in ("why is the sky blue?", "what is a cache?")]


def build() -> Pipeline:
    decoder = EngineConfig(model="seeded:qwen2", block_size=8, num_blocks=256, max_model_len=256)
    encoder = EngineConfig(model="seeded:bert", block_size=8, num_blocks=128, max_model_len=128)
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    writer = AutoregressiveStage("writer", decoder, sampling=greedy)
    reader = AutoregressiveStage(
        "reader",
        decoder,
        sampling=greedy,
        inputs=StageInputs(("writer",), "hidden_states_as_prompt_embeds"),
    )
    embedder = EncoderStage(
        "embedder",
        encoder,
        inputs=StageInputs(("writer",), "text_as_prompt"),
        outputs=["pooled"],
    )
    return Pipeline([writer, reader, embedder])


def show(outputs: list[OmniOutput]) -> None:
    for output in outputs:
        writer, reader, embedder = (output.stages[s] for s in ("writer", "reader", "embedder"))
        print(f"  writer: {writer.text!r}")
        print(f"  reader: {reader.text!r}")
        print(f"  embedder: a vector of {len(embedder.tensors['pooled'])} numbers")
        for stage in output.stages.values():
            print(f"    {stage.stage}: {stage.num_cached_tokens} of {stage.num_prompt_tokens} hit")


def main() -> None:
    with Omni(build()) as omni:
        for turn in ("first", "second"):
            print(f"{turn} round")
            show(omni.generate(PROMPTS))


if __name__ == "__main__":
    main()
