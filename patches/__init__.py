"""Corrections of upstream defects: one file per defect, applied once and first by the entry points.

    from patches.registry import apply_all
    apply_all()

A defect that a configuration option, a subclass or a hook can avoid is no patch. Importing this package is cheap; the
libraries are imported by `apply_all`.
"""
