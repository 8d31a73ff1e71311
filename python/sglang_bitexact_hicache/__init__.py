"""Bit-exact prefix reuse for DeepSeek-V4 on SGLang's unified_kv backend with HiCache.

Nothing is imported from here. Which module does what: docs/architecture.md.
"""
