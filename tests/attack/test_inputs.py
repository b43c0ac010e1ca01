"""Images as tokens and back, pixel by pixel, where no two sizes are alike."""

import itertools

import torch

from wellposed.attack import PatchGrid, patch_grid

GRID = PatchGrid(channels=2, rows=3, columns=4, height=5, width=6)


def test_every_pixel_lies_in_its_patch():
    assert (GRID.tokens, GRID.size) == (12, 60)
    tokens = torch.arange(2 * 12 * 60).view(2, 12, 60)
    image = GRID.image(tokens)
    assert image.shape == (2, 2, 15, 24)
    for batch, channel, y, x in itertools.product(range(2), range(2), range(15), range(24)):
        token = 4 * (y // 5) + x // 6
        entry = 30 * channel + 6 * (y % 5) + x % 6
        assert image[batch, channel, y, x] == tokens[batch, token, entry]


class Patches:
    num_channels = 2
    image_size = (15, 24)
    patch_size = (5, 6)


class Pixels:
    main_input_name = "pixel_values"

    def __init__(self, patches):
        self.patches = patches

    def get_input_embeddings(self):
        return self.patches


def test_the_grid_of_a_model_is_read_from_its_patches():
    assert patch_grid(Pixels(Patches())) == GRID
    square = type("Square", (Patches,), {"patch_size": 5})
    whole = type("Whole", (Patches,), {"image_size": 15})
    words = Pixels(Patches())
    words.main_input_name = "input_ids"
    for other in (Pixels(object()), object(), Pixels(square()), Pixels(whole()), words):
        assert patch_grid(other) is None
