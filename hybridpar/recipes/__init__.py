"""Why: methods that change more of a training than what a gradient travels as; each is useful in anybody's loop.

`onebit_adam` and `adagrad_sgd` are optimizers, `periodic` averages parameters, `batch_search` selects batch sizes,
`gain` predicts what double buffering and more workers gain, `figures` measures what it wants to know, `per_sample`
turns rates per step into rates per sample.
"""
