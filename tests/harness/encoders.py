"""Tiny model folders of the architectures that transformers reads texts with: only their sizes are ours.

    write_encoder(folder, "roberta", tokenizer, AutoModelForMaskedLM, id2label={0: "neg", 1: "pos"})
"""

from pathlib import Path
from typing import Any

import torch
import transformers

_LAYERS = dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
                         "num_decoder_layers"), 2)
_HEADS = dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads",
                        "decoder_attention_heads"), 2)
_WIDTHS = dict.fromkeys(("hidden_size", "d_model", "dim", "n_embd", "embedding_size", "emb_dim", "input_embedding_size",
                         "output_embedding_size"), 32)
_INNER = dict.fromkeys(("intermediate_size", "hidden_dim", "d_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64)
SMALL = _LAYERS | _HEADS | _WIDTHS | _INNER | {"max_position_embeddings": 80, "n_positions": 80}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "albert": {}, "bart": {}, "bert": {}, "big_bird": {"attention_type": "original_full"}, "camembert": {},
    "convbert": {"head_ratio": 1}, "data2vec-text": {},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, "distilbert": {}, "electra": {},
    "ernie": {}, "esm": {"position_embedding_type": "rotary", "mask_token_id": 4}, "flaubert": {}, "fnet": {},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": 16}, "ibert": {}, "layoutlm": {},
    "longformer": {"attention_window": 8},
    "luke": {"entity_vocab_size": 9, "entity_emb_size": 16}, "mbart": {}, "megatron-bert": {},
    "mobilebert": {"intra_bottleneck_size": 16, "embedding_size": 16, "true_hidden_size": 16},
    "modernbert": {"num_hidden_layers": 4, "global_attn_every_n_layers": 2, "local_attention": 8}, "mpnet": {},
    "mra": {}, "nomic_bert": {}, "nystromformer": {}, "rembert": {}, "roberta": {}, "roberta-prelayernorm": {},
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False}, "roformer": {}, "squeezebert": {}, "xlm": {},
    "xlm-roberta": {}, "xlm-roberta-xl": {}, "xmod": {"languages": ["en_XX"], "default_language": "en_XX"}, "yoso": {},
    # with a head for classes alone
    "gpt2": {}, "llama": {"num_key_value_heads": 2, "head_dim": 16},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64}, "qwen2": {"num_key_value_heads": 2, "vocab_size": 256},
    "t5": {"d_kv": 16, "decoder_start_token_id": 0},
    "xlnet": {}}
WITHOUT_MASKED_LM = ("gpt2", "llama", "opt", "qwen2", "t5", "xlnet")


def configured(
    name: str, tokenizer: transformers.PreTrainedTokenizerBase, **options: Any
) -> transformers.PreTrainedConfig:
    """The config of a tiny model of this architecture."""
    usual = transformers.AutoConfig.for_model(name).to_dict()
    ids = {f"{ours}_token_id": getattr(tokenizer, f"{theirs}_token_id")
           for ours, theirs in (("pad", "pad"), ("mask", "mask"), ("bos", "cls"), ("eos", "sep"))}
    sizes = {key: value for key, value in (SMALL | ids).items() if key in usual}
    return transformers.AutoConfig.for_model(
        name, **sizes | {"vocab_size": len(tokenizer)} | ARCHITECTURES[name] | options)


def write_encoder(
    folder: Path, name: str, head: type, tokenizer: transformers.PreTrainedTokenizerBase, **options: Any
) -> None:
    """A model folder with random weights, the same ones every time."""
    torch.manual_seed(0)
    config = configured(name, tokenizer, architectures=[], **options)  # AutoModel reads architectures of Funnel
    head.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
