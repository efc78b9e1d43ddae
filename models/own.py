"""Your own models: a name for --model, and a function that builds the network. No other file knows them.

    python train.py --model small-cnn
    python train.py --task text-classification --model bag-of-words

The output layer is assigned last: it is the head, which is new if the classes differ. --freeze, --layer-decay, fsdp and
model-parallel divide a network into its layers, as they are assigned. A name that a library has, too, is yours.

Legend: B samples, C outputs, H, W height and width in pixels, T tokens of the longest text.
"""

from collections.abc import Callable

from torch import Tensor, nn


class Stage(nn.Module):
    """Half the height and width, then a residual convolution."""

    def __init__(self, channels_in: int, channels: int):
        super().__init__()
        self.shrink = nn.Conv2d(channels_in, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.refine = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, features: Tensor) -> Tensor:
        """[B, channels_in, H, W] to [B, channels, H / 2, W / 2]."""
        features = self.norm(self.shrink(features)).relu()
        return features + self.refine(features).relu()


class SmallCNN(nn.Module):
    """Three stages for images of any size; 290,000 parameters."""

    def __init__(self, num_outputs: int):
        super().__init__()
        self.stages = nn.Sequential(Stage(3, 32), Stage(32, 64), Stage(64, 128))
        self.head = nn.Linear(128, num_outputs)

    def forward(self, images: Tensor) -> Tensor:
        """Normalized images [B, 3, H, W] to logits [B, C]."""
        return self.head(self.stages(images).mean(dim=(2, 3)))


class BagOfWords(nn.Module):
    """The sum of the tokens' embeddings."""

    def __init__(self, num_outputs: int, vocab_size: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 128)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head = nn.Linear(128, num_outputs)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Both [B, T] int64, the mask 1 for a token and 0 for padding, to logits [B, C]."""
        return self.head((self.embedding(input_ids) * attention_mask[:, :, None]).sum(dim=1))


# by name: a function of the number of outputs; its network takes images, normalized as the settings say
IMAGE_MODELS: dict[str, Callable[[int], nn.Module]] = {"small-cnn": SmallCNN}
# by name: a function of the number of outputs and of tokens; its network takes token ids and a mask, for labels or
# numbers; the tokenizer is trained on the training texts, unless --tokenizer names one
TEXT_MODELS: dict[str, Callable[[int, int], nn.Module]] = {"bag-of-words": BagOfWords}
