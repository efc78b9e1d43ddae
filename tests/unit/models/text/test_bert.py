"""Encoders from scratch and from folders.

What is loaded, what is drawn anew, what is refused, and never a line of a folder's own code.
"""

import json
import os
import shutil
import subprocess
import sys
import weakref
from copy import deepcopy
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from data.texts.tokenizer import train_tokenizer
from models.tasks import load_task
from models.text.bert import (
    SIZES,
    EncoderSpec,
    build_encoder,
    config_of,
    outputs_of,
    save_model_folder,
    takes_types,
)
from models.text.hub import find_folder, resolve_encoder
from models.text.sparse_prediction import SparsePrediction
from utils.errors import Exit, UserError
from utils.rundir.lock import RunLock
from utils.rundir.run import Run
from utils.settings.text_options import TextModelOptions

ROOT = Path(__file__).parents[4]
TOKENIZER = train_tokenizer(["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs"],
                            120)
CLASSES = ("cat", "dog", "eel")
HEADS = {task: load_task(task).head for task in ("text-classification", "masked-lm")}
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
        "max_position_embeddings": 40}
FAMILIES = {
    # roberta counts positions from pad_token_id + 1
    "bert": BERT | {"pad_token_id": 0}, "roberta": BERT | {"pad_token_id": 1},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 40}}
IDS = range(len(CLASSES))


