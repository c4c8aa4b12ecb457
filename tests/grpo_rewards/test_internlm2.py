"""InternLM2 reward checkpoints: recorded scores, an independent forward pass, conversion, and damaged files."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaForSequenceClassification

from grpo_rewards import cli, internlm2
from grpo_rewards.internlm2 import convert, llama_config, load
from tests.support.errors import refused
from tests.support.tiny import save_internlm2, save_reward_model

CONVERSATIONS = [
    [{"role": "user", "content": "Hello! What's your name?"}, {"role": "assistant", "content": "A reward model."}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "  12 * 3 =\n\t"},
        {"role": "assistant", "content": "<answer>36</answer>"},
        {"role": "user", "content": "梯度 😀 é\u200b?"},
        {"role": "assistant", "content": "It is the derivative of the loss with respect to the weights. " * 4},
    ],
]
SHAPES = [
    {"seed": 0, "heads": 4, "kv_heads": 2, "hidden": 64, "layers": 2},
    {"seed": 1, "heads": 4, "kv_heads": 4, "hidden": 32, "layers": 1},
    {"seed": 2, "heads": 8, "kv_heads": 1, "hidden": 64, "layers": 3},
]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Return checkpoints with several, one and all query heads per key-value head."""
    return [save_internlm2(tmp_path_factory.mktemp("made"), **shape) for shape in SHAPES]


@pytest.fixture
def tiny(tmp_path):
    """Return a new one-layer checkpoint that a test may damage."""
    return save_internlm2(tmp_path / "internlm2", seed=5, heads=4, kv_heads=2, hidden=16, layers=1)


def conversation_ids(tokenizer, conversations):
    return [tokenizer.apply_chat_template(messages)["input_ids"] for messages in conversations]


