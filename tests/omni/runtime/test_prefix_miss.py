"""Outputs and timelines say why no more of a prompt was hit."""

from __future__ import annotations

from omni import Omni, OmniRequest

BEGIN = "Once upon a time, in a house by the sea, a clock told all the time. "


def test_a_stage_output_and_a_timeline_say_why_no_more_was_hit():
    with Omni("two_step") as omni:

        def miss(prompt: str, **options: str) -> str | None:
            (output,) = omni.generate(OmniRequest(prompt, **options))
            assert output.error is None
            word = output.stages["writer"].metrics.prefix_miss
            (timed,) = [each for each in output.timeline if each.stage == "writer"]
            assert timed.prefix_miss == word
            return word

        assert miss(BEGIN + "One") == "unseen"
        assert miss("no") == "short"
        assert miss(BEGIN + "One") in (None, "last_token")
        assert miss(BEGIN * 2) == "unseen"
        # Whether others have cached the same is not said.
        assert miss(BEGIN + "One", cache_salt="a key") == "salt"
        assert miss("x" + BEGIN, cache_salt="a key") == "salt"
        assert miss(BEGIN + "One", cache_salt="a key") in (None, "last_token")
        assert miss(BEGIN * 2, cache_salt="a key") == "unseen"
