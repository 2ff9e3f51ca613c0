"""The dataflow of a step: its verbs, its execution, its control by a script, and its trial before the run."""
