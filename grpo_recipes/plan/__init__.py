"""What a recipe will do on a machine, without running it: `init` and `plan`."""