def internlm2_score(folder, ids):
    """Return one score in float64, computed from the architecture's description and the checkpoint's tensors alone."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    heads, kv_heads, eps = config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]
    size, length, queries = config["hidden_size"] // heads, len(ids), heads // kv_heads
    position = torch.arange(length, dtype=torch.float64)[:, None]
    angle = position / config["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)

    def normed(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[name]

    def rotated(x):  # (length, size): component i turns with component i + size/2
        a, b = x[:, : size // 2], x[:, size // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=1)

    x = weights["model.tok_embeddings.weight"][ids]
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}."
        y = normed(x, layer + "attention_norm.weight")
        blocks = (y @ weights[layer + "attention.wqkv.weight"].T).split(size, dim=1)
        heads_out = []
        for head in range(heads):
            first = head // queries * (queries + 2)  # the kv group: its queries, then its key, then its value
            q, k, v = blocks[first + head % queries], blocks[first + queries], blocks[first + queries + 1]
            logits = rotated(q) @ rotated(k).T / math.sqrt(size)
            allowed = torch.ones(length, length).tril().bool()
            heads_out.append(logits.masked_fill(~allowed, -math.inf).softmax(-1) @ v)
        x = x + torch.cat(heads_out, dim=1) @ weights[layer + "attention.wo.weight"].T
        y = normed(x, layer + "ffn_norm.weight")
        gate, up = (y @ weights[f"{layer}feed_forward.{name}.weight"].T for name in ("w1", "w3"))
        x = x + (gate * gate.sigmoid() * up) @ weights[layer + "feed_forward.w2.weight"].T
    return (normed(x, "model.norm.weight")[-1] @ weights["v_head.weight"][0]).item()


def test_an_independent_forward_pass_gives_the_same_scores(made):
    for folder in made:
        model, tokenizer = load(folder)
        for ids in conversation_ids(tokenizer, CONVERSATIONS):
            with torch.no_grad():
                score = model(input_ids=torch.tensor([ids])).logits[0, 0].item()
            assert score == pytest.approx(internlm2_score(folder, ids), abs=1e-5)


def test_every_tensor_of_the_published_layout_is_mapped(internlm2_dir):
    config = json.loads((internlm2_dir / "config_1_8b.json").read_text())
    index = json.loads((internlm2_dir / "model.safetensors.index_1_8b.json").read_text())
    with torch.device("meta"):
        network = LlamaForSequenceClassification(llama_config(config))
    assert internlm2._sources(network).keys() == index["weight_map"].keys()
    assert len(network.state_dict()) == 219
    # Two bytes per parameter in float16.
    assert 2 * sum(p.numel() for p in network.parameters()) == index["metadata"]["total_size"]
    assert network.config.dtype == torch.float16


def test_rotary_scaling_is_mapped_or_refused(tiny):
    config = json.loads((tiny / "config.json").read_text())
    mapped = llama_config({**config, "rope_scaling": {"type": "dynamic", "factor": 2.0}}).rope_parameters
    assert (mapped["rope_type"], mapped["factor"], mapped["rope_theta"]) == ("dynamic", 2.0, 1000000)
    with refused("config.json: `rope_scaling`", "'yarn'"):
        llama_config({**config, "rope_scaling": {"type": "yarn", "factor": 2.0}})


def test_every_dtype_keeps_the_rotary_frequencies_in_float32(tiny):
    reference = load(tiny)[0].model.rotary_emb.inv_freq
    expected = 1e6 ** -(torch.arange(0, 4, 2) / 4)
    assert torch.allclose(reference, expected)
    for dtype in ("bfloat16", "float16"):
        model, _ = load(tiny, dtype=dtype)
        assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
        assert torch.equal(model.model.rotary_emb.inv_freq, reference)
        assert not model.training
        assert not any(p.requires_grad for p in model.parameters())


def shard(folder, index_name="model.safetensors.index.json"):
    """Split the weights over two files with an index, as the hub does."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: weights[name] for name in members}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, members in parts.items() for name in members}
    (folder / index_name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_give_the_same_model(tiny):
    single = load(tiny)[0].state_dict()
    shard(tiny)
    parts = load(tiny)[0].state_dict()
    assert single.keys() == parts.keys()
    assert all(torch.equal(single[name], parts[name]) for name in single)
    (tiny / "model-00002-of-00002.safetensors").unlink()
    with refused(tiny, "model-00002-of-00002"):
        load(tiny)
    maps = ("[]", "3", "{}", '{"a": 3}', '{"a": [1]}', '{"a": "../b.safetensors"}', '{"a": "b/c"}')
    for text in ("{", "{}", "[]", *(f'{{"weight_map": {one}}}' for one in maps)):
        (tiny / "model.safetensors.index.json").write_text(text)
        with refused(tiny / "model.safetensors.index.json"):
            load(tiny)


@pytest.mark.parametrize(
    ("name", "tensor", "figures"),
    [
        ("v_head.weight", None, ["v_head.weight"]), ("extra", torch.zeros(1), ["extra"]),
        ("model.layers.0.attention.wqkv.weight", torch.zeros(8, 16), ["wqkv.weight", "(8, 16)", "(32, 16)"]),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_named(tiny, name, tensor, figures):
    weights = {**load_file(tiny / "model.safetensors"), name: tensor}
    save_file({key: value for key, value in weights.items() if value is not None}, tiny / "model.safetensors")
    with refused("the checkpoint", *figures):
        load(tiny)


def test_broken_files_are_named(tiny, tmp_path):
    (tiny / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with refused(tiny / "model.safetensors"):
        load(tiny)
    (tiny / "model.safetensors").unlink()
    with refused(tiny, "model.safetensors"):
        load(tiny)
    (tiny / "config.json").write_text("{")
    with refused(tiny / "config.json"):
        load(tiny)
    with refused(tmp_path / "absent"):
        load(tmp_path / "absent")


def test_a_language_model_is_refused(tiny):
    config = json.loads((tiny / "config.json").read_text())
    config["architectures"] = ["InternLM2ForCausalLM"]
    (tiny / "config.json").write_text(json.dumps(config))
    with refused("config.json", "InternLM2ForCausalLM", "InternLM2ForRewardModel"):
        load(tiny)
    native = save_reward_model(tiny.parent / "native")
    with refused("config.json", "InternLM2"):
        convert(native, tiny.parent / "out")


def test_missing_tokenizer_files_and_packages_are_named(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with refused(tiny / "tokenizer.model", "sentencepiece", "grpo-rewards[models]"):
        load(tiny)
    (tiny / "tokenizer.model").unlink()
    with refused(tiny, "tokenizer.json", "tokenizer.model"):
        load(tiny)


def test_pickled_weights_need_the_flag(tiny, tmp_path):
    expected = load(tiny)[0].state_dict()
    torch.save(load_file(tiny / "model.safetensors"), tiny / "pytorch_model.bin")
    (tiny / "model.safetensors").unlink()
    with refused(tiny, "--allow_pickle"):
        convert(tiny, tmp_path / "native")
    assert not (tmp_path / "native").exists()
    native = convert(tiny, tmp_path / "new" / "folders" / "native", allow_pickle=True)
    converted = load_file(native / "model.safetensors")
    assert all(torch.equal(expected[name], converted[name]) for name in expected)


def test_pickled_shards_may_have_any_name_and_come_from_a_gpu(tiny, monkeypatch):
    expected, weights = load(tiny)[0].state_dict(), load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").unlink()
    names = {name: ("zeroth.th", "first.bin")[place % 2] for place, name in enumerate(weights)}
    monkeypatch.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")
    for file in set(names.values()):
        torch.save({name: weights[name] for name in weights if names[name] == file}, tiny / file)
    (tiny / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    found = load(tiny, allow_pickle=True)[0].state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_weights_go_to_the_device_that_is_asked_for(tiny):
    model, _ = load(tiny, device="meta")
    assert {value.device.type for value in (*model.parameters(), *model.buffers())} == {"meta"}


FILES_ON_THE_HUB = [
    "config.json", "generation_config.json", "modeling_internlm2.py", "tokenization_internlm2.py", "tokenizer.model",
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "model-00001-of-00002.safetensors",
    "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "training_args.bin",
    "README.md", "onnx/config.json", "old/x.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_only_files_that_are_read_are_downloaded(allow_pickle, tmp_path, monkeypatch):
    downloaded = []

    def snapshot_download(name, *, revision, **patterns):
        downloaded.extend([name, revision, *filter_repo_objects(FILES_ON_THE_HUB, **patterns)])
        return str(tmp_path)

    monkeypatch.setattr(internlm2, "snapshot_download", snapshot_download)
    assert internlm2.checkpoint_folder("a/b", "v2", allow_pickle=allow_pickle) == tmp_path
    never = {"modeling_internlm2.py", "tokenization_internlm2.py", "training_args.bin", "README.md", "onnx/config.json",
             "old/x.safetensors"}  # fmt: skip
    pickled = set() if allow_pickle else {"pytorch_model.bin", "pytorch_model-00001-of-00002.bin"}
    assert downloaded == ["a/b", "v2", *(name for name in FILES_ON_THE_HUB if name not in never | pickled)]


class Malicious:
    def __reduce__(self):
        return (print, ("code ran",))


def test_code_inside_a_pickle_is_not_run(tiny, tmp_path, capsys):
    torch.save({"v_head.weight": Malicious()}, tiny / "pytorch_model.bin")
    (tiny / "model.safetensors").unlink()
    with refused(tiny / "pytorch_model.bin"):
        convert(tiny, tmp_path / "native", allow_pickle=True)
    assert "code ran" not in capsys.readouterr().out


def test_a_converted_folder_needs_transformers_only(made, tmp_path, monkeypatch):
    folder = made[0]
    expected_ids = conversation_ids(internlm2.load_tokenizer(folder), CONVERSATIONS)
    expected_scores = [internlm2_score(folder, ids) for ids in expected_ids]
    native = convert(folder, tmp_path / "native")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]
    assert len({path.stat().st_mode for path in native.iterdir()}) == 1, "weights as readable as the configuration"
    assert "auto_map" not in (native / "tokenizer_config.json").read_text() + (native / "config.json").read_text()
    for package in ("sentencepiece", "google.protobuf"):
        monkeypatch.setitem(sys.modules, package, None)
    model, report = AutoModelForSequenceClassification.from_pretrained(native, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(native)
    assert not any(report.values())
    assert conversation_ids(tokenizer, CONVERSATIONS) == expected_ids
    padded = {"padding": True, "padding_side": "right", "return_dict": True, "return_tensors": "pt"}
    batch = tokenizer.apply_chat_template(CONVERSATIONS, **padded)
    with torch.no_grad():
        scores = model(**batch).logits[:, 0].tolist()
    assert scores == pytest.approx(expected_scores, abs=2e-5)
    with refused(native):
        convert(folder, native)


def test_the_command_converts_or_prints_one_sentence(tiny, tmp_path, capsys):
    assert cli.main(["convert-internlm2", str(tiny), str(tmp_path / "native")]) == 0
    assert torch.equal(
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "native").score.weight, load(tiny)[0].score.weight
    )
    capsys.readouterr()
    (tmp_path / "file").write_text("")
    for source, target in ((tiny, "native"), (tmp_path / "native", "again"), (tiny, "file/below")):
        assert cli.main(["convert-internlm2", str(source), str(tmp_path / target)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1


def test_a_hub_id_loads_from_the_cache_with_the_network_off(tiny, tmp_path, monkeypatch):
    cached = tmp_path / "hub" / "models--internlm--internlm2-1_8b-reward"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    shutil.copytree(tiny, cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model, _ = load("internlm/internlm2-1_8b-reward")
    assert torch.equal(model.score.weight, load(tiny)[0].score.weight)
    with refused("internlm/internlm2-7b-reward"):
        load("internlm/internlm2-7b-reward")


MEMORY_PROBE = """
import sys
from pathlib import Path
from grpo_rewards import internlm2

def mib(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) / 1024

internlm2.load_tokenizer(Path(sys.argv[1]))
Path("/proc/self/clear_refs").write_text("5")  # reset the peak
before = mib("VmRSS")
model, _ = internlm2.load(sys.argv[1])
size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
print((mib("VmHWM") - before) / size)
"""


@pytest.mark.nightly
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_loading_never_keeps_two_copies(tmp_path):
    save_internlm2(tmp_path, seed=0, heads=8, kv_heads=4, hidden=256, layers=12, vocabulary=50000)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    probe = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, str(tmp_path)], capture_output=True, text=True, check=True, env=environment
    )
    # One model and its largest tensor, the embedding, which is 0.6 of this model. Two copies would give 2.
    assert float(probe.stdout) < 1.8


def test_nothing_in_the_project_asks_for_remote_code():
    root = Path(__file__).parents[2]
    folders = ("grpo_recipes", "rewards", "recipes", "benchmarks", "docs")
    files = [
        path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".py", ".yaml", ".md")
    ]
    assert len(files) > 20
    asking = re.compile(r"trust_remote_code[\"']?\s*[=:]\s*true", re.IGNORECASE)
    assert not [path for path in files if asking.search(path.read_text(encoding="utf-8"))]


def test_keys_that_a_checkpoint_leaves_out_have_the_values_of_its_code(tiny):
    """The defaults are those of `configuration_internlm2.py`, and of the reward model's remote code."""
    config = json.loads((tiny / "config.json").read_text())
    defaults = {"hidden_act": "silu", "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2,
                "pad_token_id": 2, "reward_token_id": 92527}  # fmt: skip
    renamed = ("num_key_value_heads", "bias", "rope_theta", "rope_scaling")
    made = internlm2.llama_config({key: config[key] for key in config if key not in {*defaults, *renamed}})
    assert {key: getattr(made, key) for key in defaults} == defaults
    assert made.num_key_value_heads == made.num_attention_heads
    assert (made.attention_bias, made.mlp_bias, made.num_labels, made.tie_word_embeddings) == (False, False, 1, False)
    assert (made.rope_parameters["rope_type"], made.rope_parameters["rope_theta"]) == ("default", 10000)
    given = {"num_key_value_heads": 1, "hidden_act": "gelu", "initializer_range": 0.5, "bos_token_id": 3,
             "eos_token_id": 4, "pad_token_id": 5, "reward_token_id": 6}  # fmt: skip
    scaled = {"bias": True, "rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    made = internlm2.llama_config({**config, **given, **scaled})
    assert {key: getattr(made, key) for key in given} == given
    assert made.attention_bias
    assert made.rope_parameters == {"rope_type": "linear", "rope_theta": 7.0, "factor": 2.0}
    untyped = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")}
    for key, dtype in (("torch_dtype", "float16"), ("dtype", "bfloat16")):
        assert internlm2.llama_config({**untyped, key: dtype}).dtype == getattr(torch, dtype)
