"""`python -m benchmarks.fast_paths DIR`: what train.py reaches with its fast paths, and without them.

fast     train.py by itself: bf16 where the hardware computes in it, on some CPUs with a product of matrices for the
         gradients of filters (utils/numerics/kernels.py)
plain    float32; torch's own dropout masks, attention and gradients of filters; batches of texts of any lengths, one
         in a row; all tokens through the output layer; JPEGs decoded whole

Fused optimizers and channels_last, which change rounding alone, are in both. --cache is an option, and measured in
recipes.py. Rows are those of recipes.py, and masked tokens. A run takes one to three minutes of one core, and there are
as many at a time as there are cores.
"""

import argparse
import runpy
import sys
from pathlib import Path
from unittest.mock import patch

from benchmarks.fine_tuning import compare, trained
from benchmarks.pretrained import minilm_folder, write_lite0
from benchmarks.recipes import FILMS, LARGE, LITE0, RUNS, SMALL, Base, lay_out
from data.images.decode import MAX_PIXELS, EncodedImage

MASKED = Base("masked tokens", "wikitext2", "--task masked-lm --model MINILM --epochs 1 --eval-every 1000")
BASES = {base.data: base for base in (SMALL, FILMS, LARGE, MASKED)}
PLAIN = ("-m", "benchmarks.fast_paths", "plain")


def main(data: Path, name: str, seeds: int) -> None:
    """Train a row on all seeds, fast and plainly, and print accuracies or losses."""
    base = BASES[name]
    lay_out(name, data)
    if base is LARGE and not LITE0.exists():
        write_lite0(str(LITE0))
    words = [*base.words.replace("MINILM", minilm_folder()).split(), "--data", RUNS / "data" / name]
    figure, shown = ("loss", "100 x loss, lower is better") if base is MASKED else ("top1", "top1 in %")
    print(f"\n{base.what}: {base.words}")
    compare(f"fast paths, {base.what}", shown, {
        "fast": lambda seed: trained("train.py", *words, "--seed", seed, figure=figure),
        "plain": lambda seed: trained(*PLAIN, *words, "--precision", "fp32", "--seed", seed, figure=figure)}, seeds)


def train_plainly(words: list[str]) -> None:
    """Run train.py in this process without what it does for speed."""
    decode = EncodedImage._decode_jpeg
    with (patch("engine.arithmetic.replace_kernels", lambda *_: None),
          patch("data.sampler.bucketed", lambda order, *others: order),
          patch("models.tasks.masked_lm.find_first_position", lambda *_: None),
          patch("models.text.sparse_prediction.SparsePrediction._before_output", lambda *_: None),
          patch("data.images.decode.EncodedImage._decode_jpeg", lambda image, *others: decode(image, 1.0, MAX_PIXELS)),
          patch("sys.argv", ["train.py", *words])):
        runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["plain"]:
        train_plainly(sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(prog="python -m benchmarks.fast_paths")
        parser.add_argument("data", type=Path, help="a folder with cifar10, sst2, ants_bees, wikitext2, as for make"
                            " accuracy")
        parser.add_argument("--rows", default=",".join(BASES))
        parser.add_argument("--seeds", type=int, default=5)
        arguments = parser.parse_args()
        for row in arguments.rows.split(","):
            main(arguments.data, row, arguments.seeds)
