"""Shifts of images and labels: by hand on two by two pixels, inverses, scaling, refused values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedprism.data import shifts

GREY = 0.5


def grey_square(level: float = GREY) -> torch.Tensor:
    return torch.full((1, 3, 2, 2), level)


def pixels(x: torch.Tensor) -> list[list[list[float]]]:
    """Channel by channel, rows of pixels."""
    assert len(x) == 1
    return [[[round(float(v), 5) for v in row] for row in channel] for channel in x[0]]


def test_client_0_is_red_and_bright_at_the_top_left() -> None:
    # 0.5 (1, 0.825, 0.65), plus 0.25 (1 + 1), 0, 0 and 0.25 (-1 - 1): the last clips green and blue at 0.
    assert pixels(shifts.client_shift(grey_square(), 0)) == [
        [[1.0, 0.5], [0.5, 0.0]],
        [[0.9125, 0.4125], [0.4125, 0.0]],
        [[0.825, 0.325], [0.325, 0.0]],
    ]


def test_client_5_is_blue_and_bright_at_the_top_right() -> None:
    # 5 is 101 in binary: bit 0 blue, bit 1 top, bit 2 right; gains (0.65, 0.825, 1).
    assert pixels(shifts.client_shift(grey_square(), 5)) == [
        [[0.325, 0.825], [0.0, 0.325]],
        [[0.4125, 0.9125], [0.0, 0.4125]],
        [[0.5, 1.0], [0.0, 0.5]],
    ]


def test_bit_1_turns_the_bright_side_from_top_to_bottom() -> None:
    # 2 is 010: red, bottom, left. Ramp: rows -0.25, +0.25; columns +0.25, -0.25. tint 0: no colour.
    assert pixels(shifts.client_shift(grey_square(), 2, tint=0))[0] == [[0.5, 0.0], [1.0, 0.5]]
    assert pixels(shifts.client_shift(grey_square(), 2, ramp=0)) == [
        [[0.5, 0.5], [0.5, 0.5]],
        [[0.4125, 0.4125], [0.4125, 0.4125]],
        [[0.325, 0.325], [0.325, 0.325]],
    ]


@pytest.mark.parametrize("level, seen", [(0.5, 8), (0.0, 4), (1.0, 8)])
def test_eight_clients_look_different_on_grey_and_white_and_by_light_alone_on_black(
    level: float, seen: int
) -> None:
    looks = {str(pixels(shifts.client_shift(grey_square(level), i))) for i in range(8)}
    assert len(looks) == seen


def test_no_strength_means_no_shift_for_any_client() -> None:
    x = torch.rand(2, 3, 4, 4)
    assert torch.equal(shifts.client_shift(x, 100, tint=0, ramp=0), x)


def test_component_1_is_inverted_and_component_0_is_not() -> None:
    x = torch.tensor([0.2, 0.6])[:, None, None, None].expand(-1, 3, 2, 2)
    component = torch.tensor([0, 1])
    grey = shifts.component_shift(x, component, grey=True)
    colour = shifts.component_shift(x, component, grey=False)
    assert grey[:, :, 0, 0].flatten().tolist() == pytest.approx([0.2, 0.2, 0.2, 0.4, 0.4, 0.4])
    assert colour[:, :, 0, 0].flatten().tolist() == pytest.approx([0.2, 0.2, 0.2, 0.6, 0.4, 0.6])


@pytest.mark.parametrize("grey", [True, False])
def test_inverting_twice_gives_every_level_back(grey: bool) -> None:
    levels = torch.arange(256).to(torch.uint8).view(1, 1, 16, 16).expand(2, 3, -1, -1)
    component = torch.tensor([1, 0])
    once = shifts.component_shift(shifts.unit_range(levels), component, grey=grey)
    assert torch.equal(shifts.store(once)[0, 1], 255 - levels[0, 1])
    assert torch.equal(shifts.store(shifts.component_shift(once, component, grey=grey)), levels)


def test_halving_takes_means_of_two_by_two_pixels() -> None:
    levels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    means = levels.reshape(3, 14, 2, 14, 2).mean((2, 4)) / 255
    x = shifts.resize(shifts.planes(levels), 14)
    assert x.shape == (3, 3, 14, 14)
    assert np.abs(x.numpy() - means[:, None]).max() < 1e-6


def test_enlarging_is_linear_between_pixel_centres() -> None:
    # Column i of 32 looks at 28 (i + 0.5) / 32 - 0.5 = 0.875 i - 0.0625, at most to the outermost pixel.
    levels = np.broadcast_to((9 * np.arange(28)).astype(np.uint8), (1, 28, 28))
    expected = 9 * np.clip(0.875 * np.arange(32) - 0.0625, 0, 27) / 255
    x = shifts.resize(shifts.planes(levels), 32).numpy()
    assert np.abs(x - expected).max() < 1e-6
    assert (
        np.abs(
            x.transpose(0, 1, 3, 2) - shifts.resize(shifts.planes(levels.transpose(0, 2, 1)), 32).numpy()
        ).max()
        == 0
    )
    half = shifts.resize(shifts.planes(levels), 16).numpy()
    assert np.abs(half - expected.reshape(16, 2).mean(1)).max() < 1e-6


def test_scaling_commutes_with_inversion() -> None:
    levels = shifts.planes(np.random.default_rng(1).integers(0, 256, (2, 28, 28), dtype=np.uint8))
    for size in (14, 16, 28, 32):
        assert torch.allclose(shifts.resize(255 - levels, size), 1 - shifts.resize(levels, size), atol=1e-6)


def test_colour_images_keep_their_channels() -> None:
    images = np.random.default_rng(2).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    x = shifts.resize(shifts.planes(images), 32)
    assert torch.equal(shifts.store(x), torch.from_numpy(images.transpose(0, 3, 1, 2).copy()))


def test_labels_go_through_the_permutation_of_their_component_and_back() -> None:
    permutations = torch.tensor([[1, 2, 0], [2, 1, 0]])  # one client, two components
    label, component = torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 1])
    permuted = shifts.permute_labels(label, component, permutations)
    assert permuted.tolist() == [1, 2, 0, 2, 1, 0]
    back = shifts.inverse_permutations(permutations[None])[0]
    assert torch.equal(shifts.permute_labels(permuted, component, back), label)


def test_permutations_are_uniform_and_drawn_for_each_client_and_component() -> None:
    drawn = shifts.label_permutations(1500, 2, 3, np.random.default_rng(0))
    assert drawn.shape == (1500, 2, 3) and (drawn.sort(2).values == torch.arange(3)).all()
    codes = drawn @ torch.tensor([9, 3, 1])
    counts = codes.unique(return_counts=True)[1]
    # six permutations, 500 each expected of 3000; the standard deviation is 20
    assert len(counts) == 6 and (counts - 500).abs().max() < 100
    same = (codes[:, 0] == codes[:, 1]).float().mean()
    assert abs(float(same) - 1 / 6) < 0.04  # independent over components; deviation 0.0096


def test_stored_images_are_rounded_to_the_nearest_level() -> None:
    x = torch.tensor([0.0, 0.4 / 255, 0.6 / 255, 1.0]).view(1, 1, 2, 2)
    assert shifts.store(x).flatten().tolist() == [0, 0, 1, 255]
    assert shifts.store(x, "float16").dtype == torch.float16
    assert shifts.normalise(torch.tensor([0.0, 0.5, 1.0])).tolist() == [-1, 0, 1]


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: shifts.client_shift(grey_square(), 8),
            "client 8 has no shift of its own, needs 0..7; lower",
        ),
        (lambda: shifts.client_shift(grey_square(), 0, tint=1.5), "tint is 1.5, must be >= 0 and <= 1"),
        (lambda: shifts.client_shift(grey_square(), 0, ramp=-1), "ramp is -1, must be >= 0 and finite"),
        (lambda: shifts.component_shift(grey_square(), torch.tensor([2]), grey=True), "component is 2"),
        (lambda: shifts.component_shift(grey_square(), torch.tensor([-1]), grey=True), "component is -1"),
        (lambda: shifts.resize(torch.zeros(1, 1, 28, 30), 14), "images of 28x30 pixels, needs square ones"),
        (lambda: shifts.resize(torch.zeros(1, 1, 28, 28), 20), r"size is 20, must divide 28 .* or 32"),
        (lambda: shifts.resize(torch.zeros(1, 1, 28, 28), 64), "size is 64, must divide"),
        (lambda: shifts.planes(np.zeros((2, 4, 4, 4), dtype=np.uint8)), r"shape \(2, 4, 4, 4\)"),
        (lambda: shifts.store(grey_square(), "int8"), "stored as 'int8', needs one of uint8, float16"),
    ],
)
def test_bad_values_get_one_clear_line(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
