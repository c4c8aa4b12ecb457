"""Training and preview of a recipe, from its command line to the exit code.

`train` holds the flow. `prepare` checks the recipe, builds its `inputs` and compares it with the launch that it
resumes, `build` makes the trainer, `describe` prints and records the run, and `endings` ends it. `launcher` starts the
processes of `grpo-recipes train`, `live_line` shows their progress, and `preview` samples the untrained policy.
"""
