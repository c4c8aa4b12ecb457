"""Trains two steps with tools on two ranks, and leaves what each rank generated.

accelerate launch ... -m tests.support.train_tools {ours,trl,sampled,server,colocate,rollout} OUTPUT [SCRIPT]
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer as TRLGRPOTrainer
from trl.generation import vllm_generation

from grpo_recipes import GRPOTrainer
from grpo_recipes.run.endings import leave
from tests.support.tool_rollouts import GROUP, SCRIPTS, Script, next_turns, tool_tokenizer, tool_trainer


class StubServer:
    """The methods of TRL's `VLLMClient` that `VLLMGeneration` calls. It writes the turns of a script.

    Like vLLM, it refuses prompts that leave less than `max_tokens` of its context.
    """

    context = 4096

    def __init__(self, script: Script, **settings: Any):
        self.script, self.tokenizer = script, tool_tokenizer()

    def init_communicator(self, device: Any) -> None: ...

    def update_named_params(self, metadata: Any, named_params: Any) -> None:
        list(named_params)

    def reset_prefix_cache(self) -> None: ...

    def get_server_info(self) -> dict[str, Any]:
        model = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm", "max_model_len": self.context}
        return {"model_config": model}

    def generate(self, prompts: list[list[int]], n: int, max_tokens: int, **sampling: Any) -> dict[str, Any]:
        if max(map(len, prompts)) + max_tokens > self.context:
            raise RuntimeError("Request failed: 400")
        repeated = [prompt for prompt in prompts for _ in range(n)]
        made = next_turns(self.script, self.tokenizer, repeated)
        log_probs = [[[-1.0]] * len(ids) for ids in made]
        return {"prompt_ids": prompts, "completion_ids": made, "logprobs": log_probs}


class StubEngine:
    """A colocated engine as TRL uses it. Under tensor parallelism it gets the prompts of all ranks."""

    def __init__(self, script: Script, **settings: Any):
        self.script, self.tokenizer = script, tool_tokenizer()
        model = SimpleNamespace(load_weights=lambda named: None)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        executor = SimpleNamespace(driver_worker=worker)
        self.llm_engine = SimpleNamespace(
            model_executor=executor, model_config=SimpleNamespace(max_model_len=settings["max_model_len"] or 4096)
        )

    def reset_prefix_cache(self) -> None: ...

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        asked = [row["prompt_token_ids"] for row in prompts]
        answers = []
        for prompt, ids in zip(asked, next_turns(self.script, self.tokenizer, asked), strict=True):
            log_probs = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in ids]
            output = SimpleNamespace(token_ids=ids, logprobs=log_probs)
            answers.append(SimpleNamespace(prompt_token_ids=prompt, outputs=[output]))
        return answers


def make(kind: str, output: str, script: Script) -> Any:
    """Build the trainer of one kind of run. Each rank has one prompt per step."""
    settings: dict[str, Any] = {"per_device_train_batch_size": GROUP, "max_steps": 2, "micro_batching": "auto"}
    if kind in ("server", "colocate"):
        vllm_generation.is_vllm_available = lambda **_: True
        vllm_generation.VLLMClient = partial(StubServer, script)
        vllm_generation.LLM = partial(StubEngine, script)
        vllm_generation.SamplingParams = SimpleNamespace
        settings |= {"use_vllm": True, "vllm_mode": kind, "vllm_importance_sampling_correction": False}
        settings["generation_kwargs"] = None
        if kind == "colocate":
            settings["vllm_tensor_parallel_size"] = 2
        made = tool_trainer(GRPOTrainer, output, generation_check=False, **settings)
        del made._generate_single_turn  # the exactness mode is of transformers' loop
        return made
    if kind == "sampled":
        return tool_trainer(GRPOTrainer, output, max_tool_calling_iterations=3, **settings)
    if kind == "rollout":
        return tool_trainer(GRPOTrainer, output, tools=None, rollout_func=uneven_rollout, **settings)
    return tool_trainer({"ours": GRPOTrainer, "trl": TRLGRPOTrainer}[kind], output, script, **settings)


def uneven_rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Generate once on the first rank and three times on the second."""
    ids, *_ = trainer._tokenize_prompts(prompts)
    for _ in range(1 + 2 * trainer.accelerator.process_index):
        completions, _ = trainer._generate_single_turn(ids, None, {}, trainer.num_generations)
        trainer.calls += 1
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def main(kind: str, output: str, script: str = "ragged") -> None:
    """Train, and leave the weights and what each rank recorded in `output`."""
    torch.set_num_threads(1)
    made = make(kind, output, SCRIPTS[script])
    assert made.accelerator.num_processes == 2
    rank = made.accelerator.process_index
    made.calls, rows = 0, []
    generate = made._generate_single_turn

    def counted(prompts: Any, *rest: Any, **more: Any) -> Any:
        rows.append(len(prompts))
        return generate(prompts, *rest, **more)

    made._generate_single_turn = counted
    compared = getattr(made, "_generation_check", None)
    torch.manual_seed(rank)
    made.train()
    made.save_model(output)
    logged = {name: value for name, value in made.state.log_history[0].items() if name.startswith("tools/")}
    found = {"loops": made.loops, "rows": rows, "calls": made.calls // 2, "logged": logged}
    if compared is not None:
        name = "sampling/sampling_logp_difference/max"
        differences = [entry[name] for entry in made.state.log_history if name in entry]
        found |= {"unfit": compared.reason, "compared": compared.batches, "differences": differences or [0.0]}
        found["kept"] = made._generation.reuse.is_verified
    (Path(output) / f"rank{rank}.json").write_text(json.dumps(found))
    made.accelerator.end_training()
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
