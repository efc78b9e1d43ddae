"""What users of other trainers type out of habit, and what answers it here.

    answer("learning-rate", "masked-lm")                       # "use --lr"
    answer("resume", "masked-lm")                              # "not needed: the same command continues the run"

Spellings: timm, torchvision's references, Hugging Face's Trainer, Lightning, Ultralytics. Nothing here imports torch.
"""

import difflib
import re
from typing import Literal, get_args, get_origin

from utils.settings.config import CONFIGS, facts, types

CLOSE = 0.8  # difflib's ratio of two spellings: --epoch is close to --epochs, --amp to nothing

# Spellings, and the answer: flags of ours and a few words, or a sentence. A flag that has choices stands with one of
# them or alone. An answer counts for the tasks that have all its flags.
HABITS = (
    # the run
    ("output-dir save-dir logdir log-dir logging-dir default-root-dir checkpoint-dir ckpt-dir run-name exp-name name"
     " project", "--run-dir"),
    ("resume resume-from resume-from-checkpoint auto-resume load-checkpoint ckpt-path start-epoch initial-epoch",
     "not needed: the same command continues the run, from the exact sample on"),
    ("overwrite-output-dir exist-ok", "--fresh"),
    ("max-epochs num-train-epochs num-epochs n-epochs", "--epochs"),
    ("max-iters iterations num-steps total-steps max-train-steps train-steps", "--max-steps"),
    ("limit-train-batches fast-dev-run", "--max-steps (the evaluations still take all of val)"),
    ("max-time max-train-time time-limit", "--stop-after"),
    ("random-seed manual-seed data-seed", "--seed"),
    ("test-only evaluate validate eval do-eval e", "--eval-only"),
    ("do-train", "not needed: train.py trains, unless --eval-only is given"),
    ("do-predict predict inference", "not a setting: python -m models.predict RUN FILE"),

    # data
    ("data-path data-dir datadir dataset dataset-name dataset-dir train-dir train-data train-file", "--data"),
    ("val-dir val-data validation-file test-file eval-data", "--data (one folder that holds train and val)"),
    ("val-ratio val-size validation-split validation-split-percentage val-pct", "--val-fraction"),
    ("eval-split test-split", "--split"),
    ("max-train-samples max-samples",
     "not a setting: give --data a smaller folder or table; --max-steps ends a run early"),
    ("max-eval-samples max-val-samples limit-val-batches limit-test-batches",
     "not available: every sample is evaluated; give --data with a smaller val"),
    ("num-workers num-worker dataloader-num-workers j", "--workers"),
    ("pin-mem pin-memory no-pin-memory dataloader-pin-memory",
     "not needed: batches are always in pinned memory where there is an accelerator"),
    ("prefetcher no-prefetcher prefetch-factor persistent-workers",
     "not needed: batches are always loaded ahead of the step"),
    ("drop-last dataloader-drop-last", "not needed: every sample is trained on once per epoch"),
    ("shuffle no-shuffle", "not needed: training samples are in a new random order in each epoch"),
    ("num-classes nb-classes num-labels nc class-map", "not needed: the classes are those of the data"),
    ("cache-dir", "not a setting: the environment variable LOCKSTEP_CACHE names the folder of caches"),
    ("text-column-name text-column-names", "--text-column"),
    ("label-column-name label-col target-column target-col y-col", "--label-column"),
    ("image-column-name image-col x-col", "--image-column"),
    ("group-col group-by", "--group-column"),
    ("multilabel", "--multi-label"),
    ("is-regression regression", "--task image-regression or text-regression"),
    ("max-seq-length max-seq-len max-len seq-length block-size", "--max-length"),
    ("mlm-probability mlm-prob", "--mask-probability"),
    ("tokenizer-name tokenizer-name-or-path", "--tokenizer"),
    ("group-by-length pad-to-max-length",
     "not needed: texts of similar length share a batch, as long as the longest; masked-lm puts several in a row"),

    # images
    ("imgsz img-size input-size crop-size resolution train-crop-size val-crop-size", "--image-size"),
    ("aa", "--auto-augment randaugment or trivialaugment"),
    ("train-interpolation", "--interpolation"),
    ("crop-pct",
     "not needed: an evaluation crops as the weights were evaluated; a new model sees 7/8 of a photo's shorter side"),
    ("in-chans", "not needed: images are read as RGB; --image-column A,B gives the model several images per sample"),
    ("hflip fliplr", "--flip"),
    ("color-jitter", "not available; --auto-augment trivialaugment changes colours, and shapes as well"),
    ("ra-magnitude", "--randaugment-magnitude"),
    ("scale rand-crop-scale", "--crop-scale"),
    ("reprob random-erase erasing", "--random-erasing"),
    ("mixup-alpha", "--mixup"),
    ("cutmix-alpha", "--cutmix"),
    ("channels-last memory-format", "not needed: image models always compute in channels_last"),

    # model
    ("arch a model-name-or-path model-name model-id backbone", "--model"),
    ("initial-checkpoint pretrained-path weights-path", "--weights"),
    ("freeze-backbone freeze-encoder freeze-layers", "--freeze"),
    ("drop hidden-dropout-prob", "--dropout"),
    ("drop-path-rate stochastic-depth-prob", "--drop-path"),
    ("layerwise-lr-decay", "--layer-decay"),
    ("gradient-checkpointing grad-checkpointing activation-checkpointing", "--checkpoint-activations"),
    ("gp global-pool", "not a setting: the model pools as its library built it"),
    ("trust-remote-code", "not available: no code of a model folder is ever run"),

    # batches
    ("batch-size batch b train-batch-size per-device-train-batch-size per-gpu-train-batch-size",
     "--global-batch-size (samples per optimizer step, over all processes) and --micro-batch-size (samples that a"
     " process computes at once)"),
    ("gradient-accumulation-steps accumulate-grad-batches grad-accum-steps accumulation-steps",
     "not needed: a step takes --global-batch-size samples, in as many passes of --micro-batch-size as that needs"),
    ("eval-accumulation-steps", "not needed: what an evaluation keeps of each sample takes little memory"),
    ("per-device-eval-batch-size validation-batch-size val-batch-size", "--eval-batch-size"),

    # optimization
    ("learning-rate lr0 base-lr max-lr", "--lr"),
    ("lrf lr-min end-lr", "--min-lr"),
    ("backbone-lr lr-backbone", "--lr (the backbone's) and --head-lr-factor (the head's is --lr times this)"),
    ("opt optim", "--optimizer"),
    ("opt-betas adam-beta1 adam-beta2", "--betas"),
    ("adam-epsilon opt-eps", "not a setting: it is 1e-8, torch's default"),
    ("wd", "--weight-decay"),
    ("norm-weight-decay bias-weight-decay", "not needed: biases and normalization layers have no --weight-decay"),
    ("sched scheduler lr-scheduler lr-scheduler-type lr-schedule lr-policy cos-lr", "--schedule"),
    ("lr-step-size lr-steps lr-gamma lr-milestones decay-epochs decay-milestones decay-rate", "--schedule step"),
    ("warmup warmup-epochs warmup-ratio num-warmup-steps lr-warmup-epochs lr-warmup-steps", "--warmup-steps"),
    ("lr-warmup-method lr-warmup-decay warmup-lr",
     "not needed: the learning rate rises from 0 in a straight line, over --warmup-steps"),
    ("clip-grad clip-grad-norm gradient-clip-val grad-clip max-norm", "--max-grad-norm"),
    ("smoothing label-smoothing-factor", "--label-smoothing"),
    ("bce-loss", "--loss bce"),
    ("ema model-ema use-ema model-ema-decay", "--ema-decay"),
    ("patience early-stopping early-stopping-patience", "--early-stop-patience"),
    ("metric-for-best-model best-metric eval-metric monitor", "--best"),
    ("load-best-model-at-end save-best-only", "not needed: RUN/model is the best model, whenever the run ends"),
    ("detect-anomaly nan-check", "not needed: a gradient that is not finite never changes a weight"),

    # device, precision, processes
    ("amp use-amp native-amp amp-dtype dtype torch-dtype mixed-precision", "--precision"),
    ("fp16 half", "--precision fp16"),
    ("bf16", "--precision bf16"),
    ("use-cpu cpu", "--device cpu"),
    ("accelerator", "--device"),
    ("torchcompile torch-compile use-compile", "--compile"),
    ("use-deterministic-algorithms cudnn-deterministic full-determinism", "--deterministic"),
    ("cudnn-benchmark benchmark", "not needed: autotuning is on, unless --deterministic is given"),
    ("gpus num-gpus gpu n-gpu ngpus devices num-devices num-processes nproc", "--nproc-per-node"),
    ("world-size rank dist-url dist-backend distributed multiprocessing-distributed",
     "not needed: torchrun or ./launch.sh starts the processes and numbers them"),
    ("num-nodes nnodes node-rank master-addr master-port max-restarts standalone rdzv-endpoint",
     "not a setting of train.py: it is one of torchrun and ./launch.sh, and stands before train.py's"),
    ("ddp-timeout dist-timeout", "--start-timeout, --step-timeout and --section-timeout"),
    ("sync-bn sync-batchnorm dist-bn",
     "not needed: BatchNorm's statistics are those of a micro-batch, on any number of processes"),
    ("fsdp", "--strategy fsdp"), ("find-unused", "--find-unused-parameters"),
    ("data-parallel dp", "--strategy dp: one process with several devices; --strategy ddp is faster"),
    ("model-parallel split-model", "--strategy model-parallel"),
    ("deepspeed", "not available; --strategy fsdp shards weights, gradients and the optimizer's state, too"),

    # records
    ("print-freq p log-interval log-freq logging-steps log-every-n-steps", "--log-every"),
    ("save-steps save-freq save-interval save-period save-strategy", "--save-every"),
    ("save-total-limit save-top-k checkpoint-hist", "--keep"),
    ("eval-steps eval-freq eval-interval eval-strategy evaluation-strategy val-interval val-check-interval"
     " check-val-every-n-epoch", "--eval-every"),
    ("log-wandb wandb use-wandb wandb-project report-to log-with logger tensorboard",
     "not needed: every record is in RUN/tb (TensorBoard) and in RUN/metrics.jsonl"),
    ("push-to-hub hub-model-id", "not a setting: hf upload NAME RUN/model"),
)
_ANSWERS = {spelling: answer for spellings, answer in HABITS for spelling in spellings.split()}


