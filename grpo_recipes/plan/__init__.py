"""Plan of a recipe on a machine, and first recipe for a table: `plan` and `init`."""
