"""The engine's promises for families with windows, states or experts, and for encoder-decoders.

Windows of 16 in blocks of 4, prompts of up to five windows, shared encoder inputs, on pools that
evict and preempt, by recomputation and by swapping to a host with too little memory for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, repeat
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import (
    AudioPrompt,
    EncoderPrompt,
    EngineConfig,
    ExplicitEncoderDecoderPrompt,
    ImagePrompt,
    LLMEngine,
    Prompt,
    TokensPrompt,
)
from engine.requests.request import RequestStatus
from omni.seeded.language_models import build_causal_lm
from prefix_cache import HostOnlySpec, OffloadedBlocks, PageCopy
from tests.support.encoder_decoder_requests import noise_image, tone
from tests.support.examples import examples
from tests.support.idle_engine import drop_all
from tests.support.patience import PATIENCE_S
from tests.support.request_stream import (
    BLOCK_SIZE,
    BUDGETS,
    Alone,
    Ask,
    Script,
    alone_with,
    assert_same,
    not_done,
    run_stream,
    scripts,
)

# With "disk", requests are recomputed, or hit what the pool has evicted to a folder.
Preemption = Literal["recompute", "swap", "disk"]

SOURCES = 3
# Pool sizes that a few requests fill, but in which the longest request fits.
POOLS = {"bart": 28, "t5": 28, "t5-gated": 28, "whisper": 90, "mllama": 46}
SWAPPED = {"qwen2": 20, "gemma2": 36, "jamba": 6}
RECOMPUTED = {
    "qwen3_moe": 32,
    "mistral-sliding": 18,
    "qwen2-sliding": 36,
    "ministral": 36,
    "gemma2": 36,
    "gemma3": 32,
    "jamba": 6,
    "bamba": 6,
    "qwen3_next": 6,
    "qwen3_5": 6,
    "jamba-recurrent": 6,
}
# The same in blocks of 16 tokens; a block of a model with states holds many tokens.
IN_LONG_BLOCKS = {
    **dict.fromkeys(("bart", "t5", "mllama", "llama", "qwen3", "qwen3_moe", "mixtral"), 20),
    **{"whisper": 22, "gemma2": 20, "gemma3": 16, "ministral": 20},
    **dict.fromkeys(("jamba", "bamba", "qwen3_next", "qwen3_5"), 5),
}
FAMILIES = [
    *(
        (name, preemption)
        for name in POOLS
        for preemption in ("recompute", "swap")
        if (name, preemption) not in (("t5", "swap"), ("t5-gated", "recompute"))
    ),
    *((name, "swap") for name in SWAPPED),
    *((name, "recompute") for name in RECOMPUTED),
    *((name, "swap", "16") for name in IN_LONG_BLOCKS),
]
OUTPUTS = ("hidden_states", "encoder_hidden_states")
# Sharp attention amplifies rounding: even uncached, these differ as much between batches.
ATOL = {
    **{"t5": 1e-4, "t5-gated": 1e-4, "whisper": 5e-5},
    **{"gemma3": 5e-5, "qwen3_next": 1e-4, "qwen3_5": 1e-4},
}
RUNS = (RequestStatus.RUNNING, RequestStatus.FINISHED)
# A state does not grow: a running request has room to finish unless keys and values need it.
MAY_RUN_TO_THE_END = ("jamba", "bamba", "qwen3_next", "qwen3_5", "jamba-recurrent")
# A step with more tokens than planned needs more blocks of a window than planned.
WINDOWED = ("mistral-sliding", "qwen2-sliding", "ministral", "gemma2", "gemma3")
HOST_ONLY = ("mistral-sliding", "jamba-recurrent")


@dataclass(frozen=True)
class PairAsk(Ask):
    """A request for an encoder-decoder; the tokens of :class:`Ask` are the decoder prompt."""

    model: str = "bart"
    image_token_id: int = 0
    source: int = 0

    @property
    def prompt(self) -> Prompt:
        decoder = Ask.prompt.__get__(self)
        assert isinstance(decoder, TokensPrompt)
        ids = decoder.prompt_token_ids
        if self.model == "mllama":
            if not self.source:
                return decoder
            place = min(self.family, len(ids))
            decoder = TokensPrompt((*ids[:place], self.image_token_id, *ids[place:]))
        return ExplicitEncoderDecoderPrompt(encoder_prompt(self.model, self.source), decoder)


@cache
def encoder_prompt(model: str, source: int) -> EncoderPrompt:
    if model == "whisper":
        return AudioPrompt(tone(0.5 + 0.5 * source, 200.0 + 100.0 * source))
    if model == "mllama":
        return ImagePrompt(noise_image(50 * source, 50, source))
    generator = torch.Generator().manual_seed(100 + source)
    return TokensPrompt(
        tuple(torch.randint(10, 700, (4 + 8 * source,), generator=generator).tolist())
    )


@dataclass(frozen=True)
class Family:
    name: str
    engine: LLMEngine
    alone: Alone
    preemption: Preemption
    max_prompt: int
    image_token_id: int
    budgets: Sequence[int]

    @property
    def has_encoder(self) -> bool:
        return self.name in POOLS

    def ask(self, plain: Ask, source: int) -> Ask:
        """Return the same request for this family."""
        if not self.has_encoder:
            return plain
        return PairAsk(
            **vars(plain) | {"as_embeds": False},
            model=self.name,
            image_token_id=self.image_token_id,
            source=source,
        )


@pytest.fixture(scope="module", params=FAMILIES, ids="-".join)
def family(
    request: pytest.FixtureRequest,
    seeded: Callable[[str], str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Family:
    name, preemption, *size = request.param
    if name == "jamba-recurrent":  # its first attention layer would be the third
        folder = tmp_path_factory.mktemp("recurrent")
        checkpoint = str(
            build_causal_lm(folder, "jamba", tie_word_embeddings=False, num_hidden_layers=2)
        )
    else:
        checkpoint = seeded(name)
    pool = (IN_LONG_BLOCKS if size else POOLS | SWAPPED | RECOMPUTED)[name]
    outputs = OUTPUTS if name in POOLS else None
    max_prompt = 76 if size or (preemption == "recompute" and name in RECOMPUTED) else 30
    budgets = BUDGETS if size or name not in WINDOWED else BUDGETS[:2]
    more: dict[str, Any] = {}
    if preemption == "swap":
        more = {"preemption": "swap", "num_swap_blocks": pool * 2 // 3}
    elif preemption == "disk":
        blocks = tmp_path_factory.mktemp("blocks")
        more = {"offload": {"disk": {"path": str(blocks), "bytes": 2**24}}}
    engine = LLMEngine(
        EngineConfig(
            model=checkpoint,
            block_size=int(*size or (BLOCK_SIZE,)),
            num_blocks=pool,
            max_num_seqs=4,
            max_num_batched_tokens=budgets[-1] if size else BUDGETS[1],
            max_num_encoder_tokens=120,
            max_model_len=max_prompt + 26,
            **more,
        ),
        output_names=outputs,
    )
    engine._scheduler._max_num_batched_tokens = BUDGETS[1]
    image_token_id = 0
    if name == "mllama" and engine.tokenizer is not None:
        image_token_id = engine.tokenizer.get_vocab()["<|image|>"]
    alone = alone_with(checkpoint, outputs, ATOL.get(name, 1e-5))
    return Family(name, engine, alone, preemption, max_prompt, image_token_id, budgets)


def adapt(family: Family, script: Script, sources: list[int]) -> Script:
    numbers = (sources[i % len(sources)] for i in count())
    return [
        (event, family.ask(argument, next(numbers)) if isinstance(argument, Ask) else argument)
        for event, argument in script
    ]


@pytest.mark.shows("prefix hits", "streaming")
@settings(max_examples=examples(24))
@given(data=st.data(), sources=st.lists(st.integers(0, SOURCES - 1), min_size=1, max_size=6))
def test_random_streams_equal_uncached_and_conserve_blocks(
    family: Family, data: st.DataObject, sources: list[int]
) -> None:
    script = data.draw(scripts(family.max_prompt, family.budgets))
    run_stream(family.engine, adapt(family, script, sources), family.alone)


ON_DISK = [(name, "disk") for name in (*POOLS, "qwen2", "gemma2", "jamba", *HOST_ONLY)]


def on_disk(family: Family) -> OffloadedBlocks:
    assert family.engine._offloaded is not None
    return family.engine._offloaded


@pytest.mark.parametrize("family", ON_DISK, indirect=True, ids="-".join)
@settings(max_examples=examples(10))
@given(
    data=st.data(),
    sources=st.lists(st.integers(0, SOURCES - 1), min_size=1, max_size=6),
    damage=st.integers(0, 2**16),
)
def test_random_streams_equal_uncached_with_blocks_on_disk(
    family: Family, data: st.DataObject, sources: list[int], damage: int
) -> None:
    """The pool begins empty, so hits come from blocks on disk, some of which are damaged."""
    disk = on_disk(family).disk
    assert disk is not None and disk.flush(PATIENCE_S)
    files = sorted(disk._folder.rglob("*.block"))
    for file in files[damage % 7 :: 7 + damage % 100]:
        if damage % 2:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-1] + b"\0")
    family.engine._kv.reset_prefix_cache()
    script = data.draw(scripts(family.max_prompt, family.budgets))
    run_stream(family.engine, adapt(family, script, sources), family.alone)


@pytest.mark.parametrize("family", ON_DISK, indirect=True, ids="-".join)
def test_evicted_blocks_are_hit_on_disk(family: Family) -> None:
    engine = family.engine
    ask = family.ask(Ask(2, 29, 0, 4, False, False, 0, None), 1)
    engine.reset_prefix_cache()
    hits = []
    for _ in range(3):
        run_stream(engine, [("add", ask)], family.alone)
        engine._kv.reset_prefix_cache()  # of the pool, not of what is below it
        (output,) = engine.generate([ask.prompt], [ask.params])
        hits.append(output.num_cached_tokens)
    assert hits == [28] * 3
    assert on_disk(family).stats().disk_hit_tokens > 0


def growing(family: Family, num_requests: int = 6) -> Script:
    """Return requests that start together, but do not all have room to finish."""
    length, max_tokens = (8, 70) if family.max_prompt > 30 else (4, 40)
    plain = [
        Ask(number % 3, length + number, 0, max_tokens, False, False, 0, None)
        for number in range(num_requests)
    ]
    return [("add", family.ask(ask, number % SOURCES)) for number, ask in enumerate(plain)]


class Swaps:
    """Counts swaps, and refusals to swap out."""

    def __init__(self, engine: LLMEngine, patch: pytest.MonkeyPatch) -> None:
        self.outs = self.ins = self.refused = 0
        swap = engine._swap
        assert swap is not None
        swap_out, swap_in = swap.swap_out, swap.swap_in

        def count_out(*args: Any) -> tuple[PageCopy, ...] | None:
            copies = swap_out(*args)
            self.outs += copies is not None
            self.refused += copies is None
            return copies

        def count_in(*args: Any, **kwargs: Any) -> tuple[PageCopy, ...] | None:
            copies = swap_in(*args, **kwargs)
            self.ins += copies is not None
            return copies

        patch.setattr(swap, "swap_out", count_out)
        patch.setattr(swap, "swap_in", count_in)


def test_streams_evict_hit_and_preempt(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the property above against being vacuous."""
    engine = family.engine
    swaps = Swaps(engine, monkeypatch) if family.preemption == "swap" else None
    before = engine.stats()
    assert before.kv is not None
    preempts = family.name not in MAY_RUN_TO_THE_END
    evicts = before.kv.num_blocks != 5  # one per group: it holds all states at ends of long blocks
    again: Script = [("add", family.ask(Ask(1, 20, 0, 4, False, False, 0, None), 1))]
    # The pool's learnt shares of content adapt to the requests.
    small = (growing(family, 3), again, again, growing(family, 4), again, again)
    for script in (*small, growing(family), *repeat(again, 10)):
        run_stream(engine, script, family.alone)
        missing = not_done(before, engine.stats(), preempts=preempts, evicts=evicts)
        if not missing:
            break
    assert not missing
    if swaps is not None and preempts:
        assert swaps.outs > 0 and swaps.ins == swaps.outs


