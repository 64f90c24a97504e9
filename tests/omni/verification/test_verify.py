"""Verification passes on a sound cache, and finds one corrupted row."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import (
    EncoderEngine,
    EngineConfig,
    LLMEngine,
    SamplingParams,
    TokenLogprobs,
    TokensPrompt,
    Waveform,
)
from omni import (
    AutoregressiveStage,
    EncoderStage,
    Omni,
    OmniRequest,
    Pipeline,
    StageInputs,
)
from omni.seeded.language_models import build_causal_lm
from omni.verification import verify as verify_module
from omni.verification.verify import (
    StageVerification,
    Tolerance,
    VerifyReport,
    compare_outputs,
    verify,
)
from prefix_cache import BlockHash, KVCacheBlock, extend_block_hashes
from stages import StageOutput, StageStats
from tests.support.fake_stage import FakeStage

BLOCK_SIZE = 4
SHARED = tuple(range(20, 40))
REQUESTS = [
    OmniRequest(TokensPrompt((*SHARED, 50 + index, 60 + index)), f"r{index}") for index in range(3)
]


def with_all_caches(made: Omni) -> Iterator[Omni]:
    """For one test, which may turn them off; every verification begins with empty ones."""
    yield made
    for stage in made.pipeline.stages.values():
        stage.enable_prefix_caching = True


@pytest.fixture
def omni(three_stages: Omni) -> Iterator[Omni]:
    yield from with_all_caches(three_stages)


@pytest.fixture(scope="module")
def three_stages(seeded: Callable[[str], str]) -> Iterator[Omni]:
    """writer -> reader (hidden states), writer -> bert (text)."""
    decoder = EngineConfig(
        model=seeded("qwen2"), num_blocks=128, block_size=BLOCK_SIZE, max_model_len=96
    )
    encoder = EngineConfig(
        model=seeded("bert"), num_blocks=64, block_size=BLOCK_SIZE, max_model_len=64
    )
    with Omni(
        Pipeline(
            [
                AutoregressiveStage(
                    "writer",
                    decoder,
                    sampling=SamplingParams(temperature=0.0, max_tokens=6),
                    final_output=(),
                ),
                AutoregressiveStage(
                    "reader",
                    decoder,
                    sampling=SamplingParams(temperature=1.0, max_tokens=4),
                    inputs=StageInputs(("writer",), "hidden_states_as_prompt_embeds"),
                    final_output=("text", "tensors"),
                ),
                EncoderStage("bert", encoder, inputs=StageInputs(("writer",), "text_as_prompt")),
            ]
        )
    ) as made:
        yield made


def writer_engine(omni: Omni) -> LLMEngine:
    stage = omni.pipeline.stages["writer"]
    assert isinstance(stage, AutoregressiveStage)
    return stage.engine


def shared_block(engine: LLMEngine) -> KVCacheBlock:
    """Return the cached block of the second four tokens that all requests share."""
    hashes: list[BlockHash] = []
    extend_block_hashes(hashes, SHARED, BLOCK_SIZE)
    block = engine._kv.pool.lookup(0, hashes[1])
    assert block is not None
    return block


def plant(monkeypatch: pytest.MonkeyPatch, corruption: Callable[[], None]) -> None:
    """Run ``corruption`` between the cold and the warm run."""
    real, cached_runs = verify_module._run, iter([corruption])

    def run(*args: Any, caching: Collection[str]) -> Any:
        done = real(*args, caching=caching)
        if caching:
            next(cached_runs, lambda: None)()
        return done

    monkeypatch.setattr(verify_module, "_run", run)


def test_cached_equals_uncached_and_hits_are_reported(omni: Omni) -> None:
    report = verify(omni, REQUESTS)
    assert report.equal, report.lines()
    assert report.failures == ()
    writer, reader, bert = sorted(report.stages, key=lambda stage: -ord(stage.stage[0]))
    assert [writer.stage, reader.stage, bert.stage] == ["writer", "reader", "bert"]
    assert writer.prompt_tokens == 3 * 22
    assert 0 < writer.cold_hit_tokens < writer.warm_hit_tokens == 3 * 20
    assert reader.warm_hit_tokens > 0
    assert bert.cold_hit_tokens == 0
    assert bert.warm_hit_tokens == bert.prompt_tokens > 0
    for stage in report.stages:
        assert min(stage.uncached_s, stage.cold_s, stage.warm_s) > 0
        assert stage.saved_s == stage.uncached_s - stage.warm_s
        (tensor,) = (each for each in stage.tensors if each.name == "hidden_states")
        assert tensor.noise is not None
        assert 0 <= tensor.max_difference <= tensor.tolerance <= max(1e-5, 4 * tensor.noise)
    assert "cached equals uncached: 3 of 3" in report.lines()[0]
    assert sum("hidden_states: largest difference" in line for line in report.lines()) == 3


@pytest.mark.parametrize("seed", range(2))
def test_cached_equals_uncached_under_eviction_and_preemption(
    seeded: Callable[[str], str], seed: int
) -> None:
    """Pools that hold about two requests, chunks of a few tokens, random shared prefixes."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4])
    tiny = EngineConfig(
        model=seeded("qwen2"),
        block_size=block_size,
        num_blocks=1 + 60 // block_size,
        max_model_len=60,
        max_num_seqs=4,
        max_num_batched_tokens=8,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    stages: list[AutoregressiveStage | EncoderStage] = [
        AutoregressiveStage("a", tiny, sampling=greedy, final_output=()),
        AutoregressiveStage(
            "b",
            tiny,
            sampling=greedy,
            inputs=StageInputs(("a",), "hidden_states_as_prompt_embeds"),
        ),
        EncoderStage("c", tiny, inputs=StageInputs(("a",), "hidden_states_as_prompt_embeds")),
    ]
    requests = [
        OmniRequest(
            TokensPrompt((*SHARED[: rng.randint(1, 20)], *rng.choices(range(300), k=5))),
            sampling={"a": {"max_tokens": rng.randint(1, 12), "temperature": rng.choice([0, 1])}},
            priority=rng.randint(0, 1),
            cache_salt=rng.choice([None, None, "salt"]),
        )
        for _ in range(10)
    ]
    with Omni(Pipeline(stages)) as omni:
        report = verify(omni, requests)
        assert report.equal, report.lines()
        assert report.failures == ()
        assert sum(stage.warm_hit_tokens for stage in report.stages) > 0
        engines = [stage.engine for stage in stages]
        assert sum(engine.stats().num_preemptions for engine in engines) > 0
        with omni.paused() as pipeline:
            for stage in pipeline.stages.values():
                stage.check_integrity()


def test_a_corrupted_row_of_the_stage_output_store_is_found_and_named(
    omni: Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt_row_5() -> None:
        engine = writer_engine(omni)
        slot = shared_block(engine).block_id * BLOCK_SIZE + 1
        row = torch.full((1, engine.hidden_size), 0.25)
        engine._kv.stage_outputs.write(torch.tensor([slot]), {"hidden_states": row})

    plant(monkeypatch, corrupt_row_5)
    report = verify(omni, REQUESTS)
    assert not report.equal
    of_writer = [each for each in report.differences if each.stage == "writer"]
    assert [each.request_id for each in of_writer] == ["r0", "r1", "r2"]
    for difference in of_writer:
        assert (difference.run, difference.kind) == ("warm", "tensor")
        assert "'hidden_states' differs in 1 of 27 rows, most in row 5" in difference.message
    assert {each.run for each in report.differences} == {"warm"}
    assert "DIFFERS" in report.lines()[0]
    assert any("request 'r1', stage 'writer', warm cache" in line for line in report.lines())


def test_a_corrupted_key_in_the_kv_cache_is_found(
    omni: Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt_one_key() -> None:
        engine = writer_engine(omni)
        page_bytes = engine.memory_plan.page_bytes
        page = engine._runner._memory.buffer.view(-1, page_bytes)[shared_block(engine).block_id]
        with torch.inference_mode():
            page.view(torch.float32)[:32] += 3.0

    plant(monkeypatch, corrupt_one_key)
    report = verify(omni, REQUESTS)
    assert {(each.stage, each.run) for each in report.differences} >= {("writer", "warm")}
    assert all(each.run == "warm" for each in report.differences)


def test_a_corrupted_row_of_an_encoder_is_found(
    omni: Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupt_every_row() -> None:
        stage = omni.pipeline.stages["bert"]
        assert isinstance(stage, EncoderStage)
        assert isinstance(stage.engine, EncoderEngine)
        slots = torch.arange(stage.engine.memory_plan.num_blocks * BLOCK_SIZE)
        rows = torch.ones(len(slots), stage.engine.hidden_size)
        stage.engine._rows.write(slots, {"hidden_states": rows})

    plant(monkeypatch, corrupt_every_row)
    differences = verify(omni, REQUESTS).differences
    assert {(each.stage, each.run) for each in differences} == {("bert", "warm")}


def test_switches_are_put_back_and_nothing_is_held(omni: Omni) -> None:
    omni.pipeline.stages["reader"].enable_prefix_caching = False
    verify(omni, REQUESTS[:1])
    with omni.paused() as pipeline:
        switches = {name: stage.enable_prefix_caching for name, stage in pipeline.stages.items()}
        assert switches == {"writer": True, "reader": False, "bert": True}
        for stage in pipeline.stages.values():
            stage.check_integrity()
    assert omni.generate(REQUESTS[0])[0].error is None


def test_failed_requests_are_reported_and_the_others_compared(omni: Omni) -> None:
    bad = [
        OmniRequest(TokensPrompt((10**6,)), "unknown token"),
        OmniRequest("x", "unknown stage", sampling={"wrter": {}}),
        OmniRequest("x", "wrong field", sampling={"writer": {"max_tokens": -1}}),
    ]
    report = verify(omni, [*bad, *REQUESTS])
    assert report.equal
    assert [request_id for request_id, _ in report.failures] == [each.request_id for each in bad]
    assert "3 of 6 requests compared" in report.lines()[0]
    assert any("vocabulary" in line for line in report.lines())


def test_an_error_that_only_caching_brings_is_a_difference(
    omni: Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = LLMEngine.prepare

    def refuse_when_caching(self: LLMEngine, request_id: str, *args: Any, **kwargs: Any) -> Any:
        if self.enable_prefix_caching and request_id == "r1":
            raise ValueError("cache trouble")
        return real(self, request_id, *args, **kwargs)

    monkeypatch.setattr(LLMEngine, "prepare", refuse_when_caching)
    report = verify(omni, REQUESTS)
    assert {(each.request_id, each.kind, each.stage) for each in report.differences} == {
        ("r1", "error", None)
    }
    assert len(report.differences) == 2, "in the cold and in the warm run"


@pytest.mark.parametrize(
    ("requests", "atol", "message"),
    [
        ([], None, "nothing to verify"),
        ([OmniRequest("x", "same"), OmniRequest("y", "same")], None, "share the request_id 'same'"),
        ([OmniRequest("x")], -1.0, "atol must not be negative"),
        ([OmniRequest("x")], float("nan"), "atol must not be negative"),
    ],
)
def test_what_cannot_be_verified_is_a_clear_error(
    requests: Sequence[OmniRequest], atol: float | None, message: str
) -> None:
    with Omni(Pipeline([FakeStage("a")])) as omni, pytest.raises(ValueError, match=message):
        verify(omni, requests, atol=atol)


def test_a_stage_behind_a_near_tie_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both runs are right, so later stages legitimately have different inputs."""
    from omni.verification.verify import Comparison, NearTie, Tolerance

    compared: list[str] = []

    def compare(uncached: Any, cached: Any, run: Any, **options: Any) -> Comparison:
        compared.append(uncached.stage)
        tie = NearTie(uncached.request_id, "a", run, 0, (1, 2), 1e-9)
        tie_or_none = tie if uncached.stage == "a" else None
        return Comparison(uncached, cached, run, Tolerance(), near_tie=tie_or_none)

    monkeypatch.setattr(verify_module, "compare_outputs", compare)
    stages = [FakeStage("a"), FakeStage("b", ("a",)), FakeStage("c", ("b",)), FakeStage("d")]
    with Omni(Pipeline(stages)) as omni:
        report = verify(omni, [OmniRequest("x", "r")])
    assert compared == ["a", "d"] * 3
    assert report.equal
    assert [tie.run for tie in report.near_ties] == ["regrouped", "cold", "warm"]
    assert sum("near tie: request 'r', stage 'a'" in line for line in report.lines()) == 3


class RoundingStage(FakeStage):
    """Its rows vary with the number of requests that run together, and by ``drift``."""

    def __init__(self, per_mate: float, **fields: Any) -> None:
        super().__init__("a", **fields)
        self.per_mate = per_mate
        self.drift = 0.0

    def step(self) -> list[StageOutput]:
        shift = self.per_mate * len(self.held) + self.drift
        return [
            replace(each, tensors={name: rows + shift for name, rows in each.tensors.items()})
            for each in super().step()
        ]


class SpeakingStage(FakeStage):
    """Its last output is a sound with amplitude ``level``."""

    level = 0.1
    has_cache = False

    def step(self) -> list[StageOutput]:
        sound = Waveform(torch.full((5,), self.level), 24_000)
        return [
            replace(each, audio=sound if each.finished else None, tensors={})
            for each in super().step()
        ]


@pytest.mark.parametrize(("level", "equal"), [(0.1, True), (0.2, False)])
def test_waveforms_are_compared(level: float, equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    voice = SpeakingStage("voice", ("a",))
    plant(monkeypatch, partial(setattr, voice, "level", level))
    with Omni(Pipeline([FakeStage("a"), voice])) as omni:
        report = verify(omni, TWO)
    assert report.equal == equal
    assert {(each.stage, each.run) for each in report.differences} <= {("voice", "warm")}
    (sound,) = report.stages[1].tensors
    assert sound.name == "waveform"
    assert sound.max_difference == pytest.approx(level - 0.1)
    assert any("  waveform: largest difference" in line for line in report.lines())


def test_a_stage_without_a_cache_saves_nothing() -> None:
    with Omni(Pipeline([FakeStage("a"), SpeakingStage("voice", ("a",))])) as omni:
        first, voice = verify(omni, TWO).stages
    assert (first.has_cache, voice.has_cache) == (True, False)
    for stage, saved_s in ((first, 2.0), (voice, 0.0)):
        assert replace(stage, uncached_s=3.0, warm_s=1.0).saved_s == saved_s
    slower = VerifyReport(1, (replace(first, uncached_s=1.0, cold_s=2.0, warm_s=3.0),), (), (), ())
    (seconds,) = (line for line in slower.lines() if "seconds" in line)
    assert seconds == "  seconds: 1.000 uncached, 2.000 cold, 3.000 warm, nothing saved"


TWO = [OmniRequest("x", "short"), OmniRequest("xyz", "long")]


@pytest.mark.parametrize("requests", [TWO, TWO[:1]], ids=["several", "a sole one"])
def test_what_batching_alone_does_is_allowed_and_a_hundredfold_is_not(
    requests: list[OmniRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise of 5e-5 exceeds the minimum tolerance, that of a shallow model."""
    for drift, equal in ((5e-5, True), (5e-3, False)):
        stage = RoundingStage(5e-5)
        with monkeypatch.context() as patch, Omni(Pipeline([stage])) as omni:
            plant(patch, partial(setattr, stage, "drift", drift))
            report = verify(omni, requests)
        assert report.equal == equal, report.lines()
        assert {each.run for each in report.differences} <= {"warm"}
        (tensor,) = report.stages[0].tensors
        assert tensor.noise == pytest.approx(5e-5, rel=1e-2)
        assert tensor.tolerance == pytest.approx(2e-4, rel=1e-2)
        assert tensor.max_difference == pytest.approx(drift, rel=1e-2)
        assert any("allowed 2.0e-04, noise 5.0e-05" in line for line in report.lines())


def test_a_given_atol_is_what_is_allowed_and_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for atol, equal in ((0.0, False), (4e-5, False), (6e-5, True)):
        stage = RoundingStage(5e-5)
        with monkeypatch.context() as patch, Omni(Pipeline([stage])) as omni:
            plant(patch, partial(setattr, stage, "drift", 5e-5))
            report = verify(omni, TWO, atol=atol)
        assert report.equal == equal, report.lines()
        assert [(each.tolerance, each.noise) for each in report.stages[0].tensors] == [(atol, None)]
        assert not any("noise" in line for line in report.lines())


_LIKELIEST = TokenLogprobs(1, -0.7, ((1, -0.7), (2, -0.7 - 1e-9)))
_ROWS = torch.tensor([[0.0, 1.0], [2.0, 3.0]])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"token_ids": (2,)}, "tokens", "generated token 0 is 2"),
        (
            {"logprobs": (replace(_LIKELIEST, logprob=-0.7 + 1e-12),)},
            "logprobs",
            "log-probabilities of generated token 0 are",
        ),
        ({"tensors": {"h": torch.tensor([[-0.0, 1.0], [2.0, 3.0]])}}, "tensor", "in 1 of 2 rows"),
        ({"tensors": {"h": _ROWS + 1e-6}}, "tensor", "in 2 of 2 rows"),
    ],
    ids=["near tie", "log-probability", "sign of a zero", "rounding"],
)
def test_exact_finds_every_bit_where_rounding_is_else_excused(
    change: dict[str, Any], kind: str, message: str
) -> None:
    output = StageOutput("r", "a", True, token_ids=(1,), num_prompt_tokens=1)
    output = replace(output, logprobs=(_LIKELIEST,), tensors={"h": _ROWS})

    def compared(other: StageOutput, exact: bool) -> list[tuple[str, bool]]:
        found = compare_outputs(
            output,
            other,
            "warm",
            sampling=SamplingParams(temperature=0.0),
            dtype=torch.float32,
            tolerance=Tolerance(exact=exact),
        )
        return [(each.kind, message in each.message) for each in found.differences]

    assert compared(replace(output, **change), exact=True) == [(kind, True)]
    assert compared(replace(output, **change), exact=False) == []
    assert compared(output, exact=True) == []


def test_exact_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for drift in (0.0, 1e-6):
        stage = RoundingStage(0.0)
        with monkeypatch.context() as patch, Omni(Pipeline([stage])) as omni:
            plant(patch, partial(setattr, stage, "drift", drift))
            report = verify(omni, TWO, exact=True)
        assert report.equal == (drift == 0.0), report.lines()
        assert [(each.tolerance, each.noise) for each in report.stages[0].tensors] == [(0.0, None)]
    with (
        Omni(Pipeline([FakeStage("a")])) as omni,
        pytest.raises(ValueError, match="leave out atol"),
    ):
        verify(omni, TWO, atol=1e-3, exact=True)


def test_a_stage_whose_outputs_depend_on_batch_mates_is_reported() -> None:
    with Omni(Pipeline([RoundingStage(0.1)])) as omni:
        report = verify(omni, TWO)
    assert not report.equal
    assert [(each.run, each.kind) for each in report.differences] == [("regrouped", "tensor")] * 2
    assert report.lines()[:2] == [
        "cached equals uncached: 2 of 2 requests compared",
        "outputs DEPEND ON BATCH MATES, without any caching, in 2 places",
    ]
    assert any("uncached with other batch mates: tensor" in line for line in report.lines())


def test_an_error_that_batch_mates_prevent_is_reported() -> None:
    class Sociable(FakeStage):
        def step(self) -> list[StageOutput]:
            self.fail = () if len(self.held) > 1 else ("long",)
            return super().step()

    with Omni(Pipeline([Sociable("a")])) as omni:
        (difference,) = verify(omni, TWO).differences
    assert (difference.request_id, difference.run, difference.kind) == (
        "long", "regrouped", "error",
    )  # fmt: skip
    assert "batched together None" in difference.message


def test_noise_is_measured_on_the_longest_requests() -> None:
    requests = [OmniRequest("x" * length, f"r{length}") for length in (3, 9, 1, 7, 5, 2)]
    stage = Lengths("a")
    with Omni(Pipeline([stage])) as omni:
        verify(omni, requests)
    alone = [ids[0] for ids in stage.batches if len(ids) == 1]
    assert list(dict.fromkeys(alone)) == ["r3", "r9", "r7", "r5"], "r3 is the warm-up"


def test_stages_that_have_worked_are_not_warmed_up_again() -> None:
    """The first use of a library takes time that is not the stage's; it is over by then."""

    class Counted(Lengths):
        def stats(self) -> StageStats:
            return replace(super().stats(), num_steps=len(self.batches))

    stage = Counted("a")
    with Omni(Pipeline([stage])) as omni:
        omni.generate("before")
        before = len(stage.batches)
        verify(omni, TWO)
        first, *_ = stage.batches[before:]
    assert len(first) == len(TWO)


class Lengths(FakeStage):
    """Outputs the lengths of its prompts, and records its batches."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.batches: list[list[str]] = []

    def step(self) -> list[StageOutput]:
        self.batches.append(list(self.held))
        lengths = {key: len(str(request.prompt)) for key, (request, _) in self.held.items()}
        return [
            replace(each, num_prompt_tokens=lengths[each.request_id]) for each in super().step()
        ]


def test_a_deep_model_verifies_equal_by_measured_noise_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the minimum tolerance, which its rounding does not always exceed."""
    checkpoint = build_causal_lm(
        tmp_path,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        intermediate_size=512,
        with_tokenizer=False,
    )
    engine = EngineConfig(model=str(checkpoint), num_blocks=128, max_model_len=256)
    greedy = SamplingParams(temperature=0.0, max_tokens=6)
    stages = [
        AutoregressiveStage("a", engine, sampling=greedy),
        AutoregressiveStage(
            "b",
            engine,
            sampling=greedy,
            inputs=StageInputs(("a",), "hidden_states_as_prompt_embeds"),
        ),
    ]
    shared = tuple(range(100, 260))
    requests = [OmniRequest(TokensPrompt((*shared, *range(n, 2 * n)))) for n in (5, 9, 14, 30)]
    limits = verify_module._LIMITS[torch.float32]._replace(tensor=0.0)
    monkeypatch.setitem(verify_module._LIMITS, torch.float32, limits)
    with Omni(Pipeline(stages)) as omni:
        report = verify(omni, requests)
    assert report.equal, report.lines()
    assert report.failures == ()
    assert all(stage.warm_hit_tokens >= 4 * 160 for stage in report.stages)


PROVING = [OmniRequest(TokensPrompt((*range(20, 40), last))) for last in (50, 60)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture
def proving(two_stages: Omni) -> Iterator[Omni]:
    yield from with_all_caches(two_stages)


@pytest.fixture(scope="module")
def two_stages(seeded: Callable[[str], str]) -> Iterator[Omni]:
    """writer -> reader."""
    engine = EngineConfig(model=seeded("qwen2"), num_blocks=64, block_size=4, max_model_len=64)
    edge = StageInputs(("writer",), "hidden_states_as_prompt_embeds")
    writer = AutoregressiveStage("writer", engine, sampling=GREEDY, final_output=())
    reader = AutoregressiveStage("reader", engine, sampling=GREEDY, inputs=edge)
    with Omni(Pipeline([writer, reader])) as made:
        yield made


def test_a_stage_without_hits_is_reported_next_to_one_with_hits(proving: Omni) -> None:
    report = verify(proving, PROVING)
    assert report.has_hits
    assert not any("nothing was proven" in line.lower() for line in report.lines())
    first, *others = report.stages
    unhit = replace(first, cold_hit_tokens=0, warm_hit_tokens=0)
    lines = replace(report, stages=(unhit, *others)).lines()
    assert sum("nothing was proven of this stage" in line for line in lines) == 1


def test_a_stage_whose_caching_is_off_is_not_tested_and_the_report_says_so(
    proving: Omni,
) -> None:
    proving.pipeline.stages["reader"].enable_prefix_caching = False
    report = verify(proving, PROVING)
    writer, reader = report.stages
    assert writer.has_hits and not reader.has_hits and report.has_hits
    reported = [line for line in report.lines() if "caching is off in its settings" in line]
    assert len(reported) == 1 and reported[0].startswith("stage 'reader'")
    proving.pipeline.stages["writer"].enable_prefix_caching = False
    report = verify(proving, PROVING)
    assert not report.has_hits
    assert report.lines()[0].endswith("no stage has a cache that its settings turn on")


def test_encodings_that_were_found_are_hits() -> None:
    """Short prompts before an image or a sound have no full block, yet something is cached."""
    stage = StageVerification("s", 3, 0, 0, (), 1.0, 1.0, 1.0, encoder_hits=2)
    report = VerifyReport(1, (stage,), (), (), ())
    assert report.has_hits
    assert "hits 0 cold and 0 warm, 2 encodings found" in report.lines()[1]


@pytest.mark.parametrize("requests", ["once upon a time", ["once upon a time"]])
def test_plain_strings_are_requests(proving: Omni, requests: Any) -> None:
    report = verify(proving, requests)
    assert report.equal and report.num_requests == 1 and report.has_hits


@pytest.mark.parametrize(
    ("proving", "requests", "message"),
    [
        ("two_step", ["x"], "verify runs requests over an Omni, got 'two_step'"),
        (None, {"prompt": "x"}, "requests must be a prompt"),
        (None, 3, "requests must be a prompt"),
    ],
)
def test_arguments_that_are_no_omni_or_no_request_are_refused(
    proving: Any, requests: Any, message: str
) -> None:
    with Omni(Pipeline([FakeStage("a")])) as own, pytest.raises(ValueError, match=message):
        verify(own if proving is None else proving, requests)


def test_tiers_below_a_small_pool_change_nothing(
    seeded: Callable[[str], str], tmp_path: Path
) -> None:
    """The pool has room for one request, so that hits come from disk."""
    config = EngineConfig(
        model=seeded("gemma2"),
        num_blocks=33,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        max_model_len=64,
        offload={"disk": {"path": str(tmp_path), "bytes": 2**26}},
    )
    stage = AutoregressiveStage(
        "writer",
        config,
        sampling=SamplingParams(temperature=0.0, max_tokens=6),
        final_output=("text", "tensors"),
    )
    requests = [
        OmniRequest(TokensPrompt(tuple(range(first, first + 40))), f"r{first}")
        for first in (20, 100, 200, 300)
    ]
    with Omni(Pipeline([stage])) as omni:
        report = verify(omni, requests)
        offload = omni.stats()["writer"].offload
    assert report.equal, report.differences
    assert report.has_hits and offload is not None and offload.disk_hit_tokens > 0
