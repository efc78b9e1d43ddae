"""The settings of every run, whatever it trains: one frozen dataclass per concern.

A setting is one line: its type, its default, its help, and every fact that the program knows about it
(utils/settings/option.py says what there is). Nothing here imports torch.

Tests: tests/unit/utils/settings/test_config.py
"""

from typing import Literal

from utils.settings.option import OPERATIONAL, PATH, TOLERATED, Auto, Interval, Kept, Names, option, options

MAX_TIMEOUT_S, MAX_SEED = 10**7, 2**63 - 1  # longer than any job; what torch's generators take


@options
class RunOptions:
    """The run: what, where, how long"""

    task: str = option("image-classification", "what to train", in_branch=Kept.MODEL)
    run_dir: str | None = option(None, "run directory; default: runs/TASK-MODEL-DATA-HASH: the same command continues"
                                 " the run", OPERATIONAL, kept=False, per_node=True, path=PATH)
    config: str | None = option(None, "YAML file with settings; the command line overrides it", OPERATIONAL, kept=False,
                                in_file=False, per_node=True, path=PATH)
    fresh: bool = option(False, "start over, once per launch; moves the old run directory to .old/ in its parent"
                         " folder", OPERATIONAL, kept=False, in_file=False)
    seed: int = option(
        0, "seed of initial weights, order of samples, augmentation, masking and dropout", at_least=0, at_most=MAX_SEED,
        in_branch="it may decide which samples are held out")
    epochs: int | Auto = option("auto", "passes over the training data; sets the length of the schedule; auto = more if"
                                " pretrained weights meet few samples", at_least=1, fixed=True, ends_run=True)
    max_steps: int | None = option(None, "end after this many optimizer steps, if --epochs would take more; sets the"
                                   " length of the schedule", at_least=1, ends_run=True)
    stop_after: Interval | None = option(None, "save and exit with 75 after this start has taken N steps or this long"
                                         " (30s, 5min, 2h)", OPERATIONAL, kept=False, rare=True)
    eval_only: bool = option(
        False, "evaluate the best checkpoint of the run; prints one JSON line", OPERATIONAL, kept=False)
    split: Literal["train", "val", "test"] = option("val", "what --eval-only evaluates", OPERATIONAL, kept=False)
    output: str | None = option(None, "file for --eval-only: .csv = a row for each sample; .json = the figures of each"
                                " class; for --check: .json", OPERATIONAL, kept=False, in_file=False)
    nproc_per_node: int | None = option(
        None, "processes per node; starts them through launch.sh", OPERATIONAL, at_least=1, kept=False, per_node=True)
    early_stop_patience: int = option(0, "end the run after this many evaluations without a gain in the metric that"
                                      " decides which model is best; 0 = off", at_least=0, ends_run=True)


@options
class DataOptions:
    """Data"""

    # nodes and starts compare a fingerprint of the samples
    data: str = option("demo", "a folder (of images: train/CLASS/*, val/CLASS/*, or CLASS/*; of tables: train.csv,"
                       " val.csv, ...; of .tar or .parquet files), or a table of images or texts (.csv, .tsv, .jsonl;"
                       " texts also .txt); demo = the built-in data", path=PATH, per_node=True, resolved=True)
    val_fraction: float = option(0.1, "fraction of train to hold out, per class, if there is no val, valid, validation"
                                 " or test", at_least=0, below=1, in_branch=Kept.SAMPLES)
    group_column: str | None = option(None, "column of a table that says which samples belong together (of a patient, a"
                                      " video): whole groups are held out", rare=True, in_branch=Kept.SAMPLES)
    without: Names | None = option(None, "file with training samples to leave out, one on each line: paths in the data,"
                                   " or of texts numbers of rows, counted from 0", rare=True)
    bad_samples: Literal["stop", "skip"] = option("stop", "a sample that cannot be read: stop the run (exit code 65),"
                                                  " or skip (list it; its sample weight is 0)", OPERATIONAL, rare=True)
    workers: int | Auto = option(
        "auto", "data loading processes per process; auto = spare cores", OPERATIONAL, at_least=0, per_node=True)


