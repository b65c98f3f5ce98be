"""Helpers that every room uses: errors, options, processes, atomic writes, tables. They know no models and no tasks.

It may import nothing of the package.
"""
