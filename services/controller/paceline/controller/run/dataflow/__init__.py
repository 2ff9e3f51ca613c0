"""The dataflow of a step: the verbs that it is written in, who leads it, and its trial before the run."""
