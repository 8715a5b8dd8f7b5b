"""What a run records and shows.

Numbers of one optimizer step flow from the training loop to three places: `jsonl` (every step, the record that reports
and tests read), `wandb_run` (the same points on a step axis of our own) and `console` (what a person watches).
`throughput` turns step times into tokens per second and an ETA, `profiler` traces a window of steps, `summary` writes
the small JSON files of the run folder and `environment` fills one of them.

Only rank 0 records; the null object of each module takes the place of the real one elsewhere.
"""
