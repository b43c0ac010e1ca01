"""Whether the Hugging Face hub answers: asked once, so that nothing waits for it again and again."""

from __future__ import annotations

from functools import cache

UNREACHABLE = (
    "it is not in the cache, and the Hugging Face hub cannot be reached, or HF_HUB_OFFLINE=1 forbids"
    " it; go online, or name a file or folder"
)
"""What to say of a name of the hub that was not found while `hub_answers` is False."""


@cache
def hub_answers() -> bool:
    """Try once whether the hub can be reached, and remember the answer: its own client would try every
    file six times, for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception:  # of whichever HTTP library the session uses
        return False
    return True
