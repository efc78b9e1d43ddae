"""extra.py: the grid of images and the table of texts that TensorBoard shows."""

import numpy as np
import pytest

from extras.first_batch.extra import grid, table

pytestmark = pytest.mark.unit


def test_several_images_of_a_sample_stand_side_by_side():
    images = [np.concatenate([np.full((32, 32, 3), value, np.uint8) for value in (50, 90)], axis=1)] * 2
    picture = grid(images)
    assert picture.shape == (70 + 6, 2 * (128 + 6) + 6, 3)
    assert [int(picture[38, x, 0]) for x in (6 + 32, 6 + 96, 134 + 6 + 96)] == [50, 90, 90]


@pytest.mark.parametrize("number, rows, columns", [(64, 8, 8), (9, 2, 8), (3, 1, 3)])
def test_the_first_batch_is_a_grid_of_the_images_as_they_are(number, rows, columns):
    images = [np.full((32, 32, 3), 3 * index, np.uint8) for index in range(number)]
    picture = grid(images)
    assert picture.shape == (rows * 70 + 6, columns * 70 + 6, 3)
    assert [int(picture[6 + 70 * (index // 8) + 30, 6 + 70 * (index % 8) + 30, 0]) for index in range(number)] == [
        3 * index for index in range(number)]


def test_a_large_image_is_made_smaller_and_a_single_one_stands_alone():
    picture = grid([np.full((500, 400, 3), 7, np.uint8)])
    assert picture.shape == (128, 102, 3) and (picture == 7).all()


def test_a_text_stands_in_one_cell_whatever_it_holds():
    assert table(["a | b `c`\nd", "e"]).splitlines()[2:] == [r"| `a \| b 'c' d` |", "| `e` |"]
