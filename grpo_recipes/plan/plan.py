"""Plan of a recipe on a machine: batch geometry, epoch, prompts, precision and memory, without loading weights."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.checks import packages
from grpo_recipes.checks.checks import (
    Checked,
    Machine,
    check,
    check_model_exists,
    dry_config,
    model_positions,
    optimizer_name,
    precision_of,
)
from grpo_recipes.checks.geometry import Geometry, geometry_of
from grpo_recipes.checks.precision import Precision, initial_weights
from grpo_recipes.checks.rewards import describe_rewards, prefilled_notes
from grpo_recipes.checks.tools import Toolset, load_toolset
from grpo_recipes.data.sources import DatasetUnreachable
from grpo_recipes.plan import memory
from grpo_recipes.plan.activations import Activations, NotMeasured
from grpo_recipes.plan.layout import ExpectedLayout, expected_layout, without_dropout
from grpo_recipes.plan.prompts import PromptReport, prompt_report
from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_recipes.recipe.recipe import (
    Recipe,
    RecipeError,
    find_file,
    model_config,
    parse_recipe,
    resolved,
    shipped_files,
)
from grpo_recipes.recipe.trl_keys import cautions, ignored_keys
from grpo_recipes.training.layout_rules import text_config
from grpo_recipes.training.log_probs import MAX_PACKED_SHARE
from grpo_recipes.training.packing import Layout
from grpo_rewards.composed import leaves
from grpo_rewards.files import relative_to
from grpo_rewards.redaction import redacted
from grpo_rewards.registry import BuiltReward, UnbuiltReward
from grpo_rewards.reward_model import RewardModelScore
from grpo_rewards.terminal import WIDTH, Cell, Labelled, Part

_SPREAD = 0.02  # standard deviation of freshly drawn weights, unless the configuration sets it
_TEXT = len("  optimizer step  ")  # width of a label, after which the text of a line begins


@dataclass(frozen=True)
class Plan:
    """Plan of a recipe on a machine.

    Attributes:
        recipe: Recipe as resolved.
        geometry: Batch geometry.
        rewards: Rewards with their weights.
        prompts: Number of training prompts, or the reason why it is unknown.
        layout: Layout that the micro-batches are expected to get, or None if the model's configuration is unknown.
        tokens: Most tokens of a micro-batch with padding, in the expected layout (`micro_batch`) and in TRL's rows
            (`padded`). Empty if the layout is not given.
        memory: Estimate of the memory of a GPU, the reason why it is unknown, or None if the recipe trains on a CPU.
        precision: Dtypes and optimizer.
        surviving: Share of an update that survives rounding, in [0, 1], or None if it is not known.
        notes: Sentences on probable mistakes and on what was assumed.
        shown: First prompt and the lengths of all, or None if the dataset can't be reached.
        toolset: Tools and environments, or None without any.
    """

    recipe: Recipe
    geometry: Geometry
    rewards: Sequence[BuiltReward]
    prompts: int | str
    layout: ExpectedLayout | None
    tokens: Mapping[str, int]
    memory: memory.MemoryPlan | str | None
    precision: Precision
    surviving: float | None
    notes: Sequence[str]
    shown: PromptReport | None
    toolset: Toolset | None = None

    def describe(self) -> list[Part]:
        """Return the plan for the terminal."""
        config = self.recipe.config
        if isinstance(self.prompts, int):
            epoch = self.geometry.describe_epoch(self.prompts, config.max_completion_length)
        else:
            epoch = f"  epoch           unknown: {self.prompts}"
        rewards = f"  rewards         {describe_rewards(self.rewards)}"
        precision = self.precision.describe(self.surviving)
        tools = []
        if self.toolset is not None:
            tools.append(f"  tools           {self.toolset.describe(config.max_tool_calling_iterations)}")
        head, prompt = self.shown.describe(self.recipe.dataset) if self.shown else ([], [])
        need: list[Part] = []
        if self.memory is not None:
            need.append(Cell("  memory of one GPU", "head"))
            if isinstance(self.memory, memory.MemoryPlan):
                need += memory.describe(self.memory)
            else:
                need.append(Labelled("memory", f"unknown: {self.memory}"))
        return [
            Cell(self.recipe.source, "head"),
            *_labelled([rewards, *tools, precision, self.geometry.describe(), epoch, *self._describe_layout(), *head]),
            *prompt,
            "",
            *need,
            *(Labelled("note", note) for note in self.notes),
        ]

    def _describe_layout(self) -> list[str]:
        if self.layout is None or not self.tokens:
            return []
        tokens = f"at most {self.tokens['micro_batch']:,} in a micro-batch"
        if self.tokens["micro_batch"] != self.tokens["padded"]:
            tokens += f" ({self.tokens['padded']:,} in TRL's rows)"
        return [f"  layout          {self.layout.describe()}", f"  tokens          {tokens}"]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for `--json`, sizes in bytes. Unknown values are null, and `unknown` lists the reasons."""
        longest = self.recipe.config.max_completion_length
        return {
            "recipe": self.recipe.source,
            "geometry": self.geometry.as_dict(),
            **({"tools": [tool.name for tool in self.toolset.all_tools]} if self.toolset else {}),
            "epoch": self.geometry.epoch(self.prompts, longest) if isinstance(self.prompts, int) else None,
            "prompts": self.shown.as_dict() if self.shown else None,
            "layout": self.layout.as_dict() if self.layout else None,
            "tokens": self.tokens or None,
            "memory": memory.as_dict(self.memory) if isinstance(self.memory, memory.MemoryPlan) else None,
            "precision": {**asdict(self.precision), "updated": self.precision.updated, "surviving": self.surviving},
            "unknown": [reason for reason in (self.prompts, self.memory) if isinstance(reason, str)],
            "notes": list(self.notes),
        }


