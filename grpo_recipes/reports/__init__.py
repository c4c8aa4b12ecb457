"""Reading a run's files, diagnosing the run, and reporting on it."""
