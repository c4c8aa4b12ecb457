"""Every adapter kind of the installed PEFT: the layout it is trained in, its gradient against TRL's, its reference.

    make models                                   # all of them, after the models: writes docs/adapter-layouts.md
    python -m tests.tools.adapters LILY SHADOW    # some of them, printed

The exit code is 1 if one is wrong without a word. A kind is `refused` where our trainer says in one sentence why not,
and `n/a` where TRL's own trainer does not train it.
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import trl
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation.rows import Rows
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.reference import reference_in
from grpo_rewards.errors import UserError, one_line
from tests.support.recorded import (
    EOS,
    MAX_COMPLETION_LENGTH,
    Recording,
    largest_gap,
    model,
    recorded_reward,
    tokenizer,
)
from tests.support.trainers import make_trainer
from tests.tools.models import renew

GRADIENT_TOLERANCE = 1e-4
REFERENCE_TOLERANCE, KASA_TOLERANCE = 1e-5, 3e-5
"""Largest changes of a log-probability that are rounding. PEFT decomposes KaSA's base weights again, in float32,
whenever an adapter is added, as the reference is."""

INVOCATION = 39
"""The token from which an aLoRA adapter acts; it stands in every prompt."""

LINEAR = ["q_proj", "v_proj", "down_proj"]

Beside = Callable[[PeftModel], None]


@dataclass(frozen=True)
class Kind:
    """An adapter: how PEFT is asked for it, and what is done beside it."""

    config: type[PeftConfig]
    arguments: dict[str, Any] = field(default_factory=dict)
    targets: bool = True
    beside: Beside | None = None
    mixes: int = 0
    """Number of saved LoRA adapters that the kind mixes."""

    @property
    def tolerance(self) -> float:
        """Largest change of a log-probability that is rounding."""
        return KASA_TOLERANCE if "kasa_config" in self.arguments else REFERENCE_TOLERANCE

    def build(self) -> PeftModel:
        """Build a new adapter of this kind on the tiny base, the same one each time."""
        base = tiny_base()
        targets: dict[str, Any] = {"target_modules": list(LINEAR)} if self.targets else {}
        if self.mixes:
            base.config.use_cache = False
            targets["adapters"] = {str(number): str(_saved_lora(number)) for number in range(self.mixes)}
        torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = get_peft_model(base, self.config(**{"task_type": "CAUSAL_LM", **targets, **self.arguments}))
        if self.beside is not None:
            self.beside(adapted)
        return adapted


def _train_norms(adapted: PeftModel) -> None:
    for name, parameter in adapted.named_parameters():
        if "layernorm" in name:
            parameter.requires_grad_(True)


def _lora(beside: Beside | None = None, **arguments: Any) -> Kind:
    return Kind(LoraConfig, {"r": 4, "lora_dropout": 0.0, **arguments}, beside=beside)


def _kind(name: str, *, targets: bool = True, **arguments: Any) -> Kind:
    return Kind(getattr(peft, name), arguments, targets)


KINDS: dict[str, Kind] = {
    "LORA": _lora(),
    "LORA, every linear layer": _lora(target_modules="all-linear"),
    "LORA, dropout": _lora(lora_dropout=0.1),
    "LORA, rank-stabilised": _lora(use_rslora=True),
    "LORA, DoRA": _lora(use_dora=True),
    "LORA, aLoRA": _lora(alora_invocation_tokens=[INVOCATION]),
    "LORA, layer_replication": _lora(layer_replication=[(0, 2), (1, 2)]),
    "LORA, PiSSA": _lora(init_lora_weights="pissa"),
    "LORA, OLoRA": _lora(init_lora_weights="olora"),
    "LORA, random start": _lora(init_lora_weights=False),
    "LORA, bias: all": _lora(bias="all"),
    "LORA, lora_bias": _lora(lora_bias=True),
    "LORA, modules_to_save": _lora(modules_to_save=["lm_head"]),
    "LORA, norms to save": _lora(modules_to_save=["input_layernorm", "norm"]),
    "LORA, trainable tokens": _lora(trainable_token_indices=[5, 6, 7]),
    "LORA, embeddings": _lora(target_modules=["embed_tokens", "q_proj"]),
    "LORA, norms trained beside": _lora(beside=_train_norms),
    "LORA, VeLoRA": _lora(velora_config={"num_groups": 4}),
    "LORA, MonteCLoRA": _lora(monteclora_config=peft.MontecloraConfig()),
    "LORA, KaSA": _lora(kasa_config=peft.KasaConfig()) if hasattr(peft, "KasaConfig") else _lora(),
    "ADALORA": _kind("AdaLoraConfig", total_step=10),
    "ADAMSS": _kind("AdamssConfig", r=8, num_subspaces=2, subspace_rank=1),
    "ADAPTION_PROMPT": _kind("AdaptionPromptConfig", targets=False, adapter_len=4, adapter_layers=2),
    "BEFT": _kind("BeftConfig", target_modules=["v_proj"]),
    "BOFT": _kind("BOFTConfig", boft_block_size=4),
    "C3A": _kind("C3AConfig", block_size=4),
    "CARTRIDGE": _kind("CartridgeConfig", targets=False, num_virtual_tokens=4),
    "CPT": _kind(
        "CPTConfig", targets=False, cpt_token_ids=[4, 5, 6], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3]
    ),
    "DEFT": _kind("DeftConfig", r=4),
    "DELORA": _kind("DeloraConfig", r=4),
    "FOURIERFT": _kind("FourierFTConfig", n_frequency=50),
    "FROD": _kind("FrodConfig", progressbar=False),
    "GLORA": _kind("GloraConfig", r=4),
    "GRALORA": _kind("GraloraConfig", r=4, gralora_k=2),
    "HIRA": _kind("HiraConfig", r=4),
    "HRA": _kind("HRAConfig", r=4),
    "IA3": _kind("IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LILY": _kind("LilyConfig", r=4, num_B=2),
    "LN_TUNING": _kind("LNTuningConfig", target_modules=["input_layernorm", "norm"]),
    "LOHA": _kind("LoHaConfig", r=4),
    "LOKR": _kind("LoKrConfig", r=4),
    "MISS": _kind("MissConfig", r=4),
    "MULTITASK_PROMPT_TUNING": _kind(
        "MultitaskPromptTuningConfig", targets=False, num_virtual_tokens=4, num_tasks=2, prompt_tuning_init="RANDOM"
    ),
    "OFT": _kind("OFTConfig", oft_block_size=4),
    "OSF": _kind("OSFConfig", effective_rank=4),
    "PEANUT": _kind("PeanutConfig", r=4),
    "POLY": _kind("PolyConfig", r=4, n_tasks=1, n_skills=2),
    "PREFIX_TUNING": _kind("PrefixTuningConfig", targets=False, num_virtual_tokens=4),
    "PROMPT_TUNING": _kind("PromptTuningConfig", targets=False, num_virtual_tokens=4),
    "PSOFT": _kind("PsoftConfig", r=4),
    "PVERA": _kind("PveraConfig", r=8),
    "P_TUNING": _kind("PromptEncoderConfig", targets=False, num_virtual_tokens=4, encoder_hidden_size=8),
    "RANDLORA": _kind("RandLoraConfig", r=4),
    "ROAD": _kind("RoadConfig", group_size=8),
    "SHADOW": _kind("ShadowConfig", targets=False, r=4, shadow_dropout=0.0),
    "SHIRA": _kind("ShiraConfig", r=2),
    "SUPERTUNING": _kind("SupertuningConfig"),
    "TINYLORA": _kind("TinyLoraConfig", r=2, u=8),
    "TRAINABLE_TOKENS": _kind("TrainableTokensConfig", targets=False, token_indices=[5, 6, 7]),
    "UNILORA": _kind("UniLoraConfig", r=4, theta_d_length=64),
    "VBLORA": _kind("VBLoRAConfig", r=4, num_vectors=8, vector_length=16, topk=2),
    "VERA": _kind("VeraConfig", r=8),
    "WAVEFT": _kind("WaveFTConfig", n_frequency=50),
    "XLORA": Kind(peft.XLoraConfig, {"hidden_size": 32, "xlora_dropout_p": 0.0}, targets=False, mixes=2),
}
"""By name; each of PEFT's types is there under its own, and some of LoRA's variants."""


def missing() -> set[str]:
    """PEFT's types that no row covers."""
    covered = {kind.config for kind in KINDS.values()}
    return {str(kind.value) for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items() if config not in covered}


