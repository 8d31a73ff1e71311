"""Bit-exact prefix reuse for DeepSeek-V4 on SGLang's unified_kv backend with HiCache.

SGLang finds the plugin by its entry point (plugin.py); nothing is imported from here. Which module does
what: docs/architecture.md.
"""
