"""Bodies of the tests of pipelines: stages of one model, torch's schedules, checkpoints of all stages."""
