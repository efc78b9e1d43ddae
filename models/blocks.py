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
    heads = tuple(f"{name}." if name else "" for name in last_layers(model))  # "": it is the model itself
    return lambda name: name.startswith(heads)


def watch_features(model: nn.Module) -> list[Tensor]:
    """A list to which each forward appends what goes into the last layer: [B, D], or a map [B, D, H, W]."""
    seen: list[Tensor] = []
    model.get_submodule(last_layers(model)[0]).register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    return seen


def blocks_of(model: nn.Module) -> list[Block]:
    """All parameters of `model` by block; the last one is the head."""
    # the block of each parameter, by name; timm's last group may have more than the head
    is_in_head, is_timm = in_head(model), hasattr(model, "group_matcher")
    block_of = groups_of(model) if is_timm else _counted(model, is_in_head)
    last = 1 + max((index for name, index in block_of.items() if not is_in_head(name)), default=-1)
    block_of = {name: last if is_in_head(name) else index for name, index in block_of.items()}
    blocks = [Block() for _ in range(1 + last)]
    for name, param in model.named_parameters():
        blocks[block_of[name]].params[name] = param

    # their parts; of timm's models the largest whose parameters are all of one block
    def is_of_one_block(name: str, part: nn.Module, parent: nn.Module) -> bool:
        return len({index for param, index in block_of.items() if param.startswith(f"{name}.")}) <= 1

    without_params: list[nn.Module] = []
    for name, part in _parts(model, is_of_one_block if is_timm else _is_applied):
        without_params.append(part)
        own = next((index for param, index in block_of.items() if param.startswith(f"{name}.")), None)
        if own is not None:
            blocks[own].parts += without_params
            without_params = []
    blocks[-1].parts += without_params
    return blocks


def freeze(model: nn.Module, what: int | str) -> str:
    """Freeze the first `what` blocks, or all but the head ("backbone"); "none" freezes nothing. Returns a note.

    Their parameters get no gradient, and they stay in evaluation mode: BatchNorm's statistics do not move, and there is
    no dropout. Before a strategy wraps the model. Raises UserError (64) if there are fewer blocks.
    """
    if what == "none":
        return ""
    *backbone, _ = blocks_of(model)
    count = len(backbone) if what == "backbone" else what
    if count > len(backbone):
        raise UserError(f"--freeze {count}: --model has {len(backbone)} blocks below its head; use a smaller number, or"
                        " --freeze backbone for all of them")
    for block in backbone[:count]:
        for param in block.params.values():
            param.requires_grad_(False)
        for part in block.parts:
            _stay_in_evaluation(part)
    frozen = {name: param.numel() for block in backbone[:count] for name, param in block.params.items()}
    num_all, names = sum(param.numel() for param in model.parameters()), [*frozen]
    return (f"--freeze {what}: {sum(frozen.values()):,} of {num_all:,} parameters stay as they are, from {names[0]} to"
            f" {names[-1]}") if frozen else ""


def keep_statistics(model: nn.Module) -> None:
    """BatchNorm normalizes by its running statistics in training, too, and they do not move; its parameters learn.

    So training sees the features that an evaluation does. With batch statistics the first steps of a fitted head see
    others: EfficientNet-Lite0 on 200 photos of CIFAR-10 then ends at 54.2 % instead of 63.2 %. Before a strategy wraps
    the model.
    """
    for part in _batch_norms(model):
        _stay_in_evaluation(part)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether a batch's statistics decide what the model gives in training."""
    return any("train" not in vars(part) for part in _batch_norms(model))


def _batch_norms(model: nn.Module) -> Iterator[nn.Module]:
    return (part for part in model.modules() if isinstance(part, nn.modules.batchnorm._NormBase))


def _stay_in_evaluation(part: nn.Module) -> None:
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


def undecayed(model: nn.Module) -> set[str]:
    """Names of parameters without weight decay, besides biases and norms: class tokens, positions, scales.

    timm's models name them themselves, by patterns; torchvision's are those of the recipes.
    """
    patterns = [*getattr(model, "no_weight_decay", list)(), *_UNDECAYED]
    return {name for name, _ in model.named_parameters() if any(fnmatch(name, each) for each in patterns)}


def last_layers(model: nn.Module) -> list[str]:
    """Names of the layers whose outputs are the classes; some of timm's models have several."""
    last = [name for name, _ in model.named_parameters()][-1].rpartition(".")[0]  # torchvision's classifiers end in it
    return classifiers_of(getattr(model, "pretrained_cfg", {})) or [last]


def _counted(model: nn.Module, is_in_head: Callable[[str], bool]) -> dict[str, int]:
    """The block below the head of each parameter, by all its names: a new one begins with each part that has a matrix.
    """
    block_of, index = {name: 0 for name, _ in model.named_parameters(remove_duplicate=False)}, -1
    for name, part in _parts(model, _is_applied):
        own = {f"{name}.{param}": tensor.ndim for param, tensor in part.named_parameters(remove_duplicate=False)}
        if own and not is_in_head(f"{name}."):
            if max(own.values()) > 1 or index < 0:
                index += 1
            block_of |= dict.fromkeys(block_of.keys() & own.keys(), index)
    return block_of


def _parts(
    module: nn.Module, is_part: Callable[[str, nn.Module, nn.Module], bool], name: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Those modules below `module` of which is_part(name, module, parent) says so, and nothing below these."""
    for child, part in module.named_children():
        path = f"{name}.{child}" if name else child
        if is_part(path, part, module):
            yield path, part
        else:
            yield from _parts(part, is_part, path)


def _is_applied(name: str, part: nn.Module, parent: nn.Module) -> bool:
    """Whether a model applies `part` as a whole: it neither is a container nor holds layers, or is a layer itself."""
    if isinstance(part, nn.Sequential | nn.ModuleList | nn.ModuleDict) or type(part).__name__ == "Encoder":
        return False  # torchvision's ViT has its layers in a Sequential, in an Encoder
    return isinstance(parent, nn.ModuleList) or not any(isinstance(each, nn.ModuleList) for each in part.modules())
