"""Use the engine without a pipeline: batches, streaming, prompt embeddings, and prefix hits.

Run it with ``python examples/engine_alone.py``.
"""

from __future__ import annotations

import torch

from omni import EmbedsPrompt, EngineConfig, LLMEngine, Prompt, SamplingParams, TokensPrompt


def main() -> None:
    engine = LLMEngine(
        EngineConfig(model="seeded:llama", block_size=8, num_blocks=128, max_model_len=256)
    )
    print("what it reserved")
    for line in engine.memory_plan.lines():
        print(f"  {line}")

    print("texts, token ids and embeddings run in one batch")
    generator = torch.Generator().manual_seed(0)
    prompts: list[Prompt] = [
        "Once upon a time there was a small workshop",
        TokensPrompt(tuple(range(300, 320))),
        EmbedsPrompt(0.05 * torch.randn(10, engine.hidden_size, generator=generator)),
    ]
    for output in engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8)):
        (completion,) = output.outputs
        rows = completion.tensors["hidden_states"]
        print(
            f"  {output.num_prompt_tokens} tokens in: {completion.text!r}, rows {tuple(rows.shape)}"
        )

    print("the same prompt again, streamed: its full blocks are hits")
    sampling = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=8)
    for output in engine.stream(prompts[0], sampling):
        print(f"  {output.outputs[0].delta!r} ({output.num_cached_tokens} prompt tokens hit)")
    engine.close()


if __name__ == "__main__":
    main()
