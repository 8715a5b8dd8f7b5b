"""Run folders -> pictures and one HTML page.

runs     RUN/config.yaml, metrics.jsonl, summary.json -> Run (arrays)
compare  Runs -> rows of numbers: losses, sizes, speed, time to a given loss
domains  checkpoint and held-out text -> which expert the tokens of each domain go to
figures  Runs -> matplotlib figures
page     figures and rows -> PNG files and index.html
"""
