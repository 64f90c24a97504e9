"""A conversation with a trained model: each turn hits the cache of the turns before.

    question.flac --> thinker ~~rows~~> talker ~~codec tokens~~> code2wav --> answer.wav
                         +--> text: what was heard, and the answer

Run it with ``python examples/spoken_sums.py [FOLDER]``; with a folder, the answers are written
there. Two questions are spoken, the last one is typed. The next turn's prompt has the sound and
text of all earlier turns, and none of it is computed again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import stage_configs
from omni import ChatPrompt, Omni, OmniRequest

QUESTIONS = Path(stage_configs.__file__).parent / "spoken_sums" / "questions"
TURNS: tuple[str | Path, ...] = (
    QUESTIONS / "twelve_plus_thirty.flac",
    QUESTIONS / "and_times_two.flac",
    "and minus five?",
)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    messages: list[dict[str, object]] = []
    sounds: list[Path] = []
    with Omni("spoken_sums") as omni:
        for number, turn in enumerate(TURNS, start=1):
            if isinstance(turn, Path):
                sounds.append(turn)
                messages.append({"role": "user", "content": [{"type": "audio"}]})
            else:
                messages.append({"role": "user", "content": turn})
            prompt = ChatPrompt(tuple(messages), {"audio": list(sounds)})
            (output,) = omni.generate(OmniRequest(prompt, speaker="Ben"))
            if output.error is not None:
                raise SystemExit(f"failed: {output.error}")
            thinker, voice = output.stages["thinker"], output.stages["code2wav"]
            print(f"{turn.stem if isinstance(turn, Path) else turn}: {thinker.text}")
            print(
                f"  {thinker.num_cached_tokens} of {thinker.num_prompt_tokens} prompt tokens hit, "
                f"{voice.audio.duration_s if voice.audio else 0:.2f} s of sound"
            )
            if folder is not None and voice.audio is not None:
                folder.mkdir(parents=True, exist_ok=True)
                voice.audio.save(folder / f"answer_{number}.wav")
            messages.append({"role": "assistant", "content": thinker.text or ""})


if __name__ == "__main__":
    main()