def plan(
    arguments: Sequence[str],
    *,
    accelerate_config: str | None = None,
    num_processes: int | None = None,
    gpu_memory: str | None = None,
    model_config_file: str | None = None,
    build: bool = False,
    options: Sequence[str] = (),
) -> Plan:
    """Plan a recipe.

    Args:
        arguments: Arguments of the training command, which name the recipe.
        accelerate_config: Name or path of an accelerate configuration, or None for this machine.
        num_processes: Number of processes, or None for that of the machine.
        gpu_memory: Memory of one GPU, such as `80GB`.
        model_config_file: Path of the model's config.json if the hub can't be reached.
        build: True to call classes and factories among the rewards of other packages, as training does. Otherwise they
            are only imported.
        options: Options of the command itself, for which an unknown argument may be a misspelling.

    Raises:
        UserError: The recipe can't run as written, or an option is wrong.
    """
    if model_config_file is not None and not Path(model_config_file).exists():
        problem = f"there is no such file{relative_to(model_config_file)}"
        raise RecipeError(f"--model_config {model_config_file}", problem, "give a model's config.json")
    usable = memory.parse_size(gpu_memory) if gpu_memory is not None else None
    recipe = parse_recipe(arguments, options)
    if model_config_file is None and not _model_is_made_elsewhere(recipe):
        check_model_exists(recipe)
    if accelerate_config is None:
        with recipe.naming_this_file():
            for error in packages.missing_optimizer(recipe.config):
                raise error
    described = find_file("accelerate_configs", accelerate_config) if accelerate_config is not None else None
    machine = Machine.described(described) if described is not None else Machine.here()
    if num_processes is not None:
        machine = replace(machine, num_processes=num_processes)
    # Geometry and rewards are planned even if the dataset can't be reached, so `check` comes after them.
    geometry = geometry_of(recipe, machine.num_processes)
    trl_config = dry_config(recipe, machine)
    rewards = recipe.build_rewards(call_factories=build)
    with recipe.naming_this_file():
        toolset = load_toolset(recipe)
    if toolset is not None:
        rewards = [*rewards, *toolset.rewards()]
    lacking = [*packages.missing(recipe.config), *packages.missing_quantization(recipe.model)]
    notes = [*cautions(recipe.config, recipe.model), *map(str, lacking), *_unbuilt(rewards)]
    prompts: int | str
    try:
        checked = check(recipe, machine, call_factories=build)
        prompts = len(checked.train_dataset)
        shown = _checked_prompts(recipe, checked, notes)
    except DatasetUnreachable as error:
        prompts, shown = str(error), None
    expected, tokens = None, {}
    estimate: memory.MemoryPlan | str | None = None
    spread = _SPREAD
    trains_on_cpu = recipe.config.use_cpu and gpu_memory is None
    try:
        layout = memory.Sharding.described(described) if described is not None else memory.Sharding()
        layout = replace(layout, num_processes=machine.num_processes)
        longest, length_notes = _longest_prompt(recipe, shown)
        padded = _padded(recipe, machine, geometry, layout, usable, model_config_file, longest)
        padded = replace(padded, reward_parameters=_reward_parameters(rewards, notes))
        model = padded.activations.model
        spread = getattr(text_config(model), "initializer_range", None) or _SPREAD
        # Dropout that the run switches off still counts in its memory, as an upper limit.
        with without_dropout(model) if recipe.config.disable_dropout else nullcontext():
            most = longest + recipe.config.max_completion_length
            expected = expected_layout(recipe, trl_config, model, layout.sharding, most)
        notes += [*length_notes, *_stored_notes(recipe, model), *expected.notes()]
        planned = _in_layout(recipe, geometry, padded, expected.layout)
        tokens = {"micro_batch": planned.micro_batch().tokens, "padded": padded.micro_batch().tokens}
        if not trains_on_cpu:
            estimate = planned
            if padded.peak() > planned.peak():
                notes.append(f"a run that warns of trimmed or padded rows needs up to {memory.gib(padded.peak())}")
    except memory.MemoryUnknown as error:
        estimate = None if trains_on_cpu else str(error)
    except NotMeasured as error:
        kind = expected.model_type if expected is not None else "this model"
        estimate = f"{kind} can't run without data, so its memory is not predicted ({error})"
    precision = precision_of(recipe, machine)
    surviving = precision.surviving(initial_weights(spread))
    if warning := precision.warning(surviving):
        notes.append(warning)
    return Plan(
        recipe, geometry, rewards, prompts, expected, tokens, estimate, precision, surviving, notes, shown, toolset
    )