def tiny_base() -> PreTrainedModel:
    """Two layers of Llama; a configuration that PEFT and TRL find everything in."""
    base = model(LlamaConfig, tie_word_embeddings=False)
    base.name_or_path = "tiny"
    return base


@functools.cache
def _saved_lora(number: int) -> Path:
    """Return the folder of a LoRA adapter whose weights have moved."""
    policy = KINDS["LORA"].build()
    move(policy, seed=number)
    folder = Path(tempfile.mkdtemp())
    policy.save_pretrained(folder)
    return folder


def recording() -> Recording:
    """Uneven prompts that hold the invocation token, and completions."""
    found = Recording.random(prompts=4, group=3, seed=3)
    return Recording(
        [[*prompt[:1], INVOCATION, *prompt[1:]] for prompt in found.prompts], found.completions, found.rewards
    )


@dataclass
class Row:
    """Result for one kind."""

    name: str
    layout: str = ""
    gradient: float | None = None
    """The largest difference to TRL's over the tensor's largest entry, new and after a step."""
    references: dict[str, str] = field(default_factory=dict)
    """By situation: new, continued, resumed."""
    note: str = ""
    is_random: bool = False
    """True if TRL's own gradient differs from seed to seed."""

    @property
    def wrong(self) -> bool:
        """Return True if something differs and no message said so."""
        off = self.gradient is not None and not self.gradient <= GRADIENT_TOLERANCE
        return off or any(found.startswith(("wrong", "error")) for found in (self.layout, *self.references.values()))

    def __str__(self) -> str:
        gradient = "random" if self.is_random else "" if self.gradient is None else f"{self.gradient:.1e}"
        cells = [self.name, self.layout, gradient, *(self.references.get(key, "") for key in SITUATIONS), self.note]
        return "| " + " | ".join(cells) + " |"


