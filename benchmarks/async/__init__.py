"""Why: what it costs to have gradients meet at servers, and what it gains where workers are of unequal speed.

The folder's name is a word of the language, so its modules are run by name (`python -m benchmarks.async.servers`), and
do not import each other.
"""
