"""The one rule by which a dotted path tells its layer: ``layers.3.attention`` is part of layer 3 of
``layers``."""

from __future__ import annotations

import itertools
import re

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h|resblocks)\.(\d+)(?=\.|$)")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def split_path(path: str) -> tuple[str, str]:
    """Return the container and the layer that hold a module; both are the root where nothing is
    numbered.

    >>> split_path("model.encoder.layers.3.self_attn"), split_path("self_attn"), split_path("layers.0")
    (('model.encoder.layers', 'model.encoder.layers.3'), ('', ''), ('layers', 'layers.0'))
    """
    match = _number_of_layer(path)
    if match is not None:
        return path[: match.start(1)].rstrip("."), path[: match.end(1)]
    # feed-forward roles of torch's and BART's layers sit on the layer itself, whose path is empty
    # at the root
    return "", ""


def layer_index(path: str) -> int:
    """Return the index of the layer that holds a module; 0 where nothing is numbered.

    >>> layer_index("model.encoder.layers.3.self_attn"), layer_index("self_attn")
    (3, 0)
    """
    match = _number_of_layer(path)
    return 0 if match is None else int(match.group(1))


def shared_segments(first: str, second: str) -> list[str]:
    """Return the leading segments two paths share.

    >>> shared_segments("layers.3.attention", "layers.3.mlp.up")
    ['layers', '3']
    """
    pairs = zip(first.split("."), second.split("."), strict=False)
    return [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _number_of_layer(path: str) -> re.Match[str] | None:
    return _LAYER.search(path) or _NUMBER.search(path)
