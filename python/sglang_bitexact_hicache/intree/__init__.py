"""`intree`: the same modules, built into a source checkout of SGLang.

What differs between the plugin and the in-tree form is in `siblings/`, which take the places of the
modules of the same names. Needs libcst, isort and black: `pip install sglang-bitexact-hicache[intree]`.
"""
