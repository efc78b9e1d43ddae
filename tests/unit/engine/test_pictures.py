"""engine/records/pictures.py, drawings.py: which samples are shown, and that pictures and tables hold them."""

import numpy as np
import pytest
import torch

from engine.records.drawings import MAX_FIRST, MAX_MISTAKES, grid, heat_map, table
from engine.records.pictures import worst


def test_the_worst_are_wrong_readable_and_in_order_of_loss():
    #                       counts label predicted probability loss
    samples = torch.tensor([[1.0, 0, 1, 0.6, 1.0], [1, 0, 0, 0.4, 9], [0, 0, 1, 0.9, 8], [1, 1, 0, 0.9, 3],
                            [1, 2, 0, 0.6, 1]])
    assert worst(samples, samples[:, 1] != samples[:, 2]) == [3, 0, 4]  # of equal ones the first


def test_at_most_sixteen_mistakes_are_shown():
    samples = torch.tensor([[1.0, 0, 1, 0.6, loss] for loss in range(40)])
    assert worst(samples, torch.ones(40, dtype=torch.bool)) == list(range(39, 39 - MAX_MISTAKES, -1))


def test_no_mistake_is_no_picture():
    assert worst(torch.tensor([[1.0, 1, 1, 0.9, 0.1]]), torch.tensor([False])) == []


def test_several_images_of_a_sample_stand_side_by_side():
    images = [np.concatenate([np.full((32, 32, 3), value, np.uint8) for value in (50, 90)], axis=1)] * 2
    picture = grid(images, MAX_FIRST)
    assert picture.shape == (70 + 6, 2 * (128 + 6) + 6, 3)
    assert [int(picture[38, x, 0]) for x in (6 + 32, 6 + 96, 134 + 6 + 96)] == [50, 90, 90]


@pytest.mark.parametrize("number, rows, columns", [(64, 8, 8), (9, 2, 8), (3, 1, 3)])
def test_the_first_batch_is_a_grid_of_the_images_as_they_are(number, rows, columns):
    images = [np.full((32, 32, 3), 3 * index, np.uint8) for index in range(number)]
    picture = grid(images, MAX_FIRST)
    assert picture.shape == (rows * 70 + 6, columns * 70 + 6, 3)
    assert [int(picture[6 + 70 * (index // 8) + 30, 6 + 70 * (index % 8) + 30, 0]) for index in range(number)] == [
        3 * index for index in range(number)]


def test_a_large_image_is_made_smaller_and_a_single_one_stands_alone():
    picture = grid([np.full((500, 400, 3), 7, np.uint8)], MAX_MISTAKES)
    assert picture.shape == (224, 179, 3) and (picture == 7).all()


def test_a_text_stands_in_one_cell_whatever_it_holds():
    assert table(["text", "true"], [["a | b `c`\nd", "x|y"]]).splitlines()[2] == r"| `a \| b 'c' d` | x\|y |"


def test_the_confusion_picture_shades_each_row_by_its_own_shares():
    picture = heat_map(torch.tensor([[1000, 0], [1, 1]]))
    light, middle, dark = [247, 250, 254], [128, 149, 180], [8, 48, 107]
    assert picture.shape == (600, 600, 3)
    assert picture[::300, ::300].tolist() == [[dark, light], [middle, middle]]


def test_a_confusion_matrix_of_any_size_can_be_drawn():
    assert heat_map(torch.tensor([[0, 0], [10**9, 3]])).shape == (600, 600, 3)  # a class that never occurs
    assert heat_map(torch.eye(1000).long()).shape == (1000, 1000, 3)
