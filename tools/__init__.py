"""Command-line tools around the recipes; run each as ``python -m tools.NAME --help``."""
