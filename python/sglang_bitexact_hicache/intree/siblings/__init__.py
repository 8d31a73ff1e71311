"""The in-tree form of the modules of the same names one level up, and the seam points that only it has.

Nothing of the plugin imports these; landing.py puts them in place.
"""
