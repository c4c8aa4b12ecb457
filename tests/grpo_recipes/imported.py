"""Imports what a run imports, but leaves the modules that are run as `__main__` to their processes; for `forking`."""

import sys

import grpo_recipes
import grpo_recipes.train

# Else `runpy` warns that the module which it is to run is there already.
del sys.modules["grpo_recipes.train"], grpo_recipes.train