@pytest.mark.parametrize("refused", [2, 3, 9], ids=["in its prompt", "later", "in its answer"])
def test_a_preempted_request_gives_the_same_output(
    family: Family, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = family.engine
    swaps = Swaps(engine, monkeypatch) if family.preemption == "swap" else None
    allocate, calls = engine._kv.allocate_slots, count()

    def refuse_once(*args: Any, **kwargs: Any) -> bool:
        return next(calls) != refused and allocate(*args, **kwargs)

    monkeypatch.setattr(engine._kv, "allocate_slots", refuse_once)
    before = engine.stats().num_preemptions
    engine.reset_prefix_cache()
    length = min(63, family.max_prompt)
    ask = family.ask(Ask(1, length, 0, 9, False, False, 0, "own"), 2)
    run_stream(engine, [("add", ask)], family.alone)
    assert engine.stats().num_preemptions == before + 1
    if swaps is not None:
        assert (swaps.outs, swaps.ins, swaps.refused) == (1, 1, 0)


def test_a_preempted_request_can_be_aborted(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, swap = family.engine, family.engine._swap
    if family.name in MAY_RUN_TO_THE_END:  # allocation fails once
        allocate, calls = engine._kv.allocate_slots, count()
        monkeypatch.setattr(
            engine._kv,
            "allocate_slots",
            lambda *args, **kwargs: next(calls) != 12 and allocate(*args, **kwargs),
        )
    for number, (_, ask) in enumerate(growing(family)):
        assert isinstance(ask, Ask)
        engine.add_request(str(number), ask.prompt, ask.params)
    before = engine.stats().num_preemptions
    while engine.stats().num_preemptions == before:
        assert engine.has_unfinished_requests
        engine.step()
    requests = [group.completions[0].request for group in engine._live.values()]
    victims = [r.request_id for r in requests if r.num_preemptions and r.status not in RUNS]
    assert victims and (swap is None or set(victims) == swap.request_ids)
    for request_id in victims:
        engine.abort(request_id)
    engine.check_integrity()
    if swap is not None:
        host = swap.pool.arenas[0]
        assert len(host.free_pages) == len(host.pages) - 1
    drop_all(engine)
    engine.check_integrity()


def test_models_without_full_attention_get_a_group_on_the_host(family: Family) -> None:
    groups = family.engine._kv.config.groups
    on_host = [isinstance(group.spec, HostOnlySpec) for group in groups]
    assert any(on_host) == (family.name in HOST_ONLY)
    assert "hidden_states" in family.engine._kv.stage_outputs.shapes


@pytest.mark.parametrize(
    "family", [(name, "recompute") for name in RECOMPUTED], indirect=True, ids="-".join
)
@pytest.mark.parametrize("length", [3, 40, 42])
def test_a_conversation_goes_on_from_the_last_token_of_its_last_turn(
    family: Family, length: int
) -> None:
    """Every turn hits all but the last token, also in a partial block."""
    engine = family.engine
    engine.reset_prefix_cache()
    ask = Ask(0, length, 0, 6, False, False, 0, None)
    for turn in range(3):
        (output,) = engine.generate([ask.prompt], [ask.params])
        # The last turn computed all but its last token, and three more follow it.
        assert output.num_cached_tokens == (output.num_prompt_tokens - 4 if turn else 0)
        assert_same(output, family.alone.answer(ask), family.alone.atol)
        ask = ask.next_turn(output, 3)
    engine.check_integrity()
