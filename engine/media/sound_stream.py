"""Sound files as libsndfile gives them, from beginning to end."""

from __future__ import annotations

from soundfile import LibsndfileError, SoundFile

__all__ = ["LibsndfileError", "SoundStream"]


class SoundStream(SoundFile):
    """A file of which one piece after the other is read.

    soundfile seeks to where it is after every piece. That fails at the end of files that do not
    know their length, and is inexact in MP3.
    """

    def seekable(self) -> bool:
        """No: nothing here goes back."""
        return False
