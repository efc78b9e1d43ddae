"""The blocks of a model, in order from the input to the head: what --freeze and --layer-decay count.

A block is a residual block, a layer of a transformer, or any other part that has a matrix or a convolution. A norm
belongs to the part before it, and a part without parameters (dropout, say) to the part after it. Block 0 is the stem:
embeddings or the first convolution, with parameters that belong to no part (positions, a class token).

The models are yours (models/own.py), torchvision's classifiers, transformers' encoders, which have a base_model_prefix,
and timm's, which have a group_matcher: their blocks are the groups of timm's own layer-wise decay, and the head.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

from torch import Tensor, nn

from models.vision.timm_models import classifiers_of, groups_of
from utils.errors import UserError, some

_UNDECAYED = (
    "class_token", "encoder.pos_embedding", "*.relative_position_bias_table", "*.layer_scale", "*.logit_scale")


@dataclass
class Block:
    """Parts of a model that follow one another, and their parameters."""

    parts: list[nn.Module] = field(default_factory=list)
    params: dict[str, nn.Parameter] = field(default_factory=dict)  # a tied one in its first block only


def in_head(model: nn.Module) -> Callable[[str], bool]:
    """Whether a name of a parameter, a buffer or a part belongs to the head: what is new if the classes differ.

    transformers: all but the encoder, and a pooler, which many encoders' weights lack. timm: what it calls the
    classifier. Others: the last layer.
    """
    if prefix := getattr(model, "base_model_prefix", ""):
        return lambda name: not name.startswith(f"{prefix}.") or name.startswith(f"{prefix}.pooler")
    heads = tuple(f"{name}." for name in _last_layers(model))
    return lambda name: name.startswith(heads)


def watch_features(model: nn.Module) -> list[Tensor]:
    """A list to which each forward appends what goes into the last layer: [B, D], or a map [B, D, H, W]."""
    seen: list[Tensor] = []
    model.get_submodule(_last_layers(model)[0]).register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    return seen


def blocks_of(model: nn.Module) -> list[Block]:
    """All parameters of `model` by block; the last one is the head."""
    if hasattr(model, "group_matcher"):
        return _blocks_of_groups(model, groups_of(model))

    # parts
    is_in_head, backbone, head = in_head(model), [], Block()
    without_params: list[nn.Module] = []
    for name, part in _parts(model):
        without_params.append(part)
        shapes = [param.ndim for param in part.parameters()]
        if not shapes:
            continue
        if is_in_head(f"{name}."):
            block = head
        else:
            if max(shapes) > 1 or not backbone:
                backbone.append(Block())
            block = backbone[-1]
        block.parts += without_params
        without_params = []
    head.parts += without_params
    blocks = [*backbone, head]

    # their parameters
    owners = {id(param): block for block in reversed(blocks) for part in block.parts for param in part.parameters()}
    for name, param in model.named_parameters():
        owners.get(id(param), blocks[0]).params[name] = param
    return blocks


def freeze(model: nn.Module, what: int | str) -> None:
    """Freeze the first `what` blocks, or all but the head ("backbone"); "none" freezes nothing.

    Their parameters get no gradient, and they stay in evaluation mode: BatchNorm's statistics do not move, and there is
    no dropout. Before a strategy wraps the model. Raises UserError (64) if there are fewer blocks.
    """
    if what == "none":
        return
    *backbone, _ = blocks_of(model)
    count = len(backbone) if what == "backbone" else what
    if count > len(backbone):
        raise UserError(f"--freeze {count}: --model has {len(backbone)} blocks below its head; use a smaller number, or"
                        " --freeze backbone for all of them")
    for block in backbone[:count]:
        for param in block.params.values():
            param.requires_grad_(False)
        for part in block.parts:
            part.eval()
            part.train = lambda mode=True, part=part: part  # the loop calls train() on the whole model


def load_backbone(model: nn.Module, weights: dict[str, Tensor], outputs: Sequence[int] | None) -> list[str]:
    """Load `weights`, the head only if it fits. Returns the names of the head's tensors if the model keeps its new one.

    outputs: for each output of the model, that of the weights; None if their classes are others, and so the head.

    A new head starts near 0, with a standard deviation of 0.01 (as MobileNetV2's), so that its first gradients do not
    spoil the features: EfficientNet's own start for 10 classes is +-0.3, and its first loss 6.

    Raises UserError (64) if the rest does not fit.
    """
    # BatchNorm counts its batches since torch 0.4.1; older files (resnet18's, for example) lack the counters.
    own, is_in_head = model.state_dict(), in_head(model)
    weights = {name: param for name, param in own.items() if name.endswith(".num_batches_tracked")} | weights

    # what is new, what does not fit
    wrong = {"missing": own.keys() - weights.keys(), "unknown": weights.keys() - own.keys(),
             "of another shape": {name for name in own if name in weights and own[name].shape != weights[name].shape}}
    has_new_head = outputs is None or any(map(is_in_head, set().union(*wrong.values())))
    new_head = [name for name in own if has_new_head and is_in_head(name)]
    wrong = {what: sorted(name for name in names if not is_in_head(name)) for what, names in wrong.items()}
    if found := "; ".join(f"{what}: {some(names)}" for what, names in wrong.items() if names):
        raise UserError(f"the weights do not fit --model: {found}; use weights of the same architecture")

    # load them
    weights = {name: own[name] if name in new_head else weights[name] for name in own}
    for name in () if has_new_head else filter(is_in_head, own):
        if own[name].shape[:1] == (len(outputs),):
            weights[name] = weights[name][outputs]
    model.load_state_dict(weights)
    for name, param in model.named_parameters():
        if name in new_head and param.ndim > 1:
            nn.init.normal_(param, std=0.01)
        elif name in new_head and name.endswith("bias"):
            nn.init.zeros_(param)
    return new_head


def lr_factors(model: nn.Module, layer_decay: float, head_lr_factor: float) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied by, by name; empty if nothing is.

    Block i of n below the head: layer_decay ** (n - i) (Clark et al., 2020, ELECTRA). The head: head_lr_factor.
    """
    if layer_decay == head_lr_factor == 1:
        return {}
    *backbone, head = blocks_of(model)
    factors = {name: layer_decay ** (len(backbone) - index)
               for index, block in enumerate(backbone) for name in block.params}
    return factors | dict.fromkeys(head.params, head_lr_factor)


def undecayed(model: nn.Module, is_new: bool = True) -> set[str]:
    """Names of parameters without weight decay, besides biases and norms: class tokens, positions, scales.

    is_new: False for a run that an earlier version began, where they have it.
    timm's models name them themselves, by patterns; torchvision's are those of the recipes.
    """
    patterns = [*getattr(model, "no_weight_decay", list)(), *_UNDECAYED]
    return {name for name, _ in model.named_parameters() if is_new and any(fnmatch(name, each) for each in patterns)}


def _last_layers(model: nn.Module) -> list[str]:
    """Names of the layers whose outputs are the classes; some of timm's models have several."""
    last = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]  # torchvision's classifiers end in it
    return classifiers_of(getattr(model, "pretrained_cfg", {})) or [last]


