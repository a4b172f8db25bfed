"""A model as the stages of a pipeline: which layers each has, in what order ranks run them, and how they are run."""