def answer(name: str, task: str) -> str:
    """What to say of an unknown setting. name: with dashes, as in "learning-rate"; "" if there is nothing to say."""
    name = name.lower().rpartition(".")[2]  # Lightning: --trainer.max-epochs
    if (said := _of_habit(name, task) or _of_other_tasks(name, task)) or name in _ANSWERS:
        return said
    known = [known.replace("_", "-") for known in facts(CONFIGS[task]())]
    if close := difflib.get_close_matches(name, known, n=1, cutoff=CLOSE):
        return f"did you mean --{close[0]}?"
    close = difflib.get_close_matches(name, _ANSWERS, n=1, cutoff=CLOSE)
    return _of_habit(close[0], task) if close else ""


def _of_habit(name: str, task: str) -> str:
    """The table's answer, if this program has what it names; for another task, with the task's name."""
    said = _ANSWERS.get(name, "")
    if not said.startswith("--"):
        return said
    having = [each for each in CONFIGS if _has_all(said, each)]
    if task in having:
        return f"use {said}"
    return f"use {said}, with --task {' or '.join(having)}" if having else ""


def _of_other_tasks(name: str, task: str) -> str:
    having = [each for each in CONFIGS if name.replace("-", "_") in facts(CONFIGS[each]())]
    return f"a setting of --task {' and '.join(having)}; this is --task {task}" if having else ""


def _has_all(said: str, task: str) -> bool:
    """Whether the task has every flag of an answer, and the choice that stands behind it."""
    known = types(CONFIGS[task]())

    def has(name: str, choice: str) -> bool:
        kind = known.get(name.replace("-", "_"))
        return kind is not None and (not choice or get_origin(kind) is not Literal or choice in get_args(kind))

    return all(has(*found) for found in re.findall(r"--([a-z-]+)(?: ([a-z0-9][a-z0-9-]*))?", said))
