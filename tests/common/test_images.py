import torch
from PIL import Image

from diffusion.common.images import grid, to_pil


def test_grids_are_full_where_they_can_be():
    images = [Image.new('RGB', (10, 20), (i, 0, 0)) for i in range(8)]
    four_by_two = grid(images)
    assert four_by_two.size == (4 * 12 - 2, 2 * 22 - 2)
    assert [four_by_two.getpixel((12 * (i % 4), 22 * (i // 4)))[0] for i in range(8)] == list(range(8))
    assert grid(images[:7]).size == (3 * 12 - 2, 3 * 22 - 2)
    assert grid(images[:1]).size == (10, 20)
    assert grid(images[:3], columns=1).size == (10, 3 * 22 - 2)


def test_tensors_keep_their_pixels():
    tensor = torch.zeros(3, 2, 4, dtype=torch.uint8)
    tensor[:, 1, 3] = torch.tensor([1, 2, 3])
    assert to_pil(tensor).size == (4, 2)
    assert to_pil(tensor).getpixel((3, 1)) == (1, 2, 3)