def configured(family: str, **options):
    return transformers.AutoConfig.for_model(
        family, vocab_size=len(TOKENIZER), id2label=dict(zip(IDS, CLASSES, strict=True)),
        label2id=dict(zip(CLASSES, IDS, strict=True)),
        **FAMILIES[family] | options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{(family, task): its model folder, as transformers writes it}; read only."""
    found = {}
    for family in FAMILIES:
        for task, head in HEADS.items():
            torch.manual_seed(1)
            found[family, task] = tmp_path_factory.mktemp(f"{family}-{task}")
            head.from_config(configured(family)).save_pretrained(found[family, task])
    return found


@pytest.fixture
def own(folders, tmp_path):
    """The BERT classifier in a folder that the test may spoil."""
    return Path(shutil.copytree(folders["bert", "text-classification"], tmp_path / "own"))


def built(model, task="text-classification", classes=CLASSES, pretrained=True, max_length=32, tokenizer=TOKENIZER):
    folder = None if str(model) in SIZES else str(model)
    spec = EncoderSpec(HEADS[task], tokenizer, max_length, () if task == "masked-lm" else classes)
    return build_encoder(spec, TextModelOptions(model=str(model), pretrained=pretrained), folder,
                         folder if pretrained else None)[0]


def refused(*arguments, **options) -> UserError:
    with pytest.raises(UserError) as error:
        built(*arguments, **options)
    return error.value


def others_than(folder: Path, model) -> set[str]:
    """Names of the model's tensors that are not those of the folder, bit for bit; of tied ones the first."""
    theirs, own = load_file(folder / "model.safetensors"), {name: weight.detach() for name,
                                                            weight in model.named_parameters()}
    return {name for name in own if name not in theirs or own[name].shape != theirs[name].shape
            or not torch.equal(own[name], theirs[name])}


def equal(one, other) -> bool:
    return all(torch.equal(weight, other.state_dict()[name]) for name, weight in one.state_dict().items())


def edit(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", SIZES)
def test_a_size_has_its_layers_and_width_and_heads_of_64(name):
    with torch.device("meta"):
        model = built(name, "masked-lm", pretrained=False)
    assert (len(model.bert.encoder.layer), model.bert.embeddings.word_embeddings.embedding_dim) == SIZES[name]
    assert model.config.hidden_size == 64 * model.config.num_attention_heads
    assert model.config.intermediate_size == 4 * SIZES[name][1]
    assert model.config.vocab_size == len(TOKENIZER) and model.config.max_position_embeddings == 512


def test_a_size_has_positions_for_any_length():
    assert built("bert-tiny", pretrained=False,
                 max_length=600)(torch.ones(1, 600, dtype=torch.int64)).logits.shape == (1, len(CLASSES))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", HEADS)
def test_a_folder_of_the_same_task_and_classes_is_loaded_whole(family, task, folders):
    assert others_than(folders[family, task], built(folders[family, task], task)) == set()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("classes", [CLASSES[:2], (*CLASSES, "emu"), ("cat", "dog", "emu")])
def test_other_classes_keep_the_encoder_and_get_a_new_head(family, classes, folders):
    model = built(folders[family, "text-classification"], classes=classes)
    head = {"bert": "classifier", "distilbert": "classifier", "roberta": "classifier.out_proj"}[family]
    assert others_than(folders[family, "text-classification"], model) - {f"{head}.bias"} == {f"{head}.weight"}
    assert model.get_submodule(head).out_features == len(classes) and tuple(model.config.id2label.values()) == classes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_masked_lm_becomes_the_encoder_of_a_classifier(family, folders):
    model = built(folders[family, "masked-lm"])
    new = others_than(folders[family, "masked-lm"], model)
    assert {name.removeprefix("bert.").split(".")[0] for name in new} <= {"pooler", "classifier", "pre_classifier"}
    # drawn, as transformers does
    assert 0.01 < max(weight.std() for name, weight in model.named_parameters() if name in new) < 0.03


@pytest.mark.parametrize("order", [sorted, lambda keys: sorted(keys, key=int)])
def test_a_folder_with_twelve_classes_keeps_its_head(order, own, tmp_path):
    """A folder with twelve classes keeps its head in whatever order they are written."""
    classes = [f"class {number}" for number in range(12)]
    model = built(own, classes=classes)
    (tmp_path / "twelve").mkdir()
    save_model_folder(model.state_dict(), model.config, {}, TOKENIZER, tmp_path / "twelve")
    names = json.loads((tmp_path / "twelve/config.json").read_text())["id2label"]
    edit(tmp_path / "twelve", id2label={number: names[number] for number in order(names)})
    assert others_than(tmp_path / "twelve", built(tmp_path / "twelve", classes=classes)) == set()


def test_a_model_made_of_another_one_does_not_keep_its_kind(own, tmp_path):
    """A classifier that began as a regression, or with several labels, is none of these."""
    for name, source, described in (("first", own, {"target_mean": [1.0], "target_std": [2.0], "multi_label": True}),
                                    ("second", tmp_path / "first", {"task": "text-classification"})):
        model = built(source, classes=CLASSES)
        (tmp_path / name).mkdir()
        save_model_folder(model.state_dict(), model.config, described, TOKENIZER, tmp_path / name)
    found = json.loads((tmp_path / "second" / "config.json").read_text())
    assert {"target_mean", "target_std", "multi_label"}.isdisjoint(found) and found["task"] == "text-classification"


@pytest.mark.parametrize(("model", "classes", "pretrained"), [
    ("bert-tiny", CLASSES, False), ("text-classification", CLASSES, False),
    ("text-classification", ("a", "b", "c"), True),
    ("text-classification", ("a", "b"), True), ("masked-lm", CLASSES, True)])
def test_initial_weights_are_a_function_of_torchs_seed(model, classes, pretrained, folders):
    def drawn(seed):
        torch.manual_seed(seed)
        return built(folders.get(("bert", model), model), classes=classes, pretrained=pretrained)

    assert equal(drawn(1), drawn(1)) and not torch.equal(drawn(1).classifier.weight, drawn(2).classifier.weight)


def test_without_pretrained_a_folder_lends_its_architecture_only(folders):
    folder = folders["bert", "text-classification"]
    model = built(folder, pretrained=False)
    assert set(model.state_dict()) == set(load_file(folder / "model.safetensors"))
    assert "bert.embeddings.word_embeddings.weight" in others_than(folder, model)


def test_pretrained_of_a_size_is_refused_with_a_way_out():
    message = str(refused("bert-tiny"))
    assert "--model bert-tiny is built from scratch" in message and "or name a model folder" in message


def test_weights_in_half_precision_are_loaded_in_float32(own):
    weights = {name: weight.half() for name, weight in load_file(own / "model.safetensors").items()}
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    edit(own, dtype="float16")
    model, fresh = built(own), built(own, pretrained=False)
    assert {weight.dtype for weight in (*model.parameters(), *fresh.parameters())} == {torch.float32}
    assert torch.equal(model.classifier.weight, weights["classifier.weight"].float())


@pytest.mark.parametrize("size", [90, 9000])
def test_a_tokenizer_of_another_size_is_64_with_both_numbers(size, own):
    edit(own, vocab_size=size)
    words = ["".join(chr(97 + i // 26 ** place % 26) for place in range(3)) for i in range(900)]
    error = refused(own, tokenizer=train_tokenizer(words, 400))
    assert error.code == Exit.USAGE and f"has {size} tokens and the tokenizer has 400" in str(error)


@pytest.mark.parametrize(("family", "limit"), [("bert", 40), ("distilbert", 40), ("roberta", 38)])
def test_max_length_beyond_the_positions_is_64_with_the_limit(family, limit, folders):
    folder = folders[family, "text-classification"]
    error = refused(folder, max_length=limit + 1)
    assert (error.code, str(error)) == (Exit.USAGE,
                                        f"--max-length {limit + 1}: --model {folder} takes at most {limit} tokens")
    ids = torch.full((1, limit), 7)
    assert built(folder, max_length=limit)(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.isfinite().all()


def test_positions_that_mpnet_too_counts_from_its_padding_are_not_offered(tmp_path):
    config = transformers.MPNetConfig(vocab_size=len(TOKENIZER), pad_token_id=1, **BERT)
    config.save_pretrained(tmp_path)
    assert "takes at most 38 tokens" in str(refused(tmp_path, pretrained=False, max_length=40))


@pytest.mark.parametrize("content", [
    None, "", "[]", "null", '{"task": "image-classification", "architecture": "resnet18"}',
    '{"model_type": "nonsense"}',
    '{"model_type": ["bert"]}', '{"model_type": "bert", "hidden_size": "large"}'])
def test_a_folder_without_a_config_is_66(content, own):
    """The message says what it needs."""
    (own / "config.json").unlink()
    if content is not None:
        (own / "config.json").write_text(content)
    error = refused(own)
    assert error.code == Exit.NO_INPUT and f"--model {own} " in str(error)
    assert "it needs a config.json with a model_type" in str(error)


@pytest.mark.parametrize("pretrained", [True, False])
@pytest.mark.parametrize("values", [
    {"hidden_size": -1}, {"hidden_size": 0}, {"num_attention_heads": 0}, {"num_attention_heads": 3},
    {"max_position_embeddings": -1}, {"hidden_act": "nonsense"}, {"id2label": 7}, {"id2label": ["a"]},
    {"id2label": {"a": "b"}}, {"dtype": "nonsense"}, {"attn_implementation": 7}, {"quantization_config": "nonsense"},
    {"pad_token_id": 10**6}, {"initializer_range": None}])
def test_a_config_with_impossible_values_is_66(values, pretrained, own):
    edit(own, **values)
    error = refused(own, pretrained=pretrained)
    assert error.code == Exit.NO_INPUT and f"--model {own}" in str(error) and "config.json" in str(error)


@pytest.mark.parametrize("values", [
    {"return_dict": False}, {"id2label": {"0": "a", "7": "b"}}, {"id2label": {}}, {"label2id": None}, {"num_labels": 7},
    {"problem_type": None}, {"architectures": None}, {"pad_token_id": None}])
def test_a_config_with_odd_values_gives_logits_for_the_classes(values, own):
    edit(own, **values)
    assert built(own).eval()(input_ids=torch.tensor([[2, 7, 3]])).logits.shape == (1, len(CLASSES))


def test_a_folder_with_nothing_of_a_model_is_66(world, run, tmp_path):
    with pytest.raises(UserError, match=r"is not a model folder: it needs a config\.json with a model_type") as error:
        find_folder(str(tmp_path), run, world)
    assert error.value.code == Exit.NO_INPUT


@pytest.mark.parametrize("content", [None, b"", b"<html>404</html>", "half"])  # all fail today
def test_weights_that_are_missing_or_damaged_are_66_and_said_once(content, own):
    file = own / "model.safetensors"
    half = file.read_bytes()[:file.stat().st_size // 2]
    file.unlink()
    if content is not None:
        file.write_bytes(half if content == "half" else content)
    error = refused(own)
    assert error.code == Exit.NO_INPUT and str(error).startswith(f"--model {own} has no weights that can be read")


@pytest.mark.parametrize("weight", [None, torch.zeros(3, 3)])  # both fail today: the message blames the type
def test_weights_of_an_encoder_that_do_not_fit_are_64_and_one_is_named(weight, own):
    name = "bert.encoder.layer.1.output.dense.weight"
    weights = load_file(own / "model.safetensors") | {name: weight}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, own / "model.safetensors")
    error = refused(own)
    assert error.code == Exit.USAGE and str(error).startswith(f"the weights in {own} do not fit its config.json: 1"
                                                              " tensor missing")
    assert name in str(error)


@pytest.mark.parametrize(("config", "task"), [
    (transformers.GPT2Config(n_layer=1), "masked-lm"), (transformers.WhisperConfig(), "text-classification"),
    (transformers.ViTConfig(), "text-classification")])
def test_a_type_without_the_wanted_head_is_64_and_says_the_task(config, task, tmp_path):
    if hasattr(config, "vocab_size"):
        config.vocab_size = len(TOKENIZER)
    config.save_pretrained(tmp_path)
    error = refused(tmp_path, task, pretrained=False)
    assert error.code == Exit.USAGE and f"--model {tmp_path} does not suit this task" in str(error)


@pytest.mark.parametrize("model_type", ["bert", "own"])
def test_a_folders_own_code_is_never_run(model_type, own, tmp_path):
    edit(own, model_type=model_type,
         auto_map={"AutoConfig": "code.Config", "AutoModelForSequenceClassification": "code.Model"})
    code = "from transformers import BertConfig as Config, BertForSequenceClassification as Model"
    (own / "code.py").write_text(f"{code}\nopen({str(tmp_path / 'was-run')!r}, 'w')\n")
    if model_type == "bert":  # the library's own class does as well
        assert others_than(own, built(own)) == set()
    else:
        assert refused(own).code == Exit.NO_INPUT
    assert not (tmp_path / "was-run").exists()


@pytest.mark.long
@pytest.mark.parametrize("name, parts", [
    ("bert-smal", ["did you mean bert-small? It is trained from scratch", "hf download bert-smal --local-dir DIR",
                   "or give --model one of these names, to train from scratch"]),
    ("bert-base-uncased", ["google-bert/bert-base-uncased, its full name, cannot be fetched from the hub",
                           "hf download google-bert/bert-base-uncased --local-dir DIR",
                           "to train from scratch (another model, with random weights)"])])
def test_a_name_without_network_is_66_with_three_ways_out(tmp_path, name, parts):
    program = ("import sys\nfrom pathlib import Path\nfrom models.text.hub import find_folder\n"
               "from utils.distributed.world import World\nfrom utils.errors import exit_after\n"
               "from utils.rundir.lock import RunLock\nfrom utils.rundir.run import Run\n"
               "run = Run(Path('run'), {}, {'start': 1, 'cores_per_process': 1}, print, RunLock())\n"
               "with World.from_env('cpu') as world: exit_after(lambda: find_folder(sys.argv[1], run, world))")
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program, name], cwd=ROOT, env=environment, capture_output=True,
                          text=True)
    parts = [*parts, f"copy the hub's cache to {tmp_path}/hub"]
    assert done.returncode == Exit.NO_INPUT and [part for part in parts if part not in done.stderr] == []
    assert "Traceback" not in done.stderr and ("did you mean" in done.stderr) == (name == "bert-smal")


def new_run(folder: Path) -> Run:
    (folder / "run").mkdir()
    return Run(folder / "run", {}, {"start": 1, "cores_per_process": 1}, print, RunLock())


@pytest.fixture
def run(tmp_path):
    """A new run."""
    return new_run(tmp_path)


@pytest.fixture
def hub(folders, tmp_path, monkeypatch):
    """The hub's cache, out of reach of the hub itself; hub(commit): the newest commit of org/name."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    root = tmp_path / "hub/models--org--name"

    def publish(commit):
        shutil.copytree(folders["bert", "masked-lm"], root / "snapshots" / commit)
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs/main").write_text(commit)
        return root

    return publish


def test_a_name_of_the_hub_is_one_commit_for_the_whole_run(hub, run, world, tmp_path):
    found, other = [], tmp_path / "other"
    other.mkdir()
    for commit in ("a" * 40, "b" * 40):
        root = hub(commit)
        found.append(find_folder("org/name", run, world))
    assert found == [f"{root}/snapshots/{'a' * 40}"] * 2 and run.resolved.hub == {"org/name": "a" * 40}
    assert find_folder("org/name", new_run(other), world) == f"{root}/snapshots/{'b' * 40}"


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_cached_commit_needs_no_hub_whatever_its_client_raises(is_cached, hub, run, world, monkeypatch):
    """huggingface_hub 1 asks the hub for a commit that is in the cache, by another client than version 2."""
    def download(name, local_files_only, **options):
        if options["revision"] and not local_files_only:
            raise type("ConnectError", (Exception,), {})("Name or service not known")
        return real(name, local_files_only=local_files_only, **options)

    real = huggingface_hub.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    if is_cached:
        root = hub("a" * 40)
        assert find_folder("org/name", run, world) == f"{root}/snapshots/{'a' * 40}"
    else:
        run.keep(hub={"org/name": "a" * 40})
        with pytest.raises(UserError, match=r"cannot be fetched from the hub \(Name or service not known\)") as error:
            find_folder("org/name", run, world)
        assert error.value.code == Exit.NO_INPUT


def test_a_commit_that_is_gone_is_66_with_the_ways_out(hub, run, world):
    run.keep(hub={"org/name": "a" * 40})
    cache = hub("b" * 40).parent
    with pytest.raises(UserError, match=f"org/name at commit {'a' * 40}, .* to {cache}; or .* --fresh") as error:
        find_folder("org/name", run, world)
    assert error.value.code == Exit.NO_INPUT


def test_a_run_keeps_the_config_of_its_encoder(hub, run, world):
    root = hub("a" * 40)
    first = resolve_encoder("org/name", run, world)
    config = (root / "snapshots" / ("a" * 40) / "config.json").read_bytes()
    shutil.rmtree(root)
    assert resolve_encoder("org/name", run, world) == first == str(run.path / "encoder")
    assert (run.path / "encoder/config.json").read_bytes() == config


def test_a_config_of_an_encoder_that_changed_is_78(hub, run, world):
    hub("a" * 40)
    edit(Path(resolve_encoder("org/name", run, world)), hidden_dropout_prob=0.5)
    with pytest.raises(UserError, match=f"the encoder's config in {run.path}/encoder changed") as error:
        resolve_encoder("org/name", run, world)
    assert error.value.code == Exit.OTHER_RUN


@pytest.mark.parametrize("family", FAMILIES)
def test_sparse_prediction_gives_logits_and_gradients_of_the_full_model(family, folders):
    torch.manual_seed(0)
    ids, positions = torch.randint(5, len(TOKENIZER), (3, 16)), torch.tensor([1, 7, 20, 40])
    inputs, targets = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.randint(5, len(TOKENIZER), (4,))
    models = [built(folders[family, "masked-lm"], "masked-lm").eval() for _ in range(2)]
    SparsePrediction.add_to(models[0])
    rows = []
    models[0].get_output_embeddings().register_forward_pre_hook(lambda layer, args: rows.append(args[0].shape[:-1]))
    sparse, full = models[0](**inputs, positions=positions).logits, models[1](**inputs).logits.flatten(0, 1)[positions]
    assert rows == [(4,)]  # the output layer saw the predicted tokens alone
    for logits in (sparse, full):
        torch.nn.functional.cross_entropy(logits, targets).backward()
    torch.testing.assert_close(sparse, full, rtol=0, atol=1e-6)  # sums over other shapes
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)


def test_sparse_prediction_suits_a_model_that_computes_its_output_itself():
    config = transformers.MobileBertConfig(vocab_size=90, hidden_size=16, num_hidden_layers=1, intermediate_size=32,
                                           embedding_size=8,
                                           intra_bottleneck_size=16, num_attention_heads=2)
    model, ids, positions = transformers.AutoModelForMaskedLM.from_config(config).eval(), torch.ones(2, 8,
        dtype=torch.int64), [1, 9]
    full = model(ids).logits.flatten(0, 1)[positions]
    SparsePrediction.add_to(model)
    assert torch.equal(model(input_ids=ids, positions=torch.tensor(positions)).logits, full)


def test_a_model_and_its_copy_give_all_logits_again_without_positions(folders):
    close = partial(torch.testing.assert_close, rtol=0, atol=1e-6)
    model, ids = built(folders["bert", "masked-lm"], "masked-lm").eval(), torch.randint(5, len(TOKENIZER), (3, 16))
    full = model(input_ids=ids).logits
    SparsePrediction.add_to(model)
    copy = deepcopy(model)
    for each, positions in (model, [1, 7]), (copy, [2, 8, 40]), (model, [1, 7]):
        close(each(input_ids=ids, positions=torch.tensor(positions)).logits, full.flatten(0, 1)[positions])
    for each in model, copy:
        close(each(input_ids=ids).logits, full)


def test_sparse_prediction_keeps_nothing_of_a_batch(folders):
    """A copy of the model, as of --strategy dp, would copy it, too."""
    model = built(folders["bert", "masked-lm"], "masked-lm").eval()
    SparsePrediction.add_to(model)
    model(input_ids=torch.randint(5, len(TOKENIZER), (3, 16)), positions=(positions := torch.tensor([1, 7])))
    alive = weakref.ref(positions)
    del positions
    assert alive() is None


# --- --eval-only of weights as they are: their own head counts


def own_head(folder, classes=CLASSES):
    spec = EncoderSpec(HEADS["text-classification"], TOKENIZER, 32, classes, own_head=True)
    return build_encoder(spec, TextModelOptions(model=str(folder), pretrained=True), str(folder), str(folder))[0]


def test_a_model_evaluated_as_it_is_keeps_its_head(own):
    assert others_than(own, own_head(own)) == set()


def test_classes_in_another_order_take_the_outputs_that_are_meant(own):
    inputs = {"input_ids": torch.tensor([[2, 7, 8, 3]])}
    plain, turned = own_head(own).eval(), own_head(own, tuple(name.upper() for name in reversed(CLASSES))).eval()
    assert torch.equal(turned(**inputs).logits, plain(**inputs).logits.flip(1))


@pytest.mark.parametrize("classes", [("other",), ("a", "b"), tuple(f"{name}x" for name in CLASSES)])
def test_other_classes_than_the_models_are_65(own, classes):
    with pytest.raises(UserError, match="--eval-only: the model's classes are") as error:
        own_head(own, classes)
    assert error.value.code == Exit.BAD_DATA


def test_a_model_without_a_head_for_the_task_is_65(folders):
    with pytest.raises(UserError, match="have no head for this task") as error:
        own_head(folders["bert", "masked-lm"])
    assert error.value.code == Exit.BAD_DATA


@pytest.mark.parametrize("labels, classes, outputs", [
    (["LABEL_0", "LABEL_1"], ["cat", "dog"], [0, 1]), (["cat", "dog"], ["0", "1"], [0, 1]),
    (["Positive", "negative"], ["negative", "positive"], [1, 0])])
def test_labels_are_matched_as_words_or_by_their_order(labels, classes, outputs):
    described = transformers.BertConfig(id2label=dict(enumerate(labels)))
    assert outputs_of(described, classes, own_head=True) == outputs


@pytest.mark.parametrize("name, expected", [("funnel", True), ("gpt2", True), ("distilbert", False), ("bert", True)])
def test_whether_an_encoder_takes_token_types_is_known_of_every_kind(name, expected, tmp_path):
    """Funnel's config belongs to two models."""
    transformers.AutoConfig.for_model(name).save_pretrained(tmp_path)
    assert takes_types(config_of(name, str(tmp_path))) == expected