@options
class BatchOptions:
    """Batches: ranks share the micro-batches of a global batch"""

    global_batch_size: int | Auto = option("auto", "samples per optimizer step, over all processes; auto = fewer if"
                                           " pretrained weights meet few samples", at_least=1, fixed=True,
                                           in_branch=Kept.AMID_EPOCH)
    micro_batch_size: int | Auto = option(
        "auto", "samples per forward and backward pass; auto = at most 64 (accelerator: 256), by exact an eighth of the"
        " global batch", TOLERATED, at_least=1, resolved=True)
    eval_batch_size: int | Auto = option("auto", "samples per batch of an evaluation; auto = twice the micro-batch, at"
                                         " most 64 (256)", TOLERATED, at_least=1, resolved=True, rare=True)


@options
class OptimOptions:
    """Optimization"""

    optimizer: Literal["adamw", "adam", "sgd"] = option("adamw", "adam has L2 decay; sgd has Nesterov momentum",
                                                        in_branch="the state of another one does not fit")
    lr: float | Auto = option("auto", "peak learning rate; auto = by task, optimizer, global batch and whether the"
                              " weights are pretrained", at_least=0, fixed=True)
    schedule: Literal["cosine", "linear", "step", "constant"] = option(
        "cosine", "learning rate after the warm-up; step = a tenth after each third of the run")
    warmup_steps: int | Auto = option("auto", "optimizer steps of linear warm-up; auto = 5 % of the run", at_least=0)
    momentum: float = option(0.9, "momentum of SGD", at_least=0, below=1, rare=True)
    betas: tuple[float, float] = option((0.9, 0.999), "betas of AdamW and Adam", at_least=0, below=1, rare=True)
    weight_decay: float = option(0.05, "weight decay; none on biases, norms, positions, scales", at_least=0)
    max_grad_norm: float = option(0.0, "clip the norm of the gradient to this; 0 = off", at_least=0)
    freeze: int | Literal["none", "backbone"] = option(
        "none", "what keeps its weights: backbone = all but the head; N = the first N blocks, the stem or embeddings"
        " included", at_least=1)
    head_init: Literal["auto", "features", "random"] = option(
        "auto", "a new head on pretrained weights: features = a linear model, fitted to frozen features before step 1;"
        " BatchNorm keeps its statistics; auto = features where the fit takes seconds", fixed=True, rare=True,
        in_branch="the head is trained already")
    layer_decay: float = option(1.0, "layer-wise learning rate decay: each block's learning rate is this times that of"
                                " the block after it; 1 = off", above=0, at_most=1, rare=True)
    ema_decay: float = option(0.0, "also evaluate a moving average of the weights, with this decay per step;"
                              " RUN/model is the better of the two; 0 = off", TOLERATED, at_least=0, below=1)


@options
class LabelOptions:
    """Labels"""

    label_column: str = option("label", "column of a table with the class", in_branch=Kept.SAMPLES)
    multi_label: bool = option(False, "a sample may have several labels, written A|B in the table",
                               in_branch=Kept.SAMPLES)


@options
class TargetOptions:
    """Targets"""

    label_column: str = option("label", "column of the table with the number to predict; A,B = several numbers",
                               in_branch=Kept.SAMPLES)


@options
class LossOptions:
    """Loss"""

    label_smoothing: float = option(
        0.0, "label smoothing in the training loss; the evaluation loss has none", at_least=0, below=1)


@options
class ClassLossOptions(LossOptions):
    """Loss"""

    loss: Literal["auto", "cross-entropy", "bce"] = option(
        "auto", "bce = binary cross-entropy, each class against the rest; auto = cross-entropy, bce with --multi-label")
    class_weights: str = option("none", "training weight of each class: A=1,B=2,..., or 1,2,... in label order;"
                                " balanced = each class counts as much as any other")


