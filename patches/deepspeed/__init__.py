"""Defects of deepspeed."""
