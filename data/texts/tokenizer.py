"""Tokenizers: loaded from a folder, or a WordPiece tokenizer trained on texts. Which one a run has: models/text/hub.py.

Training gives the same bytes every time. The library's trainer alone does not (tokenizers 0.23: five runs, five
vocabularies): it numbers characters in the order of a hash table, and breaks ties between merges by these numbers.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from utils.errors import Exit, UserError, first_line

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PREFIX = "##"  # of a token that continues a word
MAX_TOKENS = 512  # that `truncation=True` of a trained one leaves


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """A transformers tokenizer from a local folder, which never runs code of its own. Raises UserError (64, 66)."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UserError(f"{folder} holds no tokenizer that can be read ({first_line(error)}); give --tokenizer a folder"
                        " with tokenizer.json", Exit.NO_INPUT) from None
    if is_special(tokenizer).all():  # without files the library makes an empty one
        raise UserError(f"{folder} holds no tokenizer; add tokenizer.json, or give --tokenizer a folder", Exit.NO_INPUT)
    if not tokenizer.is_fast or tokenizer.pad_token_id is None:
        raise UserError(f"{folder}: its tokenizer must be one of tokenizers (tokenizer.json) and have a padding token")
    return tokenizer


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A lower-casing WordPiece tokenizer like BERT's, with at most `vocab_size` tokens. A pure function."""
    # the alphabet
    texts = list(texts)
    normalizer = normalizers.BertNormalizer(lowercase=True)
    counts = Counter(char for text in texts for char in normalizer.normalize_str(text) if not char.isspace())
    most_frequent = sorted(counts, key=lambda char: (-counts[char], char))[:vocab_size // 4]
    alphabet = sorted(most_frequent)

    # the vocabulary. Special tokens are numbered in the order given: so characters are passed as such, at the start and
    # in the middle of a word.
    numbered = [*SPECIAL, *alphabet, *(PREFIX + character for character in alphabet)]
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trained.train_from_iterator(texts, trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=numbered, initial_alphabet=alphabet, limit_alphabet=len(alphabet),
        show_progress=False))
    tokens = [*SPECIAL, *sorted(set(trained.get_vocab()) - set(SPECIAL))]

    # the tokenizer
    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=PREFIX)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tokens.index("[CLS]")), ("[SEP]", tokens.index("[SEP]"))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        model_max_length=MAX_TOKENS)


def without_ends(tokenizer: PreTrainedTokenizerBase, columns: list[list[str]], max_length: int) -> list[list[str]]:
    """The two texts of each pair without most of what truncation to `max_length` tokens removes; one column as it is.

    The library combines every removed part of one text of a pair with every one of the other (tokenizers 0.23: 7 GB for
    two texts of 16,000 words). It gives an odd token to the longer text, else to the second: so the longer one keeps
    more.
    """
    limit = 2 * max_length  # tokens; far behind the cut, since the last word may be divided differently
    long = [i for i, texts in enumerate(zip(*columns, strict=True)) if max(map(len, texts)) > limit]
    if len(columns) == 1 or not long:
        return columns
    encoded = [tokenizer([texts[i] for i in long], add_special_tokens=False).encodings for texts in columns]
    kept = [list(texts) for texts in columns]
    for i, first, second in zip(long, *encoded, strict=True):
        is_first = len(first) > len(second)
        for texts, one, is_longer in ((kept[0], first, is_first), (kept[1], second, not is_first)):
            if len(one) > (count := limit + max_length * is_longer):
                is_end = tokenizer.truncation_side == "left"  # which is what it keeps
                texts[i] = texts[i][one.offsets[-count][0]:] if is_end else texts[i][:one.offsets[count - 1][1]]
    return kept


def text_of_padding(tokenizer: PreTrainedTokenizerBase, is_pair: bool) -> tuple[list[int], list[int], list[int]]:
    """The special tokens before a text, the padding that it consists of, and those behind it: some models need them."""
    ids = tokenizer(*["a"] * (1 + is_pair))["input_ids"]
    special = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id}
    first = next((place for place, token in enumerate(ids) if token not in special), 0)
    return ids[:first], [tokenizer.pad_token_id], [token for token in ids[first:] if token in special]


def is_special(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """[V] bool: which tokens do not stand for text. V is one more than the largest id."""
    flags = np.zeros(max(tokenizer.get_vocab().values()) + 1, dtype=bool)
    flags[tokenizer.all_special_ids] = True
    return flags
