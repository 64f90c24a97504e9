"""Number of tokens of a conversation recomputed at its next turn, with and without copies.

    python -m benchmarks.next_turn [--turns 6] [--talks 6]

Several conversations at once, on tiny checkpoints with random weights: counts are the same on every
machine. A turn's prompt is the last turn's, its answer and some new words. Counted are the tokens
computed beyond the new words: *before*, where only full blocks are found, and *now*, where a
turn continues from a copy of the last turn's last block. One token is unavoidable: the last one
of an answer is sampled, but not computed.

* *answers* end at their limit, usually in the middle of a block;
* *stops* end by a stop token;
* *streams* are aborted by their reader, who continues with the received part;
* *completions* are three per turn, one of which is continued.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams, TokensPrompt
from omni.seeded.checkpoints import resolve_model
from prefix_cache import KVCacheManager

FAMILIES = ("qwen2", "mistral-sliding", "gemma2", "gemma3", "ministral", "bamba", "jamba")
Talk = tuple[int, ...]


def answers(engine: LLMEngine, talks: list[Talk], source: random.Random) -> list[RequestOutput]:
    """Generate every conversation's next answer, of 5 to 40 tokens."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=source.randint(5, 40), ignore_eos=True)
        for _ in talks
    ]
    return engine.generate([TokensPrompt(talk) for talk in talks], params)


def stops(engine: LLMEngine, talks: list[Talk], source: random.Random) -> list[RequestOutput]:
    """Generate answers that end by one of many stop tokens, a quarter of the vocabulary."""
    stop = tuple(source.sample(range(2, 700), 170))
    params = SamplingParams(
        temperature=1.0, seed=source.randint(0, 99), max_tokens=60, stop_token_ids=stop
    )
    return engine.generate([TokensPrompt(talk) for talk in talks], params)


def streams(engine: LLMEngine, talks: list[Talk], source: random.Random) -> list[RequestOutput]:
    """Stream the answers one after the other, each aborted after 5 to 40 tokens."""
    outputs = []
    for talk in talks:
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        num_read = source.randint(5, 40)
        for output in engine.stream(TokensPrompt(talk), params):
            if len(output.outputs[0].token_ids) == num_read:
                break
        outputs.append(output)
    return outputs


def completions(engine: LLMEngine, talks: list[Talk], source: random.Random) -> list[RequestOutput]:
    """Generate three completions for each conversation."""
    params = SamplingParams(
        temperature=1.0, seed=source.randint(0, 99), n=3, max_tokens=30, ignore_eos=True
    )
    return engine.generate([TokensPrompt(talk) for talk in talks], params)


KINDS = (answers, stops, streams, completions)


def computed_again(
    engine: LLMEngine, kind: Callable[..., list[RequestOutput]], num_talks: int, num_turns: int
) -> float:
    """Return the mean tokens computed per turn beyond its new words, over all but the first."""
    source = random.Random(0)
    talks: list[Talk] = [
        tuple(source.randint(2, 700) for _ in range(source.randint(3, 60)))
        for _ in range(num_talks)
    ]
    num_new = [len(talk) for talk in talks]
    again = count = 0
    engine.reset_prefix_cache()
    for turn in range(num_turns):
        outputs = kind(engine, talks, source)
        if turn:
            for output, new in zip(outputs, num_new, strict=True):
                again += output.num_prompt_tokens - (output.num_cached_tokens or 0) - new
                count += 1
        for index, output in enumerate(outputs):
            said = source.choice(output.outputs).token_ids
            words = tuple(source.randint(2, 700) for _ in range(source.randint(1, 30)))
            talks[index] = (*talks[index], *said, *words)
            num_new[index] = len(words)
    engine.check_integrity()
    return again / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--talks", type=int, default=6)
    args = parser.parse_args()
    table = Table(title="tokens computed again per turn: before / now")
    table.add_column("model")
    for kind in KINDS:
        table.add_column(kind.__name__, justify="right")
    for family in FAMILIES:
        engine = LLMEngine(
            EngineConfig(
                model=resolve_model(f"seeded:{family}"),
                block_size=16,
                num_blocks=1000,
                max_model_len=1024,
            )
        )
        figures = []
        for kind in KINDS:
            with patch.object(KVCacheManager, "publish_partial"):
                before = computed_again(engine, kind, args.talks, args.turns)
            now = computed_again(engine, kind, args.talks, args.turns)
            figures.append(f"{before:.2f} / {now:.2f}")
        table.add_row(family, *figures)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
