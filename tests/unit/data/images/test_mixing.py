"""data/images/mixing.py against torchvision's MixUp and CutMix, which draw the same numbers."""

import pytest
import torch
from torch.nn import functional as F
from torchvision.transforms import v2

from data.images.mixing import build_mixing, mix
from utils.errors import UserError
from utils.numerics.seed import derive_seed
from utils.settings.image_options import AugmentOptions, MixOptions

LABELS = torch.tensor([0, 2, 1, 1, 3])
IMAGES = torch.randint(256, (5, 12, 10, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
ONES = torch.ones(5)


def mixed(seed, weight=ONES, **options):
    torch.manual_seed(seed)
    return mix(IMAGES, weight, MixOptions(**options))


def soft_labels(found):
    """[B, C], as the loss sees them."""
    own, other = F.one_hot(LABELS, 4).float(), F.one_hot(LABELS[found.partner], 4).float()
    return found.share * own + (1 - found.share) * other


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
@pytest.mark.parametrize(("name", "theirs"), [("mixup", v2.MixUp), ("cutmix", v2.CutMix)])
def test_pixels_and_labels_are_torchvisions(name, theirs, alpha):
    for seed in range(30):
        torch.manual_seed(derive_seed(seed, "mixing"))
        images, labels = theirs(alpha=alpha, num_classes=4)(IMAGES.permute(0, 3, 1, 2).float(), LABELS)
        found = mixed(seed, **{name: alpha})
        torch.testing.assert_close(found.images.float(), images.permute(0, 2, 3, 1), rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(soft_labels(found), labels)


def test_cutmix_has_the_share_of_pixels_that_the_label_says():
    for seed in range(50):
        found = mixed(seed, cutmix=1.0)
        own = (found.images == IMAGES).all(dim=3)
        other = (found.images == IMAGES[found.partner]).all(dim=3)
        assert bool((own | other).all())
        assert own.float().mean().item() == pytest.approx(found.share, abs=0.02)  # noise: a few pixels may be equal


def test_with_both_each_is_used_half_of_the_time():
    found = [mixed(seed, mixup=0.8, cutmix=1.0).images.dtype for seed in range(400)]
    assert 160 < found.count(torch.uint8) < 240 and set(found) == {torch.uint8, torch.float32}  # four sigmas


@pytest.mark.parametrize("options", [{"mixup": 1.0}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}])
def test_what_is_mixed_follows_from_the_seed_alone(options):
    torch.manual_seed(3)
    dropout = torch.rand(4)
    first, again = (mixed(3, **options) for _ in range(2))
    assert torch.equal(torch.rand(4), dropout)  # the generator is as it was
    assert torch.equal(first.images, again.images) and first.share == again.share
    assert len({mixed(seed, **options).share for seed in range(20)}) > 10


@pytest.mark.parametrize("options", [{"mixup": 1.0}, {"cutmix": 1.0}])
@pytest.mark.parametrize("weight", [[1, 0, 1, 1, 1], [0, 1, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
def test_an_unreadable_sample_is_lent_to_none(options, weight):
    found = mixed(1, torch.tensor(weight, dtype=torch.float32), **options)
    for i in range(5):
        assert int(found.partner[i]) == ((i - 1) % 5 if weight[i - 1] else i)
        if not weight[i - 1]:
            assert torch.allclose(found.images[i].float(), IMAGES[i].float(), atol=1e-4)


def test_nothing_is_mixed_by_default():
    assert build_mixing(MixOptions(), 1) is None and build_mixing(AugmentOptions(), 1) is None


def test_cutmix_of_images_of_one_pixel_is_refused():
    with pytest.raises(UserError, match="use a larger --image-size, or --mixup"):
        build_mixing(MixOptions(cutmix=1.0), 1)
