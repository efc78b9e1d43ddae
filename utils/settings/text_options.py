"""The settings of text tasks. A setting is one line, as in run_options.py.

Tests: tests/unit/utils/settings/test_config.py
"""

from utils.settings.option import NAME_OR_PATH, Kept, is_model_folder, option, options, own_names

# Encoders that are built from scratch: layers and width. A head has 64 dimensions.
# Source: Turc et al., 2019 (https://github.com/google-research/bert).
SIZES = {"bert-tiny": (2, 128), "bert-mini": (4, 256), "bert-small": (4, 512), "bert-base": (12, 768)}


@options
class TextOptions:
    """Text"""

    text_column: str = option(
        "auto", "column with the text; A,B = a sentence pair; auto = text, else the only column besides the label",
        in_branch=Kept.SAMPLES)
    max_length: int = option(128, "maximum number of tokens in a sample, including special tokens", at_least=8,
                             in_branch=Kept.SAMPLES)
    tokenizer: str = option("auto", "name or folder of a tokenizer; auto = that of --model, or one trained on the"
                            " training texts", path=NAME_OR_PATH, rare=True, in_branch=Kept.SAMPLES)
    vocab_size: int = option(8192, "number of tokens, if a tokenizer is trained", at_least=64, rare=True,
                             in_branch=Kept.SAMPLES)


@options
class TextModelOptions:
    """Model"""

    model: str = option("bert-small", "bert-tiny, -mini, -small or -base, or one of models/own.py, built from scratch;"
                        " or the name of a transformers model; or a model folder", path=NAME_OR_PATH,
                        in_branch=Kept.MODEL)
    pretrained: bool = option(False, "the weights of a folder or a transformers model are used unless --no-pretrained"
                              " is given; the head is new if the task or the classes differ", in_branch=Kept.MODEL)
    dropout: float | None = option(None, "probability of dropout, but that of attention weights; default: the model's"
                                   " own", at_least=0, below=1, rare=True)

    @staticmethod
    def has_weights(model: str) -> bool:
        """Whether a --model comes with weights, so that --pretrained is the default."""
        return is_model_folder(model) or model not in {*SIZES, *own_names()}