def _blocks_of_groups(model: nn.Module, group_of: dict[str, int]) -> list[Block]:
    """A block for each group. group_of: the group of each parameter, by name; the head is in the last one."""
    # the head is what is new if the classes differ; timm's last group may have more
    is_in_head, last = in_head(model), max(group_of.values())
    if any(group == last and not is_in_head(name) for name, group in group_of.items()):
        last += 1
    group_of = {name: last if is_in_head(name) else group for name, group in group_of.items()}

    # parameters
    blocks = [Block() for _ in range(1 + last)]
    for name, param in model.named_parameters():
        blocks[group_of[name]].params[name] = param

    # parts: the largest whose parameters are all of one group
    def add(module: nn.Module, name: str, without_params: list[nn.Module]) -> None:
        groups = {group for param, group in group_of.items() if param.startswith(name)}
        if name and not groups:
            without_params.append(module)
        elif name and len(groups) == 1:
            block = blocks[groups.pop()]
            block.parts += [*without_params, module]
            without_params.clear()
        else:
            for child, part in module.named_children():
                add(part, f"{name}{child}.", without_params)

    rest: list[nn.Module] = []
    add(model, "", rest)
    blocks[-1].parts += rest
    return blocks


def _parts(module: nn.Module, name: str = "", is_layer: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """What `module` applies one after the other, with names. is_layer: it stands in a ModuleList."""
    holds_layers = not is_layer and any(isinstance(part, nn.ModuleList) for part in module.modules())
    is_container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    is_vit = type(module).__name__ == "Encoder"  # torchvision's: its layers are in a Sequential
    if name and not (holds_layers or is_container or is_vit):
        yield name, module
        return
    for child, part in module.named_children():
        yield from _parts(part, f"{name}.{child}" if name else child, isinstance(module, nn.ModuleList))
