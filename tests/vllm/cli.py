"""`grpo-recipes` with vLLM on a CPU."""

import functools
import os

if __name__ == "__main__":
    from tests.vllm import cpu

    os.environ.update(cpu.ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")

    import vllm

    from grpo_recipes.cli import main

    cpu.replace_in_vllm()
    vllm.LLM = functools.partial(vllm.LLM, enforce_eager=True)
    raise SystemExit(main())
