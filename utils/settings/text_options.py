"""The settings of text tasks. A setting is one line, as in run_options.py."""

from utils.settings.option import NAME_OR_PATH, option, options


@options
class TextOptions:
    """Text"""

    text_column: str = option(
        "auto", "column with the text; A,B = a sentence pair; auto = text, else the only column besides the label")
    max_length: int = option(128, "maximum number of tokens in a sample, including special tokens", at_least=8)
    tokenizer: str = option(
        "auto", "name or folder of a tokenizer; auto = that of --model, or one trained on the training texts",
        path=NAME_OR_PATH, rare=True)
    vocab_size: int = option(8192, "number of tokens, if a tokenizer is trained", at_least=64, rare=True)


@options
class LabelOptions:
    """Labels"""

    label_column: str = option("label", "column with the class (a word or a number)")


@options
class MaskOptions:
    """Masks"""

    mask_probability: float = option(
        0.15, "fraction of tokens to predict: 80 % of them are masked, 10 % are random, 10 % stay as they are",
        above=0, below=1)


@options
class TextModelOptions:
    """Model"""

    model: str = option(
        "bert-small", "bert-tiny, -mini, -small or -base, built from scratch; or the name of a transformers model; or a"
        " model folder", path=NAME_OR_PATH)
    pretrained: bool = option(
        False, "start from the weights of --model; the head is new if the task or the classes differ")