@options
class TargetLossOptions:
    """Loss"""

    loss: Literal["l1", "l2", "huber"] = option("l2", "l1 = distance to the target, in its standard deviations; l2 ="
                                                " the square of it; huber = l2 / 2 up to 1, then l1")


@options
class DeviceOptions:
    """Device, precision, processes"""

    device: str = option("auto", "cpu, cuda or another accelerator that torch knows; auto = the accelerator if there is"
                         " one, else cpu", TOLERATED, resolved=True)
    precision: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto", "auto = bf16 if the hardware has it, else fp32 (no TF32)", TOLERATED, resolved=True)
    strategy: Literal["ddp", "exact", "fsdp", "dp", "dp-classic", "model-parallel"] = option(
        "ddp", "exact = the same bits on any number of processes; fsdp = each process keeps a part of the model; dp,"
        " dp-classic, model-parallel = several devices of one process (docs/strategies.md)", TOLERATED)
    devices_per_process: int | Auto = option(
        "auto", "devices of a process with --strategy dp, dp-classic and model-parallel; auto = the node's, shared out",
        OPERATIONAL, at_least=1, rare=True)
    find_unused_parameters: bool = option(
        False, "--strategy ddp: a step may leave parameters out, as a layer drop does; slower", OPERATIONAL, rare=True)
    compile: bool = option(False, "compile the model with torch.compile; slower on the CPU in bf16", TOLERATED)
    deterministic: bool = option(
        False, "deterministic algorithms, no autotuning; always on with --device cpu", TOLERATED, rare=True)
    cpu_kernels: Literal["on", "off"] = option(
        "on", "on the CPU, dropout, attention and the gradients of filters by faster kernels than torch's, and freed"
        " memory kept; off = torch's own", TOLERATED, rare=True)
    threads: int | Auto = option("auto", "CPU threads per process; auto = at the first start, cores / processes or"
                                 " $OMP_NUM_THREADS, the smaller; 1 with --strategy exact on the CPU", TOLERATED,
                                 at_least=1, resolved=True, rare=True)
    checkpoint_activations: bool = option(False, "keep only the inputs of blocks and compute the rest again in the"
                                          " backward pass: less memory, more time", TOLERATED, rare=True)


@options
class RecordOptions:
    """Records and checkpoints"""

    log_every: int = option(10, "optimizer steps between train records", OPERATIONAL, at_least=1)
    eval_every: int | Literal["epoch"] = option(
        "epoch", "optimizer steps between evaluations; epoch = at the end of each epoch", OPERATIONAL, at_least=1)
    save_every: Interval = option(Interval("1000"), "steps between checkpoints, or a duration (5min)", OPERATIONAL)
    keep: int = option(3, "how many of the newest checkpoints to keep, besides the best one; never fewer than two valid"
                       " ones", OPERATIONAL, at_least=1, rare=True)
    keep_every: int | Auto = option("auto", "also keep a checkpoint every N steps, to compute steps again from"
                                    " (docs/asking.md); auto = a twentieth of the run, at least 1000; 0 = none",
                                    OPERATIONAL, at_least=0, rare=True)
    best: str = option("auto", "metric of the evaluation that decides which model is best, such as macro_f1; auto ="
                       " top1, map (several labels) or loss", TOLERATED, changes_bits=False)


@options
class FaultOptions:
    """Fault tolerance: a time limit (exit code 76), wrong computation (71), non-finite gradients (80)"""

    step_timeout: float = option(
        100, "seconds to load a micro-batch, and to compute it and all that follows until the next one; three times as"
        " long for a start, a batch of an evaluation, a checkpoint (1 s more per 10 MB), or work of rank 0 alone",
        OPERATIONAL, at_least=1, at_most=MAX_TIMEOUT_S, rare=True)
    max_nonfinite: int = option(0, "optimizer steps that may have a non-finite gradient; they change nothing (one more:"
                                " exit code 80)", OPERATIONAL, at_least=0, rare=True)

    @property
    def section_timeout(self) -> float:
        """Seconds for what takes longer than a step: a start, a batch of an evaluation, a file."""
        return 3 * self.step_timeout
