"""Processes of a run, as far as every room may need to know of them. This room is the lowest level of the package.

- `signals`: Ctrl-C during imports, and closed terminals. It imports no library.
- `ranks`: rank of this process, and collective calls on plain values.
- `messages`: log messages and printed lines, each once.
- `faults`: errors of a run whose message is complete without the name of their class.

How processes are launched, show their progress and end belongs to `grpo_recipes.run`, which only commands import.
"""
