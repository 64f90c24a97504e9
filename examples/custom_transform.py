"""Put your own function between two stages.

A transform accepts a ``TransformContext`` (the user's prompt, and the finished outputs of the
stages that feed this one) and returns a prompt. Pass it as a function, as here; in YAML, name it
``transform: package.module:function``, or by its registered name.

Run it with ``python examples/custom_transform.py``.
"""

from __future__ import annotations

from omni import (
    AutoregressiveStage,
    EmbedsPrompt,
    EngineConfig,
    Omni,
    OmniRequest,
    Pipeline,
    Prompt,
    SamplingParams,
    StageInputs,
    TransformContext,
)


def question_with_draft(context: TransformContext) -> Prompt:
    """Ask the same question again, with the draft in the prompt."""
    (draft,) = context.sources
    return f"{context.prompt}\nA first answer was: {draft.text}\nA better answer is:"


def last_rows_only(context: TransformContext) -> Prompt:
    """Pass on only the hidden states of the draft's last four tokens."""
    (draft,) = context.sources
    rows = draft.tensors["hidden_states"]
    if len(rows) < 4:
        raise ValueError(f"at least 4 rows are needed, got {len(rows)}")  # fails this request alone
    return EmbedsPrompt(rows[-4:])


def main() -> None:
    engine = EngineConfig(model="seeded:qwen2", block_size=8, num_blocks=256, max_model_len=256)
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    stages = [
        AutoregressiveStage("draft", engine, sampling=greedy),
        AutoregressiveStage(
            "better",
            engine,
            sampling=greedy,
            inputs=StageInputs(("draft",), question_with_draft),
        ),
        AutoregressiveStage(
            "mood", engine, sampling=greedy, inputs=StageInputs(("draft",), last_rows_only)
        ),
    ]
    short = OmniRequest("Hm", request_id="short", sampling={"draft": {"max_tokens": 1}})
    with Omni(Pipeline(stages)) as omni:
        for output in omni.generate(["How many rivers cross the plain?", short]):
            print(f"request {output.request_id}: {output.error or 'fine'}")
            for stage in output.stages.values():
                if stage.text is not None:
                    print(f"  {stage.stage} ({stage.num_prompt_tokens} in): {stage.text!r}")


if __name__ == "__main__":
    main()
