"""Creates the shipped questions for demo, examples and tests: ``python -m`` this module.

Their voices and rates do not occur in the training data.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import soundfile

from training.spoken_sums.log_mel import SAMPLE_RATE
from training.spoken_sums.questions import Voice, speak

_QUESTIONS = {
    "twelve plus thirty": Voice("en-gb+f2", 155, 50),
    "and times two": Voice("en-gb+f2", 155, 50),
    "what is ninety one minus thirty eight": Voice("en-us+m2", 158, 45),
    "seventeen plus sixty four": Voice("en-gb-scotland+Mario", 152, 50),
    "hello how are you": Voice("en-us+steph2", 156, 50),
}


def write_demo_questions(folder: Path) -> None:
    """Write a small FLAC file of each question, named by its words."""
    folder.mkdir(parents=True, exist_ok=True)
    for words, voice in _QUESTIONS.items():
        path = folder / f"{words.replace(' ', '_')}.flac"
        soundfile.write(path, speak(words, voice, cut=False).numpy(), SAMPLE_RATE)


def main() -> None:
    """Write them to a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write_demo_questions(parser.parse_args().folder)


if __name__ == "__main__":
    main()
