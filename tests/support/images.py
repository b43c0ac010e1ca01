"""Small models of images with random weights, and folders of coloured images for each class."""

import numpy as np
import transformers
from PIL import Image

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16,
    "patch_size": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def image_config(folder, family="vit", **changes):
    """Write the ``config.json`` of a small model; return its path."""
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **changes})
    config.save_pretrained(folder)
    return folder / "config.json"


def class_folders(root, *, count=24):
    """Write red cats and green dogs of many sizes, as png and jpg, some of them deeper."""
    draw = np.random.default_rng(0)
    for channel, name in enumerate(("cat", "dog")):
        for number in range(count):
            folder = root / name / ("deeper" if number % 3 == 0 else "")
            folder.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 60, (*draw.integers(12, 40, 2), 3)).astype(np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(folder / f"{number:02}.{('png', 'jpg')[number % 2]}")
    return root


def write_images(root, images, labels):
    """Write arrays as ``root/<label>/<number>.png``; return the root."""
    for number, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        folder = root / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return root


def draw_squares(root, count=24, size=32):
    """Write gray images of which half hold a bright square: a set that any model of images learns."""
    pixels = np.random.default_rng(0).integers(0, 60, (count, size, size)).astype(np.uint8)
    labels = np.arange(count) % 2
    pixels[labels == 1, 8:24, 8:24] += 150
    return write_images(root, pixels, np.array(("empty", "square"))[labels])
