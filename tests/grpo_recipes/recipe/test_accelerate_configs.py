"""Every shipped accelerate configuration, read by accelerate."""

import socket
from argparse import Namespace
from pathlib import Path

import pytest
import trl
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin, patch_environment
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

from grpo_recipes.checks.checks import Machine
from grpo_recipes.recipe.recipe import find_file

FOLDER = find_file("accelerate_configs", "cpu").parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))

ACCUMULATION = "deepspeed_config.gradient_accumulation_steps"
OPTIMIZER, PARAMETERS = (f"deepspeed_config.offload_{part}_device" for part in ("optimizer", "param"))
# Keys in which a configuration differs from TRL's, as its head states. Keys that TRL sets to their defaults do not
# count.
DIFFERENCES = {
    ("zero2", "zero2"): {ACCUMULATION},
    ("zero2_offload", "zero2"): {ACCUMULATION, OPTIMIZER, "num_processes"},
    ("zero3", "zero3"): {ACCUMULATION},
    ("zero3_offload", "zero3"): {ACCUMULATION, OPTIMIZER, PARAMETERS},
    ("zero3_multinode", "zero3"): {
        *(ACCUMULATION, "num_machines", "num_processes", "main_process_ip", "main_process_port")
    },
    ("zero3_cpu", "zero3"): {ACCUMULATION, "num_processes", "use_cpu", "mixed_precision"},
    ("fsdp2", "fsdp2"): set(),
}
DEFAULTS = {"debug": False, "downcast_bf16": "no", "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False}


def environment(name: str) -> dict[str, str]:
    """Return the environment that `accelerate launch --config_file ...` sets for each rank."""
    with socket.socket() as free:  # accelerate refuses a port that something else on this machine listens on
        free.bind(("", 0))
        port = free.getsockname()[1]
    parsed = arguments(name, "--main_process_port", str(port))
    return prepare_deepspeed_cmd_env(parsed)[1] if parsed.use_deepspeed else prepare_multi_gpu_env(parsed)


def arguments(name: str, *more: str) -> Namespace:
    """Return the arguments of a launch, completed from the file as `accelerate launch` does (`launch_command`)."""
    parsed = launch_command_parser().parse_args(["--config_file", str(FOLDER / f"{name}.yaml"), *more, "train.py"])
    parsed, defaults, _ = _validate_launch_command(parsed)
    parsed.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    return parsed


def flat(config: dict, prefix: str = "") -> dict:
    entries: dict = {}
    for key, value in config.items():
        entries |= flat(value, f"{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return entries


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_loads_every_configuration(name: str) -> None:
    path = FOLDER / f"{name}.yaml"
    config = load_config_from_file(str(path))  # raises for a key that it does not know
    machine = Machine.described(path)
    assert config.num_processes == machine.num_processes
    assert config.use_cpu is not machine.bf16
    assert config.mixed_precision == ("bf16" if machine.bf16 else "no")
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("name", "stage", "offload", "offload_param"),
    [
        ("zero2", 2, "none", "none"),
        ("zero2_offload", 2, "cpu", "none"),
        ("zero3", 3, "none", "none"),
        ("zero3_offload", 3, "cpu", "cpu"),
        ("zero3_multinode", 3, "none", "none"),
        ("zero3_cpu", 3, "none", "none"),
    ],
)
def test_deepspeed_receives_the_stage_and_the_accumulation_of_the_recipe(
    name: str, stage: int, offload: str, offload_param: str
) -> None:
    with patch_environment(**environment(name)):
        plugin = DeepSpeedPlugin()
        config = plugin.deepspeed_config
    assert plugin.zero_stage == stage
    assert config["gradient_accumulation_steps"] == "auto"
    assert config["zero_optimization"]["offload_optimizer"]["device"] == offload
    assert config["zero_optimization"]["offload_param"]["device"] == offload_param
    # Only ZeRO-3 needs to shard while loading, and to gather an ordinary model for every checkpoint.
    assert plugin.zero3_init_flag == (stage == 3)
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] == (stage == 3)


def test_fsdp2_is_version_2_and_shards_parameters() -> None:
    with patch_environment(**environment("fsdp2")):
        plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True


def test_two_nodes_of_eight_use_one_address() -> None:
    parsed = arguments("zero3_multinode", "--machine_rank", "1", "--main_process_ip", "10.1.1.1")
    prepare_deepspeed_cmd_env(parsed)
    assert [str(value) for value in (parsed.nproc_per_node, parsed.nnodes, parsed.node_rank)] == ["8", "2", "1"]
    assert parsed.rdzv_endpoint == "10.1.1.1:29500"
    assert parsed.rdzv_backend == "static"


@pytest.mark.parametrize(("ours", "theirs"), DIFFERENCES)
def test_a_configuration_differs_from_trls_only_as_its_head_states(ours: str, theirs: str) -> None:
    shipped = Path(trl.__file__).parent / "accelerate_configs" / f"{theirs}.yaml"
    one, other = (flat(yaml.safe_load(path.read_text())) for path in (FOLDER / f"{ours}.yaml", shipped))
    keys = {key for key in {**one, **other} if one.get(key, DEFAULTS.get(key)) != other.get(key, DEFAULTS.get(key))}
    assert keys == DIFFERENCES[ours, theirs]
