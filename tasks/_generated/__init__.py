"""Generated samples, for tasks without a data set and for the scripts that write them to files.

Imports nothing of the package, so that a data script needs no more than numpy and Pillow.
"""
