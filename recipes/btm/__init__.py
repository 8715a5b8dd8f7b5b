"""Branch-Train-Merge: experts trained with no communication, then ensembled, averaged, or mixed into a Mixture of Experts.

    arms (what is trained, from the description) -> split, cluster (parts of the data) -> pool (seed, dense control, branches,
    each an ordinary pretraining job) -> ensemble, average, mix (from checkpoints alone) -> score, evaluate, pictures

`stages` keeps what each of them made and why; `pipeline` puts them in order; `__main__` is the command line.
"""
