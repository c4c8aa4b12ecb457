"""Sandbox for programs that a model wrote: `sandbox.run.run(program, stdin, limits) -> outcome`. Linux only.

`run` starts a fresh interpreter on `supervisor`, which confines itself and the program by `confinement`. This file
stays empty, because the supervisor imports it in every run.
"""
