"""Whether the Hugging Face hub answers, tested once per process."""

from __future__ import annotations

from functools import cache

from wellposed.errors import is_about_resources

UNREACHABLE = (
    "it is not in the cache, and the Hugging Face hub cannot be reached, or HF_HUB_OFFLINE=1 forbids"
    " it; go online, or name a file or folder"
)
"""Reason for a missing name of the hub if `hub_answers` is False."""


@cache
def hub_answers() -> bool:
    """Return whether the hub can be reached; its own client would retry each file for 30 s."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # of whichever HTTP library the session uses
        if is_about_resources(error):
            raise
        return False
    return True
