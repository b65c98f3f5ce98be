"""What every room uses: errors, options, processes, whole files, tables. It knows nothing of models or tasks.

It may import nothing of the package.
"""