def _model_is_made_elsewhere(recipe: Recipe) -> bool:
    """Return True for a shipped recipe with its own model, which another command may have to make first."""
    is_shipped = Path(recipe.source) in shipped_files("recipes").values()
    return is_shipped and not any(word.startswith("--model_name_or_path") for word in recipe.arguments)


def _checked_prompts(recipe: Recipe, checked: Checked, notes: list[str]) -> PromptReport:
    """Return the report on the prompts. Add what is to be known of golds, tags and sampling to `notes`."""
    shown = prompt_report(recipe, checked.train_dataset, checked.toolset)
    # A sample may miss the longest prompt: training measures all of them again.
    longest = shown.lengths.longest_trained(recipe.dataset) if shown.lengths else None
    if longest is not None:
        with recipe.naming_this_file():
            packages.check_vllm_lengths(recipe.config, longest)
    if checked.golds:
        notes.append(checked.golds.describe())
    notes += checked.gold_notes
    if shown.unknown is None:
        notes += prefilled_notes(checked.rewards, shown.text)
    if checked.eval_dataset is None and recipe.dataset.eval_share is not None:
        share = f"{recipe.dataset.eval_share:.0%}"
        notes.append(
            f"about {share} of the rows are held out, and no evaluation reads them: set `eval_strategy: steps`"
        )
    notes += _position_notes(recipe, longest or 0)
    return shown


