"""The numbers that the whole package shares. Nothing here is a setting.

SGLang's DeepSeek-V4 unified_kv backend fixes the page at 256 tokens and the attention window at 128
(`DeepseekV4HipRadixBackend`); startup refuses anything else (see refusals.py), so these are facts of
the model, not options.
"""

PAGE_SIZE = 256
"""Tokens in a page of the prefix cache; every boundary is a multiple of it."""

WINDOW = 128
"""Positions that the sliding-window attention of a layer sees, the query's own included."""

C4_RATIO = 4
"""Compression ratio of the layers that keep overlap state (the C4 compressor and its indexer)."""

C128_RATIO = 128
"""Compression ratio whose state is empty at every page boundary, because 256 % 128 == 0."""

STATE_ROWS = 4
"""Rows of C4 overlap state that a continuation at a page boundary reads: positions [P - 4, P)."""
