"""Every legal layout of a recipe against one process on the same samples.

recipe -> shrink (same structure, CPU size) -> sampling (which layouts) -> pool of ranks, each running worker.measure
       -> compare with worker.reference -> rows, a table, an exit code
"""