def _position_notes(recipe: Recipe, longest: int) -> list[str]:
    """Return a note if the longest prompt and completion have more tokens than the model has positions."""
    positions = model_positions(recipe)
    needed = longest + recipe.config.max_completion_length
    if positions is None or needed <= positions:
        return []
    return [
        f"`max_completion_length` {recipe.config.max_completion_length:,} after a prompt of {longest:,} tokens needs "
        f"{needed:,} positions, and the model was made for {positions:,} (`max_position_embeddings`): lower it"
    ]


def resolved_yaml(arguments: Sequence[str], options: Sequence[str] = ()) -> str:
    """Return a recipe as YAML, with TRL's default for every key that is missing and has an effect.

    Args:
        arguments: Arguments of the training command, which name the recipe.
        options: Options of the command itself, for which an unknown argument may be a misspelling.

    Raises:
        RecipeError: A key or its value is wrong.
    """
    recipe = parse_recipe(arguments, options)
    ignored = ignored_keys(recipe.config.loss_type)
    values = {key: value for key, value in resolved(recipe.as_dict()).items() if key not in ignored}
    return yaml.safe_dump(redacted(values), sort_keys=False, allow_unicode=True)


def shipped_recipes() -> str:
    """Return the names of the shipped recipes, each with the first sentence of its head."""
    lines = ["The shipped recipes; `grpo-recipes plan NAME` describes one of them."]
    for name, file in shipped_files("recipes").items():
        head = file.read_text(encoding="utf-8").partition("\n#\n")[0]
        text = " ".join(line.removeprefix("#").strip() for line in head.splitlines() if line.startswith("#"))
        sentence = re.split(r"(?<!\bDr)\.(?=\s|$)", text)[0]
        lines += ["", f"  {name}", *textwrap.wrap(sentence, WIDTH, initial_indent="    ", subsequent_indent="    ")]
    return "\n".join(lines)


def _labelled(texts: Sequence[str]) -> list[Part]:
    """Return lines of `  label  text` as labels with texts."""
    lines = [line for text in texts for line in text.split("\n")]
    return [Labelled(line[:_TEXT].strip(), line[_TEXT:]) for line in lines]


def _padded(
    recipe: Recipe,
    machine: Machine,
    geometry: Geometry,
    layout: memory.Sharding,
    gpu_memory: float | None,
    model_config_file: str | None,
    prompt_tokens: int,
) -> memory.MemoryPlan:
    """Return the estimate of the memory in TRL's rows.

    Raises:
        MemoryUnknown: The layout or the model is not covered by the estimate, or can't be read.
    """
    arguments, config = model_config(recipe), recipe.config
    quantised = memory.quantised_bytes(arguments)
    if quantised is not None and layout.sharding != "none":
        problem = "it is estimated only if each GPU holds all of it"
        raise memory.MemoryUnknown("a quantised model", problem, "give `--accelerate_config single_gpu` or `ddp`")
    shape, model = memory.policy_model(recipe, model_config_file)
    if quantised is not None and shape.trained == shape.parameters:
        problem = "it can only be trained with an adapter"
        raise memory.MemoryUnknown("a quantised model", problem, "set `use_peft: true`")
    return memory.MemoryPlan(
        shape=shape,
        activations=Activations(model),
        layout=layout,
        config=config,
        rows=config.per_device_train_batch_size,
        steps_per_generation=geometry.steps_per_generation,
        prompt_tokens=prompt_tokens,
        dtype_bytes=4 if arguments.dtype in (None, "float32") else 2,
        optim=optimizer_name(recipe, machine),
        gpu_memory=gpu_memory,
        quantised_bytes=quantised,
        keeps_turns=bool(recipe.tools or recipe.environment_factory) and recipe.generation != "off",
        decodes_groups=recipe.generation != "off",
        full_kl=recipe.kl_estimator == "full",
    )