SITUATIONS = ("new", "continued", "resumed")
HEADER = (
    "| adapter | layout | distance from TRL's gradient | reference, new | continued | resumed | warnings |\n"
    "|---|---|---|---|---|---|---|"
)


def trainer(cls: type[TRLGRPOTrainer], policy: PeftModel, folder: Path, **config: Any) -> TRLGRPOTrainer:
    """Build a trainer of the adapter on the recorded completions."""
    settings: dict[str, Any] = {
        "logging_strategy": "no",
        "num_generations": 3,
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "learning_rate": 1e-2,
        "disable_dropout": False,
        "reference": "initial",
        **config,
    }
    recorded = recording()
    rows = recorded.dataset()
    made = make_trainer(cls, policy, folder, rewards=recorded_reward, rows=rows, tokenizer=tokenizer(), **settings)
    made.rollout_func = recorded.rollout
    return made


def move(policy: PeftModel, seed: int = 7) -> None:
    """Change every trained weight, in place of optimizer steps."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(policy.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def steps(made: TRLGRPOTrainer, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return the gradients of two optimizer steps: of the initial adapter, and of a moved one."""
    rows, found = recording().rows(), []
    made.model.train()
    made.current_gradient_accumulation_steps = 2
    for micro_step in range(4):
        torch.manual_seed(seed + micro_step // 2)
        inputs = made._prepare_inputs(rows)
        made.compute_loss(made.model, inputs).backward()
        made._step += 1
        if micro_step % 2:
            named = made.model.named_parameters()
            found.append({name: p.grad.clone() for name, p in named if p.grad is not None})
            made.model.zero_grad()
            move(made.model)
    return found


def gradient(kind: Kind, row: Row, folder: Path) -> None:
    """Fill in the layout and the distance of the gradient from TRL's."""
    try:
        theirs, again = (steps(trainer(TRLGRPOTrainer, kind.build(), folder, beta=0.0), seed) for seed in (0, 9))
    except Exception as error:  # whatever it is, it is not ours
        row.layout, row.note = "n/a", f"TRL: {type(error).__name__}: {_short(error)}"
        return
    try:
        ours = trainer(GRPOTrainer, kind.build(), folder, beta=0.0)
        gap = largest_gap(steps(ours), theirs)
    except UserError as error:
        row.layout, row.note = "refused", _short(error)
        return
    (layout,) = ours._log_probs._layouts.values()
    row.layout, row.note = layout.name.lower(), "; ".join(sorted(ours._log_probs._check.announcer.keys))
    # Where TRL's own gradient follows random numbers there is no distance, and a prompt must not be shared.
    row.is_random = gap > GRADIENT_TOLERANCE and largest_gap(again, theirs) > GRADIENT_TOLERANCE
    if not row.is_random:
        row.gradient = gap
    elif layout is Layout.PACKED:
        row.layout = "wrong: packed, and its gradient is of random numbers or of the rows beside"


def scores(made: GRPOTrainer, policy: Any) -> Tensor:
    """Log-probabilities of the recorded completions, without the noise of training."""
    rows = []
    recorded = recording()
    for prompt, group in zip(recorded.prompts, recorded.completions, strict=True):
        rows += [(prompt, completion) for completion in group]
    width = max(len(prompt) for prompt, _ in rows)
    ids = torch.full((len(rows), width + MAX_COMPLETION_LENGTH), EOS)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(rows):
        place = slice(width - len(prompt), width + len(completion))
        ids[row, place], mask[row, place] = torch.tensor([*prompt, *completion]), 1
    policy.eval()
    with torch.no_grad():
        return made._trl_log_probs(policy, Rows(ids, mask, MAX_COMPLETION_LENGTH), False)[0]


def reference_scores(made: GRPOTrainer) -> Tensor:
    """Return the scores of the reference."""
    with reference_in(made) as found:
        return scores(made, found)


def _gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def held(made: GRPOTrainer, initial: Tensor, tolerance: float) -> str:
    """Check that the reference is the initial policy, and still is after the policy has moved."""
    built = _gap(scores(made, made.model), initial)
    if built > tolerance:
        return f"wrong: building the trainer moved the policy by {built:.1e}"
    at_first = _gap(reference_scores(made), initial)
    move(made.model)
    later = _gap(reference_scores(made), initial)
    moved = _gap(scores(made, made.model), initial)
    if moved < tolerance:
        return "wrong: the policy does not move"
    return "right" if max(at_first, later) <= tolerance else f"wrong: {at_first:.1e}, then {later:.1e}"


def before(policy: PeftModel, folder: Path) -> Tensor:
    """Return the scores of a policy whose trainer has no reference."""
    return scores(made := trainer(GRPOTrainer, policy, folder, beta=0.0), made.model)


def new(kind: Kind, folder: Path) -> str:
    """Check a new adapter."""
    initial = before(kind.build(), folder)
    return held(trainer(GRPOTrainer, kind.build(), folder, beta=0.04), initial, kind.tolerance)


def saved(kind: Kind, folder: Path) -> Path:
    """Return the folder of an adapter that has moved."""
    policy = kind.build()
    move(policy, seed=11)
    policy.save_pretrained(folder / "adapter")
    return folder / "adapter"


def loaded(where: Path) -> PeftModel:
    """Load the adapter in a folder for training."""
    torch.manual_seed(1)
    return PeftModel.from_pretrained(tiny_base(), where, is_trainable=True)


def continued(kind: Kind, folder: Path) -> str:
    """Check an adapter that is loaded and trained on."""
    where = saved(kind, folder)
    try:
        policy = loaded(where)
    except Exception as error:
        return f"n/a: PEFT: {type(error).__name__}: {_short(error)}"
    if kind.beside is not None:
        kind.beside(policy)
    initial = before(policy, folder)
    policy = loaded(where)
    if kind.beside is not None:
        kind.beside(policy)
    return held(trainer(GRPOTrainer, policy, folder, beta=0.04), initial, kind.tolerance)


def resumed(kind: Kind, folder: Path) -> str:
    """Check a run of a new adapter, stopped after a step and resumed: its reference is still the initial policy."""
    initial = before(kind.build(), folder)
    saving = {"save_strategy": "steps", "save_steps": 1, "beta": 0.04, "num_iterations": 1}
    trainer(GRPOTrainer, kind.build(), folder / "run", max_steps=1, **saving).train()
    made = trainer(GRPOTrainer, kind.build(), folder / "run", max_steps=2, **saving)
    made.train(resume_from_checkpoint=True)
    gap = _gap(reference_scores(made), initial)
    return "right" if gap <= kind.tolerance else f"wrong: {gap:.1e}"


def examine(name: str, situations: Iterable[str] = SITUATIONS) -> Row:
    """All that the table says of one kind."""
    row, kind = Row(name), KINDS[name]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gradient(kind, row, Path(folder) / "gradient")
        if row.layout == "n/a":
            return row
        for situation in situations:
            try:
                row.references[situation] = globals()[situation](kind, Path(folder) / situation)
            except UserError as error:
                row.references[situation] = f"refused: {_short(error)}"
            except Exception as error:
                row.references[situation] = f"error: {type(error).__name__}: {_short(error)}"
    return row


def _short(error: Exception) -> str:
    return one_line(error)[:160].replace("|", "/")


def table(rows: list[Row]) -> list[str]:
    """Return the lines of docs/adapter-layouts.md below its heading "Results"."""
    versions = f"peft {peft.__version__}, trl {trl.__version__}, transformers {transformers.__version__}"
    return [f"{versions}. {verdict(rows)}.", "", HEADER, *map(str, rows)]


def verdict(rows: list[Row]) -> str:
    """Return the number of adapters and the names of the wrong ones."""
    wrong = [row.name for row in rows if row.wrong]
    return f"{len(rows)} adapters, {len(wrong)} wrong{': ' if wrong else ''}{', '.join(wrong)}"


def main() -> int:
    """Examine the asked adapters, print them, and write the table if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="adapters, all by default")
    parser.add_argument("--record", type=Path, help="a page for the table")
    asked = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = []
    for name in asked.names or KINDS:
        rows.append(examine(name))
        print(rows[-1], flush=True)
    if asked.record:
        renew(asked.record, table(rows))
    print(verdict(rows))
    return int(any(row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
