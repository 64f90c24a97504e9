"""Check on your own requests that caching changes nothing, and see what it saves.

Run it with ``python examples/verify_from_python.py``; ``omni verify`` does the same for a YAML
file. The exit status is 1 if anything differs, and 3 if nothing was hit, which proves nothing.
"""

from __future__ import annotations

import sys

from omni import Omni, OmniRequest, verify

OPENING = (
    "The library has three floors: history and maps below, music in the middle, and poetry at "
    "the top. First collect the tools, then read the instructions. "
)


def main() -> int:
    requests = [
        OmniRequest(OPENING + question, request_id=f"question-{number}")
        for number, question in enumerate(("Where is music?", "Where are maps?", "What is above?"))
    ]
    # Sampled requests can be compared too: every run gets the same seed.
    requests.append(
        OmniRequest(OPENING, request_id="sampled", sampling={"writer": {"temperature": 0.8}})
    )
    with Omni("two_step") as omni:
        report = verify(omni, requests)
    for line in report.lines():
        print(line)
    if not report.equal or report.failures:
        return 1
    return 0 if report.has_hits else 3


if __name__ == "__main__":
    sys.exit(main())