def _stored_notes(recipe: Recipe, model: Any) -> list[str]:
    """Return a note on a checkpoint in few bits, such as gpt-oss's MXFP4."""
    stored = getattr(model.config, "quantization_config", None)
    if not stored:
        return []
    kind = stored["quant_method"] if isinstance(stored, Mapping) else stored.quant_method
    dtype = model_config(recipe).dtype or "float32"
    return [f"the checkpoint is stored in {kind}: memory counts its weights as {dtype}"]


def _longest_prompt(recipe: Recipe, shown: PromptReport | None) -> tuple[int, list[str]]:
    """Return the tokens of the longest prompt, and a note if they are not those of all prompts."""
    lengths, limit = shown.lengths if shown else None, recipe.dataset.max_prompt_tokens
    longest = lengths.longest_trained(recipe.dataset) if lengths else None
    if lengths is None or longest is None:
        if limit is not None:
            return limit, []
        assumed = memory.ASSUMED_PROMPT_TOKENS
        return assumed, [f"prompts are taken to have {assumed} tokens: `dataset.max_prompt_tokens` sets a limit"]
    if not lengths.is_sample or longest == limit:
        return longest, []
    return longest, [
        f"memory is that of the longest prompt of a sample, {longest:,} tokens, and of {lengths.rows:,} prompts others "
        "may be longer: `dataset.max_prompt_tokens` sets a limit"
    ]


def _in_layout(
    recipe: Recipe, geometry: Geometry, padded: memory.MemoryPlan, layout: Layout | None
) -> memory.MemoryPlan:
    """Return the estimate of the rows of the expected layout."""
    if layout is None or not layout.shares_prompts or not _keeps_groups_together(recipe, geometry):
        return padded
    # Rows are sorted by prompt, and each micro-batch takes the next ones. It may begin and end inside a group.
    rows, group = padded.rows, geometry.num_generations
    prompts = math.ceil((rows - math.gcd(rows, group)) / group) + 1
    shared = replace(padded, prompts=prompts, rows_as=layout)
    # Training packs no row that is hardly shorter for it.
    saves = shared.micro_batch().tokens <= MAX_PACKED_SHARE * padded.micro_batch().tokens
    return shared if saves else padded


def _keeps_groups_together(recipe: Recipe, geometry: Geometry) -> bool:
    """Return True if rows may move between all micro-batches of a generation batch, so that groups stay together.

    Otherwise the number of prompts in a micro-batch, and with it its memory, is not known.
    """
    config, loss = recipe.config, LOSS_TYPES.get(recipe.config.loss_type)
    if loss is None or loss.counts_other_rows:
        return False
    if config.entropy_coef != 0 or config.use_adaptive_entropy or config.top_entropy_quantile < 1:
        return False  # statistics of one micro-batch
    if geometry.splits_groups or geometry.num_generations == 1:
        return False
    return geometry.gradient_accumulation_steps % geometry.steps_per_generation == 0


def _unbuilt(rewards: Sequence[BuiltReward]) -> list[str]:
    """Return a note on the rewards that were only imported, and so not checked as training checks them."""
    names = [f"`{leaf.name}`" for leaf in leaves(rewards) if isinstance(leaf.unbound, UnbuiltReward)]
    if not names:
        return []
    return [f"of another package, imported and not built: {', '.join(names)}; `--build` builds them, as training does"]


def _reward_parameters(rewards: Sequence[BuiltReward], notes: list[str]) -> int:
    """Return the parameters of reward models on the training GPU, all of which every process holds."""
    total = 0
    functions = [leaf.unbound for leaf in leaves(rewards)]
    for model in {one.model for one in functions if isinstance(one, RewardModelScore) and one.device != "cpu"}:
        try:
            total += memory.load_model(model)[0].parameters
        except memory.MemoryUnknown:
            notes.append(f"the reward model {model} is not counted: its configuration can't be read here")
    return total
