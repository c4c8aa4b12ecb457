"""Imports what a run imports, but leaves the modules that are run as `__main__` to their processes; for `forking`."""

import importlib.util
import sys

import grpo_recipes
import grpo_recipes.train

# Else `runpy` warns that the module which it is to run is there already.
del sys.modules["grpo_recipes.train"], grpo_recipes.train

if importlib.util.find_spec("deepspeed"):
    import deepspeed

    # Not looked for, so not compiled, for a minute in every new folder of extensions: only inference calls them.
    deepspeed.ops.__compatible_ops__ = {}
